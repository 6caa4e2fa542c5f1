"""Programs in computers of their own, which reach one socket of ours and nothing else.

A computer (computer/machine.py) has a first process of ours, whatever the image is. For a program,
which is somebody's agent and not a task, it has these walls beside its own:

    user            that of the image, or nobody if it is root; without any capability
    file system     read-only but for /tmp, unless the caller lets it write to the image's files
    network         loopback, where 127.0.0.1:PORT leads to the socket
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiodocker
import aiohttp
import anyio
from anyio.abc import SocketStream

from agentloop.sandbox.computer import Computer, ComputerLimits
from agentloop.sandbox.computer.fleet import Fleet
from agentloop.sandbox.computer.machine import FOLDER, ProgramSpec
from agentloop.sandbox.computer.proxy import relay, serving
from agentloop.sandbox.container import SCRATCH, inspect_image
from agentloop.sandbox.engine import what_it_said
from agentloop.sandbox.errors import ComputerLost, ProgramUnsupported, SandboxUnavailable
from agentloop.sandbox.results import CallStatus
from agentloop.sandbox.settings import PoolSettings

PORT = 8377
"""On loopback inside of the container, where nothing but the program may take it."""

NOBODY = "65534:65534"
ROOT = {"", "0", "root", "0:0", "root:root", "0:root", "root:0"}
BASE_PROCESSES = 64
KEPT_BYTES = 64 * 1024
MAX_CONNECTIONS = 1024


@dataclass(frozen=True)
class Program:
    """A command to run in a container of its own.

    Attributes:
        socket: a unix socket that the program reaches at http://127.0.0.1:PORT.
        stdin: text of its standard input.
        image: an image that the engine has; "": the pool's own.
        folder: a folder of this machine that it gets, read-only, as its working directory. None:
            it works in the image's own.
        is_writable: whether it may write to the image's files.
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
        status: OK, ERROR (another exit status than 0), KILLED (by a signal that was not ours), OOM,
            TIMEOUT or OUTPUT_LIMIT.
        exit_status: a shell's number for it; None if it was killed at a limit.
        stdout, stderr: the last 64 KiB of each.
    """

    status: CallStatus
    exit_status: int | None
    stdout: str
    stderr: str
    elapsed_s: float


async def run_in_computer(
    fleet: Fleet, settings: PoolSettings, program: Program, timeout_s: float
) -> ProgramEnd:
    """Run a program, for `timeout_s` seconds at most, including the start of its container.

    Raises:
        ProgramUnsupported: the engine lacks the image, or a runtime that lends us sockets.
        SandboxUnavailable: the engine failed, or the container was not started in time.
    """
    began = anyio.current_time()
    limits = ComputerLimits(settings.memory_mib, BASE_PROCESSES + settings.processes_per_call)
    image = program.image or fleet.engine.image
    spec = ProgramSpec(image, "none", limits, program.folder, not program.is_writable)
    try:
        config = await inspect_image(fleet.engine.docker, image)
        user = config.get("User", "")
        folder = FOLDER if program.folder else config.get("WorkingDir") or SCRATCH
        env = {"HOME": SCRATCH, "USER": "agent", "LOGNAME": "agent", **program.env}
        async with fleet.alone(spec, timeout_s) as machine:
            box = Computer(fleet, machine, NOBODY if user in ROOT else user, folder, env)
            lead = partial(_lead_to, program.socket)
            try:
                listener = await machine.listen(PORT)
            except OSError as error:
                machine.channel.check()
                raise ProgramUnsupported(f"its runtime lends us no socket: {error}") from error
            async with serving(machine.tasks, listener, lead, MAX_CONNECTIONS):
                result = await box.execute(
                    program.command,
                    stdin=program.stdin.encode("utf-8", "surrogatepass"),
                    timeout_s=began + timeout_s - anyio.current_time(),
                    max_output_bytes=program.max_output_bytes,
                    kept_bytes=KEPT_BYTES,
                )
    except (aiodocker.DockerError, aiohttp.ClientError, OSError, ComputerLost) as error:
        reason = what_it_said(error) or repr(error)
        raise SandboxUnavailable(f"the engine failed on a program: {reason}") from error
    ends = result.stdout[-KEPT_BYTES:], result.stderr[-KEPT_BYTES:]
    return ProgramEnd(result.status, result.exit_status, *ends, anyio.current_time() - began)


async def _lead_to(socket: Path, near: SocketStream) -> None:
    async with await anyio.connect_unix(socket) as far:
        await relay(near, far, near, idle_s=math.inf)
