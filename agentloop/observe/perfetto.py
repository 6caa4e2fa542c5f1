"""The timelines of a run's rollouts as a file that Perfetto reads. Pure.

    the page's rows of rollouts and groups ──> events of Chrome's trace format, one track a rollout

https://ui.perfetto.dev opens the file. The learner and weight syncs have no tracks: the rows of
steps say how long they took, but not when.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NotRequired, TypedDict

from agentloop.observe.frames import BoardFrame, RolloutSummary
from agentloop.plain_json import number_of

_WORDS = {
    "wait": "waiting for KV capacity",
    "client": "waiting for client",
    "siblings": "waiting for group",
    "reward": "scoring",
}


class TraceEvent(TypedDict):
    """A slice ("X"), or the name of a process or a thread ("M")."""

    name: str
    ph: Literal["X", "M"]
    pid: int
    tid: int
    ts: NotRequired[int]
    dur: NotRequired[int]
    args: NotRequired[Mapping[str, object]]


class TraceFile(TypedDict):
    """The contents of a trace file; the names are those of Chrome's format."""

    traceEvents: list[TraceEvent]
    displayTimeUnit: str
    otherData: Mapping[str, object]


def trace_of(frame: BoardFrame) -> TraceFile:
    """Return the trace of a whole frame (see `PageData.frame`).

    Groups are processes and rollouts are their threads. Times are microseconds since the time that
    the frame's rows are relative to. Of a rollout in flight, the last slice ends with the frame.
    """
    run = frame.get("about", {})
    t0 = number_of(run.get("t0")) or 0.0
    now_ms = round(1000 * (frame.get("t", t0) - t0))
    tasks = {group["id"]: group.get("task") for group in frame.get("groups", ())}
    processes: dict[str, int] = {}
    events: list[TraceEvent] = []
    rollouts = sorted(frame.get("rollouts", ()), key=lambda row: (row["start"], row["id"]))
    for thread, row in enumerate(rollouts, 1):
        group = row["group"]
        if group not in processes:
            processes[group] = len(processes) + 1
            task = tasks.get(group)
            name = f"group {group}" if group else "rollouts"
            name = f"{name}: {task}" if task not in (None, "", group) else name
            events.append(_name("process_name", processes[group], 0, name))
        events.append(_name("thread_name", processes[group], thread, row["id"]))
        events += _slices(row, processes[group], thread, now_ms)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"run": run.get("title", ""), "begun_unix_s": t0},
    }


def _slices(row: RolloutSummary, process: int, thread: int, now_ms: int) -> Iterator[TraceEvent]:
    """Yield the rollout as a slice, and within it a slice for each of its lanes."""
    end = row["end"] if row["end"] is not None else max(now_ms, row["start"])
    fields = {
        "stop": row["stop"],
        "reward": row["reward"],
        "turn": row["turn"],
        "tokens": row["tokens"],
        "calls": row["calls"],
        "failed_calls": row["failed_calls"],
        "server": row["server"],
    }
    arguments = {name: value for name, value in fields.items() if value not in (None, "")}
    yield {**_slice("rollout", row["start"], end, process, thread), "args": arguments}
    lanes = row["lanes"]
    for (lane, begin), until in zip(lanes, [*(at for _, at in lanes[1:]), end], strict=True):
        begin, until = max(begin, row["start"]), min(until, end)
        if until > begin:
            yield _slice(_WORDS.get(lane, lane), begin, until, process, thread)


def _slice(name: str, begin_ms: int, end_ms: int, process: int, thread: int) -> TraceEvent:
    return {
        "name": name,
        "ph": "X",
        "ts": 1000 * begin_ms,
        "dur": 1000 * max(0, end_ms - begin_ms),
        "pid": process,
        "tid": thread,
    }


def _name(kind: str, process: int, thread: int, name: str) -> TraceEvent:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
