"""Additions to anyio: single errors of a task group, threads of a run, a slot, a signal, short
pauses."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread

from agentloop.errors import leaves, sole

__all__ = [
    "LimiterVar",
    "Signal",
    "Slot",
    "collect_garbage_rarely",
    "exempt_from_collection",
    "in_run_thread",
    "is_cancelled_from_outside",
    "let_callbacks_use_anyio",
    "limiter_in",
    "task_group",
]

Result = TypeVar("Result")

_NUM_RUN_THREADS = 8
LimiterVar = anyio.lowlevel.RunVar[anyio.CapacityLimiter]
_run_threads = LimiterVar("_run_threads")


def let_callbacks_use_anyio() -> None:
    """Let callbacks of transports that are made after this in the same task start tasks.

    Where sniffio is installed anyio asks it for the event loop. Outside of tasks it knows that only
    below `anyio.run`: not below `asyncio.run`, nor in a notebook.
    """
    if (sniffio := sys.modules.get("sniffio")) is not None:
        sniffio.current_async_library_cvar.set("asyncio")


def limiter_in(variable: LimiterVar, num_tokens: int) -> anyio.CapacityLimiter:
    """Return the limiter in a variable of the event loop; make it, with `num_tokens`, if needed."""
    try:
        return variable.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(num_tokens)
        variable.set(limiter)
        return limiter


@asynccontextmanager
async def task_group(*, only_first: bool = False) -> AsyncIterator[anyio.abc.TaskGroup]:
    """Open a task group that raises the error of a task by itself instead of in a group.

    Args:
        only_first: if several tasks have failed, raise the first error and drop the others;
            otherwise they are raised as a group.
    """
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        error = next(leaves(group)) if only_first else sole(group)
        raise error from error.__cause__


async def in_run_thread(
    function: Callable[..., Result], *args: object, abandon_on_cancel: bool = False
) -> Result:
    """Run a function in one of the threads that are kept for a run's journal and files.

    Environments may occupy all threads that others get from `anyio.to_thread.run_sync`, which this
    is otherwise like.
    """
    limiter = limiter_in(_run_threads, _NUM_RUN_THREADS)
    return await anyio.to_thread.run_sync(
        function, *args, abandon_on_cancel=abandon_on_cancel, limiter=limiter
    )


def is_cancelled_from_outside() -> bool:
    """Return whether somebody has cancelled this task.

    Otherwise a CancelledError in it comes from its own code, such as `task.cancel(); await task`.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class Slot:
    """A token of a limiter, held inside `async with`.

    Unlike `async with limiter` it does not give way to other tasks if a token is free, and several
    slots of one task are different borrowers.
    """

    def __init__(self, limiter: anyio.CapacityLimiter) -> None:
        self._limiter = limiter

    async def __aenter__(self) -> None:
        try:
            self._limiter.acquire_on_behalf_of_nowait(self)
        except anyio.WouldBlock:  # none is free, or others wait for one
            await self._limiter.acquire_on_behalf_of(self)  # no deadline: the caller has one

    async def __aexit__(self, *exc_info: object) -> None:
        self._limiter.release_on_behalf_of(self)


class Signal:
    """Wakes all tasks that wait for it, any number of times.

    A task that begins to wait after a `notify` waits for the next one, so check the condition
    first, without an `await` in between.
    """

    def __init__(self) -> None:
        self._event = anyio.Event()

    def notify(self) -> None:
        """Wake all tasks that are waiting now."""
        self._event.set()
        self._event = anyio.Event()

    async def wait(self) -> None:
        """Wait until the next `notify`."""
        await self._event.wait()  # no deadline: the caller sets one


def collect_garbage_rarely() -> None:
    """Let the objects of a request die before the collector looks at them.

    By default it looks at every 700th new object; a request with 200 messages has thousands, which
    would be promoted while they are in use, and every few hundred requests all objects would be
    searched.
    """
    gc.set_threshold(20_000, 20, 50)


def exempt_from_collection() -> None:
    """Exempt all objects that exist from garbage collection; call it once everything has started.

    Modules, settings and a tokenizer are more than 100,000 objects, which live as long as the
    process. To search them takes 0.1 to 0.2 s, during which the event loop reads no token.
    """
    gc.collect()
    gc.freeze()
