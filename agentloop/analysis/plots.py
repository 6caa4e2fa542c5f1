"""Plots of runs' metrics.

    metrics.jsonl ──> a panel per quantity, with all runs in each ──> PNG, SVG

Legible in print and for colour-blind readers: colours by Okabe and Ito, and each run has its own
line style and markers. `agentloop train` plots its run at the end; `agentloop runs plot` plots any.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agentloop.analysis.run_list import read_metrics
from agentloop.distribution import install_hint
from agentloop.errors import RunFolderError, SettingsError
from agentloop.plain_json import number_of
from agentloop.training.run.status import count_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel: a quantity plotted over the steps of runs.

    Attributes:
        title: title with the unit, if there is one.
        name: name of the metric.
        per: metric to divide by, both summed over a step and its neighbours, for a rate.
        held_out: whether the metric is also measured on held-out tasks.
        top: upper end of the axis; None: automatic.
        parts: labels by metric, for the parts that add up to it, plotted for a single run.
    """

    title: str
    name: str
    per: str = ""
    held_out: bool = False
    top: float | None = None
    parts: Mapping[str, str] = field(default_factory=dict)


PANELS = {
    "signal": Panel("share of groups with a learning signal", "groups_with_signal", top=1.0),
    "reward": Panel("reward", "reward", held_out=True, top=1.0),
    "tool_errors": Panel(
        "tool errors in correct rollouts", "tool_errors_in_correct", held_out=True
    ),
    "lengths": Panel("sampled tokens of a rollout", "length_mean", held_out=True),
    # Not `rollout_tokens_per_s`: the rollouts of a step may be finished before it starts.
    "throughput": Panel("sampled tokens per second", "num_sampled_tokens", per="step_s"),
    "entropy": Panel("entropy, nats per token", "learner/entropy"),
    "mismatch": Panel(
        "mismatch KL between servers and learner, nats per token", "learner/mismatch_kl"
    ),
    "loss": Panel("loss", "learner/loss"),
    "staleness": Panel("staleness, versions", "staleness_mean"),
    "times": Panel(
        "seconds per step",
        "step_s",
        parts={
            "wait_s": "waiting for rollouts",
            "learn_s": "training",
            "sync_s": "weight sync",
        },
    ),
}
"""Panels by the names that `agentloop runs plot --what` takes, besides names of metrics."""

_USUAL = (
    "signal",
    "reward",
    "tool_errors",
    "lengths",
    "throughput",
    "entropy",
    "mismatch",
    "times",
)
_SUPERVISED = ("loss", "entropy")  # for runs that have only these
# Okabe and Ito, "Color Universal Design": distinct for all color vision, mostly also in grey.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", "-.", ":")
_MARKS = ("o", "s", "^", "D", "v", "P", "X")
_AREAS = ("#56B4E9", "#E69F00", "#009E73")
_HATCHES = ("", "///", "...")
_MEASURED: dict[str, Any] = {
    "linewidth": 0.8,
    "markerfacecolor": "white",
    "markeredgewidth": 1.4,
    "clip_on": False,
    "zorder": 3,
}
_NUM_COLUMNS = 3
_PANEL_INCHES = (4.4, 3.3)
_SMOOTH_FROM = 60  # steps; fewer are legible without smoothing
_SMOOTH_SHARE = 0.05
_LARGE = 2_000  # axis labels from here on have thousands separators


def plot_runs(folders: Sequence[Path], *paths: Path, what: Sequence[str] = ()) -> list[str]:
    """Plot the metrics of runs into each of `paths`, as PNG or SVG by their suffixes.

    Args:
        what: keys of `PANELS`, or names of metrics; empty: the default panels that have data.

    Returns:
        Descriptions of unreadable data, which is skipped.

    Raises:
        SettingsError: matplotlib is not installed, a run has no such metric, or a path cannot be
            written.
        RunFolderError: a run has no metrics, or none can be read.
    """
    for path in paths:
        if path.suffix.lower() not in (".png", ".svg"):
            raise SettingsError(f"{path}: the file name must end in .png or .svg")
    problems: list[str] = []
    read = [_read(folder, problems) for folder in folders]
    pyplot = _pyplot()  # slow to import, so what is wrong with the runs is found before
    runs = dict(zip(labels_of(folders), read, strict=True))
    panels = _panels(what, list(runs.values()))
    num_columns = min(_NUM_COLUMNS, len(panels))
    num_rows = -(-len(panels) // num_columns)
    width, height = _PANEL_INCHES
    with pyplot.rc_context(_STYLE):
        size = (width * num_columns, height * num_rows + 0.5)
        figure = pyplot.figure(figsize=size, layout="constrained")
        try:
            grid = figure.add_gridspec(num_rows, num_columns)
            for index, panel in enumerate(panels):
                row, column = divmod(index, num_columns)
                last = index == len(panels) - 1  # the last panel spans the rest of its row
                place = grid[row, column:] if last else grid[row, column]
                _draw(figure.add_subplot(place), panel, runs)
            _legend(figure, list(runs), panels)
            for path in paths:
                _save(figure, path)
        finally:
            pyplot.close(figure)
    return problems


def labels_of(folders: Sequence[Path]) -> list[str]:
    """Return a label for each folder: as many trailing path parts as make them distinct."""
    all_parts = [folder.resolve().parts for folder in folders]
    labels = []
    for parts in all_parts:
        other_parts = [candidate for candidate in all_parts if candidate != parts]
        length = next(
            (
                n
                for n in range(1, len(parts))
                if all(candidate[-n:] != parts[-n:] for candidate in other_parts)
            ),
            1,
        )
        labels.append("/".join(parts[-length:]))
    counts: dict[str, int] = {}
    for index, label in enumerate(labels):  # the same folder given twice
        counts[label] = counts.get(label, 0) + 1
        if counts[label] > 1:
            labels[index] = f"{label} ({counts[label]})"
    return labels


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Return the moving average over `window` neighbours on either side, fewer at the ends."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    averages = []
    for index in range(len(values)):
        start, end = max(0, index - window), min(len(values), index + window + 1)
        averages.append((sums[end] - sums[start]) / (end - start))
    return averages


_STYLE = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#D9D9D9",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",  # keep text as text
    "svg.hashsalt": "agentloop",  # make the output reproducible
    "savefig.dpi": 150,
}


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise SettingsError(f"plots need matplotlib: {install_hint('train')}") from error
    return pyplot


def _read(folder: Path, problems: list[str]) -> list[Row]:
    """Read a run's metrics. Raises RunFolderError if there are none, or none are readable."""
    path, run_problems = folder / "metrics.jsonl", list[str]()
    if not path.exists():
        raise RunFolderError(f"there is nothing to plot: {path}: No such file or directory")
    rows = read_metrics(path, run_problems)
    of_steps: list[Row] = [row for row in rows if isinstance(row.get("step"), int)]
    if num := len(rows) - len(of_steps):
        run_problems.append(f"{path.name}: {count_of(num, 'row')} without a step")
    if run_problems and not of_steps:
        raise RunFolderError(f"there is nothing to plot: {folder}: {'; '.join(run_problems)}")
    problems += [f"{folder}: {problem}" for problem in run_problems]
    return of_steps


def _panels(names: Sequence[str], runs: Sequence[Sequence[Row]]) -> list[Panel]:
    """Return the panels to plot. Raises SettingsError if the runs do not have a named one."""
    available = {
        name
        for rows in runs
        for row in rows
        for name, value in row.items()
        if number_of(value) is not None and name != "step"
    }
    if not names:
        for usual in (_USUAL, _SUPERVISED):
            chosen = [PANELS[name] for name in usual if _names(PANELS[name]) & available]
            if PANELS["reward"] in chosen or (chosen and usual is _SUPERVISED):
                return chosen + _of_environments(available)
        return [PANELS[name] for name in _USUAL]  # no data yet: plot empty axes
    panels = []
    for name in names:
        panel = PANELS.get(name) or Panel(name, name, held_out=f"held_out/{name}" in available)
        if not _names(panel) & available:
            choices = sorted({*PANELS, *available})
            near = difflib.get_close_matches(name, choices, n=3) or choices
            raise SettingsError(
                f"--what: {name}: these runs have no such metric; available: {', '.join(near)}"
            )
        panels.append(panel)
    return panels


def _of_environments(metrics: Collection[str]) -> list[Panel]:
    """Return a panel for each metric of an environment.

    These are its reward, if there are several environments, the parts of rewards and what
    environments record.
    """
    metric_names = {name.removeprefix("held_out/") for name in metrics}
    panels = []
    for name in sorted(metric_names):
        match = re.fullmatch("(?:env/([^/]+)/)?(reward|(?:part|recorded)/.+)", name)
        if match and name != "reward":
            environment, metric = match.groups()
            of = f" of {environment}" if environment else ""
            panels.append(Panel(metric.replace("/", " ", 1) + of, name, held_out=True))
    return panels


def _names(panel: Panel) -> set[str]:
    """Return the metrics that a panel shows."""
    return {panel.name, f"held_out/{panel.name}"} if panel.held_out else {panel.name}


def _draw(axes: Axes, panel: Panel, runs: Mapping[str, Sequence[Row]]) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.set_title(_words(panel.title))
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if panel.parts and len(runs) == 1:
        _stack(axes, panel.parts, *runs.values())
    else:
        styles = zip(cycle(_COLORS), cycle(_DASHES), cycle(_MARKS), strict=False)
        for rows, style in zip(runs.values(), styles, strict=False):
            _lines(axes, panel, rows, *style)
    lowest = min((float(np.min(line.get_ydata())) for line in axes.get_lines()), default=0.0)
    if lowest >= 0:
        axes.set_ylim(bottom=0)
    if panel.top is not None and axes.get_ylim()[1] <= panel.top * 1.06:
        axes.set_ylim(top=panel.top * 1.02)
    if axes.get_ylim()[1] >= _LARGE:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _lines(
    axes: Axes, panel: Panel, rows: Sequence[Row], color: str, dashes: str, mark: str
) -> None:
    """Plot the training metric as a line, and the held-out one as markers with a thin line."""
    steps, values = _points(rows, panel.name)
    window = round(_SMOOTH_SHARE * len(values) / 2) if len(values) >= _SMOOTH_FROM else 0
    if panel.per:
        complete_rows = [row for row in rows if number_of(row.get(panel.per)) is not None]
        steps, values = _points(complete_rows, panel.name)
        window = max(1, window)
        seconds = moving_average([float(row[panel.per]) for row in complete_rows], window)
        values = [
            value / max(per, 1e-9)
            for value, per in zip(moving_average(values, window), seconds, strict=True)
        ]
    elif window:
        axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.35)
        values = moving_average(values, window)
    if values:
        alone: dict[str, Any] = {"marker": mark, "markersize": 4} if len(values) == 1 else {}
        axes.plot(steps, values, color=color, linewidth=1.6, linestyle=dashes, **alone)
    measured = _points(rows, f"held_out/{panel.name}") if panel.held_out else ([], [])
    if measured[0]:
        axes.plot(*measured, color=color, linestyle=dashes, marker=mark, markersize=6, **_MEASURED)


def _stack(axes: Axes, parts: Mapping[str, str], rows: Sequence[Row]) -> None:
    steps = [row for row in rows if any(number_of(row.get(name)) is not None for name in parts)]
    if not steps:
        return
    values = [[float(row.get(name) or 0.0) for row in steps] for name in parts]
    numbers = [row["step"] for row in steps]
    stacked = axes.stackplot(numbers, *values, labels=list(parts.values()), colors=_AREAS)
    for area, hatch in zip(stacked, cycle(_HATCHES), strict=False):
        area.set(hatch=hatch, edgecolor="#333333", linewidth=0.4)
    axes.set_ylim(0, max(map(sum, zip(*values, strict=True))) * 1.4 or 1.0)  # space for the legend
    axes.legend(fontsize=9, loc="upper left")


def _points(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    points = [
        (row["step"], float(value))
        for row in rows
        if (value := number_of(row.get(name))) is not None
    ]
    return [step for step, _ in points], [value for _, value in points]


def _legend(figure: Figure, runs: Sequence[str], panels: Sequence[Panel]) -> None:
    """Draw one legend of the runs above all panels, with the meaning of markers."""
    from matplotlib.lines import Line2D

    styles = zip(cycle(_COLORS), cycle(_DASHES), cycle(_MARKS), strict=False)
    handles = [
        Line2D([], [], color=color, linestyle=dashes, label=_words(run))
        for run, (color, dashes, _) in zip(runs, styles, strict=False)
    ]
    if any(panel.held_out for panel in panels):
        label = "with markers: held-out tasks"
        handles.append(Line2D([], [], color="#555555", marker="o", label=label, **_MEASURED))
    figure.legend(handles=handles, loc="outside upper left", ncols=min(4, len(handles)))


def _words(text: str) -> str:
    """Escape text that matplotlib would interpret as a formula or as a hidden label."""
    return f" {text}".replace("$", r"\$") if text.startswith("_") else text.replace("$", r"\$")


def _save(figure: Figure, path: Path) -> None:
    # Omit the date, so that the output is reproducible.
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    partial = path.with_name(f".{path.name}.partial{path.suffix}")
    try:
        with warnings.catch_warnings():
            # A PNG shows boxes for letters that the font lacks.
            warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
            figure.savefig(partial, metadata=metadata)
        partial.replace(path)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
