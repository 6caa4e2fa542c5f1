"""Show a run from its folder: after it has ended, or from another process.

    trajectories/group-*.jsonl, metrics.jsonl ──read on request──> rows, rollouts, curves

The folder is read again every few seconds, in case the run is still active. Data that only the
running process has, such as servers and waits, is not shown.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import anyio

from agentloop.agent.chat_format import ChatFormat
from agentloop.errors import NotThere
from agentloop.observe.bottleneck import Part, ServedOn, Spent, split_tool_time
from agentloop.observe.frames import (
    BoardFrame,
    GroupDetails,
    GroupSummary,
    Lane,
    MemberSummary,
    RolloutSummary,
    first_words,
)
from agentloop.observe.latency import Duration, of_turn, summary_of
from agentloop.observe.record import RecordReader
from agentloop.observe.runs import curves, read_metrics, runs_beside, start_metrics
from agentloop.plain_json import JsonObject, dumps, loads, number_of
from agentloop.trajectory import ToolCallStatus, Trajectory, TurnEnd, rollout_of, union_s

__all__ = ["Archive", "read_group", "read_rollout"]

_MAX_GROUPS = 500  # newest ones only
_MAX_ROLLOUTS = 2_000
_MAX_ROWS = 500  # per frame
_LOOK_EVERY_S = 3.0
_MAX_DIGITS = 18  # of a group's number
_DAMAGED = (KeyError, TypeError, ValueError, AttributeError)
_VERDICT = ("reward", "answer", "reason", "advantage", "dropped")
_SERVED = ("model", "branch", "parent")  # of conversations that a service has recorded

_Span = tuple[float, float]
_Durations = Mapping[Duration, list[float]]


class _Summary(NamedTuple):
    """A group's file. Times are Unix times, of rows in milliseconds.

    Attributes:
        group: None: no rollout can be read.
        spent, durations, spans: what the turns took, how long, and when they ran.
    """

    group: GroupSummary | None
    rollouts: list[RolloutSummary]
    spent: Spent
    durations: _Durations
    spans: list[_Span]


@dataclass
class Archive:
    """A run's folder as the page shows it; implements `PageData`.

    Attributes:
        chat: Decodes token by token; if None, text is shown by turn.
        progress: Returns the total of steps, and how the run has ended.
        served_on: The hardware of its servers, as far as its settings say.
    """

    folder: Path
    about: Mapping[str, object]
    chat: ChatFormat | None = None
    progress: Callable[[], Mapping[str, object]] = dict
    served_on: ServedOn = ServedOn.UNKNOWN
    _read: dict[tuple[Path, int], _Summary] = field(default_factory=dict)

    async def frames(self, last_id: str | None = None) -> AsyncGenerator[tuple[str, bytes]]:
        last_extent: tuple[int, int] | None = None
        while True:
            extent = await anyio.to_thread.run_sync(_extent, self.folder)
            if extent != last_extent:
                last_extent = extent
                state = await self.frame()
                for frame in _split(state):
                    yield "", dumps(frame)
            await anyio.sleep(_LOOK_EVERY_S)
            yield "", b""

    async def frame(self) -> BoardFrame:
        return await anyio.to_thread.run_sync(self._frame)

    async def rollout(self, key: str) -> dict[str, Any]:
        rollout = await anyio.to_thread.run_sync(read_rollout, self.folder, key, self.chat)
        if rollout is None:
            raise NotThere(f"rollout {key!r}: not found in {self.folder / 'trajectories'}")
        return rollout

    async def rollout_events(self, key: str) -> AsyncGenerator[tuple[str, Mapping[str, object]]]:
        yield "end", await self.rollout(key)

    async def group(self, name: str) -> GroupDetails:
        group = await anyio.to_thread.run_sync(read_group, self.folder, name, self.chat)
        if group is None:
            raise NotThere(f"group {name!r}: not found in {self.folder / 'trajectories'}")
        return group

    async def runs(self) -> Sequence[Mapping[str, object]]:
        return await anyio.to_thread.run_sync(runs_beside, self.folder)

    async def curves(self, run: str) -> Mapping[str, object]:
        return await anyio.to_thread.run_sync(curves, self.folder, run)

    def _frame(self) -> BoardFrame:
        paths = sorted((self.folder / "trajectories").glob("group-*.jsonl"))[-_MAX_GROUPS:]
        read: dict[tuple[Path, int], _Summary] = {}
        num_rollouts = 0
        for path in reversed(paths):
            try:  # files appear complete; a resumed evaluation rewrites them
                key = path, path.stat().st_mtime_ns
            except OSError:
                continue
            summary = self._read.get(key) or _summary(path, self.chat)
            num_rollouts += len(summary.rollouts)
            if read and num_rollouts > _MAX_ROLLOUTS:
                break
            read[key] = summary
        self._read = read
        summaries = [summary for summary in reversed(read.values()) if summary.rollouts]
        rows = [row for summary in summaries for row in summary.rollouts]
        t0_ms = min((row["start"] for row in rows), default=0)
        t0 = t0_ms / 1000
        groups = [summary.group for summary in summaries if summary.group is not None]
        steps = read_metrics(self.folder)
        current = {**(_results(self.folder) or _moment(self.folder, steps)), **self.progress()}
        return {
            "rev": 0,
            "t": time.time(),
            "full": True,
            "about": {**self.about, "t0": t0, "live": False},
            "now": current | (self._times(summaries, steps) if summaries else {}),
            "rollouts": [_relative_rollout(t0_ms, row) for row in rows],
            "groups": [_relative_group(t0_ms, group) for group in groups],
            "steps": [*start_metrics(self.folder), *steps],
        }

    def _times(
        self, summaries: Sequence[_Summary], steps: Sequence[Mapping[str, object]]
    ) -> dict[str, object]:
        of_all = {
            kind: [s for summary in summaries for s in summary.durations[kind]] for kind in Duration
        }
        return {
            "spent": _spent(summaries, steps).to_dict(self.served_on),
            "latency": {"of": summary_of(of_all)},
        }


def read_rollout(folder: Path, key: str, chat: ChatFormat | None) -> dict[str, Any] | None:
    """Return a rollout from the run's folder, as `RecordReader.whole` does, or None.

    None means that it is missing or damaged.
    """
    rows = _rows_of(folder, key.rpartition(".")[0])
    row = next((candidate for candidate in rows if candidate["trajectory"]["id"] == key), None)
    if row is None:
        return None
    verdict = {
        "group": _group_of(row),
        "task": row.get("title") or row["task"],
        "state": "done",
        "stop_reason": row["trajectory"]["stop_reason"],
        "no_reward": row.get("no_reward"),
        **{name: row[name] for name in _VERDICT},
        **{name: row.get(name) for name in _SERVED},
    }
    try:
        record = Trajectory.from_dict(row["trajectory"])
        return RecordReader(record, chat, lambda: verdict).whole()
    except _DAMAGED:
        return None


def read_group(folder: Path, name: str, chat: ChatFormat | None) -> GroupDetails | None:
    """Return a group from the run's folder, as `PageData.group` does, or None if it is missing."""
    rows = _rows_of(folder, name)
    if not rows:
        return None
    return {
        **_group_row(rows, chat),
        "prompt": _question(rows[0], chat),
        "rollouts": [_member(row, is_chosen=_is_chosen(rows)) for row in rows],
    }


def _question(row: JsonObject, chat: ChatFormat | None) -> str:
    question: str | None = row.get("question")
    if question or chat is None:
        return question or ""
    try:
        return chat.last_user_text(row["trajectory"]["prompt_ids"])
    except (OverflowError, *_DAMAGED):
        return ""


def _rows_of(folder: Path, group: str) -> list[JsonObject]:
    """Return the rollouts of a group; its name begins with its number."""
    number = group.partition("-")[0]
    if not number.isdecimal() or len(number) > _MAX_DIGITS:  # untrusted input must not form a path
        return []
    rows = _read(_path(folder, int(number)))
    return [row for row in rows if _group_of(row) == group]


def _path(folder: Path, number: int) -> Path:
    return folder / "trajectories" / f"group-{number:07}.jsonl"


def _read(path: Path) -> list[JsonObject]:
    """Return the rollouts of a group, without damaged ones."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            row = loads(line)
            _group_row([row], None), _member(row, is_chosen=True)
        except _DAMAGED:
            continue
        rows.append(row)
    return rows


def _summary(path: Path, chat: ChatFormat | None) -> _Summary:
    rows = _read(path)
    spent, spans = Spent(), list[_Span]()
    durations: dict[Duration, list[float]] = {kind: [] for kind in Duration}
    if not rows:
        return _Summary(None, [], spent, durations, spans)
    for row in rows:
        created: float = row["trajectory"]["created_unix_s"]
        for turn in row["trajectory"]["turns"]:
            spent.add(_spent_on(turn))
            spans.append((created + turn["started_s"], created + turn["ended_s"]))
            for kind, seconds in _durations_of(turn):
                durations[kind].append(seconds)
    shown = [_rollout_row(row) for row in rows]
    return _Summary(_group_row(rows, chat), shown, spent, durations, spans)


def _durations_of(turn: JsonObject) -> Iterator[tuple[Duration, float]]:
    times = turn["started_s"], turn["first_token_s"], turn["generated_s"]
    yield from of_turn(*times, len(turn["output_ids"]))
    for result in turn["results"]:
        if ToolCallStatus(result["status"]).ran:
            yield Duration.CALL, result["ended_s"] - result["dispatched_s"]


def _spent_on(turn: JsonObject) -> Spent:
    """Return what a turn took. An older record does not say when it was placed, only that it was
    about to sample."""
    started, first = turn["started_s"], turn["first_token_s"]
    sampled, ended = turn["generated_s"], turn["ended_s"]
    placed = turn.get("placed_s")
    placed = started if placed is None else placed
    first = placed if first is None else first  # what others have sampled
    times = [
        (result["dispatched_s"], result["started_s"], result["ended_s"])
        for result in turn["results"]
    ]
    queued_s, ran_s = split_tool_time(times, sampled, max(sampled, ended))
    truncated = int(turn.get("end") == TurnEnd.LENGTH)
    spent = Spent(num_turns=1, num_calls=len(times), num_truncated=truncated)
    for part, seconds in (
        (Part.KV, placed - started),
        (Part.PREFILL, first - placed),
        (Part.DECODE, sampled - first),
        (Part.QUEUE, queued_s),
        (Part.TOOL, ran_s if times else 0.0),
    ):
        spent.seconds[part] = max(0.0, seconds)
    return spent


def _spent(summaries: Sequence[_Summary], steps: Sequence[Mapping[str, object]]) -> Spent:
    """Return what the whole run was spent on, as far as its folder says.

    Evaluations of a training run and its start are left out: their rollouts are not kept.
    """
    total = Spent(busy_s=union_s(span for summary in summaries for span in summary.spans))
    for summary in summaries:
        total.add(summary.spent)
    for name, part in (("learn_s", Part.LEARNER), ("sync_s", Part.SYNC)):
        total.seconds[part] = sum(number_of(row.get(name)) or 0.0 for row in steps)
    times = [time for summary in summaries for span in summary.spans for time in span]
    free_s = max(times, default=0.0) - min(times, default=0.0) - total.busy_s
    between_s = total.seconds[Part.LEARNER] + total.seconds[Part.SYNC]
    total.window_s = total.busy_s + min(free_s, between_s)
    return total


def _relative_rollout(t0_ms: int, row: RolloutSummary) -> RolloutSummary:
    end = None if row["end"] is None else row["end"] - t0_ms
    lanes = [(lane, at - t0_ms) for lane, at in row["lanes"]]
    return {**row, "start": row["start"] - t0_ms, "end": end, "lanes": lanes}


def _relative_group(t0_ms: int, group: GroupSummary) -> GroupSummary:
    end = None if group["end"] is None else group["end"] - t0_ms
    return {**group, "start": group["start"] - t0_ms, "end": end}


def _group_of(row: JsonObject) -> str:
    name: str = row["trajectory"]["id"].rpartition(".")[0]
    return name or str(row["group"])


def _rollout_row(row: JsonObject) -> RolloutSummary:
    """Return a row like `Row.to_row`, with Unix times in milliseconds.

    Older records lack the time of placement; their turns count as waiting until the first token.
    """
    trajectory = row["trajectory"]
    start: int = round(1000 * trajectory["created_unix_s"])

    def at(seconds: float) -> int:
        return start + round(1000 * seconds)

    lanes: list[tuple[Lane, int]] = []
    for turn in trajectory["turns"]:
        lanes.append(("wait", at(turn["started_s"])))
        if turn.get("placed_s") is not None:
            lanes.append(("prefill", at(turn["placed_s"])))
        if turn["first_token_s"] is not None:
            lanes.append(("decode", at(turn["first_token_s"])))
        not_run = {
            result["call_id"]
            for result in turn["results"]
            if not ToolCallStatus(result["status"]).ran
        }
        if any(call["id"] not in not_run for call in turn["calls"]):
            lanes.append(("tool", at(turn["generated_s"])))
        if row.get("session") and turn is not trajectory["turns"][-1]:
            lanes.append(("client", at(turn["ended_s"])))
    results = [result for turn in trajectory["turns"] for result in turn["results"]]
    return {
        "id": trajectory["id"],
        "group": _group_of(row),
        "state": "done",
        "stop": trajectory["stop_reason"],
        "turn": len(trajectory["turns"]),
        # Without ids: those that an evaluated endpoint has counted; another agent counts none.
        "tokens": sum(len(turn["output_ids"]) for turn in trajectory["turns"])
        or (None if trajectory.get("messages") else row.get("figures", {}).get("num_tokens", 0)),
        "calls": sum(len(turn["calls"]) for turn in trajectory["turns"]),
        "failed_calls": sum(ToolCallStatus(result["status"]).failed for result in results),
        "server": next(
            (turn["servers"][-1] for turn in reversed(trajectory["turns"]) if turn["servers"]), ""
        ),
        "reward": row["reward"],
        "answer": first_words(row["answer"] or trajectory.get("answer")),
        "start": start,
        "end": at(trajectory["elapsed_s"]),
        "lanes": lanes[-64:],
    }


def _group_row(rows: Sequence[JsonObject], chat: ChatFormat | None) -> GroupSummary:
    by_rollout = {rollout_of(row["trajectory"]["id"]): row["reward"] for row in rows}
    rewards = [reward for reward in by_rollout.values() if reward is not None]
    starts = [row["trajectory"]["created_unix_s"] for row in rows]
    ends = [row["trajectory"]["created_unix_s"] + row["trajectory"]["elapsed_s"] for row in rows]
    kept = [row for row in rows if row["advantage"] is not None]
    is_chosen = _is_chosen(rows)
    wrong = next((row for row in rows if row["reward"] is not None and row["reward"] <= 0), None)
    return {
        "id": _group_of(rows[0]),
        "task": rows[0].get("title") or rows[0]["task"],
        "question": first_words(_question(rows[0], chat)),
        "answer": rows[0].get("truth"),
        "wrong": None
        if wrong is None
        else {"id": wrong["trajectory"]["id"], "answer": first_words(wrong["answer"])},
        "size": len(by_rollout),
        "state": "done",
        "num_done": len(by_rollout),
        "mean_reward": sum(rewards) / len(rewards) if rewards else None,
        "kept": len({rollout_of(row["trajectory"]["id"]) for row in kept}) if is_chosen else None,
        "has_signal": any(row["advantage"] for row in kept) if is_chosen else None,
        "start": round(1000 * min(starts)),
        "end": round(1000 * max(ends)),
    }


def _is_chosen(rows: Sequence[JsonObject]) -> bool:
    """Return whether rollouts were selected from the group, which evaluations never do."""
    scored = [row for row in rows if row["reward"] is not None]
    return any(row["advantage"] is not None or row["dropped"] for row in scored or rows)


def _member(row: JsonObject, *, is_chosen: bool) -> MemberSummary:
    summary = _rollout_row(row)
    return {
        "id": summary["id"],
        "state": summary["state"],
        "stop": summary["stop"],
        "tokens": summary["tokens"],
        "calls": summary["calls"],
        "failed_calls": summary["failed_calls"],
        "turns": summary["turn"],
        "reward": row["reward"],
        "no_reward": row.get("no_reward"),
        "answer": row["answer"],
        "reason": row["reason"],
        "advantage": row["advantage"],
        "dropped": row["dropped"],
        "branch": row.get("branch"),
        "kept": row["advantage"] is not None if is_chosen else None,
    }


def _results(folder: Path) -> dict[str, object]:
    """Return the headline metrics of an evaluation, or nothing for other runs."""
    try:
        results = loads((folder / "results.json").read_bytes())
        k, totals = results["num_samples"], results["all"]
        values = {"tasks": str(totals["num_tasks"]), "missing samples": str(totals["num_missing"])}
        if (estimate := totals["avg_at_k"]) is not None:
            text = f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"
            values = {f"avg@{k}": text, **values}
    except (OSError, *_DAMAGED):
        return {}
    return {"values": values}


def _moment(folder: Path, steps: Sequence[Mapping[str, object]]) -> dict[str, object]:
    if not steps:
        return {}
    # The last row may be from an evaluation, which has no version.
    last = next((row for row in reversed(steps) if row.get("version") is not None), steps[-1])
    version = last.get("version")
    # A step's version is the one it was sampled with; the run has since published the next one.
    if isinstance(version, int) and last.get("weights/publish_s") is not None:
        version += 1  # also where no folder has it: weights.transport=broadcast, a copied run
    published = [int(path.name) for path in (folder / "weights").glob("*") if path.name.isdigit()]
    version = max(published, default=version)
    return {
        "step": steps[-1].get("step"),
        "policy_version": None if version is None else str(version),
        "tokens_per_s": last.get("rollout_tokens_per_s"),
    }


def _split(state: BoardFrame) -> list[BoardFrame]:
    """Split the state into frames with a bounded number of rows; the first replaces everything."""
    rows = state.pop("rollouts")
    first: BoardFrame = {**state, "rollouts": rows[:_MAX_ROWS]}
    head: BoardFrame = {"rev": 0, "t": state["t"], "full": False}
    starts = range(_MAX_ROWS, len(rows), _MAX_ROWS)
    frames = [first]
    for at in starts:
        frames.append({**head, "rollouts": rows[at : at + _MAX_ROWS]})
    return frames


def _extent(folder: Path) -> tuple[int, int]:
    """Return sizes that change while the run is active."""
    try:
        size = (folder / "metrics.jsonl").stat().st_size
    except OSError:
        size = 0
    return size, sum(1 for _ in (folder / "trajectories").glob("group-*.jsonl"))
