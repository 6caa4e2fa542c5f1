"""Split a turn's streamed text into reasoning and content, for people to read.

    text of tokens ──Channels──> pieces by channel, without markup ──Speech──> text for a client

Markup is never shown: tool calls have events of their own, and control tokens are not text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Protocol


class Channel(StrEnum):
    REASONING = "reasoning"
    CONTENT = "content"


_BETWEEN_PASSAGES = "\n\n"


class Splitter(Protocol):
    """Splits the text of one turn into channels, in pieces of any size."""

    @property
    def channel(self) -> Channel | None:
        """The channel of the text that comes next; None in a call or in markup."""
        ...

    def feed(self, text: str) -> Iterator[tuple[Channel, str]]:
        """Take the next text; yield what is unambiguous, without markup."""
        ...

    def flush(self) -> Iterator[tuple[Channel, str]]:
        """Yield the text that was held back, now that the turn is over. Again, yield nothing."""
        ...


@dataclass(frozen=True)
class Markup:
    """The tags of a turn's text.

    Attributes:
        thoughts: Tags that open and close a thought.
        calls: Tags that open and close calls; a call without a closing tag ends with the turn.
        others: Other markup that is not text, besides control tokens of the form <|name|>.
    """

    thoughts: tuple[tuple[str, str], ...] = (("<reason>", "</reason>"), ("<think>", "</think>"))
    calls: tuple[tuple[str, str], ...] = (("<tool_call>", "</tool_call>"),)
    others: tuple[str, ...] = ("<answer>", "</answer>")

    @cached_property
    def tags(self) -> tuple[str, ...]:
        pairs = (*self.thoughts, *self.calls)
        return (*(tag for pair in pairs for tag in pair if tag), *self.others)

    @cached_property
    def tag_re(self) -> re.Pattern[str]:
        return re.compile("|".join([*map(re.escape, self.tags), r"<\|[a-z_]{1,20}\|>"]))


_MARKUP = Markup()
_PARTIAL_CONTROL_RE = re.compile(r"<(?:\|[a-z_]{0,20}\|?)?")
_MAX_PARTIAL = 32  # characters of markup that may be held back


class Channels:
    """Splits text into channels, without tags, as soon as each piece is unambiguous.

    The text may be fed in pieces of any size.
    """

    def __init__(self, *, reasoning: bool, markup: Markup = _MARKUP) -> None:
        """
        Args:
            reasoning: Whether the generation prompt has already opened a reasoning block.
        """
        self._markup = markup
        self._channel = Channel.REASONING if reasoning else Channel.CONTENT
        self._in_call = False
        self._held = ""

    @property
    def channel(self) -> Channel | None:
        return None if self._in_call else self._channel

    def feed(self, text: str) -> Iterator[tuple[Channel, str]]:
        self._held += text
        start = 0
        for match in self._markup.tag_re.finditer(self._held):
            yield from self._emit(self._held[start : match.start()])
            self._switch(match.group())
            start = match.end()
        unread = self._held[start:]
        cut = self._partial(unread)
        self._held = unread[cut:]
        yield from self._emit(unread[:cut])

    def flush(self) -> Iterator[tuple[Channel, str]]:
        """Yield the text that was held back, now that the turn is over."""
        held, self._held = self._held, ""
        yield from self._emit(held)

    def _emit(self, text: str) -> Iterator[tuple[Channel, str]]:
        if text and not self._in_call:
            yield self._channel, text

    def _switch(self, tag: str) -> None:
        opens_call = any(tag == opening for opening, _ in self._markup.calls)
        if opens_call or any(tag == closing for _, closing in self._markup.calls):
            self._in_call = opens_call
        elif self._in_call:
            return  # a tag inside a call's arguments is data
        elif tag == "<answer>" or any(tag == closing for _, closing in self._markup.thoughts):
            self._channel = Channel.CONTENT
        elif any(tag == opening for opening, _ in self._markup.thoughts):
            self._channel = Channel.REASONING

    def _partial(self, text: str) -> int:
        """Return where markup may begin of which the rest is still to come, or the text's end."""
        for cut in range(max(0, len(text) - _MAX_PARTIAL), len(text)):
            if text[cut] in "<[]" and self._may_begin_markup(text[cut:]):
                return cut
        return len(text)

    def _may_begin_markup(self, text: str) -> bool:
        if any(tag.startswith(text) for tag in self._markup.tags):
            return True
        return bool(_PARTIAL_CONTROL_RE.fullmatch(text))


class StopFinder:
    """Cuts text that arrives in pieces before the first stop sequence.

    The first stop sequence to be completed wins; of several that end together, the longest.

    Attributes:
        matched: The stop sequence that was found; nothing is returned after it.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """
        Args:
            stop: Stop sequences, none of them empty.
        """
        self.matched: str | None = None
        self._stop = stop
        self._longest = max(map(len, stop), default=0)
        self._held = ""  # the beginning of a possible stop sequence

    def feed(self, text: str, *, skips_space: bool = False) -> str:
        """Take the next text; return what no stop sequence can begin in any more.

        With `skips_space`, a stop sequence cannot end in whitespace at the beginning of the text.
        """
        if not self._stop or self.matched is not None:
            return "" if self._stop else text
        text = self._held + text
        num_leading = len(text) - len(text.lstrip()) if skips_space else 0
        if skips_space and num_leading == len(text):
            self._held = text[-self._longest :]
            return ""
        matches = [
            (start + len(stop), start)
            for stop in self._stop
            if (start := text.find(stop, max(0, num_leading - len(stop) + 1))) >= 0
        ]
        if matches:
            end, start = min(matches)
            self.matched, self._held = text[start:end], ""
            return text[:start]
        first = max(0, len(text) - self._longest + 1)
        cut = next((at for at in range(first, len(text)) if self._may_begin(text[at:])), len(text))
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Return the text that was held back, now that no more comes."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stop)


class Speech:
    """The text that a client sees of a rollout, turn by turn, however the tokens were grouped.

    A passage is the text of one channel until the other channel or the end of the turn. Passages
    are stripped of surrounding whitespace, and a blank line separates passages of the same channel.
    Whitespace is therefore held back until text follows it.
    """

    def __init__(
        self,
        *,
        reasoning: bool,
        stop: Sequence[str] = (),
        split: Callable[[bool], Splitter] = lambda reasoning: Channels(reasoning=reasoning),
    ) -> None:
        """
        Args:
            reasoning: Whether the generation prompt opens a reasoning block.
            stop: Stop sequences, none of them empty; the content ends before the first match.
                Reasoning, tool calls and the whitespace before a passage are not searched.
            split: Makes a turn's splitter, given whether its prompt opens a reasoning block.
        """
        self._split = split
        self._reasoning = reasoning
        self._channels = split(reasoning)
        self._finder = StopFinder(stop)
        self._channels_seen: set[Channel] = set()
        self._channel: Channel | None = None  # the current passage's
        self._has_begun = False  # whether the passage has text other than whitespace
        self._pending_space = ""  # whitespace to emit before the next text

    @property
    def matched(self) -> str | None:
        """The stop sequence that was found in the content, if one was."""
        return self._finder.matched

    @property
    def stopped(self) -> bool:
        """True if a stop sequence was found in the content. Nothing is yielded after it."""
        return self.matched is not None

    def begin_turn(self, *, reasoning: bool) -> None:
        """Prepare for a turn whose generation prompt opens a reasoning block, or does not."""
        self._reasoning = reasoning
        self._channels = self._split(reasoning)

    def feed(self, text: str) -> Iterator[tuple[Channel, str]]:
        """Take the next text of the turn and yield the part that is final."""
        for channel, piece in self._channels.feed(text):
            yield from self._route(channel, piece)

    def end_turn(self) -> Iterator[tuple[Channel, str]]:
        """Yield the text that was held back and prepare for the next turn."""
        for channel, piece in self._channels.flush():
            yield from self._route(channel, piece)
        yield from self._end_passage()
        self._channels = self._split(self._reasoning)

    def interject(self, channel: Channel, text: str) -> Iterator[tuple[Channel, str]]:
        """Yield a passage that the model has not written, once the turn's text is complete."""
        for channel_before, piece in self._channels.flush():
            yield from self._route(channel_before, piece)
        yield from self._end_passage()
        if not self.stopped:
            yield channel, (_BETWEEN_PASSAGES if channel in self._channels_seen else "") + text
            self._channels_seen.add(channel)

    def _route(self, channel: Channel, piece: str) -> Iterator[tuple[Channel, str]]:
        if self.stopped:
            return
        if channel is not self._channel:
            yield from self._end_passage()
            self._channel = channel
            self._pending_space = _BETWEEN_PASSAGES if channel in self._channels_seen else ""
        if channel is Channel.CONTENT:
            piece = self._finder.feed(piece, skips_space=not self._has_begun)
        yield from self._emit(channel, piece)

    def _end_passage(self) -> Iterator[tuple[Channel, str]]:
        undecided = self._finder.flush()
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


def answer_in(
    text: str,
    *,
    reasoning: bool,
    stop: Sequence[str] = (),
    split: Callable[[bool], Splitter] = lambda reasoning: Channels(reasoning=reasoning),
) -> str:
    """Return the content of one turn, without reasoning and tool calls.

    The arguments are those of `Speech`.
    """
    speech = Speech(reasoning=reasoning, stop=stop, split=split)
    pieces = [*speech.feed(text), *speech.end_turn()]
    return "".join(piece for channel, piece in pieces if channel is Channel.CONTENT)
