"""`agentloop runs list`: list the runs in a folder.

runs/ ──each run's files──> summaries, newest first ──> a table or JSON
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import anyio.to_thread

from agentloop.analysis.run_list import RunState, RunSummary, find_runs, summarize
from agentloop.cli import console
from agentloop.errors import RunFolderError
from agentloop.launch.progress import ProgressLine
from agentloop.launch.units import size
from agentloop.rollouts.metrics import mean, percent

_STYLES = {
    str(RunState.RUNNING): "green",
    str(RunState.STOPPED): "yellow",
    str(RunState.DRAINED): "yellow",
    str(RunState.COLLAPSED): "red",
    str(RunState.FAILED): "red",
}
_COLUMNS = (
    "name",
    "kind",
    "state",
    "stage",
    "step",
    "reward",
    "held out",
    "tool errors",
    "checkpoints",
    "size",
    "age",
)
_NUMBERS = ("step", "reward", "held out", "tool errors", "size", "age")
_OPTIONAL = ("checkpoints", "size", "stage", "kind")
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
_MAX_SHOWN = 3  # checkpoints
_PATIENCE_S = 2.0
_DEFAULT_FOLDER = Path("runs")


def main(arguments: list[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="agentloop runs list",
        description="List the runs in a folder, most recently active first; the age is the time "
        "since a run last wrote to its folder. Nothing is modified.",
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=_DEFAULT_FOLDER, help="the folder (default: runs)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of objects")
    options = parser.parse_args(arguments)
    return console.run(lambda: _ls(options.folder.expanduser(), as_json=options.json))


async def _ls(folder: Path, *, as_json: bool) -> int:
    with ProgressLine("Looking for runs", after_s=_PATIENCE_S) as progress:

        def look() -> list[RunSummary]:
            if folder == _DEFAULT_FOLDER and not folder.exists():
                return []
            summaries = []
            for path in find_runs(folder):
                progress(f"Reading {console.printable(path.name)}")
                summaries.append(summarize(path))
            return sorted(
                summaries, key=lambda summary: (-summary.changed_unix_s, str(summary.path))
            )

        try:
            runs = await anyio.to_thread.run_sync(look, abandon_on_cancel=True)
        except OSError as error:
            raise RunFolderError(f"{folder}: {error.strerror or error}") from error
    if as_json:
        console.print_json([_data(summary) for summary in runs])
    elif runs:
        _print(runs, folder)
    else:
        print(f"No runs in {folder}")
    return 0


def _data(run: RunSummary) -> dict[str, object]:
    return {"name": run.path.name, **asdict(run), "path": str(run.path.resolve())}


def _print(runs: Sequence[RunSummary], folder: Path) -> None:
    now_unix_s = time.time()
    rows = [
        (
            str(run.path.relative_to(folder)) if run.path != folder else run.path.resolve().name,
            str(run.kind),
            str(run.state),
            run.stage or "-",
            _step(run.step, run.num_steps),
            mean(run.reward),
            mean(run.held_out_reward),
            percent(run.tool_errors),
            _checkpoints(run.checkpoints),
            size(run.num_bytes),
            age(now_unix_s - run.changed_unix_s) if run.changed_unix_s else "-",
        )
        for run in runs
    ]
    console.print_table(_COLUMNS, rows, numbers=_NUMBERS, optional=_OPTIONAL, styles=_STYLES)
    for row, run in zip(rows, runs, strict=True):
        for problem in run.problems:
            print(console.printable(f"{row[0]}: {problem}"))


def _step(step: int | None, num_steps: int | None) -> str:
    if step is None:
        return "-" if num_steps is None else f"0/{num_steps}"
    return str(step) if num_steps is None else f"{step}/{num_steps}"


def _checkpoints(steps: Sequence[int]) -> str:
    more = "... " if len(steps) > _MAX_SHOWN else ""
    return more + " ".join(map(str, steps[-_MAX_SHOWN:])) if steps else "-"


def age(seconds: float) -> str:
    """Format a duration in its largest unit: 59 s, 3 min, 2 h, 5 d."""
    for length, unit in _UNITS:
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return "0 s"
