"""JSON round-trips whatever a model may have written."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import example, given, settings
from pydantic import TypeAdapter, ValidationError

from agentloop.plain_json import ValidText, dumps, loads, valid_text
from tests.emitted import as_json, plain_data

FAST = settings(deadline=None)


@FAST
@given(plain_data)
@example({"n": 10**4299, "text": "\ud800", "\udc00": [2**64, -(2**63) - 1, 1e308, -0.0, 1.0]})
@example([math.inf, 2**64])
@example([-math.inf])
def test_plain_data_round_trips(value: Any) -> None:
    data = dumps(value)
    assert b"\n" not in data
    assert repr(loads(data)) == repr(as_json(value))  # 1 is not 1.0, nor True
    # Others can read it, too: it is JSON.
    json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_nan_is_null_however_it_is_written() -> None:
    assert dumps(math.nan) == b"null"
    assert dumps([math.nan, 2**64]) == b"[null,18446744073709551616]"
    value = loads(b'{"a": NaN, "b": -Infinity, "c": 1e999}')  # of a file of before
    assert math.isnan(value["a"])
    assert (value["b"], value["c"]) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("text", "valid"), [("a\ud800b", "a?b"), ("\ud83d\udc0d", "??"), ("é 🐍\x00", "é 🐍\x00")]
)
def test_lone_surrogate_is_replaced_where_it_must_be(text: str, valid: str) -> None:
    assert valid_text(text) == valid
    field = TypeAdapter(ValidText)
    assert field.validate_python(text) == valid
    with pytest.raises(ValidationError):
        field.validate_python(3)


class Colour(StrEnum):
    RED = "red"


@dataclass
class Thing:
    colour: Colour
    when: date
    more: Any


@pytest.mark.parametrize("more", [1, 2**70, "\ud800"])
def test_other_types_are_written_alike_in_any_context(more: Any) -> None:
    record = Thing(Colour.RED, date(2026, 11, 22), (more, {1: {1j}, (1, 2): None}))
    plain = {"colour": "red", "when": "2026-11-22", "more": [more, {"1": "{1j}", "(1, 2)": None}]}
    assert loads(dumps(record)) == plain
    with pytest.raises(TypeError):
        dumps([more, 1j], default=None)


@pytest.mark.parametrize("depth", [150, 400])
def test_nesting_is_kept_as_deep_as_python_can(depth: int) -> None:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    assert loads(dumps(value)) == value


def test_unwritable_or_unreadable_json_is_a_value_error() -> None:
    value: Any = []
    for _ in range(200_000):
        value = [value]
    with pytest.raises(ValueError, match="nested too deeply"):
        dumps(value)
    while value:  # by hand, for whoever frees it would go as deep
        value = value[0]
    with pytest.raises(ValueError, match="digits"):
        dumps(10**5000)
    for data in (b"", b"{", b"[1] 2", b"9" * 5000, b"[" * 200_000, b"\xff", b'{"a": nope}'):
        with pytest.raises(ValueError, match=r".+"):
            loads(data)
