"""A turn's text, as it streams, told apart for people: what it thinks, what it says.

Markup never shows: tool calls have events of their own, control tokens are not text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum

__all__ = ["Channel", "Channels"]


class Channel(StrEnum):
    REASONING = "reasoning"
    CONTENT = "content"


_REASONING = ("reason", "think")
_TAG_RE = re.compile(r"</?(?:reason|think|answer|tool_call)>|<\|[a-z_]{1,20}\|>")
_LONGEST_TAG = 24


class Channels:
    """Feed text in any pieces; get it back by channel, less the tags, as soon as it is certain."""

    def __init__(self, *, reasoning: bool) -> None:
        """`reasoning`: whether the generation prompt has opened a thought already."""
        self._channel = Channel.REASONING if reasoning else Channel.CONTENT
        self._in_call = False
        self._held = ""

    def feed(self, text: str) -> Iterator[tuple[Channel, str]]:
        self._held += text
        start = 0
        for match in _TAG_RE.finditer(self._held):
            yield from self._say(self._held[start : match.start()])
            self._switch(match.group())
            start = match.end()
        rest = self._held[start:]
        cut = rest.rfind("<")  # what may become a tag is held back
        if cut < 0 or len(rest) - cut > _LONGEST_TAG:
            cut = len(rest)
        self._held = rest[cut:]
        yield from self._say(rest[:cut])

    def flush(self) -> Iterator[tuple[Channel, str]]:
        """The turn is over: what was held back is text after all."""
        held, self._held = self._held, ""
        yield from self._say(held)

    def _say(self, text: str) -> Iterator[tuple[Channel, str]]:
        if text and not self._in_call:
            yield self._channel, text

    def _switch(self, tag: str) -> None:
        name = tag.strip("</>")
        opens = not tag.startswith("</")
        if name == "tool_call":
            self._in_call = opens
        elif self._in_call:
            return  # a program may spell what it likes
        elif name in _REASONING:
            self._channel = Channel.REASONING if opens else Channel.CONTENT
        elif name == "answer" and opens:
            self._channel = Channel.CONTENT
