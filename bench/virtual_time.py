"""Virtual time for code that runs on asyncio: the clock jumps to the next timer when all wait.

    anything ready? ──yes──> run it, in no time at all
         └──no──> the clock is the next timer's; none left: a deadlock, and an error

What would run in a worker thread (`anyio.to_thread.run_sync`) runs in the loop instead. So it takes
no virtual time, the clock cannot jump over it, and what happens at once happens in the same order
each time: with the same seeds, all of a run is the same.

Not for sockets or subprocesses: whatever takes real time is waited for only while a timer is due.
Code that reads `time.monotonic` goes on seeing the real clock.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

__all__ = ["Deadlock", "run"]

T = TypeVar("T")


class Deadlock(RuntimeError):
    """All tasks wait for each other: there is no timer left to jump to."""


def run(main: Callable[..., Awaitable[T]], *args: Any) -> T:
    """`anyio.run`, in virtual time from 0 on.

    Raises:
        Deadlock: nothing can happen any more.
    """
    with _threads_inline():
        return anyio.run(main, *args, backend_options={"loop_factory": _VirtualTimeLoop})


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting, it says that the time is over."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)  # such as a signal
        if not ready:
            if timeout is None:
                raise Deadlock("no task can go on, and no timer is left")
            self.now_s += timeout
        return ready


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


@contextmanager
def _threads_inline() -> Iterator[None]:
    async def run_sync(work: Callable[..., T], *args: Any, **options: Any) -> T:
        # A thread gives the others a turn, and the caller may be cancelled before it starts.
        await anyio.lowlevel.checkpoint()
        return work(*args)

    real, anyio.to_thread.run_sync = anyio.to_thread.run_sync, run_sync  # type: ignore[assignment]
    try:
        yield
    finally:
        anyio.to_thread.run_sync = real
