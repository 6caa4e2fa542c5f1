"""Evaluation: samples are repeated only if they have no reward."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentloop.agent.rollout import Budget
from agentloop.environments.rewards.reward import Grader, RewardSettings
from agentloop.environments.tasks.sources import Task
from agentloop.errors import EnvironmentFailed, RequestError, RunFolderError
from agentloop.evaluation.loop import Evaluation, EvaluationSettings, Outcome
from agentloop.rollouts.record import AgentRecord, RolloutRecord
from agentloop.rollouts.request import GroupRequest
from agentloop.rollouts.runner import GroupRunner
from agentloop.training.run.folder import RunFolder
from agentloop.trajectory import StopReason, Trajectory, Turn, TurnEnd
from tests.rollouts import Finished, record_of
from tests.support import eventually

TASKS = [Task(f"task-{number}", f"What is {number}?", str(number)) for number in range(4)]


class Player:
    """Answers `right` of each task's samples correctly; fails, refuses and hangs on request."""

    def __init__(
        self, *, right: int = 1, broken: int = 0, mends: bool = False, refuses: Sequence[str] = ()
    ) -> None:
        self.right = right
        self.broken = broken  # samples of each group that is asked
        self.mends = mends  # what is asked again is not broken
        self.refuses = refuses
        self.hangs: Callable[[Task], bool] = lambda task: False
        self.asked: list[tuple[str, str, int]] = []
        self.given: Counter[str] = Counter()

    @asynccontextmanager
    async def group(self, request: GroupRequest) -> AsyncIterator[list[Finished]]:
        task, name, size = request.task, request.name, request.size
        self.asked.append((task.id, name, size))
        request.queued.set()
        if task.id in self.refuses:
            raise RequestError("messages: too long")
        if self.hangs(task):
            await anyio.sleep_forever()
        await anyio.lowlevel.checkpoint()
        yield [Finished(self._sample(task, name, index)) for index in range(size)]

    def _sample(self, task: Task, name: str, index: int) -> RolloutRecord:
        made = Trajectory(f"{name}.{index}", [1, 2])
        if index < self.broken and not (self.mends and "again" in name):
            made.error = "a server died"
            return record_of(made)
        made.stop_reason = StopReason.ANSWERED
        answer = task.answer if self.given[task.id] < self.right else "none of it"
        self.given[task.id] += 1
        text = f"<answer>\\boxed{{{answer}}}</answer>"
        made.turns = [Turn(output_ids=[3, 4, 5], logprobs=[0.0] * 3, text=text, end=TurnEnd.STOP)]
        return record_of(made)


def settings(**fields: Any) -> EvaluationSettings:
    return EvaluationSettings(**({"num_samples": 4} | fields))


async def run(
    path: Path,
    player: Player,
    changed_settings: EvaluationSettings | None = None,
    tasks: Sequence[Task] = TASKS,
) -> list[Outcome]:
    gc.collect()  # an earlier life's lock
    exists = (path / "config.toml").exists()
    folder = RunFolder(path, None if exists else "")
    evaluation = Evaluation(changed_settings or settings(), tasks, folder)
    await evaluation.take_up()
    async with Grader(RewardSettings(function="exact")) as grader:
        await evaluation.run(GroupRunner(player, grader), Budget())
    return evaluation.outcomes


def rows(path: Path, number: int) -> list[dict[str, Any]]:
    file = path / "trajectories" / f"group-{number:07}.jsonl"
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


async def test_each_task_is_sampled_k_times_and_written_down(tmp_path: Path) -> None:
    player = Player(right=3)
    outcomes = await run(tmp_path / "run", player)
    assert sorted(player.asked) == [(t.id, f"{n}-{t.id}", 4) for n, t in enumerate(TASKS, 1)]
    assert [outcome.rewards for outcome in outcomes] == [[1, 1, 1, 0]] * 4
    for number, task in enumerate(TASKS, 1):
        for index, row in enumerate(rows(tmp_path / "run", number)):
            assert (row["task"], row["group"], row["attempt"]) == (task.id, number, 0)
            assert (row["advantage"], row["dropped"]) == (None, None)
            assert row["trajectory"]["id"] == f"{number}-{task.id}.{index}"
    lines = (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert {json.loads(line)["reward"] for line in lines} == {0.75}


async def test_other_agents_are_written_down_and_not_counted(tmp_path: Path) -> None:
    class TwoAgents(Player):
        def _sample(self, task: Task, name: str, index: int) -> RolloutRecord:
            sample = super()._sample(task, name, index)
            trajectory = Trajectory(
                f"{name}.{index}+opponent", [], [Turn(text="a"), Turn(text="b")]
            )
            return replace(sample, others={"opponent": AgentRecord([trajectory])})

    (outcome,) = await run(tmp_path / "run", TwoAgents(), settings(num_samples=2), TASKS[:1])
    assert [figures.num_turns for figures in outcome.rollouts] == [1, 1]
    assert [figures.num_tokens for figures in outcome.rollouts] == [3, 3]
    rows_of_group = rows(tmp_path / "run", 1)
    assert [row["trajectory"]["id"] for row in rows_of_group] == [
        "1-task-0.0",
        "1-task-0.0+opponent",
        "1-task-0.1",
        "1-task-0.1+opponent",
    ]


async def test_only_samples_without_a_reward_are_repeated(tmp_path: Path) -> None:
    player = Player(broken=3, mends=True)
    outcomes = await run(tmp_path / "run", player)
    assert [outcome.rewards for outcome in outcomes] == [[0, 0, 0, 1]] * 4
    again = [(id, name, size) for id, name, size in player.asked if "again" in name]
    assert sorted(again) == [
        (task.id, f"{n}-again-1-{task.id}", 3) for n, task in enumerate(TASKS, 1)
    ]
    rows_of_group = rows(tmp_path / "run", 1)
    assert [row["attempt"] for row in rows_of_group] == [1, 1, 1, 0]
    assert [row["trajectory"]["id"] for row in rows_of_group] == [f"1-task-0.{n}" for n in range(4)]


async def test_persistent_failures_are_missing_not_wrong(tmp_path: Path) -> None:
    player = Player(right=9, broken=1)
    outcomes = await run(tmp_path / "run", player, settings(retries=1))
    assert len(player.asked) == 8
    for outcome in outcomes:
        assert outcome.rewards == [1, 1, 1]
        assert outcome.rollouts[0].reward is None
        assert outcome.rollouts[0].reason == "infrastructure: a server died"
    assert rows(tmp_path / "run", 1)[0]["no_reward"] == "infrastructure"


async def test_good_samples_are_kept_if_the_environment_keeps_failing(tmp_path: Path) -> None:
    class FailsAgain(Player):
        @asynccontextmanager
        async def group(self, request: GroupRequest) -> AsyncIterator[list[Finished]]:
            async with super().group(request) as samples:
                yield samples
            if "again" in request.name:
                raise EnvironmentFailed("environment game: it raised KeyError: 'board'")

    player = FailsAgain(right=9, broken=1)
    outcomes = await run(tmp_path / "run", player, settings(retries=1))
    assert len(player.asked) == 8
    for outcome in outcomes:
        assert outcome.rewards == [1, 1, 1]
        assert (outcome.rollouts[0].reward, outcome.refused) == (None, "")
    assert [row["reward"] for row in rows(tmp_path / "run", 1)] == [None, 1, 1, 1]


async def test_resumed_run_samples_only_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    await run(path, Player(right=9, broken=1), settings(retries=0))
    before = rows(path, 2)
    player = Player(right=9)
    outcomes = await run(path, player)
    assert sorted(player.asked) == [
        (task.id, f"{n}-again-1-{task.id}", 1) for n, task in enumerate(TASKS, 1)
    ]
    assert rows(path, 2)[1:] == before[1:]
    assert [outcome.rewards for outcome in outcomes] == [[1, 1, 1, 1]] * 4
    again = Player()
    await run(path, again)
    assert again.asked == []


async def test_more_samples_are_added_to_existing_ones(tmp_path: Path) -> None:
    path = tmp_path / "run"
    await run(path, Player(), settings(num_samples=2))
    player = Player(right=9)
    outcomes = await run(path, player, settings(num_samples=6))
    assert {size for _, _, size in player.asked} == {4}
    assert [outcome.rewards for outcome in outcomes] == [[1, 0, 1, 1, 1, 1]] * 4


async def test_stopped_run_keeps_complete_tasks(tmp_path: Path) -> None:
    path = tmp_path / "run"
    player = Player()
    player.hangs = lambda task: task.id in ("task-1", "task-3")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, path, player)
        files = path / "trajectories"
        await eventually(lambda: len(list(files.glob("group-*"))) == 2)
        tasks.cancel_scope.cancel()
    player = Player()
    outcomes = await run(path, player)
    assert sorted(player.asked) == [("task-1", "2-task-1", 4), ("task-3", "4-task-3", 4)]
    assert [outcome.number for outcome in outcomes] == [1, 2, 3, 4]


@pytest.mark.parametrize("num_lines", [0, 1, 3])
async def test_file_without_an_outcome_line_still_counts(tmp_path: Path, num_lines: int) -> None:
    path = tmp_path / "run"
    before = [(outcome.number, outcome.rollouts) for outcome in await run(path, Player(right=2))]
    for name in ("outcomes.jsonl", "metrics.jsonl"):
        lines = (path / name).read_text("utf-8").splitlines(keepends=True)
        (path / name).write_text("".join(lines[:num_lines]) + lines[num_lines][:20], "utf-8")
    player = Player()
    again = await run(path, player)
    assert player.asked == []
    assert [(outcome.number, outcome.rollouts) for outcome in again] == before


async def test_task_without_its_file_is_sampled_again(tmp_path: Path) -> None:
    path = tmp_path / "run"
    await run(path, Player())
    (path / "trajectories" / "group-0000003.jsonl").unlink()
    player = Player()
    await run(path, player)
    assert player.asked == [("task-2", "3-task-2", 4)]


async def test_tasks_added_later_get_new_numbers(tmp_path: Path) -> None:
    path = tmp_path / "run"
    await run(path, Player(), tasks=TASKS[1:2])
    outcomes = await run(path, Player())
    assert [outcome.number for outcome in outcomes] == [2, 1, 3, 4]
    assert [rows(path, outcome.number)[0]["task"] for outcome in outcomes] == [
        task.id for task in TASKS
    ]


async def test_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run"
    await run(path, Player(), settings(num_samples=2))
    (path / "trajectories" / "group-0000002.jsonl").write_text("{half")
    with pytest.raises(RunFolderError, match=r"group-0000002.jsonl: line 1 is damaged"):
        await run(path, Player())


async def test_task_that_cannot_be_sampled_does_not_stop_the_others(tmp_path: Path) -> None:
    outcomes = await run(tmp_path / "run", Player(refuses=["task-2"]))
    (refused,) = [outcome for outcome in outcomes if outcome.refused]
    assert (refused.task.id, refused.refused, refused.rollouts) == (
        "task-2", "messages: too long", ()
    )  # fmt: skip
    assert sum(len(outcome.rewards) for outcome in outcomes) == 12


async def test_evaluation_fails_if_no_task_can_be_sampled(tmp_path: Path) -> None:
    player = Player(refuses=[task.id for task in TASKS])
    with pytest.raises(RequestError, match=r"no task could be sampled \(4 refused\): .*too long"):
        await run(tmp_path / "run", player)


async def test_progress_counts_the_tasks_that_are_done(tmp_path: Path) -> None:
    path = tmp_path / "run"
    await run(path, Player(), tasks=TASKS[:2])
    counts: list[int] = []
    evaluation = Evaluation(settings(), TASKS, RunFolder(path), on_progress=counts.append)
    await evaluation.take_up()
    async with Grader(RewardSettings(function="exact")) as grader:
        player = Player(refuses=["task-3"])
        await evaluation.run(GroupRunner(player, grader), Budget())
    assert counts == [3, 4]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, [2, 4, 8, 16]), ({"num_samples": 1}, [1]), ({"num_samples": 6}, [2, 4, 6]),
     ({"pass_at": [16, 1]}, [1, 16])],
)  # fmt: skip
def test_values_of_k_for_pass_at_k(fields: dict[str, Any], expected: list[int]) -> None:
    assert EvaluationSettings(**fields).all_pass_at == expected


def test_pass_at_more_than_num_samples_is_rejected() -> None:
    with pytest.raises(
        ValueError, match="pass_at: 8 requires at least as many samples; num_samples is 4"
    ):
        EvaluationSettings(num_samples=4, pass_at=[8])
