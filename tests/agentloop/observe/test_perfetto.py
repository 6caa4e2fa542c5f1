"""Timelines as traces, for any rows."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agentloop.observe.frames import BoardFrame
from agentloop.observe.perfetto import TraceEvent, TraceFile, trace_of


def row(key: str, lanes: list[tuple[str, int]], end: int | None, group: str = "") -> dict[str, Any]:
    return {
        "id": key, "group": group, "start": lanes[0][1], "end": end, "lanes": lanes, "reward": 1.0,
        "stop": None if end is None else "answered", "turn": 1, "tokens": 7, "calls": 0,
        "failed_calls": 0, "server": "http://a",
    }  # fmt: skip


def frame(*rollouts: dict[str, Any]) -> BoardFrame:
    groups: Any = [{"id": "1", "task": "37 times 48"}]
    rows: Any = rollouts
    return {"t": 110.0, "about": {"t0": 100.0}, "rollouts": rows, "groups": groups}


def slices(trace: TraceFile) -> list[TraceEvent]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_rollout_is_a_thread_with_a_slice_for_each_lane() -> None:
    lanes = [("wait", 1000), ("prefill", 1500), ("decode", 2000), ("tool", 4000)]
    trace = trace_of(frame(row("1.0", lanes, 5000, "1")))
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"]
    assert names == ["group 1: 37 times 48", "1.0"]
    rollout, *parts = slices(trace)
    assert (rollout["name"], rollout["ts"], rollout["dur"]) == ("rollout", 1_000_000, 4_000_000)
    assert rollout["args"]["stop"] == "answered"
    assert [(event["name"], event["ts"], event["dur"]) for event in parts] == [
        ("waiting for KV capacity", 1_000_000, 500_000),
        ("prefill", 1_500_000, 500_000),
        ("decode", 2_000_000, 2_000_000),
        ("tool", 4_000_000, 1_000_000),
    ]


def test_rollout_in_flight_ends_with_the_frame() -> None:
    rollout, decode = slices(trace_of(frame(row("a", [("decode", 4000)], None))))
    assert rollout["ts"] + rollout["dur"] == decode["ts"] + decode["dur"] == 10_000_000
    assert "stop" not in rollout["args"]


LANES = st.lists(
    st.tuples(st.sampled_from(["wait", "decode", "tool"]), st.integers(0, 9000)),
    min_size=1,
    max_size=6,
).map(lambda lanes: sorted(lanes, key=lambda lane: lane[1]))
ROWS = st.builds(
    lambda lanes, number, duration, group: row(
        f"{number}", lanes, None if duration is None else lanes[-1][1] + duration, group
    ),
    LANES,
    st.integers(0, 99),
    st.none() | st.integers(0, 500),
    st.sampled_from(["", "1", "2"]),
)


@given(st.lists(ROWS, max_size=5))
def test_slices_lie_within_their_rollout_one_after_the_other(rows: list[dict[str, Any]]) -> None:
    events = slices(trace_of(frame(*rows)))
    assert sum(event["name"] == "rollout" for event in events) == len(rows)
    rollout, at = next(iter(events), None), 0
    for event in events:
        assert event["dur"] >= 0
        if event["name"] == "rollout":
            rollout, at = event, event["ts"]
            continue
        assert rollout is not None
        assert (event["pid"], event["tid"]) == (rollout["pid"], rollout["tid"])
        assert event["ts"] >= at
        at = event["ts"] + event["dur"]
        assert at <= rollout["ts"] + rollout["dur"]


def test_run_without_rollouts_has_an_empty_trace() -> None:
    assert trace_of({"t": 1.0, "about": {}})["traceEvents"] == []
