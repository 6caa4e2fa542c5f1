"""Idle connections are bounded in time and number without affecting others."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import anyio.abc
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentloop.sandbox import Pool, connections
from agentloop.sandbox.connections import Connections
from agentloop.sandbox.serve import main, serving
from agentloop.sandbox.serve_settings import SandboxServeSettings, load
from tests.patience import patient
from tests.sandbox.test_serve import Client, service, until_stat

pytestmark = [pytest.mark.timeout(60)]  # real workers are started

MOST, REQUEST_S, IDLE_S = 4, 5.0, 20.0


class ConnectionsMachine(RuleBasedStateMachine):
    """Any sequence of events, compared with a plain list of connections and times."""

    def __init__(self) -> None:
        super().__init__()
        self.connections = Connections[int](MOST, REQUEST_S, IDLE_S)
        self.now = 0.0
        self.next_key = 0
        self.waiting: dict[int, float] = {}  # until when, in the order of their waiting
        self.begun: set[int] = set()
        self.busy: set[int] = set()

    @rule()
    def a_new_one(self) -> None:
        self.next_key += 1
        is_full = len(self.waiting) + len(self.busy) >= MOST
        gone = next(iter(self.waiting)) if is_full and self.waiting else None
        assert self.connections.add(self.next_key, self.now) == gone
        if gone is not None:
            del self.waiting[gone]
        self.waiting[self.next_key] = self.now + REQUEST_S
        self.begun.add(self.next_key)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def some_bytes(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.waiting)))
        self.connections.receive(key, self.now)
        if key not in self.begun:
            self.begun.add(key)
            self.waiting[key] = self.now + REQUEST_S

    @precondition(lambda self: self.waiting and len(self.busy) < MOST - 1)
    @rule(data=st.data())
    def a_request(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.waiting)))
        self.connections.begin(key)
        self.connections.receive(key, self.now)  # its body
        del self.waiting[key]
        self.begun.discard(key)
        self.busy.add(key)

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def an_answer(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.busy)))
        self.connections.end(key, self.now)
        self.busy.remove(key)
        self.waiting[key] = self.now + IDLE_S

    @rule(data=st.data())
    def one_leaves(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([0, *self.waiting, *self.busy]))
        self.connections.remove(key)
        self.connections.end(key, self.now)  # its handler's, later
        self.waiting.pop(key, None)
        self.busy.discard(key)
        self.begun.discard(key)

    @rule(s=st.floats(0, 30))
    def time_passes(self, s: float) -> None:
        self.now += s

    @invariant()
    def both_agree(self) -> None:
        assert len(self.connections) == len(self.waiting) + len(self.busy) <= MOST
        late = {key for key, until in self.waiting.items() if until <= self.now}
        assert set(self.connections.overdue(self.now)) == late


TestConnections = ConnectionsMachine.TestCase


def address(client: Client) -> tuple[str, int]:
    host, port = client.url.removeprefix("http://").split(":")
    return host, int(port)


@asynccontextmanager
async def connected(client: Client, sent: str = "") -> AsyncIterator[anyio.abc.SocketStream]:
    host, port = address(client)
    async with await anyio.connect_tcp(host, port) as stream:
        if sent:
            await stream.send(sent.replace("HOST", f"{host}:{port}").encode())
        yield stream


async def until_closed(stream: anyio.abc.SocketStream) -> bytes:
    """Read until the connection is closed; return all data."""
    got = bytearray()
    with anyio.fail_after(patient(15)):
        try:
            while True:
                got += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return bytes(got)


GET = "GET /healthz HTTP/1.1\r\nHost: HOST\r\n\r\n"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("sent", "more"),
    [
        ("", {"io_timeout_s": 0.3}),
        ("POST /v1/run HTTP/1.1\r\nHost: HO", {"io_timeout_s": 0.3}),
        (GET, {"idle_timeout_s": 0.3}),
        (GET + "GET /hea", {"io_timeout_s": 0.3, "idle_timeout_s": 0.3}),
    ],
    ids=["nothing", "half a head", "idle after a request", "half a head after a request"],
)
async def test_idle_connections_are_closed(
    pool: Pool, sent: str, more: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    async with service(pool, **more) as client, connected(client, sent) as stream:
        got = await until_closed(stream)
        assert got.startswith(b"HTTP/1.1 200") == sent.startswith(GET)
        assert (await client("GET", "/healthz"))[0] == 200
    assert not caplog.records


@pytest.mark.anyio
async def test_head_in_drips_has_no_more_time(pool: Pool) -> None:
    async with service(pool, io_timeout_s=0.5) as client, connected(client, GET[:20]) as stream:
        with anyio.fail_after(patient(15)), contextlib.suppress(anyio.BrokenResourceError):
            while True:
                await stream.send(b"a")
                await anyio.sleep(0.05)


@pytest.mark.anyio
async def test_request_has_all_the_time_that_it_needs(pool: Pool) -> None:
    async with service(pool, io_timeout_s=0.2, idle_timeout_s=0.2) as client:
        body = {"code": "import time; time.sleep(1.5); 6 * 7"}
        assert (await client.post("/v1/run", body))[1]["result"] == "42"


@pytest.mark.anyio
async def test_however_many_are_idle_others_are_answered(pool: Pool) -> None:
    async with (
        service(pool, max_connections=16, max_requests=8) as client,
        AsyncExitStack() as idle,
    ):
        streams = [
            await idle.enter_async_context(connected(client, "GET / HT" * (n % 2)))
            for n in range(50)
        ]
        assert (await client("GET", "/healthz"))[0] == 200
        assert (await client.post("/v1/run", {"code": "6 * 7"}))[1]["result"] == "42"
        await until_stat(client, "connections", 16)
        for stream in streams[:30]:  # the oldest had to go
            await until_closed(stream)


@pytest.mark.anyio
async def test_descriptors_are_left_for_the_workers(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (120, 120))
    async with service(pool) as client, AsyncExitStack() as idle:
        for _ in range(70):
            await idle.enter_async_context(connected(client))
        await until_stat(client, "connections", 120 - 64 - 8 * SandboxServeSettings().pool.workers)


@pytest.mark.anyio
async def test_answer_that_is_taken_slowly_arrives(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SWEEP_EVERY_S", 0.05)
    first = {"type": "python", "solution": "print('x' * 30_000)"}
    body = json.dumps({"type": "batch", "submissions": [first] * 200}).encode()
    async with service(pool, idle_timeout_s=0.1, io_timeout_s=1, code_judge_chars=65_536) as client:
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 100_000)
            slow.connect(address(client))
            slow.setblocking(False)
            head = f"POST /run/batch HTTP/1.1\r\nHost: HOST\r\nContent-Length: {len(body)}\r\n\r\n"
            slow.sendall(head.replace("HOST", address(client)[0]).encode() + body)
            got = bytearray()
            with anyio.fail_after(patient(50)):
                while len(got) < 6_000_000:
                    await anyio.sleep(0.01)  # for some seconds in all
                    try:
                        data = slow.recv(30_000)
                    except BlockingIOError:
                        continue
                    assert data, "cut off"
                    got += data


@pytest.mark.anyio
@pytest.mark.full
async def test_answer_that_is_not_taken_is_given_up(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SWEEP_EVERY_S", 0.05)
    first = {"type": "python", "solution": "print('x' * 30_000)"}
    body = json.dumps({"type": "batch", "submissions": [first] * 200}).encode()
    async with service(pool, idle_timeout_s=0.2, io_timeout_s=5, code_judge_chars=65_536) as client:
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(address(client))
            head = f"POST /run/batch HTTP/1.1\r\nHost: HOST\r\nContent-Length: {len(body)}\r\n\r\n"
            deaf.sendall(head.replace("HOST", address(client)[0]).encode() + body)
            await until_stat(client, "requests", 1)
            await until_stat(client, "connections", 1)  # the one that asks


def test_requests_are_at_most_half_of_the_connections(capfd: pytest.CaptureFixture[str]) -> None:
    assert load(["max_connections=100", "max_requests=50"]).max_requests == 50
    assert main(["max_connections=100", "max_requests=51"]) == 2
    assert "more than half of max_connections (100)" in capfd.readouterr().err


@pytest.mark.anyio
async def test_port_that_is_taken_is_named(pool: Pool) -> None:
    from agentloop.sandbox import SandboxUnavailable

    async with serving(pool, SandboxServeSettings(port=0)) as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(SandboxUnavailable, match=rf"cannot listen on 127\.0\.0\.1:{port}"):
            async with serving(pool, SandboxServeSettings(port=port)):
                pass
