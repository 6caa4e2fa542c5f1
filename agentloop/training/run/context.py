"""The objects that the parts of a training loop share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from agentloop.agent.rollout import Budget
from agentloop.environments.tasks.sources import TaskSource
from agentloop.events import Emit, ignore
from agentloop.rollouts.request import WaitForCapacity
from agentloop.training.loop.curriculum import BY_SOLVE_RATE, EVERY_TASK, Curriculum
from agentloop.training.loop.group_buffer import GroupBuffer
from agentloop.training.loop.queue import GroupQueue
from agentloop.training.loop.settings import LoopSettings, StageSettings
from agentloop.training.rollouts import RollsOut
from agentloop.training.run.control import RunControl
from agentloop.training.run.folder import RunFolder
from agentloop.training.run.pace import Pace
from agentloop.training.run.status import Reporter
from agentloop.training.run.step_metrics import MetricsLog

_MAX_QUEUE_BYTES = 8 << 30  # of finished groups on disk; above it, no further groups start


@dataclass(frozen=True)
class RunContext:
    """The objects that the parts of a training loop share.

    Whoever starts a `TrainingLoop` makes its context. The context closes nothing: the caller opens
    the journal, the folder and whatever generates the rollouts, and closes them after the loop.

    Attributes:
        tasks: the source of tasks, positioned at the journal's cursor.
        wait_for_capacity: waits until another group may start; then its task is chosen.
        queue: the journal.
        stages: the stages by name; without any, there is one with the loop's number of steps.
        budget: the budget of a rollout, of which a stage may override parts.
        control: wakes, pauses and drains the loop's tasks.
        emit: called with events about metrics and weights.
    """

    settings: LoopSettings
    tasks: TaskSource
    rollouts: RollsOut
    wait_for_capacity: WaitForCapacity
    queue: GroupQueue
    folder: RunFolder
    report: Reporter
    stages: Mapping[str, StageSettings] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    control: RunControl = field(default_factory=RunControl)
    emit: Emit = ignore

    def __post_init__(self) -> None:
        if not self.stages and self.settings.steps:
            stages = {"": StageSettings(steps=self.settings.steps)}
            object.__setattr__(self, "stages", stages)

    @cached_property
    def buffer(self) -> GroupBuffer:
        return GroupBuffer(
            self.queue,
            self.control,
            batch_size=self.settings.prompts_per_step,
            max_staleness=self.settings.max_staleness,
            max_bytes=_MAX_QUEUE_BYTES,
        )

    @cached_property
    def curriculum(self) -> Curriculum:
        policy = BY_SOLVE_RATE if self.settings.curriculum else EVERY_TASK
        return Curriculum(policy, seed=self.settings.seed)

    @cached_property
    def metrics(self) -> MetricsLog:
        return MetricsLog(self.folder, self.emit)

    @cached_property
    def pace(self) -> Pace:
        return Pace(self.report, sum(stage.steps for stage in self.stages.values()))
