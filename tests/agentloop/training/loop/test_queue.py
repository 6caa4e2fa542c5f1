"""The queue is durable over kills, and no group is in two batches."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import cast

import anyio
import pytest

from agentloop.environments.tasks.sources import Task
from agentloop.errors import RunFolderError
from agentloop.rollouts.metrics import GroupFigures, RolloutFigures
from agentloop.training.loop.curriculum import GroupOutcome
from agentloop.training.loop.queue import GroupQueue, QueuedGroup, StageNote, StepNotes, TaskCursor

CURSOR: TaskCursor = {"num_drawn": 1}


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[GroupQueue]:
    async with GroupQueue.open(folder / "queue.sqlite") as queue:
        yield queue


def figures(*rewards: float | None) -> GroupFigures:
    return GroupFigures([RolloutFigures(reward) for reward in rewards])


async def admitted(queue: GroupQueue, count: int, *, version: int = 0) -> list[int]:
    tasks = [Task(f"t{index}", "What is 1 plus 1?", "2") for index in range(count)]
    result = [await queue.admit(task, version=version, cursor=CURSOR) for task in tasks]
    return [group.number for group in result]


async def finished(queue: GroupQueue, count: int) -> list[int]:
    numbers = await admitted(queue, count)
    for number in numbers:
        await queue.finish(number, path=f"{number}.jsonl", num_bytes=10, figures=figures(number))
    return numbers


async def test_committed_data_survives_a_restart(tmp_path: Path) -> None:
    task = Task("a", [{"role": "user", "content": "?"}], "1", "book", 3, {"x": [1]})
    async with opened(tmp_path) as queue:
        first = await queue.admit(task, version=4, cursor={"num_drawn": 7})
        two, three, four = await admitted(queue, 3)
        await queue.finish(two, path="2.jsonl", num_bytes=10, figures=figures(0.5))
        await queue.finish(three, path="3.jsonl", num_bytes=5, figures=GroupFigures())
        await queue.discard(four, path="4.jsonl", figures=GroupFigures())
        await queue.lease(1, [three], StepNotes(0))
        await queue.begin_stage(1, step=0, tasks=None, cursor=CURSOR)
        assert queue.num_bytes == 10
    async with opened(tmp_path) as queue:
        assert await queue.open_groups() == [QueuedGroup(first.number, task, 4, None, 0)]
        (remaining,) = await queue.finished_groups()
        assert (remaining.number, remaining.path, remaining.figures) == (
            two,
            "2.jsonl",
            figures(0.5),
        )
        assert queue.num_bytes == 10
        assert await queue.cursor() == CURSOR
        assert await queue.stage(1) == StageNote(0, None, 4, CURSOR)
        assert await queue.stage(2) is None
        assert await queue.counts() == {"open": 1, "finished": 1, "leased": 1, "discarded": 1}


async def test_task_may_contain_values_that_are_not_json(tmp_path: Path) -> None:
    stated = {"when": date(2026, 11, 21)}
    async with opened(tmp_path) as queue:
        await queue.admit(Task("a", "?", "1", extra=stated), version=0, cursor=CURSOR)
        (group,) = await queue.open_groups()
    assert group.task.extra == {"when": "2026-11-21"}


async def test_figures_that_are_not_plain_data_are_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as queue:
        (number,) = await admitted(queue, 1)
        with pytest.raises(TypeError):
            await queue.finish(
                number, path="1", num_bytes=1, figures=figures(cast(float, Decimal("0.5")))
            )
        assert [group.number for group in await queue.open_groups()] == [number]


async def test_group_is_in_one_batch(tmp_path: Path) -> None:
    async with opened(tmp_path) as queue:
        first, two, three = await finished(queue, 3)
        lease = await queue.lease(1, [two, first], StepNotes(0))
        assert [group.number for group in lease.groups] == [two, first]
        with pytest.raises(ValueError, match=f"group {two} is leased"):
            await queue.lease(2, [three, two], StepNotes(0))
        # All or nothing.
        assert [group.number for group in await queue.finished_groups()] == [three]
        with pytest.raises(ValueError, match="step 1 already has a batch"):
            await queue.lease(1, [three], StepNotes(0))
        with pytest.raises(ValueError, match="not there"):
            await queue.lease(2, [99], StepNotes(0))
        (number,) = await admitted(queue, 1)
        with pytest.raises(ValueError, match=f"group {number} is open"):
            await queue.lease(2, [number], StepNotes(0))


async def test_steps_after_the_checkpoint_are_repeated_in_order(tmp_path: Path) -> None:
    async with opened(tmp_path) as queue:
        numbers = await finished(queue, 4)
        for step, number in enumerate(reversed(numbers), 1):
            await queue.lease(step, [number], StepNotes(step))
            await queue.record_result(step, {"loss": step / 2})
        await queue.acknowledge(2)
    async with opened(tmp_path) as queue:
        again = await queue.rewind(2)
        assert [lease.step for lease in again] == [3, 4]
        assert [lease.groups[0].number for lease in again] == [numbers[1], numbers[0]]
        assert [lease.result for lease in again] == [{"loss": 1.5}, {"loss": 2.0}]
        assert again[0].notes == StepNotes(3)
        # From an older checkpoint, more.
        assert [lease.step for lease in await queue.rewind(0)] == [1, 2, 3, 4]


async def test_steps_in_a_checkpoint_count_as_trained(tmp_path: Path) -> None:
    """The process was killed between the checkpoint and its acknowledgement."""
    async with opened(tmp_path) as queue:
        first, two = await finished(queue, 2)
        await queue.lease(1, [first], StepNotes(0))
        await queue.lease(2, [two], StepNotes(0))
        (again,) = await queue.rewind(1)
        assert again.step == 2
        assert await queue.counts() == {"trained": 1, "leased": 1}


async def test_step_without_a_report_has_no_result(tmp_path: Path) -> None:
    async with opened(tmp_path) as queue:
        await queue.lease(1, await finished(queue, 1), StepNotes(0))
        (lease,) = await queue.rewind(0)
        assert lease.result is None


async def test_discarded_groups_belong_to_the_next_step(tmp_path: Path) -> None:
    async with opened(tmp_path) as queue:
        first, two = await finished(queue, 2)
        lost, later = await admitted(queue, 2)
        await queue.discard(lost, path=None, figures=figures(9))
    async with opened(tmp_path) as queue:
        lease = await queue.lease(1, [first], StepNotes(0))
        assert [group.number for group in lease.groups] == [first]
        assert [(group.number, group.figures) for group in lease.replaced] == [(lost, figures(9))]
        await queue.discard(later, path=None, figures=GroupFigures())
        await queue.lease(2, [two], StepNotes(0))
        again = await queue.rewind(0)
    assert [[group.number for group in lease.replaced] for lease in again] == [[lost], [later]]


async def test_undone_groups_are_reopened_or_deleted_with_their_stage(tmp_path: Path) -> None:
    async with opened(tmp_path) as queue:
        await queue.begin_stage(1, step=0, tasks=None, cursor={"num_drawn": 0})
        first, two, three, four = await finished(queue, 4)
        (discarded,) = await admitted(queue, 1)
        await queue.discard(discarded, path="5.jsonl", figures=GroupFigures())
        await queue.lease(1, [first], StepNotes(0))
        await queue.lease(2, [two], StepNotes(0))
        (still_open,) = await admitted(queue, 1)
        stage = await queue.begin_stage(2, step=2, tasks=[], cursor={"num_drawn": 9})
        assert (stage.last_group, stage.cursor) == (still_open, CURSOR)
        (later,) = await admitted(queue, 1)
        await queue.discard(later, path="7.jsonl", figures=GroupFigures())
        await queue.note("cursor", {"num_drawn": 10})
        await queue.acknowledge(2)

        await queue.undo(1)
        assert queue.num_bytes == 0
        again = [two, three, four, still_open]
        groups = await queue.open_groups()
        assert [(first.number, first.path, first.num_bytes) for first in groups] == [
            (number, None, 0) for number in again
        ]
        assert await queue.stage(1) is not None
        assert await queue.stage(2) is None
        assert await queue.cursor() == CURSOR
        undone = await queue.read_note("undone")
        assert undone["step"] == 1
        assert sorted(undone["files"]) == ["2.jsonl", "3.jsonl", "4.jsonl", "7.jsonl"]
        assert await queue.rewind(1) == []
        (lease,) = await queue.rewind(0)
        assert [group.number for group in lease.replaced] == [discarded]  # before the first step


async def test_outcomes_are_recorded_with_the_step_and_undone_with_it(tmp_path: Path) -> None:
    solved, mixed = GroupOutcome(2, 2, is_equal=True), GroupOutcome(1, 2, is_equal=False)
    async with opened(tmp_path) as queue:
        first, two, three, lost = await admitted(queue, 4)
        await queue.finish(first, path="1", num_bytes=1, figures=figures(1, 0))
        await queue.finish(two, path="2", num_bytes=1, figures=figures(None, 1, 1))
        await queue.discard(three, path="3", figures=figures(1, 1))
        await queue.finish(lost, path="4", num_bytes=1, figures=figures(None, None))
        filtered = [("f", solved)]
        await queue.begin_stage(1, step=0, tasks=None, cursor=CURSOR, outcomes=filtered)
        assert await queue.outcomes() == filtered
        lease = await queue.lease(
            1, [two, first], StepNotes(0), rate_key=lambda task: f"k{task.id}"
        )
        expected = [("kt1", solved), ("kt0", mixed), ("kt2", solved)]
        assert lease.outcomes == expected
        assert (await queue.lease(2, [lost], StepNotes(0))).outcomes == []
    async with opened(tmp_path) as queue:
        assert await queue.outcomes() == filtered + expected
        await queue.rewind(0)  # the same batches again, which were counted
        assert await queue.outcomes() == filtered + expected
        await queue.undo(0)
        assert await queue.outcomes() == filtered


async def test_reopened_groups_have_no_results(tmp_path: Path) -> None:
    async with opened(tmp_path) as queue:
        (first,) = await finished(queue, 1)
        (two,) = await admitted(queue, 1)
        await queue.reopen([first, two], version=3)
        assert queue.num_bytes == 0
        assert [(g.number, g.version, g.path) for g in await queue.open_groups()] == [
            (first, 3, None),
            (two, 3, None),
        ]
        await queue.finish(first, path="again", num_bytes=1, figures=GroupFigures())
        await queue.lease(1, [first], StepNotes(0))
        with pytest.raises(ValueError, match="leased"):
            await queue.reopen([first], version=3)


async def test_group_finishes_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as queue:
        (first,) = await finished(queue, 1)
        with pytest.raises(ValueError, match="finished"):
            await queue.finish(first, path="", num_bytes=0, figures=GroupFigures())
        with pytest.raises(ValueError, match="finished"):
            await queue.discard(first, path="", figures=GroupFigures())


CHILD = """
import sys, anyio
from pathlib import Path
from agentloop.training.loop.queue import GroupQueue, StepNotes
from agentloop.environments.tasks.sources import Task
from agentloop.rollouts.metrics import GroupFigures, RolloutFigures

async def main():
    async with GroupQueue.open(Path(sys.argv[1])) as queue:
        step = 0
        while True:
            step += 1
            found = []
            for _ in range(3):
                position = (await queue.cursor()).get("num_drawn", 0) + 1
                task = Task(str(position), "?", "")
                group = await queue.admit(task, version=0, cursor={"num_drawn": position})
                figures = GroupFigures([RolloutFigures(1.0), RolloutFigures(0.0)])
                await queue.finish(group.number, path="p", num_bytes=1, figures=figures)
                found.append(group.number)
            await queue.lease(step, found, StepNotes(0))
            await queue.record_result(step, {})
            if step % 4 == 0:
                await queue.acknowledge(step - 2)
            print(step, flush=True)

anyio.run(main)
"""


@pytest.mark.timeout(120)
@pytest.mark.full
def test_kill_at_any_moment_loses_and_duplicates_nothing(tmp_path: Path) -> None:
    for after in range(1, 5):
        path = tmp_path / str(after) / "queue.sqlite"
        path.parent.mkdir()
        command = [sys.executable, "-c", CHILD, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            reported = 0
            try:
                while reported < 3 * after:
                    reported = int(child.stdout.readline())
            finally:
                child.kill()
        anyio.run(_check, path.parent, reported)


async def _check(folder: Path, reported: int) -> None:
    async with opened(folder) as queue:
        cursor = await queue.cursor()
        assert sum((await queue.counts()).values()) == cursor["num_drawn"]  # none skipped or twice
        leases = await queue.rewind(0)
        assert [lease.step for lease in leases] == list(range(1, len(leases) + 1))
        assert len(leases) >= reported
        learned = [group.task.id for lease in leases for group in lease.groups]
        assert len(set(learned)) == len(learned) == 3 * len(leases)
        outcome = GroupOutcome(1, 2, is_equal=False)
        assert await queue.outcomes() == [(id, outcome) for id in learned]


async def test_file_of_another_version_is_rejected(tmp_path: Path) -> None:
    async with opened(tmp_path):
        pass
    connection = sqlite3.connect(tmp_path / "queue.sqlite")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(RunFolderError, match=r"another version of agentloop \(format 99, not 3\)"):
        async with opened(tmp_path):
            pass


async def test_invalid_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "queue.sqlite").write_text("words " * 1000)
    with pytest.raises(RunFolderError, match=r"run\.folder: .*sqlite: file is not a database"):
        async with opened(tmp_path):
            pass
    with pytest.raises(RunFolderError, match="unable to open"):
        async with GroupQueue.open(tmp_path / "nowhere" / "queue.sqlite"):
            pass


async def test_damaged_note_is_reported_with_the_file(tmp_path: Path) -> None:
    async with opened(tmp_path) as queue:
        await queue.note("cursor", {"num_drawn": 1})
    with closing(sqlite3.connect(tmp_path / "queue.sqlite")) as connection, connection:
        connection.execute("UPDATE notes SET value = substr(value, 1, 5)")
    connection.close()
    async with opened(tmp_path) as queue:
        with pytest.raises(RunFolderError, match=r"run\.folder: .*queue\.sqlite"):
            await queue.read_note("cursor")
