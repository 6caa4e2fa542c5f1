"""Additions to anyio: a task group that raises single errors by themselves, and a signal."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.abc

from agentloop.errors import leaves, sole

__all__ = ["Signal", "task_group"]


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
