"""Tasks of several environments: whose turn it is, and how a run goes on."""

from __future__ import annotations

import json
from collections import Counter
from itertools import groupby, islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.environments.tasks.mixed import MixedTasks, WeightedTurns
from agentloop.environments.tasks.sources import Task, TaskSource, TasksSettings
from agentloop.errors import DataError

WEIGHTS = st.dictionaries(
    st.sampled_from("abcdef"), st.floats(0.01, 100), min_size=1, max_size=6
)  # fmt: skip


def test_turns_are_spread() -> None:
    turns = WeightedTurns({"a": 5, "b": 1, "c": 1})  # the example of nginx
    assert "".join(turns.take() for _ in range(14)) == "aabacaa" * 2


@settings(deadline=None)
@given(WEIGHTS, st.integers(1, 300))
def test_each_name_gets_its_share_of_turns(weights: dict[str, float], number: int) -> None:
    turns = WeightedTurns(weights)
    had = Counter(turns.take() for _ in range(number))
    for name, weight in weights.items():
        share = number * weight / sum(weights.values())
        assert had[name] - share < 1
        assert share - had[name] < len(weights)


@settings(deadline=None)
@given(WEIGHTS, st.integers(0, 50))
def test_turns_go_on_from_the_credit(weights: dict[str, float], number: int) -> None:
    turns, again = WeightedTurns(weights), WeightedTurns(weights)
    for _ in range(number):
        turns.take()
    again.credit |= json.loads(json.dumps(turns.credit))
    assert [turns.take() for _ in range(20)] == [again.take() for _ in range(20)]


def mixed(**weights: float) -> MixedTasks:
    """Return arithmetic problems, of another level for each name."""
    sources = {
        name: TaskSource.open(TasksSettings(levels=[level], held_out=2))
        for level, name in enumerate(weights, 1)
    }
    return MixedTasks(sources, weights)


def test_each_environment_has_its_own_tasks_in_their_order() -> None:
    drawn = list(islice(mixed(easy=2, hard=1), 12))
    assert Counter(task.env for task in drawn) == {"easy": 8, "hard": 4}
    alone = TaskSource.open(TasksSettings(levels=[2], held_out=2))
    assert [task.prompt for task in drawn if task.env == "hard"] == [
        task.prompt for task in islice(alone, 4)
    ]
    assert len({task.id for task in drawn}) == 12
    assert all(task.id.startswith(f"{task.env}-arithmetic-") for task in drawn)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 30), st.floats(0.1, 9))
def test_cursor_continues_all_of_them(number: int, weight: float) -> None:
    source = mixed(easy=1, hard=weight)
    list(islice(source, number))
    again = mixed(easy=1, hard=weight)
    again.go_to(json.loads(json.dumps(source.cursor())))
    assert list(islice(again, 10)) == list(islice(source, 10))


def test_weights_may_change_when_a_run_goes_on() -> None:
    source = mixed(easy=1, hard=1)
    list(islice(source, 100))
    again = mixed(easy=3, hard=1)
    again.go_to(source.cursor())
    drawn = Counter(task.env for task in islice(again, 40))
    assert abs(drawn["easy"] - 30) <= 1  # what was drawn before is not made up for


def test_changed_weights_give_no_environment_many_consecutive_turns() -> None:
    for drawn in range(1, 30):
        source = mixed(easy=90, hard=10)
        list(islice(source, drawn))
        again = mixed(easy=0.5, hard=0.5)
        again.go_to(json.loads(json.dumps(source.cursor())))
        names = [task.env for task in islice(again, 30)]
        assert max(len(list(same)) for _, same in groupby(names)) <= 3


def test_cursor_of_other_environments_or_tasks_is_refused() -> None:
    cursor = mixed(easy=1, hard=1).cursor()
    with pytest.raises(DataError, match="envs: the run has easy, hard, not easy, other: keep"):
        mixed(easy=1, other=1).go_to(cursor)
    with pytest.raises(DataError, match="envs: hard: tasks: they are not"):
        mixed(hard=1, easy=1).go_to(cursor)  # the levels are exchanged
    alone = TaskSource.open(TasksSettings())
    with pytest.raises(DataError, match="envs: the run has a single environment"):
        mixed(easy=1, hard=1).go_to(alone.cursor())
    with pytest.raises(DataError, match="they are not those"):
        alone.go_to(cursor)


def test_held_out_tasks_and_any_task_are_found() -> None:
    source = mixed(easy=1, hard=1)
    held_out = source.held_out()
    assert [task.env for task in held_out] == ["easy", "easy", "hard", "hard"]
    for task in [*held_out, *islice(source, 5)]:
        assert source.find(task.id) == task
    for id in ("easy-symbolic-1", "arithmetic-1", "other-arithmetic-1"):
        with pytest.raises(KeyError):
            source.find(id)
    assert mixed(a=1, **{"a-b": 1}).find("a-b-arithmetic-1").env == "a-b"
    assert source.fingerprint == mixed(easy=1, hard=9).fingerprint != mixed(x=1, y=1).fingerprint


def test_only_listed_tasks_are_all_known(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "1 + 1?", "answer": "2"}\n{"prompt": "1 + 2?", "answer": "3"}\n')
    listed = TasksSettings(kind="jsonl", paths=[file])
    pair = {"a": TaskSource.open(listed), "b": TaskSource.open(listed)}
    distinct = MixedTasks(pair, {"a": 1, "b": 1}).distinct
    assert distinct is not None
    assert [task.env for task in distinct] == ["a", "a", "b", "b"]
    pair["c"] = TaskSource.open(TasksSettings())
    assert MixedTasks(pair, {"a": 1, "b": 1, "c": 1}).distinct is None


def test_skipped_task_does_not_cost_its_environment_a_turn() -> None:
    offered: list[Task] = []

    def every_other(task: Task) -> bool:
        offered.append(task)
        return len(offered) % 2 == 0

    tasks, usual = mixed(easy=2, hard=1), mixed(easy=2, hard=1)
    drawn = [tasks.draw(every_other) for _ in range(6)]
    assert [task.env for task in drawn] == [next(usual).env for _ in drawn]
    assert len(offered) == 12
    assert {tasks.rate_key(task) for task in drawn} == {
        "easy arithmetic level 1",
        "hard arithmetic level 2",
    }
