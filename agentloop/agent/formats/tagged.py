"""Calls whose arguments are plain text between tags, one tag per argument."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from agentloop.agent.formats.values import Parsed, Schemas, decode_json, decode_value

__all__ = ["TaggedForm"]


class TaggedForm:
    """Parses a call: a head with the tool's name, and arguments between tags.

    Only what an argument does not contain ends it: its text is taken up to the first closing tag.
    """

    def __init__(self, head: str, argument: str, *, example: str, trims_newlines: bool) -> None:
        """
        Args:
            head: Pattern whose group `name` is the tool's name.
            argument: Pattern of an argument with the groups `key`, `value` and, where the form says
                so, `string`: "true" or "false".
            example: The form, to show in an error.
            trims_newlines: Whether a newline after the opening tag and one before the closing tag
                are markup.
        """
        self._head_re = re.compile(head, re.DOTALL)
        self._argument_re = re.compile(argument, re.DOTALL)
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
        properties = schemas.get(name, {}).get("properties") or {}
        arguments: dict[str, object] = {}
        at = head.end()
        for match in self._argument_re.finditer(raw, at):
            if raw[at : match.start()].strip():
                break
            value = match["value"]
            if self._trims_newlines:
                value = value.removeprefix("\n").removesuffix("\n")
            key, is_string = match["key"].strip(), match.groupdict().get("string")
            arguments[key] = (
                decode_value(value, properties.get(key))
                if is_string is None
                else value
                if is_string == "true"
                else _json_or_text(value)
            )
            at = match.end()
        if re.sub(r"</[^<>]*>", "", raw[at:]).strip():
            shown = raw[at:].strip()[:40]
            return "", {}, f"the tool call must have the form {self._example}: unexpected {shown!r}"
        return name, arguments, None


def _json_or_text(text: str) -> object:
    try:
        return decode_json(text)
    except ValueError:
        return text
