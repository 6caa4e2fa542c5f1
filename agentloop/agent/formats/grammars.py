"""Find the calls in the text of a region, each as soon as it closes.

A region is what a model writes between the markers of its calls. Grammars work on text alone, in
pieces of any size; `agentloop.agent.formats.regions` finds the regions in sampled ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from agentloop.agent.formats.values import Parsed, decode_call, decode_python_call

Found = tuple[str, Parsed]
"""The text of a call, and what it says."""

_UNCLOSED = "the tool call is not complete"
_NAME_RE = re.compile(r"[\w.]+")
_closing_bracket = re.compile(r"[\])}]").search
# Finds the next escape or the end of a quoted string.
_INSIDE = {quote: re.compile(rf"[\\{quote}]").search for quote in "'\""}


class Grammar(Protocol):
    """Finds calls in the text of one region.

    Attributes:
        is_over: Whether nothing that follows in the region can be a call.
    """

    is_over: bool

    def feed(self, text: str) -> list[Found]:
        """Take the next text; return the calls that it closes."""
        ...

    def finish(self, reason: str | None) -> list[Found]:
        """Return the calls that the end of the region closes or leaves incomplete.

        `reason` says why the region was not closed by its marker; None if it was.
        """
        ...


class Whole:
    """Grammar of a region that is one call."""

    def __init__(self, parse: Callable[[str], Parsed]) -> None:
        self.is_over = False
        self._parse = parse
        self._parts: list[str] = []

    def feed(self, text: str) -> list[Found]:
        self._parts.append(text)
        return []

    def finish(self, reason: str | None) -> list[Found]:
        raw = "".join(self._parts)
        return [(raw, self._parse(raw) if reason is None else ("", {}, reason))]


class Blocks:
    """Grammar of calls that begin and end with texts, one after another.

    An argument may contain the text that ends a call, so it ends one only before the next call or
    the end of the region.
    """

    def __init__(self, begin: str, end: str, parse: Callable[[str], Parsed]) -> None:
        self.is_over = False
        self._begin, self._end, self._parse = begin, end, parse
        self._buffer = ""
        self._scanned = 0  # no marker starts before this index
        self._is_inside = False
        self._closed = 0  # where the call may have ended; 0: it is open
        self._num_found = 0

    def feed(self, text: str) -> list[Found]:
        self._buffer += text
        calls: list[Found] = []
        while True:
            if self._closed:
                following = self._buffer[self._closed :].lstrip()
                if self._begin.startswith(following):  # it may be the next call
                    return calls
                if following.startswith(self._begin):
                    calls.append(self._take())
                self._closed = 0
            marker = self._end if self._is_inside else self._begin
            at = self._buffer.find(marker, self._scanned)
            if at < 0:
                self._scanned = max(self._scanned, len(self._buffer) - len(marker) + 1)
                return calls
            if self._is_inside:
                self._scanned = self._closed = at + len(marker)
            else:
                self._buffer, self._scanned = self._buffer[at:], len(marker)
                self._is_inside = True

    def finish(self, reason: str | None) -> list[Found]:
        if self._closed and not self._buffer[self._closed :].strip():
            return [self._take()]
        raw = self._buffer.strip()
        if self._is_inside or (raw and not self._num_found):
            error = reason or f"{_UNCLOSED}: it begins with {self._begin} and ends with {self._end}"
            return [(raw, ("", {}, error))]
        return []

    def _take(self) -> Found:
        """Remove the call from the buffer."""
        raw, self._buffer = self._buffer[: self._closed], self._buffer[self._closed :]
        self._closed = self._scanned = 0
        self._is_inside = False
        self._num_found += 1
        return raw, self._parse(raw)


class JsonObjects:
    """Grammar of JSON objects, each a call: in a list or one after another."""

    def __init__(self, *, is_text_without: bool = False) -> None:
        """
        Args:
            is_text_without: Whether text that does not begin with an object that states a call is
                no call at all, rather than a malformed one.
        """
        self.is_over = False
        self._is_text_without = is_text_without
        self._value = _Value()
        self._rest = ""  # after the objects
        self._num_found = 0

    def feed(self, text: str) -> list[Found]:
        calls: list[Found] = []
        while text and not self.is_over:
            if self._value.depth or text[0] == "{":
                if (closed := self._value.feed(text)) is None:
                    return calls
                raw, text = closed
                if self._is_text_without and not self._num_found and not _states_a_call(raw):
                    self.is_over = True
                    break
                calls.append((raw, decode_call(raw)))
                self._num_found += 1
            elif text[0] in "[],; \t\r\n":
                text = text[1:]
            else:
                self.is_over = True
        self._rest += text
        return calls

    def finish(self, reason: str | None) -> list[Found]:
        raw = (self._value.text or self._rest).strip()
        if self._is_text_without and self.is_over:
            return []
        if self._value.depth or (raw and not self._num_found):
            if self._is_text_without and not (self._num_found or _states_a_call(raw)):
                return []
            error = reason or decode_call(raw)[2] or _UNCLOSED
            return [(raw, ("", {}, error))]
        return []


class NamedObject:
    """Grammar of one call: a name, a separator, and a JSON object that ends it."""

    def __init__(self, parse: Callable[[str], Parsed]) -> None:
        self.is_over = False
        self._parse = parse
        self._value = _Value()
        self._name = ""  # the function's name, which precedes the object

    def feed(self, text: str) -> list[Found]:
        if not self._value.depth:
            name, brace, text = text.partition("{")
            self._name += name
            text = brace + text
        if not text or (closed := self._value.feed(text)) is None:
            return []
        self.is_over = True
        raw = self._name + closed[0]
        return [(raw, self._parse(raw))]

    def finish(self, reason: str | None) -> list[Found]:
        if self.is_over:
            return []
        return [(self._name + self._value.text, ("", {}, reason or _UNCLOSED))]


class PythonCalls:
    """Grammar of a Python list of calls."""

    def __init__(self) -> None:
        self.is_over = False
        self._value = _Value(quotes="'\"")
        self._name = ""  # the next call's function
        self._is_inside = False

    def feed(self, text: str) -> list[Found]:
        calls: list[Found] = []
        while text and not self.is_over:
            if self._value.depth:
                if (closed := self._value.feed(text)) is None:
                    return calls
                raw, text = closed
                self._name += raw
                if raw[-1] == ")":
                    calls.append((self._name, decode_python_call(self._name)))
                    self._name = ""
            elif self._is_inside and (name := _NAME_RE.match(text)):
                self._name += name[0]
                text = text[name.end() :]
            else:
                char, text = text[0], text[1:]
                if not self._is_inside:
                    self._is_inside = char == "["
                    self.is_over = not self._is_inside and not char.isspace()
                elif char == "(":
                    self._value.feed(char)
                elif self._name or char not in ", \t\r\n":
                    self.is_over = True  # the end of the list, or for example one of numbers
        return calls

    def finish(self, reason: str | None) -> list[Found]:
        if self._value.depth:
            return [(self._name + self._value.text, ("", {}, reason or _UNCLOSED))]
        return []


def _states_a_call(raw: str) -> bool:
    """Return whether an object, which may be incomplete, has the keys of a call."""
    return '"name"' in raw and ('"parameters"' in raw or '"arguments"' in raw)


class _Value:
    """Collects the text of a value in brackets, up to the bracket that closes it.

    Attributes:
        depth: Number of open brackets.
    """

    def __init__(self, quotes: str = '"') -> None:
        self.depth = 0
        self._read = ""
        self._unread: list[str] = []
        self._is_escaped = False
        self._outside = re.compile(rf"[{quotes}{{}}\[\]()]").search
        self._next = self._outside  # in a string: what finds its end or an escape

    @property
    def text(self) -> str:
        """The text of the value so far."""
        return "".join([self._read, *self._unread])

    def feed(self, text: str) -> tuple[str, str] | None:
        """Take the next text, of which the first begins with a bracket.

        Return the whole value and the text that follows it, or None while the value is open.
        """
        if self.depth and _closing_bracket(text) is None:  # most tokens: to be read with others
            self._unread.append(text)
            return None
        if self._unread:
            text = "".join([*self._unread, text])
            self._unread.clear()
        end = self._end(text)
        if end < 0:
            self._read += text
            return None
        value, self._read = self._read + text[:end], ""
        return value, text[end:]

    def _end(self, text: str) -> int:
        """Read text; return where it closes the last open bracket, or -1."""
        start = 0
        if self._is_escaped and text:
            self._is_escaped = False
            start = 1
        while (match := self._next(text, start)) is not None:
            char, start = match[0], match.end()
            if char == "\\":
                self._is_escaped = start == len(text)
                start += 1
            elif char in "{[(":
                self.depth += 1
            elif char in "}])":
                self.depth -= 1
                if self.depth == 0:
                    return start
            elif self._next is self._outside:
                self._next = _INSIDE[char]
            else:
                self._next = self._outside
        return -1
