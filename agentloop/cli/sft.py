"""`agentloop sft`: fine-tune a model on dialogues, to imitate their assistant."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TypeVar

import pydantic

from agentloop.cli import console
from agentloop.config import load_settings
from agentloop.launch.progress import ProgressLine
from agentloop.training.run.folder import config_of
from agentloop.training.sft.run import SftSettings, model_folder, require_learner, sft

S = TypeVar("S", bound=pydantic.BaseModel)


def load_run_settings(kind: type[S], arguments: list[str], resume: Path | None) -> S:
    """Load settings from `arguments`, on top of those of the run to resume, if there is one.

    Raises:
        SettingsError: a setting is invalid.
        RunFolderError: `resume` is not a run's folder.
    """
    files, overrides = console.split_settings(arguments)
    if resume is not None:
        files = [str(config_of(resume, "--resume")), *files]
    return load_settings(kind, files, overrides)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="agentloop sft",
        description="Fine-tune a model on everything that the assistant writes in dialogues, "
        "including tool calls.",
    )
    console.add_settings_arguments(parser)
    parser.add_argument(
        "--resume",
        metavar="RUN",
        type=Path,
        help="continue the run in this folder with its settings; further arguments override them",
    )
    options = parser.parse_intermixed_args(arguments)
    if options.list_settings:
        print(console.settings_text(SftSettings))
        return 0
    return console.run(lambda: _sft(options.settings, options.resume))


async def _sft(arguments: list[str], resume: Path | None) -> int:
    settings = load_run_settings(SftSettings, arguments, resume)
    model_folder(settings.model)  # check files first: installing a missing package takes longer
    settings.data.require_files()
    require_learner(settings.learner)
    with ProgressLine("Starting to train") as progress:
        model = await sft(settings, progress, resume=resume)
    print(f"The new model is in {model}")
    return 0
