"""Check that no benchmark's ratio fell by more than a tenth from those on file.

    python -m bench check                         in some minutes on two cores
    python -m bench check --only router,streaming
    python -m bench check --update                write the file, from five runs of each

Each figure is a ratio within one run: ours to a competitor's, to a bound or to a floor. That makes
it comparable between machines, as far as the competitor depends on the machine as ours does. More
is better for all of them. The runs are short forms of the benchmarks in docs/benchmarks.md, which
give the figures that count. A figure that fell is measured twice more, and the median counts. What
has no competitor that runs beside it is not checked: dispatch, weight sync, the page.

The file is bench/baselines.toml.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.sandbox import BenchFigures

__all__ = ["CHECKS", "Check", "fallen", "main", "medians", "to_toml"]

Figures = dict[str, float]

BASELINES = Path(__file__).with_name("baselines.toml")
TOLERANCE = 0.1
_NUM_AGAIN = 2
_NUM_FOR_UPDATE = 5
_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Check:
    """A benchmark's short form.

    Attributes:
        command: The module and its arguments. The option and the file for the figures follow.
        read: Returns the ratios from the content of that file.
    """

    command: Sequence[str]
    read: Callable[[Any], Figures]
    out: str = "--json"


def _streaming(figures: Any) -> Figures:
    speed = {name: row["tokens_per_cpu_s"] for name, row in figures["medians"].items()}
    ratio = speed["agentloop"] / speed["openai"]
    return {"of the OpenAI client's tokens per CPU second": ratio}


def _router(rows: Any) -> Figures:
    def median(policy: str, of: Callable[[Any], float]) -> float:
        return statistics.median(of(row) for row in rows if row["policy"] == policy)

    other_policies = {row["policy"] for row in rows} - {"kv"}
    best = max(median(policy, lambda row: row["goodput"]) for policy in other_policies)
    return {
        "of the shortest makespan possible": median("kv", lambda r: r["bound_s"] / r["makespan_s"]),
        "of the best other policy's goodput": median("kv", lambda row: row["goodput"]) / best,
    }


def _async_training(rows: Any) -> Figures:
    step_s = {
        age: statistics.median(row["step_s"] for row in rows if row["max_staleness"] == age)
        for age in (0, 1)
    }
    bound_s = statistics.median(row["bound_s"] for row in rows)
    return {
        "of synchronous steps per hour": step_s[0] / step_s[1],
        "of the shortest step possible": bound_s / step_s[1],
    }


def _sandbox(figures: BenchFigures) -> Figures:
    (run,) = figures["runs"]
    times = run["times_the_floor"]["plain"]
    assert times is not None
    return {"calls per CPU second, of the plain floor's": 1 / times}


def _learner(figures: Any) -> Figures:
    (ours,) = (row for row in figures["speed"] if row["arm"].startswith("ZeRO"))
    return {"of the plain loop's tokens per CPU second": ours["ratio by CPU"]}


def _packing(figures: Any) -> Figures:
    by_arm = {row["arm"]: row["tokens/CPU s"] for row in figures["packing"]}
    packed = by_arm.pop("plain, packed")
    return {"of padded samples' tokens per CPU second": packed / max(by_arm.values())}


_LEARNER = ["--tokens", "4096", "--threads", "1", "--rounds", "3"]
CHECKS: dict[str, Check] = {
    "router": Check(
        ["bench.router", "--servers", "8", "--seeds", "1,2,3", "--policies",
         "thunder_agent,cache_aware,kv"],
        _router,
    ),
    "async_training": Check(
        ["bench.async_train", "model", "--regimes", "balanced", "--seeds", "0,1", "--staleness",
         "0,1"],
        _async_training,
        out="--out",
    ),
    "streaming": Check(
        ["bench.streaming", "--single", "--streams", "256", "--servers", "16", "--tokens", "100"],
        _streaming,
    ),
    "sandbox": Check(
        ["bench.sandbox", "--concurrency", "16", "--calls", "2000", "backend=process"], _sandbox
    ),
    "learner": Check(
        ["bench.learner", "speed", "--stages", "1", "--one-rank", *_LEARNER], _learner
    ),
    "packing": Check(["bench.learner", "packing", *_LEARNER], _packing),
}  # fmt: skip


def medians(runs: Sequence[Figures]) -> Figures:
    """Return the median of each figure."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def fallen(baseline: Mapping[str, float], figures: Mapping[str, float]) -> list[str]:
    """Return the names of those figures that fell by more than the tolerance, or are missing."""
    return [
        name
        for name, value in baseline.items()
        if name not in figures or figures[name] < value * (1 - TOLERANCE)
    ]


def to_toml(baselines: Mapping[str, Figures]) -> str:
    """Return the text of the file of baselines."""
    lines = ["# Written by `python -m bench check --update`: medians of five runs, as ratios."]
    for name, figures in baselines.items():
        lines += ["", f"[{name}]"]
        lines += [f"{json.dumps(figure)} = {value:.3f}" for figure, value in figures.items()]
    return "\n".join(lines) + "\n"


def _measure(check: Check, runs: int) -> list[Figures]:
    figures = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "figures.json")
            done = subprocess.run(
                [sys.executable, "-m", *check.command, check.out, str(path)],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
            if done.returncode:
                raise SystemExit(f"{' '.join(check.command)} failed:\n{done.stdout}{done.stderr}")
            figures.append(check.read(json.loads(path.read_text())))
    return figures


def _check(name: str, baseline: Figures) -> list[str]:
    """Measure one benchmark, print its figures, and return the names of those that fell."""
    started = time.monotonic()
    runs = _measure(CHECKS[name], 1)
    if fallen(baseline, runs[0]):
        runs += _measure(CHECKS[name], _NUM_AGAIN)
    figures = medians(runs)
    fell = fallen(baseline, figures)
    print(f"{name} ({time.monotonic() - started:.0f} s)")
    for figure, value in figures.items():
        before = baseline.get(figure)
        note = "new" if before is None else f"{before:.2f} on file"
        print(f"  {value:6.2f} {figure} ({note}){'  FELL' if figure in fell else ''}", flush=True)
    return [f"{name}: {figure}" for figure in fell]


def _only(text: str) -> list[str]:
    names = text.split(",")
    if unknown := sorted(set(names) - set(CHECKS)):
        raise argparse.ArgumentTypeError(f"no check {', '.join(unknown)}: {', '.join(CHECKS)}")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=["check"])
    parser.add_argument("--only", type=_only, default=list(CHECKS), metavar="NAME,...")
    parser.add_argument("--update", action="store_true", help="write the file")
    parser.add_argument("--baselines", type=Path, default=BASELINES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    exists = options.baselines.exists()
    on_file: dict[str, Figures] = tomllib.loads(options.baselines.read_text()) if exists else {}
    if options.update:
        for name in options.only:
            on_file[name] = medians(_measure(CHECKS[name], _NUM_FOR_UPDATE))
            print(f"{name}: {on_file[name]}", flush=True)
        ordered = {name: on_file[name] for name in CHECKS if name in on_file}
        options.baselines.write_text(to_toml(ordered))
        return 0
    fell = [figure for name in options.only for figure in _check(name, on_file.get(name, {}))]
    print(f"Fell by more than {TOLERANCE:.0%}: {'; '.join(fell)}" if fell else "Nothing fell.")
    return 1 if fell else 0
