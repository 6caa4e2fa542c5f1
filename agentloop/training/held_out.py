"""Rollouts that are not trained on: to evaluate held-out tasks, or to filter a stage's tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import anyio.lowlevel
import anyio.to_thread

from agentloop.agent.rollout import Budget
from agentloop.environments.tasks.sources import Task, TaskSource
from agentloop.rollouts.metrics import about, about_each, mean, percent, rewards_of_each
from agentloop.training.pace import Pace
from agentloop.training.rollouts import RolledOut, RollsOut, in_order
from agentloop.training.run_control import RunControl
from agentloop.training.step_metrics import MetricsLog

__all__ = ["HeldOutEval", "TaskRunner"]


class TaskRunner:
    """Rolls out a group for each of a list of tasks and shows how far it has come."""

    def __init__(self, rollouts: RollsOut, pace: Pace, control: RunControl) -> None:
        self._rollouts = rollouts
        self._pace = pace
        self._control = control

    async def run(
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
        self._pace.waits(f"the learner waits for {what}: 0 of {total}")
        with self._control.watch.waiting("the learner", what):
            return await in_order(
                self._rollouts,
                tasks,
                name,
                size=size,
                budget=budget,
                oldest=version,
                on_done=lambda num: self._pace.waits(
                    f"the learner waits for {what}: {num * size} of {total}"
                ),
                on_refused=lambda task, error: self._pace.report.say(
                    f"Skipped task {task.id}: {error}"
                ),
                may_begin=may_begin,
            )


class HeldOutEval:
    """Evaluates the policy on held-out tasks of each environment, with one rollout each."""

    def __init__(
        self,
        source: TaskSource,
        runner: TaskRunner,
        metrics: MetricsLog,
        pace: Pace,
        *,
        max_tasks: int,
    ) -> None:
        """
        Args:
            max_tasks: number of tasks of each environment.
        """
        self._source = source
        self._max_tasks = max_tasks
        self._tasks: Sequence[Task] = ()
        self._runner = runner
        self._metrics = metrics
        self._pace = pace

    async def find_tasks(self) -> None:
        """Find the held-out tasks, which may take a generator long. Without any, say so."""
        found = await anyio.to_thread.run_sync(self._source.held_out, abandon_on_cancel=True)
        self._tasks = _first_of_each(found, self._max_tasks)
        if not found:
            self._pace.report.say(
                "There will be no evaluation: no tasks are held out (tasks.held_out)"
            )

    async def evaluate(self, *, step: int, version: int, budget: Budget) -> None:
        """Evaluate the weights of `version`, unless it was done after this step before a restart.

        Raises:
            RequestError: no held-out task is a valid request.
        """
        if not self._tasks or await self._metrics.has(step, "held_out/reward"):
            return
        found = await self._runner.run(
            self._tasks,
            f"{step}-held-out",
            size=1,
            budget=budget,
            version=version,
            what="held-out tasks",
        )
        values = about([group.figures for _, group in found])
        each = about_each((task.env, group.figures) for task, group in found)
        both = {**values.row(), **each}
        row = {f"held_out/{name}": value for name, value in both.items()}
        await self._metrics.add({"step": step, **row})
        reward = mean(values.reward)
        self._pace.values |= {"held-out reward": reward}
        self._pace.report.say(
            f"step {step}: held-out reward {reward}{rewards_of_each(each)}, "
            f"tool errors in correct rollouts {percent(values.tool_errors_in_correct)}"
        )


def _first_of_each(tasks: Sequence[Task], number: int) -> list[Task]:
    """Return the first tasks of each environment, up to `number` of each."""
    found, num = [], Counter[str]()
    for task in tasks:
        num[task.env] += 1
        if num[task.env] <= number:
            found.append(task)
    return found
