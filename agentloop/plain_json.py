"""JSON that round-trips plain data, whatever text or numbers a model has written into it.

All stored or transmitted data that a model may influence is encoded and decoded here:

    loads(dumps(value)) == value

for None, booleans, integers, finite floats, strings, lists, and dictionaries with string keys.
orjson alone does not guarantee that: it rejects lone surrogates and integers of more than 64 bits,
and reads the latter as floats. It is tried first because it is fast and nearly always sufficient.

Values that JSON cannot represent:

- A float that is not finite is written as null. Where that matters, reject it earlier, as
  `decode_call` does. Files with NaN or Infinity can be read.
- A tuple becomes a list, a dataclass a dictionary, a key that is not a string is converted to one,
  and any other value is converted by `default`.
- Two adjacent surrogates that form a pair are read as the character that they encode.

A lone surrogate cannot be encoded as UTF-8; `valid_text` replaces it where that is needed, as for
tokenizers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import orjson
from pydantic import BeforeValidator
from pydantic_core import from_json

__all__ = [
    "JsonObject",
    "ValidText",
    "dumps",
    "is_encodable",
    "loads",
    "number_of",
    "read_rows",
    "valid_text",
    "with_whole_pairs",
]

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object as `loads` returns it, before its fields are checked."""


def read_rows(path: Path, *, last: int = 0) -> tuple[list[JsonObject], list[int]]:
    """Read a file with an object in each line, which may still be written to.

    An incomplete last line is not damage: it may be from a kill or a write in progress.

    Args:
        last: How many lines to read, from the end; 0: all.

    Returns:
        The objects, and the numbers of the lines that are none.

    Raises:
        OSError: The file cannot be read.
    """
    rows, bad = [], []
    lines = [*enumerate(path.read_bytes().split(b"\n")[:-1], 1)]
    for number, line in lines[-last:]:
        try:
            row = loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            bad.append(number)
    return rows, bad


def valid_text(text: str) -> str:
    """Return `text` with each lone surrogate replaced by a question mark."""
    return text.encode("utf-8", "replace").decode()


_ESCAPE_RE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # a pair
    r"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
    r"|\\.",
    re.DOTALL,
)


def with_whole_pairs(text: str) -> str:
    """Return JSON text with each escape of half a surrogate pair replaced by U+FFFD.

    JavaScript writes such halves for text that was cut inside a character.
    """
    if "\\ud" not in text and "\\uD" not in text:
        return text
    return _ESCAPE_RE.sub(lambda match: "\\ufffd" if match[1] else match[0], text)


ValidText = Annotated[
    str, BeforeValidator(lambda value: valid_text(value) if isinstance(value, str) else value)
]
"""A type for pydantic fields that accepts any string, made valid by `valid_text`."""


def is_encodable(value: object) -> bool:
    """Return whether all strings in a value can be encoded as UTF-8."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
    elif isinstance(value, Mapping):
        return all(is_encodable(key) and is_encodable(element) for key, element in value.items())
    elif isinstance(value, list):
        return all(map(is_encodable, value))
    return True


def dumps(value: object, *, default: Callable[[object], object] | None = str) -> bytes:
    """Return `value` as JSON in UTF-8, on one line.

    Args:
        default: converts values that are not plain data; None: such a value is an error.

    Raises:
        TypeError: `value` contains something other than plain data, and `default` is None.
        ValueError: `value` is nested too deeply, or contains an integer with more digits than
            Python converts (`sys.get_int_max_str_digits()`).
    """
    try:
        return orjson.dumps(value, default=default)
    except TypeError:
        try:
            return json.dumps(_plain(value, default), separators=(",", ":")).encode()
        except RecursionError as error:
            raise ValueError("the JSON is nested too deeply") from error


def loads(data: bytes | str) -> Any:
    """Parse JSON.

    Raises:
        json.JSONDecodeError: `data` is not JSON.
        ValueError: `data` contains an integer with more digits than Python converts, is nested too
            deeply, or is not valid UTF-8.
    """
    try:
        return from_json(data)
    except ValueError:
        try:
            return json.loads(data)
        except RecursionError as error:
            raise ValueError("the JSON is nested too deeply") from error


def number_of(value: object) -> float | None:
    """Return `value` if it is a number, otherwise None; a boolean is none."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _plain(value: object, default: Callable[[object], object] | None) -> object:
    """Convert `value` so that `json.dumps` writes it the way orjson would."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(element, default) for element in value]
    if isinstance(value, dict):
        return {
            key if isinstance(key, str | int | float | None) else str(key): _plain(element, default)
            for key, element in value.items()
        }
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name), default) for field in fields(value)}
    return json.loads(orjson.dumps(value, default=default))
