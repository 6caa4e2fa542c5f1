"""Transitions of every state by every event."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.inference.scheduling.health import Health, ServerState

HEALTHY, SUSPECT, DEAD, RESTARTING, STALE, RETIRED = ServerState

Event = Callable[[Health], ServerState]

EVENTS: dict[str, Event] = {
    "request fails": lambda health: health.request_failed("broken pipe"),
    "request succeeds": lambda health: health.request_succeeded(),
    "probe fails": lambda health: health.probe_failed("timeout"),
    "probe, current": lambda health: health.probe_succeeded(has_weights=True),
    "probe, others": lambda health: health.probe_succeeded(has_weights=False),
    "exits": lambda health: health.mark_exited("signal 9"),
    "restarting": lambda health: health.restarting(),
    "weights missed": lambda health: health.weights_missed(),
    "weights loaded": lambda health: health.weights_loaded(),
    "retire": lambda health: health.retire(),
}

# Events that lead to each state; the limit is three failures of a kind.
REACHED: dict[ServerState, list[str]] = {
    HEALTHY: [],
    SUSPECT: ["request fails", "request fails"],
    DEAD: ["exits"],
    RESTARTING: ["exits", "restarting"],
    STALE: ["weights missed"],
    RETIRED: ["retire"],
}

# One row per event: the next state of HEALTHY, SUSPECT, DEAD, RESTARTING, STALE and RETIRED.
TABLE: dict[str, list[ServerState]] = {
    "request fails": [SUSPECT, DEAD, DEAD, RESTARTING, STALE, RETIRED],
    "request succeeds": [HEALTHY, HEALTHY, DEAD, RESTARTING, STALE, RETIRED],
    "probe fails": [SUSPECT, SUSPECT, DEAD, RESTARTING, STALE, RETIRED],
    "probe, current": [HEALTHY, HEALTHY, HEALTHY, HEALTHY, HEALTHY, RETIRED],
    "probe, others": [STALE, STALE, STALE, STALE, STALE, RETIRED],
    "exits": [DEAD, DEAD, DEAD, DEAD, DEAD, RETIRED],
    "restarting": [HEALTHY, SUSPECT, RESTARTING, RESTARTING, STALE, RETIRED],
    "weights missed": [STALE, STALE, DEAD, RESTARTING, STALE, RETIRED],
    "weights loaded": [HEALTHY, SUSPECT, DEAD, RESTARTING, HEALTHY, RETIRED],
    "retire": [RETIRED] * 6,
}


def health_in(state: ServerState) -> Health:
    health = Health()
    for event in REACHED[state]:
        EVENTS[event](health)
    assert health.state is state
    return health


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", ServerState)
def test_transitions(state: ServerState, event: str) -> None:
    health = health_in(state)
    after = TABLE[event][list(ServerState).index(state)]
    assert EVENTS[event](health) is after
    assert health.state is after


def test_permissions_of_each_state() -> None:
    allowed = {
        state: (state.takes_new, state.takes_own, state.keeps_running, state.takes_weights)
        for state in ServerState
    }
    assert allowed == {
        HEALTHY: (True, True, True, True),
        SUSPECT: (False, True, True, True),
        DEAD: (False, False, False, False),
        RESTARTING: (False, False, False, False),
        STALE: (False, False, True, True),
        RETIRED: (False, False, True, False),
    }


def test_failures_of_requests_and_of_probes_are_counted_apart() -> None:
    health = Health()
    for _ in range(2):
        health.request_failed("broken pipe")
        health.probe_failed("timeout")
    assert health.state is SUSPECT
    health.probe_failed("timeout")
    assert (health.state, health.reason) == (DEAD, "timeout")


def test_probe_that_succeeds_does_not_excuse_requests_that_fail() -> None:
    health = Health()
    for _ in range(3):
        assert health.state is HEALTHY
        health.request_failed("broken pipe")
        last = health.state
        health.probe_succeeded(has_weights=True)
    assert last is DEAD
    assert health.state is HEALTHY  # another try
    assert health.request_failed("broken pipe") is DEAD  # the last one
    health.restarting()
    health.probe_succeeded(has_weights=True)
    assert health.request_failed("broken pipe") is SUSPECT  # another process


def test_request_that_succeeds_does_not_excuse_probes_that_fail() -> None:
    health = Health()
    health.probe_failed("timeout")
    assert health.request_succeeded() is SUSPECT
    assert health.probe_succeeded(has_weights=True) is HEALTHY


def test_streams_of_the_previous_process_do_not_count() -> None:
    health = health_in(RESTARTING)
    for _ in range(5):
        health.request_failed("the connection was closed")
    health.probe_succeeded(has_weights=True)
    assert health.request_failed("broken pipe") is SUSPECT


def test_server_that_came_back_says_why_it_is_stale() -> None:
    health = health_in(DEAD)
    health.probe_succeeded(has_weights=False)
    assert (health.state, health.reason) == (STALE, "it came back with different weights")
    health.weights_loaded()
    assert health.reason == ""


@given(st.lists(st.sampled_from(sorted(EVENTS))))
def test_only_servers_with_the_current_weights_are_healthy(events: list[str]) -> None:
    """A server that missed a weight sync serves only once it has the weights."""
    health = Health()
    has_weights = True
    for event in events:
        before = health.state
        EVENTS[event](health)
        if event in ("weights missed", "exits", "probe, others"):
            has_weights = False
        elif event == "probe, current" or before not in (DEAD, RESTARTING):
            has_weights = has_weights or event in ("probe, current", "weights loaded")
        assert has_weights or not health.state.takes_own
        assert before is not RETIRED or health.state is RETIRED
