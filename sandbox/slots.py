"""The order in which waiting calls get the slots of workers. Pure: no I/O and no await.

    a call ──enter──> waiting, first in, first out ──> a slot of the least busy worker ──free──> ...
                         └──leave (cancelled, out of time)

A call that is to run alone goes first and waits until a worker is empty. A session's cell waits for
its own worker, and calls behind it may be served before it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import anyio

from agentloop.sandbox.link import Link
from agentloop.sandbox.remote import HostLink
from agentloop.sandbox.settings import PoolSettings

GRACE_S = 5.0  # time beyond a call's time limit after which its worker is considered hung


class PoolWorker:
    """The pool's state of a running worker, or of a host, which announces its own capacity."""

    def __init__(self, link: Link, settings: PoolSettings) -> None:
        self.link = link
        hello = link.hello
        self.num_slots = self.free = int(hello.get("slots", settings.slots_per_worker))
        num_sessions = hello.get("sessions", settings.sessions_per_worker)
        self.max_sessions = self.free_sessions = int(num_sessions)
        self.grace_s = float(hello.get("grace_s", GRACE_S))
        self.num_left = math.inf if "slots" in hello else settings.recycle_after
        self.proven = False  # has replied to a call, so it does not fail at once
        self.retiring = False
        self.runs_alone = False  # reserved for a single call
        self.drained = anyio.Event()  # has run its share, without calls and sessions left
        self.vacant = anyio.Event()  # may be replaced

    @property
    def alive(self) -> bool:
        return not self.link.lost.is_set()

    @property
    def aside(self) -> bool:
        """True if it was replaced and keeps running only for its sessions."""
        return self.alive and self.vacant.is_set()

    @property
    def num_sessions(self) -> int:
        return self.max_sessions - self.free_sessions

    def check_drained(self) -> None:
        if self.retiring and self.free == self.num_slots and not self.num_sessions:
            self.drained.set()

    @property
    def open(self) -> bool:
        return self.alive and not self.retiring

    @property
    def can_open_session(self) -> bool:
        return self.open and not self.runs_alone and self.free_sessions > 0

    @property
    def is_host(self) -> bool:
        return isinstance(self.link, HostLink)

    @property
    def num_available(self) -> int:
        """Free slots, minus a host's calls for other clients; -1 if it takes no calls."""
        others = self.link.others if isinstance(self.link, HostLink) else 0
        is_open = self.open and not self.runs_alone
        return max(min(self.free, 1), self.free - others) if is_open else -1


class SlotWaiter:
    __slots__ = ("alone", "granted", "only", "worker")

    def __init__(self, only: PoolWorker | None, alone: bool) -> None:
        self.only = only  # the only worker that can run it: a session's cell
        self.alone = alone  # needs a worker for itself
        self.granted = anyio.Event()
        self.worker: PoolWorker | None = None


class SlotQueue:
    """The queue of calls that wait for a slot."""

    def __init__(self) -> None:
        self.workers: list[PoolWorker] = []
        self.waiting: OrderedDict[SlotWaiter, None] = OrderedDict()

    def enter(self, only: PoolWorker | None, alone: bool) -> SlotWaiter:
        """Enqueue a call; one that is to run `alone` goes first, since it has waited before."""
        waiter = SlotWaiter(only, alone)
        self.waiting[waiter] = None
        self.waiting.move_to_end(waiter, last=not alone)
        self.serve()
        return waiter

    def leave(self, waiter: SlotWaiter) -> None:
        """Remove a cancelled call from the queue, or free its slot if it was just granted."""
        if waiter.worker is not None:
            self.free(waiter.worker)
            return
        self.waiting.pop(waiter, None)
        if waiter.alone:
            self.serve()  # a worker that was being emptied for it can take calls again

    def free(self, worker: PoolWorker) -> None:
        worker.free += 1
        if worker.alive:
            worker.runs_alone = False
        worker.check_drained()
        self.serve()

    def serve(self) -> None:
        """Grant free slots, oldest call first."""
        passed_over: list[SlotWaiter] = []
        emptying: list[PoolWorker] = []  # workers that take no calls until they are empty
        while self.waiting:
            waiter, _ = self.waiting.popitem(last=False)
            if waiter.alone:
                worker = self.reserve_worker(emptying)
            else:
                worker = self.slot_for(waiter.only, emptying)
            if worker is not None:
                worker.free -= 1
                worker.num_left -= 1
                waiter.worker = worker
                waiter.granted.set()
            elif waiter.only is not None and not waiter.only.alive:
                waiter.granted.set()  # its worker is lost: wake it to report that
            elif waiter.only is not None or waiter.alone:
                passed_over.append(waiter)  # others can be served before it
            else:
                passed_over.append(waiter)
                break
        for waiter in reversed(passed_over):
            self.waiting[waiter] = None
            self.waiting.move_to_end(waiter, last=False)

    def slot_for(
        self, only: PoolWorker | None, emptying: Sequence[PoolWorker] = ()
    ) -> PoolWorker | None:
        """Return the worker that can take a call now: `only`, if given, or the least busy one."""
        if only is not None:
            is_open = only.alive and not only.runs_alone and only not in emptying
            return only if only.free > 0 and is_open else None
        able = self.workers
        if emptying:
            able = [worker for worker in able if worker not in emptying]
        best = max(able, key=lambda w: w.num_available, default=None)
        return best if best is not None and best.num_available > 0 else None

    def reserve_worker(self, emptying: list[PoolWorker]) -> PoolWorker | None:
        """Reserve an idle worker for a single call.

        If there is none, add the one with the fewest calls to `emptying` and return None. With
        hosts only, return any worker with a free slot, since hosts isolate calls themselves.
        """
        local = [worker for worker in self.workers if worker.open and not worker.is_host]
        if not local:
            return self.slot_for(None)
        able = [worker for worker in local if not worker.runs_alone and worker not in emptying]
        best = max(able, key=lambda w: (w.free - w.num_slots, w.free_sessions), default=None)
        if best is None:
            return None
        if best.free < best.num_slots:
            emptying.append(best)
            return None
        best.runs_alone = True
        return best
