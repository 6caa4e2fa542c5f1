"""Run `agentloop train` once its arguments are known.

supervised fine-tuning (optional) ──> stages of rollouts and learning ──> plots
"""

from __future__ import annotations

import argparse
import shlex
from functools import partial
from pathlib import Path

from agentloop.cli import console
from agentloop.cli.replay import replay
from agentloop.cli.sft import load_run_settings
from agentloop.cli.train_dry_run import print_plan
from agentloop.errors import SettingsError
from agentloop.launch.progress import ProgressLine
from agentloop.training.plan.checks import check_settings, require_machine
from agentloop.training.plan.settings import TrainSettings
from agentloop.training.recovery.position import Phase, Position, Stages, display_path
from agentloop.training.wiring import train

_QUESTION = "What is 37 times 48?"


def run(options: argparse.Namespace) -> int:
    """Do what the arguments of `agentloop train` ask for, and return the exit status."""
    if options.list_settings:
        print(console.settings_text(TrainSettings))
        return 0
    if options.dry_run:
        work = partial(_plan, options.settings, options.resume, options.shape, as_json=options.json)
        return console.run(work)
    if options.replay is not None:
        return console.run(partial(replay, options.replay, options.steps))
    training = partial(_train, options.settings, options.resume, options.from_step)
    return console.run(training, explain=options.explain)


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
