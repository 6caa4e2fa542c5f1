"""Tasks in, each sampled k times, scored and written down.

    tasks ──room──> k samples ──> rewards ──> a file per task ──> a line that tells of it
                      ▲              │
                      └── again ─────┘  what infrastructure broke, a few times

A task's samples stand in one file, which appears when it is whole; only then do they count. So a
run that was killed goes on with the tasks that have no file, and with the samples that have no
reward; what has one is never sampled again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import anyio
import anyio.to_thread
import pydantic

from agentloop.errors import DataError, RequestError
from agentloop.evaluation.estimate import avg_at_k
from agentloop.events import Emit, GroupFinished, GroupStarted, Measured, RolloutScored, ignore
from agentloop.groups.feed import finished_groups
from agentloop.groups.reward import Reward, Scorer
from agentloop.groups.roc import Dropped
from agentloop.groups.tasks import Task
from agentloop.training.figures import about, of_rollout
from agentloop.training.run_folder import RunFolder
from agentloop.trajectory import Trajectory

__all__ = ["Evaluation", "EvaluationSettings", "Outcome", "Sample", "Sampler"]

_OUTCOMES = "outcomes.jsonl"
Row = dict[str, Any]


class EvaluationSettings(pydantic.BaseModel):
    """What is sampled, and what is said of it."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    num_samples: int = pydantic.Field(16, ge=1, le=4096, description="Of each task: k of avg@k.")
    num_tasks: int = pydantic.Field(
        0,
        ge=0,
        description="So many tasks, drawn by tasks.seed; 0: all that there are, of a generator 64.",
    )
    pass_at: list[pydantic.PositiveInt] = pydantic.Field(
        default_factory=list,
        description="Each k for which pass@k is told; none: the powers of 2 up to num_samples.",
    )
    retries: int = pydantic.Field(
        2, ge=0, description="How often a sample is taken again that has no reward."
    )
    confidence: float = pydantic.Field(0.95, gt=0, lt=1, description="Of the intervals.")
    max_open: int = pydantic.Field(
        256, ge=1, description="Tasks whose samples are in flight, at most."
    )

    @pydantic.model_validator(mode="after")
    def _has_samples_enough(self) -> EvaluationSettings:
        if self.pass_at and max(self.pass_at) > self.num_samples:
            raise ValueError(
                f"pass_at: {max(self.pass_at)} needs as many samples, not {self.num_samples} "
                "(num_samples)"
            )
        return self

    @property
    def all_pass_at(self) -> Sequence[int]:
        """Each k for which pass@k is told, ascending."""
        powers = [1 << power for power in range(1, self.num_samples.bit_length())]
        return sorted({*(self.pass_at or [*powers, self.num_samples])})


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout, or one answer of an endpoint.

    Attributes:
        num_tokens: that the model sampled; None: as many as the trajectory says.
    """

    trajectory: Trajectory
    num_tokens: int | None = None


class Sampler(Protocol):
    """Whoever answers: our own loop, or an endpoint."""

    async def has_room(self, size: int) -> None:
        """Wait until a task may be sampled so many times."""
        ...

    async def group(
        self, task: Task, *, name: str, size: int, at_gate: Callable[[], None]
    ) -> Sequence[Sample]:
        """`size` samples of a task, also where they failed.

        Args:
            name: no other group's of the run; ids of the samples begin with it.
            at_gate: called when it stands in line, so that the next one may come.

        Raises:
            RequestError: the task cannot be asked.
        """
        ...


@dataclass(slots=True)
class Outcome:
    """What became of a task.

    Attributes:
        number: of its file; 0: it has none.
        rollouts: what is told of each sample: see `agentloop.training.figures.of_rollout`.
        refused: why it could not be asked.
    """

    task: Task
    number: int = 0
    rollouts: Sequence[Mapping[str, Any]] = ()
    refused: str = ""

    @property
    def rewards(self) -> list[float]:
        """Of the samples that have one."""
        return [one["reward"] for one in self.rollouts if one["reward"] is not None]


class Evaluation:
    """`take_up()` what is there, then `run()` what is left; `outcomes` says what is known."""

    def __init__(
        self,
        settings: EvaluationSettings,
        tasks: Sequence[Task],
        folder: RunFolder,
        *,
        on_progress: Callable[[int], None] = lambda num_done: None,
        on_refused: Callable[[Task, RequestError], None] = lambda task, error: None,
        emit: Emit = ignore,
    ) -> None:
        """`on_progress` is told how many tasks are done, each time that one is; `emit` of groups,
        what their samples are worth, and metrics."""
        self._settings = settings
        self._folder = folder
        self._on_progress = on_progress
        self._on_refused = on_refused
        self._emit = emit
        self._outcomes = {task.id: Outcome(task) for task in tasks}
        self._taken: set[int] = set()
        self._num_told = 0

    @property
    def outcomes(self) -> list[Outcome]:
        """In the order of the tasks."""
        return list(self._outcomes.values())

    @property
    def todo(self) -> list[Outcome]:
        """Those that lack a sample with a reward."""
        wanted = self._settings.num_samples
        return [one for one in self._outcomes.values() if len(one.rewards) < wanted]

    async def take_up(self) -> None:
        """What an earlier life has written down. Raises SettingsError: it is damaged."""
        await anyio.to_thread.run_sync(self._take_up)

    async def run(self, sampler: Sampler, scorer: Scorer) -> None:
        """
        Raises:
            RequestError: none of the tasks could be asked.
            SettingsError: the run's folder cannot be written, or the sampler is no use.
            RewardError: a reward function of the user's failed.
        """
        todo = self.todo
        self._number(todo)
        room = partial(sampler.has_room, self._settings.num_samples)
        sample = partial(self._sample, sampler, scorer)
        num_done = len(self._outcomes) - len(todo)
        async with finished_groups(todo, sample, room, max_open=self._settings.max_open) as groups:
            async for group in groups:  # no deadline: each sample has one
                num_done += 1
                if group.error is None:
                    await self._tell(group.task)
                else:  # a mistake in the data
                    group.task.refused = str(group.error)
                    self._on_refused(group.task.task, group.error)
                self._on_progress(num_done)
        refused = [one.refused for one in self._outcomes.values() if one.refused]
        if refused and len(refused) == len(self._outcomes):
            raise RequestError(f"{refused[-1]}, and so it is with all {len(refused)} tasks")

    def _take_up(self) -> None:
        """What an earlier life has written down. The files have it all; `outcomes.jsonl` has what
        is told of them, for they may be large."""
        folder = self._folder
        files = {
            int(path.stem.removeprefix("group-")): f"trajectories/{path.name}"
            for path in (folder.path / "trajectories").glob("group-*.jsonl")
        }
        told: dict[int, Row] = {
            row["group"]: row for row in folder.rows(_OUTCOMES) if row["group"] in files
        }
        for number, path in files.items():
            if (row := told.get(number)) is None:  # the kill came between the two
                rows = folder.read_group(path)
                if not rows:
                    raise DataError(f"{self._folder.path / path}: it is empty")
                row = {"task": rows[0]["task"], "rollouts": [one["figures"] for one in rows]}
            if (outcome := self._outcomes.get(row["task"])) is not None:
                outcome.number, outcome.rollouts = number, row["rollouts"]
        self._taken = set(files)
        self._num_told = len(folder.metrics())

    def _number(self, todo: Sequence[Outcome]) -> None:
        """A number for each that has none yet, the smallest that is free."""
        number = 0
        for outcome in todo:
            while not outcome.number:
                number += 1
                if number not in self._taken:
                    outcome.number = number

    async def _sample(
        self, sampler: Sampler, scorer: Scorer, outcome: Outcome, at_gate: Callable[[], None]
    ) -> Sequence[Trajectory]:
        rows: list[Row | None] = [None] * self._settings.num_samples
        if outcome.rollouts:
            path = f"trajectories/group-{outcome.number:07}.jsonl"
            found = await anyio.to_thread.run_sync(self._folder.read_group, path)
            rows[: len(found)] = found
        tried = max((row["attempt"] + 1 for row in rows if row is not None), default=0)
        for attempt in range(tried, tried + self._settings.retries + 1):
            missing = [i for i, row in enumerate(rows) if row is None or row["reward"] is None]
            if not missing:
                break
            found = await self._group(sampler, scorer, outcome, missing, attempt, at_gate)
            at_gate = _nothing
            for index, row in zip(missing, found, strict=True):
                rows[index] = row
        whole = [row for row in rows if row is not None]
        await anyio.to_thread.run_sync(self._folder.add_group, outcome.number, whole)
        outcome.rollouts = [row["figures"] for row in whole]
        return ()

    async def _group(
        self,
        sampler: Sampler,
        scorer: Scorer,
        outcome: Outcome,
        indexes: Sequence[int],
        attempt: int,
        at_gate: Callable[[], None],
    ) -> list[Row]:
        """These of a task's samples."""
        task, number = outcome.task, outcome.number
        # Its own name: seeds of the run's samples stay distinct.
        name = f"{number}-again-{attempt}-{task.id}" if attempt else f"{number}-{task.id}"
        told = (name, task.id, task.prompt, task.answer, len(indexes))
        self._emit(GroupStarted(*told, is_chosen=False))
        rewards: Sequence[Reward] = ()
        try:
            samples = await sampler.group(task, name=name, size=len(indexes), at_gate=at_gate)
            rewards = await self._scored(scorer, samples, task)
        finally:
            values = [one.value for one in rewards if one.value is not None]
            mean = statistics.fmean(values) if values else None
            self._emit(GroupFinished(name, mean_reward=mean, is_chosen=False))
        for index, sample in zip(indexes, samples, strict=True):
            sample.trajectory.id = f"{number}-{task.id}.{index}"
        about_it = {"group": number, "version": None, "attempt": attempt}
        return await anyio.to_thread.run_sync(_rows, about_it, task, samples, rewards)

    async def _scored(self, scorer: Scorer, samples: Sequence[Sample], task: Task) -> list[Reward]:
        rewards: dict[int, Reward] = {}

        async def score(index: int) -> None:
            begun_s = time.monotonic()
            trajectory = samples[index].trajectory
            one = rewards[index] = await scorer.score(trajectory, task)
            told = (one.value, one.answer, one.reason, time.monotonic() - begun_s)
            self._emit(RolloutScored(trajectory.id, *told))

        async with anyio.create_task_group() as scoring:
            for index in range(len(samples)):
                scoring.start_soon(score, index)
        return [rewards[index] for index in range(len(samples))]

    async def _tell(self, outcome: Outcome) -> None:
        self._num_told += 1
        task = outcome.task
        so_far = avg_at_k([one.rewards for one in self._outcomes.values()])
        row = {
            "step": self._num_told,
            "group": outcome.number,
            "task": task.id,
            "source": task.source,
            **about([{"rejected": None, "rollouts": outcome.rollouts}]),
            "avg_at_k": None if so_far is None else so_far.value,
        }
        rollouts = {"group": outcome.number, "task": task.id, "rollouts": outcome.rollouts}
        await anyio.to_thread.run_sync(self._folder.append, _OUTCOMES, rollouts)
        await anyio.to_thread.run_sync(self._folder.add_metrics, row)
        self._emit(Measured(row))


def _nothing() -> None:
    """It stands in line already."""


def _rows(told: Row, task: Task, samples: Sequence[Sample], rewards: Sequence[Reward]) -> list[Row]:
    """As a training run's rows (agentloop/training/rollouts.py), and what is told of each."""
    return [
        {
            **told,
            "task": task.id,
            "truth": task.answer,
            "reward": reward.value,
            "answer": reward.answer,
            "reason": reward.reason,
            "advantage": None,
            "dropped": Dropped.INFRASTRUCTURE if reward.value is None else None,
            "figures": _figures(sample, reward),
            "trajectory": sample.trajectory.to_dict(),
        }
        for sample, reward in zip(samples, rewards, strict=True)
    ]


def _figures(sample: Sample, reward: Reward) -> Row:
    trajectory = sample.trajectory
    figures = of_rollout(trajectory, reward.value)
    figures["versions"] = sorted({span.version for turn in trajectory for span in turn.versions})
    if sample.num_tokens is not None:
        figures["num_tokens"] = sample.num_tokens
    if reward.value is None:
        figures["missing"] = reward.reason
    return figures
