"""Sample each task k times, score the samples and write them to disk.

    tasks ──capacity──> k samples ──> rewards ──> a file per task ──> a line of metrics
                          ▲              │
                          └── retry ─────┘  samples lost to infrastructure, a few times

The samples of a task are in one file, which appears once it is complete; only then do they count. A
run that was killed therefore resumes with the tasks that have no file and the samples that have no
reward; scored samples are never repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter

import anyio
import pydantic

from agentloop.agent.rollout import Budget
from agentloop.aio import in_run_thread
from agentloop.environments.tasks.sources import Task
from agentloop.errors import DataError, EnvironmentFailed, RequestError
from agentloop.evaluation.estimate import avg_at_k
from agentloop.events import Emit, Measured, ignore
from agentloop.plain_json import JsonObject
from agentloop.rollouts.metrics import GroupFigures, RolloutFigures, about, about_each
from agentloop.rollouts.record import RolloutGroup
from agentloop.rollouts.request import GroupRequest
from agentloop.rollouts.runner import GroupRunner
from agentloop.rollouts.stream import finished_groups
from agentloop.training.run.folder import RunFolder
from agentloop.trajectory import Trajectory

_OUTCOMES = "outcomes.jsonl"


class EvaluationSettings(pydantic.BaseModel, extra="forbid", frozen=True):
    """Options for sampling the tasks and for the reported estimates."""

    num_samples: int = pydantic.Field(
        16, ge=1, le=4096, description="Samples per task: the k of avg@k."
    )
    num_tasks: int = pydantic.Field(
        0,
        ge=0,
        description="Number of tasks of each environment, drawn with tasks.seed. 0: all, or 64 of "
        "a generator.",
    )
    pass_at: list[pydantic.PositiveInt] = pydantic.Field(
        default_factory=list,
        description="Values of k for which to report pass@k. By default, the powers of 2 up to "
        "num_samples.",
    )
    retries: int = pydantic.Field(
        2, ge=0, description="Number of times that a sample without a reward is repeated."
    )
    confidence: float = pydantic.Field(
        0.95, gt=0, lt=1, description="Confidence level of the intervals."
    )
    max_open: int = pydantic.Field(256, ge=1, description="Maximum number of tasks in flight.")

    @pydantic.model_validator(mode="after")
    def _check_pass_at(self) -> EvaluationSettings:
        if self.pass_at and max(self.pass_at) > self.num_samples:
            raise ValueError(
                f"pass_at: {max(self.pass_at)} requires at least as many samples; num_samples is "
                f"{self.num_samples}"
            )
        return self

    @property
    def all_pass_at(self) -> Sequence[int]:
        """The values of k to report pass@k for, in ascending order."""
        powers = [1 << power for power in range(1, self.num_samples.bit_length())]
        return sorted({*(self.pass_at or [*powers, self.num_samples])})


@dataclass(slots=True)
class Outcome:
    """The samples of a task.

    Attributes:
        number: Number of its file, or 0 if it has none.
        rollouts: Figures of each sample.
        refused: The error if the task could not be sampled.
    """

    task: Task
    number: int = 0
    rollouts: Sequence[RolloutFigures] = ()
    refused: str = ""

    @property
    def rewards(self) -> list[float]:
        """Rewards of the samples that have one."""
        return [rollout.reward for rollout in self.rollouts if rollout.reward is not None]


@dataclass(frozen=True, slots=True)
class _Sample:
    """A sample of a task: its attempt and figures, and its rows in the group's file."""

    attempt: int
    figures: RolloutFigures
    rows: list[dict[str, object]]


class Evaluation:
    """An evaluation: `take_up()` earlier results, `run()` the rest, and read `outcomes`."""

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
        """
        Args:
            on_progress: Called with the number of finished tasks after each task.
            on_refused: Called for each task that could not be sampled.
            emit: Receives events of metrics.
        """
        self._settings = settings
        self._folder = folder
        self._on_progress = on_progress
        self._on_refused = on_refused
        self._emit = emit
        self._outcomes = {task.id: Outcome(task) for task in tasks}
        self._taken: set[int] = set()
        self._num_reported = 0

    @property
    def outcomes(self) -> list[Outcome]:
        """Outcomes in the order of the tasks."""
        return list(self._outcomes.values())

    @property
    def todo(self) -> list[Outcome]:
        """Outcomes that lack samples with a reward."""
        wanted = self._settings.num_samples
        return [outcome for outcome in self._outcomes.values() if len(outcome.rewards) < wanted]

    async def take_up(self) -> None:
        """Load the results of earlier runs in the same folder.

        Raises:
            RunFolderError: The files are damaged.
        """
        await in_run_thread(self._load_results)

    async def run(self, groups: GroupRunner, budget: Budget) -> None:
        """Sample and score the tasks that are not done.

        Args:
            budget: limits of each sample.

        Raises:
            RequestError: No task could be sampled.
            RunFolderError: The run's folder cannot be written.
            SettingsError: The endpoint or the environment is misconfigured.
            RewardError: A reward function failed.
        """
        todo = self.todo
        self._assign_numbers(todo)
        sample = partial(self._sample, groups, budget)
        num_done = len(self._outcomes) - len(todo)
        async with finished_groups(todo, sample, max_open=self._settings.max_open) as finished:
            async for group in finished:  # no deadline: each sample has one
                num_done += 1
                if group.error is None:
                    await self._report(group.task)
                else:  # the task's data is invalid
                    group.task.refused = str(group.error)
                    self._on_refused(group.task.task, group.error)
                self._on_progress(num_done)
        refused = [outcome.refused for outcome in self._outcomes.values() if outcome.refused]
        if refused and len(refused) == len(self._outcomes):
            raise RequestError(
                f"no task could be sampled ({len(refused):,} refused): {refused[-1]}"
            )

    def _load_results(self) -> None:
        """Load the results of earlier runs, from `outcomes.jsonl` where possible.

        The trajectory files are authoritative but may be large, so they are read only for tasks
        that are missing there.
        """
        folder = self._folder
        files = {
            int(path.stem.removeprefix("group-")): f"trajectories/{path.name}"
            for path in (folder.path / "trajectories").glob("group-*.jsonl")
        }
        by_number = {row["group"]: row for row in folder.rows(_OUTCOMES)}
        for number, path in files.items():
            if (row := by_number.get(number)) is not None:
                task, rollouts = row["task"], GroupFigures.from_dict(row).rollouts
            else:  # killed between the two writes
                rows = folder.read_group(path)
                if not rows:
                    raise DataError(f"{self._folder.path / path}: the file is empty")
                task, rollouts = rows[0]["task"], [each.figures for each in _samples_in(rows)]
            if (outcome := self._outcomes.get(task)) is not None:
                outcome.number, outcome.rollouts = number, rollouts
        self._taken = set(files)
        self._num_reported = len(folder.metrics())

    def _assign_numbers(self, todo: Sequence[Outcome]) -> None:
        """Assign the smallest free numbers to outcomes without one."""
        number = 0
        for outcome in todo:
            while not outcome.number:
                number += 1
                if number not in self._taken:
                    outcome.number = number

    async def _sample(
        self, groups: GroupRunner, budget: Budget, outcome: Outcome, queued: anyio.Event
    ) -> Sequence[Trajectory]:
        samples: dict[int, _Sample] = {}
        if outcome.rollouts:
            path = f"trajectories/group-{outcome.number:07}.jsonl"
            rows = await in_run_thread(self._folder.read_group, path)
            samples = dict(enumerate(_samples_in(rows)))
        tried = max((sample.attempt + 1 for sample in samples.values()), default=0)
        num_samples = max(self._settings.num_samples, len(samples))
        for attempt in range(tried, tried + self._settings.retries + 1):
            missing = [
                index
                for index in range(num_samples)
                if index not in samples or samples[index].figures.reward is None
            ]
            if not missing:
                break
            name = f"{outcome.number}-{outcome.task.id}"
            if attempt:  # a name of its own, so that the seeds of all samples differ
                name = f"{outcome.number}-again-{attempt}-{outcome.task.id}"
            try:
                request = GroupRequest(outcome.task, name, len(missing), budget, queued=queued)
                group = await groups.run(request)
            except EnvironmentFailed:  # on each of those that are repeated
                if len(missing) == num_samples:
                    raise
                continue
            samples_of = partial(_samples_of, group, missing, name, outcome.number, attempt)
            samples |= zip(missing, await in_run_thread(samples_of), strict=True)
        done = [samples[index] for index in sorted(samples)]
        all_rows = [row for sample in done for row in sample.rows]
        await in_run_thread(self._folder.add_group, outcome.number, all_rows)
        outcome.rollouts = [sample.figures for sample in done]
        return ()

    async def _report(self, outcome: Outcome) -> None:
        self._num_reported += 1
        task = outcome.task
        so_far = avg_at_k([outcome.rewards for outcome in self._outcomes.values()])
        row = {
            "step": self._num_reported,
            "group": outcome.number,
            "task": task.id,
            "source": task.source,
            **about([GroupFigures(outcome.rollouts)]).row(),
            **about_each([("", GroupFigures(outcome.rollouts))]),
            "avg_at_k": None if so_far is None else so_far.value,
        }
        figures = asdict(GroupFigures(outcome.rollouts))
        rollouts = {"group": outcome.number, "task": task.id, **figures}
        await in_run_thread(self._folder.append, _OUTCOMES, rollouts)
        await in_run_thread(self._folder.add_metrics, row)
        self._emit(Measured(row))


def _samples_in(rows: Sequence[JsonObject]) -> list[_Sample]:
    """Return the samples in a group's file, whose rows are in their order."""
    by_sample = [list(of_sample) for _, of_sample in groupby(rows, itemgetter("rollout"))]
    return [
        _Sample(of_sample[0]["attempt"], RolloutFigures(**of_sample[0]["figures"]), of_sample)
        for of_sample in by_sample
    ]


def _samples_of(
    group: RolloutGroup, indexes: Sequence[int], name: str, number: int, attempt: int
) -> list[_Sample]:
    """Return the samples of a group with their rows.

    Args:
        indexes: the numbers of the samples among all of their task.
        name: the name of the group; in the rows, the ids of all samples are alike.
        number: the number of the group's file.
    """
    figures = [RolloutFigures.of(rollout) for rollout in group.rollouts]
    samples = [_Sample(attempt, of_rollout, []) for of_rollout in figures]
    for row in group.rows():
        position, index = row.rollout, indexes[row.rollout]
        values = row.to_dict()
        later = row.trajectory.id.removeprefix(f"{name}.{position}")  # "" or "+..."
        values["trajectory"]["id"] = f"{number}-{row.task}.{index}{later}"
        values |= {"group": number, "version": None, "attempt": attempt, "rollout": index}
        samples[position].rows.append(values | {"figures": asdict(figures[position])})
    return samples
