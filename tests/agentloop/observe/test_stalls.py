"""Waits of rollouts at each point, and reports of stalls."""

from __future__ import annotations

import pytest

from agentloop.events import (
    CallFinished,
    CallStarted,
    ClientAwaited,
    Event,
    RolloutAbandoned,
    RolloutStarted,
    TokensSampled,
    TurnFinished,
    TurnMoved,
    TurnPlaced,
    TurnStarted,
)
from agentloop.inference.scheduling.placement import Decision
from agentloop.observe.stalls import Stalls
from agentloop.trajectory import ToolCall, ToolCallStatus, ToolResult, Trajectory, Turn
from tests.fakes import Clock

CALL = CallStarted("r", 0, ToolCall("c", "python", {}, "", 0, 1))
DONE = CallFinished("r", 0, ToolResult("c", "python", ToolCallStatus.OK, "", 0, 0, 1))

WHY = Decision(None, "kv", "why", ())

STORY: list[tuple[Event, list[str]]] = [
    (RolloutStarted(Trajectory("r", [])), ["its first turn"]),
    (TurnStarted("r", 0), ["capacity on a server"]),
    (TurnPlaced("r", 0, "http://a", WHY), ["the first token from http://a"]),
    (TokensSampled("r", 0, [1], "x"), ["more tokens from http://a"]),
    (TurnMoved("r", "http://a", "gone"), ["capacity on a server"]),
    (TurnPlaced("r", 0, "http://b", WHY), ["the first token from http://b"]),
    (CALL, ["the tool python"]),
    (TokensSampled("r", 0, [2], "y"), ["the tool python", "more tokens from http://b"]),
    (DONE, ["more tokens from http://b"]),
    (TurnFinished("r", 0, Turn()), ["its next turn"]),
    (ClientAwaited("r"), ["its client"]),
    (TurnStarted("r", 1), ["capacity on a server"]),
    (RolloutAbandoned("r"), []),
]


def test_wait_of_a_rollout_at_each_point() -> None:
    clock = Clock()
    stalls = Stalls(clock)
    for event, expected in STORY:
        clock.now_s += 1
        stalls.on_event(event)
        assert [wait.what for wait in stalls.waits()] == expected, event
        clock.now_s += 2
        assert stalls.no_progress_s == (2 if expected and expected != ["its client"] else 0)
    assert stalls.waits() == []


def test_longest_wait_is_listed_first() -> None:
    clock = Clock()
    stalls = Stalls(clock)
    for name in "ab":
        stalls.on_event(RolloutStarted(Trajectory(name, [])))
        clock.now_s += 10
    stalls.on_event(TurnStarted("stranger", 0))
    assert [(w.rollout_id, w.waited_s) for w in stalls.waits()] == [("a", 20), ("b", 10)]
    assert "a: its first turn, 20 s\n  b: its first turn, 10 s\nservers" in stalls.report("servers")


def test_other_parts_report_their_waits() -> None:
    clock = Clock()
    stalls = Stalls(clock)
    clock.now_s += 1000  # idle, which is no stall
    with stalls.waiting("the learner", "a batch"):
        clock.now_s += 5
        assert stalls.no_progress_s == 5
        stalls.on_event(RolloutStarted(Trajectory("r", [])))
        clock.now_s += 2
        assert stalls.no_progress_s == 2
        stalls.moved()
        assert stalls.no_progress_s == 0
        assert "the learner: a batch, 7 s\n  r: its first turn, 2 s" in stalls.report()
    assert [wait.what for wait in stalls.waits()] == ["its first turn"]


def test_giving_up_a_wait_is_not_progress() -> None:
    clock = Clock()
    stalls = Stalls(clock)
    stalls.on_event(RolloutStarted(Trajectory("r", [])))

    def gives_up() -> None:
        with stalls.waiting("the learner", "a batch"):
            clock.now_s += 5
            raise TimeoutError

    with pytest.raises(TimeoutError):
        gives_up()
    assert stalls.no_progress_s == 5
    assert len(stalls.waits()) == 1


def test_session_that_waits_for_its_client_is_no_stall() -> None:
    clock = Clock()
    stalls = Stalls(clock)
    for name in ("session", "other"):
        stalls.on_event(RolloutStarted(Trajectory(name, [])))
    clock.now_s += 1
    stalls.on_event(ClientAwaited("session"))
    clock.now_s += 60
    assert stalls.no_progress_s == 60  # of the other one
    assert [wait.rollout_id for wait in stalls.waits()] == ["other", "session"]
    assert [wait.rollout_id for wait in stalls.waits(1)] == ["other"]
    stalls.on_event(RolloutAbandoned("other"))
    clock.now_s += 60
    assert stalls.no_progress_s == 0
    stalls.on_event(TurnStarted("session", 1))
    clock.now_s += 60
    assert stalls.no_progress_s == 60
