"""The training loop, in step: roll out, choose, learn, hand over; stage by stage.

    tasks ──> groups of rollouts ──> rewards ──> Resample-on-Correct ──> batch ──> learner
      ▲                                                                              │
      └───────────────────────── new weights in every server <───────────────────────┘

The learner and the rollouts take turns: every sample is of the newest policy.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pydantic

from agentloop.agent.rollout import Budget
from agentloop.errors import RequestError, sole
from agentloop.groups.advantage import group_advantages
from agentloop.groups.feed import finished_groups
from agentloop.groups.reward import Reward, Scorer
from agentloop.groups.roc import Choice, RocSettings, Trace, resample
from agentloop.groups.tasks import Task, TaskSource
from agentloop.inference.router import Router
from agentloop.training.batch import Sample, write_batch
from agentloop.training.figures import about, mean, percent
from agentloop.training.handover import (
    Handover,
    WeightsSettings,
    hand_over,
    keep_up,
    publisher,
)
from agentloop.training.learner import Learner
from agentloop.training.pace import Pace
from agentloop.training.run_folder import RunFolder
from agentloop.training.standing import Report
from agentloop.trajectory import Trajectory

__all__ = ["LoopSettings", "RunGroup", "StageSettings", "TrainingLoop"]

_CLOSE_S = 60.0
_KEEP_UP_S = 1.0
_RETRY_S = 30.0  # of servers that cannot load them

RunGroup = Callable[..., Awaitable[Sequence[Trajectory]]]
"""`Runtime.run_group`: (prompt, *, size, name, budget, at_gate) to trajectories."""


class LoopSettings(pydantic.BaseModel):
    """How long to train, on how much."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    steps: int = pydantic.Field(
        510, ge=0, description="Steps of a run without stages; 0 only evaluates."
    )
    tasks_per_step: int = pydantic.Field(512, ge=1, description="Tasks, a group of rollouts each.")
    group_size: int = pydantic.Field(
        32, ge=1, description="Rollouts of a task; roc.down_sample_to_n of them are learned from."
    )
    learn: bool = pydantic.Field(
        True,
        description="false: roll out and write the trajectories alone, such as for "
        "`agentloop data filter`.",
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
    shuffle_rewards: bool = pydantic.Field(
        False,
        description="A control, which must not learn anything: what each rollout of a group is "
        "learned with is the reward of another. The metrics tell the true ones.",
    )
    seed: int = pydantic.Field(0, ge=0, description="Of what Resample-on-Correct draws.")
    step_timeout_s: float = pydantic.Field(
        3600.0, gt=0, description="For the learner's answer to one request."
    )


class StageSettings(pydantic.BaseModel):
    """A part of a run, with settings of its own; what it leaves out is as in the rest of them."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    steps: int = pydantic.Field(ge=1, description="Steps of this stage.")
    max_turns: int | None = pydantic.Field(
        None, ge=1, description="In place of budget.max_turns, in this stage."
    )
    max_response_tokens: int | None = pydantic.Field(
        None, ge=1, description="In place of budget.max_response_tokens, in this stage."
    )
    reset_optimizer: bool = pydantic.Field(
        False, description="Forget the optimizer's moments before it."
    )
    filter_tasks: int = pydantic.Field(
        0,
        ge=0,
        description="Before it, roll out so many tasks; those that every rollout solves are "
        "dropped, and the stage learns of the others, over and over. 0: it takes all as they come.",
    )
    filter_rollouts: int = pydantic.Field(
        8, ge=1, description="Rollouts of each of the tasks that are filtered."
    )

    def budget(self, usual: Budget) -> Budget:
        own = {"max_turns": self.max_turns, "max_response_tokens": self.max_response_tokens}
        return usual.model_copy(update={k: v for k, v in own.items() if v is not None})


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
        report: Report,
        stages: Mapping[str, StageSettings] | None = None,
        budget: Budget | None = None,
        weights: WeightsSettings | None = None,
    ) -> None:
        self._settings = settings
        self._stages = dict(stages or {})
        if not self._stages and settings.steps:
            self._stages = {"": StageSettings(steps=settings.steps)}
        self._usual_budget = self._budget = budget or Budget()
        self._roc = roc
        self._rollouts = run_group
        self._router = router
        self._learner = learner
        self._scorer = scorer
        self._tasks = tasks
        self._source: Iterator[Task] = tasks
        self._folder = folder
        self._pace = Pace(report, sum(stage.steps for stage in self._stages.values()))
        self._held_out: list[Task] = []
        self._weights = weights or WeightsSettings()
        self._publisher = publisher(self._weights, learner, folder.path)
        self._handover: Handover | None = None
        self._handing_over = anyio.Lock()
        self._keeping_up = anyio.CancelScope()
        self.step = self._saved_step = 0

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
        finally:  # nobody is given weights any more
            with anyio.move_on_after(_CLOSE_S, shield=True):
                await self._publisher.close()

    async def _run(self) -> None:
        s = self._settings
        if s.evaluate_every or not self._stages:  # a generator may search for them for long
            held_out = await anyio.to_thread.run_sync(self._tasks.held_out, abandon_on_cancel=True)
            self._held_out = held_out[: s.evaluate_tasks]
            if not held_out:
                self._say("Nothing is evaluated: no tasks are held out (tasks.held_out)")
        await self._hand_over()
        await self._evaluate()
        for number, (name, stage) in enumerate(self._stages.items(), 1):
            title = f"stage {number} of {len(self._stages)}: {name}" if name else "training"
            await self._run_stage(title, stage)
        if s.learn and self.step > self._saved_step:
            await self._checkpoint()
        await self._leave_the_model()

    async def _run_stage(self, title: str, stage: StageSettings) -> None:
        s = self._settings
        self._pace.enter(title, stage.steps)
        self._budget = stage.budget(self._usual_budget)
        if len(self._stages) > 1:
            self._say(f"{title[0].upper()}{title[1:]}, {stage.steps} steps")
        self._source = self._tasks
        if stage.filter_tasks:
            hard = await self._unsolved(stage)
            if not hard:
                self._say("Nothing is left to learn there: every task is solved each time")
                self._pace.skip()
                return
            self._source = _over_and_over(hard, random.Random(f"{s.seed} {title}"))
        if stage.reset_optimizer:
            await self._ask("reset_optimizer")
        for number in range(1, stage.steps + 1):
            self.step += 1
            metrics = await self._train_step()
            self._pace.stepped(metrics)
            self._tell(metrics)
            is_last = number == stage.steps
            if s.evaluate_every and (is_last or self.step % s.evaluate_every == 0):
                await self._evaluate()
            if s.learn and s.checkpoint_every and self.step % s.checkpoint_every == 0:
                await self._checkpoint()

    async def _unsolved(self, stage: StageSettings) -> list[Task]:
        """Of the next tasks, those that a rollout fails. One without any reward stays, too."""
        tasks = list(itertools.islice(self._tasks, stage.filter_tasks))
        groups = await self._groups(
            tasks,
            stage.filter_rollouts,
            name=f"{self.step}-filter",
            what="the tasks to be filtered",
        )
        left = []
        for group in groups:
            values = [reward.value for reward in group.rewards if reward.value is not None]
            if not values or min(values) <= 0:
                left.append(group.task)
        self._folder.add_metrics(
            {"step": self.step, "filter/num_tasks": len(tasks), "filter/num_left": len(left)}
        )
        self._say(
            f"{len(left)} of {len(tasks)} tasks are not solved by "
            f"{stage.filter_rollouts} of {stage.filter_rollouts} rollouts"
        )
        return left

    async def _train_step(self) -> dict[str, Any]:
        begun = time.monotonic()
        tasks = list(itertools.islice(self._source, self._settings.tasks_per_step))
        size = self._settings.group_size
        groups = await self._groups(tasks, size, name=f"{self.step}", what="rollouts")
        rolled_s = time.monotonic() - begun
        metrics: dict[str, Any] = {"step": self.step, **about(groups), "rollout_s": rolled_s}
        metrics["rollout_tokens_per_s"] = metrics["num_sampled_tokens"] / rolled_s
        if self._settings.learn:
            metrics |= await self._learn(groups)
        metrics["step_s"] = time.monotonic() - begun
        await anyio.to_thread.run_sync(self._write, groups, metrics)
        return metrics

    async def _learn(self, groups: Sequence[_Scored]) -> dict[str, Any]:
        """A step of the learner's, and new weights; nothing where there is nothing to learn."""
        begun = time.monotonic()
        metrics: dict[str, Any] = {}
        path = self._folder.path / "batches" / f"step-{self.step:05}.safetensors"
        num_learned = await anyio.to_thread.run_sync(self._write_batch, path, groups)
        metrics["num_learned"] = num_learned
        if num_learned:
            self._pace.waits("rollouts wait for the learner")
            rescue = self._folder.path / "checkpoints" / f"step-{self.step:05}-rescue"
            learned = await self._ask(
                "step", batch=str(path), rescue=str(rescue), state=self._state(self.step - 1)
            )
            path.unlink()
            metrics |= {f"learner/{name}": value for name, value in learned.items()}
            learned_at = time.monotonic()
            metrics["learn_s"] = learned_at - begun
            self._pace.waits("everybody waits for the new weights to be loaded")
            metrics |= await self._hand_over()
            metrics["hand_over_s"] = time.monotonic() - learned_at
        return metrics

    async def _groups(
        self, tasks: Sequence[Task], size: int, *, name: str, what: str
    ) -> list[_Scored]:
        """A scored group for each task, in the order of the tasks, however they finish."""
        found: dict[int, _Scored] = {}
        refused: RequestError | None = None
        self._pace.waits(f"the learner waits for {what}: 0 of {len(tasks) * size}")
        async with finished_groups(
            list(enumerate(tasks)),
            partial(self._run_group, size=size, name=name),
            partial(self._router.has_room, size),
            max_open=len(tasks),
        ) as groups:
            async for group in groups:
                number, task = group.task
                if group.error is not None:  # a mistake in the data
                    self._say(f"Left out: task {task.id}: {group.error}")
                    refused = group.error
                    continue
                found[number] = await self._score(number, task, group.trajectories)
                done, total = len(found) * size, len(tasks) * size
                self._pace.waits(f"the learner waits for {what}: {done} of {total}")
        if refused is not None and not found:  # one that is refused is a pity, all are a mistake
            raise RequestError(f"{refused}, and so it is with all tasks of this step") from refused
        return [found[number] for number in sorted(found)]

    async def _run_group(
        self, numbered: tuple[int, Task], at_gate: Callable[[], None], *, size: int, name: str
    ) -> Sequence[Trajectory]:
        number, task = numbered  # where epochs meet, or tasks are few, one comes twice in a step
        name = f"{name}-{number}-{task.id}"
        return await self._rollouts(
            task.prompt, size=size, name=name, budget=self._budget, at_gate=at_gate
        )

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
        values = [reward.value for reward in in_order]
        # Its own, for groups finish in any order.
        draw = random.Random(f"{self._settings.seed} {self.step} {number}")
        if self._settings.shuffle_rewards:
            values = _shuffled(values, draw)
        traces = [
            Trace.of(trajectory, value)
            for trajectory, value in zip(trajectories, values, strict=True)
        ]
        choice = resample(traces, self._roc, draw)
        scored = _Scored(task, trajectories, in_order, choice)
        kept = [value for index in choice.kept if (value := values[index]) is not None]
        scored.advantages = dict(zip(choice.kept, group_advantages(kept), strict=True))
        return scored

    def _other_version(self, trajectory: Trajectory) -> str | None:
        """A server that was restarted by others serves its old weights until it is probed."""
        assert self._handover is not None
        versions = (span.version for turn in trajectory for span in turn.versions)
        return next((one for one in versions if one != self._handover.version), None)

    def _write_batch(self, path: Path, groups: Sequence[_Scored]) -> int:
        """How many rollouts there are to learn from. One whose advantage is 0 counts all the same:
        the objective is a mean over all tokens of a group."""
        samples = [
            Sample(trajectory.ids, trajectory.mask, trajectory.logprobs, advantage, number)
            for number, group in enumerate(groups)
            if any(group.advantages.values()) or not self._roc.reject_equal_reward
            for index, advantage in group.advantages.items()
            for trajectory in [group.trajectories[index]]
        ]
        if not any(sample.advantage for sample in samples):
            return 0
        write_batch(path, samples)
        return len(samples)

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
        name = f"{self.step}-held-out"
        found = await self._groups(self._held_out, 1, name=name, what="held-out tasks")
        metrics = {f"held_out/{name}": value for name, value in about(found).items()}
        self._folder.add_metrics({"step": self.step, **metrics})
        reward = mean(metrics["held_out/reward"])
        self._pace.values |= {"held-out reward": reward}
        self._say(
            f"step {self.step}: held-out reward {reward}, "
            f"tool errors in correct {percent(metrics['held_out/tool_errors_in_correct'])}"
        )

    async def _checkpoint(self) -> None:
        folder = self._folder.path / "checkpoints" / f"step-{self.step:05}"
        await self._ask("save", folder=str(folder), state=self._state(self.step))
        self._saved_step = self.step

    def _state(self, step: int) -> dict[str, Any]:
        """Of the run after that step."""
        return {"step": step, "cursor": self._tasks.cursor()}

    async def _leave_the_model(self) -> None:
        """In the run's folder, where handing over has left it elsewhere, or nowhere."""
        assert self._handover is not None
        version = self._handover.version
        folder = self._folder.path / "weights" / version
        if not folder.exists():
            await self._ask("publish", folder=str(folder), version=version)

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
        self._say(
            f"step {self.step}/{self._pace.num_steps}: reward {mean(metrics['reward'])}, "
            f"tool errors in correct {percent(metrics['tool_errors_in_correct'])}, "
            f"{metrics.get('num_learned', 0)} of {metrics['num_rollouts']} rollouts learned, "
            f"{metrics['rollout_tokens_per_s']:,.0f} tokens/s, {metrics['step_s']:.1f} s"
        )

    def _say(self, line: str) -> None:
        self._pace.report.say(line)


def _shuffled(values: Sequence[float | None], draw: random.Random) -> list[float | None]:
    """Rewards dealt out anew; who has none, has none."""
    there = [value for value in values if value is not None]
    draw.shuffle(there)
    return [None if value is None else there.pop() for value in values]


def _over_and_over(tasks: Sequence[Task], draw: random.Random) -> Iterator[Task]:
    """Each epoch in an order of its own."""
    while True:
        yield from draw.sample(tasks, len(tasks))
