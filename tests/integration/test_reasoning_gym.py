"""The real reasoning-gym: its tasks, and its scorers in a sandbox of local processes."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path

import pytest

from agentloop.environments.adapters.reasoning_gym import puzzle
from agentloop.environments.rewards.reward import Grader, RewardSettings
from agentloop.environments.tasks.sources import TaskSource, TasksSettings
from agentloop.errors import SettingsError
from agentloop.sandbox import Pool, PoolSettings
from agentloop.trajectory import StopReason, Trajectory, Turn
from tests.agentloop.environments.adapters.scripted import Scripted, play, task_of
from tests.commands import run_python

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def is_installed() -> None:
    if importlib.util.find_spec("reasoning_gym") is None:
        pytest.fail("reasoning-gym is missing: pip install reasoning-gym", pytrace=False)


def settings(*families: str) -> TasksSettings:
    return TasksSettings(kind="reasoning_gym", families=list(families), size=5, shuffle=False)


def answered(text: str) -> Trajectory:
    return Trajectory("t", [1], [Turn(text=f"<answer>{text}</answer>")], StopReason.ANSWERED)


async def test_families_are_tasks() -> None:
    tasks = list(itertools.islice(TaskSource.open(settings("chain_sum", "countdown")), 10))
    assert {task.source for task in tasks} == {
        "reasoning_gym/chain_sum", "reasoning_gym/countdown"
    }  # fmt: skip
    assert all(task.answer for task in tasks)
    with pytest.raises(SettingsError, match="'no_such_family'"):
        TaskSource.open(settings("no_such_family"))


async def test_another_right_answer_is_right_and_junk_is_not() -> None:
    """countdown evaluates its answers, and gives junk a little."""
    task = next(TaskSource.open(settings("countdown")))
    pool_settings = PoolSettings(backend="process", workers=1)
    async with Pool(pool_settings) as pool:
        async with Grader(RewardSettings(function="exact", timeout_s=120), pool=pool) as grader:
            for text, value in [
                (task.answer, 1.0),
                (f"0 + {task.answer}", 0.0),  # 0 is none of the numbers
                (f"({task.answer})", 1.0),
                ("junk", 0.0),
                ("__import__('os')._exit(0)", 0.0),
                ("__import__('os')._exit(1)", 0.0),
                ("__import__('os').abort()", 0.0),
                ("[0] * 10**10", 0.0),
            ]:
                result = await grader.score(answered(text), task)
                assert result.value == value, (text, result)


def saying(text: str, pool: Pool) -> Scripted:
    return Scripted(lambda seen: text, pool)


async def test_adapter_makes_puzzles_and_gives_their_scores() -> None:
    options = {"countdown": {"min_numbers": 3, "max_numbers": 3}}
    made = puzzle.with_arguments({"families": ["countdown"], "options": options})
    task = task_of(made)
    assert task_of(made) == task != task_of(made, seed=1)
    async with Pool(PoolSettings(backend="process", workers=1)) as pool:
        for text, lowest, highest in [
            (task.answer, 1.0, 1.0),
            (f"({task.answer})", 1.0, 1.0),
            ("1 + 1", 0.0, 0.5),
            ("__import__('os')._exit(0)", 0.0, 0.0),
        ]:
            host = saying(f"<answer>{text}</answer>", pool)
            (episode,) = await play(made, host)
            assert episode.reward is not None
            assert episode.reward.value is not None
            assert lowest <= episode.reward.value <= highest, (text, episode.reward)


def test_adapter_is_evaluated(tmp_path: Path, sglang_url: str) -> None:
    settings = [
        "env=agentloop.environments.adapters.reasoning_gym:puzzle",
        'env.args.families=["chain_sum"]',
        "env.args.options.chain_sum.max_terms=2",
        "sandbox.backend=process",
        f'servers=["{sglang_url}"]',
        f"run.folder={tmp_path}",
        "run.name=run",
        "page=false",
        "evaluate.num_samples=2",
        "evaluate.num_tasks=2",
        "budget.max_response_tokens=300",
    ]
    run_python("-m", "agentloop", "evaluate", *settings)
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert (results["all"]["num_tasks"], results["all"]["num_missing"]) == (2, 0)
