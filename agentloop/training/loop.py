"""The training loop, in step: roll out, choose, learn, hand over.

    tasks ──> groups of rollouts ──> rewards ──> Resample-on-Correct ──> batch ──> learner
      ▲                                                                              │
      └───────────────────────── new weights in every server <───────────────────────┘

The learner and the rollouts take turns: every sample is of the newest policy.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pydantic

from agentloop.errors import RequestError, SettingsError, sole
from agentloop.groups.advantage import group_advantages
from agentloop.groups.feed import finished_groups
from agentloop.groups.reward import Reward, Scorer
from agentloop.groups.roc import Choice, RocSettings, Trace, resample
from agentloop.groups.tasks import Task, TaskSource
from agentloop.inference.router import Router
from agentloop.training.batch import Sample, write_batch
from agentloop.training.handover import (
    Handover,
    WeightsSettings,
    hand_over,
    keep_up,
    publisher,
)
from agentloop.training.learner import Learner
from agentloop.training.run_folder import RunFolder
from agentloop.trajectory import CallStatus, StopReason, Trajectory

__all__ = ["LoopSettings", "RunGroup", "TrainingLoop"]

_KEEP_UP_S = 1.0
_RETRY_S = 30.0  # of servers that cannot load them

RunGroup = Callable[..., Awaitable[Sequence[Trajectory]]]
"""`Runtime.run_group`: (prompt, *, size, name, at_gate) to trajectories."""


class LoopSettings(pydantic.BaseModel):
    """How long to train, on how much."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    steps: int = pydantic.Field(510, ge=0, description="Optimizer steps; 0 only evaluates.")
    tasks_per_step: int = pydantic.Field(512, ge=1, description="Tasks, a group of rollouts each.")
    group_size: int = pydantic.Field(
        32, ge=1, description="Rollouts of a task; roc.down_sample_to_n of them are learned from."
    )
    evaluate_every: int = pydantic.Field(
        10, ge=0, description="Steps between two evaluations on held-out tasks; 0: never."
    )
    evaluate_tasks: int = pydantic.Field(
        64, ge=1, description="Held-out tasks that are evaluated, a rollout each."
    )
    checkpoint_every: int = pydantic.Field(
        50, ge=0, description="Steps between two checkpoints; 0: at the end alone."
    )
    seed: int = pydantic.Field(0, ge=0, description="Of what Resample-on-Correct draws.")
    step_timeout_s: float = pydantic.Field(
        3600.0, gt=0, description="For the learner's answer to one request."
    )


@dataclass(slots=True)
class _Scored:
    """A group with what it is worth and what is learned from it."""

    task: Task
    trajectories: Sequence[Trajectory]
    rewards: list[Reward]
    choice: Choice
    advantages: dict[int, float] = field(default_factory=dict)


class TrainingLoop:
    """What is needed for `run`, and where it stands."""

    def __init__(
        self,
        settings: LoopSettings,
        roc: RocSettings,
        *,
        run_group: RunGroup,
        router: Router,
        learner: Learner,
        scorer: Scorer,
        tasks: TaskSource,
        folder: RunFolder,
        progress: Callable[[str], None],
        weights: WeightsSettings | None = None,
    ) -> None:
        self._settings = settings
        self._roc = roc
        self._rollouts = run_group
        self._router = router
        self._learner = learner
        self._scorer = scorer
        self._tasks = tasks
        self._folder = folder
        self._progress = progress
        self._held_out: list[Task] = []
        self._weights = weights or WeightsSettings()
        self._publisher = publisher(self._weights, learner, folder.path)
        self._handover: Handover | None = None
        self._handing_over = anyio.Lock()
        self._keeping_up = anyio.CancelScope()
        self.step = 0

    async def run(self) -> None:
        """To the last step.

        Raises:
            LearnerError, ServerError, RewardError: what cannot be gone on from.
        """
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._keep_up)
                await self._run()
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise sole(group) from None

    async def _run(self) -> None:
        s = self._settings
        if s.evaluate_every or not s.steps:  # a generator may search for them for long
            held_out = await anyio.to_thread.run_sync(self._tasks.held_out)
            self._held_out = held_out[: s.evaluate_tasks]
            if not held_out:
                self._progress("Nothing is evaluated: no tasks are held out (tasks.held_out)")
        await self._hand_over()
        await self._evaluate()
        while self.step < s.steps:
            self.step += 1
            is_last = self.step == s.steps
            metrics = await self._train_step()
            if s.evaluate_every and (is_last or self.step % s.evaluate_every == 0):
                await self._evaluate()
            self._tell(metrics)
            if is_last or (s.checkpoint_every and self.step % s.checkpoint_every == 0):
                await self._checkpoint()

    async def _train_step(self) -> dict[str, Any]:
        begun = time.monotonic()
        tasks = list(itertools.islice(self._tasks, self._settings.tasks_per_step))
        groups = await self._groups(tasks, self._settings.group_size, name=f"{self.step}")
        rolled_s = time.monotonic() - begun
        metrics: dict[str, Any] = {"step": self.step, **_about(groups), "rollout_s": rolled_s}
        path = self._folder.path / "batches" / f"step-{self.step:05}.safetensors"
        if await anyio.to_thread.run_sync(self._write_batch, path, groups):
            learned = await self._ask("step", batch=str(path))
            path.unlink()
            metrics |= {f"learner/{name}": value for name, value in learned.items()}
            metrics |= await self._hand_over()
        metrics["step_s"] = time.monotonic() - begun
        await anyio.to_thread.run_sync(self._write, groups, metrics)
        return metrics

    async def _groups(self, tasks: Sequence[Task], size: int, *, name: str) -> list[_Scored]:
        """A scored group for each task, in the order of the tasks, however they finish."""
        found: dict[int, _Scored] = {}
        async with finished_groups(
            list(enumerate(tasks)),
            partial(self._run_group, size=size, name=name),
            partial(self._router.has_room, size),
            max_open=len(tasks),
        ) as groups:
            async for group in groups:
                number, task = group.task
                if group.error is not None:  # a mistake in the data
                    raise RequestError(f"task {task.id}: {group.error}") from group.error
                found[number] = await self._score(number, task, group.trajectories)
        return [found[number] for number in range(len(tasks))]

    async def _run_group(
        self, numbered: tuple[int, Task], at_gate: Callable[[], None], *, size: int, name: str
    ) -> Sequence[Trajectory]:
        number, task = numbered  # where epochs meet, or tasks are few, one comes twice in a step
        name = f"{name}-{number}-{task.id}"
        return await self._rollouts(task.prompt, size=size, name=name, at_gate=at_gate)

    async def _score(self, number: int, task: Task, trajectories: Sequence[Trajectory]) -> _Scored:
        rewards: dict[int, Reward] = {}

        async def score(index: int) -> None:
            trajectory = trajectories[index]
            if not trajectory.num_sampled_tokens:
                rewards[index] = Reward(None, None, "nothing was sampled: it waited too long")
            elif other := self._other_version(trajectory):
                rewards[index] = Reward(None, None, f"sampled with other weights: {other}")
            else:
                rewards[index] = await self._scorer.score(trajectory, task)

        async with anyio.create_task_group() as scoring:
            for index in range(len(trajectories)):
                scoring.start_soon(score, index)
        in_order = [rewards[index] for index in range(len(trajectories))]
        traces = [
            Trace.of(trajectory, reward.value)
            for trajectory, reward in zip(trajectories, in_order, strict=True)
        ]
        # Its own, for groups finish in any order.
        draw = random.Random(f"{self._settings.seed} {self.step} {number}")
        choice = resample(traces, self._roc, draw)
        scored = _Scored(task, trajectories, in_order, choice)
        kept = [(index, in_order[index].value) for index in choice.kept]
        values = group_advantages([value for _, value in kept if value is not None])
        scored.advantages = dict(zip((index for index, _ in kept), values, strict=True))
        return scored

    def _other_version(self, trajectory: Trajectory) -> str | None:
        """A server that was restarted by others serves its old weights until it is probed."""
        assert self._handover is not None
        versions = (span.version for turn in trajectory for span in turn.versions)
        return next((one for one in versions if one != self._handover.version), None)

    def _write_batch(self, path: Path, groups: Sequence[_Scored]) -> bool:
        """Whether there is anything to learn. A rollout whose advantage is 0 counts all the same:
        the objective is a mean over all tokens of a group."""
        samples = [
            Sample(trajectory.ids, trajectory.mask, trajectory.logprobs, advantage, number)
            for number, group in enumerate(groups)
            if any(group.advantages.values()) or not self._roc.reject_equal_reward
            for index, advantage in group.advantages.items()
            for trajectory in [group.trajectories[index]]
        ]
        if not any(sample.advantage for sample in samples):
            return False
        try:
            write_batch(path, samples)
        except OSError as error:
            raise SettingsError(f"run.folder: {path}: {error.strerror or error}") from error
        return True

    async def _hand_over(self) -> dict[str, Any]:
        begun = time.monotonic()
        published = await self._publisher.publish(
            str(self.step), timeout_s=self._settings.step_timeout_s
        )
        publish_s = time.monotonic() - begun
        self._keeping_up.cancel()  # one that takes long is given the new ones instead
        async with self._handing_over:
            handover = self._handover = await hand_over(
                self._router, published, timeout_s=self._weights.timeout_s
            )
            await self._publisher.tidy()
        return {
            "weights/publish_s": publish_s,
            "weights/load_s": handover.seconds,
            "weights/num_servers": len(handover.loaded),
            "weights/num_failed": len(handover.failed),
        }

    async def _keep_up(self) -> None:
        """Give the weights to servers that come back, while rollouts go on: without it nobody
        would, before the next hand-over, and where there is no other server there would be none."""
        wait_s = _KEEP_UP_S
        while True:
            await anyio.sleep(wait_s)
            async with self._handing_over:
                if self._handover is None:
                    continue
                with anyio.CancelScope() as self._keeping_up:
                    timeout_s = self._weights.timeout_s
                    done = await keep_up(self._router, self._handover, timeout_s=timeout_s)
                    wait_s = _KEEP_UP_S if done else _RETRY_S

    async def _evaluate(self) -> None:
        if not self._held_out:
            return
        found = await self._groups(self._held_out, 1, name=f"{self.step}-held-out")
        metrics = {f"held_out/{name}": value for name, value in _about(found).items()}
        self._folder.add_metrics({"step": self.step, **metrics})
        self._progress(
            f"step {self.step}: held-out reward {_mean(metrics['held_out/reward'])}, "
            f"tool errors in correct {_percent(metrics['held_out/tool_errors_in_correct'])}"
        )

    async def _checkpoint(self) -> None:
        folder = self._folder.path / "checkpoints" / f"step-{self.step:05}"
        state = {"step": self.step, "cursor": self._tasks.cursor()}
        await self._ask("save", folder=str(folder), state=state)

    async def _ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        timeout_s = self._settings.step_timeout_s
        return await self._learner.ask(op, timeout_s=timeout_s, **arguments)

    def _write(self, groups: Sequence[_Scored], metrics: dict[str, Any]) -> None:
        self._folder.add_metrics(metrics)
        self._folder.add_trajectories(
            self.step,
            (
                (
                    {
                        "task": group.task.id,
                        "reward": group.rewards[index].value,
                        "answer": group.rewards[index].answer,
                        "reason": group.rewards[index].reason,
                        "advantage": group.advantages.get(index),
                        "dropped": group.choice.dropped.get(index),
                    },
                    trajectory,
                )
                for group in groups
                for index, trajectory in enumerate(group.trajectories)
            ),
        )

    def _tell(self, metrics: dict[str, Any]) -> None:
        self._progress(
            f"step {self.step}/{self._settings.steps}: reward {_mean(metrics['reward'])}, "
            f"tool errors in correct {_percent(metrics['tool_errors_in_correct'])}, "
            f"{metrics['num_kept']} of {metrics['num_rollouts']} rollouts kept, "
            f"{metrics['step_s']:.1f} s"
        )


def _about(groups: Sequence[_Scored]) -> dict[str, Any]:
    """What the field wants to know of rollouts. Means are over those with a reward."""
    pairs = [
        (trajectory, reward.value)
        for group in groups
        for trajectory, reward in zip(group.trajectories, group.rewards, strict=True)
    ]
    scored = [(trajectory, value) for trajectory, value in pairs if value is not None]
    ratios = [
        ratio
        for trajectory, value in scored
        if value > 0 and (ratio := _tool_error_ratio(trajectory)) is not None
    ]
    lengths = [trajectory.num_sampled_tokens for trajectory, _ in scored]
    return {
        "reward": statistics.fmean(value for _, value in scored) if scored else None,
        "tool_errors_in_correct": statistics.fmean(ratios) if ratios else None,
        "num_rollouts": len(pairs),
        "num_without_reward": len(pairs) - len(scored),
        "num_kept": sum(len(group.choice.kept) for group in groups),
        "num_groups_rejected": sum(group.choice.rejected is not None for group in groups),
        "num_sampled_tokens": sum(lengths),
        "length_mean": statistics.fmean(lengths) if lengths else 0.0,
        "turns_mean": statistics.fmean(len(t.turns) for t, _ in scored) if scored else 0.0,
        "truncated": statistics.fmean(
            t.stop_reason in (StopReason.TOKEN_BUDGET, StopReason.TURN_BUDGET) for t, _ in scored
        )
        if scored
        else 0.0,
    }


def _tool_error_ratio(trajectory: Trajectory) -> float | None:
    """Failed calls by calls; None without any."""
    ours = (CallStatus.CANCELLED, CallStatus.INFRASTRUCTURE)
    statuses = [result.status for result in trajectory.results if result.status not in ours]
    return sum(status.failed for status in statuses) / len(statuses) if statuses else None


def _mean(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"
