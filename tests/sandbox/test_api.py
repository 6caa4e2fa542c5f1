"""The cost of a request before it is validated."""

from __future__ import annotations

import itertools
import json
from typing import Any

import anyio
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.sandbox.api import (
    MAX_BATCH,
    BatchRequest,
    RequestRefused,
    RunRequest,
    ValueCounter,
    has_more_values,
    max_values,
    parse,
)
from agentloop.sandbox.held_bytes import HeldBytes
from agentloop.sandbox.settings import MAX_KEPT_BYTES, OutputLimits

TEXT = st.text(st.sampled_from('a[]{},:"\\\n') | st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    TEXT | st.integers(-9, 9) | st.none(),
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
)


def num_values(value: Any) -> int:
    """Count the opening brackets, commas and colons."""
    match value:
        case list():
            return 1 + max(0, len(value) - 1) + sum(map(num_values, value))
        case dict():
            return 1 + max(0, 2 * len(value) - 1) + sum(map(num_values, value.values()))
        case _:
            return 0


@given(JSON, st.booleans(), st.lists(st.integers(0, 400)))
def test_values_are_counted_in_whatever_pieces_they_come(
    value: Any, ascii_only: bool, cuts: list[int]
) -> None:
    text = json.dumps(value).encode() if ascii_only else orjson.dumps(value)
    counter = ValueCounter()
    for start, end in itertools.pairwise([0, *sorted(cuts), len(text)]):
        counter.feed(text[start : max(start, end)])
    assert counter.num == counter.feed(b"") == num_values(value)
    for maximum in (counter.num - 1, counter.num, counter.num + 1):
        assert has_more_values(text, maximum) == (counter.num > maximum)


@given(st.binary())
def test_values_are_also_counted_in_invalid_json(text: bytes) -> None:
    assert 0 <= ValueCounter().feed(text) <= len(text)


def test_full_batch_is_within_the_bound() -> None:
    call = {"code": "[{,:", "stdin": "", "timeout_s": 1.0}
    text = orjson.dumps({"calls": [call] * MAX_BATCH})
    assert not has_more_values(text, max_values(BatchRequest))
    assert len(parse(BatchRequest, text).calls) == MAX_BATCH


@pytest.mark.parametrize(
    "body", [{"code": "1", "timeout_s": wrong} for wrong in (True, "1", 0, -1, 3601, float("nan"))]
)
def test_numbers_are_numbers(body: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused, match=r"timeout_s|not valid JSON"):
        parse(RunRequest, json.dumps(body).encode())


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40) | st.none())))
def test_bytes_are_held_up_to_the_bound(steps: list[tuple[int, int | None]]) -> None:
    held, have = HeldBytes(50), dict.fromkeys(range(4), 0)
    for owner, num_bytes in steps:
        if num_bytes is None:
            held.free(owner)
            have[owner] = 0
            continue
        fits = sum(have.values()) - have[owner] + num_bytes <= 50
        assert held.hold(owner, num_bytes) == fits
        if fits:
            have[owner] = num_bytes
        assert held.total == sum(have.values())


async def test_waiting_for_bytes_ends_when_others_are_freed() -> None:
    held = HeldBytes(50)
    held.hold_anyway("response", 80)
    async with anyio.create_task_group() as group:
        group.start_soon(held.wait_to_hold, "next", 40)
        await anyio.wait_all_tasks_blocked()
        assert held.total == 80
        held.free("response")
    assert held.total == 40


async def test_wait_for_more_than_the_bound_gets_the_bound() -> None:
    held = HeldBytes(50)
    await held.wait_to_hold("large", 80)
    assert held.total == 50


@pytest.mark.parametrize("limits", [(0, 1), (1, 0), (1, MAX_KEPT_BYTES + 1)])
def test_limits_of_output_are_checked(limits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        OutputLimits(*limits)
