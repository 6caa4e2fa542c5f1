"""What became of runs, as pictures.

    metrics.jsonl ──> a panel for each thing to look at, runs over one another ──> PNG, SVG

Legible in print and to the colour-blind: Okabe and Ito's colours, and each run has line and marks
of its own. `agentloop train` draws its own at the end; `agentloop plot` draws any.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from agentloop.distribution import install_hint
from agentloop.errors import SettingsError
from agentloop.training.run_list import read_rows

__all__ = ["PANELS", "Panel", "labels_of", "plot_runs", "smoothed"]

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Panel:
    """What is drawn of runs, over their steps.

    Attributes:
        title: with the unit, where there is one.
        name: of the metric.
        per: the metric that it is divided by, both summed over a step and its neighbours: a rate.
        held_out: whether the same is measured on held-out tasks, too.
        top: of the axis; None: as high as it must be.
        parts: of a single run these metrics are drawn, which add up to it, by what they are.
    """

    title: str
    name: str
    per: str = ""
    held_out: bool = False
    top: float | None = None
    parts: Mapping[str, str] = field(default_factory=dict)


PANELS = {
    "reward": Panel("reward", "reward", held_out=True, top=1.0),
    "tool_errors": Panel(
        "tool errors in correct rollouts", "tool_errors_in_correct", held_out=True
    ),
    "lengths": Panel("sampled tokens of a rollout", "length_mean", held_out=True),
    # Not `rollout_tokens_per_s`: a step whose rollouts were there already has no time of its own.
    "throughput": Panel("sampled tokens per second", "num_sampled_tokens", per="step_s"),
    "entropy": Panel("entropy, nats per token", "learner/entropy"),
    "mismatch": Panel("mismatch of engine and learner, KL per token", "learner/mismatch_kl"),
    "loss": Panel("loss", "learner/loss"),
    "staleness": Panel("staleness, versions", "staleness_mean"),
    "times": Panel(
        "seconds of a step",
        "step_s",
        parts={
            "wait_s": "waiting for rollouts",
            "learn_s": "learning",
            "hand_over_s": "loading weights",
        },
    ),
}
"""By the names that `agentloop plot --what` takes; a metric's own name is taken, too."""

_USUAL = ("reward", "tool_errors", "lengths", "throughput", "entropy", "mismatch", "times")
_SUPERVISED = ("loss", "entropy")  # where that is all there is
# Okabe and Ito, "Color Universal Design": apart for all kinds of colour vision, and most in grey.
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
_SMOOTH_FROM = 60  # steps: below, every one can be seen
_SMOOTH_SHARE = 0.05
_LARGE = 2_000  # on an axis: from here on digits stand in groups


def plot_runs(folders: Sequence[Path], *paths: Path, what: Sequence[str] = ()) -> list[str]:
    """Draw the metrics of the runs in `folders` into each of `paths`, PNG or SVG by their ends.
    Returns what is wrong with them, in words: it is left out.

    Args:
        what: keys of `PANELS`, or metrics; none: what is usual and there.

    Raises:
        SettingsError: matplotlib is not installed, there is nothing to draw, or nowhere to.
    """
    for path in paths:
        if path.suffix.lower() not in (".png", ".svg"):
            raise SettingsError(f"{path}: pictures are .png or .svg")
    pyplot = _pyplot()
    problems: list[str] = []
    read = [_read(folder, problems) for folder in folders]
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
                last = index == len(panels) - 1  # it has the rest of its row
                place = grid[row, column:] if last else grid[row, column]
                _draw(figure.add_subplot(place), panel, runs)
            _legend(figure, list(runs), panels)
            for path in paths:
                _save(figure, path)
        finally:
            pyplot.close(figure)
    return problems


def labels_of(folders: Sequence[Path]) -> list[str]:
    """A name for each, as short as tells them apart: of `a/run` and `b/run` both parts."""
    parts = [folder.resolve().parts for folder in folders]
    labels = []
    for one in parts:
        others = [other for other in parts if other != one]
        length = next(
            (n for n in range(1, len(one)) if all(other[-n:] != one[-n:] for other in others)), 1
        )
        labels.append("/".join(one[-length:]))
    seen: dict[str, int] = {}
    for index, label in enumerate(labels):  # one folder, named twice
        seen[label] = seen.get(label, 0) + 1
        if seen[label] > 1:
            labels[index] = f"{label} ({seen[label]})"
    return labels


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean of each with its neighbours, `window` to either side, fewer at the ends."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    found = []
    for index in range(len(values)):
        start, end = max(0, index - window), min(len(values), index + window + 1)
        found.append((sums[end] - sums[start]) / (end - start))
    return found


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
    "svg.fonttype": "none",  # words stay words
    "svg.hashsalt": "agentloop",  # the same runs, the same bytes
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
    """Raises SettingsError: there are no metrics, or none that can be read."""
    path, found = folder / "metrics.jsonl", list[str]()
    if not path.exists():
        raise SettingsError(f"there is nothing to draw: {path}: No such file or directory")
    rows = read_rows(path, found)
    of_steps: list[Row] = [row for row in rows if isinstance(row.get("step"), int)]
    if num := len(rows) - len(of_steps):
        found.append(f"{path.name}: {num} without a step")
    if found and not of_steps:
        raise SettingsError(f"there is nothing to draw: {folder}: {'; '.join(found)}")
    problems += [f"{folder}: {problem}" for problem in found]
    return of_steps


def _panels(what: Sequence[str], runs: Sequence[Sequence[Row]]) -> list[Panel]:
    """Raises SettingsError: nothing of it is there."""
    there = {
        name
        for rows in runs
        for row in rows
        for name, value in row.items()
        if _is_number(value) and name != "step"
    }
    if not what:
        for usual in (_USUAL, _SUPERVISED):
            chosen = [PANELS[name] for name in usual if _names(PANELS[name]) & there]
            if PANELS[usual[0]] in chosen or (chosen and usual is _SUPERVISED):
                return chosen
        return [PANELS[name] for name in _USUAL]  # nothing yet: the axes alone
    panels = []
    for name in what:
        panel = PANELS.get(name) or Panel(name, name, held_out=f"held_out/{name}" in there)
        if not _names(panel) & there:
            known = sorted({*PANELS, *there})
            near = difflib.get_close_matches(name, known, n=3) or known
            raise SettingsError(
                f"--what: {name}: nothing of that is in these runs; there are {', '.join(near)}"
            )
        panels.append(panel)
    return panels


def _names(panel: Panel) -> set[str]:
    """The metrics that it is drawn of."""
    return {panel.name, f"held_out/{panel.name}"} if panel.held_out else {panel.name}


def _draw(axes: Any, panel: Panel, runs: Mapping[str, Sequence[Row]]) -> None:
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
    lowest = min((float(min(line.get_ydata())) for line in axes.get_lines()), default=0.0)
    if lowest >= 0:
        axes.set_ylim(bottom=0)
    if panel.top is not None and axes.get_ylim()[1] <= panel.top * 1.06:
        axes.set_ylim(top=panel.top * 1.02)
    if axes.get_ylim()[1] >= _LARGE:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _lines(
    axes: Any, panel: Panel, rows: Sequence[Row], color: str, dashes: str, mark: str
) -> None:
    """Of the rollouts a line, of what is held out marks with a thin one through them."""
    steps, values = _points(rows, panel.name)
    window = round(_SMOOTH_SHARE * len(values) / 2) if len(values) >= _SMOOTH_FROM else 0
    if panel.per:
        both = [row for row in rows if _is_number(row.get(panel.per))]
        steps, values = _points(both, panel.name)
        window = max(1, window)
        seconds = smoothed([float(row[panel.per]) for row in both], window)
        values = [
            value / max(per, 1e-9)
            for value, per in zip(smoothed(values, window), seconds, strict=True)
        ]
    elif window:
        axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.35)
        values = smoothed(values, window)
    if values:
        alone = {"marker": mark, "markersize": 4} if len(values) == 1 else {}
        axes.plot(steps, values, color=color, linewidth=1.6, linestyle=dashes, **alone)
    measured = _points(rows, f"held_out/{panel.name}") if panel.held_out else ([], [])
    if measured[0]:
        axes.plot(*measured, color=color, linestyle=dashes, marker=mark, markersize=6, **_MEASURED)


def _stack(axes: Any, parts: Mapping[str, str], rows: Sequence[Row]) -> None:
    steps = [row for row in rows if any(_is_number(row.get(name)) for name in parts)]
    if not steps:
        return
    values = [[float(row.get(name) or 0.0) for row in steps] for name in parts]
    numbers = [row["step"] for row in steps]
    stacked = axes.stackplot(numbers, *values, labels=list(parts.values()), colors=_AREAS)
    for area, hatch in zip(stacked, cycle(_HATCHES), strict=False):
        area.set(hatch=hatch, edgecolor="#333333", linewidth=0.4)
    axes.set_ylim(0, max(map(sum, zip(*values, strict=True))) * 1.4 or 1.0)  # room for words
    axes.legend(fontsize=9, loc="upper left")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _points(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    found = [(row["step"], float(row[name])) for row in rows if _is_number(row.get(name))]
    return [step for step, _ in found], [value for _, value in found]


def _legend(figure: Any, runs: Sequence[str], panels: Sequence[Panel]) -> None:
    """Of the runs, once, above all panels; and what marks are."""
    from matplotlib.lines import Line2D

    styles = zip(cycle(_COLORS), cycle(_DASHES), cycle(_MARKS), strict=False)
    handles = [
        Line2D([], [], color=color, linestyle=dashes, label=_words(run))
        for run, (color, dashes, _) in zip(runs, styles, strict=False)
    ]
    if any(panel.held_out for panel in panels):
        label = "with marks: held-out tasks"
        handles.append(Line2D([], [], color="#555555", marker="o", label=label, **_MEASURED))
    figure.legend(handles=handles, loc="outside upper left", ncols=min(4, len(handles)))


def _words(text: str) -> str:
    """Without what matplotlib would take for a formula, or for a name to be hidden."""
    return f" {text}".replace("$", r"\$") if text.startswith("_") else text.replace("$", r"\$")


def _save(figure: Any, path: Path) -> None:
    # Without the date, the same runs give the same bytes.
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    partial = path.with_name(f".{path.name}.partial{path.suffix}")
    try:
        with warnings.catch_warnings():
            # Of a name in letters that the font lacks a PNG picture shows boxes.
            warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
            figure.savefig(partial, metadata=metadata)
        partial.replace(path)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
