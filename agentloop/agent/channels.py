"""A turn's text, as it streams, told apart for people: what it thinks, what it says.

    text of tokens ──Channels──> pieces, by channel, without markup ──Speech──> what a client reads

Markup never shows: tool calls have events of their own, control tokens are not text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum

__all__ = ["Channel", "Channels", "Speech", "answer_in"]


class Channel(StrEnum):
    REASONING = "reasoning"
    CONTENT = "content"


_REASONING = ("reason", "think")
_TAGS = tuple(
    f"<{slash}{name}>" for name in (*_REASONING, "answer", "tool_call") for slash in ("", "/")
)
_TAG_RE = re.compile("|".join([*_TAGS, r"<\|[a-z_]{1,20}\|>"]))
_BEGUN_CONTROL_RE = re.compile(r"<\|[a-z_]{0,20}\|?")
_BETWEEN_PASSAGES = "\n\n"


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
        cut = rest.rfind("<")
        if cut < 0 or not _may_become_tag(rest[cut:]):
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


def _may_become_tag(text: str) -> bool:
    return any(tag.startswith(text) for tag in _TAGS) or bool(_BEGUN_CONTROL_RE.fullmatch(text))


class Speech:
    """What a client reads of a rollout, turn after turn; the same however the text is cut.

    The text of one channel, up to that of the other or the end of the turn, is a passage.
    Passages have no whitespace around them; a blank line separates those of one channel. So
    whitespace is held back until something follows it.

    Attributes:
        stopped: Whether the content has come to a stop sequence. Nothing follows it.
    """

    def __init__(self, *, reasoning: bool, stop: Sequence[str] = ()) -> None:
        """
        Args:
            reasoning: Whether the generation prompt opens a thought.
            stop: The content ends before the first of these; none is empty. Thoughts, calls and
                the whitespace before a passage are not searched.
        """
        self.stopped = False
        self._reasoning = reasoning
        self._channels = Channels(reasoning=reasoning)
        self._stop = stop
        self._longest_stop = max(map(len, stop), default=0)
        self._heard: set[Channel] = set()
        self._channel: Channel | None = None  # of the passage
        self._has_begun = False  # the passage, with something other than whitespace
        self._undecided = ""  # may become a stop sequence
        self._space = ""  # is said once something follows

    def feed(self, text: str) -> Iterator[tuple[Channel, str]]:
        """Take text of the turn; yield what is certain of it."""
        for channel, piece in self._channels.feed(text):
            yield from self._hear(channel, piece)

    def end_turn(self) -> Iterator[tuple[Channel, str]]:
        """Yield what was held back, and expect the next turn."""
        for channel, piece in self._channels.flush():
            yield from self._hear(channel, piece)
        yield from self._end_passage()
        self._channels = Channels(reasoning=self._reasoning)

    def _hear(self, channel: Channel, piece: str) -> Iterator[tuple[Channel, str]]:
        if self.stopped:
            return
        if channel is not self._channel:
            yield from self._end_passage()
            self._channel = channel
            self._space = _BETWEEN_PASSAGES if channel in self._heard else ""
        if channel is Channel.CONTENT and self._stop:
            piece = self._before_stop(piece)
        yield from self._say(channel, piece)

    def _end_passage(self) -> Iterator[tuple[Channel, str]]:
        undecided, self._undecided = self._undecided, ""
        if self._channel is not None:
            yield from self._say(self._channel, undecided)
        self._channel, self._has_begun, self._space = None, False, ""

    def _say(self, channel: Channel, text: str) -> Iterator[tuple[Channel, str]]:
        if not self._has_begun:
            text = text.lstrip()
        solid = text.rstrip()
        if solid:
            self._has_begun = True
            self._heard.add(channel)
            yield channel, self._space + solid
            self._space = ""
        self._space += text[len(solid) :]

    def _before_stop(self, piece: str) -> str:
        """The content that is certain: up to a stop sequence, or to what may become one.

        The one that is complete first counts; of several that end together, the longest.
        """
        text = self._undecided + piece
        num_leading = 0 if self._has_begun else len(text) - len(text.lstrip())
        if num_leading == len(text):
            self._undecided = text[-self._longest_stop :]
            return ""
        found = [
            (start + len(stop), start)
            for stop in self._stop
            if (start := text.find(stop, max(0, num_leading - len(stop) + 1))) >= 0
        ]
        if found:
            self.stopped, self._undecided = True, ""
            return text[: min(found)[1]]
        first = max(0, len(text) - self._longest_stop + 1)
        held = next(
            (at for at in range(first, len(text)) if self._is_beginning_of_stop(text[at:])),
            len(text),
        )
        self._undecided = text[held:]
        return text[:held]

    def _is_beginning_of_stop(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stop)


def answer_in(text: str, *, reasoning: bool, stop: Sequence[str] = ()) -> str:
    """The content of one turn: what a person would read as its answer."""
    speech = Speech(reasoning=reasoning, stop=stop)
    said = [*speech.feed(text), *speech.end_turn()]
    return "".join(piece for channel, piece in said if channel is Channel.CONTENT)
