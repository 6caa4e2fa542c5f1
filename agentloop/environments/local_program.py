"""A program as a local process, which nothing confines: for machines without a Docker Engine."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterable
from contextlib import suppress

import anyio
import anyio.abc

from agentloop.aio import task_group
from agentloop.inference.processes.supervise import stdio_guarded
from agentloop.sandbox import CallStatus, Program, ProgramEnd
from agentloop.sandbox.program import KEPT_BYTES

__all__ = ["run_locally"]

_PATH = "/usr/local/bin:/usr/bin:/bin"
_STOP_TIMEOUT_S = 15.0
_NOT_FOUND = 127


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


async def run_locally(program: Program, timeout_s: float) -> ProgramEnd:
    """Run a program here, with this user's rights; `image` and `socket` have no meaning here.

    It is killed with all that it has started, also when we are. Its environment is HOME and PATH,
    and `program.env`; `python` and `python3` are the interpreter that runs agentloop.
    """
    began = anyio.current_time()
    output = ProgramOutput(program.max_output_bytes)
    name, *arguments = program.command
    if name in ("python", "python3"):
        name = sys.executable
    with tempfile.TemporaryDirectory(prefix="agentloop-program-") as home:
        env = {"HOME": home, "PATH": _PATH, **program.env}
        if shutil.which(name, path=env["PATH"]) is None:
            output.add(2, f"agentloop: {name}: there is no such program".encode())
            return program_end(_NOT_FOUND, None, output, 0.0)
        process = await anyio.open_process(
            stdio_guarded((name, *arguments)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=program.folder or home,
            env=env,
        )
        try:
            limit = await _until_end(process, program.stdin, output, began + timeout_s)
        finally:
            with anyio.move_on_after(_STOP_TIMEOUT_S, shield=True):
                with suppress(ProcessLookupError):
                    process.terminate()  # the guardian, which kills the program
                await process.wait()
            with anyio.CancelScope(shield=True):  # no deadline: it does not wait any more
                await process.aclose()
    return program_end(process.returncode, limit, output, anyio.current_time() - began)


async def _until_end(
    process: anyio.abc.Process, stdin: str, output: ProgramOutput, deadline: float
) -> CallStatus | None:
    """Return the limit at which the program is to be killed, or None when it has ended."""
    limit: CallStatus | None = None
    pipe, stdout, stderr = process.stdin, process.stdout, process.stderr
    assert pipe is not None
    assert stdout is not None
    assert stderr is not None

    async def write() -> None:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            # no deadline: the program has one, and then this ends
            await pipe.send(stdin.encode("utf-8", "surrogatepass"))
        await pipe.aclose()

    async def read(number: int, stream: AsyncIterable[bytes]) -> None:
        nonlocal limit
        async for data in stream:  # no deadline: likewise
            output.add(number, data)
            if output.is_too_long:
                limit = CallStatus.OUTPUT_LIMIT
                tasks.cancel_scope.cancel()

    with anyio.move_on_after(deadline - anyio.current_time()) as running:
        async with task_group() as tasks:
            tasks.start_soon(write)
            tasks.start_soon(read, 1, stdout)
            tasks.start_soon(read, 2, stderr)
            await process.wait()
    return CallStatus.TIMEOUT if running.cancelled_caught else limit
