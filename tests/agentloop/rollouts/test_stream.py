"""Running groups of tasks: a source is read only with capacity and a reader."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import anyio
import pytest

from agentloop.errors import RequestError
from agentloop.rollouts.stream import finished_groups
from agentloop.trajectory import Trajectory
from tests.patience import patient


class Source:
    """A source that counts its requests."""

    def __init__(self, num_tasks: int) -> None:
        self.num_asked = 0
        self._num_tasks = num_tasks

    def __iter__(self) -> Iterator[str]:
        for index in range(self._num_tasks):
            self.num_asked += 1
            yield f"task {index}"


async def wait_for_capacity() -> None: ...


async def run(task: str, queued: anyio.Event) -> list[Trajectory]:
    return [Trajectory(task, [1])]


async def test_every_task_becomes_a_group() -> None:
    async with finished_groups(Source(20), run, wait_for_capacity, max_open=4) as groups:
        finished = [group async for group in groups]
    assert sorted(group.index for group in finished) == list(range(20))
    assert all(group.task == f"task {group.index}" for group in finished)
    assert all(group.trajectories[0].id == group.task for group in finished)


async def test_sources_may_be_asynchronous_or_empty() -> None:
    async def two() -> AsyncIterator[str]:
        yield "task 0"
        await anyio.lowlevel.checkpoint()
        yield "task 1"

    async with finished_groups(two(), run, wait_for_capacity, max_open=4) as groups:
        assert len([group async for group in groups]) == 2
    async with finished_groups(list[str](), run, wait_for_capacity, max_open=4) as groups:
        assert [group async for group in groups] == []


async def test_groups_are_yielded_as_they_finish() -> None:
    ends = {f"task {index}": anyio.Event() for index in range(3)}

    async def slow(task: str, queued: anyio.Event) -> list[Trajectory]:
        queued.set()
        await ends[task].wait()
        return []

    async with finished_groups(Source(3), slow, wait_for_capacity, max_open=3) as groups:
        for index in (2, 0, 1):
            ends[f"task {index}"].set()
            assert (await anext(groups)).index == index


async def test_slow_reader_applies_backpressure() -> None:
    source = Source(100)
    async with finished_groups(source, run, wait_for_capacity, max_open=3) as groups:
        await anyio.wait_all_tasks_blocked()
        assert source.num_asked == 3
        await anext(groups)
        await anyio.wait_all_tasks_blocked()
        assert source.num_asked == 4


async def test_source_is_not_read_without_capacity() -> None:
    source, free = Source(3), anyio.Event()
    async with finished_groups(source, run, free.wait, max_open=3) as groups:
        await anyio.wait_all_tasks_blocked()
        assert source.num_asked == 0
        free.set()
        assert len([group async for group in groups]) == 3


async def test_task_that_cannot_run_is_reported_and_the_others_continue() -> None:
    async def picky(task: str, queued: anyio.Event) -> list[Trajectory]:
        if task == "task 1":
            raise RequestError("too long")
        return []

    async with finished_groups(Source(3), picky, wait_for_capacity, max_open=3) as groups:
        errors = {group.index: group.error async for group in groups}
    assert str(errors[1]) == "too long"
    assert errors[0] is errors[2] is None


@pytest.mark.parametrize("where", ["source", "group"])
async def test_other_errors_are_raised(where: str) -> None:
    def source() -> Iterator[str]:
        yield "task 0"
        if where == "source":
            raise OSError("the disk")

    async def failing(task: str, queued: anyio.Event) -> list[Trajectory]:
        if where == "group":
            raise OSError("the disk")
        return []

    async def drain() -> None:
        async with finished_groups(source(), failing, wait_for_capacity, max_open=3) as groups:
            async for _ in groups:
                pass

    with pytest.raises(OSError, match="the disk"):
        await drain()


async def test_leaving_early_cancels_the_rest() -> None:
    num_running = 0

    async def endless(task: str, queued: anyio.Event) -> list[Trajectory]:
        nonlocal num_running
        if task == "task 0":
            return []
        num_running += 1
        queued.set()
        try:
            await anyio.sleep_forever()
        finally:
            num_running -= 1
        return []

    async with finished_groups(Source(5), endless, wait_for_capacity, max_open=5) as groups:
        await anext(groups)
        await anyio.wait_all_tasks_blocked()
        assert num_running == 4
    assert num_running == 0


async def test_early_exit_closes_the_source_in_the_iterating_task() -> None:
    tasks: list[anyio.TaskInfo] = []

    async def source() -> AsyncIterator[str]:
        tasks.append(anyio.get_current_task())
        try:
            with anyio.fail_after(patient(60)):  # may be left only where it was entered
                while True:
                    yield "task"
        finally:
            tasks.append(anyio.get_current_task())

    async with finished_groups(source(), run, wait_for_capacity, max_open=2) as groups:
        await anext(groups)
        await anyio.wait_all_tasks_blocked()
    assert len(tasks) == 2
    assert tasks[0] == tasks[1]


async def test_max_open_must_be_positive() -> None:
    with pytest.raises(RequestError, match="max_open: must be at least 1, got 0"):
        async with finished_groups(Source(1), run, wait_for_capacity, max_open=0):
            pass


async def test_next_task_is_requested_once_the_last_one_is_queued() -> None:
    """Capacity accounts for queued groups, so it must be checked after the last one is queued."""
    source, in_line, end = Source(3), anyio.Event(), anyio.Event()

    async def slow_to_the_gate(task: str, queued: anyio.Event) -> list[Trajectory]:
        await in_line.wait()
        queued.set()
        await end.wait()
        return []

    async with finished_groups(source, slow_to_the_gate, wait_for_capacity, max_open=3) as groups:
        await anyio.wait_all_tasks_blocked()
        assert source.num_asked == 1
        in_line.set()
        await anyio.wait_all_tasks_blocked()
        assert source.num_asked == 3
        end.set()
        assert len([group async for group in groups]) == 3
