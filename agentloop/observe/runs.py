"""List the runs on disk and read their metrics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentloop.errors import NotThere
from agentloop.plain_json import loads, read_rows

__all__ = ["curves", "of_start", "read_metrics", "runs_beside", "start_metrics"]

_MAX_RUNS = 100
_MAX_ROWS = 5_000


def runs_beside(folder: Path) -> list[dict[str, Any]]:
    """Return the run in `folder` and its siblings, newest first."""
    runs: list[dict[str, Any]] = []
    for path in folder.parent.glob("*/metrics.jsonl"):
        run = path.parent
        if run.is_symlink() or run.name.startswith("."):
            continue
        try:
            stat, steps = path.stat(), _last_step(path)
        except OSError:  # being removed, or not a file
            continue
        runs.append(
            {
                "name": run.name,
                "steps": steps,
                "modified_unix_s": stat.st_mtime,
                "current": run.name == folder.name,
            }
        )
    runs.sort(key=lambda row: -row["modified_unix_s"])
    return runs[:_MAX_RUNS] + [row for row in runs[_MAX_RUNS:] if row["current"]]


def curves(folder: Path, run: str) -> list[dict[str, Any]]:
    """Return the metrics rows of a run with this name beside `folder`.

    Raises:
        NotThere: There is no such run.
    """
    if run not in {
        row["name"] for row in runs_beside(folder)
    }:  # untrusted input must not form a path
        raise NotThere(f"run {run!r}: not found in {folder.parent}")
    path = folder.parent / run
    return [*start_metrics(path), *read_metrics(path)]


def of_start(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the metrics of supervised fine-tuning with `start/` in front of each name.

    Its steps are counted apart from those of the rollouts.
    """
    return {f"start/{name}": value for name, value in row.items()}


def start_metrics(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run's supervised fine-tuning, named as by `of_start`; none without it."""
    return [of_start(row) for row in read_metrics(folder / "sft")]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the last complete rows of a run's metrics, which may still be written to."""
    try:
        return read_rows(folder / "metrics.jsonl", last=_MAX_ROWS)[0]
    except OSError:
        return []


def _last_step(path: Path) -> int:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65_536))
        lines = file.read().split(b"\n")[:-1]
    for line in reversed(lines):
        try:
            return int(loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0
