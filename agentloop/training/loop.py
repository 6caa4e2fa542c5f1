"""The training loop, in step: roll out, choose, learn, hand over.

    tasks ──> groups of rollouts ──> rewards ──> Resample-on-Correct ──> batch ──> learner
      ▲                                                                              │
      └───────────────────────── new weights in every server <───────────────────────┘

The learner and the rollouts take turns: every sample is of the newest policy.
"""

from __future__ import annotations

import itertools
import random
import shutil
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import pydantic

from agentloop.groups.advantage import group_advantages
from agentloop.groups.feed import finished_groups
from agentloop.groups.reward import Reward, Scorer
from agentloop.groups.roc import Choice, RocSettings, Trace, resample
from agentloop.groups.tasks import Task, TaskSource
from agentloop.inference.router import Router
from agentloop.training.batch import Sample, write_batch
from agentloop.training.handover import hand_over
from agentloop.training.learner import Learner
from agentloop.training.run_folder import RunFolder
from agentloop.trajectory import CallStatus, StopReason, Trajectory

__all__ = ["LoopSettings", "RunGroup", "TrainingLoop"]

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
    weights_timeout_s: float = pydantic.Field(
        300.0, gt=0, description="For a server to load new weights."
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
        self._random = random.Random(settings.seed)
        self.step = 0

    async def run(self) -> None:
        """To the last step.

        Raises:
            LearnerError, ServerError, RewardError: what cannot be gone on from.
        """
        await self._hand_over()
        await self._evaluate()
        while self.step < self._settings.steps:
            self.step += 1
            metrics = await self._train_step()
            if self._settings.evaluate_every and self.step % self._settings.evaluate_every == 0:
                await self._evaluate()
            self._tell(metrics)
            if self._settings.checkpoint_every and self.step % self._settings.checkpoint_every == 0:
                await self._checkpoint()
        if self._settings.evaluate_every and self.step % self._settings.evaluate_every:
            await self._evaluate()
        await self._checkpoint()

    async def _train_step(self) -> dict[str, Any]:
        begun = time.monotonic()
        groups = await self._roll_out(
            list(itertools.islice(self._tasks, self._settings.tasks_per_step))
        )
        rolled_s = time.monotonic() - begun
        samples = self._samples(groups)
        metrics: dict[str, Any] = {"step": self.step, **_about(groups), "rollout_s": rolled_s}
        if samples:
            path = self._folder.path / "batches" / f"step-{self.step:05}.safetensors"
            await anyio.to_thread.run_sync(write_batch, path, samples)
            learned = await self._ask("step", batch=str(path))
            path.unlink()
            metrics |= {f"learner/{name}": value for name, value in learned.items()}
            metrics |= await self._hand_over()
        metrics["step_s"] = time.monotonic() - begun
        await anyio.to_thread.run_sync(self._write, groups, metrics)
        return metrics

    async def _roll_out(self, tasks: Sequence[Task]) -> list[_Scored]:
        run = partial(self._run_group, size=self._settings.group_size)
        found = []
        async with finished_groups(
            tasks,
            run,
            partial(self._router.has_room, self._settings.group_size),
            max_open=len(tasks),
        ) as groups:
            async for group in groups:
                if group.error is not None:
                    raise group.error  # a task that cannot be asked is a mistake in the data
                found.append(await self._score(group.task, group.trajectories))
        return found

    async def _run_group(
        self, task: Task, at_gate: Callable[[], None], *, size: int
    ) -> Sequence[Trajectory]:
        name = f"{self.step}-{task.id}"
        return await self._rollouts(task.prompt, size=size, name=name, at_gate=at_gate)

    async def _score(self, task: Task, trajectories: Sequence[Trajectory]) -> _Scored:
        rewards: dict[int, Reward] = {}

        async def score(index: int) -> None:
            rewards[index] = await self._scorer.score(trajectories[index], task)

        async with anyio.create_task_group() as scoring:
            for index in range(len(trajectories)):
                scoring.start_soon(score, index)
        in_order = [rewards[index] for index in range(len(trajectories))]
        traces = [
            Trace.of(trajectory, reward.value)
            for trajectory, reward in zip(trajectories, in_order, strict=True)
        ]
        choice = resample(traces, self._roc, self._random)
        scored = _Scored(task, trajectories, in_order, choice)
        kept = [(index, in_order[index].value) for index in choice.kept]
        values = group_advantages([value for _, value in kept if value is not None])
        scored.advantages = dict(zip((index for index, _ in kept), values, strict=True))
        return scored

    def _samples(self, groups: Sequence[_Scored]) -> list[Sample]:
        return [
            Sample(
                group.trajectories[index].ids,
                group.trajectories[index].mask,
                group.trajectories[index].logprobs,
                advantage,
                number,
            )
            for number, group in enumerate(groups)
            for index, advantage in group.advantages.items()
            if advantage and any(group.trajectories[index].mask)
        ]

    async def _hand_over(self) -> dict[str, Any]:
        version = str(self.step)
        folder = self._folder.path / "weights" / version
        published = await self._ask("publish", folder=str(folder), version=version)
        handover = await hand_over(
            self._router, folder, version, timeout_s=self._settings.weights_timeout_s
        )
        for old in (self._folder.path / "weights").iterdir():
            if old != folder:
                await anyio.to_thread.run_sync(partial(shutil.rmtree, old, ignore_errors=True))
        return {
            "weights/publish_s": published["seconds"],
            "weights/load_s": handover.seconds,
            "weights/num_servers": len(handover.loaded),
            "weights/num_failed": len(handover.failed),
        }

    async def _evaluate(self) -> dict[str, Any]:
        tasks = self._tasks.held_out()[: self._settings.evaluate_tasks]
        if not tasks:
            return {}
        found: list[_Scored] = []
        run = partial(self._run_group, size=1)
        has_room = partial(self._router.has_room, 1)
        async with finished_groups(tasks, run, has_room, max_open=len(tasks)) as groups:
            async for group in groups:
                found.append(await self._score(group.task, group.trajectories))
        metrics = {f"held_out/{name}": value for name, value in _about(found).items()}
        self._folder.add_metrics({"step": self.step, **metrics})
        self._progress(
            f"step {self.step}: held-out reward {metrics['held_out/reward']:.3f}, "
            f"tool errors in correct {_percent(metrics['held_out/tool_errors_in_correct'])}"
        )
        return metrics

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
            f"step {self.step}/{self._settings.steps}: reward {metrics['reward']:.3f}, "
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
        "reward": statistics.fmean(value for _, value in scored) if scored else 0.0,
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


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"
