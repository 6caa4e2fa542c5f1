"""`agentloop plot`: metrics of runs, as pictures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import anyio.to_thread

from agentloop import console
from agentloop.training.plots import PANELS, plot_runs

__all__ = ["main"]

_USUAL = (Path("plots.png"), Path("plots.svg"))


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="agentloop plot",
        description="Draw the metrics of runs over their steps, one run over another.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="what can be drawn:\n"
        + "\n".join(f"  {name:<12} {panel.title}" for name, panel in PANELS.items())
        + "\nand every metric in metrics.jsonl by its name, such as learner/grad_norm",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    parser.add_argument(
        "--out",
        action="append",
        type=Path,
        metavar="FILE",
        help="a .png or .svg file; may be given again (plots.png and plots.svg, here)",
    )
    parser.add_argument(
        "--what",
        type=_names,
        default=(),
        metavar="NAME,...",
        help="what to draw, such as reward,tool_errors (what is usual)",
    )
    options = parser.parse_args(arguments)
    runs = [run.expanduser() for run in options.runs]
    return console.run(lambda: _plot(runs, options.out or _USUAL, options.what))


async def _plot(runs: list[Path], out: Sequence[Path], what: Sequence[str]) -> int:
    with console.Progress("Drawing", after_s=2.0):
        problems = await anyio.to_thread.run_sync(partial(plot_runs, runs, *out, what=what))
    for path in out:
        print(path)
    for problem in problems:
        print(console.printable(problem), file=sys.stderr)
    return 0


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r}: names, separated by commas, are expected")
    return names
