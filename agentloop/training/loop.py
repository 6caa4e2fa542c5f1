"""The training loop: groups are admitted, rolled out and queued; the learner takes them in batches.

    tasks ──admit──> rollouts ──> rewards ──> Resample-on-Correct ──> buffer ──batch──> learner
              ▲                                                                            │
              └── slots, freed when the weights are live ──── servers load them <──────────┘

The tasks of a run, what each consumes, waits for, and what unblocks it:

    StageRunner         tasks of a stage; waits for a free slot and KV capacity; unblocked by new
    (stages.py)         weights going live, by discarded groups and by batches that are taken
    BatchTrainer        finished groups; waits until there are enough, and none would be left behind
    (batch_trainer.py)  that becomes too stale; unblocked by groups that finish
    WeightSyncLoop      published weights; waits for the learner to publish; the learner goes on
    (weight_sync/loop)  meanwhile if `max_staleness` permits
    TrainingLoop._save  requests for checkpoints; waits for the step at hand
    Steps.watch         the learner's death between requests; restarts it

`GroupBuffer` (group_buffer.py) is where they meet, and `RunControl` (run_control.py) wakes them.

With `max_staleness` 0 rollouts and learner take turns, and all samples come from the newest policy.
The journal (queue.py) records admitted, finished and leased groups, so that a killed run can be
resumed: `restored` is the learner's state at its newest checkpoint, and the batches since then are
repeated, the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio

from agentloop.agent.rollout import Budget
from agentloop.aio import task_group
from agentloop.environments.tasks.sources import TaskSource
from agentloop.events import Emit, ignore
from agentloop.training.batch_trainer import BatchTrainer
from agentloop.training.collapse import CollapseSettings
from agentloop.training.curriculum import BY_SOLVE_RATE, EVERY_TASK, Curriculum
from agentloop.training.group_buffer import GroupBuffer
from agentloop.training.held_out import HeldOutEval, TaskRunner
from agentloop.training.learner_client.client import KeptLearner, Learner, LearnerRefused
from agentloop.training.learner_client.protocol import TrainingState
from agentloop.training.loop_settings import LoopSettings, StageSettings
from agentloop.training.pace import Pace
from agentloop.training.queue import GroupQueue
from agentloop.training.rollouts import RollsOut
from agentloop.training.run_control import RunControl
from agentloop.training.run_folder import RunFolder
from agentloop.training.run_status import Reporter, StatusWatch
from agentloop.training.stages import StageRunner
from agentloop.training.step_metrics import MetricsLog
from agentloop.training.steps import Steps
from agentloop.training.weight_sync.loop import WeightSyncLoop
from agentloop.training.weight_sync.settings import WeightsSettings
from agentloop.training.weight_sync.sync import Serving, publisher

__all__ = ["TrainingLoop"]

_MAX_QUEUE_BYTES = 8 << 30  # of finished groups on disk; above it, no further groups start


@dataclass(slots=True)
class _CheckpointRequest:
    """A request for a checkpoint, with its step when it is being written."""

    event: anyio.Event = field(default_factory=anyio.Event)
    step: int | None = 0  # None: it could not be started


class TrainingLoop:
    """The training loop of a run: `run` trains to the last step."""

    def __init__(
        self,
        settings: LoopSettings,
        *,
        rollouts: RollsOut,
        serving: Serving,
        learner: Learner,
        tasks: TaskSource,
        queue: GroupQueue,
        folder: RunFolder,
        report: Reporter,
        stages: Mapping[str, StageSettings] | None = None,
        budget: Budget | None = None,
        weights: WeightsSettings | None = None,
        restored: TrainingState | None = None,
        kept: KeptLearner | None = None,
        max_restarts: int = 0,
        collapse: CollapseSettings | None = None,
        watch: StatusWatch | None = None,
        emit: Emit = ignore,
    ) -> None:
        """
        Args:
            tasks: the source of tasks, positioned at the queue's cursor.
            restored: the state of the checkpoint that the learner has loaded (`load_newest`).
            kept: the learner, if it may be restarted, up to `max_restarts` times in ten minutes.
            emit: called with events about metrics and weights.
        """
        self._settings = settings
        self._stages = dict(stages or {})
        if not self._stages and settings.steps:
            self._stages = {"": StageSettings(steps=settings.steps)}
        self._budget = budget or Budget()
        self._queue = queue
        self._folder = folder
        self._report = report
        self._to_save: list[_CheckpointRequest] = []
        self._control = control = RunControl(watch)
        self._pace = Pace(report, sum(stage.steps for stage in self._stages.values()))
        policy = BY_SOLVE_RATE if settings.curriculum else EVERY_TASK
        self._curriculum = Curriculum(policy, seed=settings.seed)
        self._buffer = GroupBuffer(
            queue,
            control,
            batch_size=settings.prompts_per_step,
            max_staleness=settings.max_staleness,
            max_bytes=_MAX_QUEUE_BYTES,
        )
        self._steps = Steps(
            learner,
            queue,
            folder,
            restored=restored,
            timeout_s=settings.step_timeout_s,
            say=report.say,
            kept=kept,
            max_restarts=max_restarts,
        )
        weights = weights or WeightsSettings()
        self._weights = WeightSyncLoop(
            self._steps,
            publisher(weights, learner, folder.path),
            serving,
            control,
            timeout_s=weights.timeout_s,
            on_live=self._buffer.now_live,
            emit=emit,
        )
        metrics = MetricsLog(folder, emit)
        runner = TaskRunner(rollouts, self._pace, control)
        self._held_out = HeldOutEval(
            tasks, runner, metrics, self._pace, max_tasks=settings.evaluate_tasks
        )
        self._trainer = BatchTrainer(
            settings,
            buffer=self._buffer,
            steps=self._steps,
            weights=self._weights,
            held_out=self._held_out,
            metrics=metrics,
            folder=folder,
            control=control,
            pace=self._pace,
            collapse=collapse or CollapseSettings(),
            curriculum=self._curriculum,
            waits_for_weights=settings.max_staleness == 0 or weights.transport == "group",
        )
        self._stage_runner = StageRunner(
            settings,
            num_stages=len(self._stages),
            budget=self._budget,
            tasks=tasks,
            queue=queue,
            folder=folder,
            rollouts=rollouts,
            runner=runner,
            curriculum=self._curriculum,
            buffer=self._buffer,
            trainer=self._trainer,
            metrics=metrics,
            control=control,
            pace=self._pace,
        )

    @property
    def step(self) -> int:
        """The last completed step."""
        return self._steps.step

    @property
    def version(self) -> int:
        """The version of the learner's weights."""
        return self._steps.version

    @property
    def is_paused(self) -> bool:
        return self._control.is_paused

    @property
    def is_draining(self) -> bool:
        return self._control.is_draining

    # --- control --------------------------------------------------------------------------------

    def pause(self, paused: bool = True) -> None:
        """Stop admitting groups, or resume. Groups in flight continue."""
        self._control.pause(paused)

    def drain(self) -> None:
        """Stop admitting groups and end the run in order, so that it can be resumed.

        `run` returns with a checkpoint when the groups in flight have ended and all complete
        batches are trained on.
        """
        self._control.drain()

    async def save(self) -> int:
        """Start writing a checkpoint now or after the current step, and return its step.

        Nothing is done if there is a checkpoint of that step.

        Raises:
            LearnerRefused: the checkpoint could not be started.
        """
        request = _CheckpointRequest()
        self._to_save.append(request)
        self._control.notify()
        await request.event.wait()  # no deadline: the learner's requests have one, or end the run
        if request.step is None:
            raise LearnerRefused("the checkpoint could not be started; the run's log says why")
        return request.step

    def view(self) -> dict[str, Any]:
        """Return the state of the loop as plain data, for the web page."""
        buffer = self._buffer
        return {
            "num_steps": self._pace.num_steps,
            "step": self.step,
            "learner_version": str(self.version),
            "slots": buffer.num_slots,
            "slots_used": buffer.num_open + buffer.num_finished,
            "queue_groups": buffer.num_finished,
            "queue_bytes": buffer.num_bytes,
            "max_staleness": self._settings.max_staleness,
            "paused": self.is_paused,
            "draining": self.is_draining,
        }

    async def _save(self) -> None:
        """Write requested checkpoints.

        This runs in a task of the loop because the caller of `save` may be cancelled, while the
        recovery of a learner that is lost meanwhile must not be.
        """
        while True:
            while not self._to_save:
                await self._control.changed()  # no deadline: until there is a request
            requests, self._to_save = self._to_save, []
            is_started = await self._steps.checkpoint()
            for request in requests:
                request.step = self.step if is_started else None
                request.event.set()

    async def run(self) -> None:
        """Train to the last step.

        Raises:
            LearnerError, ServerError, RewardError: a failure that the run cannot recover from.
            RunCollapsed: the run has collapsed.
        """
        try:
            async with task_group() as tasks:
                tasks.start_soon(self._weights.load)
                tasks.start_soon(self._weights.sync_stale)
                tasks.start_soon(self._save)
                tasks.start_soon(self._steps.watch)
                await self._run()
                tasks.cancel_scope.cancel()
        finally:  # no weight sync is running any more
            await self._weights.close()

    async def _run(self) -> None:
        if self._settings.evaluate_every or not self._stages:
            await self._held_out.find_tasks()
        if self.step:
            self._report.say(f"Resuming from the checkpoint of step {self.step}")
        cursor = await self._queue.noted("cursor") or {}
        self._curriculum.restore(
            await self._queue.outcomes(), num_offered=cursor.get("num_offered", 0)
        )
        await self._trainer.restore()
        self._buffer.reset(self.version)
        await self._weights.publish()
        await self._weights.until_live()
        if not self.step:
            await self._trainer.evaluate(self._budget)
        for number, (name, stage) in enumerate(self._stages.items(), 1):
            await self._stage_runner.run(number, name, stage)
            if self.is_draining:
                command = f"agentloop train --resume {self._folder.path}"
                self._report.say(f"Drained after step {self.step}; continue with: {command}")
                break
        if self._settings.learn and self.step:
            await self._steps.checkpoint(wait=True)
        await self._steps.leave_model()
        if not self.is_draining:
            self._folder.end()
