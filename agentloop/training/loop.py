"""The training loop: groups are admitted, rolled out and queued; the learner takes them in batches.

    tasks ──admission──> rollouts ──> rewards ──> Resample-on-Correct ──> queue ──batch──> learner
              ▲                                                                              │
              └── slots, freed when the weights are live ──── servers load them <────────────┘

Each loop waits for:

    admission   a free slot (staleness.py: how stale a group may become), space in the queue and KV
                capacity; unblocked by new weights going live, by a group that is discarded, and by
                a batch that is taken
    learner     a batch: enough finished groups, without leaving one behind that would become too
                stale; unblocked by finished groups
    loading     published weights; unblocked by the learner, which continues meanwhile if
                `max_staleness` permits

With `max_staleness` 0 these take turns, and all samples come from the newest policy. The queue's
journal records admitted, finished and leased groups, so that a killed run can be resumed:
`restored` is the learner's state at its newest checkpoint, and the batches since then are repeated,
the same ones in the same order.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
from anyio.abc import TaskStatus

from agentloop.agent.rollout import Budget
from agentloop.errors import RequestError, ServerError, sole
from agentloop.events import Emit, Measured, WeightsLoaded, ignore
from agentloop.tasks.sources import Task, TaskSource
from agentloop.training.collapse import (
    Collapse,
    CollapseSettings,
    RunCollapsed,
    Verdict,
    checkpoint_before,
    report,
)
from agentloop.training.group_metrics import about, mean, percent
from agentloop.training.learner_client.client import (
    KeptLearner,
    Learner,
    LearnerLost,
    LearnerRefused,
)
from agentloop.training.loop_settings import LoopSettings, StageSettings
from agentloop.training.progress import Pace
from agentloop.training.queue import GroupQueue, Lease, QueuedGroup
from agentloop.training.rollouts import RolledOut, RollsOut, in_order
from agentloop.training.run_folder import RunFolder
from agentloop.training.run_status import Reporter, StatusWatch, Unwatched
from agentloop.training.staleness import Slots
from agentloop.training.steps import Steps
from agentloop.training.weight_sync.settings import WeightsSettings
from agentloop.training.weight_sync.sync import Serving, SyncResult, publisher
from agentloop.training.weight_sync.transport import PublishedWeights

__all__ = ["TrainingLoop"]

log = logging.getLogger(__name__)

_CLOSE_S = 60.0
_SYNC_STALE_S = 1.0
_RETRY_S = 30.0  # pause after servers could not load the weights
_MANY_REPLACED = 10  # log a warning after this many batches' worth of replaced groups in a row
_NUM_TRIES = 3  # attempts at a weight sync, while servers are being restarted


class _Drained(Exception):
    """The run is draining, so the operation was not started."""


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
        restored: Mapping[str, Any] | None = None,
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
        self._usual_budget = self._budget = budget or Budget()
        self._rollouts = rollouts
        self._serving = serving
        self._tasks = tasks
        self._queue = queue
        self._folder = folder
        self._pace = Pace(report, sum(stage.steps for stage in self._stages.values()))
        self._held_out: list[Task] = []
        self._weights = weights or WeightsSettings()
        self._publisher = publisher(self._weights, learner, folder.path)
        self._published: PublishedWeights | None = None  # weights to load next
        self._last_sync: SyncResult | None = None
        self._sync_lock = anyio.Lock()
        self._syncing_stale = anyio.CancelScope()
        self._loaded: dict[str, Any] = {}  # metrics of the last weight sync
        self._changed = anyio.Event()
        self._slots = Slots(settings.max_staleness, settings.prompts_per_step)
        self._source: Iterator[Task] = tasks
        self._stage_number = 0
        self._num_drawn = 0  # tasks drawn from a stage's own ones
        self._readmitted: deque[QueuedGroup] = (
            deque()
        )  # admitted before a restart, to be rolled out again
        self._num_left = 0  # tasks of this stage that are not admitted yet
        self._num_refused = self._num_replaced = 0  # groups in a row
        self._watch = watch or Unwatched()
        self._emit = emit
        self.is_paused = self.is_draining = False
        self._to_save: list[_CheckpointRequest] = []
        self._collapse_settings = collapse or CollapseSettings()
        self._collapse = Collapse(self._collapse_settings)
        self._steps = Steps(
            learner,
            queue,
            folder,
            restored=restored or {},
            timeout_s=settings.step_timeout_s,
            say=self._say,
            kept=kept,
            max_restarts=max_restarts,
        )

    @property
    def step(self) -> int:
        """The last completed step."""
        return self._steps.step

    @property
    def version(self) -> int:
        """The version of the learner's weights."""
        return self._steps.version

    # --- control --------------------------------------------------------------------------------

    def pause(self, paused: bool = True) -> None:
        """Stop admitting groups, or resume. Groups in flight continue."""
        self.is_paused = paused
        self._notify()

    def drain(self) -> None:
        """Stop admitting groups and end the run in order, so that it can be resumed.

        `run` returns with a checkpoint when the groups in flight have ended and all complete
        batches are trained on.
        """
        self.is_draining = True
        self._notify()

    async def save(self) -> int:
        """Start writing a checkpoint now or after the current step, and return its step.

        Nothing is done if there is a checkpoint of that step.

        Raises:
            LearnerRefused: the checkpoint could not be started.
        """
        request = _CheckpointRequest()
        self._to_save.append(request)
        self._notify()
        await request.event.wait()  # no deadline: the learner's requests have one, or end the run
        if request.step is None:
            raise LearnerRefused("the checkpoint could not be started; the run's log says why")
        return request.step

    def view(self) -> dict[str, Any]:
        """Return the state of the loop as plain data, for the web page."""
        slots = self._slots
        return {
            "num_steps": self._pace.num_steps,
            "step": self.step,
            "learner_version": str(self.version),
            "slots": len(slots) + slots.room,
            "slots_used": len(slots),
            "queue_groups": len(slots) - len(slots.open),
            "queue_bytes": self._queue.num_bytes,
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
                await self._changed.wait()  # no deadline: until there is a request
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
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._load)
                tasks.start_soon(self._sync_stale)
                tasks.start_soon(self._save)
                tasks.start_soon(self._steps.watch)
                await self._run()
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise sole(group) from None
        finally:  # no weight sync is running any more
            with anyio.move_on_after(_CLOSE_S, shield=True):
                await self._publisher.close()

    async def _run(self) -> None:
        s = self._settings
        if s.evaluate_every or not self._stages:  # a generator may need long to find them
            held_out = await anyio.to_thread.run_sync(self._tasks.held_out, abandon_on_cancel=True)
            self._held_out = held_out[: s.evaluate_tasks]
            if not held_out:
                self._say("There will be no evaluation: no tasks are held out (tasks.held_out)")
        if self.step:
            self._say(f"Resuming from the checkpoint of step {self.step}")
        await self._steps.do_again(self._record_repeated)
        rows = await anyio.to_thread.run_sync(self._folder.metrics)
        self._collapse = Collapse.replay(self._collapse_settings, rows, step=self.step)
        self._slots = Slots(s.max_staleness, s.prompts_per_step, version=self.version)
        await self._publish()
        await self._until_live()
        if not self.step:
            await self._evaluate()
        for number, (name, stage) in enumerate(self._stages.items(), 1):
            title = f"stage {number} of {len(self._stages)}: {name}" if name else "training"
            await self._run_stage(number, title, stage)
            if self.is_draining:
                command = f"agentloop train --resume {self._folder.path}"
                self._say(f"Drained after step {self.step}; continue with: {command}")
                break
        if s.learn and self.step:
            await self._steps.checkpoint(wait=True)
        await self._steps.leave_model()
        if not self.is_draining:
            self._folder.end()

    # --- stages -----------------------------------------------------------------------------------

    async def _run_stage(self, number: int, title: str, stage: StageSettings) -> None:
        s = self._settings
        noted = await self._queue.noted(f"stage {number}")
        done = 0 if noted is None else min(self.step - noted["begun"], stage.steps)
        if done and await self._queue.noted(f"stage {number + 1}") is not None:
            done = stage.steps  # the stage has ended, even if its setting was raised since then
            self._pace.enter(title, stage.steps, done)
            return
        self._pace.enter(title, stage.steps, done)
        self._budget = stage.budget(self._usual_budget)
        if noted is not None and noted["tasks"] != [] and self.step == noted["begun"] + done:
            await self._after_step(done, stage)  # in case the process was killed before it
        if done == stage.steps:
            return
        if len(self._stages) > 1:
            self._say(f"{title[0].upper()}{title[1:]}, {stage.steps - done} steps")
        self._stage_number, self._num_drawn = number, 0
        if noted is None:
            try:
                tasks = await self._filter_tasks(stage) if stage.filter_tasks else None
            except _Drained:  # a resumed run filters all tasks again
                return
            noted = await self._queue.begin_stage(
                number,
                step=self.step,
                tasks=None if tasks is None else [*map(asdict, tasks)],
                cursor=self._cursor(),
            )
        await self._find_tasks(noted["tasks"], title)
        if noted["tasks"] == []:
            self._say("The stage is skipped: all of its tasks are solved by every rollout")
            self._pace.skip()
            return
        self._slots = Slots(s.max_staleness, s.prompts_per_step, version=self.version)
        self._num_left = (stage.steps - done) * s.prompts_per_step
        await self._restore_groups(noted["tasks"])
        async with anyio.create_task_group() as tasks_:
            tasks_.start_soon(self._admit)
            for index in range(done, stage.steps):
                if not await self._train_step(resets=stage.reset_optimizer and not index):
                    break  # drained
                await self._after_step(index + 1, stage)
            await self._until_live()
            tasks_.cancel_scope.cancel()

    async def _after_step(self, done: int, stage: StageSettings) -> None:
        """Evaluate and checkpoint if it is due after `done` steps of the stage."""
        s = self._settings
        if s.evaluate_every and (done == stage.steps or self.step % s.evaluate_every == 0):
            await self._until_live()
            await self._evaluate()
        if s.learn and s.checkpoint_every and self.step % s.checkpoint_every == 0:
            await self._steps.checkpoint()

    async def _find_tasks(self, own: Sequence[Mapping[str, Any]] | None, title: str) -> None:
        """Set the source of the stage's tasks: the run's, or its own ones, repeated and resumed."""
        self._source, self._num_drawn = self._tasks, 0
        if own:
            draw = random.Random(f"{self._settings.seed} {title}")
            self._source = _repeat_shuffled([Task(**task) for task in own], draw)
            cursor = await self._queue.noted("cursor") or {}
            if cursor.get("stage") == self._stage_number:
                self._num_drawn = cursor["num_drawn"]
                next(itertools.islice(self._source, self._num_drawn, self._num_drawn), None)

    async def _restore_groups(self, own: Sequence[Mapping[str, Any]] | None) -> None:
        """Restore the groups that were admitted before a restart.

        Finished groups stay in the queue unless they are too stale; all others are rolled out
        again. A stage with its own tasks restores only their groups and leaves those of an earlier
        stage to a later one.
        """
        ids = None if own is None else {task["id"] for task in own}

        def is_ours(group: QueuedGroup) -> bool:
            return ids is None or group.task.id in ids

        again = []
        for group in filter(is_ours, await self._queue.finished_groups()):
            if not self._slots.has_room_for(group.version):
                again.append(group)
            else:
                self._slots.admit(group.number, version=group.version, finished=True)
                self._num_left -= 1
        again += filter(is_ours, await self._queue.open_groups())
        self._readmitted = deque(sorted(again, key=lambda group: group.number))

    async def _filter_tasks(self, stage: StageSettings) -> list[Task]:
        """Roll out the next tasks and return those that some rollout fails.

        A task without any reward is kept, too. Raises _Drained.
        """
        tasks = list(itertools.islice(self._tasks, stage.filter_tasks))
        groups = await self._groups(
            tasks,
            f"{self.step}-filter",
            size=stage.filter_rollouts,
            what="the tasks to be filtered",
            may_begin=self._wait_while_paused,
        )
        left = []
        for task, group in groups:
            rewards = [one["reward"] for one in group.figures["rollouts"]]
            values = [reward for reward in rewards if reward is not None]
            if not values or min(values) <= 0:
                left.append(task)
        if not await self._is_recorded("filter/num_tasks"):
            self._record(
                {"step": self.step, "filter/num_tasks": len(tasks), "filter/num_left": len(left)}
            )
        self._say(
            f"{len(left)} of {len(tasks)} tasks are kept: not all of their "
            f"{stage.filter_rollouts} rollouts solve them"
        )
        return left

    async def _wait_while_paused(self) -> None:
        """Wait while the run is paused. Raises _Drained."""
        await self._until(
            lambda: not self.is_paused or self.is_draining,
            "the filter",
            lambda: "the run to be resumed (paused)",
        )
        if self.is_draining:
            raise _Drained

    # --- rollouts ---------------------------------------------------------------------------------

    async def _admit(self) -> None:
        """Start groups while there is capacity."""
        async with anyio.create_task_group() as groups:
            while True:
                await self._until(self._may_admit, "the next task", self._blocked_by)
                await self._rollouts.wait_for_capacity(self._settings.group_size)
                if not self._may_admit():  # paused or drained meanwhile
                    continue
                group = await self._next_group()
                self._slots.admit(group.number)
                self._num_left -= 1
                await groups.start(self._roll_out, group)

    def _may_admit(self) -> bool:
        if self._num_left < 1 or self._slots.room < 1 or self.is_paused or self.is_draining:
            return False
        # A batch must always become complete, however large its groups are.
        is_needed = len(self._slots) < self._settings.prompts_per_step
        return is_needed or self._queue.num_bytes < self._settings.max_queue_bytes

    def _blocked_by(self) -> str:
        """Return a phrase that names the reason why no task can be admitted."""
        if self.is_draining:
            return "the end of the run (draining)"
        if self.is_paused:
            return "the run to be resumed (paused)"
        return "the end of the stage" if self._num_left < 1 else "a free slot"

    async def _next_group(self) -> QueuedGroup:
        """Admit the next group, with the version that is live when this returns.

        New weights may go live while the journal is being written.
        """
        if self._readmitted:
            group = await self._reopen(self._readmitted.popleft())
        else:
            task = next(self._source)
            self._num_drawn += self._source is not self._tasks
            version, cursor = self._slots.live, self._cursor()
            group = await self._queue.admit(task, version=version, cursor=cursor)
        while group.version != self._slots.live:
            group = await self._reopen(group)
        return group

    async def _reopen(self, group: QueuedGroup) -> QueuedGroup:
        version = self._slots.live
        await self._queue.reopen([group.number], version=version)
        return QueuedGroup(group.number, group.task, version)

    def _cursor(self) -> dict[str, Any]:
        """Return the positions of the task sources."""
        return {
            "tasks": self._tasks.cursor(),
            "stage": self._stage_number,
            "num_drawn": self._num_drawn,
        }

    async def _roll_out(self, group: QueuedGroup, *, task_status: TaskStatus[None]) -> None:
        """Roll out an admitted group and put it into the queue."""
        number, s = group.number, self._settings
        is_queued = anyio.Event()

        def on_queued() -> None:
            if not is_queued.is_set():
                is_queued.set()
                task_status.started()

        path, num_bytes = None, 0
        figures: Mapping[str, Any] = {"rejected": None, "rollouts": []}
        try:
            rolled = await self._rollouts.group(
                group.task,
                str(number),
                size=s.group_size,
                budget=self._budget,
                oldest=group.version,
                on_queued=on_queued,
            )
        except RequestError as error:  # the task is invalid
            has_signal = False
            self._count_refused(group.task, error)
        else:
            self._num_refused = 0
            has_signal, figures = rolled.has_signal, rolled.figures
            header = {"group": number, "version": group.version}
            path, num_bytes = await anyio.to_thread.run_sync(
                self._folder.add_group, number, [{**header, **row} for row in rolled.rows()]
            )
        if s.dynamic_sampling and not has_signal:
            await self._queue.discard(number, path=path, figures=figures)
            self._slots.discard(number)
            self._num_left += 1
            self._count_replaced()
        else:
            self._num_replaced = 0
            await self._queue.finish(number, path=path, num_bytes=num_bytes, figures=figures)
            self._slots.finish(number)
        on_queued()
        self._notify()

    def _count_refused(self, task: Task, error: RequestError) -> None:
        """Report an invalid task. Raises RequestError after too many in a row."""
        self._say(f"Skipped task {task.id}: {error}")
        self._num_refused += 1
        if self._num_refused >= self._settings.prompts_per_step:
            raise RequestError(
                f"{error} ({self._num_refused} tasks in a row were refused)"
            ) from error

    def _count_replaced(self) -> None:
        """Report when many groups in a row had to be replaced, which may go on for ever."""
        self._num_replaced += 1
        if self._num_replaced % (_MANY_REPLACED * self._settings.prompts_per_step) == 0:
            self._say(
                f"{self._num_replaced} groups in a row were replaced because all rewards within "
                "each group were equal (loop.dynamic_sampling)"
            )

    async def _groups(
        self,
        tasks: Sequence[Task],
        name: str,
        *,
        size: int,
        what: str,
        may_begin: Callable[[], Awaitable[None]] = anyio.lowlevel.checkpoint,
    ) -> list[tuple[Task, RolledOut]]:
        """Roll out a group for each task, in order, for evaluation or filtering."""
        total = len(tasks) * size
        self._pace.waits(f"the learner waits for {what}: 0 of {total}")
        with self._watch.waiting("the learner", what):
            return await in_order(
                self._rollouts,
                tasks,
                name,
                size=size,
                budget=self._budget,
                oldest=self.version,
                on_done=lambda num: self._pace.waits(
                    f"the learner waits for {what}: {num * size} of {total}"
                ),
                on_refused=lambda task, error: self._say(f"Skipped task {task.id}: {error}"),
                may_begin=may_begin,
            )

    # --- learning ---------------------------------------------------------------------------------

    async def _train_step(self, *, resets: bool) -> bool:
        """Train on the next batch; return False if there will be none because of draining."""
        begun = time.monotonic()
        numbers = await self._batch()
        if numbers is None:
            return False
        waited_s = time.monotonic() - begun
        learns = self._settings.learn
        notes = {"version": self.version, "resets": resets, "stage": self._stage_number}
        lease = await self._queue.lease(self.step + 1, numbers, notes | {"learns": learns})
        self._notify()  # space in the queue was freed
        metrics = self._step_metrics(lease) | {"wait_s": waited_s}
        if learns:
            self._pace.waits("the learner trains")
        metrics |= await self._steps.learn(lease)
        if metrics["num_learned"]:
            learned_s = time.monotonic()
            await self._publish()
            if self._settings.max_staleness == 0 or self._weights.transport == "group":
                self._pace.waits("waiting for the servers to load the new weights")
                await self._until_live()
            metrics["hand_over_s"] = time.monotonic() - learned_s
        else:
            self._slots.learned_nothing()
        self._notify()
        step_s = time.monotonic() - begun
        metrics |= {"step_s": step_s, **self._loaded, "loop_lag_s": self._watch.take_lag_s()}
        metrics["rollout_tokens_per_s"] = metrics["num_sampled_tokens"] / step_s
        await anyio.to_thread.run_sync(self._folder.add_metrics, metrics)
        self._emit(Measured(metrics))
        self._pace.stepped(metrics)
        self._report_step(metrics)
        if verdict := self._collapse.seen(metrics):
            await self._stop(verdict)
        return True

    async def _stop(self, verdict: Verdict) -> None:
        """End a collapsed run with the weights of the newest checkpoint before the collapse.

        Raises:
            RunCollapsed: always; the message says why, names the report and says how to continue.
        """
        checkpoints = self._folder.checkpoints
        good = checkpoint_before(verdict, checkpoints)
        path = self._folder.path / "collapse.md"
        rows = await anyio.to_thread.run_sync(self._folder.metrics)
        text = report(verdict, rows, checkpoints)
        await anyio.Path(path).write_text(text, "utf-8")
        advice = "there is no checkpoint from before the collapse: start a new run"
        if good is not None:
            await self._until_live()  # servers may be reading the weights that are removed
            await self._steps.go_back(checkpoints[good])
            advice = f"continue with `agentloop train --resume {self._folder.path} --from {good}`"
        raise RunCollapsed(
            f"the run has collapsed: {verdict.why}; {path} has the details; {advice}"
        )

    def _record(self, metrics: Mapping[str, Any]) -> None:
        self._folder.add_metrics(metrics)
        self._emit(Measured(metrics))

    async def _batch(self) -> list[int] | None:
        """Wait for a batch; return its groups' numbers, or None if there is none when draining."""
        found: list[list[int]] = []
        total = self._settings.prompts_per_step

        def is_there() -> bool:
            num_done = min(total, len(self._slots) - len(self._slots.open))
            self._pace.waits(f"the learner waits for rollouts: {num_done} of {total} groups")
            if (batch := self._slots.take()) is not None:
                found.append(batch)
            return bool(found) or (self.is_draining and not self._slots.open)

        await self._until(is_there, "the learner", lambda: "a batch of finished groups")
        return found[0] if found else None

    def _step_metrics(self, lease: Lease) -> dict[str, Any]:
        """Return the metrics of a step's rollouts, including groups that were replaced."""
        ages = [lease.notes["version"] - group.version for group in lease.groups]
        return {
            "step": lease.step,
            "stage": lease.notes["stage"],
            "version": lease.notes["version"],
            **about([group.figures or {} for group in (*lease.groups, *lease.replaced)]),
            "num_groups_replaced": len(lease.replaced),
            "staleness_mean": sum(ages) / len(ages),
            "staleness_max": max(ages),
        }

    def _record_repeated(self, lease: Lease, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a repeated step unless they were before. Runs in a thread."""
        if not any(row["step"] == lease.step and "reward" in row for row in self._folder.metrics()):
            row = {**self._step_metrics(lease), **metrics}
            self._folder.add_metrics(row)
            anyio.from_thread.run_sync(self._emit, Measured(row))

    # --- weights ----------------------------------------------------------------------------------

    async def _publish(self) -> None:
        """Publish the learner's weights and have them loaded."""
        begun = time.monotonic()
        self._published = await self._steps.publish(self._publisher)
        self._loaded["weights/publish_s"] = time.monotonic() - begun
        self._syncing_stale.cancel()  # load the new weights instead
        self._notify()

    async def _load(self) -> None:
        """Sync the newest published weights to the servers, whenever there are new ones."""
        while True:
            while self._published is None:
                await self._changed.wait()  # no deadline: until the learner has new weights
            published, self._published = self._published, None
            async with self._sync_lock:  # no deadline: loading has one, weights.timeout_s
                try:
                    synced = await self._sync(published)
                except LearnerLost:  # it takes part in a sync by group
                    await self._publish()
                    continue
                self._last_sync = synced
                await self._publisher.tidy()
            self._loaded |= {
                "weights/load_s": synced.seconds,
                "weights/num_servers": len(synced.loaded),
                "weights/num_failed": len(synced.failed),
                "weights/num_verified": synced.num_verified,
            }
            self._slots.now_live(int(published.version))
            self._emit(
                WeightsLoaded(published.version, synced.seconds, synced.loaded, [*synced.failed])
            )
            self._notify()

    async def _sync(self, published: PublishedWeights) -> SyncResult:
        """Sync weights, retrying while servers are restarted. Raises ServerError if all fail."""
        for left in reversed(range(_NUM_TRIES)):
            try:
                return await self._serving.sync(published, timeout_s=self._weights.timeout_s)
            except ServerError as error:
                if not left:
                    raise
                log.error("%s; trying again", error)
            await anyio.sleep(_SYNC_STALE_S)
        raise AssertionError

    async def _until_live(self) -> None:
        """Wait until servers have the learner's weights."""
        version = str(self.version)
        await self._until(
            lambda: self._last_sync is not None and self._last_sync.version == version,
            "everybody",
            lambda: f"servers to load version {version}",
        )

    async def _sync_stale(self) -> None:
        """Sync the current weights to servers that were restarted or failed at the last sync.

        Without it they would stay idle until the next sync, for ever if all servers are idle.
        """
        wait_s = _SYNC_STALE_S
        while True:
            await anyio.sleep(wait_s)
            if self.is_paused:  # a paused run does not count as stalled
                self._watch.moved()
            async with self._sync_lock:  # no deadline: loading has one, weights.timeout_s
                if self._last_sync is None:
                    continue
                with anyio.CancelScope() as self._syncing_stale:
                    timeout_s = self._weights.timeout_s
                    try:
                        done = await self._serving.sync_stale(self._last_sync, timeout_s=timeout_s)
                    except LearnerLost as error:  # it takes part in a sync by group
                        log.warning("servers still wait for their weights: %s", error)
                        done = True  # retry soon: the next request restarts the learner
                    wait_s = _SYNC_STALE_S if done else _RETRY_S

    # --- evaluation, waiting, reporting -----------------------------------------------------------

    async def _evaluate(self) -> None:
        if not self._held_out or await self._is_recorded("held_out/reward"):
            return
        name = f"{self.step}-held-out"
        found = await self._groups(self._held_out, name, size=1, what="held-out tasks")
        values = about([group.figures for _, group in found])
        metrics = {f"held_out/{name}": value for name, value in values.items()}
        self._record({"step": self.step, **metrics})
        reward = mean(metrics["held_out/reward"])
        self._pace.values |= {"held-out reward": reward}
        self._say(
            f"step {self.step}: held-out reward {reward}, "
            f"tool errors in correct {percent(metrics['held_out/tool_errors_in_correct'])}"
        )

    async def _is_recorded(self, name: str) -> bool:
        """Return whether this step's metrics already have this one, from before a restart."""
        rows = await anyio.to_thread.run_sync(self._folder.metrics)
        return any(row["step"] == self.step and name in row for row in rows)

    async def _until(
        self, condition: Callable[[], bool], who: str, what: Callable[[], str]
    ) -> None:
        """Wait until `condition` holds, reporting that `who` waits for `what`.

        Both are evaluated whenever something changes. `condition` is not evaluated again once it
        has held, since it may have side effects.
        """
        if condition():
            return
        while True:
            reported = what()
            with self._watch.waiting(who, reported):
                while what() == reported:
                    # no deadline: the awaited operation has its own, or ends the run
                    await self._changed.wait()
                    if condition():
                        return

    def _notify(self) -> None:
        self._watch.moved()
        self._changed.set()
        self._changed = anyio.Event()

    def _report_step(self, metrics: dict[str, Any]) -> None:
        self._say(
            f"step {self.step}/{self._pace.num_steps}: reward {mean(metrics['reward'])}, "
            f"tool errors in correct {percent(metrics['tool_errors_in_correct'])}, "
            f"{metrics.get('num_learned', 0)} of {metrics['num_rollouts']} rollouts trained on, "
            f"{metrics['rollout_tokens_per_s']:,.0f} tokens/s, {metrics['step_s']:.1f} s"
        )

    def _say(self, line: str) -> None:
        self._pace.report.say(line)


def _repeat_shuffled(tasks: Sequence[Task], draw: random.Random) -> Iterator[Task]:
    """Yield the tasks for ever, each epoch in a new random order."""
    while True:
        yield from draw.sample(tasks, len(tasks))
