"""The learner, as the runtime sees it: processes that are started, asked and stopped.

    started ──> guardians: of each rank, or of a launcher ──> python -m learner (DeepSpeed)
      │  one request at a time, JSON lines over a unix socket to rank 0, which tells the others;
      │  batches and weights go by files
      └─ a rank that dies, or an answer that is late, is LearnerLost; on the way out, all end

    KeptLearner ──> the same, and `restart`: new processes, which then load a checkpoint

    LearnerError
     ├─ LearnerRefused  it said no, and goes on
     ├─ LearnerLost     its processes are gone or do not answer: others may do better
     └─ LearnerEnded    on purpose, such as for want of finite gradients: others would, too

Torch is nowhere here: the learner has it to itself.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import anyio
import anyio.abc
import anyio.to_thread
import orjson
from anyio.streams.buffered import BufferedByteReceiveStream

from agentloop.errors import AgentLoopError, sole
from agentloop.inference.supervise import guarded
from agentloop.training.launch import RanksSettings, Start, free_port, on_other_nodes, starts

__all__ = [
    "KeptLearner",
    "Learner",
    "LearnerEnded",
    "LearnerError",
    "LearnerLost",
    "LearnerProcesses",
    "LearnerRefused",
    "RanksSettings",
    "started",
]

_COMMAND = (sys.executable, "-P", "-m", "learner")  # not a learner.py of who calls us
_MAX_ANSWER_BYTES = 1 << 24  # checksums of all tensors
_MAX_TAIL_BYTES = 1 << 16
_NUM_TAIL_LINES = 80  # of a launcher's ranks all are in one log, and its own last words
_GOODBYE_S = 20.0
_MAX_FOLDER_BYTES = 64  # of 103 that a socket's path may have; the rest is the name
_LAST_WORDS_S = 1.0  # for what a rank that died has said before, such as that it was on purpose
_OTHERS_S = 5.0  # for the end of the rank that was first to fail, which may be seen after others'

_BROKEN = (
    anyio.EndOfStream,
    anyio.IncompleteRead,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
)

T = TypeVar("T")


class LearnerError(AgentLoopError):
    """The learner failed; the message says at what, and ends with its log's tail where it died."""


class LearnerRefused(LearnerError):
    """It said no, and goes on."""


class LearnerLost(LearnerError):
    """A rank died, or there was no answer in time. What was not saved is gone."""


class LearnerEnded(LearnerError):
    """It ended itself, and would again: training broke, or its model cannot be used."""


class Learner(Protocol):
    """What can be asked."""

    async def ask(self, op: str, *, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """One request and its answer. It may be cancelled: whoever asks next waits for both.

        Raises:
            LearnerRefused, LearnerLost, LearnerEnded.
        """
        ...


class _RankZero:
    """A learner that runs, over its connection."""

    def __init__(self, stream: anyio.abc.ByteStream, processes: LearnerProcesses) -> None:
        self._stream = stream
        self._lines = BufferedByteReceiveStream(stream)
        self._processes = processes
        self._asking = anyio.Lock()
        self._num_owed = 0  # answers, of which the last one is to what was asked last

    async def ask(self, op: str, *, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        async with self._asking:  # no deadline: who asked before has one
            return await self._answer(op, {"op": op, **arguments}, timeout_s)

    async def ready(self, timeout_s: float) -> dict[str, Any]:
        """Wait until it says by itself that all ranks are there. Raises LearnerError."""
        return await self._answer("start", None, timeout_s)

    async def _answer(
        self, op: str, request: Mapping[str, Any] | None, timeout_s: float
    ) -> dict[str, Any]:
        try:
            with anyio.fail_after(timeout_s):
                self._num_owed += 1
                if request is not None:
                    # A line, whole or not at all; the learner reads it at once.
                    with anyio.fail_after(timeout_s, shield=True):
                        await self._stream.send(orjson.dumps(request) + b"\n")
                while self._num_owed:
                    answer = await self._lines.receive_until(b"\n", _MAX_ANSWER_BYTES)
                    self._num_owed -= 1
        except TimeoutError as error:
            late = f"{op}: no answer within {round(timeout_s, 1):g} s"
            raise LearnerLost(f"{late}; {self._processes.where()}") from error
        except _BROKEN as error:
            raise LearnerLost(f"{op}: {await self._processes.how_it_ended()}") from error
        result: dict[str, Any] = orjson.loads(answer)
        if not result.pop("ok"):
            said = f"{op}: {result.get('error')}"
            if not result.get("fatal", True):
                raise LearnerRefused(said)
            if result.get("on_purpose"):
                raise LearnerEnded(f"{said}\nThe {self._processes.where()}")
            # Often no more than that another rank is gone: that one's log says why.
            raise LearnerLost(f"{said}\n{await self._processes.how_it_ended(_OTHERS_S)}")
        return result


class LearnerProcesses:
    """Its ranks on this machine, or the launcher that has them."""

    def __init__(self) -> None:
        self._processes: list[anyio.abc.Process] = []
        self._names: list[str] = []
        self._log_paths: list[Path] = []

    async def start(self, start: Start, log_path: Path) -> None:
        """Under a guardian. Cancellation does not interrupt it: a process would be lost."""
        with anyio.CancelScope(shield=True):  # no deadline: a fork takes milliseconds
            environment = {**os.environ, **start.environment}
            process = await guarded(start.command, environment, log_path, stop_timeout_s=0)
        self._processes.append(process)
        self._names.append(start.name)
        self._log_paths.append(log_path)

    async def wait_dead(self) -> str:
        """Wait until a rank has ended; says which, and how. Where others follow, for they cannot
        go on without it, it is the one that was the first to be silent."""
        async with anyio.create_task_group() as tasks:

            async def wait(process: anyio.abc.Process) -> None:
                await process.wait()  # no deadline: as long as it lives; then the others have one
                scope = tasks.cancel_scope
                scope.deadline = min(scope.deadline, anyio.current_time() + _OTHERS_S)

            for process in self._processes:
                tasks.start_soon(wait, process)
        return self._epitaph()

    async def while_alive(self, work: Callable[[], Awaitable[T]]) -> T:
        """What `work` returns.

        Raises:
            LearnerLost: a rank died before.
            Exception: what `work` raised, which it may do until shortly after that.
        """
        found: list[T] = []
        died: list[str] = []
        try:
            async with anyio.create_task_group() as tasks:

                async def die() -> None:
                    # Not by an error: whoever asks the rank has one, too, and one is enough.
                    died.append(await self.wait_dead())
                    tasks.cancel_scope.deadline = anyio.current_time() + _LAST_WORDS_S

                async def do() -> None:
                    found.append(await work())
                    tasks.cancel_scope.cancel()

                tasks.start_soon(die)
                tasks.start_soon(do)
        except BaseExceptionGroup as group:
            raise sole(group) from None
        if found:
            return found[0]
        raise LearnerLost(died[0])

    async def how_it_ended(self, within_s: float = 10.0) -> str:
        """As `wait_dead`, for when a connection broke; bounded."""
        with anyio.move_on_after(within_s):
            return await self.wait_dead()
        return self._epitaph()

    def where(self) -> str:
        """The folder of the logs, in words."""
        return f"logs in {self._log_paths[0].parent}"

    async def stop(self, grace_s: float = 0.0) -> None:
        """Close each guardian's stdin, which ends what it has; before that, they may end by
        themselves for `grace_s`. Cancellation does not interrupt it."""
        with anyio.move_on_after(grace_s, shield=True):
            for process in self._processes:
                await process.wait()
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

    def _epitaph(self) -> str:
        """Of the rank that ended first: its log is the oldest. Where none has, rank 0's log, or
        the launcher's, which takes its time to end."""
        ended = [i for i, process in enumerate(self._processes) if process.returncode is not None]
        index = min(ended or [0], key=lambda index: _last_written(self._log_paths[index]))
        status, log_path = self._processes[index].returncode, self._log_paths[index]
        try:
            tail = _end_of(log_path).decode("utf-8", "replace").splitlines()[-_NUM_TAIL_LINES:]
        except OSError as error:
            tail = [f"(its log cannot be read: {error})"]
        lines = "\n".join(f"  {line[:300]}" for line in tail)
        name = self._names[index]
        how = f"{name} ended with exit status {status}." if ended else f"{name} still runs."
        return f"{how} The {self.where()}; the end of {log_path.name}:\n{lines}"


@asynccontextmanager
async def started(
    settings: Mapping[str, Any],
    ranks_settings: RanksSettings,
    *,
    log_dir: Path,
    on_progress: Callable[[str], None],
) -> AsyncIterator[tuple[Learner, LearnerProcesses]]:
    """Start a learner; yields once rank 0 has said that all ranks are ready.

    Args:
        settings: those of `agentloop.training.learner_settings.LearnerSettings`, as plain data.
        log_dir: for logs, and for the settings, which every node reads there.

    Raises:
        LearnerLost: a rank died, or it was not ready in time.
        LearnerEnded: it says why it cannot start.
    """
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="agentloop-learner-", dir=_short_folder())
        )
        path = Path(folder) / "socket"
        listener = await anyio.create_unix_listener(path)
        stack.push_async_callback(listener.aclose)
        settings_path = anyio.Path(log_dir) / "learner.json"
        await settings_path.parent.mkdir(parents=True, exist_ok=True)
        await settings_path.write_bytes(orjson.dumps(dict(settings)))
        command = (*_COMMAND, str(settings_path))
        port = ranks_settings.port or free_port()
        ranks = LearnerProcesses()
        # Other nodes' ranks are not ours to kill: they end when rank 0 says goodbye.
        grace_s = _GOODBYE_S if ranks_settings.nodes > 1 else 0.0
        stack.push_async_callback(ranks.stop, grace_s)
        for start in starts(ranks_settings, command, socket_path=path, port=port):
            await ranks.start(start, log_dir / f"learner-{start.name.removeprefix('rank ')}.log")
        num_ranks = ranks_settings.count * ranks_settings.nodes
        on_progress(f"Starting the learner, {num_ranks} rank(s); logs in {log_dir}")
        if others := on_other_nodes(ranks_settings, command, port):
            listed = settings_path.with_name("learner-nodes.txt")
            await listed.write_text("".join(f"{other}\n" for other in others), "utf-8")
            on_progress(f"Start on each of the other nodes its line of {listed}")
        learner = await ranks.while_alive(
            partial(_ready, listener, ranks, ranks_settings.start_timeout_s, stack)
        )
        on_progress("The learner is ready")
        yield learner, ranks


class KeptLearner:
    """A learner that can be started again. It does not do so by itself: who asks knows what is to
    be loaded then, and how often is enough.

        async with KeptLearner(settings, ranks_settings, ...) as learner:
            try:
                await learner.ask("step", ...)
            except LearnerLost:
                await learner.restart()
                await learner.ask("load", ...)

    Attributes:
        num_starts: the first one included.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        ranks_settings: RanksSettings,
        *,
        log_dir: Path,
        on_progress: Callable[[str], None],
    ) -> None:
        """As `started`."""
        self._start = partial(
            started, settings, ranks_settings, log_dir=log_dir, on_progress=on_progress
        )
        self._log_dir = log_dir
        self._life = AsyncExitStack()
        self._restarting, self._up = anyio.Lock(), anyio.Event()
        self.num_starts = 0

    async def __aenter__(self) -> Self:
        """Start it for the first time. Raises as `started`."""
        await self._begin()
        self._up.set()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._life.aclose()

    async def ask(self, op: str, *, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """As `Learner`; it waits for a restart, and hears of each rank that dies meanwhile."""
        begun = anyio.current_time()
        with anyio.move_on_after(timeout_s):
            while not self._up.is_set():
                await self._up.wait()
        left_s = timeout_s - (anyio.current_time() - begun)
        if not self._up.is_set():
            raise LearnerLost(f"{op}: it did not run again within {timeout_s:g} s")
        ask = partial(self._learner.ask, op, timeout_s=left_s, **arguments)
        return await self._processes.while_alive(ask)

    async def lost(self) -> str:
        """Wait until a rank has died that was not to; says which, and how. It has no deadline: a
        learner may live for weeks."""
        while True:
            await self._up.wait()  # no deadline: a learner may live for weeks
            life = self._processes
            how = await life.wait_dead()
            if self._up.is_set() and life is self._processes:
                return how

    async def restart(self) -> None:
        """End what is left of it and start it anew, with the weights that its settings name. Who
        asks meanwhile waits. Where it fails, every request does, until a restart that does not.

        Raises:
            LearnerLost, LearnerEnded: as `started`.
        """
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
    """Those of the life before stay beside the new ones: they say why it ended."""
    for log in folder.glob("learner-*.log"):
        with suppress(OSError):  # it is in the way: start all the same
            log.replace(log.with_name(f"{log.name}.previous"))


async def _ready(
    listener: anyio.abc.SocketListener,
    ranks: LearnerProcesses,
    timeout_s: float,
    stack: AsyncExitStack,
) -> _RankZero:
    """Rank 0's connection, once it says that all of them are ready. Raises LearnerError."""
    begun = anyio.current_time()
    with anyio.move_on_after(timeout_s):
        stream = await listener.accept()
        stack.push_async_callback(stream.aclose)
        learner = _RankZero(stream, ranks)
        await learner.ready(timeout_s - (anyio.current_time() - begun))
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
    """For a socket: the usual one for temporary files (None), or /tmp where that is too long."""
    usual = os.fsencode(tempfile.gettempdir())
    return None if len(usual) <= _MAX_FOLDER_BYTES else "/tmp"
