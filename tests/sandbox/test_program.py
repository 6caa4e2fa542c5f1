"""The container of a program, and the first process in it, which runs here without a container."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

import anyio
import anyio.abc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.sandbox import (
    CallStatus,
    Pool,
    PoolSettings,
    Program,
    ProgramUnsupported,
)
from agentloop.sandbox import program as program_module
from agentloop.sandbox.container import ImageConfig
from agentloop.sandbox.program import KEPT_BYTES, NOBODY, ProgramOutput, program_config, program_end
from tests.sandbox.conftest import BARE

pytestmark = pytest.mark.anyio

ENTRY = Path(program_module.__file__).with_name("program_entry.py").read_text()
JOB = Program(("agent", "--fast"), Path("/host/model"), env={"A": "b"})


def config(job: Program = JOB, **about: Unpack[ImageConfig]) -> Any:
    return program_config(job, PoolSettings(memory_mib=128), "image:1", about)


def test_walls_of_a_program() -> None:
    host = config()["HostConfig"]
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert host["NetworkMode"] == "none"
    assert host["ReadonlyRootfs"]
    assert host["Memory"] == host["MemorySwap"] == 128 << 20
    assert 64 < host["PidsLimit"] < 1024
    assert all(mount["ReadOnly"] for mount in host["Mounts"])
    writable = Program(JOB.command, JOB.socket, is_writable=True)
    assert not config(writable)["HostConfig"]["ReadonlyRootfs"]


@pytest.mark.parametrize("user", ["", "0", "root", "root:root", "0:0"])
def test_program_never_runs_as_root(user: str) -> None:
    assert config(User=user)["User"] == NOBODY


def test_program_runs_as_the_images_user_where_the_image_says() -> None:
    result = config(User="app", WorkingDir="/app")
    assert (result["User"], result["WorkingDir"]) == ("app", "/app")
    with_folder = Program(JOB.command, JOB.socket, folder=Path("/host/mine"))
    assert config(with_folder, WorkingDir="/app")["WorkingDir"] == "/agent"
    assert config()["WorkingDir"] == "/tmp"


@given(st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=KEPT_BYTES))))
def test_end_of_each_stream_is_kept(parts: list[tuple[int, bytes]]) -> None:
    total = sum(len(data) for _, data in parts)
    output, exact = ProgramOutput(total - 1), ProgramOutput(total)
    for number, data in parts:
        output.add(number, data)
        exact.add(number, data)
    for number, kept in enumerate(output.ends, 1):
        assert kept == b"".join(data for of, data in parts if of == number)[-KEPT_BYTES:]
    assert output.is_too_long
    assert not exact.is_too_long


@pytest.mark.parametrize(
    ("status", "limit", "expected"),
    [
        (0, None, (CallStatus.OK, 0)),
        (3, None, (CallStatus.ERROR, 3)),
        (137, None, (CallStatus.KILLED, 137)),
        (None, CallStatus.TIMEOUT, (CallStatus.TIMEOUT, None)),
    ],
)
def test_how_a_program_ended(
    status: int | None, limit: CallStatus | None, expected: tuple[CallStatus, int | None]
) -> None:
    output = ProgramOutput(100)
    output.add(1, "é".encode()[:1])
    end = program_end(status, limit, output, 1.5)
    assert (end.status, end.exit_status) == expected
    assert end.stdout == "\N{REPLACEMENT CHARACTER}"


async def test_local_workers_run_no_program_in_a_container() -> None:
    async with Pool(BARE) as pool:
        assert not pool.has_containers
        with pytest.raises(ProgramUnsupported, match="needs a Docker Engine on this machine"):
            await pool.run_program(JOB, 5)
    with pytest.raises(RuntimeError):
        await pool.run_program(JOB, 5)


# -- the first process ------------------------------------------------------------------------


@contextlib.contextmanager
def echo() -> Iterator[Path]:
    """A folder with a socket `model`, for `serve_echo`. Its path is short, as sockets' must be."""
    with TemporaryDirectory(prefix="entry-") as folder:
        yield Path(folder, "model")


async def serve_echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send back what is received, in capitals."""
    while data := await reader.read(1 << 16):  # no deadline: the test's
        writer.write(data.upper())
    writer.close()


async def entry(command: list[str], path: Path, stdin: str = "") -> anyio.abc.Process:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [part.replace("PORT", str(port)) for part in command]
    process = await anyio.open_process([sys.executable, "-I", "-S", "-c", ENTRY])
    assert process.stdin is not None
    job = {"command": command, "stdin": stdin, "port": port, "socket": str(path)}
    await process.stdin.send(json.dumps(job).encode() + b"\n")
    return process


async def ended(process: anyio.abc.Process) -> tuple[int, str, str]:
    assert process.stdout is not None
    assert process.stderr is not None
    stated = []
    for stream in (process.stdout, process.stderr):
        stated.append(b"".join([data async for data in stream]).decode())
    async with process:
        return await process.wait(), stated[0], stated[1]


@pytest.mark.parametrize(
    ("command", "status", "stderr"),
    [
        (["sh", "-c", "exit 0"], 0, ""),
        (["sh", "-c", "exit 7"], 7, ""),
        (["sh", "-c", "kill -TERM $$"], 128 + signal.SIGTERM, ""),
        (["no-such-program"], 127, "agentloop: no-such-program: No such file or directory\n"),
        (["/"], 126, "agentloop: /: Permission denied\n"),
    ],
)
async def test_exit_status_is_the_commands(command: list[str], status: int, stderr: str) -> None:
    process = await entry(command, Path("/nothing"))
    assert await ended(process) == (status, "", stderr)


async def test_task_is_on_standard_input_however_long() -> None:
    long = "é" * 1_000_000
    process = await entry(["wc", "-c"], Path("/nothing"), stdin=long)
    status, stdout, _ = await ended(process)
    assert (status, int(stdout)) == (0, 2_000_000)


async def test_orphans_are_reaped_and_their_status_is_not_the_commands() -> None:
    code = """
import os, time
if os.fork() == 0:
    if os.fork() == 0:
        os._exit(9)
    os._exit(0)
os.wait()
print("waited")
raise SystemExit(5)
"""
    process = await entry([sys.executable, "-c", code], Path("/nothing"))
    assert (await ended(process))[:2] == (5, "waited\n")


async def test_port_leads_to_the_socket() -> None:
    code = """
import socket
def ask(text):
    with socket.create_connection(("127.0.0.1", PORT)) as one:
        one.sendall(text)
        found = b""
        while len(found) < len(text):
            found += one.recv(1 << 16)
    return found
print(ask(b"hello"), ask(b"x" * 3_000_000) == b"X" * 3_000_000)
"""
    with echo() as path:
        async with await asyncio.start_unix_server(serve_echo, path):
            process = await entry([sys.executable, "-c", code], path)
            status, stdout, stderr = await ended(process)
    assert (status, stdout, stderr) == (0, "b'HELLO' True\n", "")


async def test_model_that_is_gone_closes_the_connection() -> None:
    code = """
import socket
with socket.create_connection(("127.0.0.1", PORT)) as one:
    print(one.recv(10))
"""
    process = await entry([sys.executable, "-c", code], Path("/no/such/socket"))
    status, stdout, stderr = await ended(process)
    assert (status, stdout) == (0, "b''\n")
    assert "the model's socket: " in stderr


async def test_program_ends_with_its_owner() -> None:
    process = await entry(["sh", "-c", "echo $$; exec sleep 600"], Path("/nothing"))
    assert process.stdin is not None
    assert process.stdout is not None
    pid = int(await process.stdout.receive())
    try:
        await process.stdin.aclose()
        assert await process.wait() == 1
    finally:  # in a container, the kernel does it
        os.kill(pid, signal.SIGKILL)
        await process.aclose()


async def test_entry_ends_if_its_owner_leaves_before_a_job() -> None:
    done = subprocess.run(  # noqa: ASYNC221 - it ends at once
        [sys.executable, "-I", "-S", "-c", ENTRY], stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 1
