"""Extract tool calls from a stream of token ids, each as soon as it is closed.

Calls have the Hermes form: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. If the
markers are single tokens of the vocabulary, the stream is scanned by id and only the tokens of a
call are decoded, once; otherwise the decoded text is scanned. A call that cannot be parsed is
still returned: its `error` tells the model why.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from agentloop.agent.chat_format import ChatFormat, TextStream
from agentloop.trajectory import ToolCall

__all__ = ["CLOSE", "OPEN", "ToolCallStream", "decode_call"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_MAX_CALL_TOKENS = 65_536
_MAX_DEPTH = 100
_MAX_SHOWN = 40  # characters of a number in an error
_SURROGATE_RE = re.compile("[\ud800-\udfff]")


class ToolCallStream:
    """Finds the tool calls of one turn.

    Feed every sampled id once, in order. The calls that `feed` returns are complete and can run.
    """

    def __init__(self, chat: ChatFormat, *, id_prefix: str = "call") -> None:
        self._chat = chat
        self._id_prefix = id_prefix
        self._position = 0  # ids seen
        self._count = 0  # calls seen
        self._open_at: int | None = None
        self._inside: list[int] = []
        self._open_id = chat.token_id(OPEN)
        self._close_id = chat.token_id(CLOSE)
        by_id = self._open_id is not None and self._close_id is not None
        self._text = None if by_id else _TextScan(chat)

    def feed(self, ids: Sequence[int]) -> list[ToolCall]:
        """Take the next ids; return the calls that they close."""
        if self._text is not None:
            return self._feed_text(ids)
        # Fast path: most frames are outside a call and open none.
        if self._open_at is None and self._open_id not in ids and self._close_id not in ids:
            self._position += len(ids)
            return []
        calls = []
        for token in ids:
            if token == self._open_id:
                if self._open_at is not None:
                    calls.append(self._unclosed(self._position, "another one opened inside it"))
                self._open_at, self._inside = self._position, []
            elif token == self._close_id and self._open_at is not None:
                raw = self._chat.decode(self._inside)
                calls.append(self._close(raw, self._open_at, self._position + 1))
            elif self._open_at is not None:
                self._inside.append(token)
                if len(self._inside) > _MAX_CALL_TOKENS:
                    why = f"it exceeds {_MAX_CALL_TOKENS} tokens"
                    calls.append(self._unclosed(self._position + 1, why))
            self._position += 1
        return calls

    def finish(self) -> list[ToolCall]:
        """Return the call that was still open when the model ended its turn, as malformed."""
        if self._text is not None:
            unclosed = self._text.unclosed()
            if unclosed is None:
                return []
            start, raw = unclosed
            return [self._failed(raw, start, self._position, "the turn ended before it closed")]
        if self._open_at is None:
            return []
        return [self._unclosed(self._position, "the turn ended before it closed")]

    def _feed_text(self, ids: Sequence[int]) -> list[ToolCall]:
        assert self._text is not None
        calls = []
        for token in ids:
            self._position += 1
            for raw, start in self._text.feed(token, self._position):
                calls.append(self._close(raw, start, self._position))
        return calls

    def _close(self, raw: str, start: int, end: int) -> ToolCall:
        self._open_at, self._inside = None, []
        name, arguments, error = decode_call(raw)
        return self._call(raw, start, end, name, arguments, error)

    def _unclosed(self, end: int, why: str) -> ToolCall:
        assert self._open_at is not None
        start, raw = self._open_at, self._chat.decode(self._inside)
        self._open_at, self._inside = None, []
        return self._failed(raw, start, end, why)

    def _failed(self, raw: str, start: int, end: int, why: str) -> ToolCall:
        error = f"the tool call was not closed with {CLOSE}: {why}"
        return self._call(raw, start, end, "", {}, error)

    def _call(
        self,
        raw: str,
        start: int,
        end: int,
        name: str,
        arguments: dict[str, Any],
        error: str | None,
    ) -> ToolCall:
        call_id = f"{self._id_prefix}_{self._count}"
        self._count += 1
        return ToolCall(call_id, name, arguments, raw, start, end, error)


class _TextScan:
    """Finds the markers in text that arrives token by token, in linear time."""

    def __init__(self, chat: ChatFormat) -> None:
        self._stream = TextStream(chat)
        self._buffer = ""
        self._scanned = 0  # no marker starts before this index
        self._open_at: int | None = None

    def feed(self, token: int, position: int) -> list[tuple[str, int]]:
        """Return the raw text and first token index of each call that this token closes."""
        self._buffer += self._stream.feed([token])
        closed: list[tuple[str, int]] = []
        while True:
            marker = OPEN if self._open_at is None else CLOSE
            at = self._buffer.find(marker, self._scanned)
            if at < 0:
                # Keep a possible prefix of the marker and, inside a call, the call's text.
                keep = max(self._scanned, len(self._buffer) - len(marker) + 1)
                if self._open_at is None:
                    self._buffer, keep = self._buffer[keep:], 0
                self._scanned = keep
                return closed
            if self._open_at is None:
                self._open_at = max(0, position - 1)
            else:
                closed.append((self._buffer[:at], self._open_at))
                self._open_at = None
            self._buffer, self._scanned = self._buffer[at + len(marker) :], 0

    def unclosed(self) -> tuple[int, str] | None:
        """Return the index of the first token and the raw text of a call that is still open."""
        if self._open_at is None:
            return None
        return self._open_at, self._buffer + self._stream.flush()


def decode_call(raw: str) -> tuple[str, dict[str, Any], str | None]:
    """Return the name, the arguments and the error of a call, the last for the model to read.

    The error is None if the call is well-formed; otherwise name and arguments may be empty.
    """
    try:
        value = _json(raw)
    except ValueError as error:
        return "", {}, f"the tool call is not valid JSON: {error}"
    if not isinstance(value, dict):
        return "", {}, 'the tool call must be a JSON object {"name": ..., "arguments": {...}}'
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return "", {}, 'the tool call has no "name"'
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):  # some models send a JSON string, as in OpenAI's API
        try:
            arguments = _json(arguments)
        except ValueError as error:
            return name, {}, f'"arguments" is not valid JSON: {error}'
    if not isinstance(arguments, dict):
        return name, {}, '"arguments" must be a JSON object'
    return name, arguments, None


def _json(text: str) -> Any:
    """Parse JSON written by a model: integers stay exact, and strings may contain raw newlines.

    Raises:
        ValueError: The text is not JSON, or its value cannot be serialized again.
    """
    try:
        value = json.loads(text, strict=False, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if text.count("[") + text.count("{") > _MAX_DEPTH and _depth(value) > _MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    may_have_half = "\\ud" in text.lower() or not text.isascii()
    if may_have_half and _SURROGATE_RE.search(json.dumps(value, ensure_ascii=False)):
        raise ValueError("it has half of a surrogate pair")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _finite(text: str) -> float:
    """Parse a float; reject 1e999, which parses as infinity and cannot be serialized again."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:_MAX_SHOWN]} is too large for a floating-point number")
    return value


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [item for value in level for item in _items(value)]:
        depth += 1
    return depth


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
