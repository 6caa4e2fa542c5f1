"""A training run with several environments: its metrics, its evaluations, and how it goes on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from agentloop.environments.tasks.mixed import MixedTasks
from agentloop.environments.tasks.sources import TaskSource, TasksSettings
from agentloop.rollouts.metrics import GroupFigures, RolloutFigures, about_each, rewards_of_each
from agentloop.training.loop.queue import GroupQueue
from agentloop.training.loop.settings import StageSettings
from agentloop.trajectory import Trajectory
from tests.agentloop.training.loop_support import (
    FakeRollouts,
    KilledRollouts,
    read_lines,
    run_loop,
    run_until_failure,
)
from tests.fakes import RecordedProgress

pytestmark = pytest.mark.timeout(60)  # each step is synced to the disk


def mixed() -> MixedTasks:
    levels = {"easy": 1, "hard": 2}
    sources: dict[str, TaskSource] = {
        name: TaskSource.open(TasksSettings(levels=[level], held_out=4))
        for name, level in levels.items()
    }
    return MixedTasks(sources, {"easy": 2, "hard": 1})


class Mostly(FakeRollouts):
    """Solves easy tasks each time, and hard ones half of the time."""

    async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
        self._right = 1.0 if "easy" in options["name"] else 0.5
        return await super().__call__(prompt, **options)


async def test_each_environment_has_its_metrics_and_its_evaluation(tmp_path: Path) -> None:
    tasks, report = mixed(), RecordedProgress()
    _, _, run = await run_loop(
        tmp_path,
        tasks=tasks,
        run_group=Mostly(tasks),
        report=report,
        steps=2,
        evaluate_every=2,
        evaluate_tasks=3,
    )
    rows = read_lines(run.path / "metrics.jsonl")
    for row in (row for row in rows if "reward" in row):
        assert (row["env/easy/reward"], row["env/hard/reward"]) == (1.0, pytest.approx(4 / 7))
        assert (row["env/easy/num_rollouts"], row["env/hard/num_rollouts"]) == (16, 8)
        assert row["reward"] == pytest.approx((14 + 4) / 21)
        assert row["env/hard/length_mean"] == row["length_mean"]
    for row in (row for row in rows if "held_out/reward" in row):
        counts = [row[f"held_out/env/{name}/num_rollouts"] for name in ("easy", "hard")]
        assert counts == [3, 3]  # evaluate_tasks of each
        assert row["held_out/num_rollouts"] == 6
        assert {"held_out/env/easy/reward", "held_out/env/hard/pass_at_k"} <= row.keys()
    assert any("step 1/2: reward 0.857 (easy 1.000, hard 0.571), " in line for line in report.lines)
    assert any("held-out reward 1.000 (easy 1.000, hard 1.000), " in line for line in report.lines)


def test_run_with_one_environment_has_no_metrics_of_each() -> None:
    assert about_each([("", GroupFigures())]) == {}


def test_parts_of_a_reward_are_metrics() -> None:
    def group(*parts: dict[str, float]) -> GroupFigures:
        return GroupFigures([RolloutFigures(1.0, parts=values) for values in parts])

    alone = about_each([("", group({"found": 1.0}, {"found": 0.0, "quick": 0.5}))])
    assert alone == {"part/found": 0.5, "part/quick": 0.5}
    each = about_each([("guess", group({"reward": 0.25})), ("solve", group({}))])
    assert each["env/guess/part/reward"] == 0.25
    assert rewards_of_each(each) == " (guess 1.000, solve 1.000)"
    assert rewards_of_each(alone) == ""
    assert rewards_of_each({}) == ""


def test_recorded_measurements_of_scored_rollouts_are_metrics() -> None:
    rollouts = [
        RolloutFigures(1.0, recorded={"tries": 2.0}),
        RolloutFigures(0.0, recorded={"tries": 5.0, "reward": 9.0}),
        RolloutFigures(None, recorded={"tries": 100.0}),
    ]
    each = about_each([("guess", GroupFigures(rollouts))])
    assert each["env/guess/recorded/tries"] == 3.5
    assert rewards_of_each(each) == " (guess 0.500)"  # not what is recorded by that name
    alone = about_each([("", GroupFigures(rollouts))])
    assert alone == {"recorded/tries": 3.5, "recorded/reward": 9.0}


@pytest.mark.parametrize("steps", [1, 3])
async def test_resumed_run_goes_on_with_the_same_sequence(tmp_path: Path, steps: int) -> None:
    tasks = mixed()
    run_group = KilledRollouts(tasks)
    run_group.killed_at = f"{3 * steps + 2}-"  # a group of the next step
    settings: dict[str, Any] = {"steps": 5, "checkpoint_every": 1}
    await run_until_failure(tmp_path, tasks=tasks, run_group=run_group, **settings)
    async with GroupQueue.open(tmp_path / "run" / "queue.sqlite") as queue:
        cursor = (await queue.cursor())["tasks"]
    tasks = mixed()
    tasks.go_to(cursor)
    state = {"step": steps, "version": steps}
    _, resumed, _ = await run_loop(tmp_path, tasks=tasks, restored=state, **settings)
    expected = list(islice(mixed(), 15))
    numbered = [f"{number}-{task.id}" for number, task in enumerate(expected, 1)]
    # Besides the groups of the first steps, those that ended before the kill are not run again.
    done = [name for name in run_group.names if name not in resumed.names]
    assert done[: 3 * steps] == numbered[: 3 * steps]  # the id begins with the environment
    assert resumed.names == [name for name in numbered if name not in done]
    assert resumed.prompts == [
        task.prompt for task, name in zip(expected, numbered, strict=True) if name not in done
    ]
    assert Counter(task.env for task in expected) == {"easy": 10, "hard": 5}


async def test_stage_of_filtered_tasks_keeps_their_environments(tmp_path: Path) -> None:
    tasks = mixed()
    run_group = Mostly(tasks)
    stages = {"hard": StageSettings(steps=1, filter_tasks=6)}
    _, _, run = await run_loop(tmp_path, tasks=tasks, run_group=run_group, stages=stages)
    (row,) = [row for row in read_lines(run.path / "metrics.jsonl") if "reward" in row]
    assert row["env/hard/num_rollouts"] == row["num_rollouts"] == 24
    assert "env/easy/reward" not in row


def is_of_level_one(prompt: str) -> bool:
    return all(len(number) == 1 for number in re.findall(r"\d+", prompt))


class SolvesLevelOne(FakeRollouts):
    """Solves tasks whose numbers have one digit, and half of the others."""

    async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
        self._right = 1.0 if is_of_level_one(str(prompt)) else 0.5
        return await super().__call__(prompt, **options)


async def test_curriculum_chooses_within_each_environment(tmp_path: Path) -> None:
    """Easy tasks become rare within their environment, which keeps its share of the groups."""
    levels = {"calm": [1, 3], "hard": [3]}
    sources: dict[str, TaskSource] = {
        name: TaskSource.open(TasksSettings(levels=some)) for name, some in levels.items()
    }
    tasks = MixedTasks(sources, {"calm": 1, "hard": 1})
    run_group = SolvesLevelOne(tasks)
    await run_loop(
        tmp_path, tasks=tasks, run_group=run_group, steps=15, prompts_per_step=4, curriculum=True
    )
    drawn = Counter(name.split("-")[1] for name in run_group.names)
    assert drawn == {"calm": 30, "hard": 30}
    prompts = zip(run_group.names, run_group.prompts, strict=True)
    solved = [is_of_level_one(prompt) for name, prompt in prompts if "-calm-" in name]
    assert sum(solved[10:]) < len(solved[10:]) / 4
