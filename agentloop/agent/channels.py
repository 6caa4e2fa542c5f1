"""Split a turn's streamed text into reasoning and content, for people to read.

    text of tokens ──Channels──> pieces by channel, without markup ──Speech──> text for a client

Markup is never shown: tool calls have events of their own, and control tokens are not text.
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
_PARTIAL_CONTROL_RE = re.compile(r"<\|[a-z_]{0,20}\|?")
_BETWEEN_PASSAGES = "\n\n"


class Channels:
    """Splits text into channels, without tags, as soon as each piece is unambiguous.

    The text may be fed in pieces of any size.
    """

    def __init__(self, *, reasoning: bool) -> None:
        """
        Args:
            reasoning: Whether the generation prompt has already opened a reasoning block.
        """
        self._channel = Channel.REASONING if reasoning else Channel.CONTENT
        self._in_call = False
        self._held = ""

    def feed(self, text: str) -> Iterator[tuple[Channel, str]]:
        self._held += text
        start = 0
        for match in _TAG_RE.finditer(self._held):
            yield from self._emit(self._held[start : match.start()])
            self._switch(match.group())
            start = match.end()
        rest = self._held[start:]
        cut = rest.rfind("<")
        if cut < 0 or not _is_tag_prefix(rest[cut:]):
            cut = len(rest)
        self._held = rest[cut:]
        yield from self._emit(rest[:cut])

    def flush(self) -> Iterator[tuple[Channel, str]]:
        """Yield the text that was held back, now that the turn is over."""
        held, self._held = self._held, ""
        yield from self._emit(held)

    def _emit(self, text: str) -> Iterator[tuple[Channel, str]]:
        if text and not self._in_call:
            yield self._channel, text

    def _switch(self, tag: str) -> None:
        name = tag.strip("</>")
        opens = not tag.startswith("</")
        if name == "tool_call":
            self._in_call = opens
        elif self._in_call:
            return  # a tag inside a call's arguments is data
        elif name in _REASONING:
            self._channel = Channel.REASONING if opens else Channel.CONTENT
        elif name == "answer" and opens:
            self._channel = Channel.CONTENT


def _is_tag_prefix(text: str) -> bool:
    return any(tag.startswith(text) for tag in _TAGS) or bool(_PARTIAL_CONTROL_RE.fullmatch(text))


class Speech:
    """The text that a client sees of a rollout, turn by turn, however the tokens were grouped.

    A passage is the text of one channel until the other channel or the end of the turn. Passages
    are stripped of surrounding whitespace, and a blank line separates passages of the same channel.
    Whitespace is therefore held back until text follows it.

    Attributes:
        stopped: Whether a stop sequence was found in the content. Nothing is yielded after it.
    """

    def __init__(self, *, reasoning: bool, stop: Sequence[str] = ()) -> None:
        """
        Args:
            reasoning: Whether the generation prompt opens a reasoning block.
            stop: Stop sequences, none of them empty; the content ends before the first match.
                Reasoning, tool calls and the whitespace before a passage are not searched.
        """
        self.stopped = False
        self._reasoning = reasoning
        self._channels = Channels(reasoning=reasoning)
        self._stop = stop
        self._longest_stop = max(map(len, stop), default=0)
        self._channels_seen: set[Channel] = set()
        self._channel: Channel | None = None  # of the current passage
        self._has_begun = False  # whether the passage has text other than whitespace
        self._partial_stop = ""  # the beginning of a possible stop sequence
        self._pending_space = ""  # whitespace to emit before the next text

    def feed(self, text: str) -> Iterator[tuple[Channel, str]]:
        """Take the next text of the turn and yield the part that is final."""
        for channel, piece in self._channels.feed(text):
            yield from self._route(channel, piece)

    def end_turn(self) -> Iterator[tuple[Channel, str]]:
        """Yield the text that was held back and prepare for the next turn."""
        for channel, piece in self._channels.flush():
            yield from self._route(channel, piece)
        yield from self._end_passage()
        self._channels = Channels(reasoning=self._reasoning)

    def _route(self, channel: Channel, piece: str) -> Iterator[tuple[Channel, str]]:
        if self.stopped:
            return
        if channel is not self._channel:
            yield from self._end_passage()
            self._channel = channel
            self._pending_space = _BETWEEN_PASSAGES if channel in self._channels_seen else ""
        if channel is Channel.CONTENT and self._stop:
            piece = self._before_stop(piece)
        yield from self._emit(channel, piece)

    def _end_passage(self) -> Iterator[tuple[Channel, str]]:
        undecided, self._partial_stop = self._partial_stop, ""
        if self._channel is not None:
            yield from self._emit(self._channel, undecided)
        self._channel, self._has_begun, self._pending_space = None, False, ""

    def _emit(self, channel: Channel, text: str) -> Iterator[tuple[Channel, str]]:
        if not self._has_begun:
            text = text.lstrip()
        solid = text.rstrip()
        if solid:
            self._has_begun = True
            self._channels_seen.add(channel)
            yield channel, self._pending_space + solid
            self._pending_space = ""
        self._pending_space += text[len(solid) :]

    def _before_stop(self, piece: str) -> str:
        """Return the content up to a stop sequence, or up to the beginning of a possible one.

        The first stop sequence to be completed wins; of several that end together, the longest.
        """
        text = self._partial_stop + piece
        num_leading = 0 if self._has_begun else len(text) - len(text.lstrip())
        if num_leading == len(text):
            self._partial_stop = text[-self._longest_stop :]
            return ""
        found = [
            (start + len(stop), start)
            for stop in self._stop
            if (start := text.find(stop, max(0, num_leading - len(stop) + 1))) >= 0
        ]
        if found:
            self.stopped, self._partial_stop = True, ""
            return text[: min(found)[1]]
        first = max(0, len(text) - self._longest_stop + 1)
        held = next(
            (at for at in range(first, len(text)) if self._is_stop_prefix(text[at:])),
            len(text),
        )
        self._partial_stop = text[held:]
        return text[:held]

    def _is_stop_prefix(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stop)


def answer_in(text: str, *, reasoning: bool, stop: Sequence[str] = ()) -> str:
    """Return the content of one turn, without reasoning and tool calls."""
    speech = Speech(reasoning=reasoning, stop=stop)
    pieces = [*speech.feed(text), *speech.end_turn()]
    return "".join(piece for channel, piece in pieces if channel is Channel.CONTENT)
