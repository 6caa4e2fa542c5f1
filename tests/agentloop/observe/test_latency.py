"""Percentiles of turns and calls, for any durations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.observe.latency import Duration, RecentDurations, nearest_rank, of_turn, summary_of

SECONDS = st.floats(0.0, 100.0, allow_nan=False)


def test_turn_has_three_durations() -> None:
    durations = dict(of_turn(1.0, 1.5, 3.5, 5))
    assert durations == {Duration.FIRST_TOKEN: 0.5, Duration.TURN: 2.5, Duration.TOKEN: 0.5}


@pytest.mark.parametrize("first_token_s", [None, 4.0])
def test_turn_that_was_cut_off_before_it_sampled_has_none(first_token_s: float | None) -> None:
    assert [*of_turn(1.0, first_token_s, 0.0, 0)] == []


def test_turn_of_one_token_has_no_time_per_token() -> None:
    assert Duration.TOKEN not in dict(of_turn(0.0, 1.0, 1.0, 1))


@given(SECONDS, SECONDS, SECONDS, st.integers(2, 50))
def test_parts_of_a_turn_are_the_turn(
    started: float, waited: float, decoded: float, num: int
) -> None:
    durations = dict(of_turn(started, started + waited, started + waited + decoded, num))
    parts = durations[Duration.FIRST_TOKEN] + durations[Duration.TOKEN] * (num - 1)
    assert parts == pytest.approx(durations[Duration.TURN], abs=1e-9)


@given(st.lists(SECONDS, min_size=1), st.floats(0.01, 1.0))
def test_percentile_is_a_value_with_enough_values_not_above_it(
    values: list[float], share: float
) -> None:
    percentile = nearest_rank(sorted(values), share)
    assert percentile in values
    assert sum(value <= percentile for value in values) >= share * len(values) - 1e-9


def test_only_what_ended_in_the_last_minute_counts() -> None:
    recent = RecentDurations()
    recent.add(Duration.CALL, 0.0, 9.0)
    recent.add(Duration.CALL, 50.0, 0.25)
    recent.add(Duration.CALL, 61.0, 0.5)
    assert recent.to_dict(61.0)["of"] == {"call": {"num": 2, "p50": 250.0, "p95": 500.0}}
    assert recent.to_dict(1000.0)["of"] == {}


def test_number_of_durations_is_bounded() -> None:
    recent = RecentDurations()
    for _ in range(5000):
        recent.add(Duration.TURN, 0.0, 1.0)
    summary = recent.to_dict(1.0)
    assert summary["of"]["turn"]["num"] == summary["max_kept"]


def test_kind_without_durations_is_left_out() -> None:
    assert summary_of({Duration.TURN: []}) == {}
