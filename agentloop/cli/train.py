"""`agentloop train`: its arguments, and the process that restarts the one that trains.

    agentloop train (parent) ──> agentloop train (child) ──> train_program.py

The parent imports little: what trains takes seconds to import.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from agentloop.cli import console
from agentloop.training.recovery.respawn import is_child, run_with_restarts


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="agentloop train",
        description="Train a model by reinforcement learning: groups of rollouts, "
        "Resample-on-Correct, GRPO.",
    )
    console.add_settings_arguments(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="find what the run would lack or be refused for, print how many tokens and how much "
        "memory and disk it would need, and exit",
    )
    parser.add_argument(
        "--json", action="store_true", help="with --dry-run: print the plan as JSON"
    )
    parser.add_argument(
        "--shape",
        metavar="NODESxCPUS[,GPUS[xGIB]][,GIB]",
        action="append",
        default=[],
        help="with --dry-run: place the processes on a cluster of this shape, such as "
        "8x128,8x80,2048 for 8 nodes of 128 CPUs, 8 GPUs of 80 GiB, and 2,048 GiB of memory; "
        "again for further nodes (default: the cluster at cluster.address)",
    )
    parser.add_argument(
        "--resume",
        metavar="RUN",
        type=Path,
        help="continue the run in this folder with its settings; further arguments override them",
    )
    parser.add_argument(
        "--from",
        dest="from_step",
        metavar="STEP",
        type=int,
        help="with --resume: go back to the checkpoint of this step; later results are set aside",
    )
    parser.add_argument(
        "--replay",
        metavar="RUN",
        type=Path,
        help="repeat the learner's steps of the run in this folder from its journal, compare "
        "losses and weights with those of the run, and exit with status 1 at the first difference",
    )
    parser.add_argument(
        "--step",
        dest="steps",
        metavar="FIRST[-LAST]",
        type=_step_range,
        help="with --replay: only these steps, from the checkpoint before them; also compare the "
        "log-probabilities of servers and learner, token by token",
    )
    parser.add_argument(
        "--restarts",
        metavar="N",
        type=console.at_least(0),
        default=3,
        help="restart the process and resume its run when it is killed, up to N times in ten "
        "minutes (default: 3)",
    )
    options = parser.parse_intermixed_args(arguments)
    if options.from_step is not None and options.resume is None:
        parser.error("--from: requires --resume")
    if options.steps is not None and options.replay is None:
        parser.error("--step: requires --replay")
    if options.replay is not None and (options.settings or options.resume or options.dry_run):
        parser.error("--replay: takes no settings, which are the run's, nor --resume or --dry-run")
    for name in ("json", "shape"):
        if getattr(options, name) and not options.dry_run:
            parser.error(f"--{name}: requires --dry-run")
    is_run = not (options.list_settings or options.dry_run or options.replay)
    if is_run and options.restarts > 0 and not is_child():
        command = [sys.executable, "-m", "agentloop", "train"]
        flags = ["--explain"] if options.explain else []
        overrides = console.split_settings(options.settings)[1]  # may contain a password
        return run_with_restarts(
            [*command, *flags],
            arguments,
            options.restarts,
            _say,
            again=overrides,
            resume=options.resume,
        )
    with console.loading("what trains", as_line=is_run):
        from agentloop.cli.train_program import run
    return run(options)


def _step_range(text: str) -> tuple[int, int]:
    """Parse "7" or "7-9", for argparse."""
    first, _, last = text.partition("-")
    if not first.isdecimal() or not (last or first).isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a step, such as 7, or steps, such as 7-9"
        )
    steps = int(first), int(last or first)
    if not 1 <= steps[0] <= steps[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: expected steps from 1 on, in order")
    return steps


def _say(line: str) -> None:
    print(f"agentloop: {line}", file=sys.stderr)
