"""Run a group of rollouts per task, as many at a time as capacity allows.

    source ──a task, once there is capacity──> a group in flight ──> finished ──> the reader
       ▲                                                                            │
       └─────────── the next task, while few enough are in flight or unread ────────┘

Backpressure comes from both ends: from the KV caches, through `wait_for_capacity`, and from a slow
reader, through `max_open`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from agentloop.aio import Signal, task_group
from agentloop.errors import RequestError
from agentloop.trajectory import Trajectory

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FinishedGroup(Generic[T]):
    """The `index`-th task of a source and its rollouts.

    Attributes:
        error: The task could not be run, and there are no trajectories.
    """

    index: int
    task: T
    trajectories: Sequence[Trajectory]
    error: RequestError | None = None


@asynccontextmanager
async def finished_groups(
    source: Iterable[T] | AsyncIterable[T],
    run_group: Callable[[T, anyio.Event], Awaitable[Sequence[Trajectory]]],
    wait_for_capacity: Callable[[], Awaitable[None]] = anyio.lowlevel.checkpoint,
    *,
    max_open: int,
) -> AsyncIterator[AsyncIterator[FinishedGroup[T]]]:
    """Run a group for each task of `source` and yield them as they finish.

    Leaving the context cancels the groups in flight.

    Args:
        source: An asynchronous generator is closed at the end, in the task that iterated over it,
            as its cancel scopes require; it cannot be continued.
        run_group: Runs the group of a task. It sets its second argument once the group is queued
            for capacity; the next task is not requested before that.
        wait_for_capacity: Waits until one more group may start; the next task is requested after
            that.
        max_open: Maximum number of groups that are in flight or not yet read.

    Raises:
        RequestError: `max_open` is less than 1.
        Exception: Any error of the source or of a group, except a group's RequestError.
    """
    if max_open < 1:
        raise RequestError(f"max_open: must be at least 1, got {max_open}")
    open_slots = anyio.Semaphore(max_open)
    finished: deque[FinishedGroup[T]] = deque()
    changed = Signal()
    num_running = 0
    is_exhausted = False

    async def run(index: int, task: T, queued: anyio.Event) -> None:
        nonlocal num_running
        trajectories: Sequence[Trajectory] = ()
        error = None
        try:
            trajectories = await run_group(task, queued)
        except RequestError as caught:
            error = caught
        queued.set()
        num_running -= 1
        finished.append(FinishedGroup(index, task, trajectories, error))
        changed.notify()

    async def feed(tasks: TaskGroup) -> None:
        nonlocal num_running, is_exhausted
        async with aclosing(_iterate(source)) as iterator:
            for index in itertools.count():
                await open_slots.acquire()  # no deadline: waits for the reader
                await wait_for_capacity()
                try:
                    # no deadline: a source may take any time to produce a task
                    task = await anext(iterator)
                except StopAsyncIteration:
                    break
                num_running += 1
                queued = anyio.Event()
                tasks.start_soon(run, index, task, queued)
                await queued.wait()  # no deadline: encoding a prompt ends by itself
        is_exhausted = True
        changed.notify()

    async def read() -> AsyncGenerator[FinishedGroup[T], None]:
        while finished or num_running or not is_exhausted:
            if finished:
                open_slots.release()
                yield finished.popleft()
            else:
                await changed.wait()  # no deadline: each rollout has one

    async with task_group() as tasks:
        tasks.start_soon(feed, tasks)
        async with aclosing(read()) as groups:
            yield groups
        tasks.cancel_scope.cancel()


async def _iterate(source: Iterable[T] | AsyncIterable[T]) -> AsyncGenerator[T, None]:
    if isinstance(source, AsyncGenerator):
        async with aclosing(source):
            async for task in source:  # no deadline: as above
                yield task
    elif isinstance(source, AsyncIterable):
        async for task in source:  # no deadline: as above
            yield task
    else:
        for task in source:
            yield task
