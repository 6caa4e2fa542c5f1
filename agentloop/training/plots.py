"""What became of a run, as a picture.

metrics.jsonl ──> reward, tool errors, lengths, entropy and mismatch, times ──> plots.png
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentloop.errors import DataError, SettingsError
from agentloop.groups.tasks import read_jsonl

__all__ = ["plot_run"]

Row = Mapping[str, Any]


def plot_run(folder: Path, path: Path) -> None:
    """Draw the metrics of the run in `folder` into `path`, a PNG file.

    Raises:
        SettingsError: matplotlib is not installed, or there is nothing to draw.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise SettingsError("plots need matplotlib: pip install 'agentloop[train]'") from error
    try:
        rows: list[Row] = [row for _, row in read_jsonl(folder / "metrics.jsonl")]
    except DataError as error:
        raise SettingsError(f"there is nothing to draw: {error}") from error
    drawings: Sequence[tuple[str, Callable[[Any], None]]] = [
        ("reward", lambda axes: _reward(axes, rows)),
        ("tool errors in correct rollouts", lambda axes: _errors(axes, rows)),
        ("sampled tokens of a rollout", lambda axes: _lines(axes, rows, {"length_mean": ""})),
        (
            "entropy, nats per token",
            lambda axes: _lines(axes, rows, {"learner/entropy": ""}),
        ),
        (
            "mismatch of engine and learner, KL per token",
            lambda axes: _lines(axes, rows, {"learner/mismatch_kl": ""}),
        ),
        ("seconds of a step", lambda axes: _times(axes, rows)),
    ]
    figure, grid = pyplot.subplots(2, 3, figsize=(13, 7), constrained_layout=True)
    for axes, (title, draw) in zip(grid.flat, drawings, strict=True):
        draw(axes)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, frameon=False)
    figure.suptitle(folder.name)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _reward(axes: Any, rows: Sequence[Row]) -> None:
    _line(axes, rows, "reward", "rollouts", alpha=0.5)
    _line(axes, rows, "held_out/reward", "held out", marker="o")
    axes.set_ylim(0, 1)


def _errors(axes: Any, rows: Sequence[Row]) -> None:
    _line(axes, rows, "tool_errors_in_correct", "rollouts", alpha=0.5)
    _line(axes, rows, "held_out/tool_errors_in_correct", "held out", marker="o")
    axes.set_ylim(bottom=0)


def _times(axes: Any, rows: Sequence[Row]) -> None:
    names = {"rollout_s": "rolling out", "learn_s": "learning", "hand_over_s": "loading weights"}
    steps = [row for row in rows if "step_s" in row]
    parts = [[row.get(name) or 0.0 for row in steps] for name in names]
    if steps:
        axes.stackplot([row["step"] for row in steps], *parts, labels=list(names.values()))


def _lines(axes: Any, rows: Sequence[Row], names: Mapping[str, str]) -> None:
    for name, label in names.items():
        _line(axes, rows, name, label)
    axes.set_ylim(bottom=0)


def _line(axes: Any, rows: Sequence[Row], name: str, label: str, **style: Any) -> None:
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, **style)
