"""Benchmark of a training step beside TRL's GRPOTrainer, on a CPU.

    python -m bench.trl                                    two rounds of each, about five minutes
    python -m bench.trl --rounds 1 --steps 4 server.count=2     settings for `agentloop train small`

Both train the model that ships with agentloop, in float32, on the same 300 problems: 8 prompts of
16 rollouts a step, up to three turns with a Python tool, at most 256 tokens a rollout, and all 128
rollouts trained on in one update (rewards have some noise, so that each has an advantage). The runs
alternate, and a run's first step, with what is set up at first use, does not count.

Ours is `agentloop train small`: SGLang and DeepSpeed, calls in the sandbox, a journal of groups.
TRL, in an environment that is made below `--cache` at the first call, generates with transformers,
because vLLM needs a GPU; its tool is a subprocess without isolation.

A step's time is that between the ends of two steps. CPU seconds are those of the whole machine,
because servers, sandbox and Docker are part of a step: let nothing else run. Not covered: memory.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from random import Random
from typing import NamedTuple, TypedDict

from agentloop.environments.tasks.problems import arithmetic
from agentloop.models import SMALL
from bench.command import parser_for, say
from bench.sandbox import machine_cpu_s

TRL = ("torch<2.14", "trl>=1.16", "transformers>=5.13", "accelerate", "datasets", "jmespath")
SCRIPT = Path(__file__).with_name("trl_script.py")
TIMEOUT_S = 600.0
NUM_PROBLEMS = 300
RATE = 1e-6  # the model, and so the length of its rollouts, stays as it is


class Step(NamedTuple):
    """A step that counts, by wall clock and by CPU time of the whole machine."""

    wall_s: float
    cpu_s: float
    num_tokens: int


class StepRow(TypedDict):
    """What is read of a step's metrics."""

    num_sampled_tokens: int


def write_problems(file: Path) -> None:
    """Write as many different problems as the comparison has, of the levels of the recipe."""
    rng = Random(0)
    answers: dict[str, int] = {}
    while len(answers) < NUM_PROBLEMS:
        problem = arithmetic(rng.choice((3, 6)), rng)
        answers[problem.text] = problem.answer
    rows = (
        {"prompt": [{"role": "user", "content": text}], "answer": str(answer)}
        for text, answer in answers.items()
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def make_environment(folder: Path) -> Path:
    """Return the interpreter of a virtual environment with TRL, which is made if it is missing."""
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        say(f"Installing TRL into {folder}, once")
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *TRL], check=True)
        (folder / "complete").touch()
    return python


def our_command(problems: Path, steps: int, folder: Path) -> list[object]:
    """Return the command that trains with agentloop and writes `folder`/run/metrics.jsonl."""
    command = (sys.executable, "-m", "agentloop", "train", "small")
    tasks = ("tasks.kind=jsonl", f"tasks.paths={json.dumps([str(problems)])}", "tasks.held_out=0")
    reward = ("reward.function=bench.trl_script:reward", "roc.down_sample_to_n=16")
    agent = ('tools=["python_code_with_standard_io"]', "budget.max_turns=3")
    learning = (f"loop.steps={steps}", "loop.evaluate_every=0", f"learner.optimizer.lr={RATE}")
    return [*command, *tasks, *reward, *agent, *learning, f"run.folder={folder}", "run.name=run"]


def measure(command: list[object], metrics: Path, log: Path) -> list[Step]:
    """Run a command and return the steps that it writes to `metrics`, one JSON object per line."""
    deadline = time.monotonic() + TIMEOUT_S
    ends: list[tuple[float, float]] = []
    with log.open("wb") as output:
        process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output)
    try:
        while True:
            is_running = process.poll() is None
            rows = _steps_in(metrics)
            if len(rows) > len(ends):
                ends.append((time.monotonic(), machine_cpu_s()))
                say(f"{metrics.stem}: step {len(ends)}")
            elif not is_running:
                break
            elif time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]}: no end after {TIMEOUT_S:.0f} s")
            time.sleep(0.02)
    finally:
        process.terminate()
        process.wait()
    if process.returncode:
        last_lines = "\n".join(log.read_text("utf-8", "replace").splitlines()[-15:])
        raise RuntimeError(f"{command[0]} ended with {process.returncode}:\n{last_lines}")
    return [
        Step(end[0] - start[0], end[1] - start[1], row["num_sampled_tokens"])
        for start, end, row in zip(ends, ends[1:], rows[1:], strict=False)
    ]


def _steps_in(metrics: Path) -> list[StepRow]:
    lines = metrics.read_text("utf-8").splitlines(True) if metrics.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if "num_sampled_tokens" in row]


def table(steps: dict[str, list[Step]]) -> str:
    """Return medians and ranges of both trainers, and TRL's medians divided by ours."""
    rows = ["| | s a step | CPU s a step | tokens a step |", "|---|---|---|---|"]
    medians = {}
    for name, each in steps.items():
        columns = list(zip(*each, strict=True))
        medians[name] = [statistics.median(column) for column in columns]
        cells = (
            f"{median:,.1f} ({min(column):,.1f} to {max(column):,.1f})"
            for median, column in zip(medians[name], columns, strict=True)
        )
        rows.append(f"| {name} | {' | '.join(cells)} |")
    time_, cpu, tokens = (t / o for t, o in zip(medians["TRL"], medians["agentloop"], strict=True))
    last = f"TRL's / ours: {time_:.2f} of time, {cpu:.2f} of CPU time, {tokens:.2f} of tokens"
    return "\n".join((*rows, "", last))


def main(argv: list[str] | None = None) -> None:
    parser = parser_for("trl", __doc__)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    parser.add_argument("--steps", type=int, default=6, help="steps that count, per round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=cache / "agentloop-bench" / "trl")
    parser.add_argument("settings", nargs="*", help="settings of ours, such as server.count=2")
    arguments = parser.parse_intermixed_args(argv)
    python = make_environment(arguments.cache)
    steps: dict[str, list[Step]] = {"TRL": [], "agentloop": []}
    with tempfile.TemporaryDirectory() as text:
        for number in range(arguments.rounds):
            folder = Path(text) / str(number)
            folder.mkdir()
            write_problems(problems := folder / "problems.jsonl")
            num_steps = arguments.steps + 1
            metrics, log = folder / "trl.jsonl", folder / "trl.log"
            trl = [python, "-P", SCRIPT, SMALL, problems, num_steps, RATE, metrics]
            ours = [*our_command(problems, num_steps, folder), *arguments.settings]
            steps["TRL"] += measure(trl, metrics, log)
            steps["agentloop"] += measure(ours, folder / "run" / "metrics.jsonl", log)
    print(table(steps))


if __name__ == "__main__":
    main()
