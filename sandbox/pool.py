"""The pool: calls in, answers out, over workers that come and go.

    run() ──> waiting room (first in, first out) ──> the least busy worker ──> answer
                  ▲                                        │
                  └── a slot is free: the worker answered, ┘ or a fresh worker took its place

`_keep` (one task per place) starts a worker, waits until it is lost or has run its share, and
starts the next: the pool never shrinks for good. What it produces is slots; callers wait for
them in `_Room`; a worker's answer, or its loss, sets the callers of its calls free. A worker that
has run its share while sessions live on it steps aside: it keeps those, and a fresh worker takes
its place for everything else.

A call whose worker was lost, or failed it, runs once more: alone, on a worker that runs no other
call meanwhile. So no neighbour can harm it a second time, and what happens then tells who was to
blame. If that worker is lost as well, the call has ended two of them, and is `killed`: a program
must not be able to make its own failure look like ours. If workers that had nothing to do with it
were lost at the same moment, it is not to blame, and is a `sandbox_error`.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import secrets
import signal
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup

from sandbox.backend import Backend
from sandbox.container import docker_backend
from sandbox.errors import (
    LostBy,
    NoEngine,
    Overloaded,
    ProtocolError,
    SandboxError,
    SandboxUnavailable,
    SessionLost,
)
from sandbox.link import Link, OpenSession, Pending, next_id
from sandbox.process import ProcessBackend
from sandbox.remote import HostBackend, HostLink
from sandbox.results import CallError, CallResult, CallStatus
from sandbox.settings import OutputLimits, PoolSettings

log = logging.getLogger("sandbox")

GRACE_S = 5.0  # what a worker may take beyond a call's own time before it counts as hung
NOT_OPEN = "the pool is not open: use it within `async with Pool() as pool`"
SESSION_GONE = {
    LostBy.PROGRAM: "the session's process has ended, by what ran in it; its variables are gone",
    LostBy.CALLER: "the session's process was killed with a cell that its caller gave up; its "
    "variables are gone",
    LostBy.INFRASTRUCTURE: "the session's process has ended, which was not by what ran in it; its "
    "variables are gone",
}
MAX_TIMEOUT_S = 3600.0
BACKOFF_S = (0.1, 0.5, 2.0, 5.0)
QUIET_S = 30.0  # workers that don't start are told of once in this time
SAME_MOMENT_S = 1.0  # workers that are lost within it may have been lost to one cause

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
        self.runs_alone = False  # one call, and no other beside it
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
    def has_seat(self) -> bool:
        return self.open and not self.runs_alone and self.free_seats > 0

    @property
    def is_host(self) -> bool:
        return isinstance(self.link, HostLink)

    @property
    def room(self) -> int:
        """Free slots, less what a host has to do for others."""
        others = self.link.others if isinstance(self.link, HostLink) else 0
        is_open = self.open and not self.runs_alone
        return max(min(self.free, 1), self.free - others) if is_open else -1


class _Waiter:
    __slots__ = ("alone", "granted", "only", "worker")

    def __init__(self, only: _Worker | None, alone: bool) -> None:
        self.only = only  # a session's cell can run in one place only
        self.alone = alone  # a call that wants a worker for itself
        self.granted = anyio.Event()
        self.worker: _Worker | None = None


class _Room:
    """Who waits for a slot, and who gets the next. No I/O, no await in any decision."""

    def __init__(self) -> None:
        self.workers: list[_Worker] = []
        self.waiting: OrderedDict[_Waiter, None] = OrderedDict()

    def enter(self, only: _Worker | None, alone: bool) -> _Waiter:
        """At the end of the queue; `alone`, at its head: such a call had its turn before."""
        waiter = _Waiter(only, alone)
        self.waiting[waiter] = None
        self.waiting.move_to_end(waiter, last=not alone)
        self.serve()
        return waiter

    def leave(self, waiter: _Waiter) -> None:
        """A caller gave up: out of the queue, or its slot back if it was just granted."""
        if waiter.worker is not None:
            self.free(waiter.worker)
            return
        self.waiting.pop(waiter, None)
        if waiter.alone:
            self.serve()  # no worker is to be emptied for it any more

    def free(self, worker: _Worker) -> None:
        worker.free += 1
        if worker.alive:
            worker.runs_alone = False
        worker.see_if_drained()
        self.serve()

    def serve(self) -> None:
        """Hand out free slots, oldest waiter first."""
        passed_over: list[_Waiter] = []
        emptying: list[_Worker] = []  # for calls that wait to be alone: they take nothing else
        while self.waiting:
            waiter, _ = self.waiting.popitem(last=False)
            if waiter.alone:
                worker = self.worker_for_one(emptying)
            else:
                worker = self.slot_for(waiter.only, emptying)
            if worker is not None:
                worker.free -= 1
                worker.num_left -= 1
                waiter.worker = worker
                waiter.granted.set()
            elif waiter.only is not None and not waiter.only.alive:
                waiter.granted.set()  # nothing left to wait for: it sees the loss
            elif waiter.only is not None or waiter.alone:
                passed_over.append(waiter)  # others needn't wait for what it waits for
            else:
                passed_over.append(waiter)
                break
        for waiter in reversed(passed_over):
            self.waiting[waiter] = None
            self.waiting.move_to_end(waiter, last=False)

    def slot_for(self, only: _Worker | None, emptying: Sequence[_Worker] = ()) -> _Worker | None:
        """The worker that would take a call now: `only` that one, or the least busy."""
        if only is not None:
            is_open = only.alive and not only.runs_alone and only not in emptying
            return only if only.free > 0 and is_open else None
        able = self.workers
        if emptying:
            able = [worker for worker in able if worker not in emptying]
        best = max(able, key=lambda w: w.room, default=None)
        return best if best is not None and best.room > 0 else None

    def worker_for_one(self, emptying: list[_Worker]) -> _Worker | None:
        """A worker that runs nothing else now, nor until the call has ended. If there is none, the
        one that is next to be empty joins `emptying`. A host has its own ways: any slot there."""
        local = [worker for worker in self.workers if worker.open and not worker.is_host]
        if not local:
            return self.slot_for(None)
        able = [worker for worker in local if not worker.runs_alone and worker not in emptying]
        best = max(able, key=lambda w: (w.free - w.num_slots, w.free_seats), default=None)
        if best is None:
            return None
        if best.free < best.num_slots:
            emptying.append(best)
            return None
        best.runs_alone = True
        return best


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
        # When workers were lost that ran no call alone, and which.
        self._losses: deque[tuple[float, _Worker]] = deque(maxlen=64)
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
            if not (worker.alive or worker.runs_alone or worker.is_host):
                self._losses.append((time.monotonic(), worker))
            link.lose("the pool closed it")
            worker.vacant.set()
            self._room.serve()
            self._tell_seats()

    async def _until_done(self, worker: _Worker) -> None:
        async with anyio.create_task_group() as group:

            async def watch(ended: Callable[[], Awaitable[None]]) -> None:
                await ended()  # no deadline: as long as the worker lives
                group.cancel_scope.cancel()

            group.start_soon(watch, worker.link.watch)
            group.start_soon(watch, worker.drained.wait)

    def _on_settled(self, worker: _Worker) -> None:
        worker.proven = worker.proven or worker.alive
        if worker.num_left <= 0 and not worker.retiring:
            self._retire(worker)
        was_alone = worker.runs_alone
        self._room.free(worker)
        if was_alone:
            self._tell_seats()

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
        memory_mib: int | None = None,
        *,
        output: OutputLimits | None = None,
    ) -> CallResult:
        """Run a program from a clean state and say how it ended; a failing program is a result.

        timeout_s: wall time of the program (default: the pool's setting), not of the waiting.
        memory_mib: what its processes may hold together (default, and the most: the pool's
        setting).
        output: how much it may write and what is kept of it (default: the pool's settings).
        Cancelling the caller kills the call. Raises ValueError for a timeout that isn't above 0
        and at most an hour, or for memory that isn't between 1 and the pool's; TypeError for code
        that is no str; RuntimeError outside of the pool's block.
        """
        message = self._message(code, stdin, timeout_s, memory_mib)
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
            worker.link.close_session(session.id)
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

    def _message(
        self, code: str, stdin: str, timeout_s: float | None, memory_mib: int | None
    ) -> dict[str, Any]:
        for name, text in (("code", code), ("stdin", stdin)):
            if not isinstance(text, str):
                raise TypeError(f"{name} must be a str, not {type(text).__name__}")
        timeout_s = float(self.settings.timeout_s if timeout_s is None else timeout_s)
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(f"timeout_s must be above 0 and at most {MAX_TIMEOUT_S:g} seconds")
        if memory_mib is not None:
            if not isinstance(memory_mib, int):
                raise TypeError(f"memory_mib must be an int, not {type(memory_mib).__name__}")
            if not 0 < memory_mib <= self.settings.memory_mib:
                most = self.settings.memory_mib
                raise ValueError(f"memory_mib must be between 1 and the pool's {most}")
        if not self._open:
            raise RuntimeError(NOT_OPEN)
        more = {} if memory_mib is None else {"memory_mib": memory_mib}
        return {"op": "run", "code": code, "stdin": stdin, "timeout_s": timeout_s} | more

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

    async def _run(self, message: dict[str, Any], session: Session | None) -> CallResult:
        only = session.worker if session is not None else None
        queue_s = 0.0
        why = ""
        used: list[_Worker] = []
        for attempt in (1, 2):
            entered = time.monotonic()
            left_s = self.settings.max_wait_s - queue_s
            worker = await self._slot(only, left_s, alone=attempt > 1)
            queue_s += time.monotonic() - entered
            if worker is None:
                break
            call_id = message["id"] = next_id()
            used.append(worker)
            reply = await self._answer(worker, message)
            where: dict[str, Any] = {
                "queue_s": queue_s, "worker_id": worker.link.worker_id, "attempt": attempt
            }  # fmt: skip
            if reply is not None and not _runs_again(reply, attempt, only):
                return CallResult.from_frame(reply, id=call_id, **where)
            if session is not None:
                raise session.loss
            why = f"worker {worker.link.worker_id} was lost: {worker.link.why}"
            if reply is not None:
                why = f"worker {worker.link.worker_id} failed: {reply.get('why')}"
        else:
            if reply is None and await self._is_to_blame(used):
                error = CallError("WorkerLost", f"{why}; nothing else ran there")
                ended = {"signal": signal.SIGKILL, "error": error, **where}
                return CallResult(call_id, CallStatus.KILLED, **ended)
            return CallResult.failed(call_id, CallStatus.SANDBOX_ERROR, why, **where)
        if session is not None and not session.worker.alive:
            raise session.loss
        if not self._open:
            return CallResult.failed(next_id(), CallStatus.CANCELLED, "the pool was closed")
        why = f"no slot within {self.settings.max_wait_s:g} s" + (f"; {why}" if why else "")
        return CallResult.failed(
            next_id(), CallStatus.OVERLOADED, why, queue_s=queue_s, attempt=attempt
        )

    async def _is_to_blame(self, used: Sequence[_Worker]) -> bool:
        """Whether a call has ended the last of the workers that it `used`, which it had to itself
        and which is lost just now. Not if other workers were lost at the same moment: then it was
        an engine or a machine that failed."""
        if used[-1].is_host or not self._open:
            return False
        since = time.monotonic() - SAME_MOMENT_S
        await anyio.sleep(SAME_MOMENT_S)
        others = [worker for lost_s, worker in self._losses if lost_s > since]
        return self._open and all(worker in used for worker in others)

    async def _slot(self, only: _Worker | None, left_s: float, alone: bool) -> _Worker | None:
        """A slot, in turn. None if it took too long or can't come any more."""
        if not self._open:
            return None
        waiter = self._room.enter(only, alone)
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
                able = [w for w in self._room.workers if w.has_seat]
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
        self.worker = worker
        self.closed = False
        self._pool = pool
        self._state: OpenSession = worker.link.open_session(session_id)
        self._turn = anyio.Lock()

    async def run(
        self,
        code: str,
        stdin: str = "",
        timeout_s: float | None = None,
        memory_mib: int | None = None,
    ) -> CallResult:
        """Run a cell; its last expression's value is in `result`. Cells run one after another.

        Raises SessionLost if the process is gone: a cell that is killed (time, memory, output)
        still gets its result, and the next one this error, which says by whose doing (`by`).
        """
        pool = self._pool
        message = pool._message(code, stdin, timeout_s, memory_mib) | {"session": self.id}
        async with self._turn:  # no deadline: the calls before it have theirs
            if self.lost:
                raise self.loss
            result = pool._refused(message, self.worker) or await pool._run(message, self)
        pool._counts[result.status] += 1
        return result

    @property
    def lost(self) -> bool:
        return self.lost_by is not None

    @property
    def lost_by(self) -> LostBy | None:
        """By whose doing the process is gone; None while it lives. Known as soon as the cell that
        ended it has its result."""
        if self.closed:
            return LostBy.CALLER
        if self._state.lost_by is None and not self.worker.alive:
            return LostBy.INFRASTRUCTURE
        return self._state.lost_by

    @property
    def loss(self) -> SessionLost:
        """What `run` raises for a session that is lost."""
        by = self.lost_by or LostBy.INFRASTRUCTURE
        if self.closed:
            return SessionLost("the session is closed", by)
        if self._state.lost_by is None:
            link = self.worker.link
            return SessionLost(f"worker {link.worker_id} was lost: {link.why}", by)
        return SessionLost(SESSION_GONE[by], by)
