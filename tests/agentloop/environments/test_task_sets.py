"""The tasks of an environment: lists, iterators, data sets, splits; what its rollouts share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from random import Random
from typing import Any

import pytest

import agentloop
from agentloop.environments.environment import EnvSettings, load, open_tasks, set_up
from agentloop.environments.mixture import RunEnvironment
from agentloop.environments.tasks.sources import TaskSource, TasksSettings
from agentloop.errors import DataError, SettingsError
from agentloop.evaluation.wiring import tasks_of

ROWS = [{"prompt": f"Question {number}?", "answer": number} for number in range(6)]
HERE = "tests.agentloop.environments.test_task_sets"


async def nothing(task: Any, agent: agentloop.Agent, *, top: int = 6) -> float:
    return 0.0


def opened(tasks: Any, held_out_tasks: Any = None, **settings: Any) -> TaskSource:
    made = agentloop.environment(tasks=tasks, held_out_tasks=held_out_tasks)(nothing)
    return open_tasks(TasksSettings(**settings), made.with_arguments({}))


def generated() -> Iterator[dict[str, Any]]:
    yield from ROWS


def below(*, top: int) -> list[dict[str, Any]]:
    return ROWS[:top]


def data_set() -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(ROWS)


@pytest.mark.parametrize(
    "tasks", [lambda: ROWS, generated, lambda: iter(ROWS), data_set], ids=["list", "1", "2", "set"]
)
def test_each_epoch_has_each_task_once(tasks: Any) -> None:
    for source in (opened(tasks()), opened(tasks), opened(below)):
        epochs = [[int(next(source).answer) for _ in ROWS] for _ in range(3)]
        assert [sorted(epoch) for epoch in epochs] == [list(range(6))] * 3
        assert len({tuple(epoch) for epoch in epochs}) > 1  # shuffled
        assert source.distinct is not None
        assert [task.prompt for task in source.distinct] == [row["prompt"] for row in ROWS]


def test_order_is_kept_without_shuffling() -> None:
    source = opened(generated, shuffle=False)
    assert [int(task.answer) for task in islice(source, 8)] == [0, 1, 2, 3, 4, 5, 0, 1]


def test_tasks_with_the_same_id_are_one() -> None:
    rows = [{"id": number // 2, "answer": number // 2} for number in range(6)]
    source = opened(rows)
    assert sorted(next(source).id for _ in range(6)) == ["0", "0", "1", "1", "2", "2"]
    assert source.find("1").answer == "1"
    with pytest.raises(DataError, match="two tasks have the id '7' and other fields"):
        opened([{"id": 7, "answer": 1}, {"id": 7, "answer": 2}])
    with pytest.raises(DataError, match="number 1: field 'id': expected text or a whole number"):
        opened([{"id": [1]}])


def test_tasks_with_ids_are_held_out_by_them() -> None:
    rows = [{"id": f"task {number}", "answer": number} for number in range(200)]
    source = opened(rows, held_out=0.25)
    held_out = {task.id for task in source.held_out()}
    assert 20 < len(held_out) < 80
    trained = {next(source).id for _ in range(200 - len(held_out))}
    assert trained | held_out == {row["id"] for row in rows}
    again = opened(list(reversed(rows)), held_out=0.25)
    assert {task.id for task in again.held_out()} == held_out


@pytest.mark.parametrize("training", [ROWS, lambda rng: {"answer": rng.random()}])
@pytest.mark.parametrize("second", [ROWS[:2], lambda rng: {"answer": rng.random()}])
def test_held_out_tasks_are_evaluated_and_not_trained_on(training: Any, second: Any) -> None:
    source = opened(training, second)
    held_out = source.held_out()
    assert len(held_out) == (2 if isinstance(second, list) else 256)
    assert source.find(held_out[1].id) == held_out[1]
    trained = list(islice(source, 20))
    assert not {task.id for task in trained} & {task.id for task in held_out}
    assert not {task.answer for task in trained} & {task.answer for task in held_out}
    assert source.find(trained[3].id) == trained[3]
    cursor = source.cursor()
    remainder = list(islice(source, 9))
    again = opened(training, second)
    again.go_to(cursor)
    assert list(islice(again, 9)) == remainder
    with pytest.raises(DataError, match="they are not those that the run began with"):
        opened(training, ROWS[4:5]).go_to(cursor)
    assert len(opened(training, second, held_out=1).held_out()) == 1


def test_tasks_that_are_all_held_out_leave_none() -> None:
    with pytest.raises(DataError, match="no tasks to train on: all of them are held out, too"):
        opened(ROWS[:2], ROWS)


split = agentloop.environment(tasks=ROWS, held_out_tasks=ROWS[:2])(nothing)


def test_evaluation_takes_the_split_for_it() -> None:
    environment = RunEnvironment("", EnvSettings(name=f"{HERE}:split"), TasksSettings())
    assert [task.answer for task in tasks_of(environment, 0)] == ["0", "1"]


def broken() -> Iterator[dict[str, Any]]:
    yield ROWS[0]
    raise OSError("no such file")


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (broken, r"the tasks of nothing: after number 1: .*test_task_sets.py:\d+: OSError: no"),
        (lambda: 3, r"the tasks of nothing: after number 0: .*: TypeError: 'int' object"),
        (["Question?"], "number 1: expected the fields of a task, a dict, not 'Question"),
        (lambda: {"answer": 1}, "number 1: expected the fields of a task, a dict, not 'answer'"),
        ([{"words": {1}}], "number 1: field 'words': Type is not JSON serializable: set"),
    ],
)
def test_errors_of_listed_tasks_name_the_task(tasks: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        opened(tasks)


# --- what the rollouts of a process share ---------------------------------------------------------

log: list[str] = []


@asynccontextmanager
async def names(*, top: int) -> AsyncIterator[list[int]]:
    log.append("open")
    yield list(range(top))
    log.append("closed")


@agentloop.environment(tasks=ROWS, setup=names, teacher=lambda task, rng: lambda messages: "Done.")
async def sharing(task: Any, agent: agentloop.Agent, *, shared: list[int], top: int = 3) -> float:
    await agent.run("Go.")
    log.append("rollout")
    return float(sum(shared))


async def test_setup_is_entered_once_for_all_rollouts() -> None:
    log.clear()
    environment = load(EnvSettings(name=f"{HERE}:sharing", args={"top": 4}))
    async with set_up([environment, None]):
        for _ in range(2):
            again = load(EnvSettings(name=f"{HERE}:sharing", args={"top": 4}))
            assert again is not None
            played = await agentloop.play(again, {}, lambda messages: "Done.")
            assert played.reward.value == 6.0
    assert log == ["open", "rollout", "rollout", "closed"]


async def test_script_plays_with_what_rollouts_share() -> None:
    log.clear()
    played = await agentloop.play(sharing, {}, lambda messages: "Done.")
    assert (played.reward.value, log) == (3.0, ["open", "rollout", "closed"])


async def test_setup_that_fails_is_named() -> None:
    @asynccontextmanager
    async def fails() -> AsyncIterator[int]:
        yield {"a": 1}["b"]

    async def ask(task: Any, agent: Any, *, shared: Any) -> None: ...

    environment = agentloop.environment(setup=fails)(ask)
    with pytest.raises(
        SettingsError, match=r"setup of ask: .*test_task_sets.py:\d+: KeyError: 'b'"
    ):
        async with set_up([environment]):
            pass


def test_setup_and_its_parameter_belong_together() -> None:
    async def ask(task: Any, agent: Any, *, shared: Any) -> None: ...

    with pytest.raises(TypeError, match="setup= and the parameter `shared` belong together"):
        agentloop.environment(ask)
    with pytest.raises(TypeError, match="setup= and the parameter `shared` belong together"):
        agentloop.environment(setup=names)(nothing)


def test_random_numbers_of_a_generator_are_its_own() -> None:
    def make_task(rng: Random, top: int) -> dict[str, int]:
        return {"answer": rng.randrange(top)}

    assert {int(task.answer) for task in islice(opened(make_task), 50)} == set(range(6))


@pytest.mark.parametrize("number", ["id", "row", "index"])
def test_split_of_an_environment_ignores_row_numbers(number: str) -> None:
    listed = [{"prompt": f"Question {n % 30}?", "answer": 1, number: n} for n in range(90)]
    source = opened(listed, held_out=0.3)
    held = {task.prompt for task in source.held_out()}
    assert 1 < len(held) < 30
    assert not held & {task.prompt for task in islice(source, 90)}


def test_held_out_tasks_under_another_id_are_not_trained_on() -> None:
    training = [{"prompt": f"Question {n}?", "answer": n, "id": f"a{n}"} for n in range(6)]
    held_out = [{"prompt": f"Question {n}?", "answer": n, "id": f"b{n}"} for n in range(2)]
    source = opened(training, held_out)
    assert source.distinct is not None
    assert {task.id for task in source.distinct} == {"a2", "a3", "a4", "a5"}
    assert {task.id for task in islice(source, 12)} == {"a2", "a3", "a4", "a5"}
