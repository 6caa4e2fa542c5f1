"""The supervised fine-tuning that a training run may begin with: `sft` in its settings.

    teacher.jsonl ──┐
    data.paths ─────┴──> samples ──> learner ──> the model that the first rollouts come from

The environment's teacher, a script, plays rollouts in the environment itself, with its real tools.
Without an environment, the dialogues are those of the arithmetic teacher. So they are for the
arithmetic tasks of an environment that has no teacher, such as a program.
"""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Self

import anyio
import anyio.to_thread
import pydantic

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.rollout import Budget
from agentloop.agent.threads import in_command_thread
from agentloop.environments.environment import Environment, set_up
from agentloop.environments.mixture import RunEnvironment, open_mixture
from agentloop.environments.player import DialogueRow
from agentloop.environments.rewards.reward import Grader, RewardSettings
from agentloop.errors import DataError, SettingsError
from agentloop.launch.progress import ProgressLine
from agentloop.launch.without_servers import open_tools
from agentloop.models import SMALL
from agentloop.plain_json import dumps
from agentloop.rollouts.scripted import PlayedRollout, play_teacher
from agentloop.runtime import Settings
from agentloop.training.learner_client.client import Spawn
from agentloop.training.learner_client.launch import RanksSettings
from agentloop.training.learner_client.settings import (
    InitSettings,
    RlLearnerSettings,
    SftLearnerSettings,
)
from agentloop.training.loop.settings import LoopSettings
from agentloop.training.run.dashboard import RunDashboard
from agentloop.training.run.folder import RunFolder
from agentloop.training.run.status import count_of
from agentloop.training.sft.fine_tuning import (
    Dialogue,
    DialogueSource,
    DialoguesSettings,
    EpochsSettings,
    FineTuningPlan,
    SupervisedSettings,
    fine_tune,
    read_dialogues,
    trajectories_of,
)
from agentloop.training.sft.run import (
    DialogueTraining,
    check_named,
    learner_of,
    model_folder,
    samples_of,
)

_NUM_LINES = 10  # progress lines of the teacher
_TEACHER = "teacher.jsonl"  # what it has played


class SftStageLearner(InitSettings):
    """Settings of the learner in which a run's supervised fine-tuning differs from its rollouts."""

    micro_batch_tokens: int | None = pydantic.Field(
        None,
        ge=2,
        description="Maximum number of tokens in a forward pass of a rank. By default, "
        "learner.micro_batch_tokens.",
    )


class SftStageRanks(pydantic.BaseModel, extra="forbid", frozen=True):
    """Settings of the ranks in which a run's supervised fine-tuning differs from its rollouts."""

    nproc_per_node: int | None = pydantic.Field(
        None, ge=1, description="Ranks per machine. By default, ranks.nproc_per_node."
    )
    threads: int | None = pydantic.Field(
        None, ge=1, description="OpenMP threads per rank on a CPU. By default, ranks.threads."
    )


class SftStageSettings(pydantic.BaseModel, extra="forbid"):
    """Settings of a training run's supervised fine-tuning; those of the run hold the rest."""

    seed: int = pydantic.Field(
        0,
        ge=0,
        lt=2**63,
        description="Random seed of the synthetic dialogues, of their order in each epoch, and of "
        "random weights.",
    )
    data: DialogueSource = pydantic.Field(default_factory=DialogueSource)
    loop: EpochsSettings = pydantic.Field(default_factory=EpochsSettings)
    learner: SftStageLearner = pydantic.Field(default_factory=SftStageLearner)
    ranks: SftStageRanks = pydantic.Field(default_factory=SftStageRanks)

    @pydantic.model_validator(mode="after")
    def _has_dialogues(self) -> Self:
        check_named(self.data)
        return self

    def within(
        self, learner: RlLearnerSettings, ranks: RanksSettings, loop: LoopSettings, budget: Budget
    ) -> DialogueTraining:
        """Return the settings of the fine-tuning, completed by those of its run.

        The dialogues' tool responses are cut as in the rollouts that follow.
        """
        max_tokens = budget.max_tool_response_tokens
        seed = {"seed": self.seed}
        usual = learner.model_dump(include=set(SftLearnerSettings.model_fields) - {"optimizer"})
        return DialogueTraining(
            data=DialoguesSettings(
                **self.data.model_dump(), **seed, max_tool_response_tokens=max_tokens
            ),
            loop=SupervisedSettings(
                **self.loop.model_dump(), **seed, step_timeout_s=loop.step_timeout_s
            ),
            learner=SftLearnerSettings.model_validate(
                usual | self.learner.model_dump(exclude_none=True) | seed
            ),
            ranks=ranks.model_copy(update=self.ranks.model_dump(exclude_none=True)),
        )


def check_teachers(
    data: DialogueSource,
    environments: Sequence[RunEnvironment],
    loaded: Sequence[Environment | None],
) -> None:
    """Check that each environment has a teacher, if `data.teacher` asks for its dialogues.

    Raises:
        SettingsError: one has none.
    """
    if not data.teacher or _is_arithmetic(environments, loaded):
        return
    for environment in loaded:
        if environment is None or environment.teacher is None:
            name = (
                "the built-in agent"
                if environment is None
                else f"the environment {environment.name}"
            )
            raise SettingsError(
                f"sft.data.teacher: {name} has no teacher: pass teacher= to "
                "@agentloop.environment, or name files of dialogues in sft.data.paths"
            )


def _is_arithmetic(
    environments: Sequence[RunEnvironment], loaded: Sequence[Environment | None]
) -> bool:
    """Return whether the dialogues are those of the arithmetic teacher.

    They are for the built-in agent, and for an environment that has neither a teacher nor tasks of
    its own but gets the teacher's problems: it should then offer its agent the same tool.
    """
    if len(loaded) != 1:
        return False
    (environment,) = loaded
    if environment is None:
        return True
    has_own = environment.teacher is not None or environment.tasks is not None
    return not has_own and environments[0].tasks.kind == "arithmetic"


@dataclass(frozen=True)
class FineTuning:
    """The supervised fine-tuning of a run, with what its teachers play in.

    Attributes:
        runtime: the model, its chat template, the tools and the sandbox.
        budget: limits of a teacher's rollout.
    """

    training: DialogueTraining
    environments: Sequence[RunEnvironment]
    runtime: Settings
    reward: RewardSettings
    budget: Budget

    async def make_start_model(
        self, dashboard: RunDashboard, progress: ProgressLine, spawn: Spawn
    ) -> Path:
        """Make the model that the rollouts start from, unless it exists, and return its folder."""
        folder = dashboard.folder
        made = folder.path / "sft" / "model"
        if not (made / "config.json").is_file():  # the folder is renamed into place when complete
            model, chat = model_folder(self.runtime.model or SMALL), self.runtime.chat
            async with folder.within("sft") as part:
                data = await self.add_teacher_dialogues(part, progress)
                training = self.training.model_copy(update={"data": data})
                # The dialogues are read by one core, while the learner starts on others.
                learner = learner_of(training, model, chat, part, progress, spawn)
                async with learner.starting():
                    try:
                        samples = await samples_of(training, model, chat, progress)
                    except DataError:
                        if not part.metrics():  # a resumed run may have a corrected teacher
                            (part.path / _TEACHER).unlink(missing_ok=True)
                        raise
                    make_plan = partial(FineTuningPlan, training.loop, samples, part, "sft.")
                    plan = await anyio.to_thread.run_sync(make_plan)
                    await fine_tune(
                        plan,
                        learner,
                        report=progress,
                        max_restarts=training.ranks.max_restarts,
                        emit=dashboard.on_start_event,
                    )
        checkpoints = made.with_name("checkpoints")  # not needed any more
        await anyio.to_thread.run_sync(partial(shutil.rmtree, checkpoints, ignore_errors=True))
        return made

    async def add_teacher_dialogues(
        self, folder: RunFolder, progress: ProgressLine
    ) -> DialoguesSettings:
        """Return the data with a file of what the environments' teachers have played, if any do.

        The file is kept, so that a resumed run reads the same dialogues.
        """
        data = self.training.data
        if not await self._has_games():
            return data
        file = folder.path / _TEACHER
        if not await anyio.Path(file).is_file():
            lines: list[bytes] = []
            num_right, fault = 0, ""
            every = max(1, data.teacher // _NUM_LINES)

            async def keep(number: int, played: PlayedRollout) -> None:
                nonlocal num_right, fault
                if played.dialogues and not lines:  # before thousands are played
                    await self._check_dialogue(played.dialogues[0], progress)
                lines.extend(map(dumps, played.dialogues))
                num_right += (played.reward.value or 0.0) > 0
                fault = fault or played.reward.reason
                if (number + 1) % every == 0:
                    progress(f"The teacher has played {number + 1} of {data.teacher} rollouts")

            await self._play_games(data.teacher, keep, folder.path / "logs", progress)
            if not num_right:
                raise SettingsError(
                    f"sft.data.teacher: none of the {count_of(data.teacher, 'rollout')} of the "
                    "teacher has a reward above 0, so there is nothing to imitate: correct the "
                    f"teacher, or the reward{f' ({fault})' if fault else ''}"
                )
            progress.say(
                f"The teacher's rollouts: {num_right:,} of {data.teacher:,} right "
                f"({100 * num_right / data.teacher:.0f}%)"
            )
            text = "".join(f"{line.decode()}\n" for line in lines)
            await anyio.to_thread.run_sync(folder.write, _TEACHER, text)
        return data.model_copy(update={"paths": [*data.paths, file], "teacher": 0})

    async def check_dialogues(self, progress: ProgressLine) -> None:
        """Check one dialogue of each source against the model's chat template.

        The teacher of an environment plays a rollout for it.

        Raises:
            AgentLoopError: one cannot be read, played or encoded.
        """
        data = self.training.data
        sources = [data.model_copy(update={"paths": [path], "teacher": 0}) for path in data.paths]
        has_games = await self._has_games()
        if data.teacher and not has_games:
            sources.append(data.model_copy(update={"paths": [], "teacher": 1}))
        for source in sources:
            read = partial(next, read_dialogues(source), None)
            if (dialogue := await anyio.to_thread.run_sync(read)) is None:
                raise DataError(f"{source.paths[0]}: the file has no dialogue")
            await self._check_encoding(dialogue, progress)
        if not has_games:
            return

        async def check(number: int, played: PlayedRollout) -> None:
            for dialogue in played.dialogues[:1]:
                await self._check_dialogue(dialogue, progress)

        await self._play_games(1, check, None, progress)

    async def _load(self) -> list[Environment | None]:
        return await in_command_thread(
            lambda: [environment.load() for environment in self.environments]
        )

    async def _has_games(self) -> bool:
        """Return whether teachers of environments are to play."""
        loaded = await self._load()
        return bool(self.training.data.teacher) and not _is_arithmetic(self.environments, loaded)

    async def _play_games(
        self,
        num_rollouts: int,
        on_played: Callable[[int, PlayedRollout], Awaitable[None]],
        log_dir: Path | None,
        progress: ProgressLine,
    ) -> None:
        """Let the environments' teachers play rollouts, one after the other."""
        seed = self.training.data.seed
        loaded = await self._load()
        async with (
            set_up(loaded),
            open_tools(self.runtime, log_dir=log_dir, progress=progress) as (pool, resolve),
            Grader(self.reward, pool=pool) as grader,
        ):
            # Again, now with what their rollouts share.
            loaded = [environment.load() for environment in self.environments]
            seeded = [
                replace(environment, tasks=environment.tasks.model_copy(update={"seed": seed}))
                for environment in self.environments
            ]
            tasks = await anyio.to_thread.run_sync(open_mixture, seeded, loaded)
            by_name = {
                run_environment.name: (run_environment, environment)
                for run_environment, environment in zip(seeded, loaded, strict=True)
            }
            progress("The teacher plays its first rollout")
            for number, task in enumerate(islice(tasks, num_rollouts)):
                run_environment, environment = by_name[task.env]
                assert environment is not None
                played = await play_teacher(
                    environment,
                    task,
                    Random(f"{seed} {number}"),
                    resolve=resolve,
                    pool=pool,
                    grader=grader,
                    budget=run_environment.budget_of(self.budget),
                )
                await on_played(number, played)

    async def _check_dialogue(self, row: DialogueRow, progress: ProgressLine) -> None:
        """Check a dialogue of a teacher against the model's chat template. Raises DataError."""
        dialogue = Dialogue(row["messages"], row["tools"], "the teacher's first rollout")
        await self._check_encoding(dialogue, progress)

    async def _check_encoding(self, dialogue: Dialogue, progress: ProgressLine) -> None:
        progress("Checking a dialogue against the chat template")
        model = model_folder(self.runtime.model or SMALL)
        chat = await anyio.to_thread.run_sync(ChatFormat.load, model, self.runtime.chat)
        limit = self.training.data.max_tool_response_tokens
        await anyio.to_thread.run_sync(
            partial(trajectories_of, chat, dialogue, max_tool_response_tokens=limit)
        )
