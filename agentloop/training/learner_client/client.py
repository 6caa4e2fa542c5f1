"""The learner, as the runtime sees it: processes that are started, asked and stopped.

    started ──> guardians of ranks ──> python -m agentloop.learner (DeepSpeed)
      │  one request at a time, JSON lines over a unix socket to rank 0, which tells the others;
      │  batches and weights are passed as files
      └─ a dead rank or a late response raises LearnerLost; leaving the context ends all ranks

    KeptLearner ──> the same, with `restart`: new processes, which then load a checkpoint

    LearnerError
     ├─ LearnerRefused  the learner refused a request, and continues
     ├─ LearnerLost     its processes died or do not respond: a restart may help
     └─ LearnerEnded    it ended itself, e.g. for non-finite gradients: a restart would not help

Torch is not imported here, only in the learner's processes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Protocol, Self, TypeVar

import anyio
import anyio.abc
import anyio.to_thread
from anyio.streams.buffered import BufferedByteReceiveStream

from agentloop.aio import task_group
from agentloop.child_environment import for_our_python
from agentloop.errors import AgentLoopError
from agentloop.inference.processes.supervise import start_guarded
from agentloop.training.learner_client.launch import RanksSettings, Start, free_port, starts
from agentloop.training.learner_client.protocol import (
    Failure,
    MessageError,
    ReadyReply,
    Reply,
    Request,
    decode_reply,
    encode,
)
from agentloop.training.learner_client.settings import LearnerSettings
from agentloop.training.run.folder import writing
from agentloop.training.run.status import count_of

# -P: ignore a learner.py in the working directory
_COMMAND = (sys.executable, "-P", "-m", "agentloop.learner")
_MAX_ANSWER_BYTES = 1 << 24  # large enough for the checksums of all tensors
_MAX_TAIL_BYTES = 1 << 16
_NUM_TAIL_LINES = 80
_MAX_FOLDER_BYTES = 64  # a socket's path may have 103 bytes, including the file name
_LAST_WORDS_S = 1.0  # for a dead rank's last response, such as that it ended on purpose
_OTHERS_S = 5.0  # for the first failed rank to be noticed, possibly after those it took with it

_BROKEN = (
    anyio.EndOfStream,
    anyio.IncompleteRead,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
)

T = TypeVar("T")
R = TypeVar("R", bound=Reply)


class LearnerError(AgentLoopError):
    """The learner failed; the message names the request and, if it died, ends with its log."""


class LearnerRefused(LearnerError):
    """The learner refused a request, and continues."""


class LearnerLost(LearnerError):
    """A rank died or did not respond in time. All state since the last checkpoint is lost."""


class LearnerEnded(LearnerError):
    """The learner ended itself and would do so again: training diverged, or the model is bad."""


class Learner(Protocol):
    """A learner that takes requests."""

    async def ask(self, request: Request[R], *, timeout_s: float) -> R:
        """Send a request and return its reply.

        If this is cancelled, the next caller waits for the cancelled request's response first.

        Raises:
            LearnerRefused: the learner refused the request.
            LearnerLost: a rank died or did not respond in time.
            LearnerEnded: the learner has ended itself.
        """
        ...


class RestartableLearner(Learner, Protocol):
    """A learner that can be restarted. The caller decides when, and loads a checkpoint afterwards.

    try:
        await learner.ask(StepRequest(batch=path), timeout_s=600)
    except LearnerLost:
        await learner.restart()
        await learner.ask(LoadRequest(folder=newest), timeout_s=600)
    """

    async def wait_lost(self) -> str:
        """Wait, without a deadline, until a rank dies unexpectedly; return a description of how."""
        ...

    async def restart(self) -> None:
        """End all ranks and start new ones with the weights that the settings name.

        Requests made meanwhile wait. If the restart fails, all requests fail until one succeeds.

        Raises:
            LearnerLost, LearnerEnded: as in `start_learner`.
        """
        ...


class _RankZero:
    """A running learner, accessed through the connection to rank 0."""

    def __init__(self, stream: anyio.abc.ByteStream, processes: LearnerProcesses) -> None:
        self._stream = stream
        self._lines = BufferedByteReceiveStream(stream)
        self._processes = processes
        self._asking = anyio.Lock()
        self.about = ReadyReply(num_ranks=0, device="", num_parameters=0, num_trained=0)
        self._num_owed = 0  # outstanding responses; the last one belongs to the last request

    async def ask(self, request: Request[R], *, timeout_s: float) -> R:
        async with self._asking:  # no deadline: the request before has one
            line = await self._exchange(request.op, encode(request), timeout_s)
        return await self._read(request.op, line, request.reply_type)

    async def ready(self, timeout_s: float) -> None:
        """Wait for the learner's message that all ranks are ready. Raises LearnerError."""
        line = await self._exchange("start", b"", timeout_s)
        self.about = await self._read("start", line, ReadyReply)

    async def _exchange(self, op: str, request: bytes, timeout_s: float) -> bytes:
        """Send a line, unless it is empty, and return the line that answers it."""
        try:
            with anyio.fail_after(timeout_s):
                self._num_owed += 1
                if request:
                    # Shielded, so that never half a line is sent; the learner reads it at once.
                    with anyio.fail_after(timeout_s, shield=True):
                        await self._stream.send(request)
                while self._num_owed:
                    answer = await self._lines.receive_until(b"\n", _MAX_ANSWER_BYTES)
                    self._num_owed -= 1
                return answer
        except TimeoutError as error:
            late = f"{op}: no response within {round(timeout_s, 1):g} s"
            raise LearnerLost(f"{late}; {self._processes.where()}") from error
        except _BROKEN as error:
            raise LearnerLost(f"{op}: {await self._processes.how_it_ended()}") from error

    async def _read(self, op: str, line: bytes, kind: type[R]) -> R:
        try:
            reply = decode_reply(line, kind)
        except MessageError as error:
            raise LearnerError(
                f"{op}: the learner's reply is invalid: {error}; {self._processes.where()}"
            ) from error
        if not isinstance(reply, Failure):
            return reply
        message = f"{op}: {reply.error}"
        if not reply.fatal:
            raise LearnerRefused(message)
        if reply.on_purpose:
            raise LearnerEnded(f"{message}\nThe {self._processes.where()}")
        # Often rank 0 only knows that another rank has died; that rank's log says why.
        raise LearnerLost(f"{message}\n{await self._processes.how_it_ended(_OTHERS_S)}")


def learner_command(settings_path: Path | anyio.Path) -> tuple[str, ...]:
    """Return the command of a rank, Python first."""
    return (*_COMMAND, str(settings_path))


Spawn = Callable[[Start, Path], Awaitable[anyio.abc.Process]]
"""Starts a process with its log at a path, such that closing the process's stdin ends it."""


async def spawn_here(start: Start, log_path: Path) -> anyio.abc.Process:
    """Start a process on this machine, under a guardian. Shielded, so that none is left alone."""
    environment = {**for_our_python(), **start.environment}
    with anyio.CancelScope(shield=True):  # no deadline: a fork takes milliseconds
        process = await start_guarded(
            start.command, environment, log_path, stop_timeout_s=0, folder=start.folder
        )
    return process  # noqa: RET504


class LearnerProcesses:
    """The learner's ranks."""

    def __init__(self, spawn: Spawn = spawn_here) -> None:
        self._spawn = spawn
        self._processes: list[anyio.abc.Process] = []
        self._started: list[tuple[str, Path]] = []  # their names and logs

    async def start(self, start: Start, log_path: Path) -> None:
        """Start a process."""
        self._processes.append(await self._spawn(start, log_path))
        self._started.append((start.name, log_path))

    async def wait_dead(self) -> str:
        """Wait until a rank has ended; return a description of how, with its log.

        Other ranks end as a consequence; the one that stopped logging first is described.
        """
        async with anyio.create_task_group() as tasks:

            async def wait(process: anyio.abc.Process) -> None:
                await process.wait()  # no deadline: its end sets one for the others
                scope = tasks.cancel_scope
                scope.deadline = min(scope.deadline, anyio.current_time() + _OTHERS_S)

            for process in self._processes:
                tasks.start_soon(wait, process)
        return self._describe_end()

    async def while_alive(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` while all ranks live, and return its result.

        Raises:
            LearnerLost: a rank died first.
            Exception: an error of `work`, which still has a moment to fail after a rank has died.
        """
        results: list[T] = []
        died: list[str] = []
        async with task_group() as tasks:

            async def die() -> None:
                # Do not raise: the request to the dead rank fails, too, with a better error.
                died.append(await self.wait_dead())
                tasks.cancel_scope.deadline = anyio.current_time() + _LAST_WORDS_S

            async def do() -> None:
                results.append(await work())
                tasks.cancel_scope.cancel()

            tasks.start_soon(die)
            tasks.start_soon(do)
        if results:
            return results[0]
        raise LearnerLost(died[0])

    async def how_it_ended(self, within_s: float = 10.0) -> str:
        """Like `wait_dead`, after a connection broke, but for at most `within_s` seconds."""
        with anyio.move_on_after(within_s):
            return await self.wait_dead()
        return self._describe_end()

    def where(self) -> str:
        """Return a phrase that names the folder of the logs."""
        return f"logs in {self._started[0][1].parent}"

    async def stop(self) -> None:
        """End all processes: closing a guardian's stdin ends its process. Shielded from
        cancellation."""
        with anyio.move_on_after(20, shield=True):
            for process in self._processes:
                if process.stdin is not None:
                    await process.stdin.aclose()
            for process in self._processes:
                await process.wait()
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            with anyio.move_on_after(5, shield=True):
                await process.aclose()

    def _describe_end(self) -> str:
        """Describe the rank that ended first, which has the oldest log.

        If none has ended, describe rank 0.
        """
        ended = [i for i, process in enumerate(self._processes) if process.returncode is not None]
        index = min(ended or [0], key=lambda index: _last_written(self._started[index][1]))
        status, (name, log_path) = self._processes[index].returncode, self._started[index]
        try:
            tail = _end_of(log_path).decode("utf-8", "replace").splitlines()[-_NUM_TAIL_LINES:]
        except OSError as error:
            tail = [f"(its log cannot be read: {error})"]
        lines = "\n".join(f"  {line[:300]}" for line in tail)
        description = (
            f"{name} ended with exit status {status}." if ended else f"{name} is still running."
        )
        return f"{description} The {self.where()}; the end of {log_path.name}:\n{lines}"


@asynccontextmanager
async def start_learner(
    settings: LearnerSettings,
    ranks_settings: RanksSettings,
    *,
    log_dir: Path,
    on_progress: Callable[[str], None],
    spawn: Spawn = spawn_here,
) -> AsyncIterator[tuple[_RankZero, LearnerProcesses]]:
    """Start a learner; yield it when all ranks are ready.

    Args:
        log_dir: folder for logs and for the settings, which all nodes read from there.
        spawn: starts a rank; rank 0 needs to reach a unix socket on this machine.

    Raises:
        LearnerLost: a rank died, or the learner was not ready in time.
        LearnerEnded: the learner cannot start; the message says why.
        SettingsError: there are several nodes, but nothing that starts ranks on them.
        RunFolderError: `log_dir` cannot be written.
    """
    if spawn is spawn_here:
        ranks_settings.require_one_machine()
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="agentloop-learner-", dir=_short_folder())
        )
        path = Path(folder) / "socket"
        listener = await anyio.create_unix_listener(path)
        stack.push_async_callback(listener.aclose)
        settings_path = anyio.Path(log_dir) / "learner.json"
        with writing(log_dir):
            await settings_path.parent.mkdir(parents=True, exist_ok=True)
            await settings_path.write_text(settings.model_dump_json(), "utf-8")
        command = learner_command(settings_path)
        ranks = LearnerProcesses(spawn)
        stack.push_async_callback(ranks.stop)
        for start in starts(ranks_settings, command, socket_path=path, port=free_port()):
            await ranks.start(start, log_dir / f"learner-{start.name.removeprefix('rank ')}.log")
        num_ranks = ranks_settings.nproc_per_node * ranks_settings.nodes
        on_progress(f"Starting the learner with {count_of(num_ranks, 'rank')}; logs in {log_dir}")
        learner = await ranks.while_alive(
            partial(_ready, listener, ranks, ranks_settings.start_timeout_s, stack)
        )
        on_progress("The learner is ready")
        yield learner, ranks


class KeptLearner:
    """A learner on this machine or a cluster (`RestartableLearner`).

    Attributes:
        num_starts: number of starts, including the first.
    """

    def __init__(
        self,
        settings: LearnerSettings,
        ranks_settings: RanksSettings,
        *,
        log_dir: Path,
        on_progress: Callable[[str], None],
        spawn: Spawn = spawn_here,
    ) -> None:
        """Take the arguments of `start_learner`."""
        self._start = partial(
            start_learner,
            settings,
            ranks_settings,
            log_dir=log_dir,
            on_progress=on_progress,
            spawn=spawn,
        )
        self._log_dir = log_dir
        self._life = AsyncExitStack()
        self._restarting, self._up = anyio.Lock(), anyio.Event()
        self.num_starts = 0

    async def __aenter__(self) -> Self:
        """Start the learner. Raises the errors of `start_learner`."""
        await self._begin()
        self._up.set()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[Self]:
        """Start the learner while the block already runs; requests wait until it is ready.

        If it cannot start, the block is cancelled, and the errors of `start_learner` are raised.
        """
        try:
            async with task_group(only_first=True) as tasks:
                tasks.start_soon(self.__aenter__)
                yield self
                tasks.cancel_scope.cancel()  # it may not be needed any more
        finally:
            await self.close()

    async def close(self) -> None:
        """End all ranks, if they run."""
        await self._life.aclose()

    async def ask(self, request: Request[R], *, timeout_s: float) -> R:
        """Implement `Learner`. Wait for a restart in progress; fail as soon as any rank dies."""
        started_s = anyio.current_time()
        with anyio.move_on_after(timeout_s):
            while not self._up.is_set():
                await self._up.wait()
        left_s = timeout_s - (anyio.current_time() - started_s)
        if not self._up.is_set():
            late = f"the learner was not restarted within {timeout_s:g} s"
            raise LearnerLost(f"{request.op}: {late}")
        learner = self._learner
        return await self._processes.while_alive(lambda: learner.ask(request, timeout_s=left_s))

    async def about(self) -> ReadyReply:
        """Wait until the learner is ready; return what it said of itself."""
        await self._up.wait()  # no deadline: a start has one, and fails the block of `starting`
        return self._learner.about

    async def wait_lost(self) -> str:
        """Implement `RestartableLearner`."""
        while True:
            await self._up.wait()  # no deadline: a learner may live for weeks
            life = self._processes
            description = await life.wait_dead()
            if self._up.is_set() and life is self._processes:
                return description

    async def restart(self) -> None:
        """Implement `RestartableLearner`."""
        async with self._restarting:
            self._up = anyio.Event()
            try:
                await self._life.aclose()
                await self._begin()
            finally:
                self._up.set()

    async def _begin(self) -> None:
        if self.num_starts:
            await anyio.to_thread.run_sync(_keep_logs, self._log_dir)
        self.num_starts += 1
        life = AsyncExitStack()
        self._learner, self._processes = await life.enter_async_context(self._start())
        self._life = life


def _keep_logs(folder: Path) -> None:
    """Keep the logs of the processes before, which show why they ended, as *.previous."""
    for log in folder.glob("learner-*.log"):
        with suppress(OSError):  # not worth failing the start
            log.replace(log.with_name(f"{log.name}.previous"))


async def _ready(
    listener: anyio.abc.SocketListener,
    ranks: LearnerProcesses,
    timeout_s: float,
    stack: AsyncExitStack,
) -> _RankZero:
    """Accept rank 0's connection and wait until all ranks are ready. Raises LearnerError."""
    started_s = anyio.current_time()
    with anyio.move_on_after(timeout_s):
        stream = await listener.accept()
        stack.push_async_callback(stream.aclose)
        learner = _RankZero(stream, ranks)
        await learner.ready(timeout_s - (anyio.current_time() - started_s))
        return learner
    late = f"the learner was not ready after {timeout_s:g} s (ranks.start_timeout_s)"
    raise LearnerLost(f"{late}; {ranks.where()}")


def _end_of(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _MAX_TAIL_BYTES))
        return file.read(_MAX_TAIL_BYTES)


def _last_written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _short_folder() -> str | None:
    """Return the parent folder for a socket: /tmp if the default (None) has too long a path."""
    usual = os.fsencode(tempfile.gettempdir())
    return None if len(usual) <= _MAX_FOLDER_BYTES else "/tmp"
