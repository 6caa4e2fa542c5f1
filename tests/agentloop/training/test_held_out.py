"""Evaluation on held-out tasks, with a fake learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentloop.environments.tasks.sources import TaskSource
from tests.agentloop.training.loop_support import (
    ARITHMETIC,
    KilledRollouts,
    read_lines,
    run_loop,
    run_until_failure,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]  # each step is synced to the disk


async def test_a_run_without_steps_only_evaluates(tmp_path: Path) -> None:
    learner, run_group, run = await run_loop(tmp_path, steps=0, evaluate_every=0)
    assert [op for op, _ in learner.requests] == ["publish"]
    assert run_group.sizes == [1] * 4
    (metrics,) = read_lines(run.path / "metrics.jsonl")
    assert metrics["held_out/reward"] == 1.0


@pytest.mark.parametrize(("last", "again"), [("0-held-out", [0, 2]), ("2-held-out", [2])])
async def test_an_evaluation_is_recorded_once_after_a_kill(
    tmp_path: Path, last: str, again: list[int]
) -> None:
    tasks = TaskSource.open(ARITHMETIC)
    run_group = KilledRollouts(tasks)
    run_group.killed_at = last
    settings: dict[str, Any] = {"steps": 2, "evaluate_every": 2}
    await run_until_failure(tmp_path, tasks=tasks, run_group=run_group, **settings)
    learner, resumed, run = await run_loop(tmp_path, restored={"step": 0, "version": 0}, **settings)
    rows = read_lines(run.path / "metrics.jsonl")
    assert [row["step"] for row in rows if "held_out/reward" in row] == [0, 2]
    assert [row["step"] for row in rows if "reward" in row] == [1, 2]
    assert len(learner.batches) == 2
    assert sorted({int(n.split("-")[0]) for n in resumed.names if "held-out" in n}) == again
