"""Restarts are bounded in every window and follow each other ever more slowly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentloop.inference.processes.restarts import Restarts


@given(st.lists(st.floats(0, 400), max_size=30), st.integers(0, 5))
def test_restarts_are_bounded_in_every_window(gaps: list[float], max_restarts: int) -> None:
    restarts, now_s, starts = Restarts(max_restarts, window_s=600.0), 0.0, list[float]()
    for gap in gaps:
        now_s += gap
        delay_s = restarts.record_death(now_s)
        recent = [start for start in starts if now_s - start < 600.0]
        assert (delay_s is None) == (len(recent) >= max_restarts)
        if delay_s is not None:
            assert 0 <= delay_s <= 30
            assert (delay_s == 0) == (not recent)
            starts.append(now_s)


def test_restart_delay_doubles_to_half_a_minute_within_the_window() -> None:
    restarts = Restarts(8, window_s=600.0)
    assert [restarts.record_death(0.0) for _ in range(9)] == [0, 1, 2, 4, 8, 16, 30, 30, None]
    assert restarts.record_death(599.9) is None
    assert restarts.record_death(600.0) == 0
