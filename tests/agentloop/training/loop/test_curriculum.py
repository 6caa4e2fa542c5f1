"""The curriculum: what is taken how often, what is retired, and that a restart changes nothing."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentloop.environments.tasks.sources import Task, TaskSource, TasksSettings
from agentloop.environments.tasks.task import problem_of
from agentloop.rollouts.metrics import GroupFigures, RolloutFigures
from agentloop.training.loop.curriculum import (
    BY_SOLVE_RATE,
    EVERY_TASK,
    LEAST,
    NOT_SOLVED,
    Curriculum,
    DrawPolicy,
    GroupOutcome,
)
from agentloop.training.loop.queue import TaskCursor
from agentloop.training.loop.stage_tasks import StageTasks

SOLVED = GroupOutcome(8, 8, is_equal=True)
FAILED = GroupOutcome(0, 8, is_equal=True)
MIXED = GroupOutcome(4, 8, is_equal=False)


@st.composite
def outcomes(draw: st.DrawFn) -> GroupOutcome:
    num_rollouts = draw(st.integers(1, 32))
    num_solved = draw(st.integers(0, num_rollouts))
    is_equal = num_solved in (0, num_rollouts) and draw(st.booleans())
    return GroupOutcome(num_solved, num_rollouts, is_equal)


KEYS = st.sampled_from("abc")
OBSERVED = st.lists(st.tuples(KEYS, outcomes()), max_size=30)
POLICIES = st.builds(
    DrawPolicy,
    by_solve_rate=st.booleans(),
    retire_after=st.integers(0, 3),
    recheck=st.sampled_from([1 / 16, 0.5]),
)
SEEDS = st.integers(0, 99)


def figures(*rewards: float | None) -> GroupFigures:
    return GroupFigures([RolloutFigures(reward) for reward in rewards])


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 1, 1], GroupOutcome(3, 3, True)),
        ([0, 0, -1], GroupOutcome(0, 3, False)),
        ([1, None, 0], GroupOutcome(1, 2, False)),
        ([0.5, 1.5], GroupOutcome(2, 2, False)),
        ([0.3, 0.1 + 0.2], GroupOutcome(2, 2, True)),
        ([None, None], None),
        ([], None),
    ],
)
def test_outcome_counts_the_rollouts_with_a_reward(
    rewards: list[float | None], expected: GroupOutcome | None
) -> None:
    assert GroupOutcome.of(figures(*rewards)) == expected


def test_figures_without_rollouts_have_no_outcome() -> None:
    assert GroupOutcome.of(GroupFigures()) is None


@given(observed=OBSERVED, policy=POLICIES, seed=SEEDS)
@settings(deadline=None)
def test_any_task_may_repeat_and_untried_ones_are_kept(
    observed: list[tuple[str, GroupOutcome]], policy: DrawPolicy, seed: int
) -> None:
    curriculum = Curriculum(policy, seed=seed)
    curriculum.restore(observed, num_offered=0)
    tried = {key for key, _ in observed}
    for key in "abc":
        least = min(LEAST, policy.recheck)
        assert least <= curriculum.probability(key) <= 1
        assert key in tried or (curriculum.probability(key) == 1 and curriculum.takes(key))


@given(observed=OBSERVED, policy=POLICIES, seed=SEEDS, at=st.integers(0, 30), data=st.data())
@settings(deadline=None)
def test_restart_continues_with_the_same_decisions(
    observed: list[tuple[str, GroupOutcome]],
    policy: DrawPolicy,
    seed: int,
    at: int,
    data: st.DataObject,
) -> None:
    offers = data.draw(st.lists(KEYS, min_size=len(observed), max_size=len(observed)))

    def decide(curriculum: Curriculum, some: slice) -> list[bool]:
        result = []
        for (key, outcome), offered in zip(observed[some], offers[some], strict=True):
            result.append(curriculum.takes(offered))
            curriculum.observe(key, outcome)
        return result

    undisturbed = Curriculum(policy, seed=seed)
    decisions = decide(undisturbed, slice(None))
    first = Curriculum(policy, seed=seed)
    assert decide(first, slice(at)) == decisions[:at]
    second = Curriculum(policy, seed=seed)
    second.restore(observed[:at], num_offered=first.num_offered)
    assert decide(second, slice(at, None)) == decisions[at:]
    assert second.metrics() == undisturbed.metrics()
    assert second.num_offered == undisturbed.num_offered


@given(observed=OBSERVED)
@settings(deadline=None)
def test_task_is_retired_while_its_last_groups_are_solved(
    observed: list[tuple[str, GroupOutcome]],
) -> None:
    enough = BY_SOLVE_RATE.retire_after
    curriculum = Curriculum(BY_SOLVE_RATE)
    histories: dict[str, list[GroupOutcome]] = {"a": [], "b": [], "c": []}
    for key, outcome in observed:
        curriculum.observe(key, outcome)
        histories[key].append(outcome)
        last = histories[key][-enough:]
        is_retired = len(last) == enough and all(single.is_solved for single in last)
        assert curriculum.is_retired(key) == is_retired
        assert (curriculum.probability(key) == BY_SOLVE_RATE.recheck) == is_retired
    retired = sum(curriculum.is_retired(key) for key in histories)
    assert curriculum.metrics().get("curriculum/num_retired", 0) == retired


@given(rates=st.tuples(*[st.integers(0, 16)] * 2))
@settings(deadline=None)
def test_tasks_with_solve_rates_near_half_are_drawn_most_often(rates: tuple[int, int]) -> None:
    near, far = sorted(rates, key=lambda solved: abs(solved - 8))
    assume(abs(near - 8) < abs(far - 8))
    curriculum = Curriculum(DrawPolicy(by_solve_rate=True))
    curriculum.observe("near", GroupOutcome(near, 16, False))
    curriculum.observe("far", GroupOutcome(far, 16, False))
    assert curriculum.probability("near") > curriculum.probability("far") >= LEAST


def test_tasks_that_are_always_or_never_solved_become_rare() -> None:
    curriculum = Curriculum(DrawPolicy(by_solve_rate=True))
    result: dict[str, list[float]] = {"solved": [], "failed": []}
    for _ in range(8):
        for key, outcome in (("solved", SOLVED), ("failed", FAILED)):
            curriculum.observe(key, outcome)
            result[key].append(curriculum.probability(key))
    assert result["solved"] == pytest.approx(result["failed"])
    assert result["solved"] == sorted(result["solved"], reverse=True)
    assert 0.3 < result["solved"][0] < 0.4  # (8 + 1) / (8 + 2) = 0.9, and 4 * 0.9 * 0.1 = 0.36
    curriculum.observe("solved", MIXED)
    assert curriculum.probability("solved") > 2 * LEAST


def test_shaped_rewards_do_not_retire_a_task() -> None:
    """All rollouts have a positive reward, but some are better than others."""
    curriculum = Curriculum(BY_SOLVE_RATE)
    for _ in range(5):
        curriculum.observe("a", GroupOutcome(8, 8, is_equal=False))
    assert not curriculum.is_retired("a")


def test_every_task_is_taken_without_a_curriculum() -> None:
    curriculum = Curriculum(EVERY_TASK)
    for _ in range(9):
        curriculum.observe("a", SOLVED)
        assert curriculum.takes("a")
    assert curriculum.metrics() == {}


def test_filter_of_a_stage_leaves_out_what_was_solved_once() -> None:
    measured = Curriculum(NOT_SOLVED)
    measured.restore(
        [
            ("solved", SOLVED),
            ("failed", FAILED),
            ("mixed", MIXED),
            ("one", GroupOutcome(1, 1, True)),
        ],
        num_offered=0,
    )
    keys = ("solved", "failed", "mixed", "one", "without a reward")
    assert [key for key in keys if not measured.is_retired(key)] == [
        "failed", "mixed", "without a reward",
    ]  # fmt: skip


# --- with a source --------------------------------------------------------------------------------


def listed(folder: Path, number: int) -> TaskSource:
    file = folder / "tasks.jsonl"
    rows = ({"problem": f"{index} + 1?", "answer": str(index + 1)} for index in range(number))
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return TaskSource.open(TasksSettings(kind="jsonl", paths=[file]))


def learn(source: TaskSource, num_draws: int, ability: dict[str, float]) -> Counter[str]:
    """Draw tasks that are solved with these probabilities; return how often each was drawn."""
    curriculum = Curriculum(BY_SOLVE_RATE, seed=1)
    tasks = StageTasks(source, 1, curriculum)
    draw, drawn = Random(0), Counter[str]()
    for task in itertools.islice(tasks, num_draws):
        key = tasks.rate_key(task)
        drawn[key] += 1
        solved = sum(draw.random() < ability[key] for _ in range(8))
        tasks.observe([(key, GroupOutcome(solved, 8, solved in (0, 8)))])
    return drawn


def test_hard_and_easy_tasks_are_drawn_less_often_than_others(tmp_path: Path) -> None:
    source = listed(tmp_path, 30)
    ids = sorted(problem_of(task) for task in source.distinct or ())
    ability = dict(zip(ids, [0.0] * 10 + [0.5] * 10 + [1.0] * 10, strict=True))
    drawn = learn(source, 1200, ability)
    never, half, always = (sum(drawn[id] for id in ids[at : at + 10]) for at in (0, 10, 20))
    assert always < never < half / 3
    assert min(drawn[id] for id in ids) > 1  # they are rechecked


def test_first_epoch_has_every_task_once(tmp_path: Path) -> None:
    drawn = learn(listed(tmp_path, 30), 30, Always())
    assert set(drawn.values()) == {1}


class Always(dict[str, float]):
    def __missing__(self, key: str) -> float:
        return 1.0


def test_generated_tasks_are_drawn_by_their_level() -> None:
    source = TaskSource.open(TasksSettings(levels=[1, 2, 3]))
    ability = {f"arithmetic level {level}": rate for level, rate in ((1, 1.0), (2, 0.5), (3, 0.0))}
    drawn = learn(source, 600, ability)
    assert drawn.keys() == ability.keys()
    easy, half, hard = (drawn[key] for key in ability)
    assert easy < hard < half / 3


def test_filtered_stage_knows_even_generated_tasks_by_id() -> None:
    curriculum = Curriculum(BY_SOLVE_RATE)
    tasks = StageTasks(TaskSource.open(TasksSettings()), 1, curriculum)
    local = tasks.take(4)
    assert {tasks.rate_key(task) for task in local} == {"arithmetic level 1"}
    tasks.use(local, seed="s", cursor={})
    assert [tasks.rate_key(task) for task in local] == [task.id for task in local]
    for task in local[1:]:
        tasks.observe([(task.id, SOLVED)] * 3)
    drawn = Counter(task.id for task in itertools.islice(tasks, 40))
    assert drawn[local[0].id] > 25


@pytest.mark.parametrize("filtered", [False, True])
def test_stage_continues_where_it_was(filtered: bool) -> None:
    """The cursor, and the outcomes so far, determine all further tasks."""
    settings = TasksSettings(levels=[1, 2, 3])
    local = [Task(str(index), "?", "1") for index in range(5)]

    def stage(cursor: TaskCursor) -> tuple[StageTasks, Curriculum]:
        curriculum = Curriculum(BY_SOLVE_RATE)
        tasks = StageTasks(TaskSource.open(settings, cursor.get("tasks")), 2, curriculum)
        if filtered:
            tasks.use(local, seed="s", cursor=cursor)
        return tasks, curriculum

    first, _ = stage({})
    result = []
    reported: list[tuple[str, GroupOutcome]] = []
    cursors = []
    for task in itertools.islice(first, 40):
        result.append(task.id)
        cursors.append(first.cursor())
        reported.append((first.rate_key(task), SOLVED if len(reported) % 3 else MIXED))
        first.observe(reported[-1:])
    for at in (1, 7, 20):
        cursor = json.loads(json.dumps(cursors[at - 1]))
        again, curriculum = stage(cursor)
        curriculum.restore(reported[:at], num_offered=cursor["num_offered"])
        remainder = []
        for index in range(at, 40):
            remainder.append(next(again).id)
            again.observe(reported[index : index + 1])
        assert remainder == result[at:]
