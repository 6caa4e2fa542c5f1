"""GroupBuffer: slot, journal and remaining groups agree, whatever happens in between."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.environments.tasks.sources import TaskSource, TasksSettings
from agentloop.errors import RunFolderError
from agentloop.rollouts.metrics import GroupFigures, RolloutFigures
from agentloop.training.loop.curriculum import Curriculum, DrawPolicy
from agentloop.training.loop.group_buffer import GroupBuffer, Interrupted
from agentloop.training.loop.queue import GroupQueue, QueuedGroup, StepNotes
from agentloop.training.loop.stage_tasks import StageTasks
from agentloop.training.run.control import RunControl

BATCH = 2
FIGURES = GroupFigures()
NOTES = StepNotes(version=0)


@asynccontextmanager
async def opened(
    folder: Path, *, max_staleness: int = 0, num_groups: int = 100, max_bytes: int = 1000
) -> AsyncIterator[tuple[GroupBuffer, GroupQueue]]:
    async with GroupQueue.open(folder / "queue.sqlite") as queue:
        buffer = GroupBuffer(
            queue, RunControl(), batch_size=BATCH, max_staleness=max_staleness, max_bytes=max_bytes
        )
        tasks = StageTasks(TaskSource.open(TasksSettings(kind="arithmetic")), 1)
        await buffer.begin_stage(tasks, num_groups=num_groups, ids=None)
        yield buffer, queue


def can_admit(buffer: GroupBuffer) -> bool:
    return buffer.can_admit  # a function, since mypy takes the property for a constant


async def finish(buffer: GroupBuffer, group: QueuedGroup, num_bytes: int = 1) -> None:
    await buffer.finish(group, path=f"{group.number}", num_bytes=num_bytes, figures=FIGURES)


async def test_batch_frees_its_slots_when_its_weights_are_live(tmp_path: Path) -> None:
    async with opened(tmp_path) as (buffer, queue):
        groups = [await buffer.admit() for _ in range(BATCH)]
        assert not can_admit(buffer)
        assert (buffer.num_open, buffer.num_finished) == (BATCH, 0)
        for group in groups:
            assert not buffer.has_batch
            await finish(buffer, group)
        assert buffer.has_batch
        assert buffer.num_bytes == BATCH
        lease = await buffer.lease(1, NOTES)
        assert [group.number for group in lease.groups] == [1, 2]
        assert not can_admit(buffer)
        assert buffer.num_bytes == 0
        buffer.now_live(1)
        assert can_admit(buffer)
        assert (await buffer.admit()).version == 1
        assert await queue.counts() == {"leased": BATCH, "open": 1}


async def test_outcomes_of_a_batch_change_which_tasks_are_drawn(tmp_path: Path) -> None:
    curriculum = Curriculum(DrawPolicy(retire_after=1))
    tasks = StageTasks(TaskSource.open(TasksSettings(levels=[1, 2])), 1, curriculum)
    figures = GroupFigures([RolloutFigures(1.0)])
    async with opened(tmp_path) as (buffer, _):
        await buffer.begin_stage(tasks, num_groups=100, ids=None)
        easy, lost = await buffer.admit(), await buffer.admit()
        assert [easy.task.level, lost.task.level] == [1, 2]
        await buffer.finish(easy, path=None, num_bytes=0, figures=figures)
        await finish(buffer, lost)
        assert not curriculum.is_retired("arithmetic level 1")  # not leased yet
        await buffer.lease(1, NOTES)
        assert curriculum.is_retired("arithmetic level 1")
        buffer.now_live(1)
        assert [(await buffer.admit()).task.level for _ in range(BATCH)] == [2, 2]


async def test_discarded_group_is_replaced(tmp_path: Path) -> None:
    async with opened(tmp_path, num_groups=1) as (buffer, queue):
        group = await buffer.admit()
        assert buffer.num_left == 0
        await buffer.discard(group, path=None, figures=FIGURES)
        assert buffer.num_left == 1
        assert can_admit(buffer)
        assert (await buffer.admit()).number == 2
        assert await queue.counts() == {"discarded": 1, "open": 1}


async def test_without_a_batch_none_can_be_leased(tmp_path: Path) -> None:
    async with opened(tmp_path) as (buffer, _):
        await finish(buffer, await buffer.admit())
        with pytest.raises(ValueError, match="no batch"):
            await buffer.lease(1, NOTES)


async def test_full_disk_admits_only_what_the_next_batch_needs(tmp_path: Path) -> None:
    async with opened(tmp_path, max_staleness=1, max_bytes=5) as (buffer, _):
        await finish(buffer, await buffer.admit(), num_bytes=10)
        assert can_admit(buffer)
        await finish(buffer, await buffer.admit(), num_bytes=10)
        assert not can_admit(buffer)
        await buffer.lease(1, NOTES)
        assert can_admit(buffer)


async def test_slot_stays_taken_if_the_journal_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*arguments: object, **named: object) -> None:
        raise RunFolderError("disk full")

    async with opened(tmp_path) as (buffer, _):
        group = await buffer.admit()
        with monkeypatch.context() as patched:
            for name in ("finish", "discard"):
                patched.setattr(GroupQueue, name, fail)
            with pytest.raises(RunFolderError):
                await finish(buffer, group)
            with pytest.raises(RunFolderError):
                await buffer.discard(group, path=None, figures=FIGURES)
        assert (buffer.num_open, buffer.num_finished, buffer.num_left) == (1, 0, 99)


async def test_changes_wake_those_who_wait(tmp_path: Path) -> None:
    control = RunControl()
    async with GroupQueue.open(tmp_path / "queue.sqlite") as queue:
        buffer = GroupBuffer(queue, control, batch_size=1, max_staleness=0, max_bytes=9)
        tasks = StageTasks(TaskSource.open(TasksSettings(kind="arithmetic")), 1)
        await buffer.begin_stage(tasks, num_groups=2, ids=None)
        group = await buffer.admit()
        async with anyio.create_task_group() as waiting:
            for condition in (lambda: buffer.has_batch, lambda: buffer.num_finished == 1):
                waiting.start_soon(control.wait_until, condition, "a test", lambda: "a group")
            await anyio.lowlevel.checkpoint()
            await finish(buffer, group)


@given(
    max_staleness=st.integers(0, 2),
    draws=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=40),
    restart_at=st.integers(0, 39),
)
@settings(max_examples=25, deadline=None)
def test_slots_and_journal_agree_also_after_a_restart(
    tmp_path_factory: pytest.TempPathFactory,
    max_staleness: int,
    draws: list[tuple[int, int]],
    restart_at: int,
) -> None:
    """Take random possible actions; at some point open the journal again."""
    folder = tmp_path_factory.mktemp("run")
    steps = itertools.count(1)
    live = learned = 0

    async def play(buffer: GroupBuffer, queue: GroupQueue, some: list[tuple[int, int]]) -> None:
        nonlocal live, learned
        open_ = {group.number: group for group in await queue.open_groups()}
        admitted: dict[int, QueuedGroup] = {}
        for choice, number in some:
            possible = [
                *(["admit"] if buffer.can_admit else []),
                *(["finish", "discard"] if admitted else []),
                *(["live"] if live < learned else []),
                *(["lease"] if buffer.has_batch else []),
            ]
            assert possible, "nothing can happen any more"
            kind = possible[choice % len(possible)]
            group = [*admitted.values()][number % len(admitted)] if admitted else None
            if kind == "admit":
                group = await buffer.admit()
                assert group.version == live
                assert not open_ or group.number in open_  # those of before go first
                open_.pop(group.number, None)
                admitted[group.number] = group
            elif kind == "live":
                live += 1
                buffer.now_live(live)
            elif kind == "lease":
                lease = await buffer.lease(next(steps), NOTES)
                assert all(learned - first.version <= max_staleness for first in lease.groups)
                learned += 1
            elif kind == "finish" and group is not None:
                del admitted[group.number]
                await finish(buffer, group)
            elif group is not None:
                del admitted[group.number]
                await buffer.discard(group, path=None, figures=FIGURES)
            counts = await queue.counts()
            assert buffer.num_open == len(admitted)
            assert buffer.num_finished == counts.get("finished", 0)
            assert buffer.num_bytes == counts.get("finished", 0)
            assert counts.get("open", 0) == len(admitted) + len(open_)

    async def run() -> None:
        nonlocal live
        async with opened(folder, max_staleness=max_staleness) as (buffer, queue):
            await play(buffer, queue, draws[:restart_at])
        async with GroupQueue.open(folder / "queue.sqlite") as queue:
            buffer = GroupBuffer(
                queue, RunControl(), batch_size=BATCH, max_staleness=max_staleness, max_bytes=1000
            )
            live = learned  # the learner's weights are synced first
            buffer.reset(live)
            tasks = StageTasks(TaskSource.open(TasksSettings(kind="arithmetic")), 1)
            await buffer.begin_stage(tasks, num_groups=100, ids=None)
            before = await queue.counts()
            remaining = buffer.num_left
            assert remaining == 100 - buffer.num_finished
            assert buffer.num_finished <= before.get("finished", 0)
            if buffer.num_finished == before.get("finished", 0):
                await play(buffer, queue, draws[restart_at:])

    anyio.run(run)


async def test_group_of_which_something_was_kept_has_its_version(tmp_path: Path) -> None:
    async with opened(tmp_path, max_staleness=1) as (buffer, queue):
        groups = [await buffer.admit() for _ in range(3)]
        await queue.rolled_out.add(groups[0].number, "1-t.0", -1, {})
        await queue.rolled_out.add(groups[0].number, "1-t.1", 0, {})
        await queue.rolled_out.add(groups[0].number, "1-t.1+1", 0, {})
        await queue.rolled_out.add(groups[1].number, "2-t.0", 0, {})
    for live, versions in ((1, [0, 0, 1]), (3, [3, 3, 3])):
        async with GroupQueue.open(tmp_path / "queue.sqlite") as queue:
            buffer = GroupBuffer(
                queue, RunControl(), batch_size=BATCH, max_staleness=1, max_bytes=1000
            )
            buffer.reset(live)
            tasks = StageTasks(TaskSource.open(TasksSettings(kind="arithmetic")), 1)
            interrupted = await buffer.begin_stage(tasks, num_groups=100, ids=None)
            assert interrupted == Interrupted(3, num_ended=1, num_begun=2)
            assert "1 rollout had ended" in interrupted.in_words(4)
            assert "2 can go on" in interrupted.in_words(4)
            assert "9 must start anew" in interrupted.in_words(4)
            assert [(await buffer.admit()).version for _ in range(3)] == versions
            assert bool(await queue.rolled_out.conversations()) is (live == 1)


async def test_journal_without_kept_rollouts_is_resumed(tmp_path: Path) -> None:
    async with opened(tmp_path) as (buffer, queue):
        await buffer.admit()
    with closing(sqlite3.connect(tmp_path / "queue.sqlite")) as earlier:
        earlier.execute("DROP TABLE kept")
    async with opened(tmp_path) as (buffer, queue):
        group = await buffer.admit()
        assert await queue.rolled_out.of_group(group.number) == []
        await finish(buffer, group)
