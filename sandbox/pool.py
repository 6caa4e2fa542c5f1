"""The pool: the life of its workers, which come and go while calls (calls.py) run on them.

    run() ──> slot queue (first in, first out) ──> the least busy worker ──> result
                  ▲                                        │
                  └── a slot is free: the worker replied, ─┘ or was replaced by a fresh one

`_keep` (one task per worker) starts a worker, waits until it is lost or has run its share of calls,
and starts the next, so the pool never shrinks for good. Callers wait for slots of the workers
(slots.py), and a worker's reply, or its loss, wakes the callers of its calls. A worker that has run
its share while sessions are open on it is replaced by a fresh one but keeps running for its
sessions.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup

from agentloop.sandbox.backend import Backend
from agentloop.sandbox.calls import NOT_OPEN, Calls
from agentloop.sandbox.container import DockerBackend, docker_backend
from agentloop.sandbox.errors import (
    NoEngine,
    Overloaded,
    ProgramUnsupported,
    SandboxError,
    SandboxUnavailable,
)
from agentloop.sandbox.link import next_id
from agentloop.sandbox.process import ProcessBackend
from agentloop.sandbox.program import Program, ProgramEnd, run_in_container
from agentloop.sandbox.remote import HostBackend
from agentloop.sandbox.results import CallResult
from agentloop.sandbox.session import Session
from agentloop.sandbox.settings import OutputLimits, PoolSettings
from agentloop.sandbox.slots import PoolWorker

log = logging.getLogger("sandbox")

BACKOFF_S = (0.1, 0.5, 2.0, 5.0)
QUIET_S = 30.0  # failures to start workers are logged at most this often

# Worker ids must be unique among all pools of all processes that use an engine.
_token = secrets.token_hex(3)
_numbers = itertools.count()


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
        self._calls = Calls(self.settings)
        self._queue = self._calls.queue
        self._session_freed = anyio.Event()
        self._num_session_waiters = 0
        self._num_replaced = 0
        self._why = ""  # why the last worker that failed did not start
        self._quiet_until = -math.inf
        self._num_unlogged = 0
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
                self._calls.open(self._group)
                return self
        raise SandboxUnavailable(self._why or "no worker started")

    async def __aexit__(self, *exc: object) -> None:
        self._calls.close()
        await self._stack.__aexit__(None, None, None)

    def move_host(self, old: str, new: str) -> None:
        """Use a host at another URL from its next connection on."""
        for backend in self._backends:
            if isinstance(backend, HostBackend) and backend.url == old.rstrip("/"):
                backend.url = new.rstrip("/")

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
        worker: PoolWorker | None
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
        if not self._calls.is_open and isinstance(error, SandboxError):
            return  # the error of a pool without workers says why
        now = time.monotonic()
        if now < self._quiet_until:
            self._num_unlogged += 1
            return
        more = f" ({self._num_unlogged} more since the last line)" if self._num_unlogged else ""
        # Errors other than our own need a traceback.
        log.warning("%s%s", error, more, exc_info=not isinstance(error, SandboxError))
        self._quiet_until, self._num_unlogged = now + QUIET_S, 0

    async def _live(self, backend: Backend, task_status: anyio.abc.TaskStatus[PoolWorker]) -> None:
        """Run one worker from start to end. Raises only errors of its start."""
        worker_id = f"{os.getpid()}-{_token}-{next(_numbers)}"
        worker: PoolWorker | None = None
        try:
            async with backend.worker(worker_id) as link:
                worker = PoolWorker(link, self.settings)
                task_status.started(worker)
                await self._employ(worker)
        except Exception as error:
            if worker is None:
                raise
            log.warning("worker %s: %r", worker_id, error)

    async def _employ(self, worker: PoolWorker) -> None:
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
            self._calls.note_loss(worker)
            link.lose("the pool closed it")
            worker.vacant.set()
            self._queue.serve()
            self._notify_session_waiters()

    async def _until_done(self, worker: PoolWorker) -> None:
        async with anyio.create_task_group() as group:

            async def watch(ended: Callable[[], Awaitable[None]]) -> None:
                await ended()  # no deadline: as long as the worker lives
                group.cancel_scope.cancel()

            group.start_soon(watch, worker.link.watch)
            group.start_soon(watch, worker.drained.wait)

    def _on_settled(self, worker: PoolWorker) -> None:
        worker.proven = worker.proven or worker.alive
        if worker.num_left <= 0 and not worker.retiring:
            self._retire(worker)
        was_alone = worker.runs_alone
        self._queue.free(worker)
        if was_alone:
            self._notify_session_waiters()

    def _retire(self, worker: PoolWorker) -> None:
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
        message = self._calls.message(code, stdin, timeout_s, memory_mib)
        if output is not None:
            message |= output.as_dict()
        return await self._calls.run(message)

    @asynccontextmanager
    async def session(self, max_wait_s: float | None = None) -> AsyncIterator[Session]:
        """Open a session: a process that keeps its variables between runs.

        Args:
            max_wait_s: longest wait for a free session (default: the pool's setting); 0: none.

        Raises:
            Overloaded: no session was free in time.
        """
        if not self._calls.is_open:
            raise RuntimeError(NOT_OPEN)
        if max_wait_s is None:
            max_wait_s = self.settings.max_wait_s
        worker = await self._reserve_session(max_wait_s)
        session = Session(self._calls, worker, next_id())
        try:
            yield session
        finally:
            session.closed = True
            worker.link.close_session(session.id)
            worker.free_sessions += 1
            worker.check_drained()
            self._notify_session_waiters()

    @property
    def has_containers(self) -> bool:
        """True if calls run in containers, here or on another machine."""
        return any(isinstance(backend, DockerBackend) for backend in self._backends)

    async def run_program(self, program: Program, timeout_s: float) -> ProgramEnd:
        """Run a program in a container of its own; one that fails or hangs is a result.

        Its container has the memory of a call, and takes no slot of the pool. Cancelling the
        caller kills it.

        Args:
            timeout_s: time limit, including the start of the container.

        Raises:
            ProgramUnsupported: there is no engine on this machine, or it lacks the image.
            SandboxUnavailable: the engine failed.
            RuntimeError: the pool is not open.
        """
        if not self._calls.is_open:
            raise RuntimeError(NOT_OPEN)
        backend = next((one for one in self._backends if isinstance(one, DockerBackend)), None)
        if backend is None:
            raise ProgramUnsupported(
                "a program runs in a container of its own, and calls do not run in containers "
                "here: it needs a Docker Engine on this machine that this user may use"
            )
        if backend.local_engine is None:
            raise ProgramUnsupported(
                "a program reaches the model over a socket of this machine, so its engine must be "
                f"on this machine: {', '.join(self.settings.engines)} cannot mount it. Name a "
                "local one, unix:///path, among `engines`"
            )
        return await run_in_container(backend.local_engine, self.settings, program, timeout_s)

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
            "calls": {str(status): count for status, count in self._calls.counts.items() if count},
            "layers": layers[self._backends[-1].name],
        }

    # -- sessions ---------------------------------------------------------------------------

    async def _reserve_session(self, max_wait_s: float) -> PoolWorker:
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
