"""Programs in containers of their own, which reach one socket of ours and nothing else.

A container gets what a worker's gets (`walls` in container.py: no network, no capability, no new
privileges, bounds on memory and processes) with these differences, since a program may be written
in any language and is not ours:

    system calls    the engine's own filter, which allows TCP on loopback
    user            that of the image, or nobody if it is root
    file system     read-only but for /tmp, unless the caller lets it write to the image's files
    its socket      mounted; its first process (program_entry.py) forwards 127.0.0.1:PORT to it

The first process reads its job from its standard input and ends with it: also after a kill -9 of
ours the engine removes the container, and what an engine could not remove is reaped by its labels.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import aiodocker
import aiohttp
import anyio
from aiodocker.containers import DockerContainer
from aiodocker.stream import Stream

from agentloop.sandbox.container import (
    CREATE_TIMEOUT_S,
    INSIDE,
    SCRATCH,
    STREAM_ERRORS,
    ContainerEngine,
    attached,
    created,
    walls,
)
from agentloop.sandbox.engine import what_it_said
from agentloop.sandbox.errors import ProgramUnsupported, SandboxUnavailable
from agentloop.sandbox.results import CallStatus
from agentloop.sandbox.settings import PoolSettings

PORT = 8377
"""On loopback inside of the container, where nothing but the program may take it."""

FOLDER = "/agent"
"""Where a program finds the folder that it is given."""

NOBODY = "65534:65534"
ROOT = {"", "0", "root", "0:0", "root:root", "0:root", "root:0"}
EXIT_TIMEOUT_S = 15.0
BASE_PROCESSES = 64
KEPT_BYTES = 64 * 1024

_token = secrets.token_hex(3)
_numbers = itertools.count()


@dataclass(frozen=True)
class Program:
    """A command to run in a container of its own.

    Attributes:
        socket: a unix socket that the program reaches at http://127.0.0.1:PORT.
        stdin: its standard input.
        image: an image that the engine has, with python3; "": the pool's own.
        folder: a folder of this machine that it gets, read-only, as its working directory. None:
            it works in the image's own.
        is_writable: whether it may write to the image's files, which nothing limits on disk.
        max_output_bytes: it is killed if it writes more to stdout and stderr together.
    """

    command: tuple[str, ...]
    socket: Path
    stdin: str = ""
    image: str = ""
    folder: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    is_writable: bool = False
    max_output_bytes: int = 16 << 20


@dataclass(frozen=True)
class ProgramEnd:
    """The end of a program.

    Attributes:
        status: OK, ERROR (another exit status than 0), KILLED (by a signal that was not ours),
            TIMEOUT or OUTPUT_LIMIT.
        exit_status: as a shell reports it; None if it was killed at a limit.
        stdout, stderr: the last 64 KiB of each.
    """

    status: CallStatus
    exit_status: int | None
    stdout: str
    stderr: str
    elapsed_s: float


class ProgramOutput:
    """The end of what a program writes, and how much that was.

    Attributes:
        ends: the last bytes of stdout and of stderr.
    """

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes
        self.ends = bytearray(), bytearray()

    @property
    def is_too_long(self) -> bool:
        return self._left < 0

    def add(self, stream: int, data: bytes) -> None:
        """Add data of a stream: 1 is stdout, 2 is stderr."""
        self._left -= len(data)
        kept = self.ends[stream - 1]
        kept += data
        del kept[:-KEPT_BYTES]


def program_end(
    exit_status: int | None, limit: CallStatus | None, output: ProgramOutput, elapsed_s: float
) -> ProgramEnd:
    """Return the end of a program that had an exit status, or was killed at a limit."""
    status = limit or CallStatus.OK
    if limit is None and exit_status:
        status = CallStatus.KILLED if exit_status > 128 else CallStatus.ERROR
    stdout, stderr = (bytes(one).decode("utf-8", "replace") for one in output.ends)
    return ProgramEnd(status, None if limit else exit_status, stdout, stderr, elapsed_s)


@cache
def _source() -> str:
    return Path(__file__).with_name("program_entry.py").read_text()


def program_config(
    program: Program, settings: PoolSettings, image: str, about: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the container of a program, in the Engine's words.

    Args:
        image: its image, and `about` the configuration of that: its user and working directory.
    """
    memory = settings.memory_mib << 20
    user = about.get("User") or ""
    mounts = [_mount(program.socket, f"{INSIDE}/model")]
    if program.folder is not None:
        mounts.append(_mount(program.folder, FOLDER))
    env = {"HOME": SCRATCH, "USER": "agent", "LOGNAME": "agent", **program.env}
    return {
        "Image": image,
        "Entrypoint": ["python3", "-I", "-S", "-c", _source()],
        "Cmd": [],
        "Env": [f"{name}={value}" for name, value in env.items()],
        "User": NOBODY if user in ROOT else user,
        "WorkingDir": FOLDER if program.folder else about.get("WorkingDir") or SCRATCH,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "OpenStdin": True,
        "StdinOnce": True,
        "HostConfig": walls(settings, memory, BASE_PROCESSES + settings.processes_per_call)
        | {
            "ReadonlyRootfs": not program.is_writable,
            "IpcMode": "private",
            "Tmpfs": {SCRATCH: f"exec,nosuid,nodev,size={memory},mode=1777"},
            "Mounts": mounts,
        },
    }


def _mount(source: Path, target: str) -> dict[str, Any]:
    return {"Type": "bind", "Source": str(source), "Target": target, "ReadOnly": True}


async def run_in_container(
    engine: ContainerEngine, settings: PoolSettings, program: Program, timeout_s: float
) -> ProgramEnd:
    """Run a program, for `timeout_s` seconds at most, including the start of its container.

    Raises:
        ProgramUnsupported: the engine lacks the image, or that has no python3.
        SandboxUnavailable: the engine failed, or the container was not started in time.
    """
    began = anyio.current_time()
    deadline = began + timeout_s
    image = program.image or engine.image
    output = ProgramOutput(program.max_output_bytes)
    try:
        config = program_config(program, settings, image, await _about(engine.docker, image))
        id = f"{os.getpid()}-{_token}-{next(_numbers)}"
        async with created(engine, config, id, "program") as container, attached(container) as io:
            run = _Run(container, io, output, deadline)
            status, limit = await run.until_end(engine.starting, _job(program))
    except (*STREAM_ERRORS, TimeoutError) as error:
        said = what_it_said(error) or repr(error)
        if "python3" in said and "not found" in said:
            raise ProgramUnsupported(
                f"the image {image!r} has no python3, which starts the program in it: install it "
                "there (Debian: apt install python3; Alpine: apk add python3)"
            ) from error
        raise SandboxUnavailable(f"the engine failed on a program: {said}") from error
    return program_end(status, limit, output, anyio.current_time() - began)


async def _about(docker: aiodocker.Docker, image: str) -> Mapping[str, Any]:
    """Return the configuration of an image. Raises ProgramUnsupported if the engine lacks it."""
    try:
        with anyio.fail_after(CREATE_TIMEOUT_S):
            return (await docker.images.inspect(image))["Config"] or {}
    except aiodocker.DockerError as error:
        if error.status != 404:
            raise
        raise ProgramUnsupported(
            f"the engine has no image {image!r}: build or pull it first"
        ) from error


def _job(program: Program) -> bytes:
    """Return what the first process reads."""
    job = {
        "command": program.command,
        "stdin": program.stdin,
        "port": PORT,
        "socket": f"{INSIDE}/model",
    }
    return json.dumps(job).encode() + b"\n"


class _Run:
    """A container, from its start until it has ended or is to be killed."""

    def __init__(
        self, container: DockerContainer, io: Stream, output: ProgramOutput, deadline: float
    ) -> None:
        self._container = container
        self._io = io
        self._output = output
        self._deadline = deadline
        self._status: int | None = None
        self._failure: Exception | None = None
        self._ended = anyio.Event()

    async def until_end(
        self, starting: anyio.CapacityLimiter, job: bytes
    ) -> tuple[int | None, CallStatus | None]:
        """Return the exit status, or the limit at which the program is to be killed."""
        found: tuple[int | None, CallStatus | None] = None, None
        async with anyio.create_task_group() as group:
            group.start_soon(self._see_exit)
            try:
                found = await self._started(starting, job)
            except (*STREAM_ERRORS, SandboxUnavailable, TimeoutError) as error:
                self._failure = error  # out of the task group it would come wrapped
            group.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure
        return found

    @property
    def _left_s(self) -> float:
        return self._deadline - anyio.current_time()

    async def _see_exit(self) -> None:
        """Learn the exit status. The question comes before the container has its job, since the
        engine forgets a container that has ended."""
        try:
            # no deadline: the caller ends this
            self._status = (await self._container.wait(condition="next-exit"))["StatusCode"]
        except (aiodocker.DockerError, aiohttp.ClientError, OSError) as error:
            self._failure = error
        self._ended.set()

    async def _started(
        self, starting: anyio.CapacityLimiter, job: bytes
    ) -> tuple[int | None, CallStatus | None]:
        with anyio.move_on_after(self._left_s) as start:
            async with starting:
                await self._container.start()
        if start.cancelled_caught:
            raise SandboxUnavailable("its container was not started in time")
        with anyio.move_on_after(self._left_s) as running:
            await self._io.write_in(job)
            while (message := await self._io.read_out()) is not None:
                self._output.add(message.stream, message.data)
                if self._output.is_too_long:
                    return None, CallStatus.OUTPUT_LIMIT
        if running.cancelled_caught:
            return None, CallStatus.TIMEOUT
        with anyio.fail_after(EXIT_TIMEOUT_S):
            await self._ended.wait()
        return self._status, None
