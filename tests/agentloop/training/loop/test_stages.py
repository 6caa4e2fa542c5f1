"""The stages of a run with a fake learner: tasks, admission and groups."""

from __future__ import annotations

import gc
import itertools
import json
import re
import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from agentloop.agent.formats.values import decode_call
from agentloop.analysis.run_list import RunState, summarize
from agentloop.config import to_toml
from agentloop.environments.tasks.mixed import MixedTasks
from agentloop.environments.tasks.sources import TaskSource, TasksSettings
from agentloop.errors import EnvironmentFailed, RequestError, ServerError, leaves, sole
from agentloop.events import Event, GroupFinished, GroupStarted
from agentloop.training.loop.queue import GroupQueue
from agentloop.training.loop.settings import StageSettings
from agentloop.training.loop.staleness import Slots
from agentloop.training.plan.settings import TrainSettings
from agentloop.trajectory import StopReason, ToolCall, Trajectory
from tests.agentloop.training.loop_support import (
    ARITHMETIC,
    FakeRollouts,
    GatedRollouts,
    KilledRollouts,
    RecordingLearner,
    query_journal,
    read_lines,
    recorded_rows,
    run_loop,
    run_until_failure,
)
from tests.fakes import RecordedProgress
from tests.patience import patient
from tests.support import eventually

pytestmark = pytest.mark.timeout(60)  # each step is synced to the disk


async def test_task_drawn_twice_in_a_step_makes_two_groups(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"problem": "What is 1 plus 2?", "answer": "3"}\r\n')
    tasks = TaskSource.open(TasksSettings(kind="jsonl", paths=[file]))
    learner, run_group, _ = await run_loop(tmp_path, tasks=tasks, steps=1)
    assert len(set(run_group.names)) == 3
    assert learner.batches[0]["groups"].tolist() == [0] * 4 + [1] * 4 + [2] * 4


async def test_extreme_arguments_of_tool_calls_do_not_end_a_run(tmp_path: Path) -> None:
    numbers = ["7" * 400, "1e999, 99999999999999999999", "NaN", "[" * 150 + "]" * 150, '"\\ud800"']

    class Odd(FakeRollouts):
        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            group = await super().__call__(prompt, **options)
            for rollout, number in zip(group, numbers, strict=False):
                raw = f'{{"name": "python", "arguments": {{"n": [{number}]}}}}'
                name, arguments, error = decode_call(raw)
                rollout.turns[0].calls = [ToolCall("c", name, arguments, raw, 0, 1, error)]
            return group

    learner, _, run = await run_loop(tmp_path, run_group=Odd(), steps=1)
    assert len(learner.batches[0]["lengths"]) == 12
    first, second, *_ = recorded_rows(run, [1])
    assert first["trajectory"]["turns"][0]["calls"][0]["arguments"] == {"n": [int(numbers[0])]}
    assert "too large" in second["trajectory"]["turns"][0]["calls"][0]["error"]


async def test_tasks_of_an_outage_are_trained_on_after_resuming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentloop.training.rollouts._FIRST_PAUSE_S", 0)

    class Broken(FakeRollouts):
        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            group = await super().__call__(prompt, **options)
            for rollout in group:
                rollout.stop_reason, rollout.error = (
                    StopReason.INFRASTRUCTURE,
                    "the sandbox is gone",
                )
            return group

    tasks = TaskSource.open(ARITHMETIC)
    with pytest.raises(ExceptionGroup) as caught:
        await run_loop(tmp_path, tasks=tasks, run_group=Broken(tasks), steps=1)
    error = next(leaves(caught.value))
    assert isinstance(error, ServerError)
    assert "lost 5 times in a row: infrastructure: the sandbox is gone" in str(error)
    # The same tasks are trained on when the run is resumed.
    learner, _, run = await run_loop(tmp_path, tasks=tasks, run_group=FakeRollouts(tasks), steps=1)
    assert len(learner.batches) == 1
    (numbers,) = [{row["group"] for row in recorded_rows(run, [1, 2, 3])}]
    assert numbers == {1, 2, 3}


class RefusingRollouts(FakeRollouts):
    """Refuses some prompts as too long."""

    refuses = 1  # of three, in each step

    async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
        if int(options["name"].split("-")[0]) <= self.refuses:
            raise RequestError("messages: they make 9000 tokens")
        return await super().__call__(prompt, **options)


async def test_invalid_task_is_skipped(tmp_path: Path) -> None:
    report = RecordedProgress()
    learner, _, run = await run_loop(tmp_path, run_group=RefusingRollouts(), report=report, steps=1)
    assert len(learner.batches[0]["lengths"]) == 8
    assert len(recorded_rows(run, [2, 3])) == 16
    (line,) = [line for line in report.lines if line.startswith("Skipped task")]
    assert "9000 tokens" in line


async def test_run_ends_if_all_tasks_are_invalid(tmp_path: Path) -> None:
    tasks = TaskSource.open(ARITHMETIC)
    run_group = RefusingRollouts(tasks)
    run_group.refuses = 3
    with pytest.raises(ExceptionGroup) as caught:  # by the router around it
        await run_loop(tmp_path, tasks=tasks, run_group=run_group, steps=1)
    assert "9000 tokens (3 tasks in a row refused)" in str(sole(caught.value))


async def test_environment_that_always_fails_ends_the_run_with_its_name(tmp_path: Path) -> None:
    sources = {name: TaskSource.open(ARITHMETIC) for name in ("good", "bad")}
    tasks = MixedTasks(sources, {"good": 1, "bad": 1})

    class OneFails(FakeRollouts):
        async def __call__(self, prompt: object, *, name: str, **options: Any) -> Any:
            if "-bad-" in name:
                raise EnvironmentFailed("environment bad: the judge's key has expired")
            return await super().__call__(prompt, name=name, **options)

    with pytest.raises(ExceptionGroup) as caught:
        await run_loop(tmp_path, tasks=tasks, run_group=OneFails(sources["good"]), steps=9)
    assert "key has expired (3 tasks of bad in a row refused)" in str(sole(caught.value))


async def test_group_has_the_version_that_is_live_when_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If new weights go live while the group is recorded, the recorded version would make it
    too stale for the batch that may take it."""
    came, admit, now_live = anyio.Event(), GroupQueue.admit, Slots.now_live

    async def slow(self: GroupQueue, *arguments: Any, **named: Any) -> Any:
        group = await admit(self, *arguments, **named)
        if group.number == 6:
            await came.wait()
        return group

    def tell(self: Slots, version: int) -> None:
        now_live(self, version)
        if version == 1:
            came.set()

    monkeypatch.setattr(GroupQueue, "admit", slow)
    monkeypatch.setattr(Slots, "now_live", tell)
    _, _, run = await run_loop(tmp_path, steps=3, max_staleness=1)
    with closing(sqlite3.connect(run.path / "queue.sqlite")) as db:
        query = "SELECT version FROM groups WHERE number IN (1, 6) ORDER BY number"
        assert db.execute(query).fetchall() == [(0,), (1,)]


async def test_resumed_run_does_not_draw_filtered_tasks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = {"hard": StageSettings(steps=1, filter_tasks=4), "rest": StageSettings(steps=1)}

    async def killed(*arguments: Any, **named: Any) -> Any:
        raise OSError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(GroupQueue, "admit", killed)
        await run_until_failure(tmp_path, stages=stages)
    async with GroupQueue.open(tmp_path / "run" / "queue.sqlite") as queue:
        cursor = await queue.cursor()
    tasks = TaskSource.open(ARITHMETIC, cursor.get("tasks"))
    _, run_group, run = await run_loop(
        tmp_path, tasks=tasks, stages=stages, restored={"step": 0, "version": 0}
    )
    expected = list(itertools.islice(TaskSource.open(ARITHMETIC), 7))
    assert set(run_group.prompts[:3]) <= {task.prompt for task in expected[:4]}
    assert run_group.prompts[3:] == [task.prompt for task in expected[4:]]
    assert (
        len([row for row in read_lines(run.path / "metrics.jsonl") if "filter/num_tasks" in row])
        == 1
    )


async def test_stages_have_their_own_budgets_and_optimizer(tmp_path: Path) -> None:
    stages = {
        "short": StageSettings(steps=1, max_turns=2, max_response_tokens=50),
        "long": StageSettings(steps=2, reset_optimizer=True),
    }
    report = RecordedProgress()
    learner, run_group, run = await run_loop(
        tmp_path, stages=stages, report=report, evaluate_every=5
    )
    ops = [op for op, _ in learner.requests]
    short, long = ["step", "publish"], ["reset_optimizer", "step", "publish", "step", "publish"]
    assert ops == ["publish", *short, *long, "save"]
    budgets = [(b.max_turns, b.max_response_tokens) for b in run_group.budgets]
    # Held-out tasks at the start, and at the end of each stage.
    assert budgets == [(10, 100)] * 4 + [(2, 50)] * 7 + [(10, 100)] * 10
    assert [row["step"] for row in read_lines(run.path / "metrics.jsonl")] == [0, 1, 1, 2, 3, 3]
    last = report.statuses[-1]
    assert (last.stage, last.step, last.num_steps) == ("stage 2 of 2: long", 2, 2)
    assert last.left_s == 0
    assert {"reward", "held-out reward", "time"} <= set(last.values)
    assert any("3/3: reward" in line for line in report.lines)
    assert any(re.fullmatch(r"held out [\d.]+ -> [\d.]+ in 3 steps", line) for line in report.lines)


async def test_filtered_stage_trains_on_tasks_that_some_rollouts_fail(tmp_path: Path) -> None:
    class HalfSolved(FakeRollouts):
        """Solves every other task while tasks are filtered."""

        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            number = int(options["name"].split("-")[2]) if "filter" in options["name"] else 1
            self._right = 0.5 if number % 2 else 1.0
            return await super().__call__(prompt, **options)

    run_group = HalfSolved()
    stages = {"hard": StageSettings(steps=2, filter_tasks=4)}
    _, _, run = await run_loop(tmp_path, run_group=run_group, stages=stages, group_size=6)
    assert run_group.sizes == [8] * 4 + [6] * 6
    hard = {run_group.prompts[1], run_group.prompts[3]}
    assert set(run_group.prompts[4:]) == hard
    filtered, *_ = read_lines(run.path / "metrics.jsonl")
    assert (filtered["filter/num_tasks"], filtered["filter/num_left"]) == (4, 2)


class UnevenRollouts(FakeRollouts):
    """Solves sums with an even number each time, and half of the others."""

    killed_at = ""

    async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
        if options["name"].partition("-")[0] == self.killed_at:
            raise OSError("killed")
        self._right = 0.5 if int(str(prompt).split()[2]) % 2 else 1.0
        return await super().__call__(prompt, **options)


def sum_tasks(folder: Path, cursor: dict[str, Any] | None = None) -> TaskSource:
    """Return six sums as tasks."""
    file = folder / "sums.jsonl"
    rows = [{"problem": f"What is {n} plus 1?", "answer": str(n + 1)} for n in range(6)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return TaskSource.open(TasksSettings(kind="jsonl", paths=[file]), cursor)


async def test_curriculum_retires_solved_tasks_and_resumes_identically(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"curriculum": True, "steps": 24}
    tasks = sum_tasks(tmp_path)
    _, run_group, run = await run_loop(
        tmp_path / "whole", tasks=tasks, run_group=UnevenRollouts(tasks), **settings
    )
    metrics = read_lines(run.path / "metrics.jsonl")
    assert metrics[0]["curriculum/num_tasks"] == 3
    assert metrics[-1]["curriculum/num_tasks"] == 6
    assert metrics[-1]["curriculum/num_retired"] == 3
    assert metrics[-1]["curriculum/solve_rate"] == pytest.approx((1 + 4 / 7) / 2)
    assert len(set(run_group.prompts[:6])) == 6  # the first epoch
    last = [int(prompt.split()[2]) for prompt in run_group.prompts[-12:]]
    assert sum(number % 2 for number in last) >= 9
    query = "SELECT number, version, json_extract(task, '$.id') FROM groups ORDER BY number"
    expected = query_journal(run, query)

    killed = UnevenRollouts(tasks)
    killed.killed_at = "25"
    await run_until_failure(
        tmp_path / "cut", tasks=sum_tasks(tmp_path), run_group=killed, **settings
    )
    async with GroupQueue.open(tmp_path / "cut" / "run" / "queue.sqlite") as queue:
        cursor = await queue.cursor()
    tasks = sum_tasks(tmp_path, cursor["tasks"])
    _, _, run = await run_loop(
        tmp_path / "cut",
        tasks=tasks,
        run_group=UnevenRollouts(tasks),
        restored={"step": 0, "version": 0},
        **settings,
    )
    assert query_journal(run, query) == expected
    for row, expected_row in zip(read_lines(run.path / "metrics.jsonl"), metrics, strict=True):
        names = [name for name in expected_row if name.startswith("curriculum/")]
        assert len(names) == 3
        assert {name: row[name] for name in names} == {name: expected_row[name] for name in names}


async def test_without_a_curriculum_every_task_comes_once_in_an_epoch(tmp_path: Path) -> None:
    tasks = sum_tasks(tmp_path)
    _, run_group, run = await run_loop(
        tmp_path, tasks=tasks, run_group=UnevenRollouts(tasks), steps=8
    )
    assert set(Counter(run_group.prompts).values()) == {4}
    assert not any(
        "curriculum" in name for row in read_lines(run.path / "metrics.jsonl") for name in row
    )
    rates = "SELECT key, sum(num_solved), sum(num_rollouts) FROM outcomes GROUP BY key"
    assert sorted(row[1:] for row in query_journal(run, rates)) == [(16, 28)] * 3 + [(28, 28)] * 3


async def test_events_say_which_groups_are_trained_on(tmp_path: Path) -> None:
    events: list[Event] = []
    stages = {"hard": StageSettings(steps=1, filter_tasks=4)}
    await run_loop(tmp_path, stages=stages, evaluate_every=1, emit=events.append)
    started = {event.group: event for event in events if isinstance(event, GroupStarted)}
    finished = {event.group: event for event in events if isinstance(event, GroupFinished)}
    assert started.keys() == finished.keys()
    assert len(started) == 4 + 4 + 3 + 4
    for name, event in finished.items():
        is_chosen = "filter" not in name and "held-out" not in name
        assert event.is_chosen == started[name].is_chosen == is_chosen
        assert bool(event.kept or event.dropped or event.has_signal) == is_chosen
        assert event.mean_reward is not None


async def test_stage_whose_tasks_are_all_solved_is_skipped(tmp_path: Path) -> None:
    stages = {"hard": StageSettings(steps=9, filter_tasks=2), "then": StageSettings(steps=1)}
    report = RecordedProgress()
    _, run_group, run = await run_loop(tmp_path, right=1.0, stages=stages, report=report)
    assert run_group.sizes == [8] * 2 + [8] * 3
    run.write("config.toml", to_toml(TrainSettings(stages=stages)))
    path = run.path
    del run
    gc.collect()
    summary = summarize(path)
    assert (summary.state, summary.step, summary.num_steps) == (RunState.FINISHED, 1, 10)
    assert any("every rollout solves its tasks" in line for line in report.lines)
    assert report.statuses[-1].left_s is None


async def test_rollouts_continue_while_the_learner_trains(tmp_path: Path) -> None:
    run_group = GatedRollouts()

    class Slow(RecordingLearner):
        async def handle(self, op: str, **arguments: Any) -> dict[str, Any]:
            if op == "step" and not self.batches:
                # All slots of two versions are in use, and a group that is late is waited for.
                await eventually(lambda: len(run_group.names) == 6)
                for number in (1, 2, 4):
                    run_group.may_end[number].set()
            if op == "step" and len(self.batches) == 1:
                run_group.let_end(7, 19)
            return await super().handle(op, **arguments)

    for number in (3, 5, 6):
        run_group.may_end[number].set()
    _, _, run = await run_loop(
        tmp_path, run_group=run_group, learner=Slow(), steps=4, max_staleness=1
    )
    metrics = read_lines(run.path / "metrics.jsonl")
    assert [row["version"] for row in metrics] == [0, 1, 2, 3]
    assert [row["staleness_max"] for row in metrics] == [0, 1, 1, 1]
    assert query_journal(run, "SELECT step, number FROM groups ORDER BY step, number")[:6] == [
        (1, 3), (1, 5), (1, 6), (2, 1), (2, 2), (2, 4),
    ]  # fmt: skip


async def test_dynamic_sampling_replaces_groups_with_equal_rewards(tmp_path: Path) -> None:
    class Easy(FakeRollouts):
        """Solves every other task each time."""

        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            self._right = 1.0 if int(options["name"].split("-")[0]) % 2 else 0.5
            return await super().__call__(prompt, **options)

    learner, run_group, run = await run_loop(
        tmp_path, run_group=Easy(), steps=1, dynamic_sampling=True
    )
    assert learner.batches[0]["groups"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert len(run_group.sizes) == 6
    (metrics,) = read_lines(run.path / "metrics.jsonl")
    assert metrics["num_groups_replaced"] == metrics["num_groups_rejected"] == 3
    assert metrics["num_rollouts"] == 6 * 8


async def test_many_replaced_groups_in_a_row_are_reported(tmp_path: Path) -> None:
    report = RecordedProgress()

    class Easy(FakeRollouts):
        """Solves everything until the warning is printed."""

        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            self._right = (
                0.5
                if any("groups in a row were replaced" in line for line in report.lines)
                else 1.0
            )
            return await super().__call__(prompt, **options)

    with anyio.fail_after(patient(50)):
        _, run_group, _ = await run_loop(
            tmp_path, run_group=Easy(), report=report, steps=1,
            prompts_per_step=1, dynamic_sampling=True,
        )  # fmt: skip
    assert len(run_group.names) >= 11
    (line,) = [line for line in report.lines if "groups in a row were replaced" in line]
    assert "10 groups in a row" in line


async def test_finished_stage_is_not_continued_when_its_steps_are_raised(tmp_path: Path) -> None:
    run_group = KilledRollouts()
    run_group.killed_at = "10-"  # in the last step
    stages = {"one": StageSettings(steps=2), "two": StageSettings(steps=2)}
    await run_until_failure(tmp_path, run_group=run_group, stages=stages)
    stages["one"] = StageSettings(steps=4)
    _, _, run = await run_loop(tmp_path, restored={"step": 0, "version": 0}, stages=stages)
    assert [(row["step"], row["stage"]) for row in read_lines(run.path / "metrics.jsonl")] == [
        (1, 1), (2, 1), (3, 2), (4, 2),
    ]  # fmt: skip
