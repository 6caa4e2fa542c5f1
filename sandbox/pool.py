"""The pool: calls in, answers out, over workers that come and go.

    run() ──> slot queue (first in, first out) ──> the least busy worker ──> result
                  ▲                                        │
                  └── a slot is free: the worker replied, ─┘ or was replaced by a fresh one

`_keep` (one task per worker) starts a worker, waits until it is lost or has run its share of calls,
and starts the next, so the pool never shrinks for good. Workers provide slots, for which callers
wait in `_SlotQueue`; a worker's reply, or its loss, wakes the callers of its calls. A worker that
has run its share while sessions are open on it is replaced by a fresh one but keeps running for its
sessions.

A call whose worker is lost or fails is run once more, alone on a worker that runs no other call
meanwhile. So no other call can harm it a second time, and the second run shows the cause. If that
worker is lost as well, the call has ended two workers and gets the status `killed`: a program must
not be able to make its own failure look like a failure of infrastructure. But if unrelated workers
were lost at the same moment, the call is not to blame and gets the status `sandbox_error`.
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

from agentloop.sandbox.backend import Backend
from agentloop.sandbox.container import docker_backend
from agentloop.sandbox.errors import (
    LostBy,
    NoEngine,
    Overloaded,
    ProtocolError,
    SandboxError,
    SandboxUnavailable,
    SessionLost,
)
from agentloop.sandbox.link import Link, OpenSession, Pending, next_id
from agentloop.sandbox.process import ProcessBackend
from agentloop.sandbox.remote import HostBackend, HostLink
from agentloop.sandbox.results import CallError, CallResult, CallStatus
from agentloop.sandbox.settings import OutputLimits, PoolSettings

log = logging.getLogger("sandbox")

GRACE_S = 5.0  # time beyond a call's time limit after which its worker is considered hung
NOT_OPEN = "the pool is not open: use it within `async with Pool() as pool`"
SESSION_GONE = {
    LostBy.PROGRAM: "the session's process was ended by the code that ran in it; its variables are "
    "gone",
    LostBy.CALLER: "the session's process was killed with a cell that its caller cancelled; its "
    "variables are gone",
    LostBy.INFRASTRUCTURE: "the session's process has ended, not because of the code that ran in "
    "it; its variables are gone",
}
MAX_TIMEOUT_S = 3600.0
BACKOFF_S = (0.1, 0.5, 2.0, 5.0)
QUIET_S = 30.0  # failures to start workers are logged at most this often
SAME_MOMENT_S = 1.0  # workers lost within this time may have a common cause

# Worker ids must be unique among all pools of all processes that use an engine.
_token = secrets.token_hex(3)
_numbers = itertools.count()


class _Worker:
    """The pool's state of a running worker, or of a host, which announces its own capacity."""

    def __init__(self, link: Link, settings: PoolSettings) -> None:
        self.link = link
        hello = link.hello
        self.num_slots = self.free = int(hello.get("slots", settings.slots_per_worker))
        self.max_sessions = self.free_sessions = int(
            hello.get("seats", settings.sessions_per_worker)
        )
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


class _Waiter:
    __slots__ = ("alone", "granted", "only", "worker")

    def __init__(self, only: _Worker | None, alone: bool) -> None:
        self.only = only  # the only worker that can run it: a session's cell
        self.alone = alone  # needs a worker for itself
        self.granted = anyio.Event()
        self.worker: _Worker | None = None


class _SlotQueue:
    """The queue of calls that wait for a slot. Pure: no I/O and no await."""

    def __init__(self) -> None:
        self.workers: list[_Worker] = []
        self.waiting: OrderedDict[_Waiter, None] = OrderedDict()

    def enter(self, only: _Worker | None, alone: bool) -> _Waiter:
        """Enqueue a call; one that is to run `alone` goes first, since it has waited before."""
        waiter = _Waiter(only, alone)
        self.waiting[waiter] = None
        self.waiting.move_to_end(waiter, last=not alone)
        self.serve()
        return waiter

    def leave(self, waiter: _Waiter) -> None:
        """Remove a cancelled call from the queue, or free its slot if it was just granted."""
        if waiter.worker is not None:
            self.free(waiter.worker)
            return
        self.waiting.pop(waiter, None)
        if waiter.alone:
            self.serve()  # a worker that was being emptied for it can take calls again

    def free(self, worker: _Worker) -> None:
        worker.free += 1
        if worker.alive:
            worker.runs_alone = False
        worker.check_drained()
        self.serve()

    def serve(self) -> None:
        """Grant free slots, oldest call first."""
        passed_over: list[_Waiter] = []
        emptying: list[_Worker] = []  # workers that take no calls until they are empty
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

    def slot_for(self, only: _Worker | None, emptying: Sequence[_Worker] = ()) -> _Worker | None:
        """Return the worker that can take a call now: `only`, if given, or the least busy one."""
        if only is not None:
            is_open = only.alive and not only.runs_alone and only not in emptying
            return only if only.free > 0 and is_open else None
        able = self.workers
        if emptying:
            able = [worker for worker in able if worker not in emptying]
        best = max(able, key=lambda w: w.num_available, default=None)
        return best if best is not None and best.num_available > 0 else None

    def reserve_worker(self, emptying: list[_Worker]) -> _Worker | None:
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


class Pool:
    """Runs untrusted Python, each call in a confined process of its own.

        async with Pool() as pool:
            result = await pool.run("print(6 * 7)")

    Entering starts the workers, which takes seconds; the image is built on the first use of Docker.
    It raises SandboxUnavailable if no worker starts. `on_progress` is called with lines of text
    meanwhile.
    """

    def __init__(
        self,
        settings: PoolSettings | None = None,
        *,
        on_progress: Callable[[str], None] = log.info,
    ) -> None:
        self.settings = settings or PoolSettings()
        self._on_progress = on_progress
        self._queue = _SlotQueue()
        self._session_freed = anyio.Event()
        self._num_session_waiters = 0
        self._counts: dict[str, int] = dict.fromkeys(CallStatus, 0)
        self._num_replaced = 0
        self._why = ""  # why the last worker that failed did not start
        self._quiet_until = -math.inf
        self._num_unlogged = 0
        # Times of losses of workers that were not reserved for a single call.
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
            if self._queue.workers:
                self._stack = stack.pop_all()
                self._open = True
                return self
        raise SandboxUnavailable(self._why or "no worker started")

    async def __aexit__(self, *exc: object) -> None:
        self._open = False
        for waiter in self._queue.waiting:
            waiter.granted.set()  # without a worker
        await self._stack.__aexit__(None, None, None)

    async def _choose_backends(self, stack: AsyncExitStack) -> list[Backend]:
        """Return a backend for each worker to keep running."""
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
            # An explicitly configured engine or image is never replaced by local processes.
            named = settings.engines or settings.image or os.environ.get("DOCKER_HOST")
            if settings.backend == "docker" or named:
                raise
            self._on_progress(f"Calls run in local processes: {error}.")
            return ProcessBackend(settings)

    async def _keep(self, backend: Backend, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Keep one worker running for as long as the pool is open, replacing it when needed."""
        failures = 0
        worker: _Worker | None
        while True:
            try:
                worker = await self._group.start(self._live, backend)
            except Exception as error:  # any, since a task that ends would shrink the pool
                self._log_failure(error)
                failures += 1
                worker = None
            if task_status is not anyio.TASK_STATUS_IGNORED:  # the first attempt is over
                task_status.started()
                task_status = anyio.TASK_STATUS_IGNORED
            if worker is not None:
                await worker.vacant.wait()  # no deadline: as long as the worker lives
                self._num_replaced += 1
                failures = 0 if worker.proven else failures + 1
            if failures:
                await anyio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S)) - 1])

    def _log_failure(self, error: Exception) -> None:
        """Log a failure to start a worker, but not every attempt while an engine is down."""
        self._why = str(error)
        if not self._open and isinstance(error, SandboxError):
            return  # the error of a pool without workers says why
        now = time.monotonic()
        if now < self._quiet_until:
            self._num_unlogged += 1
            return
        more = f" ({self._num_unlogged} more since the last line)" if self._num_unlogged else ""
        # Errors other than our own need a traceback.
        log.warning("%s%s", error, more, exc_info=not isinstance(error, SandboxError))
        self._quiet_until, self._num_unlogged = now + QUIET_S, 0

    async def _live(self, backend: Backend, task_status: anyio.abc.TaskStatus[_Worker]) -> None:
        """Run one worker from start to end. Raises only errors of its start."""
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
        """Let the worker take calls until it is lost, or has run its share and has no sessions."""
        link = worker.link
        link.on_settled = lambda: self._on_settled(worker)
        self._queue.workers.append(worker)
        try:
            self._queue.serve()
            self._notify_session_waiters()
            await self._until_done(worker)
        finally:
            self._queue.workers.remove(worker)
            if not (worker.alive or worker.runs_alone or worker.is_host):
                self._losses.append((time.monotonic(), worker))
            link.lose("the pool closed it")
            worker.vacant.set()
            self._queue.serve()
            self._notify_session_waiters()

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
        self._queue.free(worker)
        if was_alone:
            self._notify_session_waiters()

    def _retire(self, worker: _Worker) -> None:
        """Let the worker take no more calls, unless too many others are kept for their sessions.

        With open sessions, it is replaced but keeps running for them.
        """
        if not worker.num_sessions:
            worker.retiring = True
        elif sum(w.aside for w in self._queue.workers) < self.settings.workers:
            worker.retiring = True
            worker.vacant.set()

    def _notify_session_waiters(self) -> None:
        self._session_freed.set()
        self._session_freed = anyio.Event()

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
        """Run a program from a clean state and return how it ended; a failing program is a result.

        Cancelling the caller kills the call.

        Args:
            timeout_s: wall time limit of the program, not including the wait for a slot; at most an
                hour (default: the pool's setting).
            memory_mib: memory limit of all its processes together (default and maximum: the pool's
                setting).
            output: limits of its output (default: the pool's settings).

        Raises:
            ValueError: a limit is out of range.
            TypeError: `code` or `stdin` is not a str, or `memory_mib` not an int.
            RuntimeError: the pool is not open.
        """
        message = self._message(code, stdin, timeout_s, memory_mib)
        if output is not None:
            message |= output.as_dict()
        result = self._refuse(message, None) or await self._run(message, None)
        self._counts[result.status] += 1
        return result

    @asynccontextmanager
    async def session(self, max_wait_s: float | None = None) -> AsyncIterator[Session]:
        """Open a session: a process that keeps its variables between runs.

        Args:
            max_wait_s: longest wait for a free session (default: the pool's setting); 0: none.

        Raises:
            Overloaded: no session was free in time.
        """
        if not self._open:
            raise RuntimeError(NOT_OPEN)
        if max_wait_s is None:
            max_wait_s = self.settings.max_wait_s
        worker = await self._reserve_session(max_wait_s)
        session = Session(self, worker, next_id())
        try:
            yield session
        finally:
            session.closed = True
            worker.link.close_session(session.id)
            worker.free_sessions += 1
            worker.check_drained()
            self._notify_session_waiters()

    def stats(self) -> dict[str, Any]:
        """Return the state of the pool as plain data, for a status page."""
        alive = [w for w in self._queue.workers if w.alive]
        workers = [w for w in alive if not w.aside]
        layers = {backend.name: dict(backend.layers) for backend in self._backends}
        return {
            "backend": "+".join(layers),
            "workers": len(workers),
            "slots": sum(w.num_slots for w in workers),
            "busy": sum(w.num_slots - w.free for w in alive),
            "waiting": len(self._queue.waiting),
            "sessions": sum(w.num_sessions for w in alive),
            "sessions_waiting": self._num_session_waiters,
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

    def _refuse(self, message: dict[str, Any], only: _Worker | None) -> CallResult | None:
        """Return the result of a call that is refused without a run, or None."""
        size = len(message["code"]) + len(message["stdin"])
        if size > self.settings.max_code_bytes:
            most = self.settings.max_code_bytes
            why = f"code and stdin have {size} characters; the maximum is {most}"
            return CallResult.failed(next_id(), CallStatus.SANDBOX_ERROR, why)
        full = len(self._queue.waiting) >= self.settings.max_waiting
        if full and self._queue.slot_for(only) is None:
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
        """Return whether a call has caused the loss of the last worker it `used`, alone.

        It has not if other workers were lost at the same moment, since then an engine or a machine
        has failed.
        """
        if used[-1].is_host or not self._open:
            return False
        since = time.monotonic() - SAME_MOMENT_S
        await anyio.sleep(SAME_MOMENT_S)
        others = [worker for lost_s, worker in self._losses if lost_s > since]
        return self._open and all(worker in used for worker in others)

    async def _slot(self, only: _Worker | None, left_s: float, alone: bool) -> _Worker | None:
        """Wait for a slot; return None if there was none in time or there will be none."""
        if not self._open:
            return None
        waiter = self._queue.enter(only, alone)
        if not waiter.granted.is_set():
            try:
                with anyio.move_on_after(left_s):
                    await waiter.granted.wait()
            except BaseException:
                self._queue.leave(waiter)
                raise
            if waiter.worker is None:
                self._queue.leave(waiter)
        return waiter.worker

    async def _answer(self, worker: _Worker, message: dict[str, Any]) -> dict[str, Any] | None:
        """Send the call and wait for its reply; return None if the worker is lost.

        The slot is freed when the worker has replied, even if the caller was cancelled.
        """
        try:
            pending: Pending = worker.link.submit(message)
        except ProtocolError as error:
            self._queue.free(worker)
            return {"status": "sandbox_error", "why": str(error), "attempt": 1}
        try:
            with anyio.move_on_after(message["timeout_s"] + worker.grace_s):
                await pending.done.wait()
        except BaseException:
            if not pending.done.is_set():
                worker.link.tell({"op": "kill", "id": message["id"]})
                self._counts[CallStatus.CANCELLED] += 1
                if self._open:
                    self._group.start_soon(self._wait_killed, worker, pending)
            raise
        if not pending.done.is_set():
            worker.link.lose("it stopped responding")
        return pending.reply

    async def _wait_killed(self, worker: _Worker, pending: Pending) -> None:
        """Wait for a cancelled call to free its slot, or else have its worker replaced."""
        with anyio.move_on_after(worker.grace_s):
            await pending.done.wait()
        if not pending.done.is_set():
            worker.link.lose("it stopped responding")

    # -- sessions ---------------------------------------------------------------------------

    async def _reserve_session(self, max_wait_s: float) -> _Worker:
        with anyio.move_on_after(max_wait_s):
            while True:
                able = [w for w in self._queue.workers if w.can_open_session]
                if able:
                    worker = max(able, key=lambda w: w.free_sessions)
                    worker.free_sessions -= 1
                    return worker
                self._num_session_waiters += 1
                try:
                    await self._session_freed.wait()
                finally:
                    self._num_session_waiters -= 1
        max_sessions = sum(w.max_sessions for w in self._queue.workers if w.open)
        within = f" within {max_wait_s:g} s" if max_wait_s else ""
        raise Overloaded(
            f"none of {max_sessions} sessions is free{within}: close one, or allow more "
            "(sessions_per_worker, workers)"
        )


def _runs_again(reply: dict[str, Any], attempt: int, only: _Worker | None) -> bool:
    """Return whether to run a call again because the worker failed before the program started.

    An example is a failed fork. A host has repeated the call itself, and reports its `attempt`.
    """
    failed = reply["status"] == CallStatus.SANDBOX_ERROR and "attempt" not in reply
    return failed and attempt == 1 and only is None


class Session:
    """A process in which cells share their variables. Created by `Pool.session()`."""

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
        """Run a cell; `result` holds the value of its last expression. Cells run one at a time.

        Raises:
            SessionLost: the process is gone; `by` is the cause. A cell that is killed for exceeding
                a limit still returns a result, and the next one raises.
        """
        pool = self._pool
        message = pool._message(code, stdin, timeout_s, memory_mib) | {"session": self.id}
        async with self._turn:  # no deadline: the calls before it have theirs
            if self.lost:
                raise self.loss
            result = pool._refuse(message, self.worker) or await pool._run(message, self)
        pool._counts[result.status] += 1
        return result

    @property
    def lost(self) -> bool:
        return self.lost_by is not None

    @property
    def lost_by(self) -> LostBy | None:
        """The cause of the session's loss, or None while its process lives.

        Known as soon as the cell that ended the process has its result.
        """
        if self.closed:
            return LostBy.CALLER
        if self._state.lost_by is None and not self.worker.alive:
            return LostBy.INFRASTRUCTURE
        return self._state.lost_by

    @property
    def loss(self) -> SessionLost:
        """The error that `run` raises for a lost session."""
        by = self.lost_by or LostBy.INFRASTRUCTURE
        if self.closed:
            return SessionLost("the session is closed", by)
        if self._state.lost_by is None:
            link = self.worker.link
            return SessionLost(f"worker {link.worker_id} was lost: {link.why}", by)
        return SessionLost(SESSION_GONE[by], by)
