"""`agentloop train`: a model, tasks and settings in; a run's folder and a better model out.

supervised start, where the settings have one ──> stages of rollouts and learning ──> plots
"""

from __future__ import annotations

import argparse
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

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
from agentloop.sft import StartSettings, imitate, model_folder, samples_of
from agentloop.training.handover import WeightsSettings
from agentloop.training.learner import RanksSettings, started
from agentloop.training.learner_settings import LearnerSettings
from agentloop.training.loop import LoopSettings, StageSettings, TrainingLoop
from agentloop.training.plan import plan
from agentloop.training.plots import plot_runs
from agentloop.training.run_folder import RunFolder, RunSettings

__all__ = ["TrainSettings", "main", "train"]

StageName = Annotated[str, pydantic.StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
_MIN_TEMPERATURE = 1e-5  # SGLang takes what is below for greedy


class TrainSettings(Settings):
    """Everything that a training run can be told, and all that serving can be."""

    start: StartSettings | None = pydantic.Field(
        None, description="A supervised start, before the rollouts."
    )
    stages: dict[StageName, StageSettings] = pydantic.Field(
        default_factory=dict, description="Stages by their names, one after the other."
    )
    tasks: TasksSettings = pydantic.Field(default_factory=lambda: TasksSettings())
    reward: RewardSettings = pydantic.Field(default_factory=lambda: RewardSettings())
    roc: RocSettings = pydantic.Field(default_factory=lambda: RocSettings())
    learner: LearnerSettings = pydantic.Field(default_factory=lambda: LearnerSettings())
    ranks: RanksSettings = pydantic.Field(default_factory=lambda: RanksSettings())
    loop: LoopSettings = pydantic.Field(default_factory=lambda: LoopSettings())
    weights: WeightsSettings = pydantic.Field(default_factory=lambda: WeightsSettings())
    run: RunSettings = pydantic.Field(default_factory=lambda: RunSettings())

    def as_one_stage(self) -> TrainSettings:
        """With the steps of all stages, each with the largest budget of any of them."""
        if not self.stages:
            return self
        budgets = [stage.budget(self.budget) for stage in self.stages.values()]
        most = {
            name: max(getattr(budget, name) for budget in budgets)
            for name in ("max_turns", "max_response_tokens")
        }
        steps = sum(stage.steps for stage in self.stages.values())
        loop = self.loop.model_copy(update={"steps": steps})
        return self.model_copy(
            update={"stages": {}, "loop": loop, "budget": self.budget.model_copy(update=most)}
        )


async def train(settings: TrainSettings, progress: console.Progress) -> Path:
    """Run it to the end; returns the run's folder.

    Raises:
        AgentLoopError: what it cannot go on from, by its name.
    """
    config = to_toml(settings)  # as it was told: so it can be told again, with something changed
    settings = _whole(settings)
    async with Scorer(settings.reward) as scorer:
        await scorer.ready()  # what it lacks it says now, not when the servers run
    tasks = await anyio.to_thread.run_sync(TaskSource.open, settings.tasks, abandon_on_cancel=True)
    folder = RunFolder.of(settings.run, config)
    if settings.start is not None:
        model = await _start(settings.start, settings.learner.model, folder, progress)
        learner = settings.learner.model_copy(update={"model": model})
        settings = settings.model_copy(update={"model": str(model), "learner": learner})
    await _roll_out_and_learn(settings, tasks, folder, progress)
    path = folder.path / "plots.png"
    await anyio.to_thread.run_sync(plot_runs, [folder.path], path)
    return folder.path


async def _start(
    start: StartSettings, model: Path, folder: RunFolder, progress: console.Progress
) -> Path:
    """The model that the rollouts begin with."""
    samples = await samples_of(start, model, progress)
    return await imitate(start, model, samples, folder.within("start"), progress)


async def _roll_out_and_learn(
    settings: TrainSettings, tasks: TaskSource, folder: RunFolder, progress: console.Progress
) -> None:
    logs = folder.path / "logs"
    # Servers and router reckon with the longest rollouts of any stage.
    served = settings.as_one_stage().model_copy(update={"log_dir": logs})
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(Runtime(served, progress=progress))
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
            report=progress,
            stages=settings.stages,
            budget=settings.budget,
            weights=settings.weights,
        )
        await ranks.while_alive(loop.run)


def _whole(settings: TrainSettings) -> TrainSettings:
    """With what the learner must have in common with the servers.

    Raises:
        SettingsError: it names the settings that do not go together.
    """
    s = settings
    model = model_folder(s.model or SMALL)
    if s.servers and s.start:
        raise SettingsError("start: `servers` have a model already: run `agentloop sft` first")
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
    if s.learner.init == "random":
        raise SettingsError(
            "learner.init, learner.config: the servers start with the folder's weights: set "
            "start.learner.init and start.learner.config instead"
        )
    group_s, ranks_s = s.weights.group_timeout_s, s.learner.collective_timeout_s
    if s.weights.by == "group" and group_s >= ranks_s:
        raise SettingsError(
            f"weights.group_timeout_s: {group_s:g} must be below learner.collective_timeout_s "
            f"({ranks_s:g}): the other ranks wait for rank 0 no longer"
        )
    if s.learner.loss.kind == "sft":
        raise SettingsError("learner.loss.kind: sft would learn wrong rollouts like right ones")
    if s.learner.loss.kl_coef:
        raise SettingsError("learner.loss.kl_coef: there is no reference policy here: set it to 0")
    learns = s.loop.learn and (s.loop.steps or s.stages)
    if learns and s.loop.group_size < max(2, s.roc.down_sample_to_n):
        raise SettingsError(
            f"loop.group_size: {s.loop.group_size} rollouts, of which roc.down_sample_to_n "
            f"({s.roc.down_sample_to_n}), and two at least, are to be learned from: every group "
            "would be rejected"
        )
    most = s.as_one_stage().budget.max_response_tokens
    if s.learner.micro_batch_tokens <= most:
        raise SettingsError(
            f"learner.micro_batch_tokens: {s.learner.micro_batch_tokens} do not hold a prompt and "
            f"max_response_tokens ({most})"
        )
    if s.stages and s.loop.steps != LoopSettings().steps:
        raise SettingsError("loop.steps: each of the stages has its own")
    if not s.loop.steps and not s.stages and not s.tasks.held_out:
        raise SettingsError("tasks.held_out: without steps there is nothing else to do")
    learner = s.learner.model_copy(update={"model": model, "temperature": s.sampling.temperature})
    return s.model_copy(update={"model": str(model), "learner": learner})


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="agentloop train",
        description="Train a model by rollouts: groups of them, Resample-on-Correct, GRPO.",
    )
    console.add_settings_arguments(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="say what the run would take, in tokens, memory and disk, and end",
    )
    options = parser.parse_intermixed_args(arguments)
    if options.list_settings:
        print(console.settings_text(TrainSettings))
        return 0
    if options.dry_run:
        return console.run(lambda: _plan(options.settings))
    return console.run(lambda: _train(options.settings), explain=options.explain)


async def _plan(arguments: list[str]) -> int:
    """Of a model whose weights need not be there."""
    settings = load_settings(TrainSettings, *console.split_settings(arguments))
    start, stages = settings.start, settings.stages
    if start is not None:
        data = [*map(str, start.data.paths)]
        data += [f"{start.data.teacher:,} of the teacher"] if start.data.teacher else []
        print(f"start      {start.loop.epochs} epoch(s) of dialogues: {', '.join(data)}")
    for name, stage in stages.items():
        budget = stage.budget(settings.budget)
        print(
            f"stage      {name}: {stage.steps} steps, {budget.max_turns} turns and "
            f"{budget.max_response_tokens:,} tokens at most"
            + (f", on what is hard of {stage.filter_tasks} tasks" if stage.filter_tasks else "")
        )
    refused = _refusal(settings)
    changes = start.learner.config if start is not None else settings.learner.config
    made = partial(plan, settings.as_one_stage(), changes=changes)
    print((await anyio.to_thread.run_sync(made)).text(), end="")
    if refused:
        print(f"refused    {refused}")
    return 2 if refused else 0


def _refusal(settings: TrainSettings) -> str:
    """Why it would not start, for all that the settings say."""
    try:
        _whole(settings)
    except SettingsError as error:
        return str(error)
    return ""


async def _train(arguments: list[str]) -> int:
    settings = load_settings(TrainSettings, *console.split_settings(arguments))
    with console.Progress("Starting to train") as progress:
        folder = await train(settings, progress)
    print(f"The run is in {folder}; plots.png shows what became of it. Ask its model:")
    print(f'  agentloop chat --run {shown(folder)} "What is 37 times 48?"')
    return 0


def shown(path: Path) -> str:
    """From here, where it is below."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
