"""Rollouts that are not trained on: to evaluate held-out tasks, or to filter a stage's tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import anyio.lowlevel
import anyio.to_thread

from agentloop.agent.rollout import Budget
from agentloop.environments.tasks.sources import Task
from agentloop.rollouts.metrics import about, about_each, mean, percent, rewards_of_each
from agentloop.training.rollouts import RolledOut, in_order
from agentloop.training.run_context import RunContext

__all__ = ["HeldOutEval", "TaskRunner"]


class TaskRunner:
    """Rolls out a group for each of a list of tasks and shows how far it has come."""

    def __init__(self, run: RunContext) -> None:
        self._run = run

    async def roll_out(
        self,
        tasks: Sequence[Task],
        name: str,
        *,
        size: int,
        budget: Budget,
        version: int,
        what: str,
        may_begin: Callable[[], Awaitable[None]] = anyio.lowlevel.checkpoint,
    ) -> list[tuple[Task, RolledOut]]:
        """Roll out a group of `size` rollouts for each task; return them in the tasks' order.

        Tasks that are not valid requests are reported and left out.

        Args:
            name: name that determines all random choices.
            version: version of the weights that are live.
            what: description for the display.
            may_begin: waits until the next group may start.

        Raises:
            RequestError: no task is a valid request.
        """
        total = len(tasks) * size
        pace = self._run.pace
        pace.waits(f"the learner waits for {what}: 0 of {total}")
        with self._run.control.watch.waiting("the learner", what):
            return await in_order(
                self._run.rollouts,
                tasks,
                name,
                size=size,
                budget=budget,
                oldest=version,
                on_done=lambda num: pace.waits(
                    f"the learner waits for {what}: {num * size} of {total}"
                ),
                on_refused=lambda task, error: pace.report.say(f"Skipped task {task.id}: {error}"),
                may_begin=may_begin,
            )


class HeldOutEval:
    """Evaluates the policy on held-out tasks of each environment, with one rollout each."""

    def __init__(self, run: RunContext, runner: TaskRunner) -> None:
        self._run = run
        self._runner = runner
        self._tasks: Sequence[Task] = ()

    async def find_tasks(self) -> None:
        """Find the held-out tasks, which may take a generator long. Without any, say so."""
        held_out = self._run.tasks.held_out
        tasks = await anyio.to_thread.run_sync(held_out, abandon_on_cancel=True)
        self._tasks = _first_of_each(tasks, self._run.settings.evaluate_tasks)
        if not tasks:
            self._run.report.say(
                "There will be no evaluation: no tasks are held out (tasks.held_out)"
            )

    async def evaluate(self, *, step: int, version: int, budget: Budget) -> None:
        """Evaluate the weights of `version`, unless it was done after this step before a restart.

        Raises:
            RequestError: no held-out task is a valid request.
        """
        run = self._run
        if not self._tasks or await run.metrics.has(step, "held_out/reward"):
            return
        groups = await self._runner.roll_out(
            self._tasks,
            f"{step}-held-out",
            size=1,
            budget=budget,
            version=version,
            what="held-out tasks",
        )
        values = about([group.figures for _, group in groups])
        each = about_each((task.env, group.figures) for task, group in groups)
        row = {f"held_out/{name}": value for name, value in {**values.row(), **each}.items()}
        await run.metrics.add({"step": step, **row})
        reward = mean(values.reward)
        run.pace.values |= {"held-out reward": reward}
        run.report.say(
            f"step {step}: held-out reward {reward}{rewards_of_each(each)}, "
            f"tool errors in correct rollouts {percent(values.tool_errors_in_correct)}"
        )


def _first_of_each(tasks: Sequence[Task], number: int) -> list[Task]:
    """Return the first tasks of each environment, up to `number` of each."""
    first, num = [], Counter[str]()
    for task in tasks:
        num[task.env] += 1
        if num[task.env] <= number:
            first.append(task)
    return first
