"""What became of runs, as a picture.

    metrics.jsonl ──> reward, tool errors, lengths, entropy and mismatch, times ──> plots.png

`agentloop train` draws its own at the end. Of one that goes on, or of several in one:

    python -m agentloop.training.plots runs/first runs/second --out both.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentloop.errors import AgentLoopError, DataError, SettingsError
from agentloop.groups.tasks import read_jsonl

__all__ = ["plot_runs"]

Row = Mapping[str, Any]

_LINES = {
    "sampled tokens of a rollout": "length_mean",
    "entropy, nats per token": "learner/entropy",
    "mismatch of engine and learner, KL per token": "learner/mismatch_kl",
}
_TIMES = {"rollout_s": "rolling out", "learn_s": "learning", "hand_over_s": "loading weights"}


def plot_runs(folders: Sequence[Path], path: Path) -> None:
    """Draw the metrics of the runs in `folders` into `path`, a PNG file.

    Raises:
        SettingsError: matplotlib is not installed, there is nothing to draw, or nowhere to.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise SettingsError("plots need matplotlib: pip install 'agentloop[train]'") from error
    runs = {folder.resolve().name: _read(folder) for folder in folders}
    figure, grid = pyplot.subplots(2, 3, figsize=(13, 7), constrained_layout=True)
    reward, errors, *others, times = grid.flat
    _two(reward, runs, "reward", "reward")
    reward.set_ylim(0, 1.02)
    _two(errors, runs, "tool errors in correct rollouts", "tool_errors_in_correct")
    for axes, (title, name) in zip(others, _LINES.items(), strict=True):
        for rows in runs.values():
            _line(axes, rows, name)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_ylim(bottom=0)
    _times(times, next(iter(runs.values())))
    for axes in grid.flat:
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, frameon=False)
    figure.suptitle(", ".join(runs))
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror or error}") from error
    finally:
        pyplot.close(figure)


def _read(folder: Path) -> list[Row]:
    try:
        return [row for _, row in read_jsonl(folder / "metrics.jsonl")]
    except DataError as error:
        raise SettingsError(f"there is nothing to draw: {error}") from error


def _two(axes: Any, runs: Mapping[str, Sequence[Row]], title: str, name: str) -> None:
    """Of the rollouts, thin, and of what is held out."""
    for index, rows in enumerate(runs.values()):
        style = {"color": f"C{index}"}
        _line(axes, rows, name, label=None if index else "rollouts", alpha=0.4, **style)
        held_out = {"label": None if index else "held out", "marker": "o", **style}
        _line(axes, rows, f"held_out/{name}", **held_out)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_ylim(bottom=0)


def _times(axes: Any, rows: Sequence[Row]) -> None:
    """Of one run."""
    axes.set_title("seconds of a step", fontsize=10, loc="left")
    steps = [row for row in rows if "step_s" in row]
    parts = [[row.get(name) or 0.0 for row in steps] for name in _TIMES]
    if steps:
        axes.stackplot([row["step"] for row in steps], *parts, labels=list(_TIMES.values()))


def _line(axes: Any, rows: Sequence[Row], name: str, **style: Any) -> None:
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), **style)


def main() -> int:
    parser = argparse.ArgumentParser("python -m agentloop.training.plots")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", required=True, type=Path, help="a PNG file")
    options = parser.parse_args()
    try:
        plot_runs(options.runs, options.out)
    except AgentLoopError as error:
        print(f"agentloop: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
