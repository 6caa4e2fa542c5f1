"""`agentloop train`: a model, tasks and settings in; a run's folder and a better model out."""

from __future__ import annotations

import argparse
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pydantic

from agentloop import console
from agentloop.config import load_settings, to_toml
from agentloop.errors import SettingsError
from agentloop.groups.reward import RewardSettings, Scorer
from agentloop.groups.roc import RocSettings
from agentloop.groups.tasks import TaskSource, TasksSettings
from agentloop.inference.sglang import Sampling
from agentloop.models import SMALL
from agentloop.runtime import Runtime, Settings
from agentloop.training.handover import WeightsSettings
from agentloop.training.learner import RanksSettings, started
from agentloop.training.learner_settings import LearnerSettings
from agentloop.training.loop import LoopSettings, TrainingLoop
from agentloop.training.run_folder import RunFolder, RunSettings

__all__ = ["TrainSettings", "main", "train"]

_MIN_TEMPERATURE = 1e-5  # SGLang takes what is below for greedy


class TrainSettings(Settings):
    """Everything that a training run can be told, and all that serving can be."""

    tasks: TasksSettings = pydantic.Field(default_factory=lambda: TasksSettings())
    reward: RewardSettings = pydantic.Field(default_factory=lambda: RewardSettings())
    roc: RocSettings = pydantic.Field(default_factory=lambda: RocSettings())
    learner: LearnerSettings = pydantic.Field(default_factory=lambda: LearnerSettings())
    ranks: RanksSettings = pydantic.Field(default_factory=lambda: RanksSettings())
    loop: LoopSettings = pydantic.Field(default_factory=lambda: LoopSettings())
    weights: WeightsSettings = pydantic.Field(default_factory=lambda: WeightsSettings())
    run: RunSettings = pydantic.Field(default_factory=lambda: RunSettings())


async def train(settings: TrainSettings, progress: console.Progress) -> Path:
    """Run it to the end; returns the run's folder.

    Raises:
        AgentLoopError: what it cannot go on from, by its name.
    """
    config = to_toml(settings)  # as it was told: so it can be told again, with something changed
    settings = _whole(settings)
    Scorer(settings.reward)  # what it lacks it says now, not when the servers run
    tasks = await anyio.to_thread.run_sync(TaskSource.open, settings.tasks, abandon_on_cancel=True)
    folder = RunFolder.of(settings.run, config)
    logs = folder.path / "logs"
    settings = settings.model_copy(update={"log_dir": logs})
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(Runtime(settings, progress=progress))
        scorer = await stack.enter_async_context(Scorer(settings.reward, pool=runtime.pool))
        learner, ranks = await stack.enter_async_context(
            started(
                settings.learner.model_dump(mode="json"),
                settings.ranks,
                log_dir=logs,
                on_progress=progress,
            )
        )
        loop = TrainingLoop(
            settings.loop,
            settings.roc,
            run_group=runtime.run_group,
            router=runtime.router,
            learner=learner,
            scorer=scorer,
            tasks=tasks,
            folder=folder,
            progress=progress.say,
            weights=settings.weights,
        )
        await ranks.while_alive(loop.run)
    return folder.path


def _whole(settings: TrainSettings) -> TrainSettings:
    """With what the learner must have in common with the servers.

    Raises:
        SettingsError: it names the settings that do not go together.
    """
    s = settings
    model = _model_of(settings)
    if s.servers and not s.model:
        raise SettingsError("model: the learner needs the folder of the model that `servers` have")
    usual = LearnerSettings()
    for name, value in (("model", model), ("temperature", s.sampling.temperature)):
        if getattr(s.learner, name) not in (getattr(usual, name), value):
            there = "model" if name == "model" else f"sampling.{name}"
            raise SettingsError(f"learner.{name}: it is that of the servers: set {there} alone")
    if s.sampling.temperature < _MIN_TEMPERATURE:
        raise SettingsError(
            f"sampling.temperature: {s.sampling.temperature:g} is greedy: every rollout of a task "
            "would be the same"
        )
    for name in ("top_p", "top_k", "min_p"):
        if getattr(s.sampling, name) != Sampling.model_fields[name].default:
            raise SettingsError(
                f"sampling.{name}: training needs all tokens: the servers' log-probabilities, "
                "and the learner's, are of the policy before any is left out"
            )
    if s.learner.loss.kind == "sft":
        raise SettingsError("learner.loss.kind: sft would learn wrong rollouts like right ones")
    if s.learner.loss.kl_coef:
        raise SettingsError("learner.loss.kl_coef: there is no reference policy here: set it to 0")
    if s.loop.steps and s.loop.group_size < max(2, s.roc.down_sample_to_n):
        raise SettingsError(
            f"loop.group_size: {s.loop.group_size} rollouts, of which roc.down_sample_to_n "
            f"({s.roc.down_sample_to_n}), and two at least, are to be learned from: every group "
            "would be rejected"
        )
    if s.learner.micro_batch_tokens <= s.budget.max_response_tokens:
        raise SettingsError(
            f"learner.micro_batch_tokens: {s.learner.micro_batch_tokens} do not hold a prompt and "
            f"budget.max_response_tokens ({s.budget.max_response_tokens})"
        )
    if not s.loop.steps and not s.tasks.held_out:
        raise SettingsError("tasks.held_out: without steps there is nothing else to do")
    learner = s.learner.model_copy(update={"model": model, "temperature": s.sampling.temperature})
    return s.model_copy(update={"model": str(model), "learner": learner})


def _model_of(settings: TrainSettings) -> Path:
    """The folder that both sides start from. Raises SettingsError: it is none."""
    folder = Path(settings.model or SMALL).expanduser().resolve()
    if not (folder / "config.json").is_file():
        raise SettingsError(f"model: {folder} is no model folder: it has no config.json")
    return folder


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="agentloop train",
        description="Train a model by rollouts: groups of them, Resample-on-Correct, GRPO.",
    )
    console.add_settings_arguments(parser)
    options = parser.parse_intermixed_args(arguments)
    if options.list_settings:
        print(console.settings_text(TrainSettings))
        return 0
    return console.run(lambda: _train(options.settings), explain=options.explain)


async def _train(arguments: list[str]) -> int:
    settings = load_settings(TrainSettings, *console.split_settings(arguments))
    with console.Progress("Starting to train") as progress:
        folder = await train(settings, progress)
    print(f"The run is in {folder}")
    return 0
