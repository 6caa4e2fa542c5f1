"""The pool: calls in, answers out, over workers that come and go.

    run() ──> waiting room (first in, first out) ──> the least busy worker ──> answer
                  ▲                                        │
                  └── a slot is free: the worker answered, ┘ or a fresh worker took its place

`_keep` (one task per worker) starts a worker, waits until it is lost or has run its share, and
starts the next: the pool never shrinks for good. What it produces is slots; callers wait for
them in `_Room`; a worker's answer, or its loss, sets the callers of its calls free. A call whose
worker was lost runs once more, on another.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup

from sandbox.backend import Backend
from sandbox.container import docker_backend
from sandbox.errors import Overloaded, SandboxError, SandboxUnavailable, SessionLost
from sandbox.link import Link, Pending, next_id
from sandbox.process import ProcessBackend
from sandbox.remote import HostBackend, HostLink
from sandbox.results import CallResult, CallStatus
from sandbox.settings import PoolSettings

log = logging.getLogger("sandbox")

GRACE_S = 5.0  # what a worker may take beyond a call's own time before it counts as hung
SESSION_GONE = "the session's process has ended, its variables are gone"
BACKOFF_S = (0.1, 0.5, 2.0, 5.0)

# Worker ids are unique among all pools of all processes that use an engine.
_token = secrets.token_hex(3)
_numbers = itertools.count()


class _Worker:
    """What the pool knows of a worker that is up. A host is one, too: it says what it has."""

    def __init__(self, link: Link, settings: PoolSettings) -> None:
        self.link = link
        told = link.hello
        self.num_slots = self.free = int(told.get("slots", settings.slots_per_worker))
        self.num_seats = self.free_seats = int(told.get("seats", settings.sessions_per_worker))
        self.grace_s = float(told.get("grace_s", GRACE_S))
        self.num_left = math.inf if "slots" in told else settings.recycle_after
        self.retiring = False
        self.drained = anyio.Event()

    @property
    def open(self) -> bool:
        return not self.retiring and not self.link.lost.is_set()

    @property
    def room(self) -> int:
        """Free slots, less what a host has to do for others."""
        others = self.link.others if isinstance(self.link, HostLink) else 0
        return max(min(self.free, 1), self.free - others) if self.open else -1


class _Waiter:
    __slots__ = ("granted", "only", "worker")

    def __init__(self, only: _Worker | None) -> None:
        self.only = only  # a session's cell can run in one place alone
        self.granted = anyio.Event()
        self.worker: _Worker | None = None


class _Room:
    """Who waits for a slot, and who gets the next. No I/O, no await in any decision."""

    def __init__(self) -> None:
        self.workers: list[_Worker] = []
        self.waiting: OrderedDict[_Waiter, None] = OrderedDict()

    def enter(self, only: _Worker | None = None) -> _Waiter:
        waiter = _Waiter(only)
        self.waiting[waiter] = None
        self.serve()
        return waiter

    def leave(self, waiter: _Waiter) -> None:
        """A caller gave up: out of the queue, or its slot back if it was just granted."""
        if waiter.worker is not None:
            self.free(waiter.worker)
        else:
            self.waiting.pop(waiter, None)

    def free(self, worker: _Worker) -> None:
        worker.free += 1
        if worker.free == worker.num_slots and not worker.open:
            worker.drained.set()
        self.serve()

    def serve(self) -> None:
        """Hand out free slots, oldest waiter first."""
        passed_over: list[_Waiter] = []
        while self.waiting:
            waiter, _ = self.waiting.popitem(last=False)
            worker = self._slot_for(waiter)
            if worker is not None:
                worker.free -= 1
                worker.num_left -= 1
                waiter.worker = worker
                waiter.granted.set()
            elif waiter.only is not None and not waiter.only.link.lost.is_set():
                passed_over.append(waiter)  # its own worker is busy; others needn't wait for that
            elif waiter.only is not None:
                waiter.granted.set()  # nothing left to wait for: it sees the loss
            else:
                passed_over.append(waiter)
                break
        for waiter in reversed(passed_over):
            self.waiting[waiter] = None
            self.waiting.move_to_end(waiter, last=False)

    def _slot_for(self, waiter: _Waiter) -> _Worker | None:
        if waiter.only is not None:
            only = waiter.only
            return only if only.free > 0 and not only.link.lost.is_set() else None
        best = max(self.workers, key=lambda w: w.room, default=None)
        return best if best is not None and best.room > 0 else None


class Pool:
    """Runs untrusted Python, each call in a process of its own, confined.

        async with Pool() as pool:
            result = await pool.run("print(6 * 7)")

    Entering starts the workers (seconds; the image is built on the first use of Docker) and
    raises SandboxUnavailable where none comes up. `on_progress` gets lines for people meanwhile.
    """

    def __init__(
        self,
        settings: PoolSettings | None = None,
        *,
        on_progress: Callable[[str], None] = log.info,
    ) -> None:
        self.settings = settings or PoolSettings()
        self._on_progress = on_progress
        self._room = _Room()
        self._seat_freed = anyio.Event()
        self._counts: dict[str, int] = dict.fromkeys(CallStatus, 0)
        self._num_replaced = 0
        self._backend: Backend
        self._group: TaskGroup
        self._stack = AsyncExitStack()

    # -- life -------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._backends = await self._choose_backends(stack)
            self._group = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(self._group.cancel_scope.cancel)
            async with anyio.create_task_group() as starting:
                for backend in self._backends:
                    starting.start_soon(self._group.start, self._keep, backend)
            if self._room.workers:
                self._stack = stack.pop_all()
                return self
        raise SandboxUnavailable(self._why or "no worker came up")

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.__aexit__(None, None, None)

    async def _choose_backends(self, stack: AsyncExitStack) -> list[Backend]:
        """One for each worker that is to be kept."""
        settings = self.settings
        hosts: list[Backend] = [HostBackend(url, settings) for url in settings.hosts]
        if hosts and settings.backend == "auto" and not settings.engines:
            return hosts
        return hosts + [await self._choose_local(stack)] * settings.workers

    async def _choose_local(self, stack: AsyncExitStack) -> Backend:
        settings = self.settings
        if settings.backend == "process":
            return ProcessBackend(settings)
        try:
            return await stack.enter_async_context(docker_backend(settings, self._on_progress))
        except SandboxUnavailable as error:
            # Who names an engine or an image means it: nothing weaker is put in its place.
            named = settings.engines or settings.image or os.environ.get("DOCKER_HOST")
            if settings.backend == "docker" or named:
                raise
            log.warning(
                "Calls run as local processes, which isolate less than containers do: %s "
                "`python -m sandbox doctor` says which walls stand here.",
                error,
            )
            return ProcessBackend(settings)

    _why = ""

    async def _keep(self, backend: Backend, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Keep one worker up for as long as the pool lives."""
        failures = 0
        while True:
            worker_id = f"{os.getpid()}-{_token}-{next(_numbers)}"
            try:
                async with backend.worker(worker_id) as link:
                    failures = 0
                    await self._employ(link, task_status)
                self._num_replaced += 1
            except SandboxError as error:
                self._why = str(error)
                log.warning("%s", error)
                if task_status is not anyio.TASK_STATUS_IGNORED:
                    task_status.started()
                    task_status = anyio.TASK_STATUS_IGNORED
                await anyio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])
                failures += 1
            task_status = anyio.TASK_STATUS_IGNORED

    async def _employ(self, link: Link, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Give the worker calls until it is lost or has run its share."""
        worker = _Worker(link, self.settings)
        link.on_settled = lambda: self._on_settled(worker)
        self._room.workers.append(worker)
        self._room.serve()
        self._tell_seats()
        task_status.started()
        try:
            await self._until_done(worker)
        finally:
            self._room.workers.remove(worker)
            link.lose("the pool closed it")
            self._room.serve()
            self._tell_seats()

    async def _until_done(self, worker: _Worker) -> None:
        async with anyio.create_task_group() as group:

            async def watch(event: anyio.Event) -> None:
                await event.wait()
                group.cancel_scope.cancel()

            group.start_soon(watch, worker.link.lost)
            group.start_soon(watch, worker.drained)

    def _on_settled(self, worker: _Worker) -> None:
        if worker.num_left <= 0 and worker.free_seats == worker.num_seats:
            worker.retiring = True
        self._room.free(worker)

    def _tell_seats(self) -> None:
        self._seat_freed.set()
        self._seat_freed = anyio.Event()

    # -- calls ------------------------------------------------------------------------------

    async def run(self, code: str, stdin: str = "", timeout_s: float | None = None) -> CallResult:
        """Run a program from a clean state and say how it ended; a failing program is a result.

        timeout_s: wall time of the program (default: the pool's setting), not of the waiting.
        Cancelling the caller kills the call. Raises ValueError for a timeout that isn't positive.
        """
        message = self._message(code, stdin, timeout_s)
        result = self._refused(message) or await self._run(message, None)
        self._counts[result.status] += 1
        return result

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """A process whose variables last from one `run` to the next, for the time of the block.

        Raises Overloaded where no worker has a seat for it within `max_wait_s`.
        """
        worker = await self._take_seat()
        session = Session(self, worker, next_id())
        try:
            yield session
        finally:
            worker.link.tell({"op": "close", "session": session.id})
            worker.free_seats += 1
            self._tell_seats()

    def stats(self) -> dict[str, Any]:
        """Where the pool stands, for a status page."""
        workers = [w for w in self._room.workers if not w.link.lost.is_set()]
        slots = sum(w.num_slots for w in workers)
        layers = {backend.name: dict(backend.layers) for backend in self._backends}
        return {
            "backend": "+".join(layers),
            "workers": len(workers),
            "slots": slots,
            "busy": slots - sum(w.free for w in workers),
            "waiting": len(self._room.waiting),
            "sessions": sum(w.num_seats - w.free_seats for w in workers),
            "replaced": self._num_replaced,
            "calls": {str(status): count for status, count in self._counts.items() if count},
            "layers": layers[self._backends[-1].name],
        }

    def _message(self, code: str, stdin: str, timeout_s: float | None) -> dict[str, Any]:
        timeout_s = self.settings.timeout_s if timeout_s is None else timeout_s
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise ValueError(f"timeout_s must be a positive number of seconds, not {timeout_s!r}")
        return {"op": "run", "code": code, "stdin": stdin, "timeout_s": timeout_s}

    def _refused(self, message: dict[str, Any]) -> CallResult | None:
        """An answer without a run, where the call can't or mustn't be taken."""
        size = len(message["code"]) + len(message["stdin"])
        if size > self.settings.max_code_bytes:
            why = f"code and stdin have {size} bytes; the most is {self.settings.max_code_bytes}"
            return CallResult.failed(next_id(), CallStatus.SANDBOX_ERROR, why)
        if len(self._room.waiting) >= self.settings.max_waiting:
            why = f"{self.settings.max_waiting} calls are waiting already"
            return CallResult.failed(next_id(), CallStatus.OVERLOADED, why)
        return None

    async def _run(self, message: dict[str, Any], only: _Worker | None) -> CallResult:
        entered = time.monotonic()
        why = ""
        for attempt in (1, 2):
            worker = await self._slot(only, entered)
            if worker is None:
                break
            call_id = message["id"] = next_id()
            queue_s = time.monotonic() - entered
            reply = await self._answer(worker, message)
            where: dict[str, Any] = {
                "queue_s": queue_s, "worker_id": worker.link.worker_id, "attempt": attempt
            }  # fmt: skip
            if reply is not None:
                return CallResult.from_frame(reply, id=call_id, **where)
            if only is not None and not only.link.lost.is_set():
                raise SessionLost(SESSION_GONE)
            why = f"worker {worker.link.worker_id} was lost: {worker.link.why}"
            if only is not None:
                raise SessionLost(why)
        else:
            return CallResult.failed(call_id, CallStatus.SANDBOX_ERROR, why, **where)
        if only is not None and only.link.lost.is_set():
            raise SessionLost(f"worker {only.link.worker_id} was lost: {only.link.why}")
        why = f"no slot within {self.settings.max_wait_s:g} s"
        waited_s = time.monotonic() - entered
        return CallResult.failed(next_id(), CallStatus.OVERLOADED, why, queue_s=waited_s)

    async def _slot(self, only: _Worker | None, entered: float) -> _Worker | None:
        """A slot, in turn. None if it took too long or can't come any more."""
        waiter = self._room.enter(only)
        if not waiter.granted.is_set():
            left_s = self.settings.max_wait_s - (time.monotonic() - entered)
            try:
                with anyio.move_on_after(left_s):
                    await waiter.granted.wait()
            except BaseException:
                self._room.leave(waiter)
                raise
            if waiter.worker is None:
                self._room.leave(waiter)
        return waiter.worker

    async def _answer(self, worker: _Worker, message: dict[str, Any]) -> dict[str, Any] | None:
        """Send the call and wait for its answer; None if the worker is lost. The slot is freed
        when the worker has answered, also to a call that its caller has given up."""
        pending: Pending = worker.link.submit(message)
        try:
            with anyio.move_on_after(message["timeout_s"] + worker.grace_s):
                await pending.done.wait()
        except BaseException:
            if not pending.done.is_set():
                worker.link.tell({"op": "kill", "id": message["id"]})
                self._counts[CallStatus.CANCELLED] += 1
            raise
        if not pending.done.is_set():
            worker.link.lose("it stopped answering")
        return pending.reply

    # -- sessions ---------------------------------------------------------------------------

    async def _take_seat(self) -> _Worker:
        with anyio.move_on_after(self.settings.max_wait_s):
            while True:
                able = [w for w in self._room.workers if w.open and w.free_seats > 0]
                if able:
                    worker = max(able, key=lambda w: w.free_seats)
                    worker.free_seats -= 1
                    return worker
                await self._seat_freed.wait()
        raise Overloaded(f"no seat for a session within {self.settings.max_wait_s:g} s")


class Session:
    """Cells that share their variables. Made by `Pool.session()`."""

    def __init__(self, pool: Pool, worker: _Worker, session_id: int) -> None:
        self.id = session_id
        self._pool = pool
        self._worker = worker
        self._turn = anyio.Lock()

    async def run(self, code: str, stdin: str = "", timeout_s: float | None = None) -> CallResult:
        """Run a cell; its last expression's value is in `result`. Cells run one after another.

        Raises SessionLost if the process is gone: a cell that is killed (time, memory, output)
        still gets its result, and the next one this error.
        """
        pool = self._pool
        message = pool._message(code, stdin, timeout_s) | {"session": self.id}
        async with self._turn:
            if self.lost:
                raise SessionLost(SESSION_GONE)
            result = pool._refused(message) or await pool._run(message, self._worker)
        pool._counts[result.status] += 1
        return result

    @property
    def lost(self) -> bool:
        return self._worker.link.lost.is_set() or self.id in self._worker.link.lost_sessions
