"""Checks of a run that was killed, resumed and completed: for bench/kill.py."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from agentloop.config import load_settings
from agentloop.environments.tasks.sources import TaskSource
from agentloop.training.plan.settings import TrainSettings
from bench.kill_learner import FIRST, LOG

__all__ = [
    "Journal",
    "adopt_orphans",
    "last_checkpoint",
    "lines",
    "played_problems",
    "problems",
    "processes_left",
    "tail",
]

_POLL_S = 0.01
_PR_SET_CHILD_SUBREAPER = 36


def problems(run: Path) -> Iterator[str]:
    """Check any run."""
    settings = load_settings(TrainSettings, [run / "config.toml"])
    yield from _leftovers(run, settings)
    journal = Journal.of(run)
    yield from _of_journal(run, journal, settings)
    yield from _of_metrics(run, journal, settings)


def played_problems(run: Path, usual: Path) -> Iterator[str]:
    """Check a run with a simulated learner against `usual`, the undisturbed run in the same
    mode."""
    journal, undisturbed = Journal.of(run), Journal.of(usual)
    yield from _of_lineage(run, journal)
    if load_settings(TrainSettings, [run / "config.toml"]).loop.max_staleness:
        return
    if [group["task"] for group in journal.groups] != [
        group["task"] for group in undisturbed.groups
    ]:
        yield "the tasks differ from those of the undisturbed run"
    if last_checkpoint(run)["digest"] != last_checkpoint(usual)["digest"]:
        yield "the weights differ from those of the undisturbed run"
    yield from _differences(_figures(run), _figures(usual))


class JournalGroup(TypedDict):
    """A group's row in the journal."""

    number: int
    task: str  # its id
    state: str
    version: int
    path: str | None
    step: int | None
    place: int


class StepNotes(TypedDict):
    """The version of the weights before a step."""

    version: int


class SavedCheckpoint(TypedDict):
    """The content of a checkpoint's state.json."""

    state: dict[str, int]
    num_updates: int
    digest: str  # of a played learner


class RecordedTurn(TypedDict):
    versions: list[dict[str, str]]
    results: list[dict[str, str]]


class RecordedTrajectory(TypedDict):
    id: str
    stop_reason: str
    turns: list[RecordedTurn]


class RecordedRollout(TypedDict):
    """A row of a group's file."""

    trajectory: RecordedTrajectory
    reward: float | None
    advantage: float | None


@dataclass(frozen=True, slots=True)
class Journal:
    """The raw content of queue.sqlite."""

    groups: list[JournalGroup]
    steps: dict[int, StepNotes]
    results: dict[int, dict[str, float]]

    @classmethod
    def of(cls, run: Path) -> Journal:
        """Read the journal.

        Raises:
            sqlite3.Error: There is none.
        """
        # Without `immutable`, a reader leaves files of its own next to the journal.
        is_whole = not (run / "queue.sqlite-wal").exists()
        mode = "immutable=1" if is_whole else "mode=ro"
        with closing(sqlite3.connect(f"file:{run / 'queue.sqlite'}?{mode}", uri=True)) as db:
            db.row_factory = sqlite3.Row
            rows = db.execute("SELECT * FROM groups ORDER BY number").fetchall()
            groups: list[JournalGroup] = [
                {
                    "number": row["number"],
                    "task": json.loads(row["task"])["id"],
                    "state": row["state"],
                    "version": row["version"],
                    "path": row["path"],
                    "step": row["step"],
                    "place": row["place"],
                }
                for row in rows
            ]
            steps = db.execute("SELECT step, notes, result FROM steps ORDER BY step").fetchall()
        return cls(
            groups,
            {row["step"]: json.loads(row["notes"]) for row in steps},
            {row["step"]: json.loads(row["result"]) for row in steps if row["result"]},
        )

    def of_step(self, step: int) -> list[JournalGroup]:
        mine = [g for g in self.groups if g["step"] == step and g["state"] != "discarded"]
        return sorted(mine, key=lambda group: group["place"])


def _of_journal(run: Path, journal: Journal, settings: TrainSettings) -> Iterator[str]:
    for group in journal.groups:
        if group["state"] not in ("trained", "discarded"):
            yield f"group {group['number']} is {group['state']}"
    num_steps = sum(stage.steps for stage in settings.stages.values()) or settings.loop.steps
    if [*journal.steps] != [*range(1, num_steps + 1)]:
        yield f"steps {[*journal.steps]}"
    if not (settings.stages or settings.loop.curriculum):  # these repeat or pass over tasks
        source = TaskSource.open(settings.tasks)
        expected = [task.id for task in itertools.islice(source, len(journal.groups))]
        if [group["task"] for group in journal.groups] != expected:
            yield "the tasks differ from those of the source, or are in another order"
    for step, notes in journal.steps.items():
        groups = journal.of_step(step)
        if len(groups) != settings.loop.prompts_per_step:
            yield f"step {step} has {len(groups)} groups"
        for group in groups:
            oldest = min([group["version"], *_versions(run, group)])
            if not 0 <= notes["version"] - oldest <= settings.loop.max_staleness:
                yield f"step {step} trained on group {group['number']} of version {oldest}"


def _versions(run: Path, group: JournalGroup) -> set[int]:
    """Return the versions of the weights that sampled the trained part of a group."""
    return {
        int(version)
        for row in _learned_rows(run, group)
        for turn in row["trajectory"]["turns"]
        for version in [span["version"] for span in turn["versions"]]
    }


def recorded(run: Path, group: JournalGroup) -> list[RecordedRollout]:
    """Return the rollouts in a group's file."""
    if group["path"] is None:
        return []
    return [json.loads(line) for line in (run / group["path"]).read_bytes().splitlines()]


def _learned_rows(run: Path, group: JournalGroup) -> list[RecordedRollout]:
    return [row for row in recorded(run, group) if row["advantage"] is not None]


def last_checkpoint(run: Path) -> SavedCheckpoint:
    """Return the newest checkpoint."""
    kept: list[SavedCheckpoint] = [
        json.loads(path.read_bytes()) for path in run.glob("checkpoints/*/state.json")
    ]
    return max(kept, key=lambda checkpoint: checkpoint["state"]["step"])


def _of_lineage(run: Path, journal: Journal) -> Iterator[str]:
    made = {line["after"]: line for line in lines(run / LOG)}
    digest, learned = last_checkpoint(run)["digest"], list[set[tuple[int, ...]]]()
    while digest != FIRST:
        line = made[digest]
        if line["prompts"]:  # otherwise the optimizer was reset
            learned.insert(0, {tuple(prompt) for prompt in line["prompts"]})
        digest = line["before"]
    expected = []
    for step in journal.steps:
        groups = [group for group in journal.of_step(step) if _learned_rows(run, group)]
        expected.append(
            {(group["number"], int(group["task"].rpartition("-")[2])) for group in groups}
        )
    if learned != [groups for groups in expected if groups]:
        yield f"the weights were trained on {learned}, according to the journal on {expected}"


def _of_metrics(run: Path, journal: Journal, settings: TrainSettings) -> Iterator[str]:
    rows = lines(run / "metrics.jsonl")
    steps = [row["step"] for row in rows if "reward" in row]
    if steps != [*journal.steps]:
        yield f"there are metrics of the steps {steps}, not {[*journal.steps]}"
    evaluated = Counter(row["step"] for row in rows if "held_out/reward" in row)
    ends = set(itertools.accumulate(stage.steps for stage in settings.stages.values()))
    every = settings.loop.evaluate_every
    expected = {s for s in journal.steps if s % every == 0} | ends | {0, max(journal.steps)}
    if evaluated != Counter(expected):
        yield f"evaluations after the steps {sorted(evaluated.elements())}, not {sorted(expected)}"

    num_filtered = sum("filter/num_tasks" in row for row in rows)
    if num_filtered != sum(stage.filter_tasks > 0 for stage in settings.stages.values()):
        yield f"tasks were filtered {num_filtered} times, not once per stage with a filter"


def _leftovers(run: Path, settings: TrainSettings) -> Iterator[str]:
    halves = ("**/*.partial", "**/*.old", "batches/*", "queue.sqlite-*")
    leftovers = [path for pattern in halves for path in run.glob(pattern)]
    if settings.weights.folder is not None:
        leftovers += settings.weights.folder.glob(f"{run.name}-*")
    for path in leftovers:
        yield f"{path} is left"
    weights = sorted(path.name for path in (run / "weights").iterdir())
    if len(weights) != 1:
        yield f"weights of the versions {weights} are left"


def _figures(run: Path) -> dict[str, dict[str, object]]:
    """Return the metrics of each step that do not depend on time."""
    rows = lines(run / "metrics.jsonl")
    return {
        f"step {row['step']}" + (" held out" if "held_out/reward" in row else ""): {
            name: value
            for name, value in row.items()
            if not name.endswith("_s") and not name.startswith("weights/")
        }
        for row in rows
    }


def _differences(
    figures: Mapping[str, Mapping[str, object]], usual: Mapping[str, Mapping[str, object]]
) -> Iterator[str]:
    for row in usual:
        names = usual[row].keys() | figures.get(row, {}).keys()
        for name in sorted(names):
            value, usual_value = figures.get(row, {}).get(name), usual[row].get(name)
            if value != usual_value:
                yield f"{row}: {name} is {value}, undisturbed {usual_value}"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def processes_left(ours: Collection[int], *, within_s: float = 30.0) -> list[str]:
    """Return a problem for each process of a run that still runs, except `ours`; kill them.

    Orphans have become children of this process by now.
    """
    deadline = time.monotonic() + within_s
    while remaining := set(_children()) - set(ours):
        for pid in remaining:
            if time.monotonic() > deadline:
                name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return [f"a process was left: {name}"]
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_POLL_S)
    return []


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants from now on."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _children() -> list[int]:
    pid = os.getpid()
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def tail(log: Path) -> str:
    return " | ".join(log.read_text("utf-8", "replace").splitlines()[-6:])
