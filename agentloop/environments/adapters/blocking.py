"""Calls of a library that block: in threads, one at a time for each library, with deadlines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import anyio

from agentloop.agent.threads import DaemonThread, in_daemon_thread
from agentloop.aio import LimiterVar

__all__ = ["Blocking"]

_CLOSE_S = 10.0
_limits: dict[str, LimiterVar] = {}

Result = TypeVar("Result")


class Blocking:
    """Calls a library's functions for one rollout, from `open` to its end in one thread.

    Only one call of the library runs at a time, for all rollouts together: few libraries are safe
    with several threads, and Python would not run them faster.

    A call that exceeds its deadline cannot be stopped. Its thread is abandoned, and so is the
    object that it uses, which is not closed then. Until the thread ends, other calls wait.
    """

    def __init__(self, library: str, timeout_s: float) -> None:
        """
        Args:
            library: the library's name.
            timeout_s: time limit of each call, with the time that it waits for others.
        """
        self._library = library
        self._timeout_s = timeout_s
        self._limit = _limits.setdefault(library, LimiterVar(f"_{library}_threads"))
        self._is_abandoned = False
        self._thread: DaemonThread | None = None

    async def call(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Call a function in a thread, inside `open` in the one of that.

        Raises:
            TimeoutError: the call has not returned in time.
            Exception: whatever the function raises.
        """
        self._is_abandoned = True  # unless it returns
        result: Result
        with anyio.move_on_after(self._timeout_s) as deadline:
            try:
                call = partial(function, *args, **kwargs)
                result = await in_daemon_thread(call, 1, self._limit, self._thread)
            except Exception:
                self._is_abandoned = False
                raise
            self._is_abandoned = False
        if deadline.cancelled_caught:
            name = getattr(function, "__name__", repr(function))
            raise TimeoutError(f"{self._library}: {name} took more than {self._timeout_s:g} s")
        return result

    @asynccontextmanager
    async def open(
        self, function: Callable[..., Result], *args: Any, **kwargs: Any
    ) -> AsyncIterator[Result]:
        """Call a function that returns an object with a `close` method; close that at the end."""
        self._thread = thread = DaemonThread()
        try:
            resource: Any = await self.call(function, *args, **kwargs)
            try:
                yield resource
            finally:
                if not self._is_abandoned:
                    with anyio.move_on_after(_CLOSE_S, shield=True):
                        await self.call(resource.close)
        finally:
            self._thread = None
            thread.close()
