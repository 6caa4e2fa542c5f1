"""`agentloop train`: a model, tasks and settings in; a run's folder and a better model out."""

from __future__ import annotations

import argparse
import time
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
from agentloop.models import SMALL
from agentloop.runtime import Runtime, Settings
from agentloop.training.learner import LearnerError, LearnerProcesses, started
from agentloop.training.learner_settings import LearnerSettings
from agentloop.training.loop import LoopSettings, TrainingLoop
from agentloop.training.run_folder import RunFolder

__all__ = ["TrainSettings", "main", "train"]


class RunSettings(pydantic.BaseModel):
    """Where a run's files go."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    folder: Path = pydantic.Field(Path("runs"), description="Folder of all runs.")
    name: str = pydantic.Field(
        "", pattern=r"^[\w.-]*$", description="Of this run; none: the time of its start."
    )


class RanksSettings(pydantic.BaseModel):
    """The learner's processes."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    count: int = pydantic.Field(1, ge=1, description="Ranks on this machine, a process each.")
    threads: int = pydantic.Field(1, ge=1, description="OpenMP threads of a rank, on a CPU.")
    start_timeout_s: float = pydantic.Field(
        300.0, gt=0, description="From the start until all ranks are ready."
    )


class TrainSettings(Settings):
    """Everything that a training run can be told, and all that serving can be."""

    tasks: TasksSettings = pydantic.Field(default_factory=lambda: TasksSettings())
    reward: RewardSettings = pydantic.Field(default_factory=lambda: RewardSettings())
    roc: RocSettings = pydantic.Field(default_factory=lambda: RocSettings())
    learner: LearnerSettings = pydantic.Field(default_factory=lambda: LearnerSettings())
    ranks: RanksSettings = pydantic.Field(default_factory=lambda: RanksSettings())
    loop: LoopSettings = pydantic.Field(default_factory=lambda: LoopSettings())
    run: RunSettings = pydantic.Field(default_factory=lambda: RunSettings())


async def train(settings: TrainSettings, progress: console.Progress) -> Path:
    """Run it to the end; returns the run's folder.

    Raises:
        AgentLoopError: what it cannot go on from, by its name.
    """
    model = _model_of(settings)
    tasks = TaskSource.open(settings.tasks)
    name = settings.run.name or time.strftime("%Y%m%d-%H%M%S")
    folder = RunFolder(settings.run.folder / name, to_toml(settings))
    logs = folder.path / "logs"
    settings = settings.model_copy(update={"model": str(model), "log_dir": logs})
    learner_settings = settings.learner.model_copy(
        update={"model": model, "temperature": settings.sampling.temperature}
    )
    async with AsyncExitStack() as stack:
        scorer = await stack.enter_async_context(Scorer(settings.reward))
        runtime = await stack.enter_async_context(Runtime(settings, progress=progress))
        learner, ranks = await stack.enter_async_context(
            started(
                learner_settings.model_dump(mode="json"),
                num_ranks=settings.ranks.count,
                threads=settings.ranks.threads,
                log_dir=logs,
                start_timeout_s=settings.ranks.start_timeout_s,
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
        )
        async with anyio.create_task_group() as watch:
            watch.start_soon(_die_with, ranks)
            await loop.run()
            watch.cancel_scope.cancel()
    return folder.path


def _model_of(settings: TrainSettings) -> Path:
    """The folder that both sides start from. Raises SettingsError: it is none."""
    folder = Path(settings.model or SMALL).resolve()
    if not (folder / "config.json").is_file():
        raise SettingsError(f"model: {folder} is no model folder: it has no config.json")
    return folder


async def _die_with(ranks: LearnerProcesses) -> None:
    raise LearnerError(await ranks.wait_dead())


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
