"""GRPO compared with GRPO with Resample-on-Correct, at equal tokens, on a laptop.

    python -m bench.roc --model runs/latest/sft/model --plot docs/images/roc.png

Every arm starts from the same model, which supervised fine-tuning by docs/recipes/laptop.toml has
made and two in five of whose calls fail, with the same tasks, number of rollouts and optimizer.
They differ in the part of a group of 16 that is trained on:

    grpo      all of them
    roc       8: half of the wrong ones, and correct ones by their fraction of failed calls
    random    8: the same numbers of correct and wrong ones, regardless of their calls
    shuffled  like roc, but with permuted rewards: a control, which must not learn

Each run is an `agentloop train` of its own, with real servers, sandbox and learner.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.command import parser_for

RECIPE = Path(__file__).parents[1] / "docs" / "recipes" / "laptop-rl.toml"
ARMS: Mapping[str, Sequence[str]] = {
    "grpo": ["roc.down_sample_to_n=0", "roc.min_zero_reward_trace_num=-1",
             "roc.min_non_zero_reward_trace_num=-1"],
    "roc": [],
    "random": ["roc.roc_error_ratio=false", "roc.roc_answer_format=false"],
    "shuffled": ["credit.args.shuffle_rewards=true"],
}  # fmt: skip
_LAST = 5  # steps at the end that are averaged


@dataclass(frozen=True, slots=True)
class Run:
    """An arm with one seed; lists have one entry per step.

    Attributes:
        tokens: Cumulative number of sampled tokens.
        errors: Fraction of failed calls, averaged over correct rollouts with a call.
        held_out: Reward and errors on held-out problems, before the first step and after the last.
    """

    arm: str
    seed: int
    tokens: list[int]
    reward: list[float]
    errors: list[float | None]
    held_out: list[tuple[float, float | None]]

    @classmethod
    def of(cls, arm: str, seed: int, rows: Sequence[Mapping[str, Any]]) -> Run:
        steps = [row for row in rows if "reward" in row]
        held_out = [row for row in rows if "held_out/reward" in row]
        return cls(
            arm,
            seed,
            list(itertools.accumulate(row["num_sampled_tokens"] for row in steps)),
            [row["reward"] for row in steps],
            [row["tool_errors_in_correct"] for row in steps],
            [
                (row["held_out/reward"], row["held_out/tool_errors_in_correct"])
                for row in (held_out[0], held_out[-1])
            ],
        )

    def at_the_end(self, values: Sequence[float | None]) -> float:
        """Return the mean over the last steps."""
        present = [value for value in values[-_LAST:] if value is not None]
        return statistics.fmean(present) if present else float("nan")


def main() -> int:
    options = _parser().parse_args()
    runs = [Run(**row) for file in options.read for row in json.loads(file.read_text("utf-8"))]
    with tempfile.TemporaryDirectory(prefix="bench-roc-") as folder:
        for seed, arm in itertools.product(options.seeds, options.arms):
            run = _run(arm, seed, options, Path(folder))
            runs.append(run)
            print(_line(run), flush=True)
            if options.out:  # after each run, because they take long
                options.out.write_text(json.dumps([asdict(run) for run in runs]) + "\n", "utf-8")
    print("\n".join(summary(runs)))
    if options.plot:
        plot(runs, options.plot)
    return 0


def _run(arm: str, seed: int, options: argparse.Namespace, folder: Path) -> Run:
    name = f"{arm}-{seed}"
    seeds = [f"{key}.seed={seed}" for key in ("loop", "tasks", "learner")]
    settings = [f"model={options.model}", f"loop.steps={options.steps}"]
    where = [
        f"run.folder={folder}",
        f"run.name={name}",
        "loop.evaluate_every=1000",
        "loop.evaluate_tasks=128",
    ]
    command = [sys.executable, "-m", "agentloop", "train", str(RECIPE)]
    with (folder / f"{name}.log").open("w") as log:
        done = subprocess.run(
            [*command, *settings, *seeds, *where, *ARMS[arm]],
            stdout=log,
            stderr=log,
            timeout=options.timeout_s,
        )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{(folder / f'{name}.log').read_text('utf-8')[-3000:]}")
    lines = (folder / name / "metrics.jsonl").read_text("utf-8").splitlines()
    return Run.of(arm, seed, [json.loads(line) for line in lines])


def _line(run: Run) -> str:
    (before, errors_before), (after, errors_after) = run.held_out
    return (
        f"{run.arm} {run.seed}: {run.tokens[-1]:,} tokens, held out: reward {before:.3f} to "
        f"{after:.3f}, tool errors in correct rollouts {_percent(errors_before)} to "
        f"{_percent(errors_after)}; of the last {_LAST} steps: {run.at_the_end(run.reward):.3f}, "
        f"{_percent(run.at_the_end(run.errors))}"
    )


def summary(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the lines of a table in markdown: medians over the seeds, and their range."""
    yield "| arm | held-out reward | tool errors in correct rollouts | both over the last steps |"
    yield "|---|---|---|---|"
    for arm in dict.fromkeys(run.arm for run in runs):
        mine = [run for run in runs if run.arm == arm]
        rewards = [run.held_out[-1][0] for run in mine]
        errors = [
            reward if reward is not None else float("nan")
            for run in mine
            for reward in [run.held_out[-1][1]]
        ]
        last = [run.at_the_end(run.reward) for run in mine]
        last_errors = [run.at_the_end(run.errors) for run in mine]
        yield (
            f"| {arm} | {_spread(rewards, '.3f')} | {_spread(errors, '.1%')} | "
            f"{_spread(last, '.3f')}, {_spread(last_errors, '.1%')} |"
        )


def _spread(values: Sequence[float], form: str) -> str:
    middle = format(statistics.median(values), form)
    return f"{middle} ({min(values):{form}} to {max(values):{form}})"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def plot(runs: Sequence[Run], path: Path) -> None:
    """Plot reward and tool errors over sampled tokens: thin lines per seed, thick medians."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    arms = list(dict.fromkeys(run.arm for run in runs))
    for color, arm in zip(pyplot.get_cmap("tab10").colors, arms, strict=False):
        mine = [run for run in runs if run.arm == arm]
        for panel, name in zip(axes, ("reward", "errors"), strict=True):
            for run in mine:
                panel.plot(run.tokens, getattr(run, name), color=color, alpha=0.25, linewidth=0.8)
            steps = range(min(len(run.tokens) for run in mine))
            middle = [_middle([getattr(run, name)[step] for run in mine]) for step in steps]
            tokens = [statistics.median(run.tokens[step] for run in mine) for step in steps]
            panel.plot(tokens, middle, color=color, linewidth=2.2, label=f"{arm} ({len(mine)})")
    titles = ("reward", "failed calls by calls, in right rollouts")
    for panel, title in zip(axes, titles, strict=True):
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_xlabel("sampled tokens")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _middle(values: Sequence[float | None]) -> float:
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else float("nan")


def _parser() -> argparse.ArgumentParser:
    parser = parser_for("roc", __doc__)
    parser.add_argument("--model", required=True, type=Path, help="the folder of a model")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["grpo", "roc"])
    parser.add_argument(
        "--seeds", type=int, nargs="*", default=list(range(5)), help="seeds of each arm (0 1 2 3 4)"
    )
    parser.add_argument(
        "--read",
        type=Path,
        nargs="+",
        default=[],
        help="files of earlier runs, written by --out, to include",
    )
    parser.add_argument("--steps", type=int, default=30, help="steps of each run (30)")
    parser.add_argument(
        "--timeout-s", type=float, default=1800, help="time limit of each run (1800)"
    )
    parser.add_argument("--out", type=Path, help="a JSON file, written after each run")
    parser.add_argument("--plot", type=Path, help="a PNG file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
