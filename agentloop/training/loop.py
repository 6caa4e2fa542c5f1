"""The training loop: groups are admitted, rolled out and queued; the learner takes batch by batch.

    tasks ──room──> rollouts ──> rewards ──> Resample-on-Correct ──> queue ──batch──> learner
              ▲                                                                         │
              └── slots, freed when the weights are live ── servers load them <─────────┘

Who waits for what:

    admission   a free slot (staleness.py: how far the learner may be behind), bytes in the queue,
                room in the KV caches; freed by new weights that are live, by a group that is given
                back, by a batch that is taken
    learner     a batch: enough finished groups, and none left behind that would become too stale
    loading     weights that were published; the learner goes on meanwhile, where it may

With `max_staleness` 0 all of that goes in step, and every sample is of the newest policy. What has
been admitted, finished and leased stands in the queue's journal, so a run that was killed goes on
where it was: `restored` says after which step the learner's state is, and the batches since then
are done again, the same ones in the same order.
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
from agentloop.groups.queue import Group, GroupQueue, Lease
from agentloop.groups.staleness import Slots
from agentloop.groups.tasks import Task, TaskSource
from agentloop.training.collapse import (
    Collapse,
    CollapseSettings,
    RunCollapsed,
    Verdict,
    checkpoint_before,
    report,
)
from agentloop.training.figures import about, mean, percent
from agentloop.training.handover import (
    Handover,
    Published,
    Serving,
    WeightsSettings,
    publisher,
)
from agentloop.training.learner import KeptLearner, Learner, LearnerLost, LearnerRefused
from agentloop.training.loop_settings import LoopSettings, StageSettings
from agentloop.training.pace import Pace
from agentloop.training.rollouts import RolledOut, RollsOut, in_order
from agentloop.training.run_folder import RunFolder
from agentloop.training.standing import Report, Unwatched, Watch
from agentloop.training.steps import Steps

__all__ = ["TrainingLoop"]

log = logging.getLogger(__name__)

_CLOSE_S = 60.0
_KEEP_UP_S = 1.0
_RETRY_S = 30.0  # of servers that cannot load them
_MANY_REPLACED = 10  # batches' worth of groups in a row: then it is told of
_NUM_TRIES = 3  # of a hand-over: it waits for servers that are started again


class _Drained(Exception):
    """What was asked for is not begun any more."""


@dataclass(slots=True)
class _Begun:
    """A checkpoint that somebody waits for."""

    event: anyio.Event = field(default_factory=anyio.Event)
    step: int | None = 0  # None: it could not be begun


class TrainingLoop:
    """What is needed for `run`, and where it stands."""

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
        report: Report,
        stages: Mapping[str, StageSettings] | None = None,
        budget: Budget | None = None,
        weights: WeightsSettings | None = None,
        restored: Mapping[str, Any] | None = None,
        kept: KeptLearner | None = None,
        max_restarts: int = 0,
        collapse: CollapseSettings | None = None,
        watch: Watch | None = None,
        emit: Emit = ignore,
    ) -> None:
        """`tasks` are where the queue's cursor says; `restored` is what the learner has loaded
        (`load_newest`); `kept` is it, where it may be started again, so often in ten minutes;
        `emit` is told of metrics and of weights."""
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
        self._published: Published | None = None  # what is to be loaded
        self._handover: Handover | None = None
        self._handing_over = anyio.Lock()
        self._keeping_up = anyio.CancelScope()
        self._loaded: dict[str, Any] = {}  # how the last loading went
        self._changed = anyio.Event()
        self._slots = Slots(settings.max_staleness, settings.tasks_per_step)
        self._source: Iterator[Task] = tasks
        self._stage_number = 0
        self._num_drawn = 0  # of a stage's own tasks
        self._again: deque[Group] = deque()  # admitted before a restart
        self._num_left = 0  # tasks of this stage to be admitted
        self._num_refused = self._num_replaced = 0  # in a row
        self._watch = watch or Unwatched()
        self._emit = emit
        self.is_paused = self.is_draining = False
        self._to_save: list[_Begun] = []
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
        """The last one that is done."""
        return self._steps.step

    @property
    def version(self) -> int:
        """Of the learner's weights."""
        return self._steps.version

    # --- what people ask of it ----------------------------------------------------------------

    def pause(self, paused: bool = True) -> None:
        """Admit no further groups, or admit them again; what runs goes on."""
        self.is_paused = paused
        self._tell_all()

    def drain(self) -> None:
        """Admit no further groups; when those in flight have ended, and what can be learned is
        learned, `run` ends with a checkpoint, from which the run can be gone on with."""
        self.is_draining = True
        self._tell_all()

    async def save(self) -> int:
        """Have a checkpoint begun, now or after the step at hand; returns its step. Where there is
        one of that step, nothing is done.

        Raises:
            LearnerRefused: it could not be begun.
        """
        begun = _Begun()
        self._to_save.append(begun)
        self._tell_all()
        await begun.event.wait()  # no deadline: the learner's answers have one, or end the run
        if begun.step is None:
            raise LearnerRefused("no checkpoint could be begun; the run goes on, and says why")
        return begun.step

    def view(self) -> dict[str, Any]:
        """Where it stands, for a page: plain numbers by their names."""
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
        """Checkpoints that people ask for, in a task of the run's: who asks may leave, and a
        learner that is started again just then must be brought to where it was all the same."""
        while True:
            while not self._to_save:
                await self._changed.wait()  # no deadline: until somebody asks
            asked, self._to_save = self._to_save, []
            is_begun = await self._steps.checkpoint()
            for one in asked:
                one.step = self.step if is_begun else None
                one.event.set()

    async def run(self) -> None:
        """To the last step.

        Raises:
            LearnerError, ServerError, RewardError: what cannot be gone on from.
        """
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._load)
                tasks.start_soon(self._keep_up)
                tasks.start_soon(self._save)
                tasks.start_soon(self._steps.watch)
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
        if self.step:
            self._say(f"Going on after step {self.step}, of which there is a checkpoint")
        await self._steps.do_again(self._tell_again)
        rows = await anyio.to_thread.run_sync(self._folder.metrics)
        self._collapse = Collapse.replay(self._collapse_settings, rows, step=self.step)
        self._slots = Slots(s.max_staleness, s.tasks_per_step, version=self.version)
        await self._publish()
        await self._until_live()
        if not self.step:
            await self._evaluate()
        for number, (name, stage) in enumerate(self._stages.items(), 1):
            title = f"stage {number} of {len(self._stages)}: {name}" if name else "training"
            await self._run_stage(number, title, stage)
            if self.is_draining:
                again = f"agentloop train --resume {self._folder.path}"
                self._say(f"Drained after step {self.step}; it goes on by: {again}")
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
            done = stage.steps  # it is over, also where it was told to be longer meanwhile
            self._pace.enter(title, stage.steps, done)
            return
        self._pace.enter(title, stage.steps, done)
        self._budget = stage.budget(self._usual_budget)
        if noted is not None and noted["tasks"] != [] and self.step == noted["begun"] + done:
            await self._after_step(done, stage)  # a kill may have come before
        if done == stage.steps:
            return
        if len(self._stages) > 1:
            self._say(f"{title[0].upper()}{title[1:]}, {stage.steps - done} steps")
        self._stage_number, self._num_drawn = number, 0
        if noted is None:
            try:
                tasks = await self._unsolved(stage) if stage.filter_tasks else None
            except _Drained:  # all of it is filtered anew when the run goes on
                return
            noted = await self._queue.begin_stage(
                number,
                step=self.step,
                tasks=None if tasks is None else [*map(asdict, tasks)],
                cursor=self._cursor(),
            )
        await self._find_tasks(noted["tasks"], title)
        if noted["tasks"] == []:
            self._say("Nothing is left to learn there: every task is solved each time")
            self._pace.skip()
            return
        self._slots = Slots(s.max_staleness, s.tasks_per_step, version=self.version)
        self._num_left = (stage.steps - done) * s.tasks_per_step
        await self._take_up(noted["tasks"])
        async with anyio.create_task_group() as tasks_:
            tasks_.start_soon(self._admit)
            for index in range(done, stage.steps):
                if not await self._train_step(resets=stage.reset_optimizer and not index):
                    break  # drained
                await self._after_step(index + 1, stage)
            await self._until_live()
            tasks_.cancel_scope.cancel()

    async def _after_step(self, done: int, stage: StageSettings) -> None:
        """What is due after so many steps of the stage, and was not done yet."""
        s = self._settings
        if s.evaluate_every and (done == stage.steps or self.step % s.evaluate_every == 0):
            await self._until_live()
            await self._evaluate()
        if s.learn and s.checkpoint_every and self.step % s.checkpoint_every == 0:
            await self._steps.checkpoint()

    async def _find_tasks(self, own: Sequence[Mapping[str, Any]] | None, title: str) -> None:
        """Where the stage's tasks come from: its own, over and over, from where it was."""
        self._source, self._num_drawn = self._tasks, 0
        if own:
            draw = random.Random(f"{self._settings.seed} {title}")
            self._source = _over_and_over([Task(**task) for task in own], draw)
            cursor = await self._queue.noted("cursor") or {}
            if cursor.get("stage") == self._stage_number:
                self._num_drawn = cursor["num_drawn"]
                next(itertools.islice(self._source, self._num_drawn, self._num_drawn), None)

    async def _take_up(self, own: Sequence[Mapping[str, Any]] | None) -> None:
        """What was admitted before a restart: finished groups wait on, where they are not too old;
        the others are rolled out anew. A stage with tasks of its own takes up those alone: what a
        stage before it had left over is for one after it."""
        ids = None if own is None else {task["id"] for task in own}

        def is_ours(group: Group) -> bool:
            return ids is None or group.task.id in ids

        again = []
        for group in filter(is_ours, await self._queue.finished_groups()):
            if not self._slots.has_room_for(group.version):
                again.append(group)
            else:
                self._slots.admit(group.number, version=group.version, finished=True)
                self._num_left -= 1
        again += filter(is_ours, await self._queue.open_groups())
        self._again = deque(sorted(again, key=lambda group: group.number))

    async def _unsolved(self, stage: StageSettings) -> list[Task]:
        """Of the next tasks, those that a rollout fails. One without any reward stays, too. Raises
        _Drained."""
        tasks = list(itertools.islice(self._tasks, stage.filter_tasks))
        groups = await self._groups(
            tasks,
            f"{self.step}-filter",
            size=stage.filter_rollouts,
            what="the tasks to be filtered",
            may_begin=self._may_filter,
        )
        left = []
        for task, group in groups:
            rewards = [one["reward"] for one in group.figures["rollouts"]]
            values = [reward for reward in rewards if reward is not None]
            if not values or min(values) <= 0:
                left.append(task)
        if not await self._is_told("filter/num_tasks"):
            self._measured(
                {"step": self.step, "filter/num_tasks": len(tasks), "filter/num_left": len(left)}
            )
        self._say(
            f"{len(left)} of {len(tasks)} tasks are not solved by "
            f"{stage.filter_rollouts} of {stage.filter_rollouts} rollouts"
        )
        return left

    async def _may_filter(self) -> None:
        """Wait while it is paused. Raises _Drained."""
        await self._until(
            lambda: not self.is_paused or self.is_draining,
            "the filter",
            lambda: "to go on (paused)",
        )
        if self.is_draining:
            raise _Drained

    # --- rollouts ---------------------------------------------------------------------------------

    async def _admit(self) -> None:
        """Start groups while there is room."""
        async with anyio.create_task_group() as groups:
            while True:
                await self._until(self._may_admit, "the next task", self._hindrance)
                await self._rollouts.has_room(self._settings.group_size)
                if not self._may_admit():  # it was paused, or drained, meanwhile
                    continue
                group = await self._next_group()
                self._slots.admit(group.number)
                self._num_left -= 1
                await groups.start(self._roll_out, group)

    def _may_admit(self) -> bool:
        if self._num_left < 1 or self._slots.room < 1 or self.is_paused or self.is_draining:
            return False
        # A batch must always come about, however large its groups are.
        is_needed = len(self._slots) < self._settings.tasks_per_step
        return is_needed or self._queue.num_bytes < self._settings.max_queue_bytes

    def _hindrance(self) -> str:
        """What the next task waits for."""
        if self.is_draining:
            return "the end of the run (draining)"
        if self.is_paused:
            return "to go on (paused)"
        return "the end of the stage" if self._num_left < 1 else "a free slot"

    async def _next_group(self) -> Group:
        """Admitted under the weights that are live as this returns: others may become so while the
        journal is written."""
        if self._again:
            group = await self._reopened(self._again.popleft())
        else:
            task = next(self._source)
            self._num_drawn += self._source is not self._tasks
            version, cursor = self._slots.live, self._cursor()
            group = await self._queue.admit(task, version=version, cursor=cursor)
        while group.version != self._slots.live:
            group = await self._reopened(group)
        return group

    async def _reopened(self, group: Group) -> Group:
        version = self._slots.live
        await self._queue.reopen([group.number], version=version)
        return Group(group.number, group.task, version)

    def _cursor(self) -> dict[str, Any]:
        """Where the sources of tasks are."""
        return {
            "tasks": self._tasks.cursor(),
            "stage": self._stage_number,
            "num_drawn": self._num_drawn,
        }

    async def _roll_out(self, group: Group, *, task_status: TaskStatus[None]) -> None:
        """A group from its admission to the queue."""
        number, s = group.number, self._settings
        stands = anyio.Event()

        def at_gate() -> None:
            if not stands.is_set():
                stands.set()
                task_status.started()

        path, num_bytes = None, 0
        told: Mapping[str, Any] = {"rejected": None, "rollouts": []}
        try:
            rolled = await self._rollouts.group(
                group.task,
                str(number),
                size=s.group_size,
                budget=self._budget,
                oldest=group.version,
                at_gate=at_gate,
            )
        except RequestError as error:  # a mistake in the data
            teaches = False
            self._refused(group.task, error)
        else:
            self._num_refused = 0
            teaches, told = rolled.teaches, rolled.figures
            about_it = {"group": number, "version": group.version}
            path, num_bytes = await anyio.to_thread.run_sync(
                self._folder.add_group, number, [{**about_it, **row} for row in rolled.rows()]
            )
        if s.dynamic_sampling and not teaches:
            await self._queue.give_back(number, path=path, figures=told)
            self._slots.give_back(number)
            self._num_left += 1
            self._replaced()
        else:
            self._num_replaced = 0
            await self._queue.finish(number, path=path, num_bytes=num_bytes, figures=told)
            self._slots.finish(number)
        at_gate()
        self._tell_all()

    def _refused(self, task: Task, error: RequestError) -> None:
        """One that is refused is a pity, all are a mistake. Raises RequestError."""
        self._say(f"Left out: task {task.id}: {error}")
        self._num_refused += 1
        if self._num_refused >= self._settings.tasks_per_step:
            raise RequestError(
                f"{error}, and so it is with all of {self._num_refused} tasks, one after the other"
            ) from error

    def _replaced(self) -> None:
        """It may go on like that for ever, but not in silence."""
        self._num_replaced += 1
        if self._num_replaced % (_MANY_REPLACED * self._settings.tasks_per_step) == 0:
            self._say(
                f"Nothing to learn from: {self._num_replaced} groups in a row were replaced, for "
                "all of a group's rewards were equal (loop.dynamic_sampling)"
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
        """Groups that are not trained on."""
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
                on_refused=lambda task, error: self._say(f"Left out: task {task.id}: {error}"),
                may_begin=may_begin,
            )

    # --- learning ---------------------------------------------------------------------------------

    async def _train_step(self, *, resets: bool) -> bool:
        """False: there will be no batch any more."""
        begun = time.monotonic()
        numbers = await self._batch()
        if numbers is None:
            return False
        waited_s = time.monotonic() - begun
        learns = self._settings.learn
        notes = {"version": self.version, "resets": resets, "stage": self._stage_number}
        lease = await self._queue.lease(self.step + 1, numbers, notes | {"learns": learns})
        self._tell_all()  # bytes are free
        metrics = self._about(lease) | {"wait_s": waited_s}
        if learns:
            self._pace.waits("the learner learns")
        metrics |= await self._steps.learn(lease)
        if metrics["num_learned"]:
            learned_s = time.monotonic()
            await self._publish()
            if self._settings.max_staleness == 0 or self._weights.by == "group":
                self._pace.waits("everybody waits for the new weights to be loaded")
                await self._until_live()
            metrics["hand_over_s"] = time.monotonic() - learned_s
        else:
            self._slots.learned_nothing()
        self._tell_all()
        step_s = time.monotonic() - begun
        metrics |= {"step_s": step_s, **self._loaded, "loop_lag_s": self._watch.take_lag_s()}
        metrics["rollout_tokens_per_s"] = metrics["num_sampled_tokens"] / step_s
        await anyio.to_thread.run_sync(self._folder.add_metrics, metrics)
        self._emit(Measured(metrics))
        self._pace.stepped(metrics)
        self._tell(metrics)
        if verdict := self._collapse.seen(metrics):
            await self._stop(verdict)
        return True

    async def _stop(self, verdict: Verdict) -> None:
        """The run has collapsed: it ends with the weights of before.

        Raises:
            RunCollapsed: says why, where the report is, and how to go on.
        """
        checkpoints = self._folder.checkpoints
        good = checkpoint_before(verdict, checkpoints)
        path = self._folder.path / "collapse.md"
        rows = await anyio.to_thread.run_sync(self._folder.metrics)
        text = report(verdict, rows, checkpoints)
        await anyio.Path(path).write_text(text, "utf-8")
        again = "no checkpoint is from before it"
        if good is not None:
            await self._until_live()  # servers may be reading what is removed
            await self._steps.go_back(checkpoints[good])
            again = f"go on with `agentloop train --resume {self._folder.path} --from {good}`"
        raise RunCollapsed(f"the run has collapsed: {verdict.why}; {path} says more; {again}")

    def _measured(self, metrics: Mapping[str, Any]) -> None:
        self._folder.add_metrics(metrics)
        self._emit(Measured(metrics))

    async def _batch(self) -> list[int] | None:
        """The numbers of its groups; None: it was drained, and there will be none."""
        found: list[list[int]] = []
        total = self._settings.tasks_per_step

        def is_there() -> bool:
            num_done = min(total, len(self._slots) - len(self._slots.open))
            self._pace.waits(f"the learner waits for rollouts: {num_done} of {total} groups")
            if (batch := self._slots.take()) is not None:
                found.append(batch)
            return bool(found) or (self.is_draining and not self._slots.open)

        await self._until(is_there, "the learner", lambda: "a batch of finished groups")
        return found[0] if found else None

    def _about(self, lease: Lease) -> dict[str, Any]:
        """The figures of a step, with those of the groups that others replaced."""
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

    def _tell_again(self, lease: Lease, metrics: Mapping[str, Any]) -> None:
        """Of a step that was done again: what a kill has kept from being told. In a thread."""
        if not any(row["step"] == lease.step and "reward" in row for row in self._folder.metrics()):
            row = {**self._about(lease), **metrics}
            self._folder.add_metrics(row)
            anyio.from_thread.run_sync(self._emit, Measured(row))

    # --- weights ----------------------------------------------------------------------------------

    async def _publish(self) -> None:
        """What the learner has is what servers are to have."""
        begun = time.monotonic()
        self._published = await self._steps.publish(self._publisher)
        self._loaded["weights/publish_s"] = time.monotonic() - begun
        self._keeping_up.cancel()  # one that takes long is given the new ones instead
        self._tell_all()

    async def _load(self) -> None:
        """Give the servers what was published last, whenever there is something new."""
        while True:
            while self._published is None:
                await self._changed.wait()  # no deadline: until the learner has learned
            published, self._published = self._published, None
            async with self._handing_over:  # no deadline: loading has one, weights.timeout_s
                try:
                    handover = await self._given(published)
                except LearnerLost:  # by group it has a part in it
                    await self._publish()
                    continue
                self._handover = handover
                await self._publisher.tidy()
            self._loaded |= {
                "weights/load_s": handover.seconds,
                "weights/num_servers": len(handover.loaded),
                "weights/num_failed": len(handover.failed),
                "weights/num_verified": handover.num_verified,
            }
            self._slots.now_live(int(published.version))
            self._emit(
                WeightsLoaded(
                    published.version, handover.seconds, handover.loaded, [*handover.failed]
                )
            )
            self._tell_all()

    async def _given(self, published: Published) -> Handover:
        """Raises ServerError: nobody could load them, nor after servers that died with it were
        started again."""
        for left in reversed(range(_NUM_TRIES)):
            try:
                return await self._serving.hand_over(published, timeout_s=self._weights.timeout_s)
            except ServerError as error:
                if not left:
                    raise
                log.error("%s; it is tried again", error)
            await anyio.sleep(_KEEP_UP_S)
        raise AssertionError

    async def _until_live(self) -> None:
        """Wait until servers have the learner's weights."""
        version = str(self.version)
        await self._until(
            lambda: self._handover is not None and self._handover.version == version,
            "everybody",
            lambda: f"servers to load version {version}",
        )

    async def _keep_up(self) -> None:
        """Give the weights to servers that come back, while rollouts go on: without it nobody
        would, before the next hand-over, and where there is no other server there would be none."""
        wait_s = _KEEP_UP_S
        while True:
            await anyio.sleep(wait_s)
            if self.is_paused:  # that nothing moves is as somebody wants it
                self._watch.moved()
            async with self._handing_over:  # no deadline: loading has one, weights.timeout_s
                if self._handover is None:
                    continue
                with anyio.CancelScope() as self._keeping_up:
                    timeout_s = self._weights.timeout_s
                    try:
                        done = await self._serving.keep_up(self._handover, timeout_s=timeout_s)
                    except LearnerLost as error:  # by group it has a part in it
                        log.warning("servers wait for their weights: %s", error)
                        done = True  # soon again: whoever needs the learner starts it again
                    wait_s = _KEEP_UP_S if done else _RETRY_S

    # --- the rest ---------------------------------------------------------------------------------

    async def _evaluate(self) -> None:
        if not self._held_out or await self._is_told("held_out/reward"):
            return
        name = f"{self.step}-held-out"
        found = await self._groups(self._held_out, name, size=1, what="held-out tasks")
        told = about([group.figures for _, group in found])
        metrics = {f"held_out/{name}": value for name, value in told.items()}
        self._measured({"step": self.step, **metrics})
        reward = mean(metrics["held_out/reward"])
        self._pace.values |= {"held-out reward": reward}
        self._say(
            f"step {self.step}: held-out reward {reward}, "
            f"tool errors in correct {percent(metrics['held_out/tool_errors_in_correct'])}"
        )

    async def _is_told(self, name: str) -> bool:
        """Whether it was, of this step, before a restart."""
        rows = await anyio.to_thread.run_sync(self._folder.metrics)
        return any(row["step"] == self.step and name in row for row in rows)

    async def _until(
        self, condition: Callable[[], bool], who: str, what: Callable[[], str]
    ) -> None:
        """`who` waits for `what`; both are asked again whenever something has changed, and the
        condition not once more where it has held: it may have taken what it has found."""
        if condition():
            return
        while True:
            told = what()
            with self._watch.waiting(who, told):
                while what() == told:
                    # no deadline: what is waited for has its own, or ends the run
                    await self._changed.wait()
                    if condition():
                        return

    def _tell_all(self) -> None:
        self._watch.moved()
        self._changed.set()
        self._changed = anyio.Event()

    def _tell(self, metrics: dict[str, Any]) -> None:
        self._say(
            f"step {self.step}/{self._pace.num_steps}: reward {mean(metrics['reward'])}, "
            f"tool errors in correct {percent(metrics['tool_errors_in_correct'])}, "
            f"{metrics.get('num_learned', 0)} of {metrics['num_rollouts']} rollouts learned, "
            f"{metrics['rollout_tokens_per_s']:,.0f} tokens/s, {metrics['step_s']:.1f} s"
        )

    def _say(self, line: str) -> None:
        self._pace.report.say(line)


def _over_and_over(tasks: Sequence[Task], draw: random.Random) -> Iterator[Task]:
    """Each epoch in an order of its own."""
    while True:
        yield from draw.sample(tasks, len(tasks))
