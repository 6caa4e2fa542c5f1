"""Rollouts that are not trained on: to evaluate held-out tasks, or to filter a stage's tasks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import anyio
import anyio.lowlevel
import anyio.to_thread

from agentloop.agent.rollout import Budget
from agentloop.environments.tasks.sources import Task
from agentloop.errors import EnvironmentFailed, RequestError
from agentloop.rollouts.metrics import (
    GroupFigures,
    about,
    about_each,
    mean,
    percent,
    rewards_of_each,
)
from agentloop.rollouts.request import GroupRequest
from agentloop.rollouts.stream import finished_groups
from agentloop.training.rollouts import RolledOut
from agentloop.training.run.context import RunContext
from agentloop.trajectory import Trajectory


async def roll_out_all(
    run: RunContext,
    tasks: Sequence[Task],
    name: str,
    *,
    size: int,
    budget: Budget,
    version: int,
    activity: str,
    may_begin: Callable[[], Awaitable[None]] = anyio.lowlevel.checkpoint,
) -> list[tuple[Task, RolledOut]]:
    """Roll out a group of `size` rollouts for each task; return them in the order of the tasks.

    Tasks that are not valid requests, or on which the environment failed, are reported and left
    out.

    Args:
        name: name that determines all random choices.
        version: version of the weights that are live.
        activity: description for the display.
        may_begin: waits until the next group may start.

    Raises:
        RequestError: all tasks were refused, and not because the environment failed.
    """
    rolled_out: dict[int, tuple[Task, RolledOut]] = {}
    refused: RequestError | None = None
    num_rollouts = len(tasks) * size

    async def run_group(numbered: tuple[int, Task], queued: anyio.Event) -> Sequence[Trajectory]:
        number, task = numbered  # numbered, since a task may occur twice
        request = GroupRequest(task, f"{name}-{number}", size, budget, version, queued=queued)
        rolled_out[number] = task, await run.rollouts.run(request)
        return ()

    async def source() -> AsyncGenerator[tuple[int, Task], None]:
        for numbered in enumerate(tasks):
            await may_begin()
            yield numbered

    def show() -> None:
        num_done = len(rolled_out) * size
        run.pace.waits(f"{activity}: {num_done} of {num_rollouts} rollouts")

    show()
    wait_for_capacity = partial(run.wait_for_capacity, size)
    with run.control.watch.waiting("the learner", activity):
        async with finished_groups(
            source(), run_group, wait_for_capacity, max_open=max(1, len(tasks))
        ) as groups:
            async for group in groups:  # no deadline: each rollout has one
                if group.error is None:
                    show()
                    continue
                run.report.say(f"Skipped task {group.task[1].id}: {group.error}")
                if not isinstance(group.error, EnvironmentFailed):  # the task is invalid
                    refused = group.error
    if refused is not None and not rolled_out:  # skipping all tasks would hide a mistake
        raise RequestError(f"{refused} (no valid task among {len(tasks)})") from refused
    return [rolled_out[number] for number in sorted(rolled_out)]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The time that an evaluation took, and the tokens sampled in it; none if there was none."""

    seconds: float = 0.0
    num_tokens: int = 0


class HeldOutEval:
    """Evaluates the policy on held-out tasks of each environment, with one rollout each."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
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

    async def evaluate(self, *, step: int, version: int, budget: Budget) -> Evaluated:
        """Evaluate the weights of `version`, unless it was done after this step before a restart.

        Returns:
            What it took.

        Raises:
            RequestError: no held-out task is a valid request.
        """
        run = self._run
        if not self._tasks or await run.metrics.has(step, "held_out/reward"):
            return Evaluated()
        started_s = time.monotonic()
        groups = await roll_out_all(
            run,
            self._tasks,
            f"{step}-held-out",
            size=1,
            budget=budget,
            version=version,
            activity="held-out tasks",
        )
        # Nothing is selected from these groups, so none is rejected.
        figures = [(task.env, GroupFigures(group.figures.rollouts)) for task, group in groups]
        values = about([of_group for _, of_group in figures])
        each = about_each(figures)
        row = {f"held_out/{name}": value for name, value in {**values.row(), **each}.items()}
        evaluate_s = time.monotonic() - started_s
        await run.metrics.add({"step": step, **row, "held_out/evaluate_s": evaluate_s})
        reward = mean(values.reward)
        run.pace.values |= {"held-out reward": reward}
        run.report.say(
            f"step {step}: held-out reward {reward}{rewards_of_each(each)}, "
            f"tool errors in correct rollouts {percent(values.tool_errors_in_correct)}, "
            f"{evaluate_s:.1f} s"
        )
        return Evaluated(evaluate_s, values.num_sampled_tokens)


def _first_of_each(tasks: Sequence[Task], number: int) -> list[Task]:
    """Return the first tasks of each environment, up to `number` of each."""
    first, num = [], Counter[str]()
    for task in tasks:
        num[task.env] += 1
        if num[task.env] <= number:
            first.append(task)
    return first
