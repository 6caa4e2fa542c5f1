"""The line of a service's terminal, from its events."""

from __future__ import annotations

from agentloop.events import (
    CallFinished,
    ClientAwaited,
    RolloutAbandoned,
    RolloutFinished,
    RolloutStarted,
    TokensSampled,
    TurnStarted,
)
from agentloop.observe.throughput import Throughput
from agentloop.trajectory import ToolCallStatus, ToolResult, Trajectory


def test_line_counts_what_has_happened_since_the_last_one() -> None:
    clock = [0.0]
    throughput = Throughput(lambda: clock[0])
    record = Trajectory("a", [])
    result = ToolResult("c", "python", ToolCallStatus.OK, "", 0.0, 0.0, 1.0)
    throughput.on_event(RolloutStarted(record))
    throughput.on_event(TokensSampled("a", 0, [1] * 50, ""))
    throughput.on_event(CallFinished("a", 0, result))
    clock[0] = 10.0
    assert throughput.line(2) == (
        "last 10 s: 5 tokens/s, 0.1 calls/s, 0 finished, 1 in flight, 2 waiting for KV capacity"
    )
    clock[0] = 20.0
    assert throughput.line(0) == "last 10 s: 0 tokens/s, 0.0 calls/s, 0 finished, 1 in flight"
    throughput.on_event(RolloutFinished("a", record))
    clock[0] = 30.0
    assert throughput.line(0) == "last 10 s: 0 tokens/s, 0.0 calls/s, 1 finished, 0 in flight"


def test_session_is_in_flight_only_while_it_is_answered() -> None:
    throughput = Throughput(lambda: 0.0)
    throughput.on_event(RolloutStarted(Trajectory("a", [])))
    assert "1 in flight" in throughput.line(0)
    throughput.on_event(ClientAwaited("a"))
    assert throughput.line(0) == ""
    throughput.on_event(TurnStarted("a", 1))
    assert "1 in flight" in throughput.line(0)
    throughput.on_event(ClientAwaited("a"))
    throughput.on_event(RolloutFinished("a", Trajectory("a", [])))
    assert "0 in flight" in throughput.line(0)


def test_idle_service_is_silent() -> None:
    throughput = Throughput(lambda: 0.0)
    assert throughput.line(0) == ""
    throughput.on_event(RolloutStarted(Trajectory("a", [])))
    throughput.on_event(RolloutAbandoned("a"))
    assert "1 cancelled or failed" in throughput.line(0)
    assert throughput.line(0) == ""
