"""`agentloop runs plot`: plot the metrics of runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import anyio.to_thread

from agentloop.analysis.plots import PANELS, plot_runs
from agentloop.cli import console
from agentloop.launch.progress import ProgressLine

_DEFAULT_OUT = (Path("plots.png"), Path("plots.svg"))


def main(arguments: list[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="agentloop runs plot",
        description="Plot the metrics of one or more runs over their steps.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="panels:\n"
        + "\n".join(f"  {name:<12} {panel.title}" for name, panel in PANELS.items())
        + "\nor the name of any metric in metrics.jsonl, such as learner/grad_norm",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    parser.add_argument(
        "--out",
        action="append",
        type=Path,
        metavar="FILE",
        help="a .png or .svg file; may be repeated (default: plots.png and plots.svg)",
    )
    parser.add_argument(
        "--what",
        type=_names,
        default=(),
        metavar="NAME,...",
        help="panels to draw, such as reward,tool_errors (default: the common ones)",
    )
    options = parser.parse_args(arguments)
    runs = [run.expanduser() for run in options.runs]
    return console.run(lambda: _plot(runs, options.out or _DEFAULT_OUT, options.what))


async def _plot(runs: list[Path], out: Sequence[Path], panels: Sequence[str]) -> int:
    with ProgressLine("Drawing", after_s=2.0):
        problems = await anyio.to_thread.run_sync(partial(plot_runs, runs, *out, what=panels))
    for path in out:
        print(path)
    for problem in problems:
        print(console.printable(problem), file=sys.stderr)
    return 0


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r}: expected names separated by commas")
    return names
