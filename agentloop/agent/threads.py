"""Threads for synchronous functions of users: tools, and calls of libraries.

Python cannot stop a function, so a thread whose caller has given up is abandoned. All are daemon
threads: none keeps the process from exiting.

The functions of one rollout run in threads of its own (`RolloutThreads`), since many objects can
only be used in the thread that has made them, such as the connections of a database.
"""

from __future__ import annotations

import contextvars
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

import anyio
import anyio.from_thread
import anyio.lowlevel

from agentloop.aio import LimiterVar, limiter_in

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

_tool_threads = LimiterVar("_tool_threads")
_command_threads = LimiterVar("_command_threads")
_current: ContextVar[RolloutThreads | None] = ContextVar("_current", default=None)
_shares_connections: ContextVar[bool] = ContextVar("_shares_connections", default=False)
_connect = sqlite3.connect


class DaemonThread:
    """A thread that runs functions one after another, from the first one to `close`."""

    def __init__(self) -> None:
        self.is_busy = False
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Run `work`, which must not raise, after what has been started before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"blocking {work}", daemon=True)
            self._thread.start()
        self._work.put(work)

    def close(self) -> None:
        """End the thread after what has been started."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


async def in_daemon_thread(
    function: Callable[[], Result],
    max_threads: int,
    limit: LimiterVar = _tool_threads,
    thread: DaemonThread | None = None,
) -> Result:
    """Run `function` in a thread that cannot keep the process from exiting.

    A thread that is abandoned, because the caller is cancelled, counts until it ends.

    Args:
        max_threads: how many may run at a time, of those that share `limit`.
        thread: the thread; None: a new one.
    """
    loop_token = anyio.lowlevel.current_token()
    limiter = limiter_in(limit, max_threads)
    done = anyio.Event()
    results: list[Result] = []
    errors: list[BaseException] = []
    borrower = object()
    context = contextvars.copy_context()
    await limiter.acquire_on_behalf_of(borrower)  # no deadline: the call has one, timeout_s

    def finish() -> None:
        limiter.release_on_behalf_of(borrower)
        done.set()

    def work() -> None:
        try:
            results.append(context.run(function))
        except BaseException as error:  # handed to the caller, whatever it is
            errors.append(error)
        with suppress(RuntimeError):  # the event loop has closed, so nobody is waiting
            anyio.from_thread.run_sync(finish, token=loop_token)

    worker = thread or DaemonThread()
    worker.start(work)
    if thread is None:
        worker.close()
    await done.wait()  # no deadline: the call has one, timeout_s
    if results:
        return results[0]
    error = errors[0]
    raise error if isinstance(error, Exception) else RuntimeError(f"it raised {error!r}")


async def in_command_thread(function: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
    """Run what may take long, as code of the user's or a download, so that signals end the command.

    Neither cancellation nor the end of the process waits for the thread.
    """
    return await in_daemon_thread(partial(function, *args), 1, _command_threads)


class RolloutThreads:
    """The threads of one rollout.

    The methods of an object run in one thread, and so do functions, unless several are called at
    the same time.
    """

    def __init__(self) -> None:
        self._threads: dict[object, DaemonThread] = {}
        self._is_closed = False
        self._context = contextvars.copy_context()
        self._context.run(_shares_connections.set, True)

    async def run(
        self, function: Callable[[], Result], max_threads: int, owner: object = None
    ) -> Result:
        """Run a function.

        Args:
            owner: the object whose method it is; one call of it may run at a time. None: it is a
                function.
        """
        key = id(owner)
        thread = self._threads.setdefault(key, DaemonThread())
        in_context = self._in_context(function)
        if thread.is_busy or self._is_closed:
            return await in_daemon_thread(in_context, max_threads)
        thread.is_busy = True
        try:
            return await in_daemon_thread(in_context, max_threads, thread=thread)
        except anyio.get_cancelled_exc_class():
            if self._threads.get(key) is thread:  # it may never return: the next call gets another
                del self._threads[key]
            thread.close()
            raise
        finally:
            thread.is_busy = False

    def _in_context(self, function: Callable[[], Result]) -> Callable[[], Result]:
        """Let a function see the rollout's context variables, whoever calls it."""
        context = self._context.copy()
        return lambda: context.run(function)

    def close(self) -> None:
        """End the threads that run nothing, and the others after what they run."""
        self._is_closed = True
        for thread in self._threads.values():
            thread.close()
        self._threads.clear()


def current_threads() -> RolloutThreads | None:
    """Return the threads of the rollout to which this task belongs."""
    return _current.get()


@contextmanager
def rollout_threads(threads: RolloutThreads | None = None) -> Iterator[RolloutThreads]:
    """Let the functions that are called in this context run in threads of one rollout.

    Args:
        threads: threads that are open; None: those that are current, or else new ones.
    """
    threads = threads or _current.get()
    is_new = threads is None
    opened = RolloutThreads() if threads is None else threads
    token = _current.set(opened)
    try:
        yield opened
    finally:
        _current.reset(token)
        if is_new:
            opened.close()


@contextmanager
def sharing_connections() -> Iterator[None]:
    """Let connections of `sqlite3` that a user's code opens in this context be used by all threads.

    Its environment runs in the thread of the event loop, and its tools in others. By default, the
    connection of one would refuse the other; SQLite itself is made for several threads.
    """
    token = _shares_connections.set(True)
    try:
        yield
    finally:
        _shares_connections.reset(token)


def _connect_shared(*args: Any, **kwargs: Any) -> sqlite3.Connection:
    if _shares_connections.get() and len(args) < 5:  # the fifth is `check_same_thread`
        kwargs.setdefault("check_same_thread", False)
    connection: sqlite3.Connection = _connect(*args, **kwargs)
    return connection


if sqlite3.threadsafety == 3:  # SQLite's calls may come from any thread
    sqlite3.connect = sqlite3.dbapi2.connect = _connect_shared  # type: ignore[assignment]
