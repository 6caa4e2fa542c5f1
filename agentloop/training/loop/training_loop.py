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

`GroupBuffer` (group_buffer.py) is where they meet, and `RunControl` (run_control.py) wakes them;
both are in the `RunContext` (run_context.py) that all of them share.

With `max_staleness` 0 rollouts and learner take turns, and all samples come from the newest policy.
The journal (queue.py) records admitted, finished and leased groups, so that a killed run can be
resumed: `Steps` begins at the learner's newest checkpoint, and the batches since then are repeated,
the same ones in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

import anyio

from agentloop.aio import task_group
from agentloop.training.learner_client.client import LearnerRefused
from agentloop.training.loop.batch_trainer import BatchTrainer
from agentloop.training.loop.held_out import HeldOutEval
from agentloop.training.loop.stages import StageRunner
from agentloop.training.loop.steps import Steps
from agentloop.training.recovery.position import resume_command
from agentloop.training.run.collapse import CollapseSettings
from agentloop.training.run.context import RunContext
from agentloop.training.run.learning import held_out_rewards
from agentloop.training.run.status import count_of
from agentloop.training.weight_sync.loop import WeightSyncLoop
from agentloop.training.weight_sync.settings import WeightsSettings
from agentloop.training.weight_sync.sync import Serving, publisher


@dataclass(slots=True)
class _CheckpointRequest:
    """A request for a checkpoint, with its step when it is being written."""

    event: anyio.Event = field(default_factory=anyio.Event)
    step: int | None = 0  # None: it could not be started


class LoopView(TypedDict):
    """The state of the loop, as the web page shows it."""

    num_steps: int
    step: int
    learner_version: str
    slots: int
    slots_used: int
    queue_groups: int
    queue_bytes: int
    max_staleness: int
    paused: bool
    draining: bool


class TrainingLoop:
    """The training loop of a run: `run` trains to the last step.

    Attributes:
        control: pauses and drains the run. A drained one ends with a checkpoint when the
            groups in flight have ended and all complete batches are trained on.
    """

    def __init__(
        self,
        run: RunContext,
        steps: Steps,
        serving: Serving,
        *,
        weights: WeightsSettings | None = None,
        collapse: CollapseSettings | None = None,
    ) -> None:
        weights = weights or WeightsSettings()
        self._context = run
        self.control = run.control
        self._steps = steps
        self._to_save: list[_CheckpointRequest] = []
        self._weights = WeightSyncLoop(
            run,
            steps,
            publisher(weights, steps.learner, run.folder.path),
            serving,
            timeout_s=weights.timeout_s,
        )
        self._held_out = HeldOutEval(run)
        self._trainer = BatchTrainer(
            run,
            steps,
            self._weights,
            self._held_out,
            collapse=collapse or CollapseSettings(),
            waits_for_weights=run.settings.max_staleness == 0 or weights.transport == "broadcast",
        )
        self._stages = StageRunner(run, self._trainer)

    async def save(self) -> int:
        """Start writing a checkpoint now or after the current step, and return its step.

        Nothing is done if there is a checkpoint of that step.

        Raises:
            LearnerRefused: the checkpoint could not be started.
        """
        request = _CheckpointRequest()
        self._to_save.append(request)
        self.control.notify()
        await request.event.wait()  # no deadline: the learner's requests have one, or end the run
        if request.step is None:
            raise LearnerRefused("the checkpoint could not be started; the run's log says why")
        return request.step

    def view(self) -> LoopView:
        """Return the state of the loop as plain data, for the web page."""
        buffer = self._context.buffer
        return {
            "num_steps": self._context.pace.num_steps,
            "step": self._steps.step,
            "learner_version": str(self._steps.version),
            "slots": buffer.num_slots,
            "slots_used": buffer.num_open + buffer.num_finished,
            "queue_groups": buffer.num_finished,
            "queue_bytes": buffer.num_bytes,
            "max_staleness": self._context.settings.max_staleness,
            "paused": self.control.is_paused,
            "draining": self.control.is_draining,
        }

    async def _save(self) -> None:
        """Write requested checkpoints.

        This runs in a task of the loop because the caller of `save` may be cancelled, while the
        recovery of a learner that is lost meanwhile must not be.
        """
        while True:
            while not self._to_save:
                await self.control.wait_changed()  # no deadline: until there is a request
            requests, self._to_save = self._to_save, []
            is_started = await self._steps.checkpoint()
            for request in requests:
                request.step = self._steps.step if is_started else None
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
                await self._train()
                tasks.cancel_scope.cancel()
        finally:  # no weight sync is running any more
            await self._weights.close()

    async def _train(self) -> None:
        run = self._context
        if run.settings.evaluate_every or not run.stages:
            await self._held_out.find_tasks()
        if self._steps.step:
            run.report.say(f"Resuming from the checkpoint of step {self._steps.step}")
        cursor = await run.queue.cursor()
        outcomes = await run.queue.outcomes()
        run.curriculum.restore(outcomes, num_offered=cursor.get("num_offered", 0))
        await self._trainer.restore()
        run.buffer.reset(self._steps.version)
        await self._weights.publish()
        await self._weights.until_live()
        if not self._steps.step:
            await self._trainer.evaluate(run.budget)
        for number, (name, stage) in enumerate(run.stages.items(), 1):
            await self._stages.run(number, name, stage)
            if self.control.is_draining:
                command = resume_command("train", run.folder.path)
                run.report.say(f"Drained after step {self._steps.step}; continue with: {command}")
                break
        if run.settings.learn and self._steps.step:
            if not self._steps.version:
                run.report.say(
                    "The weights have not changed: no group had rollouts with different rewards"
                )
            if learned := held_out_rewards(await run.metrics.rows()):
                run.report.say(f"{learned} in {count_of(self._steps.step, 'step')}")
            await self._steps.checkpoint(wait=True)
        await self._steps.leave_model()
        run.folder.end(drained=self.control.is_draining)
