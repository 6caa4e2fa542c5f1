"""Plain data as JSON, and back, whatever a model wrote into it.

All that is kept or sent, and that a model may have a hand in, goes through here:

    loads(dumps(value)) == value

for None, booleans, integers, finite floats, text, lists, and dictionaries whose keys are text.
orjson alone does not give that: it refuses half of a surrogate pair and integers of more than 64
bits, and reads the latter as floats. It is tried first, since it is fast, and nearly always enough.

What JSON has no form for:

- A float that is not finite is written as null. Where that matters, refuse it before, as
  `decode_call` does. Files that hold NaN or Infinity can be read.
- A tuple becomes a list, a dataclass a dictionary, a key that is not text the text of it, and
  anything else what `default` makes of it.
- Two halves of a surrogate pair that stand side by side are read as the character they make.

Such a half has no UTF-8; where that is needed, as by tokenizers, `valid_text` replaces it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Annotated, Any

import orjson
from pydantic import BeforeValidator
from pydantic_core import from_json

__all__ = ["ValidText", "dumps", "loads", "valid_text"]


def valid_text(text: str) -> str:
    """Return `text` with a question mark for each half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode()


ValidText = Annotated[
    str, BeforeValidator(lambda value: valid_text(value) if isinstance(value, str) else value)
]
"""A field of a pydantic model that takes any text, by `valid_text`."""


def dumps(value: Any, *, default: Callable[[Any], Any] | None = str) -> bytes:
    """Return `value` as JSON in UTF-8, on one line.

    Args:
        default: called with what is not plain data; None: that is an error.

    Raises:
        TypeError: it holds what is not plain data, and `default` is None.
        ValueError: it is nested too deeply, or an integer has more digits than Python writes
            (`sys.get_int_max_str_digits()`).
    """
    try:
        return orjson.dumps(value, default=default)
    except TypeError:
        try:
            return json.dumps(_plain(value, default), separators=(",", ":")).encode()
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error


def loads(data: bytes | str) -> Any:
    """Return what JSON says.

    Raises:
        json.JSONDecodeError: it is not JSON.
        ValueError: it holds an integer of more digits than Python reads, or is nested too deeply,
            or is not text.
    """
    try:
        return from_json(data)
    except ValueError:
        try:
            return json.loads(data)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error


def _plain(value: Any, default: Callable[[Any], Any] | None) -> Any:
    """Return what `json.dumps` writes as orjson would, without any help."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(one, default) for one in value]
    if isinstance(value, dict):
        return {
            key if isinstance(key, str | int | float | None) else str(key): _plain(one, default)
            for key, one in value.items()
        }
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: _plain(getattr(value, one.name), default) for one in fields(value)}
    return json.loads(orjson.dumps(value, default=default))
