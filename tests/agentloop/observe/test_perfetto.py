"""Timelines as traces, for any rows."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agentloop.observe.perfetto import trace_of


def row(key: str, lanes: list[tuple[str, int]], end: int | None, group: str = "") -> dict[str, Any]:
    return {
        "id": key, "group": group, "start": lanes[0][1], "end": end, "lanes": lanes, "reward": 1.0,
        "stop": None if end is None else "answered", "turn": 1, "tokens": 7, "calls": 0,
        "failed_calls": 0, "server": "http://a",
    }  # fmt: skip


def frame(*rollouts: dict[str, Any]) -> dict[str, Any]:
    groups = [{"id": "1", "task": "37 times 48"}]
    return {"t": 110.0, "about": {"t0": 100.0}, "rollouts": rollouts, "groups": groups}


def slices(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_a_rollout_is_a_thread_of_its_group_with_a_slice_for_each_lane() -> None:
    lanes = [("wait", 1000), ("prefill", 1500), ("decode", 2000), ("tool", 4000)]
    trace = trace_of(frame(row("1.0", lanes, 5000, "1")))
    names = [one["args"]["name"] for one in trace["traceEvents"] if one["ph"] == "M"]
    assert names == ["group 1: 37 times 48", "1.0"]
    whole, *parts = slices(trace)
    assert (whole["name"], whole["ts"], whole["dur"]) == ("rollout", 1_000_000, 4_000_000)
    assert whole["args"]["stop"] == "answered"
    assert [(one["name"], one["ts"], one["dur"]) for one in parts] == [
        ("waiting for KV capacity", 1_000_000, 500_000),
        ("prefill", 1_500_000, 500_000),
        ("decode", 2_000_000, 2_000_000),
        ("tool", 4_000_000, 1_000_000),
    ]


def test_a_rollout_in_flight_ends_with_the_frame() -> None:
    whole, decode = slices(trace_of(frame(row("a", [("decode", 4000)], None))))
    assert whole["ts"] + whole["dur"] == decode["ts"] + decode["dur"] == 10_000_000
    assert "stop" not in whole["args"]


LANES = st.lists(
    st.tuples(st.sampled_from(["wait", "decode", "tool"]), st.integers(0, 9000)),
    min_size=1,
    max_size=6,
).map(lambda lanes: sorted(lanes, key=lambda lane: lane[1]))
ROWS = st.builds(
    lambda lanes, number, took, group: row(
        f"{number}", lanes, None if took is None else lanes[-1][1] + took, group
    ),
    LANES,
    st.integers(0, 99),
    st.none() | st.integers(0, 500),
    st.sampled_from(["", "1", "2"]),
)


@given(st.lists(ROWS, max_size=5))
def test_slices_lie_within_their_rollout_one_after_the_other(rows: list[dict[str, Any]]) -> None:
    found = slices(trace_of(frame(*rows)))
    assert sum(one["name"] == "rollout" for one in found) == len(rows)
    whole: dict[str, Any] = {}
    for one in found:
        assert one["dur"] >= 0
        if one["name"] == "rollout":
            whole, at = one, one["ts"]
            continue
        assert (one["pid"], one["tid"]) == (whole["pid"], whole["tid"])
        assert one["ts"] >= at
        at = one["ts"] + one["dur"]
        assert at <= whole["ts"] + whole["dur"]


def test_a_run_without_rollouts_has_an_empty_trace() -> None:
    assert trace_of({"t": 1.0, "about": {}})["traceEvents"] == []
