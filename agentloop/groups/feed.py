"""Tasks in, finished groups out, as many at a time as there is room for.

    source ──a task, once there is room──> a group in flight ──> finished ──> the reader
       ▲                                                                        │
       └───────────── the next one, while few enough are in flight or unread ───┘

Backpressure comes from both ends: from the KV caches, through `has_room`, and from a reader that is
slow, through `max_open`.
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
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

import anyio
from anyio.abc import TaskGroup, TaskStatus

from agentloop.errors import RequestError, sole
from agentloop.trajectory import Trajectory

__all__ = ["FinishedGroup", "finished_groups"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FinishedGroup(Generic[T]):
    """The `index`-th task of a source, and what became of it.

    Attributes:
        error: the task itself was at fault; then there are no trajectories.
    """

    index: int
    task: T
    trajectories: Sequence[Trajectory]
    error: RequestError | None = None


@asynccontextmanager
async def finished_groups(
    source: Iterable[T] | AsyncIterable[T],
    run_group: Callable[[T, Callable[[], None]], Awaitable[Sequence[Trajectory]]],
    has_room: Callable[[], Awaitable[None]],
    *,
    max_open: int,
) -> AsyncIterator[AsyncIterator[FinishedGroup[T]]]:
    """Run a group for each task of `source`; iterate over them as they finish.

    Leaving the context cancels what is still in flight.

    Args:
        source: an asynchronous generator is closed at the end, in the task that ran it, as its
            cancel scopes need; so it cannot be gone on with.
        run_group: of a task; calls its second argument once it stands in line for room, so that
            the next task is not asked for before it does.
        has_room: waits until one more group may start; the source is asked only after that.
        max_open: groups that are in flight or that nobody has read yet.

    Raises:
        RequestError: `max_open` is less than 1.
        Exception: whatever the source or a group raised, but for a group's RequestError.
    """
    if max_open < 1:
        raise RequestError(f"max_open: at least 1, not {max_open}")
    places = anyio.Semaphore(max_open)
    finished: deque[FinishedGroup[T]] = deque()
    changed = anyio.Event()
    num_running = 0
    is_dry = False

    def tell() -> None:
        nonlocal changed
        changed.set()
        changed = anyio.Event()

    async def run(index: int, task: T, *, task_status: TaskStatus[None]) -> None:
        nonlocal num_running
        trajectories: Sequence[Trajectory] = ()
        error = None
        try:
            trajectories = await run_group(task, task_status.started)
        except RequestError as caught:
            error = caught
        with suppress(RuntimeError):  # as a rule it has stood in line
            task_status.started()
        num_running -= 1
        finished.append(FinishedGroup(index, task, trajectories, error))
        tell()

    async def feed(tasks: TaskGroup) -> None:
        nonlocal num_running, is_dry
        async with aclosing(_each(source)) as each:
            for index in itertools.count():
                await places.acquire()  # no deadline: until the reader has taken a group
                await has_room()
                try:
                    # no deadline: a source may wait for its tasks as long as it likes
                    task = await anext(each)
                except StopAsyncIteration:
                    break
                num_running += 1
                await tasks.start(run, index, task)
        is_dry = True
        tell()

    async def read() -> AsyncGenerator[FinishedGroup[T], None]:
        while finished or num_running or not is_dry:
            if finished:
                places.release()
                yield finished.popleft()
            else:
                await changed.wait()  # no deadline: the rollouts have theirs

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(feed, tasks)
            async with aclosing(read()) as groups:
                yield groups
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise sole(group) from None


async def _each(source: Iterable[T] | AsyncIterable[T]) -> AsyncGenerator[T, None]:
    if isinstance(source, AsyncGenerator):
        async with aclosing(source):
            async for one in source:  # no deadline: as above
                yield one
    elif isinstance(source, AsyncIterable):
        async for one in source:  # no deadline: as above
            yield one
    else:
        for one in source:
            yield one
