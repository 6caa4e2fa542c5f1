"""The order in which calls and sessions get workers. Pure: no I/O and no await.

    a call ──enter──> first in, first out ──> an idle worker ──free──> ...
                         └──leave (cancelled, out of time)

A worker runs one call at a time, or belongs to a session while that is open. At most `max_running`
calls and cells run at a time, however many sessions there are. A host is a worker with many slots.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator

import anyio

from agentloop.sandbox.link import Link
from agentloop.sandbox.remote import HostLink
from agentloop.sandbox.settings import PoolSettings

# Time beyond a call's time limit after which its worker is considered hung: longer than the worker
# takes to start a program and to end a cell, even if it is busy.
GRACE_S = 15.0
RECYCLE_AFTER = 20_000  # calls: a worker is then replaced, with whatever it has leaked


class PoolWorker:
    """The pool's state of a running worker, or of a host, which announces its own capacity."""

    def __init__(self, link: Link, settings: PoolSettings) -> None:
        self.link = link
        hello = link.hello
        self.num_slots = self.free = hello.get("slots", 1)
        self.max_sessions = self.free_sessions = hello.get("sessions", 1)
        self.grace_s = hello.get("grace_s", GRACE_S)
        self.num_left = math.inf if self.is_host else RECYCLE_AFTER
        self.proven = False  # has replied to a call, so it does not fail at once
        self.retiring = False
        self.drained = anyio.Event()  # retiring, without calls and sessions left

    @property
    def alive(self) -> bool:
        return not self.link.lost.is_set()

    @property
    def num_sessions(self) -> int:
        return self.max_sessions - self.free_sessions

    @property
    def is_idle(self) -> bool:
        return self.free == self.num_slots and not self.num_sessions

    def retire(self) -> None:
        """Take no more calls and sessions, and end when those that there are have ended."""
        self.retiring = True
        self.check_drained()

    def check_drained(self) -> None:
        if self.retiring and self.is_idle:
            self.drained.set()

    @property
    def open(self) -> bool:
        return self.alive and not self.retiring

    @property
    def can_open_session(self) -> bool:
        return self.open and (self.free_sessions > 0 if self.is_host else self.is_idle)

    @property
    def is_host(self) -> bool:
        return isinstance(self.link, HostLink)

    @property
    def num_available(self) -> int:
        """Free slots, minus a host's calls for other clients; -1 if it takes no calls."""
        if not self.open:
            return -1
        if isinstance(self.link, HostLink):
            return max(min(self.free, 1), self.free - self.link.num_others)
        return int(self.is_idle)


class Need(enum.Enum):
    """Kinds of what a waiter waits for."""

    CALL = enum.auto()  # any worker that can run a call
    CELL = enum.auto()  # the worker of its session
    SESSION = enum.auto()  # a worker of its own


class SlotWaiter:
    __slots__ = ("granted", "need", "number", "only", "worker")

    def __init__(self, need: Need, only: PoolWorker | None, number: int) -> None:
        self.need = need
        self.only = only  # a cell's worker
        self.number = number
        self.granted = anyio.Event()
        self.worker: PoolWorker | None = None


class SlotQueue:
    """The queue of calls, cells and sessions that wait for a worker."""

    def __init__(self, max_running: int, max_sessions: int) -> None:
        self.max_running = max_running  # of calls and cells on this machine
        self.max_sessions = max_sessions
        self.num_running = 0
        self.workers: list[PoolWorker] = []
        # All that wait for the same are served in order, so only the first call is looked at.
        self._calls: OrderedDict[SlotWaiter, None] = OrderedDict()
        self._others: OrderedDict[SlotWaiter, None] = OrderedDict()
        self._numbers = itertools.count()

    @property
    def num_waiting(self) -> int:
        """Calls and cells that wait."""
        return len(self._calls) + len(self._others) - self.num_waiting_sessions

    @property
    def num_waiting_sessions(self) -> int:
        return sum(waiter.need is Need.SESSION for waiter in self._others)

    @property
    def num_sessions(self) -> int:
        """Open sessions on this machine."""
        return sum(worker.num_sessions for worker in self.workers if not worker.is_host)

    def wake_all(self) -> None:
        """Wake all waiters without a worker."""
        for waiter in (*self._calls, *self._others):
            waiter.granted.set()

    def enter(
        self, need: Need = Need.CALL, only: PoolWorker | None = None, *, again: bool = False
    ) -> SlotWaiter:
        """Enqueue a waiter; one that has waited before (`again`) goes first."""
        waiter = SlotWaiter(need, only, -1 if again else next(self._numbers))
        queue = self._calls if need is Need.CALL else self._others
        queue[waiter] = None
        queue.move_to_end(waiter, last=not again)
        self.serve()
        return waiter

    def leave(self, waiter: SlotWaiter) -> None:
        """Remove a waiter that was cancelled, or free the worker that it was just granted."""
        if waiter.worker is None:
            self._calls.pop(waiter, None)
            self._others.pop(waiter, None)
        elif waiter.need is Need.SESSION:
            self.free_session(waiter.worker)
        else:
            self.free(waiter.worker)

    def free(self, worker: PoolWorker) -> None:
        """Note that a call or cell has ended."""
        worker.free += 1
        if not worker.is_host:
            self.num_running -= 1
        worker.check_drained()
        self.serve()

    def free_session(self, worker: PoolWorker) -> None:
        """Note that a session was closed."""
        worker.free_sessions += 1
        worker.check_drained()
        self.serve()

    def serve(self) -> None:
        """Grant workers to those that wait, oldest first."""
        while (grant := self._next()) is not None:
            waiter, worker = grant
            self._calls.pop(waiter, None)
            self._others.pop(waiter, None)
            waiter.granted.set()
            if not worker.alive:  # a cell's, which is woken to report that
                continue
            waiter.worker = worker
            if waiter.need is Need.SESSION:
                worker.free_sessions -= 1
                continue
            worker.free -= 1
            worker.num_left -= 1
            if not worker.is_host:
                self.num_running += 1

    def _next(self) -> tuple[SlotWaiter, PoolWorker] | None:
        """Return the oldest waiter that can be served, and its worker."""
        call = next(iter(self._calls), None)
        able = self.worker_for_call() if call is not None else None
        for waiter, worker in self._able_others():
            if call is None or able is None or waiter.number < call.number:
                return waiter, worker
            break
        return (call, able) if call is not None and able is not None else None

    def _able_others(self) -> Iterator[tuple[SlotWaiter, PoolWorker]]:
        for waiter in self._others:
            if waiter.need is Need.SESSION:
                worker = self.worker_for_session()
            else:
                worker = waiter.only
                if worker is not None and worker.alive and not self._can_run(worker):
                    continue
            if worker is not None:
                yield waiter, worker

    def _can_run(self, worker: PoolWorker) -> bool:
        return worker.free > 0 and (worker.is_host or self.num_running < self.max_running)

    def worker_for_call(self) -> PoolWorker | None:
        """Return the worker with the most free slots that can take a call now."""
        best, max_available = None, 0
        for worker in self.workers:
            if (num := worker.num_available) > max_available and self._can_run(worker):
                best, max_available = worker, num
        return best

    def worker_for_session(self) -> PoolWorker | None:
        """Return the worker that can take a session now."""
        is_full = self.num_sessions >= self.max_sessions
        able = [w for w in self.workers if w.can_open_session and (w.is_host or not is_full)]
        return max(able, key=lambda worker: worker.free_sessions, default=None)
