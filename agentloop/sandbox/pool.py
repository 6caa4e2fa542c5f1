"""The pool: the life of its workers, which come and go while calls (calls.py) run on them.

    run() ──> queue (first in, first out) ──> an idle worker ──> result
                  ▲                                │
                  └── the worker has replied, ─────┘ or was replaced by a fresh one

`_keep` (one task per backend) starts workers until there are as many as are wanted: `workers` for
calls, and one for each open session. It waits until one is lost, has run its share of calls or
keeps memory, and starts the next, so the pool never shrinks for good. Callers wait for workers
(slots.py), and a worker's reply, or its loss, wakes the caller of its call.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Self, TypedDict

import anyio
from anyio.abc import TaskGroup

from agentloop.sandbox.backend import Backend
from agentloop.sandbox.calls import NOT_OPEN, Calls
from agentloop.sandbox.computer import Computer, ComputerLimits, Snapshot
from agentloop.sandbox.computer.computer import checked_env, open_computer
from agentloop.sandbox.computer.fleet import Fleet, open_fleet
from agentloop.sandbox.computer.machine import ComputerSpec
from agentloop.sandbox.computer.place import ComputerPlaces
from agentloop.sandbox.computer.remote import HostPlace
from agentloop.sandbox.container import ContainerEngine, DockerBackend, docker_backend
from agentloop.sandbox.engine import WITHOUT_ENGINE
from agentloop.sandbox.errors import (
    NoEngine,
    Overloaded,
    ProgramUnsupported,
    SandboxError,
    SandboxUnavailable,
)
from agentloop.sandbox.languages import (
    COMPILE_OUTPUT,
    COMPILE_TIMEOUT_S,
    PROBE_TIMEOUT_S,
    TOOLS,
    Language,
    checked,
    second_call,
)
from agentloop.sandbox.link import next_id
from agentloop.sandbox.owner import make_dir, remove_tree, unique_id
from agentloop.sandbox.process import process_backend
from agentloop.sandbox.program import Program, ProgramEnd, run_in_computer
from agentloop.sandbox.remote import HostBackend
from agentloop.sandbox.results import CallResult
from agentloop.sandbox.session import CellArguments, Session
from agentloop.sandbox.settings import OutputLimits, PoolSettings
from agentloop.sandbox.slots import Need, PoolWorker

log = logging.getLogger("sandbox")

BACKOFF_S = (0.1, 0.5, 2.0, 5.0)
SURPLUS_S = 60.0  # time after which a worker that is not wanted any more is closed
QUIET_S = 30.0  # failures to start workers are logged at most this often


class ProgramArguments(CellArguments):
    """The arguments of `Pool.run`, except those of a compiler."""

    language: Language
    output: OutputLimits | None


class PoolStats(TypedDict):
    """The state of a pool as plain data."""

    backend: str
    workers: int
    slots: int
    busy: int
    waiting: int
    sessions: int
    sessions_waiting: int
    computers: int
    lost: int
    calls: dict[str, int]
    layers: dict[str, str]


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
        self._changed = anyio.Event()  # workers, or how many are wanted
        self._num_lost = 0  # workers that ended without being retired
        self._why = ""  # why the last worker that failed did not start
        self._quiet_until = -math.inf
        self._num_unlogged = 0
        self._backends: list[Backend]
        self._group: TaskGroup
        self._languages: dict[str, bool] = {}  # whether calls can be in them
        self._fleet: Fleet | None = None
        self._fleet_lock = anyio.Lock()
        self._places = ComputerPlaces(self.open_fleet)
        self._stack = AsyncExitStack()

    # -- life -------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            backends = await self._choose_backends(stack)
            self._backends = backends
            self._group = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(self._group.cancel_scope.cancel)
            for backend in backends:
                if isinstance(backend, HostBackend):
                    stack.callback(remove_tree, folder := make_dir())
                    self._places.hosts.append(HostPlace(backend, folder, self._group))
            async with anyio.create_task_group() as starting:
                for backend in backends:
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
        settings = self.settings
        hosts: list[Backend] = [HostBackend(url, settings) for url in settings.hosts]
        if hosts and settings.backend == "auto" and not settings.engines:
            self._queue.max_running = self._queue.max_sessions = 0
            return hosts
        local = await self._choose_local(stack)
        self._queue.max_running, self._queue.max_sessions = local.max_running, local.max_sessions
        return [*hosts, local]

    async def _choose_local(self, stack: AsyncExitStack) -> Backend:
        settings = self.settings
        if settings.backend == "process":
            return await stack.enter_async_context(process_backend(settings))
        try:
            return await stack.enter_async_context(docker_backend(settings, self._on_progress))
        except NoEngine as error:
            # An explicitly configured engine or image is never replaced by local processes.
            named = settings.engines or settings.image or os.environ.get("DOCKER_HOST")
            if settings.backend == "docker" or named:
                raise NoEngine(f"{error}. Start it, or {WITHOUT_ENGINE}") from error
            self._on_progress(f"Calls run in local processes: {error}.")
            return await stack.enter_async_context(process_backend(settings))

    async def _keep(self, backend: Backend, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Keep as many workers of a backend running as are wanted."""
        fleet = _Fleet(backend)
        num_first = self._num_wanted(backend)
        surplus_since = math.inf
        while True:
            while fleet.num < self._num_wanted(backend):
                fleet.num += 1
                self._group.start_soon(self._live, fleet)
            if fleet.num_tries >= num_first and task_status is not anyio.TASK_STATUS_IGNORED:
                task_status.started()
                task_status = anyio.TASK_STATUS_IGNORED
            with anyio.move_on_after(SURPLUS_S / 4):
                await self._changed.wait()
            if fleet.num_failures and fleet.num < self._num_wanted(backend):
                await anyio.sleep(BACKOFF_S[min(fleet.num_failures, len(BACKOFF_S)) - 1])
            now_s = anyio.current_time()
            num_open = sum(worker.open for worker in self._queue.workers if not worker.is_host)
            if num_open <= self._num_wanted(backend):
                surplus_since = math.inf
            elif now_s >= surplus_since + SURPLUS_S:
                self._close_surplus()
            else:
                surplus_since = min(surplus_since, now_s)

    def _num_wanted(self, backend: Backend) -> int:
        if isinstance(backend, HostBackend):
            return 1
        queue = self._queue
        num_sessions = queue.num_sessions + queue.num_waiting_sessions
        return queue.max_running + min(num_sessions, queue.max_sessions)

    def _close_surplus(self) -> None:
        """Close a worker that nobody uses."""
        for worker in self._queue.workers:
            if worker.open and worker.is_idle and not worker.is_host:
                worker.retire()
                return

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def _log_failure(self, error: Exception) -> None:
        """Log a failure to start a worker, but not every attempt while an engine is down."""
        self._why = str(error)
        if not self._calls.is_open and isinstance(error, SandboxError):
            return  # the error of a pool without workers says why
        now_s = time.monotonic()
        if now_s < self._quiet_until:
            self._num_unlogged += 1
            return
        more = f" ({self._num_unlogged} more since the last line)" if self._num_unlogged else ""
        # Errors other than our own need a traceback.
        log.warning("%s%s", error, more, exc_info=not isinstance(error, SandboxError))
        self._quiet_until, self._num_unlogged = now_s + QUIET_S, 0

    async def _live(self, fleet: _Fleet) -> None:
        """Run one worker from start to end."""
        worker_id = unique_id()
        worker: PoolWorker | None = None
        try:
            async with fleet.backend.worker(worker_id) as link:
                worker = PoolWorker(link, self.settings)
                await self._employ(worker, fleet)
        except Exception as error:  # any, since the pool shall live on
            if worker is None:
                self._log_failure(error)
            else:
                log.warning("worker %s: %r", worker_id, error)
        finally:
            fleet.num -= 1
            if worker is None:
                fleet.num_tries += 1
            elif not worker.retiring:
                self._num_lost += 1
            if worker is None or not worker.proven:
                fleet.num_failures += 1
            self._notify()

    async def _employ(self, worker: PoolWorker, fleet: _Fleet) -> None:
        """Let the worker take calls until it is lost, or has run its share and has no sessions."""
        link = worker.link
        link.on_settled = lambda: self._on_settled(worker, fleet)
        link.on_worn = worker.retire
        self._queue.workers.append(worker)
        fleet.num_tries += 1
        try:
            self._queue.serve()
            self._notify()
            await self._until_done(worker)
        finally:
            self._queue.workers.remove(worker)
            self._calls.note_loss(worker)
            link.lose("the pool closed it")
            self._queue.serve()

    async def _until_done(self, worker: PoolWorker) -> None:
        async with anyio.create_task_group() as group:

            async def watch(ended: Callable[[], Awaitable[None]]) -> None:
                await ended()  # no deadline: as long as the worker lives
                group.cancel_scope.cancel()

            group.start_soon(watch, worker.link.watch)
            group.start_soon(watch, worker.drained.wait)

    def _on_settled(self, worker: PoolWorker, fleet: _Fleet) -> None:
        if worker.alive:
            worker.proven = True
            fleet.num_failures = 0
        if worker.num_left <= 0:
            worker.retiring = True
        self._queue.free(worker)

    # -- calls ------------------------------------------------------------------------------

    async def run(
        self,
        code: str,
        stdin: str = "",
        timeout_s: float | None = None,
        memory_mib: int | None = None,
        *,
        output: OutputLimits | None = None,
        language: Language = "python",
        compile_timeout_s: float = COMPILE_TIMEOUT_S,
    ) -> CallResult:
        """Run a program from a clean state and return how it ended; a failing program is a result.

        Cancelling the caller kills the call.

        Args:
            timeout_s: wall time limit of the program, not including the wait for a slot; at most an
                hour (default: the pool's setting).
            memory_mib: memory limit of all its processes together (default and maximum: the pool's
                setting).
            output: limits of its output (default: the pool's settings).
            language: of the program. One that cannot be compiled ends with the status of that, and
                with an error of the type CompileError.

        Raises:
            ProgramUnsupported: the sandbox lacks what runs the language.
            ValueError: a limit is out of range, or the language unknown.
            TypeError: `code` or `stdin` is not a str, or `memory_mib` not an int.
            RuntimeError: the pool is not open.
        """
        native = language != "python"
        message = self._calls.message(code, stdin, timeout_s, memory_mib, output, native)
        if not native:
            return await self._calls.run(message)
        await self.check_language(language)
        message["code"] = TOOLS[language].first_call(code)
        if TOOLS[language].compiles:
            compiling = (message["code"], "", compile_timeout_s, None, COMPILE_OUTPUT, True)
            program = second_call(await self._calls.run(self._calls.message(*compiling)))
            if isinstance(program, CallResult):
                return program
            message["code"] = program
        return checked(await self._calls.run(message))

    async def run_native(self, call: CellArguments, output: OutputLimits | None) -> CallResult:
        """Run Python that becomes another program, for a pool elsewhere (host.py)."""
        return await self._calls.run(self._calls.message(**call, output=output, native=True))

    async def check_language(self, language: Language) -> None:
        """Return if calls can be in a language, or that can't be found out now.

        Raises:
            ProgramUnsupported: the sandbox lacks what runs it.
        """
        if language == "python":
            return
        if language not in TOOLS:
            raise ValueError(f"language: {language!r} is none of python, {', '.join(TOOLS)}")
        if language not in self._languages:
            probe = self._calls.message(TOOLS[language].probe, "", PROBE_TIMEOUT_S, None)
            result = await self._calls.run(probe)
            if result.ok:
                self._languages[language] = result.stdout == "True\n"
        if not self._languages.get(language, True):
            tools = TOOLS[language]
            raise ProgramUnsupported(
                f"language: {language!r} needs {tools.command}, which is not in the sandbox: set "
                f'packages=["debian:{tools.package}"], or install it where calls run'
            )

    @asynccontextmanager
    async def session(self, max_wait_s: float | None = None) -> AsyncIterator[Session]:
        """Open a session: a process that keeps its variables between runs.

        Args:
            max_wait_s: longest wait for a free session when `max_sessions` are open (default: the
                pool's setting); 0: none.

        Raises:
            Overloaded: no session was free in time.
        """
        if not self._calls.is_open:
            raise RuntimeError(NOT_OPEN)
        if max_wait_s is None:
            max_wait_s = self.settings.max_wait_s
        worker = await self._reserve_session(max_wait_s)
        session = Session(self._calls, worker, next_id(), self.session)
        try:
            yield session
        finally:
            session.closed = True
            worker.link.close_session(session.id)
            self._queue.free_session(worker)
            self._notify()

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
        return await run_in_computer(await self.open_fleet(), self.settings, program, timeout_s)

    @asynccontextmanager
    async def computer(
        self,
        image: str = "",
        *,
        files: Mapping[str, bytes | Path] | None = None,
        network: str = "none",
        limits: ComputerLimits | None = None,
        user: str | None = None,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        snapshot: Snapshot | None = None,
    ) -> AsyncIterator[Computer]:
        """Open a computer: a root file system of its own, shells that keep their state, files.

        Leaving the context ends it with all that runs in it. It takes no slot of the pool. With
        hosts, it is on the one with the fewest computers, or that has the image.

        Args:
            image: an image that the engine has, or can pull; by default the pool's own. It needs a
                shell, and nothing of ours.
            files: what it begins with: bytes of a file, or a folder of this machine, by path.
            network: "none" has loopback alone, "allow:HOST[:PORT],..." these hosts through a proxy;
                or the name of a network of the engine, unrestricted.
            limits: memory, processes, processors and disk, for all of its processes together.
            user: `name[:group]`, or numbers; by default the image's.
            workdir: by default the image's.
            env: variables beside the image's.
            snapshot: files to begin with, of a computer with the same image and limits; `image`,
                `network` and `limits` are those of the snapshot.

        Raises:
            ProgramUnsupported: there is no engine, here or on a host, or it lacks the image.
            SandboxUnavailable: the engine failed, or no host is connected.
            Overloaded: `max_sessions` are open, and none was closed in time.
            ValueError: the list of hosts, or `env`, has what is none.
        """
        spec = ComputerSpec(image, network, limits or ComputerLimits())
        if snapshot is not None:
            spec = snapshot.spec
        env = checked_env(env or {})
        place, machine = await self._places.take(spec)
        async with open_computer(place, machine, user, workdir, env, snapshot) as box:
            for path, content in (files or {}).items():
                if isinstance(content, Path):
                    await box.put(content, path)
                else:
                    await box.write(path, content)  # no deadline: each chunk has one
            yield box

    async def warm_computers(
        self,
        num: int,
        image: str = "",
        *,
        network: str = "none",
        limits: ComputerLimits | None = None,
    ) -> None:
        """Keep `num` computers ready here from now on, and wait until they are.

        Raises as `computer`. Hosts keep theirs.
        """
        fleet = await self.open_fleet()
        spec = ComputerSpec(image or fleet.engine.image, network, limits or ComputerLimits())
        await fleet.keep_warm(spec, num)

    async def build_image(self, folder: Path) -> str:
        """Build an image from a folder with a Dockerfile, if it has not been built yet.

        Further hosts build it when they get a computer of it.

        Returns:
            The image's name, which follows from the folder's contents.

        Raises:
            SandboxUnavailable: a step of it failed, or the engine did.
            OSError: the folder cannot be read.
        """
        return await self._places.build_image(folder)

    async def open_fleet(self) -> Fleet:
        """Return this machine's computers, for computer/host.py. Raises as `build_image`."""
        engine = self._container_engine()
        async with self._fleet_lock:  # no deadline: the toolbox is made in a second
            if self._fleet is None:
                self._fleet = await self._group.start(self._run_fleet, engine)
        return self._fleet

    async def _run_fleet(
        self, engine: ContainerEngine, *, task_status: anyio.abc.TaskStatus[Fleet]
    ) -> None:
        async with open_fleet(engine, self.settings) as fleet:
            task_status.started(fleet)
            await anyio.sleep_forever()  # no deadline: the pool's end cancels it

    def _container_engine(self) -> ContainerEngine:
        """Return the engine on this machine. Raises ProgramUnsupported, RuntimeError."""
        if not self._calls.is_open:
            raise RuntimeError(NOT_OPEN)
        backend = next((item for item in self._backends if isinstance(item, DockerBackend)), None)
        if backend is None:
            raise ProgramUnsupported(
                "computers and programs have containers of their own, and calls do not run in "
                "containers here: they need a Docker Engine on this machine that this user may use"
            )
        if backend.local_engine is None:
            raise ProgramUnsupported(
                "computers and programs are reached over a socket, so their engine must be on "
                f"this machine: {', '.join(self.settings.engines)} cannot mount it. Name a local "
                "one, unix:///path, among `engines`"
            )
        return backend.local_engine

    def stats(self) -> PoolStats:
        """Return the state of the pool as plain data, for a status page."""
        alive = [w for w in self._queue.workers if w.alive]
        local = [w for w in alive if not w.is_host]
        num_slots = min(self._queue.max_running, sum(not w.num_sessions for w in local))
        layers = {backend.name: dict(backend.layers) for backend in self._backends}
        return {
            "backend": "+".join(layers),
            "workers": len(alive),
            "slots": num_slots + sum(w.num_slots for w in alive if w.is_host),
            "busy": sum(w.num_slots - w.free for w in alive),
            "waiting": self._queue.num_waiting,
            "sessions": sum(w.num_sessions for w in alive),
            "sessions_waiting": self._queue.num_waiting_sessions,
            "computers": self._fleet.num_computers if self._fleet else 0,
            "lost": self._num_lost,
            "calls": {str(status): count for status, count in self._calls.counts.items() if count},
            "layers": layers[self._backends[-1].name],
        }

    # -- sessions ---------------------------------------------------------------------------

    async def _reserve_session(self, max_wait_s: float) -> PoolWorker:
        queue = self._queue
        if queue.num_sessions + queue.num_waiting_sessions < queue.max_sessions:
            max_wait_s = max(max_wait_s, self.settings.start_timeout_s)  # one is started for it
        waiter = queue.enter(Need.SESSION)
        self._notify()  # one more worker is wanted
        try:
            with anyio.move_on_after(max_wait_s):
                await waiter.granted.wait()
        except BaseException:
            self._queue.leave(waiter)
            raise
        if waiter.worker is not None:
            return waiter.worker
        self._queue.leave(waiter)
        within = f" within {max_wait_s:g} s" if max_wait_s else ""
        raise Overloaded(
            f"{self._queue.num_sessions} sessions are open, and none more was free{within}: close "
            "one, or allow more (max_sessions)"
        )


class _Fleet:
    """The workers of a backend.

    Attributes:
        num: workers that start or run.
        num_tries: number of workers that have started, or failed to.
        num_failures: number of failures in a row.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.num = 0
        self.num_tries = 0
        self.num_failures = 0
