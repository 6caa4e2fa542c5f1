"""Find regions of tool calls in a stream of sampled ids.

Markers that are single tokens of the vocabulary are matched by id, others in the decoded text. Only
the tokens of a region are decoded, unless its markers are text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentloop.agent.formats.family import CallStream, MakeCallStream
from agentloop.agent.formats.grammars import Found, Grammar
from agentloop.agent.formats.values import Schemas
from agentloop.agent.text_stream import TextStream, TokenCodec
from agentloop.trajectory import ToolCall

_MAX_REGION_TOKENS = 65_536


class RegionStream:
    """Finds the tool calls of one turn.

    Feed every sampled id once, in order. The calls that `feed` returns are complete and can run. A
    call that cannot be parsed is still returned: its `error` tells the model why.
    """

    def __init__(
        self,
        chat: TokenCodec,
        make_grammar: Callable[[], Grammar],
        *,
        opening: str | None,
        closing: str | None,
        skipped: str = "",
        id_prefix: str,
    ) -> None:
        """
        Args:
            opening: Marker that opens a region. None: the turn is one, after `skipped`.
            closing: Marker that closes it. None: it ends with its last call, or with the turn.
            skipped: Control token that is no part of a region.
        """
        self._chat = chat
        self._make_grammar = make_grammar
        self._opening, self._closing = opening, closing
        self._id_prefix = id_prefix
        self._open_id = None if opening is None else chat.token_id(opening)
        self._close_id = None if closing is None else chat.token_id(closing)
        self._skipped_id = chat.token_id(skipped)
        self._position = 0  # ids seen
        self._count = 0  # calls seen
        self._start = 0  # first token of the next call of the region
        self._num_inside = 0
        self._text = TextStream(chat)
        self._held = ""  # text that may be the beginning of a marker
        self._grammar: Grammar | None = make_grammar() if opening is None else None

    def feed(self, ids: Sequence[int]) -> list[ToolCall]:
        """Take the next ids; return the calls that they close."""
        # Most frames are outside a region and open none.
        if self._opening is None:
            is_outside = self._grammar is None or self._grammar.is_over
        else:
            opens = self._open_id is None or self._open_id in ids
            is_outside = self._grammar is None and not opens
        if is_outside:
            self._position += len(ids)
            return []
        calls: list[ToolCall] = []
        start = 0
        if self._grammar is None and self._open_id is not None:
            start = ids.index(self._open_id)
            self._position += start
        for token in ids[start:]:
            calls += self._take(token)
            self._position += 1
        return calls

    def finish(self) -> list[ToolCall]:
        """Return the call that was still open when the model ended its turn, as malformed."""
        if self._grammar is None:
            return []
        return self._end("the turn ended before it closed", self._position)

    def _take(self, token: int) -> list[ToolCall]:
        if self._grammar is None:
            if self._opening is None:  # the only region has ended
                return []
            if self._open_id is not None:
                if token == self._open_id:
                    self._open(self._position)
                return []
            _, is_open, inside = self._split(self._text.feed([token]), self._opening)
            if not is_open:
                return []
            self._open(self._position)
            return self._read(inside)
        calls: list[ToolCall] = []
        if token == self._open_id:
            calls = self._end("another one opened inside it", self._position)
            self._open(self._position)
        elif token == self._close_id:
            calls = self._read(self._text.flush())
            calls += self._end(None, self._position + 1)
        elif token != self._skipped_id and token not in self._chat.stop_ids:
            calls = self._read(self._text.feed([token]))
            self._num_inside += 1
            if self._grammar is not None and self._num_inside > _MAX_REGION_TOKENS:
                reason = f"it exceeds {_MAX_REGION_TOKENS} tokens"
                calls += self._end(reason, self._position + 1)
        return calls

    def _read(self, text: str) -> list[ToolCall]:
        """Give the text of a region to its grammar, up to a marker that is text."""
        calls: list[ToolCall] = []
        while text or self._held:
            assert self._grammar is not None
            if self._closing is None or self._close_id is not None:
                inside, is_marker, after = text, False, ""
            else:
                inside, is_marker, after = self._split(text, self._closing)
            calls += self._make_calls(self._grammar.feed(inside), self._position + 1)
            if not is_marker:
                if self._closing is None and self._grammar.is_over and self._opening is not None:
                    self._grammar = None
                return calls
            calls += self._end(None, self._position + 1)
            assert self._opening is not None
            _, is_marker, text = self._split(after, self._opening)
            if not is_marker:
                return calls
            self._open(self._position)
        return calls

    def _split(self, text: str, marker: str) -> tuple[str, bool, str]:
        """Return the text before a marker, whether it is there, and the text after it.

        A suffix that may be the marker's beginning is held back.
        """
        text, self._held = self._held + text, ""
        before, separator, after = text.partition(marker)
        if separator:
            return before, True, after
        at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while at >= 0 and not marker.startswith(text[at:]):
            at = text.find(marker[0], at + 1)
        if at < 0:
            return text, False, ""
        self._held = text[at:]
        return text[:at], False, ""

    def _open(self, position: int) -> None:
        self._grammar = self._make_grammar()
        self._start, self._num_inside = position, 0
        if self._open_id is not None:
            self._text, self._held = TextStream(self._chat), ""

    def _end(self, reason: str | None, end: int) -> list[ToolCall]:
        """End the region: by its marker, or for another `reason`."""
        assert self._grammar is not None
        calls: list[Found] = []
        if reason is not None:
            if unread := self._held + self._text.flush():
                calls += self._grammar.feed(unread)
            if self._closing is not None:
                reason = f"the tool call was not closed with {self._closing}: {reason}"
            else:
                reason = f"the tool call is not complete: {reason}"
        calls += self._grammar.finish(reason)
        self._grammar, self._held = None, ""
        return self._make_calls(calls, end)

    def _make_calls(self, parsed: Sequence[Found], end: int) -> list[ToolCall]:
        calls = []
        for raw, (name, arguments, error) in parsed:
            call_id = f"{self._id_prefix}_{self._count}"
            self._count += 1
            calls.append(ToolCall(call_id, name, arguments, raw, self._start, end, error))
            self._start = end
        return calls


def calls_in_regions(
    make_grammar: Callable[[Schemas], Grammar], *, opening: str, closing: str | None
) -> MakeCallStream:
    """Return what makes the stream of calls of a family whose calls are between markers.

    Args:
        make_grammar: Returns the grammar of a region, for the tools' schemas.
        opening, closing: The markers, as in `RegionStream`.
    """

    def make_calls(chat: TokenCodec, schemas: Schemas, id_prefix: str) -> CallStream:
        return RegionStream(
            chat,
            lambda: make_grammar(schemas),
            opening=opening,
            closing=closing,
            id_prefix=id_prefix,
        )

    return make_calls
