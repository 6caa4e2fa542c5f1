"""The network of a computer: what an allow-list lets through, and ports."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

import anyio
import pytest
from anyio import create_task_group
from anyio.abc import SocketAttribute, SocketStream

from agentloop.sandbox import Computer, ComputerLost, Pool, PoolSettings
from tests.patience import patient
from tests.sandbox.network_attempts import LISTED_NAMES, MUST_FAIL, MUST_PASS, Attempt

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

Results = Mapping[str, Mapping[str, Any]]
LOOKUPS = {f"lookup of {name}" for name in (*LISTED_NAMES, "a.wild.example", "raw.example")} | {
    "lookup of lan.example"
}


@pytest.fixture(scope="module")
def results(docker_engine: None) -> Results:
    if os.geteuid() or not all(map(shutil.which, ("unshare", "ip", "openssl"))):
        pytest.skip("needs root, unshare, ip and openssl, to make networks")
    command = [sys.executable, "-m", "tests.sandbox.network_attempts"]
    done = subprocess.run(
        ["unshare", "--net", "--mount", "--propagation", "private", *command],
        capture_output=True,
        text=True,
        timeout=patient(240),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: Results = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("attempt", MUST_PASS, ids=lambda attempt: attempt.name)
def test_what_is_listed_is_reached(results: Results, attempt: Attempt) -> None:
    result = results[attempt.name]
    assert "reached" in result["output"], result
    arrived = {where for where, _ in result["arrived"]}
    assert arrived - LOOKUPS == set(attempt.arrives)


@pytest.mark.parametrize("attempt", MUST_FAIL, ids=lambda attempt: attempt.name)
def test_what_is_not_listed_is_not_reached(results: Results, attempt: Attempt) -> None:
    result = results[attempt.name]
    for where, text in result["arrived"]:
        assert where in LOOKUPS or where in attempt.arrives, result
        assert "secret" not in text.split("/to?")[0], result
        assert "evil" not in text.split("/to?")[0], result
    if not attempt.arrives:
        assert "reached" not in result["output"], result


def test_forks_inherit_the_list(results: Results) -> None:
    passed, failed = (results[f"in a fork: {table[0].name}"] for table in (MUST_PASS, MUST_FAIL))
    assert "reached" in passed["output"]
    assert not failed["arrived"]


# -- ports --------------------------------------------------------------------------------------

SETTINGS = PoolSettings(backend="docker", workers=1, preload=[], max_sessions=4)
SERVER = """
import socket, sys
with socket.create_server(("127.0.0.1", 8080)) as server:
    print("listening", flush=True)
    while True:
        connection, _ = server.accept()
        with connection, connection.makefile("rwb") as file:
            for line in file:
                file.write(line.upper())
                file.flush()
"""


@pytest.fixture(scope="module")
async def pool(docker_engine: None, anyio_backend: str) -> AsyncIterator[Pool]:
    async with Pool(SETTINGS) as pool:
        yield pool


@pytest.fixture
async def box(pool: Pool) -> AsyncIterator[Computer]:
    """A computer with a server."""
    async with pool.computer() as box:
        await box.write("/tmp/server.py", SERVER.encode())
        await box.run("mkfifo /tmp/said; python3 /tmp/server.py > /tmp/said & head -1 /tmp/said")
        yield box


@pytest.mark.anyio
async def test_stream_to_a_port(box: Computer) -> None:
    async with box.port(8080) as address, await connect(address) as stream:
        for text in (b"hello\n", b"x" * 200_000 + b"\n"):
            answer = b""
            await stream.send(text)
            while len(answer) < len(text):
                answer += await stream.receive()
            assert answer == text.upper()


@pytest.mark.anyio
async def test_closed_port_closes_connections(box: Computer) -> None:
    async with box.port(81) as address:
        assert await exchange(address) == b""


@pytest.mark.anyio
async def test_port_is_led_to_ours_until_it_is_left(box: Computer) -> None:
    async with box.port(8080) as address:
        assert await exchange(address) == b"HELLO\n"
        held = await connect(address)
    with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
        await held.receive()
    await held.aclose()
    with pytest.raises(OSError, match="connect"):
        await exchange(address)


async def connect(address: str) -> SocketStream:
    host, _, port = address.partition(":")
    return await anyio.connect_tcp(host, int(port))


async def exchange(address: str) -> bytes:
    async with await connect(address) as stream:
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            await stream.send(b"hello\n")
            return await stream.receive()
    return b""


@pytest.mark.anyio
async def test_connections_end_with_the_processes(box: Computer) -> None:
    async with box.port(8080) as address, await connect(address) as stream:
        await stream.send(b"hello\n")
        assert await stream.receive() == b"HELLO\n"
        await box.kill_processes()
        with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await stream.receive()
        assert await exchange(address) == b""


@pytest.mark.anyio
@pytest.mark.parametrize("is_noticed", [True, False])
async def test_lost_computer_is_no_closed_port(box: Computer, is_noticed: bool) -> None:
    with pytest.raises(ComputerLost):  # noqa: PT012
        async with box.port(8080) as address, await connect(address) as stream:
            box._machine.channel.lose("a test")
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()
            if is_noticed:
                raise ConnectionError


@pytest.mark.anyio
async def test_tunnels_end_with_the_computer(pool: Pool) -> None:
    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as server,
        create_task_group() as group,
    ):
        port = server.extra(SocketAttribute.local_port)
        ended = anyio.Event()

        async def hold(stream: SocketStream) -> None:
            async with stream:
                with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                    await stream.receive()
            ended.set()

        group.start_soon(server.serve, hold)
        async with pool.computer(network=f"allow:127.0.0.1:{port}") as box, box.port(80):
            tunnel = f"CONNECT 127.0.0.1:{port} HTTP/1.1\\r\\n\\r\\n"
            command = f"exec 3<>/dev/tcp/127.0.0.1/3128; printf '{tunnel}' >&3; head -1 <&3"
            assert "200" in (await box.run(command)).stdout
        with anyio.fail_after(patient(30)):
            await ended.wait()
        group.cancel_scope.cancel()
