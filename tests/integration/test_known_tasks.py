"""Recipes that name a data set, on small ones with the same columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest

from agentloop.cli.data_check import check_data
from agentloop.config import load_settings
from agentloop.environments.tasks.sources import TaskSource
from agentloop.evaluation.wiring import EvaluateSettings, tasks_of
from agentloop.launch.settings import AskSettings

pytestmark = pytest.mark.timeout(120)

GSM8K = {"question": "{n} + {n}?", "answer": "{n} and {n} are <<{n}+{n}={twice}>>\n#### {twice}"}
MATH = {
    "problem": "What is ${n}+{n}$?",
    "level": "Level 5",
    "type": "Algebra",
    "solution": "It is $\\boxed{{{twice}}}$.",
}
MATH_500 = {**MATH, "answer": "{twice}", "subject": "Algebra", "level": 5, "unique_id": "test/{n}"}
AIME_2024 = {"id": 60, "problem": "{n} + {n}?", "solution": "So {n}.", "answer": "{twice}"}
AIME_2025 = {"problem": "{n} + {n}?", "answer": "{twice}", "id": "{n}"}
DAPO = {
    "prompt": "{n} + {n}?",
    "solution": "{twice}",
    "data_source": "math_dapo",
    "source_prompt": [{"content": "Solve: {n} + {n}?", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "{twice}", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "{n}"},
}


def filled(value: Any, number: int) -> Any:
    match value:
        case str():
            return value.format(n=number, twice=2 * number)
        case dict():
            return {name: filled(each, number) for name, each in value.items()}
        case list():
            return [filled(each, number) for each in value]
    return value


def made(folder: Path, row: dict[str, Any], *splits: str) -> str:
    """A data set of 200 rows like `row`, in each of the splits."""
    numbers = iter(range(1, 1000))
    result = {
        split: datasets.Dataset.from_list([filled(row, next(numbers)) for _ in range(200)])
        for split in splits
    }
    datasets.DatasetDict(result).save_to_disk(folder)
    return f"tasks.name={folder}"


@pytest.mark.parametrize(
    ("recipe", "row", "splits"),
    [
        ("gsm8k", GSM8K, ("train", "test")),
        ("math", MATH, ("train", "test")),
        ("dapo", DAPO, ("train",)),
        ("math-500", MATH_500, ("test",)),
        ("aime-2024", AIME_2024, ("train",)),
        ("aime-2025", AIME_2025, ("test",)),
    ],
)
async def test_known_tasks_are_read_and_split(
    recipe: str, row: dict[str, Any], splits: tuple[str, ...], tmp_path: Path
) -> None:
    named = made(tmp_path / "set", row, *splits)
    report = await check_data(recipe, [named])
    assert (report.num_rows, report.problems) == (200, [])
    if recipe == "dapo":
        tasks = load_settings(AskSettings, [recipe], [named]).tasks
        source = TaskSource.open(tasks)
        assert len(source.held_out()) == 128
        return
    settings = load_settings(EvaluateSettings, [recipe], [named])
    requests = tasks_of(settings.environments[0], 0)
    first = 201 if len(splits) > 1 else 1
    assert {task.answer for task in requests} == {str(2 * n) for n in range(first, first + 200)}
    if len(splits) > 1:
        trained_on = TaskSource.open(settings.tasks)
        some = {next(trained_on).answer for _ in range(400)}
        assert some == {str(2 * n) for n in range(1, 201)}
