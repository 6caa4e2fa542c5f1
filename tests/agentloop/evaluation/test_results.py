"""Reports of an evaluation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from agentloop.environments.tasks.sources import Task
from agentloop.evaluation.loop import EvaluationSettings, Outcome
from agentloop.evaluation.results import (
    Figures,
    Sampled,
    figures_of,
    markdown,
    results,
    table,
    text,
)
from agentloop.rollouts.metrics import RolloutFigures

SETTINGS = EvaluationSettings(num_samples=2)
ABOUT = Sampled("m", "agentloop", [], [], {"temperature": 0.6, "seed": None}, {"max_turns": 30})


def rollout(reward: float | None, **more: Any) -> RolloutFigures:
    reason = "infrastructure: it died" if reward is None else ""
    usual: dict[str, Any] = {"reason": reason, "num_tokens": 10, "num_turns": 2, "versions": ["0"]}
    return RolloutFigures(reward, **usual | more)


def outcome(name: str, source: str, *rewards: float | None, **more: Any) -> Outcome:
    return Outcome(Task(name, "?", "1", source), 1, [rollout(reward, **more) for reward in rewards])


def values_of(sets: Mapping[str, Figures]) -> dict[str, float]:
    return {name: f.avg_at_k.value for name, f in sets.items() if f.avg_at_k is not None}


def test_missing_samples_are_counted_apart_from_wrong_ones() -> None:
    figures = figures_of([outcome("a", "s", 1.0, None), outcome("b", "s", 0.0, 0.0)], SETTINGS)
    assert (figures.num_tasks, figures.num_whole) == (2, 1)
    assert (figures.num_samples, figures.num_missing) == (3, 1)
    assert figures.avg_at_k is not None
    assert figures.avg_at_k.value == 0.5
    passed = figures.pass_at_k[2]
    assert passed is not None
    assert (passed.value, passed.num_tasks) == (0.0, 1)


def test_unknown_lengths_are_not_zero() -> None:
    expected = outcome("a", "s", 1.0, 1.0)
    unknown = outcome("b", "t", 1.0, 1.0, num_tokens=None)
    lost = outcome("c", "u", None, None)
    columns = table(results([expected, unknown, lost], SETTINGS, ABOUT))
    rows = {row[0]: row[1:] for row in columns}
    assert rows["tokens, mean"] == ["10", "-", "-", "10"]
    assert rows["turns, mean"] == ["2.0", "2.0", "-", "2.0"]
    assert rows["out of budget"] == ["0%", "0%", "-", "0%"]


def test_filtered_samples_are_noted() -> None:
    summary = results([outcome("a", "s", 0.0, 0.0, filtered=True)], SETTINGS, ABOUT)
    assert "content filter cut off, scored as they are: 2." in text(summary)


def test_task_that_could_not_be_sampled_misses_all_samples() -> None:
    refused = Outcome(Task("b", "?", "1", "s"), refused="messages: too long")
    summary = results([outcome("a", "s", 1.0, 1.0), refused], SETTINGS, ABOUT)
    assert (summary.all.num_refused, summary.all.num_missing) == (1, 2)
    assert summary.missing == {"the task could not be sampled: messages: too long": 2}


def test_sets_are_reported_separately_and_together() -> None:
    summary = results(
        [outcome("a", "two", 1.0, 1.0), outcome("b", "one", 0.0, 0.0)], SETTINGS, ABOUT
    )
    assert [*summary.sets] == ["one", "two"]
    assert values_of({**summary.sets, "all": summary.all}) == {"one": 0, "two": 1, "all": 0.5}
    assert table(summary)[0] == ["", "one", "two", "all"]
    alone = results([outcome("a", "two", 1.0, 1.0)], SETTINGS, ABOUT)
    assert table(alone)[0] == ["", "two"]


def test_tasks_of_an_environment_are_a_set() -> None:
    outcomes = [outcome("a", "environment", 1.0, 1.0), outcome("b", "environment", 0.0, 0.0)]
    for task_outcome, name in zip(outcomes, ("guess", "solve"), strict=True):
        task_outcome.task = replace(task_outcome.task, env=name)
    sets = results(outcomes, SETTINGS, ABOUT).sets
    assert values_of(sets) == {"guess": 1, "solve": 0}


def test_parts_of_rewards_have_means_of_their_own() -> None:
    with_two_parts = outcome("a", "one", 1.0, parts={"right": 1, "short": 0.5})
    with_one_part = outcome("b", "two", 0.0, parts={"right": 0})
    summary = results([with_two_parts, with_one_part], SETTINGS, ABOUT)
    assert summary.sets["one"].parts == {"right": 1, "short": 0.5}
    assert summary.all.parts == {"right": 0.5, "short": 0.5}
    assert ["part right", "1.000", "0.000", "0.500"] in table(summary)
    assert ["part short", "0.500", "-", "0.500"] in table(summary)


def test_values_recorded_by_environments_have_a_mean() -> None:
    summary = results([outcome("a", "one", 1.0, 0.0, recorded={"tries": 3})], SETTINGS, ABOUT)
    assert summary.sets["one"].recorded == {"tries": 3}
    assert ["recorded tries", "3.000"] in table(summary)


def test_results_are_plain_data() -> None:
    summary = results([outcome("a", "s", 1.0, None)], SETTINGS, ABOUT).to_dict()
    read = json.loads(json.dumps(summary))
    assert [*read] == [*summary]
    assert read["model"] == "m"
    assert read["all"]["avg_at_k"]["value"] == 1
    assert read["all"]["pass_at_k"] == {"2": None}


def test_results_without_samples() -> None:
    summary = results([outcome("a", "s", None, None)], SETTINGS, ABOUT)
    assert summary.all.avg_at_k is None
    assert ["avg@2", "-"] in table(summary)
    assert ["tool errors in correct rollouts", "-"] in table(summary)


def test_text_output_is_aligned_in_columns() -> None:
    summary = results([outcome("a", "first", 1.0, 0.0), outcome("b", "second", 0.0, None)],
                   SETTINGS, ABOUT)  # fmt: skip
    lines = text(summary).splitlines()
    assert lines[0].split() == ["first", "second", "all"]
    places = {line.index(word) for line, word in zip(lines[:2], ("second", "1  "), strict=True)
              if word in line}  # fmt: skip
    assert places
    assert "Missing samples, 1: infrastructure: it died" in lines
    assert any(line.startswith("In brackets: the 95% confidence interval") for line in lines)


def test_markdown_rows_have_equal_numbers_of_cells() -> None:
    page = markdown(results([outcome("a", "s|t", 1.0, 0.0)], SETTINGS, ABOUT))
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert "s\\|t" in rows[0]
    assert {line.replace("\\|", "").count("|") for line in rows} == {3}
    assert "Sampled with temperature 0.6, max_turns 30." in page


@pytest.mark.parametrize(("versions", "is_noted"), [(["3"], False), (["3", "4"], True)])
def test_change_of_weights_is_noted(versions: list[str], is_noted: bool) -> None:
    summary = results([outcome("a", "s", 1.0, 1.0, versions=versions)], SETTINGS, ABOUT)
    assert ("The weights changed during the evaluation" in text(summary)) is is_noted
