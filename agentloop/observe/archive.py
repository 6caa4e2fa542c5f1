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
    MemberSummary,
    RolloutSummary,
)
from agentloop.observe.latency import Duration, of_turn, summary_of
from agentloop.observe.record import RecordReader
from agentloop.observe.runs import curves, read_metrics, runs_beside, start_metrics
from agentloop.observe.stored_groups import (
    DAMAGED,
    board_of,
    read_group_file,
    rows_of_group,
)
from agentloop.plain_json import dumps, loads, number_of
from agentloop.trajectory import Turn, TurnEnd, union_s

_MAX_GROUPS = 500  # newest ones only
_MAX_ROLLOUTS = 2_000
_LOOK_EVERY_S = 3.0
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
        open_run: Opens another run's folder, to compare: what is named "RUN//ID" is of the run RUN
            beside this one.
    """

    folder: Path
    about: Mapping[str, object]
    chat: ChatFormat | None = None
    progress: Callable[[], Mapping[str, object]] = dict
    served_on: ServedOn = ServedOn.UNKNOWN
    open_run: Callable[[Path], Archive] | None = None
    _read: dict[tuple[Path, int], _Summary] = field(default_factory=dict)
    _others: dict[str, Archive] = field(default_factory=dict)

    async def frames(self, last_id: str | None = None) -> AsyncGenerator[tuple[str, bytes]]:
        last_extent: tuple[int, int] | None = None
        while True:
            extent = await anyio.to_thread.run_sync(_extent, self.folder)
            if extent != last_extent:
                last_extent = extent
                yield "", await anyio.to_thread.run_sync(dumps, await self.frame())
            await anyio.sleep(_LOOK_EVERY_S)

    async def frame(self) -> BoardFrame:
        return await anyio.to_thread.run_sync(self._frame)

    async def rollout(self, key: str) -> dict[str, Any]:
        other, own = await anyio.to_thread.run_sync(self._other, key)
        if other is not None:
            shown = await other.rollout(own)
            return {**shown, "id": key, "group": f"{other.folder.name}//{shown['group']}"}
        rollout = await anyio.to_thread.run_sync(read_rollout, self.folder, key, self.chat)
        if rollout is None:
            raise NotThere(f"rollout {key!r}: not found in {self.folder / 'trajectories'}")
        return rollout

    async def rollout_events(self, key: str) -> AsyncGenerator[tuple[str, Mapping[str, object]]]:
        yield "end", await self.rollout(key)

    async def group(self, name: str) -> GroupDetails:
        """Return a group; of another run, its newest of the task of the group with this name."""
        other, own = await anyio.to_thread.run_sync(self._other, name)
        if other is not None:
            return await self._group_of_other(other, own)
        group = await anyio.to_thread.run_sync(read_group, self.folder, name, self.chat)
        if group is None:
            raise NotThere(f"group {name!r}: not found in {self.folder / 'trajectories'}")
        return group

    async def runs(self) -> Sequence[Mapping[str, object]]:
        return await anyio.to_thread.run_sync(runs_beside, self.folder)

    async def curves(self, run: str) -> Mapping[str, object]:
        return await anyio.to_thread.run_sync(curves, self.folder, run)

    def _other(self, name: str) -> tuple[Archive | None, str]:
        """Return the archive of the other run that a name is of, if any, and the rest of it."""
        run, _, rest = name.partition("//")
        if not rest or self.open_run is None:
            return None, name
        # Untrusted input must not form a path.
        if run not in {row["name"] for row in runs_beside(self.folder) if not row["current"]}:
            return None, name
        if run not in self._others:
            self._others[run] = self.open_run(self.folder.parent / run)
        return self._others[run], rest

    async def _group_of_other(self, other: Archive, name: str) -> GroupDetails:
        own = await self.group(name)
        run, task = other.folder.name, (own["task"], own["answer"])
        groups = (await other.frame())["groups"]
        alike = [group["id"] for group in groups if (group["task"], group["answer"]) == task]
        if not alike:
            raise NotThere(f"{run} has no rollout of this task")
        group = await other.group(alike[-1])
        members: list[MemberSummary] = [
            {**row, "id": f"{run}//{row['id']}"} for row in group["rollouts"]
        ]
        return {**group, "id": f"{run}//{group['id']}", "rollouts": members}

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


def read_rollout(folder: Path, key: str, chat: ChatFormat | None) -> dict[str, object] | None:
    """Return a rollout from the run's folder, as `RecordReader.whole` does, or None.

    None means that it is missing or damaged.
    """
    rows = rows_of_group(folder, key.rpartition(".")[0])
    row = next((candidate for candidate in rows if candidate.record.id == key), None)
    if row is None:
        return None
    verdict = {
        **board_of(rows, None).rows[key].verdict(),
        "task": row.title,
        "no_reward": row.conversation.no_reward,
        **{name: row.more.get(name) for name in _SERVED},
    }
    return RecordReader(row.record, chat, lambda: verdict).whole()


def read_group(folder: Path, name: str, chat: ChatFormat | None) -> GroupDetails | None:
    """Return a group from the run's folder, as `PageData.group` does, or None if it is missing."""
    rows = rows_of_group(folder, name)
    if not rows:
        return None
    group = board_of(rows, chat).group_details(name)
    assert group is not None
    for member, row in zip(group["rollouts"], rows, strict=True):
        member["no_reward"] = row.conversation.no_reward
        member["branch"] = row.more.get("branch")
    return group


def _summary(path: Path, chat: ChatFormat | None) -> _Summary:
    rows = read_group_file(path)
    spent, spans = Spent(), list[_Span]()
    durations: dict[Duration, list[float]] = {kind: [] for kind in Duration}
    if not rows:
        return _Summary(None, [], spent, durations, spans)
    for record in (row.record for row in rows):
        begun_s = record.created_unix_s
        for turn in record:
            spent.add(_spent_on(turn))
            spans.append((begun_s + turn.started_s, begun_s + turn.ended_s))
            for kind, seconds in _durations_of(turn):
                durations[kind].append(seconds)
    board = board_of(rows, chat)
    (group,) = board.groups.values()
    shown = [row.to_row() for row in board.rows.values()]
    return _Summary(group.to_row(), shown, spent, durations, spans)


def _durations_of(turn: Turn) -> Iterator[tuple[Duration, float]]:
    yield from of_turn(turn.started_s, turn.first_token_s, turn.generated_s, len(turn.output_ids))
    for result in turn.results:
        if result.status.ran:
            yield Duration.CALL, result.ended_s - result.dispatched_s


def _spent_on(turn: Turn) -> Spent:
    """Return what a turn took. An older record does not say when it was placed, only that it was
    about to sample."""
    sampled = turn.generated_s
    placed = turn.started_s if turn.placed_s is None else turn.placed_s
    first = placed if turn.first_token_s is None else turn.first_token_s  # what others have sampled
    times = [(result.dispatched_s, result.started_s, result.ended_s) for result in turn.results]
    queued_s, ran_s = split_tool_time(times, sampled, max(sampled, turn.ended_s))
    truncated = int(turn.end is TurnEnd.LENGTH)
    spent = Spent(num_turns=1, num_calls=len(times), num_truncated=truncated)
    for part, seconds in (
        (Part.KV, placed - turn.started_s),
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


def _results(folder: Path) -> dict[str, object]:
    """Return the headline metrics of an evaluation, or nothing for other runs."""
    try:
        results = loads((folder / "results.json").read_bytes())
        k, totals = results["num_samples"], results["all"]
        values = {"tasks": str(totals["num_tasks"]), "missing samples": str(totals["num_missing"])}
        if (estimate := totals["avg_at_k"]) is not None:
            text = f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"
            values = {f"avg@{k}": text, **values}
    except (OSError, *DAMAGED):
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


def _extent(folder: Path) -> tuple[int, int]:
    """Return sizes that change while the run is active."""
    try:
        size = (folder / "metrics.jsonl").stat().st_size
    except OSError:
        size = 0
    return size, sum(1 for _ in (folder / "trajectories").glob("group-*.jsonl"))
