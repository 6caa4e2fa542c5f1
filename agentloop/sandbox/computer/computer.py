"""A computer for a task: a root file system of its own, shells that keep their state, files.

    async with pool.computer("python:3.13-slim") as box:
        await box.write("/app/test.py", b"print(6 * 7)")
        result = await box.run("cd /app && python test.py")
        result.status, result.stdout  # CallStatus.OK, '42\\n'
        (await box.run("pwd")).stdout  # '/app\\n'

A command that fails is a result, never an exception. ComputerLost is raised where the computer is
gone, and not by what ran in it.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from typing import IO, Unpack
from urllib.parse import urlsplit

import aiodocker
import aiohttp
import anyio
import orjson
from anyio.abc import SocketAttribute, SocketListener, SocketStream

from agentloop.sandbox.computer.changes import ADDED
from agentloop.sandbox.computer.channel import FileRequest
from agentloop.sandbox.computer.command import Command, CommandResult
from agentloop.sandbox.computer.guest import CHUNK_BYTES
from agentloop.sandbox.computer.guest_files import GuestFrame
from agentloop.sandbox.computer.machine import ComputerMachine, ComputerSpec
from agentloop.sandbox.computer.place import ComputerPlace
from agentloop.sandbox.computer.proxy import PathProxy, relay, serving
from agentloop.sandbox.computer.tars import pack_folder, unpack_folder
from agentloop.sandbox.engine import what_it_said
from agentloop.sandbox.errors import ComputerLost, SandboxUnavailable
from agentloop.sandbox.settings import MAX_CODE_BYTES

KEPT_BYTES = 32 << 10
MAX_OUTPUT_BYTES = 16 << 20
MAX_FILE_BYTES = 64 << 20
MAX_FOLDER_BYTES = 1 << 30
# Ways to end a command, and how long each may take: an interrupt, its processes' end, its shell's.
# An interrupt is repeated, since a shell that is just starting a program may miss it.
STAGES = (
    *(("interrupt", 0.1), ("interrupt", 0.2), ("interrupt", 0.4)),
    *(("kill", 0.4), ("kill", 0.4), ("end", 20.0)),
)
ENGINE_TIMEOUT_S = 60.0
# The engine's own, in every container.
NOT_CHANGED = (
    *("/run/agentloop", "/dev", "/proc", "/sys", "/.dockerenv"),
    *("/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/mtab"),
)

KeepChange = Callable[[str, bool], bool]

_shell_ids = itertools.count(1)


class ComputerShell:
    """A shell of a computer. Its directory, variables and functions last from command to command.

    It is bash, or sh where there is none. It has no terminal, and commands have no input. One
    command runs at a time; a further one waits.
    """

    def __init__(self, box: Computer, user: str, workdir: str, env: Mapping[str, str]) -> None:
        self._box = box
        self._start: GuestFrame = {"user": user, "cwd": workdir, "env": dict(env)}
        self._id = next(_shell_ids)
        self._lock = anyio.Lock()

    async def run(
        self,
        command: str,
        *,
        timeout_s: float = 60.0,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
        on_output: Callable[[int, bytes], None] | None = None,
    ) -> CommandResult:
        """Run a command and return how it ended.

        At the end of its time it is interrupted, like by Ctrl-C, then its processes are killed,
        and only if that doesn't end it the shell as well. Background processes live on. Cancelling
        the caller ends the shell.

        Args:
            max_output_bytes: limit of stdout and stderr together, at which it is ended.
            on_output: called with 1 or 2, for stdout or stderr, and the next bytes of it.

        Raises:
            ComputerLost: the computer is gone.
            ValueError: the command is too long, or has a NUL.
        """
        text = command.encode("utf-8", "surrogateescape")
        if len(text) > MAX_CODE_BYTES or b"\0" in text:
            raise ValueError(f"command: at most {MAX_CODE_BYTES} bytes, none of them a NUL")
        async with self._lock:  # no deadline: each command has one
            channel = self._box._machine.channel
            run = Command(channel, timeout_s, max_output_bytes, KEPT_BYTES, on_output)
            stop: list[tuple[GuestFrame, float]] = [
                ({"op": "signal", "stage": stage, "shell": self._id}, time_s)
                for stage, time_s in STAGES
            ]
            is_ended = True  # unless it returns
            try:
                begin: GuestFrame = {"op": "run", "shell": self._id, **self._start}
                result = await run.until_ended(begin, text, stop)
                is_ended = result.shell_ended
                return result
            finally:
                if is_ended:
                    self._id = next(_shell_ids)


@dataclass(frozen=True)
class Snapshot:
    """The differences of a computer's files from its image, as a file of this machine.

    It lasts as long as the pool, or until it is removed.
    """

    spec: ComputerSpec
    path: Path

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


class Computer:
    """A computer. `Pool.computer` opens one.

    Attributes:
        user, workdir, env: of its shells, and for paths that are not absolute.
    """

    def __init__(
        self,
        place: ComputerPlace,
        machine: ComputerMachine,
        user: str | None,
        workdir: str | None,
        env: Mapping[str, str],
    ) -> None:
        config = machine.config
        self.user = user or config.get("User") or "root"
        self.workdir = workdir or config.get("WorkingDir") or "/"
        self.env = dict(env)
        self._place, self._machine = place, machine
        self._shell = self.shell()

    @property
    def container_name(self) -> str:
        """The engine's name of the container."""
        return self._machine.name

    # -- commands -----------------------------------------------------------------------------

    async def run(
        self,
        command: str,
        *,
        timeout_s: float = 60.0,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
        on_output: Callable[[int, bytes], None] | None = None,
    ) -> CommandResult:
        """Run a command in the computer's first shell (see ComputerShell.run)."""
        return await self._shell.run(
            command, timeout_s=timeout_s, max_output_bytes=max_output_bytes, on_output=on_output
        )

    def shell(
        self,
        *,
        user: str | None = None,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ComputerShell:
        """Return a further shell, which starts with its first command."""
        merged = {**self.env, **checked_env(env or {})}
        return ComputerShell(self, user or self.user, workdir or self.workdir, merged)

    async def execute(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
        kept_bytes: int | None = None,
        user: str | None = None,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a program with its arguments, without a shell, and return how it ended.

        At a limit it is killed with the processes that it has started. The exit status is 127 if
        there is no such program or directory, 126 if it cannot be run.

        Args:
            max_output_bytes: limit of stdout and stderr together, at which it is killed.
            kept_bytes: the first and the last of each that are kept; None: all.
            user, workdir: by default the computer's.
            env: variables beside the computer's.

        Raises:
            ComputerLost: the computer is gone.
            ValueError: the command is no list of a program and its arguments, or `env` none of
                variables.
        """
        variables = {**self.env, **checked_env(env or {})}
        if not command or isinstance(command, str) or any("\0" in text for text in command):
            raise ValueError(
                f"command: {command!r:.100} is no list of a program and its arguments, without NULs"
            )
        begin: GuestFrame = {"op": "file", "kind": "execute", "user": user or self.user}
        begin |= {"argv": list(command), "cwd": self._absolute(workdir or ""), "env": variables}
        limits = timeout_s, max_output_bytes, kept_bytes or max_output_bytes
        run = Command(self._machine.channel, *limits, stdin=stdin)
        return await run.until_ended(begin, b"", [({"op": "kill"}, ENGINE_TIMEOUT_S)])

    async def kill_processes(self) -> None:
        """Kill all processes, background ones and shells included; the files stay."""
        channel = self._machine.channel
        request = channel.open(lambda stream, data: None)
        try:
            channel.send({"op": "kill_all", "id": request.id})
            with anyio.move_on_after(ENGINE_TIMEOUT_S):
                await channel.until_done(request)
            if request.done is None:
                channel.lose("its processes did not end", by_program=True)
                channel.check()
        finally:
            channel.close(request)
        self._shell = self.shell()

    # -- files --------------------------------------------------------------------------------

    async def read(
        self, path: str, *, max_bytes: int = MAX_FILE_BYTES, user: str | None = None
    ) -> bytes:
        """Return the bytes of a file.

        Raises:
            OSError: there is none, it is no regular file, it is longer, or the user may not.
            ComputerLost: the computer is gone.
        """
        data = bytearray()
        async with self._file(user, kind="read", path=path, max_bytes=max_bytes) as file:
            file.end_data()
            async for chunk in file.chunks():  # no deadline: each chunk has one
                data += chunk
        return bytes(data)

    async def write(
        self, path: str, data: bytes, *, mode: int | None = None, user: str | None = None
    ) -> None:
        """Write a file, and make its directories. Raises OSError, ComputerLost."""
        async with self._file(user, kind="write", path=path, mode=mode) as file:
            await file.feed(data)
            await file.finish()

    async def remove(self, *paths: str, user: str | None = None) -> None:
        """Remove files, and directories with what is in them; links are not followed."""
        absolute = [self._absolute(path) for path in paths]
        async with self._file(user, kind="remove", paths=absolute) as file:
            await file.finish()

    async def put(
        self,
        source: Path | IO[bytes],
        path: str,
        *,
        max_bytes: int = MAX_FOLDER_BYTES,
        user: str | None = None,
    ) -> None:
        """Copy a folder's contents, or those of an open tar, into a folder of the computer.

        Links of a folder are copied as links; owners are not kept.

        Raises:
            ValueError: it is larger than `max_bytes`.
            OSError, ComputerLost: it could not be written.
        """
        if isinstance(source, Path):
            with TemporaryFile() as tar:
                await anyio.to_thread.run_sync(pack_folder, source, tar, max_bytes)
                await self.put(tar, path, max_bytes=max_bytes, user=user)
            return
        async with self._file(user, kind="unpack", path=path) as file:
            num_bytes = 0
            while data := await anyio.to_thread.run_sync(source.read, CHUNK_BYTES):
                num_bytes += len(data)
                if num_bytes > max_bytes:
                    raise ValueError(f"larger than max_bytes, {max_bytes}")
                await file.feed(data)
            await file.finish()

    async def get(
        self,
        path: str,
        target: Path,
        *,
        max_bytes: int = MAX_FOLDER_BYTES,
        user: str | None = None,
    ) -> None:
        """Copy the contents of a folder, or a file, into a folder of this machine.

        What would lie outside of it, as a path or as a link's target, is refused, and so are
        devices.

        Raises:
            ValueError: it is larger than `max_bytes`.
            tarfile.FilterError: something was refused; what came before it is there.
            OSError, ComputerLost: it could not be read.
        """
        with TemporaryFile() as tar:
            await self.get_tar(path, tar, max_bytes=max_bytes, user=user)
            tar.seek(0)
            await anyio.to_thread.run_sync(unpack_folder, tar, target)

    async def get_tar(
        self, path: str, target: IO[bytes], *, max_bytes: int, user: str | None = None
    ) -> None:
        """Write a tar of a folder's contents, or of a file, to an open file."""
        async with self._file(user, kind="pack", path=path) as file:
            file.end_data()
            await _copy(file, target, max_bytes)

    def _absolute(self, path: str) -> str:
        return str(PurePosixPath(self.workdir, path))

    @asynccontextmanager
    async def _file(
        self, as_user: str | None, **request: Unpack[GuestFrame]
    ) -> AsyncIterator[FileRequest]:
        if "path" in request:
            request["path"] = self._absolute(request["path"])
        file = FileRequest(self._machine.channel, as_user or self.user, request)
        try:
            yield file
        finally:
            file.close()

    # -- ports --------------------------------------------------------------------------------

    @asynccontextmanager
    async def port(self, port: int) -> AsyncIterator[str]:
        """Lead a port of this machine's loopback to one of its own; yield `127.0.0.1:NUMBER`.

        Where nothing listens, connections are closed at once. What answers is the computer's:
        follow no redirects. If the computer is lost meanwhile, the end raises ComputerLost.

        Raises:
            ValueError: it is no number of a port.
        """
        if not 0 < port < 1 << 16:
            raise ValueError(f"port: {port} is not from 1 to 65535")
        machine = self._machine
        machine.channel.check()

        async def handle(near: SocketStream) -> None:
            async with machine.connect(port) as far:
                await relay(near, far, near)

        with socket.create_server(("127.0.0.1", 0)) as outer:
            address = f"127.0.0.1:{outer.getsockname()[1]}"
            listener = await SocketListener.from_socket(outer.detach())
        try:
            async with serving(machine.tasks, listener, handle):
                yield address
        except Exception:
            machine.channel.check()  # which would say nothing about its programs
            raise
        machine.channel.check()

    @asynccontextmanager
    async def lead_to(self, url: str) -> AsyncIterator[str]:
        """Lead a port of its own loopback to a server of this machine; yield the URL inside.

        Only the paths below `url`, `http://ADDRESS:PORT/PATH`, are there, while the block lasts.

        Raises:
            ComputerLost: the computer is gone.
            ProgramUnsupported: it is on a host.
        """
        machine = self._machine
        machine.channel.check()
        try:
            listener = await machine.listen(0)
        except OSError as error:
            machine.channel.check()
            raise ComputerLost(f"no port of the computer could be opened: {error}") from error
        address = f"127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
        async with serving(machine.tasks, listener, PathProxy(url).handle):
            yield urlsplit(url)._replace(netloc=address).geturl()

    # -- snapshots ----------------------------------------------------------------------------

    @asynccontextmanager
    async def _changes(self, keep: KeepChange | None = None) -> AsyncIterator[FileRequest]:
        """Stop all processes, and read what has changed since the image."""
        channel = self._machine.channel
        channel.send({"op": "freeze"})
        try:
            async with self._file("root", kind="pack_changes") as file:
                await file.feed(await self._list_changes(keep))
                file.end_data()
                yield file
        finally:
            if not channel.lost.is_set():
                channel.send({"op": "thaw"})

    async def _list_changes(self, keep: KeepChange | None) -> bytes:
        try:
            with anyio.fail_after(ENGINE_TIMEOUT_S):
                found = await self._machine.list_changes()
        except (aiodocker.DockerError, aiohttp.ClientError, OSError, SandboxUnavailable) as error:
            self._machine.channel.check()
            raise ComputerLost(f"the engine does not tell its files: {what_it_said(error)}") from (
                error
            )
        changes = [
            (path, kind)
            for path, kind in found
            if not path.startswith(NOT_CHANGED) and (keep is None or keep(path, kind == ADDED))
        ]
        return orjson.dumps(changes)

    async def snapshot(self) -> Snapshot:
        """Save the files: processes are stopped meanwhile, and go on.

        Extended attributes, and files on volumes of the image, are not part of it.
        """
        limit = self._machine.spec.limits.disk_mib << 20
        path = self._place.folder / f"snapshot-{next(_shell_ids)}"
        try:
            with path.open("wb") as target:
                async with self._changes() as file:
                    await _copy(file, target, limit)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return Snapshot(self._machine.spec, path)

    async def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot's files. All processes end, also those of shells."""
        machine = await self._place.take(snapshot.spec)
        old, self._machine = self._machine, machine
        self._place.give_back(old)
        self._shell = self.shell()
        await self._apply(snapshot)

    async def _apply(self, snapshot: Snapshot) -> None:
        async with self._file("root", kind="apply_changes") as file:
            with snapshot.path.open("rb") as source:
                while data := source.read(CHUNK_BYTES):
                    await file.feed(data)
            await file.finish()

    @asynccontextmanager
    async def fork(self, keep: KeepChange | None = None) -> AsyncIterator[Computer]:
        """Open another computer with a copy of the files, and no processes.

        What either changes from then on, the other does not see.

        Args:
            keep: a function of a path, and of whether the image lacks it, that returns whether the
                copy has it as it is now; otherwise it has the image's.

        Raises:
            OSError: the files are larger than `disk_mib`, or the computer's programs have ended it.
            ComputerLost, SandboxUnavailable, Overloaded: one of the two failed.
        """
        spec = self._machine.spec
        machine = await self._place.take(spec)
        async with open_computer(self._place, machine, self.user, self.workdir, self.env) as box:
            async with (
                self._changes(keep) as source,
                box._file("root", kind="apply_changes") as target,
            ):
                num_bytes = 0
                async for data in source.chunks():  # no deadline: each chunk has one
                    num_bytes += len(data)
                    if num_bytes > spec.limits.disk_mib << 20:  # such as of a file with holes
                        raise OSError(27, f"its files have more than {spec.limits.disk_mib} MiB")
                    await target.feed(data)
                await target.finish()
            yield box


@asynccontextmanager
async def open_computer(
    place: ComputerPlace,
    machine: ComputerMachine,
    user: str | None,
    workdir: str | None,
    env: Mapping[str, str],
    snapshot: Snapshot | None = None,
) -> AsyncIterator[Computer]:
    """Open a computer on a machine that was taken; it is given back."""
    box = Computer(place, machine, user, workdir, env)
    try:
        if snapshot is not None:
            await box._apply(snapshot)
        yield box
    finally:
        place.give_back(box._machine)


def checked_env(env: Mapping[str, str]) -> Mapping[str, str]:
    """Return environment variables as they are. Raises ValueError if one cannot be set."""
    for name, value in env.items():
        if not name or "=" in name or not isinstance(value, str) or "\0" in name + value:
            raise ValueError(f"env: {name!r}: {value!r:.100} is no name and text without NULs")
    return env


async def _copy(file: FileRequest, target: IO[bytes], max_bytes: int) -> None:
    num_bytes = 0
    async for data in file.chunks():  # no deadline: each chunk has one
        num_bytes += len(data)
        if num_bytes > max_bytes:
            raise ValueError(f"larger than {max_bytes} bytes")
        await anyio.to_thread.run_sync(target.write, data)
