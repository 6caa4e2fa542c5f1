"""Evaluation on held-out tasks, with a fake learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio.lowlevel
import pytest

from agentloop.agent.rollout import Budget
from agentloop.environments.tasks.sources import Task
from agentloop.errors import EnvironmentFailed, RequestError
from agentloop.rollouts.request import GroupRequest, Purpose
from agentloop.training.loop.held_out import roll_out_all
from agentloop.training.loop.settings import LoopSettings
from agentloop.training.run.context import RunContext
from tests.agentloop.training.loop_support import (
    KilledRollouts,
    read_lines,
    run_loop,
    run_until_failure,
)
from tests.fakes import RecordedProgress

pytestmark = pytest.mark.timeout(60)  # each step is synced to the disk


async def test_run_without_steps_only_evaluates(tmp_path: Path) -> None:
    learner, run_group, run = await run_loop(tmp_path, steps=0)
    assert [op for op, _ in learner.requests] == ["publish"]
    assert run_group.sizes == [1] * 4
    (metrics,) = read_lines(run.path / "metrics.jsonl")
    assert metrics["held_out/reward"] == 1.0


@pytest.mark.parametrize(("last", "again"), [("0-held-out", [0, 2]), ("2-held-out", [2])])
async def test_evaluation_is_recorded_once_after_a_kill(
    tmp_path: Path, last: str, again: list[int]
) -> None:
    run_group = KilledRollouts()
    run_group.killed_at = last
    settings: dict[str, Any] = {"steps": 2, "evaluate_every": 2}
    await run_until_failure(tmp_path, run_group=run_group, **settings)
    learner, resumed, run = await run_loop(tmp_path, restored={"step": 0, "version": 0}, **settings)
    rows = read_lines(run.path / "metrics.jsonl")
    assert [row["step"] for row in rows if "held_out/reward" in row] == [0, 2]
    assert [row["step"] for row in rows if "reward" in row] == [1, 2]
    assert len(learner.batches) == 2
    assert sorted({int(n.split("-")[0]) for n in resumed.names if "held-out" in n}) == again


OPTIONS: dict[str, Any] = {"size": 1, "budget": Budget(), "version": 0, "activity": "tasks"}


def context(rollouts: Any, report: RecordedProgress) -> RunContext:
    """Return a run without a journal and a folder."""
    nothing: Any = None

    async def wait_for_capacity(size: int) -> None:
        await anyio.lowlevel.checkpoint()

    return RunContext(
        LoopSettings(), nothing, rollouts, wait_for_capacity, nothing, nothing, report
    )


class ByTask:
    """Rolls out nothing; refuses the tasks with these ids."""

    def __init__(self, refused: set[str]) -> None:
        self.refused = refused
        self.begun: list[str] = []

    async def run(self, request: GroupRequest) -> Any:
        assert request.purpose is Purpose.EVALUATE
        self.begun.append(request.name)
        request.queued.set()
        if request.task.id in self.refused:
            raise RequestError(f"{request.task.id}: too long")
        return request.task.id


@pytest.mark.parametrize("refused", [set(), {"b"}, {"a", "b", "c"}])
async def test_groups_follow_the_order_of_accepted_tasks(refused: set[str]) -> None:
    tasks = [Task(key, "?", "") for key in "abc"]
    report, rollouts = RecordedProgress(), ByTask(refused)
    if len(refused) == len(tasks):
        with pytest.raises(RequestError, match="no valid task among 3"):
            await roll_out_all(context(rollouts, report), tasks, "name", **OPTIONS)
    else:
        groups = await roll_out_all(context(rollouts, report), tasks, "name", **OPTIONS)
        assert [task.id for task, _ in groups] == [key for key in "abc" if key not in refused]
    assert sorted(report.lines) == [
        f"Skipped task {key}: {key}: too long" for key in sorted(refused)
    ]
    assert report.statuses[-1].waits == f"tasks: {3 - len(refused)} of 3 rollouts"
    assert sorted(rollouts.begun) == ["name-0", "name-1", "name-2"]


async def test_environment_that_fails_on_every_task_is_reported() -> None:
    class Failing(ByTask):
        async def run(self, request: GroupRequest) -> Any:
            request.queued.set()
            raise EnvironmentFailed(f"environment game: {request.task.id}")

    report = RecordedProgress()
    tasks = [Task(key, "?", "") for key in "ab"]
    run = context(Failing(set()), report)
    assert await roll_out_all(run, tasks, "name", **OPTIONS) == []
    assert len(report.lines) == 2
