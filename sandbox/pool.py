"""The pool: calls in, answers out, over workers that come and go.

    run() ──> waiting room (first in, first out) ──> the least busy worker ──> answer
                  ▲                                        │
                  └── a slot is free: the worker answered, ┘ or a fresh worker took its place

`_keep` (one task per place) starts a worker, waits until it is lost or has run its share, and
starts the next: the pool never shrinks for good. What it produces is slots; callers wait for
them in `_Room`; a worker's answer, or its loss, sets the callers of its calls free. A call whose
worker was lost runs once more, on another. A worker that has run its share while sessions live on
it steps aside: it keeps those, and a fresh worker takes its place for everything else.
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
from sandbox.errors import (
    NoEngine,
    Overloaded,
    ProtocolError,
    SandboxError,
    SandboxUnavailable,
    SessionLost,
)
from sandbox.link import Link, Pending, next_id
from sandbox.process import ProcessBackend
from sandbox.remote import HostBackend, HostLink
from sandbox.results import CallResult, CallStatus
from sandbox.settings import OutputLimits, PoolSettings

log = logging.getLogger("sandbox")

GRACE_S = 5.0  # what a worker may take beyond a call's own time before it counts as hung
NOT_OPEN = "the pool is not open: use it within `async with Pool() as pool`"
SESSION_GONE = "the session's process has ended, its variables are gone"
MAX_TIMEOUT_S = 3600.0
BACKOFF_S = (0.1, 0.5, 2.0, 5.0)
QUIET_S = 30.0  # workers that don't start are told of once in this time

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
        self.proven = False  # it has answered a call: not one of those that fail at once
        self.retiring = False
        self.drained = anyio.Event()  # it has run its share, and nothing runs or lives on it
        self.vacant = anyio.Event()  # another may take its place

    @property
    def alive(self) -> bool:
        return not self.link.lost.is_set()

    @property
    def aside(self) -> bool:
        """Its place is another's: it lives on for its sessions alone."""
        return self.alive and self.vacant.is_set()

    @property
    def num_sessions(self) -> int:
        return self.num_seats - self.free_seats

    def see_if_drained(self) -> None:
        if self.retiring and self.free == self.num_slots and not self.num_sessions:
            self.drained.set()

    @property
    def open(self) -> bool:
        return self.alive and not self.retiring

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

    def enter(self, only: _Worker | None, first: bool) -> _Waiter:
        """At the end of the queue; `first`, at its head: for a call that had its turn before."""
        waiter = _Waiter(only)
        self.waiting[waiter] = None
        self.waiting.move_to_end(waiter, last=not first)
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
        worker.see_if_drained()
        self.serve()

    def serve(self) -> None:
        """Hand out free slots, oldest waiter first."""
        passed_over: list[_Waiter] = []
        while self.waiting:
            waiter, _ = self.waiting.popitem(last=False)
            worker = self.slot_for(waiter.only)
            if worker is not None:
                worker.free -= 1
                worker.num_left -= 1
                waiter.worker = worker
                waiter.granted.set()
            elif waiter.only is not None and waiter.only.alive:
                passed_over.append(waiter)  # its own worker is busy; others needn't wait for that
            elif waiter.only is not None:
                waiter.granted.set()  # nothing left to wait for: it sees the loss
            else:
                passed_over.append(waiter)
                break
        for waiter in reversed(passed_over):
            self.waiting[waiter] = None
            self.waiting.move_to_end(waiter, last=False)

    def slot_for(self, only: _Worker | None) -> _Worker | None:
        """The worker that would take a call now: `only` that one, or the least busy."""
        if only is not None:
            return only if only.free > 0 and only.alive else None
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
        self._num_wait_seat = 0
        self._counts: dict[str, int] = dict.fromkeys(CallStatus, 0)
        self._num_replaced = 0
        self._why = ""  # no worker came up, last
        self._quiet_until = -math.inf
        self._num_untold = 0
        self._open = False
        self._backends: list[Backend]
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
                self._open = True
                return self
        raise SandboxUnavailable(self._why or "no worker came up")

    async def __aexit__(self, *exc: object) -> None:
        self._open = False
        for waiter in self._room.waiting:
            waiter.granted.set()  # without a worker
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
        except NoEngine as error:
            # Who names an engine or an image means it: nothing else is put in its place.
            named = settings.engines or settings.image or os.environ.get("DOCKER_HOST")
            if settings.backend == "docker" or named:
                raise
            self._on_progress(f"Calls run in local processes: {error}.")
            return ProcessBackend(settings)

    async def _keep(self, backend: Backend, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Keep one place filled for as long as the pool lives."""
        failures = 0
        worker: _Worker | None
        while True:
            try:
                worker = await self._group.start(self._live, backend)
            except Exception as error:  # any: a place that is given up is lost for good
                self._tell_failure(error)
                failures += 1
                worker = None
            if task_status is not anyio.TASK_STATUS_IGNORED:  # the first has come up, or has not
                task_status.started()
                task_status = anyio.TASK_STATUS_IGNORED
            if worker is not None:
                await worker.vacant.wait()  # no deadline: as long as the worker lives
                self._num_replaced += 1
                failures = 0 if worker.proven else failures + 1
            if failures:
                await anyio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S)) - 1])

    def _tell_failure(self, error: Exception) -> None:
        """To the log, but not once for every try while an engine is down."""
        self._why = str(error)
        if not self._open and isinstance(error, SandboxError):
            return  # if no worker comes up, the pool's own error says why
        now = time.monotonic()
        if now < self._quiet_until:
            self._num_untold += 1
            return
        more = f" ({self._num_untold} more since the last line)" if self._num_untold else ""
        # Only our own errors explain themselves.
        log.warning("%s%s", error, more, exc_info=not isinstance(error, SandboxError))
        self._quiet_until, self._num_untold = now + QUIET_S, 0

    async def _live(self, backend: Backend, task_status: anyio.abc.TaskStatus[_Worker]) -> None:
        """One worker's life. Raises what kept it from starting, and nothing later."""
        worker_id = f"{os.getpid()}-{_token}-{next(_numbers)}"
        worker: _Worker | None = None
        try:
            async with backend.worker(worker_id) as link:
                worker = _Worker(link, self.settings)
                task_status.started(worker)
                await self._employ(worker)
        except Exception as error:
            if worker is None:
                raise
            log.warning("worker %s: %r", worker_id, error)

    async def _employ(self, worker: _Worker) -> None:
        """Give the worker calls until it is lost, or has run its share and keeps no session."""
        link = worker.link
        link.on_settled = lambda: self._on_settled(worker)
        self._room.workers.append(worker)
        try:
            self._room.serve()
            self._tell_seats()
            await self._until_done(worker)
        finally:
            self._room.workers.remove(worker)
            link.lose("the pool closed it")
            worker.vacant.set()
            self._room.serve()
            self._tell_seats()

    async def _until_done(self, worker: _Worker) -> None:
        async with anyio.create_task_group() as group:

            async def watch(event: anyio.Event) -> None:
                await event.wait()  # no deadline: as long as the worker lives
                group.cancel_scope.cancel()

            group.start_soon(watch, worker.link.lost)
            group.start_soon(watch, worker.drained)

    def _on_settled(self, worker: _Worker) -> None:
        worker.proven = worker.proven or worker.alive
        if worker.num_left <= 0 and not worker.retiring:
            self._retire(worker)
        self._room.free(worker)

    def _retire(self, worker: _Worker) -> None:
        """No more calls. With sessions on it, it steps aside, unless too many have already."""
        if not worker.num_sessions:
            worker.retiring = True
        elif sum(w.aside for w in self._room.workers) < self.settings.workers:
            worker.retiring = True
            worker.vacant.set()

    def _tell_seats(self) -> None:
        self._seat_freed.set()
        self._seat_freed = anyio.Event()

    # -- calls ------------------------------------------------------------------------------

    async def run(
        self,
        code: str,
        stdin: str = "",
        timeout_s: float | None = None,
        *,
        output: OutputLimits | None = None,
    ) -> CallResult:
        """Run a program from a clean state and say how it ended; a failing program is a result.

        timeout_s: wall time of the program (default: the pool's setting), not of the waiting.
        output: how much it may write and what is kept of it (default: the pool's settings).
        Cancelling the caller kills the call. Raises ValueError for a timeout that isn't above 0
        and at most an hour, TypeError for code that is no str, RuntimeError outside of the pool's
        block.
        """
        message = self._message(code, stdin, timeout_s)
        if output is not None:
            message |= output.as_dict()
        result = self._refused(message, None) or await self._run(message, None)
        self._counts[result.status] += 1
        return result

    @asynccontextmanager
    async def session(self, max_wait_s: float | None = None) -> AsyncIterator[Session]:
        """A process whose variables last from one `run` to the next, for the time of the block.

        Raises Overloaded where no worker has a seat for it within `max_wait_s` (default: the
        pool's setting; 0 does not wait).
        """
        if not self._open:
            raise RuntimeError(NOT_OPEN)
        if max_wait_s is None:
            max_wait_s = self.settings.max_wait_s
        worker = await self._take_seat(max_wait_s)
        session = Session(self, worker, next_id())
        try:
            yield session
        finally:
            session.closed = True
            worker.link.tell({"op": "close", "session": session.id})
            worker.free_seats += 1
            worker.see_if_drained()
            self._tell_seats()

    def stats(self) -> dict[str, Any]:
        """Where the pool stands, for a status page."""
        alive = [w for w in self._room.workers if w.alive]
        workers = [w for w in alive if not w.aside]
        layers = {backend.name: dict(backend.layers) for backend in self._backends}
        return {
            "backend": "+".join(layers),
            "workers": len(workers),
            "slots": sum(w.num_slots for w in workers),
            "busy": sum(w.num_slots - w.free for w in alive),
            "waiting": len(self._room.waiting),
            "sessions": sum(w.num_sessions for w in alive),
            "sessions_waiting": self._num_wait_seat,
            "replaced": self._num_replaced,
            "calls": {str(status): count for status, count in self._counts.items() if count},
            "layers": layers[self._backends[-1].name],
        }

    def _message(self, code: str, stdin: str, timeout_s: float | None) -> dict[str, Any]:
        for name, text in (("code", code), ("stdin", stdin)):
            if not isinstance(text, str):
                raise TypeError(f"{name} must be a str, not {type(text).__name__}")
        timeout_s = float(self.settings.timeout_s if timeout_s is None else timeout_s)
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(f"timeout_s must be above 0 and at most {MAX_TIMEOUT_S:g} seconds")
        if not self._open:
            raise RuntimeError(NOT_OPEN)
        return {"op": "run", "code": code, "stdin": stdin, "timeout_s": timeout_s}

    def _refused(self, message: dict[str, Any], only: _Worker | None) -> CallResult | None:
        """An answer without a run, where the call can't or mustn't be taken."""
        size = len(message["code"]) + len(message["stdin"])
        if size > self.settings.max_code_bytes:
            most = self.settings.max_code_bytes
            why = f"code and stdin have {size} characters; the most is {most}"
            return CallResult.failed(next_id(), CallStatus.SANDBOX_ERROR, why)
        full = len(self._room.waiting) >= self.settings.max_waiting
        if full and self._room.slot_for(only) is None:
            why = f"{self.settings.max_waiting} calls are waiting already"
            return CallResult.failed(next_id(), CallStatus.OVERLOADED, why)
        return None

    async def _run(self, message: dict[str, Any], only: _Worker | None) -> CallResult:
        queue_s = 0.0
        why = ""
        for attempt in (1, 2):
            entered = time.monotonic()
            worker = await self._slot(only, self.settings.max_wait_s - queue_s, attempt > 1)
            queue_s += time.monotonic() - entered
            if worker is None:
                break
            call_id = message["id"] = next_id()
            reply = await self._answer(worker, message)
            where: dict[str, Any] = {
                "queue_s": queue_s, "worker_id": worker.link.worker_id, "attempt": attempt
            }  # fmt: skip
            if reply is not None and not _runs_again(reply, attempt, only):
                return CallResult.from_frame(reply, id=call_id, **where)
            if only is not None and only.alive:
                raise SessionLost(SESSION_GONE)
            why = f"worker {worker.link.worker_id} was lost: {worker.link.why}"
            if reply is not None:
                why = f"worker {worker.link.worker_id} failed: {reply.get('why')}"
            if only is not None:
                raise SessionLost(why)
        else:
            return CallResult.failed(call_id, CallStatus.SANDBOX_ERROR, why, **where)
        if only is not None and not only.alive:
            raise SessionLost(f"worker {only.link.worker_id} was lost: {only.link.why}")
        if not self._open:
            return CallResult.failed(next_id(), CallStatus.CANCELLED, "the pool was closed")
        why = f"no slot within {self.settings.max_wait_s:g} s" + (f"; {why}" if why else "")
        return CallResult.failed(
            next_id(), CallStatus.OVERLOADED, why, queue_s=queue_s, attempt=attempt
        )

    async def _slot(self, only: _Worker | None, left_s: float, first: bool) -> _Worker | None:
        """A slot, in turn. None if it took too long or can't come any more."""
        if not self._open:
            return None
        waiter = self._room.enter(only, first)
        if not waiter.granted.is_set():
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
        try:
            pending: Pending = worker.link.submit(message)
        except ProtocolError as error:
            self._room.free(worker)
            return {"status": "sandbox_error", "why": str(error), "attempt": 1}
        try:
            with anyio.move_on_after(message["timeout_s"] + worker.grace_s):
                await pending.done.wait()
        except BaseException:
            if not pending.done.is_set():
                worker.link.tell({"op": "kill", "id": message["id"]})
                self._counts[CallStatus.CANCELLED] += 1
                if self._open:
                    self._group.start_soon(self._see_killed, worker, pending)
            raise
        if not pending.done.is_set():
            worker.link.lose("it stopped answering")
        return pending.reply

    async def _see_killed(self, worker: _Worker, pending: Pending) -> None:
        """A call that was given up gives its slot back, or its worker is replaced."""
        with anyio.move_on_after(worker.grace_s):
            await pending.done.wait()
        if not pending.done.is_set():
            worker.link.lose("it stopped answering")

    # -- sessions ---------------------------------------------------------------------------

    async def _take_seat(self, max_wait_s: float) -> _Worker:
        with anyio.move_on_after(max_wait_s):
            while True:
                able = [w for w in self._room.workers if w.open and w.free_seats > 0]
                if able:
                    worker = max(able, key=lambda w: w.free_seats)
                    worker.free_seats -= 1
                    return worker
                self._num_wait_seat += 1
                try:
                    await self._seat_freed.wait()
                finally:
                    self._num_wait_seat -= 1
        num_seats = sum(w.num_seats for w in self._room.workers if w.open)
        within = f" within {max_wait_s:g} s" if max_wait_s else ""
        raise Overloaded(
            f"no session is free{within}, of {num_seats}: close one, or allow more "
            "(sessions_per_worker, workers)"
        )


def _runs_again(reply: dict[str, Any], attempt: int, only: _Worker | None) -> bool:
    """True if the worker itself failed before the program began (say, no process could be
    forked): then once more, elsewhere. A host has done so already, and says `attempt`."""
    failed = reply["status"] == CallStatus.SANDBOX_ERROR and "attempt" not in reply
    return failed and attempt == 1 and only is None


class Session:
    """Cells that share their variables. Made by `Pool.session()`."""

    def __init__(self, pool: Pool, worker: _Worker, session_id: int) -> None:
        self.id = session_id
        self._pool = pool
        self._worker = worker
        self.closed = False
        self._turn = anyio.Lock()

    async def run(self, code: str, stdin: str = "", timeout_s: float | None = None) -> CallResult:
        """Run a cell; its last expression's value is in `result`. Cells run one after another.

        Raises SessionLost if the process is gone: a cell that is killed (time, memory, output)
        still gets its result, and the next one this error.
        """
        pool = self._pool
        message = pool._message(code, stdin, timeout_s) | {"session": self.id}
        async with self._turn:  # no deadline: the calls before it have theirs
            if self.lost:
                raise SessionLost("the session is closed" if self.closed else SESSION_GONE)
            worker = self._worker
            result = pool._refused(message, worker) or await pool._run(message, worker)
        pool._counts[result.status] += 1
        return result

    @property
    def lost(self) -> bool:
        return (
            self.closed
            or self._worker.link.lost.is_set()
            or self.id in self._worker.link.lost_sessions
        )
