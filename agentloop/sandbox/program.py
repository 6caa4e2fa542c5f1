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
from pathlib import Path

import aiodocker
import aiohttp
import anyio
from aiodocker.containers import DockerContainer
from aiodocker.stream import Stream
from aiodocker.types import JSONObject

from agentloop.sandbox.container import (
    CREATE_TIMEOUT_S,
    INSIDE,
    SCRATCH,
    STREAM_ERRORS,
    ContainerEngine,
    ImageConfig,
    attach,
    create_container,
    mount,
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

SOCKET = f"{INSIDE}/model"
ENTRY = Path(__file__).with_name("program_entry.py")
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
        stdin: text of its standard input.
        image: an image that the engine has, with python3; "": the pool's own.
        folder: a folder of this machine that it gets, read-only, as its working directory. None:
            it works in the image's own.
        is_writable: whether it may write to the image's files, which nothing limits on disk.
        max_output_bytes: limit of stdout and stderr together, at which it is killed.
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
        exit_status: a shell's number for it; None if it was killed at a limit.
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
    stdout, stderr = (end.decode("utf-8", "replace") for end in output.ends)
    return ProgramEnd(status, None if limit else exit_status, stdout, stderr, elapsed_s)


def program_config(
    program: Program, settings: PoolSettings, image: str, image_config: ImageConfig
) -> JSONObject:
    """Return the container of a program, in the Engine's words.

    Args:
        image_config: configuration of the image: its user and working directory.
    """
    memory = settings.memory_mib << 20
    user = image_config.get("User") or ""
    mounts = [mount(program.socket, SOCKET)]
    if program.folder is not None:
        mounts.append(mount(program.folder, FOLDER))
    env = {"HOME": SCRATCH, "USER": "agent", "LOGNAME": "agent", **program.env}
    return {
        "Image": image,
        "Entrypoint": ["python3", "-I", "-S", "-c", ENTRY.read_text()],
        "Cmd": [],
        "Env": [f"{name}={value}" for name, value in env.items()],
        "User": NOBODY if user in ROOT else user,
        "WorkingDir": FOLDER if program.folder else image_config.get("WorkingDir") or SCRATCH,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "OpenStdin": True,
        "StdinOnce": True,
        "HostConfig": {
            **walls(settings, memory, BASE_PROCESSES + settings.processes_per_call),
            "ReadonlyRootfs": not program.is_writable,
            "IpcMode": "private",
            "Tmpfs": {SCRATCH: f"exec,nosuid,nodev,size={memory},mode=1777"},
            "Mounts": mounts,
        },
    }


async def run_in_container(
    engine: ContainerEngine, settings: PoolSettings, program: Program, timeout_s: float
) -> ProgramEnd:
    """Run a program, for `timeout_s` seconds at most, including the start of its container.

    Raises:
        ProgramUnsupported: the engine lacks the image, or that has no python3.
        SandboxUnavailable: the engine failed, or the container was not started in time.
    """
    began = anyio.current_time()
    image = program.image or engine.image
    output = ProgramOutput(program.max_output_bytes)
    try:
        image_config = await inspect_image(engine.docker, image)
        config = program_config(program, settings, image, image_config)
        id = f"{os.getpid()}-{_token}-{next(_numbers)}"
        async with (
            create_container(engine, config, id, "program") as container,
            attach(container) as io,
        ):
            deadline = began + timeout_s
            exit_status, limit = await _until_end(engine, container, io, program, output, deadline)
    except (*STREAM_ERRORS, TimeoutError) as error:
        message = what_it_said(error) or repr(error)
        if "python3" in message and "not found" in message:
            raise ProgramUnsupported(
                f"the image {image!r} has no python3, which starts the program in it: install it "
                "there (Debian: apt install python3; Alpine: apk add python3)"
            ) from error
        raise SandboxUnavailable(f"the engine failed on a program: {message}") from error
    return program_end(exit_status, limit, output, anyio.current_time() - began)


async def inspect_image(docker: aiodocker.Docker, image: str) -> ImageConfig:
    """Return the configuration of an image. Raises ProgramUnsupported if the engine lacks it."""
    try:
        with anyio.fail_after(CREATE_TIMEOUT_S):
            config: ImageConfig | None = (await docker.images.inspect(image))["Config"]
            return config or {}
    except aiodocker.DockerError as error:
        if error.status != 404:
            raise
        raise ProgramUnsupported(
            f"the engine has no image {image!r}: build or pull it first"
        ) from error


async def _until_end(
    engine: ContainerEngine,
    container: DockerContainer,
    io: Stream,
    program: Program,
    output: ProgramOutput,
    deadline: float,
) -> tuple[int | None, CallStatus | None]:
    """Run a program; return its exit status, or the limit at which it is to be killed."""
    exit_status: int | None = None
    limit: CallStatus | None = None
    failure: Exception | None = None
    ended = anyio.Event()

    async def see_exit() -> None:
        nonlocal exit_status, failure
        try:
            # no deadline: the caller ends this
            exit_status = (await container.wait(condition="next-exit"))["StatusCode"]
        except (aiodocker.DockerError, aiohttp.ClientError, OSError) as error:
            failure = error
        ended.set()

    async with anyio.create_task_group() as group:
        # Before the container has its job, since the engine forgets one that has ended.
        group.start_soon(see_exit)
        try:
            with anyio.CancelScope(deadline=deadline) as start:
                async with engine.starting:
                    await container.start()
            if start.cancelled_caught:
                raise SandboxUnavailable("its container was not started in time")
            with anyio.CancelScope(deadline=deadline) as run:
                limit = await _exchange(io, program, output)
            if run.cancelled_caught:
                limit = CallStatus.TIMEOUT
            elif limit is None:
                with anyio.fail_after(EXIT_TIMEOUT_S):
                    await ended.wait()
        except (*STREAM_ERRORS, SandboxUnavailable, TimeoutError) as error:
            failure = error  # out of the task group it would come wrapped
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return exit_status, limit


async def _exchange(io: Stream, program: Program, output: ProgramOutput) -> CallStatus | None:
    """Send the first process its job, and read the output until its end or OUTPUT_LIMIT."""
    job = {"command": program.command, "stdin": program.stdin, "port": PORT, "socket": SOCKET}
    # no deadline: the caller has one
    await io.write_in(json.dumps(job).encode() + b"\n")
    while (message := await io.read_out()) is not None:  # no deadline: likewise
        output.add(message.stream, message.data)
        if output.is_too_long:
            return CallStatus.OUTPUT_LIMIT
    return None
