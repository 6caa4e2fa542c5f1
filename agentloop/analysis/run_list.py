"""Summaries of the runs in a folder, read from their files.

    config.toml  metrics.jsonl  checkpoints/  .lock ──> RunSummary

Nothing is written or locked, and damaged files are reported along with the readable data.
"""

from __future__ import annotations

import os
import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson

from agentloop.plain_json import number_of, read_rows
from agentloop.training.recovery.position import Phase, Position, Stages
from agentloop.training.run.folder import checkpoints_in, is_active

Row = Mapping[str, Any]

_SIGNS = (  # besides config.toml, which other folders have, too, a run has one of these
    ("metrics.jsonl",),
    ("queue.sqlite",),
    ("config.toml", ".lock"),
)
_MAX_DEPTH = 4


class RunKind(StrEnum):
    """The kind of a run."""

    TRAIN = "train"
    SFT = "sft"
    EVALUATE = "evaluate"
    SERVE = "serve"  # what a service has recorded
    UNKNOWN = "?"


class RunState(StrEnum):
    """The state of a run."""

    RUNNING = "running"  # locked by a process
    FINISHED = "finished"  # complete
    COLLAPSED = "collapsed"  # stopped by the collapse rules
    FAILED = "failed"  # ended by an error, which is in `problems`
    DRAINED = "drained"  # ended early on request, in order: it can be resumed
    STOPPED = "stopped"  # none of these: it can be resumed


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The summary of a run, as far as its files are readable.

    Attributes:
        stage: number and name of the stage, "2/3 longer", or "sft" before the rollouts.
        step, num_steps: counted over all stages, or in the fine-tuning; None: unknown.
        reward, tool_errors: values of the last step that has them.
        held_out_reward: value of the last evaluation.
        checkpoints: steps of the checkpoints.
        num_bytes: size on disk.
        changed_unix_s: time of the last write to the run's files.
        problems: descriptions of damaged or unreadable files and of errors.
    """

    path: Path
    kind: RunKind
    state: RunState
    stage: str
    step: int | None
    num_steps: int | None
    reward: float | None
    held_out_reward: float | None
    tool_errors: float | None
    checkpoints: tuple[int, ...]
    num_bytes: int
    changed_unix_s: float
    problems: tuple[str, ...]


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield `folder` if it is a run's, otherwise the runs inside it.

    Symbolic links are not followed, and runs inside of runs are not yielded.

    Raises:
        OSError: `folder` cannot be read.
    """
    if is_run(folder):
        yield folder
    else:
        yield from _below(folder, _MAX_DEPTH)


def is_run(folder: Path) -> bool:
    return any(all((folder / name).is_file() for name in names) for names in _SIGNS)


def _below(folder: Path, depth: int) -> Iterator[Path]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
            continue
        path = folder / entry.name
        try:
            if is_run(path):
                yield path
            elif depth > 1:
                yield from _below(path, depth - 1)
        except OSError:  # an unreadable subfolder
            continue


def summarize(path: Path) -> RunSummary:
    """Summarize the run in a folder. Never raises for the content of its files."""
    problems: list[str] = []
    config = _config(path / "config.toml", problems)
    kind = _kind(config)
    rows = read_metrics(path / "metrics.jsonl", problems)
    if kind is RunKind.EVALUATE:
        progress = _of_evaluation(path, rows, problems)
    elif kind is RunKind.TRAIN:
        progress = _of_training(path, config, rows, problems)
    else:
        progress = _Progress(rows)
    try:
        checkpoints = tuple(sorted(checkpoints_in(path)))
    except OSError as error:
        checkpoints = ()
        problems.append(f"checkpoints: {error.strerror or error}")
    state = _state(path, kind, progress, problems)
    num_bytes, changed = _size(path, problems)
    return RunSummary(
        path=path,
        kind=kind,
        state=state,
        stage=progress.stage,
        step=progress.step,
        num_steps=progress.num_steps,
        reward=progress.reward,
        held_out_reward=_last(rows, "held_out/reward"),
        tool_errors=progress.tool_errors,
        checkpoints=checkpoints,
        num_bytes=num_bytes,
        changed_unix_s=changed,
        problems=tuple(problems),
    )


class _Progress:
    """The progress of a run and its last values, from its rows of metrics."""

    def __init__(self, rows: Sequence[Row]) -> None:
        steps = (_int(row.get("step")) for row in reversed(rows))
        self.stage = ""
        self.step = next((step for step in steps if step is not None), None)
        self.num_steps: int | None = None
        self.reward = _last(rows, "reward")
        self.tool_errors = _last(rows, "tool_errors_in_correct")


def _of_training(
    path: Path, config: Mapping[str, object], rows: Sequence[Row], problems: list[str]
) -> _Progress:
    progress, position = _Progress(rows), Position.of(path)
    if position.phase is Phase.FINE_TUNING:
        progress = _Progress(read_metrics(path / position.phase / "metrics.jsonl", problems))
        progress.stage = position.phase
        return progress
    try:
        stages = Stages.of(config)
    except (KeyError, TypeError, ValueError, AttributeError):
        problems.append("config.toml: the number of steps is missing")
    else:
        progress.stage, progress.num_steps = _stage(position, stages), stages.num_steps
    return progress


def _of_evaluation(path: Path, rows: Sequence[Row], problems: list[str]) -> _Progress:
    """Return the progress of an evaluation, counted in tasks.

    A task's row may occur twice, the second time with samples that were missing.
    """
    tasks = {row.get("group"): row for row in rows}
    progress = _Progress(rows)
    progress.step = len(tasks) or None
    progress.reward = _mean(list(tasks.values()), "reward")
    progress.tool_errors = _mean(list(tasks.values()), "tool_errors_in_correct")
    results = path / "results.json"
    if results.is_file():
        try:
            totals = orjson.loads(results.read_bytes())["all"]
            progress.num_steps = int(totals["num_tasks"])
            progress.reward = float(totals["avg_at_k"]["value"]) if totals["avg_at_k"] else None
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"results.json: cannot be read: {error}")
    return progress


def _config(path: Path, problems: list[str]) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        problems.append(f"{path.name}: {error.strerror or error}")
    except ValueError as error:  # invalid TOML or UTF-8
        problems.append(f"{path.name}: {error}")
    return {}


def _kind(config: Mapping[str, object]) -> RunKind:
    for section, kind in (
        ("evaluate", RunKind.EVALUATE),
        ("roc", RunKind.TRAIN),
        ("data", RunKind.SFT),
        ("sessions", RunKind.SERVE),
    ):
        if isinstance(config.get(section), dict):
            return kind
    return RunKind.UNKNOWN


def read_metrics(path: Path, problems: list[str]) -> list[dict[str, object]]:
    """Read the rows of metrics that are readable, and report damaged ones."""
    try:
        rows, bad = read_rows(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{path.name}: {error.strerror or error}")
        return []
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        problems.append(f"{path.name}: line {bad[0]}{more} cannot be read")
    return rows


def _stage(position: Position, stages: Stages) -> str:
    number = position.stage or 1
    if number > len(stages.names):
        return ""
    return f"{number}/{len(stages.names)} {stages.names[number - 1]}"


def _state(path: Path, kind: RunKind, progress: _Progress, problems: list[str]) -> RunState:
    try:
        if is_active(path):
            return RunState.RUNNING
    except OSError as error:
        problems.append(f".lock: {error.strerror or error}")
    last = _mtime(path / "metrics.jsonl")
    # The file written last tells how the run ended; others are from earlier ends.
    ends = {
        RunKind.TRAIN: path / "ended",
        RunKind.SFT: path / "model" / "config.json",
        RunKind.EVALUATE: path / "results.json",
    }
    if kind in ends and 0 < last <= _mtime(ends[kind]):
        return RunState.FINISHED
    if progress.num_steps and progress.step is not None and progress.step >= progress.num_steps:
        return RunState.FINISHED
    if 0 < last <= _mtime(path / "collapse.md"):
        return RunState.COLLAPSED
    if (failed := path / "failed").is_file():
        with suppress(OSError, IndexError):
            problems.append(failed.read_text("utf-8", "replace").splitlines()[0])
        return RunState.FAILED
    return RunState.DRAINED if (path / "drained").is_file() else RunState.STOPPED


def _mtime(path: Path) -> float:
    """Return a file's modification time, or 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path, problems: list[str]) -> tuple[int, float]:
    """Return the bytes on disk, counting hard links once, and the time of the run's last write."""
    inodes: set[tuple[int, int]] = set()
    num_bytes, changed = 0, 0.0

    def report(error: OSError) -> None:
        problems.append(f"{Path(error.filename).name}: {error.strerror or error}")

    for root, _, files in os.walk(path, onerror=report):
        for name in files:
            try:
                stat = os.lstat(os.path.join(root, name))
            except OSError:  # an active run may remove files meanwhile
                continue
            if (key := (stat.st_dev, stat.st_ino)) not in inodes:
                inodes.add(key)
                num_bytes += stat.st_blocks * 512
            changed = max(changed, stat.st_mtime)
    return num_bytes, changed


def _last(rows: Sequence[Row], name: str) -> float | None:
    return next(
        (value for row in reversed(rows) if (value := number_of(row.get(name))) is not None), None
    )


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [value for row in rows if (value := number_of(row.get(name))) is not None]
    return statistics.fmean(values) if values else None


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
