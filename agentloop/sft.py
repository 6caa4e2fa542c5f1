"""`agentloop sft`: dialogues in; a model out that says what the assistant in them says."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Self

import anyio.to_thread
import pydantic

from agentloop import console
from agentloop.agent.chat_format import ChatFormat
from agentloop.config import load_settings, to_toml
from agentloop.errors import SettingsError
from agentloop.models import SMALL
from agentloop.training.learner import RanksSettings, started
from agentloop.training.learner_settings import LearnerSettings, LossSettings, OptimizerSettings
from agentloop.training.run_folder import RunFolder, RunSettings
from agentloop.training.supervised import (
    DialoguesSettings,
    SupervisedSettings,
    fine_tune,
    read_samples,
)

__all__ = ["SftSettings", "main", "sft"]


class SftSettings(pydantic.BaseModel):
    """Everything that a supervised run can be told."""

    model_config = pydantic.ConfigDict(extra="forbid")

    model: Path = pydantic.Field(
        SMALL,
        description="Folder of the model to start from; with learner.init = random it needs a "
        "configuration and a tokenizer alone.",
    )
    data: DialoguesSettings = pydantic.Field(default_factory=DialoguesSettings)
    loop: SupervisedSettings = pydantic.Field(default_factory=SupervisedSettings)
    learner: LearnerSettings = pydantic.Field(default_factory=LearnerSettings)
    ranks: RanksSettings = pydantic.Field(default_factory=RanksSettings)
    run: RunSettings = pydantic.Field(default_factory=RunSettings)

    @pydantic.model_validator(mode="after")
    def _says_each_thing_once(self) -> Self:
        if not self.data.paths:
            raise ValueError("data.paths: name a file of dialogues at least")
        if self.learner.loss not in (LossSettings(), LossSettings(kind="sft")):
            raise ValueError("learner.loss: it is that of the kind sft, which has no settings")
        if self.learner.model != LearnerSettings().model:
            raise ValueError("learner.model: set model instead")
        for name in ("lr", "warmup_steps"):
            if getattr(self.learner.optimizer, name) != getattr(OptimizerSettings(), name):
                raise ValueError(f"learner.optimizer.{name}: set loop.lr and loop.warmup instead")
        return self


async def sft(settings: SftSettings, progress: console.Progress) -> Path:
    """Run it to the end; returns the folder of the new model.

    Raises:
        AgentLoopError: what it cannot go on from, by its name.
    """
    model = settings.model.expanduser().resolve()
    if not (model / "config.json").is_file():
        raise SettingsError(f"model: {model} is no model folder: it has no config.json")
    learner_settings = settings.learner.model_copy(
        update={"model": model, "loss": LossSettings(kind="sft")}
    )
    progress("Reading the dialogues")
    chat = await anyio.to_thread.run_sync(ChatFormat.load, model)
    read = partial(
        read_samples, chat, settings.data, max_tokens=learner_settings.micro_batch_tokens
    )
    samples, num_left_out = await anyio.to_thread.run_sync(read, abandon_on_cancel=True)
    left_out = f", {num_left_out} left out as too long" if num_left_out else ""
    progress.say(
        f"{len(samples)} samples{left_out}, {sum(len(s.ids) for s in samples)} tokens, "
        f"{sum(sum(s.mask) for s in samples)} of them to learn"
    )
    folder = RunFolder.of(settings.run, to_toml(settings))
    async with started(
        learner_settings.model_dump(mode="json"),
        settings.ranks,
        log_dir=folder.path / "logs",
        on_progress=progress,
    ) as (learner, ranks):
        train = partial(
            fine_tune,
            settings.loop,
            samples,
            learner=learner,
            folder=folder,
            progress=progress.say,
        )
        return await ranks.while_alive(train)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="agentloop sft",
        description="Train a model on dialogues: what the assistant says in them, calls included.",
    )
    console.add_settings_arguments(parser)
    options = parser.parse_intermixed_args(arguments)
    if options.list_settings:
        print(console.settings_text(SftSettings))
        return 0
    return console.run(lambda: _sft(options.settings))


async def _sft(arguments: list[str]) -> int:
    settings = load_settings(SftSettings, *console.split_settings(arguments))
    with console.Progress("Starting to train") as progress:
        model = await sft(settings, progress)
    print(f"The model is in {model}")
    return 0
