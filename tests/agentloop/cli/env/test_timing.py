"""Where the time of a rollout went."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.cli.env.timing import Activity, Timeline, seconds_by_activity
from agentloop.events import (
    CallFinished,
    CallStarted,
    Event,
    RolloutAbandoned,
    TurnFinished,
    TurnMoved,
    TurnPlaced,
    TurnSampled,
    TurnStarted,
)
from agentloop.inference.scheduling.placement import Decision
from agentloop.trajectory import ToolCall, ToolCallStatus, ToolResult, Turn

MODEL, TOOLS, WAITING, ENVIRONMENT = Activity
WHY = Decision(None, "kv", "the cheapest", ())


def test_overlapping_spans_count_for_the_foremost_activity() -> None:
    spans = [(WAITING, 0.0, 4.0), (TOOLS, 2.0, 6.0), (MODEL, 3.0, 5.0), (MODEL, 9.0, 99.0)]
    assert seconds_by_activity(spans, 0.0, 10.0) == {
        MODEL: 3.0,  # 3 to 5, 9 to 10
        TOOLS: 2.0,  # 2 to 3, 5 to 6
        WAITING: 2.0,
        ENVIRONMENT: 3.0,
    }
    assert seconds_by_activity([], 1.0, 3.0)[ENVIRONMENT] == 2.0
    assert sum(seconds_by_activity(spans, 5.0, 5.0).values()) == 0


SPANS = st.lists(
    st.tuples(st.sampled_from(Activity), st.floats(-5, 15), st.floats(-5, 15)), max_size=12
)


@settings(deadline=None)
@given(SPANS)
def test_all_of_the_time_is_accounted_for(spans: list[tuple[Activity, float, float]]) -> None:
    seconds = seconds_by_activity(spans, 0.0, 10.0)
    assert sum(seconds.values()) == pytest.approx(10.0)
    assert min(seconds.values()) >= 0


def result(dispatched_s: float, started_s: float, ended_s: float) -> ToolResult:
    return ToolResult("c", "guess", ToolCallStatus.OK, "", dispatched_s, started_s, ended_s)


CALL = ToolCall("c", "guess", {}, "", 0, 1)


def spans_of(*events: tuple[float, Event]) -> list[tuple[Activity, float, float]]:
    """Return the spans, without empty ones, of events at these times."""
    now_s = 0.0

    def clock() -> float:
        return now_s

    timeline = Timeline(clock)
    for at_s, event in events:
        now_s = at_s
        timeline.on_event(event)
    return sorted((span for span in timeline.spans if span[1] < span[2]), key=lambda span: span[1:])


def test_turn_waits_generates_and_calls() -> None:
    assert spans_of(
        (1, TurnStarted("r", 0)),
        (2, TurnPlaced("r", 0, "s", WHY)),
        (4, CallStarted("r", 0, CALL)),
        (5, TurnSampled("r", 0)),
        (9, CallFinished("r", 0, result(0.5, 2.5, 5.5))),
        (9, TurnFinished("r", 0, Turn())),
    ) == [(WAITING, 1, 2), (MODEL, 2, 5), (WAITING, 4, 6), (TOOLS, 6, 9)]


def test_turn_that_moves_waits_again() -> None:
    assert spans_of(
        (0, TurnStarted("r", 0)),
        (1, TurnPlaced("r", 0, "s", WHY)),
        (3, TurnMoved("r", "s", "it died")),
        (4, TurnPlaced("r", 0, "t", WHY)),
        (6, TurnSampled("r", 0)),
    ) == [(WAITING, 0, 1), (MODEL, 1, 3), (WAITING, 3, 4), (MODEL, 4, 6)]


def test_unfinished_spans_end_with_their_own_turn() -> None:
    assert spans_of(
        (0, TurnStarted("r", 0)),
        (1, TurnStarted("other", 0)),
        (2, TurnPlaced("r", 0, "s", WHY)),
        (3, CallStarted("r", 0, CALL)),
        (5, TurnFinished("r", 0, Turn())),
        (6, RolloutAbandoned("other")),
    ) == [(WAITING, 0, 2), (WAITING, 1, 6), (MODEL, 2, 5), (TOOLS, 3, 5)]
