"""Virtual time for code that runs on asyncio: if all tasks wait, the clock jumps to the next timer.

    anything ready? ──yes──> run it, in no time at all
         └──no──> advance the clock to the next timer; if there is none, it is a deadlock

Work for a worker thread (`anyio.to_thread.run_sync`) runs in the loop instead. So it takes no
virtual time, the clock cannot jump over it, and simultaneous events happen in the same order each
time: with the same seeds, the whole run is the same.

Not for sockets or subprocesses: real I/O is only polled, and the clock does not wait for it. Code
that reads `time.monotonic` still sees the real clock.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, TypeVarTuple

import anyio
import anyio.lowlevel
import anyio.to_thread

__all__ = ["Deadlock", "run"]

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class Deadlock(RuntimeError):
    """All tasks wait for each other: there is no timer left to jump to."""


def run(main: Callable[[*Arguments], Awaitable[T]], *args: *Arguments) -> T:
    """Run `main` like `anyio.run`, in virtual time from 0 on.

    Raises:
        Deadlock: All tasks wait and there is no timer.
    """
    with _threads_inline():
        return anyio.run(main, *args, backend_options={"loop_factory": _VirtualTimeLoop})


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that reports a timeout at once instead of waiting."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)  # signals, for example
        if not ready:
            if timeout is None:
                raise Deadlock("all tasks wait, and no timer is left")
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
    async def run_sync(work: Callable[[*Arguments], T], *args: *Arguments, **options: object) -> T:
        # As with a thread, other tasks may run, or the caller be cancelled, before it starts.
        await anyio.lowlevel.checkpoint()
        return work(*args)

    real, anyio.to_thread.run_sync = anyio.to_thread.run_sync, run_sync  # type: ignore[assignment]
    try:
        yield
    finally:
        anyio.to_thread.run_sync = real
