"""Run a stage: find its tasks, admit and roll out groups, and have each batch learned.

    tasks ──(filter)──> _admit ──> _roll_out ──> buffer ──batch──> trainer (batch_trainer.py)

    _admit      consumes tasks; waits for a free slot (group_buffer.py), then for KV capacity;
                unblocked by weights going live, by groups that are discarded, by batches that are
                taken, and by the end of a pause
    _roll_out   consumes an admitted group; waits for its rollouts and rewards
    run         consumes batches; waits for enough finished groups; unblocked by `_roll_out`

A stage that was interrupted continues with its remaining steps, from the note that the journal has
of its beginning.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import anyio

from agentloop.aio import in_run_thread
from agentloop.environments.tasks.sources import Task
from agentloop.environments.tasks.task import problem_of
from agentloop.errors import RequestError
from agentloop.rollouts.metrics import GroupFigures
from agentloop.rollouts.open_group import OpenGroup
from agentloop.rollouts.request import GroupRequest, Purpose
from agentloop.training.loop.batch_trainer import BatchTrainer
from agentloop.training.loop.curriculum import FILTER_ROLLOUTS, NOT_SOLVED, Curriculum, GroupOutcome
from agentloop.training.loop.held_out import roll_out_all
from agentloop.training.loop.queue import QueuedGroup, StageNote
from agentloop.training.loop.settings import StageSettings
from agentloop.training.loop.stage_tasks import StageTasks
from agentloop.training.run.context import RunContext
from agentloop.training.run.control import Drained
from agentloop.training.run.status import count_of

_MANY_REPLACED = 10  # log a warning after this many batches' worth of replaced groups in a row


class StageRunner:
    """Runs the stages of a run, one after the other."""

    def __init__(self, run: RunContext, trainer: BatchTrainer) -> None:
        self._run = run
        self._trainer = trainer
        self._budget = run.budget
        self._num_replaced = 0  # groups in a row
        self._num_refused = Counter[str]()  # the same, by environment

    async def run(self, number: int, name: str, stage: StageSettings) -> None:
        """Run a stage, or what is left of it, until its last step or until the run is drained.

        Raises:
            RequestError: too many tasks in a row were not valid requests.
            LearnerError, ServerError, RewardError: a failure that the run cannot recover from.
        """
        run = self._run
        title = f"stage {number} of {len(run.stages)}: {name}" if name else "training"
        note = await run.queue.stage(number)
        done = 0 if note is None else min(self._trainer.step - note.step, stage.steps)
        if done and await run.queue.stage(number + 1) is not None:
            done = stage.steps  # the stage has ended, even if its setting was raised since then
            run.pace.enter(title, stage.steps, done)
            return
        run.pace.enter(title, stage.steps, done)
        self._budget = stage.budget(run.budget)
        if note is not None and note.tasks != [] and self._trainer.step == note.step + done:
            # in case the process was killed before it
            await self._trainer.after_step(is_last=done == stage.steps, budget=self._budget)
        if done == stage.steps:
            return
        if len(run.stages) > 1:
            steps = count_of(stage.steps - done, "step")
            run.report.say(f"{title[0].upper()}{title[1:]}, {steps}{' left' if done else ''}")
        tasks = StageTasks(run.tasks, number, run.curriculum)
        if note is None:
            try:
                note = await self._begin(number, stage, tasks)
            except Drained:  # a resumed run filters all tasks again
                return
        if note.tasks == []:
            run.report.say("The stage is skipped: every rollout solves its tasks")
            run.pace.skip()
            return
        ids = None
        if note.tasks:
            cursor = await run.queue.cursor()
            tasks.use(note.tasks, seed=f"{run.settings.seed} {title}", cursor=cursor)
            ids = {task.id for task in note.tasks}
        run.buffer.reset(self._trainer.version)
        num_groups = (stage.steps - done) * run.settings.prompts_per_step
        interrupted = await run.buffer.begin_stage(tasks, num_groups=num_groups, ids=ids)
        if interrupted.num_groups:
            run.report.say(interrupted.in_words(run.settings.group_size))
        self._trainer.begin_stage()
        async with anyio.create_task_group() as admitting:
            admitting.start_soon(self._admit)
            for index in range(done, stage.steps):
                if not await self._trainer.wait_for_batch():
                    break  # drained
                await self._trainer.train(number, resets=stage.reset_optimizer and not index)
                is_last = index + 1 == stage.steps
                await self._trainer.after_step(is_last=is_last, budget=self._budget)
            await self._trainer.until_live()
            admitting.cancel_scope.cancel()

    # --- tasks ------------------------------------------------------------------------------------

    async def _begin(self, number: int, stage: StageSettings, tasks: StageTasks) -> StageNote:
        """Filter the tasks if the stage does so and record its beginning. Raises Drained."""
        unsolved: list[Task] | None = None
        outcomes: list[tuple[str, GroupOutcome]] = []
        if stage.filter_tasks:
            unsolved, outcomes = await self._filter(stage, tasks)
        note = await self._run.queue.begin_stage(
            number,
            step=self._trainer.step,
            tasks=unsolved,
            cursor=tasks.cursor(),
            outcomes=outcomes,
        )
        tasks.observe(outcomes)
        return note

    async def _filter(
        self, stage: StageSettings, source: StageTasks
    ) -> tuple[list[Task], list[tuple[str, GroupOutcome]]]:
        """Roll out the next tasks; return those to train on, and the outcomes by their problems.

        A task is left out as soon as all of its rollouts solve it. Raises Drained.
        """
        step = self._trainer.step
        tasks = source.take(stage.filter_tasks)
        groups = await roll_out_all(
            self._run,
            tasks,
            f"{step}-filter",
            size=FILTER_ROLLOUTS,
            budget=self._budget,
            version=self._trainer.version,
            activity="the tasks to be filtered",
            may_begin=partial(self._run.control.wait_while_paused, "the filter"),
        )
        if not groups:
            raise RequestError("the environment failed on every task that was to be filtered")
        outcomes = [
            (problem_of(task), outcome)
            for task, group in groups
            if (outcome := GroupOutcome.of(group.figures)) is not None
        ]
        measured = Curriculum(NOT_SOLVED)
        measured.restore(outcomes, num_offered=0)
        unsolved = [task for task, _ in groups if not measured.is_retired(problem_of(task))]
        if not await self._run.metrics.has(step, "filter/num_tasks"):
            counts = {"filter/num_tasks": len(tasks), "filter/num_left": len(unsolved)}
            await self._run.metrics.add({"step": step, **counts})
        self._run.report.say(
            f"Kept {len(unsolved):,} of {count_of(len(tasks), 'task')}: the others were solved by "
            f"all of their {FILTER_ROLLOUTS} rollouts"
        )
        return unsolved, outcomes

    # --- rollouts ---------------------------------------------------------------------------------

    async def _admit(self) -> None:
        """Start groups while there is capacity."""
        async with anyio.create_task_group() as groups:
            while True:
                await self._run.control.wait_until(
                    self._may_admit, "the next task", self._blocked_by
                )
                await self._run.wait_for_capacity(self._run.settings.group_size)
                if self._may_admit():  # not paused or drained meanwhile
                    group = await self._run.buffer.admit()
                    request = GroupRequest(
                        group.task,
                        str(group.number),
                        self._run.settings.group_size,
                        self._budget,
                        group.version,
                        Purpose.TRAIN,
                        open_group=OpenGroup(
                            partial(self._run.queue.rolled_out.add, group.number),
                            await self._run.queue.rolled_out.of_group(group.number),
                        ),
                    )
                    groups.start_soon(self._roll_out, group, request)
                    await request.queued.wait()  # no deadline: encoding a prompt ends by itself

    def _may_admit(self) -> bool:
        control = self._run.control
        return self._run.buffer.can_admit and not control.is_paused and not control.is_draining

    def _blocked_by(self) -> str:
        """Return a phrase that names the reason why no task can be admitted."""
        if self._run.control.is_draining:
            return "the end of the run (draining)"
        if self._run.control.is_paused:
            return "the run to be resumed (paused)"
        return "the end of the stage" if self._run.buffer.num_left < 1 else "a free slot"

    async def _roll_out(self, group: QueuedGroup, request: GroupRequest) -> None:
        """Roll out an admitted group and pass it to the buffer."""
        path, num_bytes = None, 0
        figures = GroupFigures()
        try:
            rolled = await self._run.rollouts.run(request)
        except RequestError as error:  # the task is invalid
            self._count_refused(group.task, error)
        else:
            self._num_refused[group.task.env] = 0
            figures = rolled.figures
            first = f'{{"group":{group.number},"version":{group.version},'.encode()
            path, num_bytes = await in_run_thread(
                self._run.folder.add_lines,
                group.number,
                (first + line.removeprefix(b"{") for line in rolled.lines.splitlines()),
            )
        if self._run.settings.dynamic_sampling and not figures.has_signal:
            await self._run.buffer.discard(group, path=path, figures=figures)
            self._count_replaced()
        else:
            self._num_replaced = 0
            await self._run.buffer.finish(group, path=path, num_bytes=num_bytes, figures=figures)
        request.queued.set()

    def _count_refused(self, task: Task, error: RequestError) -> None:
        """Report an invalid task. Raises RequestError after too many in one environment."""
        self._run.report.say(f"Skipped task {task.id}: {error}")
        self._num_refused[task.env] += 1
        num = self._num_refused[task.env]
        if num >= self._run.settings.prompts_per_step:
            whose = f" of {task.env}" if task.env else ""
            raise RequestError(
                f"{error} ({count_of(num, 'task')}{whose} in a row refused)"
            ) from error

    def _count_replaced(self) -> None:
        """Report when many groups in a row had to be replaced, which may go on for ever."""
        self._num_replaced += 1
        if self._num_replaced % (_MANY_REPLACED * self._run.settings.prompts_per_step) == 0:
            self._run.report.say(
                f"{self._num_replaced} groups in a row were replaced because all rewards within "
                "each group were equal (loop.dynamic_sampling)"
            )
