"""Calls whose arguments are plain text between tags, one tag per argument."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from agentloop.agent.formats.values import ArgumentTypes, Parsed, Schemas, decode_json


class TaggedForm:
    """Parses a call: a head with the tool's name, and arguments between tags.

    Nothing is escaped, so the text of an argument may contain its closing tag. A closing tag ends
    an argument only before another argument or the end of the call. If what then looks like an
    argument is given twice, or is none of the tool's, it may be text: the call is malformed.
    """

    def __init__(
        self,
        head: str,
        opening: str,
        closing: str,
        end: str,
        *,
        example: str,
        trims_newlines: bool,
    ) -> None:
        """
        Args:
            head: Pattern whose group `name` is the tool's name.
            opening: Pattern of the tag that opens an argument with the groups `key` and, where the
                form says so, `string`: "true" or "false".
            closing: The tag that closes it.
            end: The tag that closes the call; it may be missing.
            example: The form, to show in an error.
            trims_newlines: Whether a newline after the opening tag and one before the closing tag
                are markup.
        """
        self._head_re = re.compile(head, re.DOTALL)
        self._opening_re = re.compile(rf"\s*{opening}", re.DOTALL)
        self._closing = closing
        self._end_re = re.compile(rf"(?:\s|{re.escape(end)})*\Z" if end else r"\s*\Z")
        self._example = example
        self._trims_newlines = trims_newlines

    def parser(self, schemas: Schemas) -> Callable[[str], Parsed]:
        """Return `parse` for these schemas."""
        return partial(self.parse, schemas=schemas)

    def parse(self, raw: str, schemas: Schemas) -> Parsed:
        """Return the name, the arguments, and an error for the model to read."""
        head = self._head_re.match(raw)
        if head is None or not (name := head["name"].strip()):
            return "", {}, f"the tool call must have the form {self._example}"
        types = ArgumentTypes(schemas.get(name, {}))
        arguments: dict[str, object] = {}
        at = head.end()
        while opening := self._opening_re.match(raw, at):
            key, is_string = opening["key"].strip(), opening.groupdict().get("string")
            if key in arguments:
                return "", {}, f"the tool call has the argument {key!r} twice"
            if not types.allow(key):
                return "", {}, f"the tool {name!r} has no argument {key!r}"
            end = self._end_of_value(raw, opening.end())
            if end < 0:
                return "", {}, f"the argument {key!r} is not closed with {self._closing}"
            value = raw[opening.end() : end]
            if self._trims_newlines:
                value = value.removeprefix("\n").removesuffix("\n")
            arguments[key] = (
                types.decode(key, value)
                if is_string is None
                else value
                if is_string == "true"
                else _json_or_text(value)
            )
            at = end + len(self._closing)
        if not self._end_re.match(raw, at):
            shown = raw[at:].strip()[:40]
            return "", {}, f"the tool call must have the form {self._example}: unexpected {shown!r}"
        return name, arguments, None

    def _end_of_value(self, raw: str, begin: int) -> int:
        """Return where the closing tag of an argument's value begins, or -1."""
        at = raw.find(self._closing, begin)
        while at >= 0:
            after = at + len(self._closing)
            if self._end_re.match(raw, after) or self._opening_re.match(raw, after):
                break
            at = raw.find(self._closing, after)
        return at


def _json_or_text(text: str) -> object:
    try:
        return decode_json(text)
    except ValueError:
        return text
