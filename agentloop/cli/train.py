"""`agentloop train`: train a model on tasks by reinforcement learning.

supervised fine-tuning (optional) ──> stages of rollouts and learning ──> plots
"""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path

from agentloop.cli import console
from agentloop.cli.replay import replay, step_range
from agentloop.cli.sft import load_run_settings
from agentloop.cli.train_dry_run import print_plan
from agentloop.errors import SettingsError
from agentloop.launch.progress import ProgressLine
from agentloop.training.plan.checks import check_settings, require_machine
from agentloop.training.plan.settings import TrainSettings
from agentloop.training.recovery.position import Phase, Position, Stages, display_path
from agentloop.training.recovery.respawn import is_child, run_with_restarts
from agentloop.training.wiring import train

__all__ = ["main"]

_QUESTION = "What is 37 times 48?"


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
        type=step_range,
        help="with --replay: only these steps, from the checkpoint before them; also compare the "
        "log-probabilities of servers and learner, token by token",
    )
    parser.add_argument(
        "--restarts",
        metavar="N",
        type=int,
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
    if options.list_settings:
        print(console.settings_text(TrainSettings))
        return 0
    if options.restarts < 0:
        parser.error(f"argument --restarts: must be at least 0, not {options.restarts}")
    if options.dry_run:
        work = partial(_plan, options.settings, options.resume, options.shape, as_json=options.json)
        return console.run(work)
    if options.replay is not None:
        return console.run(partial(replay, options.replay, options.steps))
    if options.restarts > 0 and not is_child():
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
    work = partial(_train, options.settings, options.resume, options.from_step)
    return console.run(work, explain=options.explain)


async def _plan(
    arguments: list[str], resume: Path | None, shapes: list[str], *, as_json: bool
) -> int:
    settings = load_run_settings(TrainSettings, arguments, resume)
    return await print_plan(settings, shapes, is_new=resume is None, as_json=as_json)


async def _train(arguments: list[str], resume: Path | None, from_step: int | None) -> int:
    settings = load_run_settings(TrainSettings, arguments, resume)
    check_settings(settings)  # settings first: a missing package takes longer to put right
    if resume is not None and _is_complete(settings, resume, from_step):
        run = display_path(resume)
        print(f"{run} has done all of its steps. More, such as by loop.steps, continue it.")
        return 0
    if settings.sft is not None:
        settings.sft.data.require_files()
    require_machine(settings)
    with ProgressLine("Starting to train") as progress:
        folder = await train(settings, progress, resume=resume, from_step=from_step)
        see, question = (
            ("Watch it act", "") if settings.env.name else ("Ask its model", f' "{_QUESTION}"')
        )
        progress.say(f"The run is in {folder}; plots.png shows its metrics. {see}:")
        progress.say(f"  agentloop chat --run {shlex.quote(display_path(folder))}{question}")
    return 0


def _is_complete(settings: TrainSettings, run: Path, from_step: int | None) -> bool:
    """Return whether a run has ended after all of these steps, and is not to go back.

    Raises:
        SettingsError: It has done more, or has no step to go back to yet.
    """
    position = Position.of(run.resolve())
    if from_step is not None:
        if position.phase is Phase.FINE_TUNING:
            raise SettingsError(
                f"--from: {display_path(run)} is in supervised fine-tuning, which is before its "
                f"step 0: omit --from; there is {position}"
            )
        return False
    stages = Stages.of(settings.model_dump(mode="json"))
    return position.is_last_of(stages) and (position.run / "ended").is_file()


def _say(line: str) -> None:
    print(f"agentloop: {line}", file=sys.stderr)
