"""The HTTP service over a pool of local workers."""

from __future__ import annotations

import gzip
import io
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import anyio
import anyio.abc
import anyio.lowlevel
import pytest
from pydantic import SecretStr

from agentloop.sandbox import Pool
from agentloop.sandbox.guard import Guard
from agentloop.sandbox.held_bytes import HeldBytes
from agentloop.sandbox.host import LinkedClient
from agentloop.sandbox.protocol import encode
from agentloop.sandbox.remote import MAX_MESSAGE_BYTES
from agentloop.sandbox.serve import main, serving
from agentloop.sandbox.serve_settings import SandboxServeSettings, load
from tests.patience import patient
from tests.sandbox.conftest import BARE
from tests.sandbox.test_pool import FOREVER, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]  # real workers are started


def settings(**more: Any) -> SandboxServeSettings:
    return SandboxServeSettings(port=0, **more)


class Client:
    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url
        self.http = http

    async def __call__(
        self, method: str, path: str, body: Any = None, **more: Any
    ) -> tuple[int, Any]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        data = None if body is None else io.BytesIO(raw)
        async with self.http.request(method, self.url + path, data=data, **more) as response:
            text = await response.text()
            return response.status, json.loads(text) if text else None

    async def post(self, path: str, body: Any = None, **more: Any) -> tuple[int, Any]:
        return await self("POST", path, body, **more)


@asynccontextmanager
async def service(pool: Pool, **more: Any) -> AsyncIterator[Client]:
    async with serving(pool, settings(**more)) as url, aiohttp.ClientSession() as http:
        yield Client(url, http)


@asynccontextmanager
async def begun(client: Client, rest: str) -> AsyncIterator[anyio.abc.SocketStream]:
    """A POST /v1/run whose head has arrived, without its body."""
    host, port = client.url.removeprefix("http://").split(":")
    async with await anyio.connect_tcp(host, int(port)) as stream:
        await stream.send(f"POST /v1/run HTTP/1.1\r\nHost: {host}\r\n{rest}\r\n\r\n".encode())
        await until_stat(client, "requests", 1)
        yield stream


async def until_stat(client: Client, name: str, value: int, *, at_least: bool = False) -> None:
    with anyio.fail_after(patient(15)):
        while (current := (await client("GET", "/v1/stats"))[1][name]) != value:
            if at_least and current > value:
                return


@asynccontextmanager
async def unread_response(client: Client) -> AsyncIterator[None]:
    """Request more output than the kernel buffers, and do not read it."""
    code = r"print('\x01' * (4 << 20), end='')"  # six bytes each as JSON
    body = json.dumps({"code": code, "language": "python"}).encode()
    head = f"POST /run_code HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = client.url.removeprefix("http://").split(":")
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # else up to tcp_rmem's bound
        deaf.connect((host, int(port)))
        deaf.sendall(head.encode() + body)
        await until_stat(client, "held_bytes", 24 << 20, at_least=True)
        yield


@pytest.fixture
async def client(pool: Pool) -> AsyncIterator[Client]:
    async with service(pool) as client:
        yield client


async def test_program_with_every_field(client: Client) -> None:
    body = {"code": "print(input())\n6 * 7", "stdin": "größe", "timeout_s": 15}
    status, answer = await client.post("/v1/run", body)
    assert status == 200
    assert (answer["status"], answer["stdout"], answer["result"]) == ("ok", "größe\n", "42")
    assert set(answer) == {
        "id", "status", "exit_code", "signal", "stdout", "stderr", "result", "error",
        "stdout_bytes", "stderr_bytes", "truncated", "queue_s", "run_s", "cpu_s", "max_rss",
        "worker_id", "attempt", "started_ns",
    }  # fmt: skip


async def test_failing_program_is_an_answer(client: Client) -> None:
    status, answer = await client.post("/v1/run", {"code": "1 / 0"})
    assert (status, answer["status"], answer["error"]["type"]) == (
        200,
        "error",
        "ZeroDivisionError",
    )


async def test_batch_comes_as_each_finishes(pool: Pool, client: Client) -> None:
    calls: list[dict[str, Any]] = [{"code": f"{n} * 2"} for n in range(60)]
    calls[0] = {"code": FOREVER, "timeout_s": 600}
    async with client.http.post(client.url + "/v1/run/batch", json={"calls": calls}) as response:
        assert response.content_type == "application/x-ndjson"
        lines = [json.loads(await response.content.readline()) for _ in calls[1:]]
    assert {line["index"]: line["result"] for line in lines} == {
        n: str(n * 2) for n in range(1, 60)
    }
    await wait_until(lambda: pool.stats()["busy"] == 0)


@pytest.mark.parametrize("path", ["/v1/run", "/v1/run/batch"])
async def test_client_that_leaves_kills_its_calls(pool: Pool, client: Client, path: str) -> None:
    call = {"code": FOREVER, "timeout_s": 600}
    body = {"calls": [call] * 3} if path.endswith("batch") else call
    async with anyio.create_task_group() as group:
        group.start_soon(client.post, path, body)
        await wait_until(lambda: pool.stats()["busy"] > 0)
        group.cancel_scope.cancel()
    await wait_until(lambda: pool.stats()["busy"] == 0)
    assert pool.stats()["waiting"] == 0


async def test_session_keeps_its_variables(pool: Pool, client: Client) -> None:
    status, opened = await client.post("/v1/sessions")
    assert status == 201
    path = f"/v1/sessions/{opened['id']}"
    await client.post(f"{path}/run", {"code": "x = 41"})
    assert (await client.post(f"{path}/run", {"code": "x + 1"}))[1]["result"] == "42"
    assert pool.stats()["sessions"] == 1
    assert (await client("DELETE", path))[0] == 204
    await wait_until(lambda: pool.stats()["sessions"] == 0)
    assert (await client("DELETE", path))[0] == 404
    assert (await client.post(f"{path}/run", {"code": "x"}))[0] == 404


async def test_lost_session_is_told(client: Client) -> None:
    _, opened = await client.post("/v1/sessions")
    path = f"/v1/sessions/{opened['id']}/run"
    await client.post(path, {"code": "import os; os._exit(3)"})
    statuses: list[int] = []

    async def lost() -> bool:
        status, answer = await client.post(path, {"code": "1"})
        statuses.append(status)
        return bool(answer.get("error") and answer["error"]["type"] == "session_lost")

    with anyio.fail_after(patient(15)):
        while not await lost():
            pass
    assert statuses[-1] == 410
    assert (await client.post(path, {"code": "1"}))[0] == 404


async def session_that_has_run(client: Client) -> str:
    """Return the path of a session's cells, opening another one if it has expired meanwhile."""
    busy = {"code": "import time; time.sleep(0.5); 1"}
    with anyio.fail_after(patient(15)):
        while True:
            _, opened = await client.post("/v1/sessions")
            path = f"/v1/sessions/{opened['id']}/run"
            status, answer = await client.post(path, busy)
            if status == 200:
                assert answer["result"] == "1"
                return path


async def test_session_that_rests_too_long_is_closed(pool: Pool) -> None:
    async with service(pool, session_idle_s=0.2) as client:
        path = await session_that_has_run(client)  # a cell that runs is no rest
        await wait_until(lambda: pool.stats()["sessions"] == 0)
        assert (await client.post(path, {"code": "1"}))[0] == 404


async def test_sessions_end_with_the_service(pool: Pool) -> None:
    async with service(pool) as client:
        await client.post("/v1/sessions")
        assert pool.stats()["sessions"] == 1
    assert pool.stats()["sessions"] == 0


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/run", b"{", 400, "not valid JSON"),
        ("/v1/run", b"[]", 400, "valid dictionary"),
        ("/v1/run", {}, 400, "code: Field required"),
        ("/v1/run", {"code": 1}, 400, "code:"),
        ("/v1/run", {"code": "1", "timeout_s": -1}, 400, "timeout_s:"),
        ("/v1/run", {"code": "1", "timeout": 1}, 400, "timeout:"),
        ("/v1/run", {"code": "1", "memory_mib": 0}, 400, "memory_mib:"),
        ("/v1/run/batch", {"calls": [{"code": "1", "memory_mib": 0}]}, 400, "calls.0.memory_mib"),
        ("/v1/run/batch", {"calls": []}, 400, "calls:"),
        ("/v1/run/batch", {"calls": [{"code": "1"}, {}]}, 400, "calls.1.code: Field required"),
        ("/v1/run", b"#" * (2 << 20), 413, "at most"),
        ("/v1/sessions", b"{", 400, "not valid JSON"),
        ("/v1/sessions", b"[]", 400, "valid dictionary"),
        ("/v1/sessions", {"idle_s": 1}, 400, "idle_s:"),
        ("/run", {"type": "java", "solution": ""}, 400, "type:"),
        ("/run_code", {}, 400, "code:"),
        ("/run_code", {"code": "1", "memory_limit_MB": False}, 400, "memory_limit_MB:"),
        ("/run_code", {"code": "1", "memory_limit_MB": 10**30}, 400, "memory_limit_MB:"),
        ("/run_code", {"code": "1", "run_timeout": "5"}, 400, "run_timeout:"),
        ("/v1/run", {"code": "1", "timeout_s": True}, 400, "timeout_s:"),
        ("/v1/run", {"code": "1", "timeout_s": "5"}, 400, "timeout_s:"),
        ("/nowhere", {}, 404, "/nowhere"),
    ],
)
async def test_bad_input_is_named(pool: Pool, path: str, body: Any, status: int, says: str) -> None:
    async with service(pool, max_body_mib=1) as client:
        got, answer = await client.post(path, body)
    assert got == status
    assert says in answer["error"]["message"]


async def test_memory_of_a_call_and_of_a_cell(client: Client) -> None:
    greedy = {"code": "x = b'1' * 10**8", "memory_mib": 50}
    assert (await client.post("/v1/run", greedy))[1]["status"] == "oom"
    assert (await client.post("/v1/run", greedy | {"memory_mib": 200}))[1]["status"] == "ok"
    _, session = await client.post("/v1/sessions", {})
    path = f"/v1/sessions/{session['id']}/run"
    assert (await client.post(path, greedy))[1]["status"] == "oom"
    # The pool's own bound is the most, however much is asked for.
    beyond = {"code": "x = b'1' * 10**9", "memory_mib": 10**6}
    assert (await client.post("/v1/run", beyond))[1]["status"] == "oom"


async def test_body_of_unknown_length_is_bounded(pool: Pool) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"#" * (1 << 16)

    async with service(pool, max_body_mib=1) as client:
        async with client.http.post(client.url + "/v1/run", data=endless()) as response:
            assert response.status == 413


async def test_body_that_does_not_come_is_not_waited_for(pool: Pool) -> None:
    async with serving(pool, settings(io_timeout_s=0.2)) as url:
        host, port = url.removeprefix("http://").split(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            head = f"POST /v1/run HTTP/1.1\r\nHost: {host}\r\nContent-Length: 9\r\n\r\n{{"
            await stream.send(head.encode())
            assert b" 408 " in await stream.receive()


@pytest.mark.parametrize("rest", ["Content-Length: 1048576", "Transfer-Encoding: chunked"])
async def test_announced_body_takes_nobodys_room(pool: Pool, rest: str) -> None:
    async with service(pool, max_body_mib=1, max_held_mib=1) as client, begun(client, rest):
        assert (await client.post("/v1/run", {"code": "1"}))[0] == 200


async def test_bodies_that_have_come_are_bounded(pool: Pool) -> None:
    size = (1 << 20) - 1
    async with service(pool, max_body_mib=1, max_held_mib=1) as client:
        async with begun(client, "Content-Length: 1048576") as stream:
            await stream.send(b"#" * size)
            await until_stat(client, "held_bytes", size)
            status, answer = await client.post("/v1/run", {"code": "1"})
            assert (status, answer["error"]["type"]) == (503, "overloaded")
        await until_stat(client, "held_bytes", 0)
        assert (await client.post("/v1/run", {"code": "1"}))[0] == 200


async def test_responses_that_are_not_read_are_bounded(pool: Pool) -> None:
    async with service(pool, max_body_mib=1, max_held_mib=1) as client:
        async with unread_response(client):
            assert (await client.post("/v1/run", {"code": "1"}))[0] == 503
        await until_stat(client, "held_bytes", 0)
        assert (await client.post("/v1/run", {"code": "1"}))[0] == 200


async def test_client_that_does_not_read_its_response_is_disconnected(pool: Pool) -> None:
    async with service(pool, io_timeout_s=0.5) as client, unread_response(client):
        await until_stat(client, "held_bytes", 0)
        await until_stat(client, "connections", 1)  # the one that asks


async def test_opened_session_takes_an_empty_object(client: Client) -> None:
    assert (await client.post("/v1/sessions", {}))[0] == 201


@pytest.mark.parametrize(("path", "status"), [("/v1/run", 400), ("/v1/sessions", 400), ("/x", 404)])
async def test_body_that_cannot_be_decoded(
    client: Client, path: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    coded = {"Content-Encoding": "gzip"}
    got, answer = await client.post(path, b"no gzip", headers=coded)
    assert (got, set(answer)) == (status, {"error"})
    good = gzip.compress(b'{"code": "6 * 7"}')
    assert (await client.post("/v1/run", good, headers=coded))[1]["result"] == "42"
    assert not caplog.records


async def test_malformed_request_gets_400_and_is_not_logged(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = client.url.removeprefix("http://").split(":")
    async with await anyio.connect_tcp(host, int(port)) as stream:
        await stream.send(b"GET / HTTP/1.1\r\n\r\n")
        assert b" 400 " in await stream.receive()
    assert not caplog.records


async def test_batch_that_nobody_reads_ends_quietly(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    call = {"code": "print('x' * 60_000)"}  # in all, more than the sockets' buffers take
    body = json.dumps({"calls": [call] * 250}).encode()
    async with service(pool, io_timeout_s=0.3) as client:
        host, port = client.url.removeprefix("http://").split(":")
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect((host, int(port)))
            head = f"POST /v1/run/batch HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}"
            before = sum(pool.stats()["calls"].values())
            deaf.sendall(head.encode() + b"\r\n\r\n" + body)
            await wait_until(lambda: sum(pool.stats()["calls"].values()) > before)
            await until_stat(client, "requests", 0)
            assert 0 < sum(pool.stats()["calls"].values()) - before < 250
    assert not caplog.records


async def test_too_many_requests_are_refused(pool: Pool) -> None:
    async with service(pool, max_requests=1) as client, anyio.create_task_group() as group:
        group.start_soon(client.post, "/v1/run", {"code": FOREVER, "timeout_s": 600})
        await wait_until(lambda: pool.stats()["busy"] == 1)
        async with client.http.post(client.url + "/v1/run", json={"code": "1"}) as response:
            assert response.status == 503
            assert response.headers["Retry-After"]
        assert (await client("GET", "/healthz"))[0] == 200
        group.cancel_scope.cancel()
    await wait_until(lambda: pool.stats()["busy"] == 0)


ONE_SESSION = BARE.model_copy(update={"max_sessions": 1})


async def test_request_without_a_free_session_is_refused_at_once() -> None:
    async with Pool(ONE_SESSION) as pool, service(pool) as client:
        assert (await client.post("/v1/sessions"))[0] == 201
        async with client.http.post(client.url + "/v1/sessions") as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
            error = (await response.json())["error"]
        assert error["type"] == "overloaded"
        assert error["message"] == (
            "1 sessions are open, and none more was free: close one, or allow more (max_sessions)"
        )


KILL = encode({"op": "kill", "id": 1})


def frame(size: int, sent: int = 0) -> bytes:
    return size.to_bytes(4, "big") + b" " * sent


async def test_links_are_counted_and_bounded(pool: Pool) -> None:
    async with service(pool, max_links=2) as client:
        link = client.url + "/v1/link"
        async with client.http.ws_connect(link) as first, client.http.ws_connect(link):
            await until_stat(client, "links", 2)
            status, answer = await client("GET", "/v1/link")
            assert (status, answer["error"]["type"]) == (503, "overloaded")
            assert "max_links" in answer["error"]["message"]
            await first.close()
            await until_stat(client, "links", 1)
            async with client.http.ws_connect(link):
                await until_stat(client, "links", 2)
        await until_stat(client, "links", 0)


async def test_bytes_that_links_hold_are_counted_and_bounded(pool: Pool) -> None:
    async with service(pool, max_body_mib=1, max_held_mib=1) as client:
        link = client.url + "/v1/link"
        async with client.http.ws_connect(link) as first, client.http.ws_connect(link) as two:
            for socket_ in (first, two):
                await socket_.receive()  # ready
            for _ in range(4):
                await first.send_bytes(frame(8 << 20, 0) if not _ else b" " * 200_000)
            await until_stat(client, "held_bytes", 600_004)
            for _ in range(3):
                await two.send_bytes(frame(8 << 20, 0) if not _ else b" " * 250_000)
            closed = await two.receive()
            assert "max_held_mib" in str(closed.extra)
            call = {"op": "run", "id": 7, "code": "6 * 7"}
            async with client.http.ws_connect(link) as three:
                await three.receive()
                await three.send_bytes(encode(call))
                assert b'"result":"42"' in (await three.receive()).data
        await until_stat(client, "held_bytes", 0)


async def test_link_takes_no_long_message(pool: Pool) -> None:
    async with service(pool) as client, client.http.ws_connect(client.url + "/v1/link") as link:
        await link.receive()
        await link.send_bytes(KILL * (MAX_MESSAGE_BYTES // len(KILL) + 1))
        assert (await link.receive()).data == aiohttp.WSCloseCode.MESSAGE_TOO_BIG


class Flood:
    """A link whose client sends messages without a pause, and reads nothing."""

    def __init__(self, message: bytes, most: int | None = None) -> None:
        self.message = aiohttp.WSMessage(aiohttp.WSMsgType.BINARY, message, None)
        self.most = most
        self.num_sent = 0
        self.reason = b""

    async def __aiter__(self) -> AsyncIterator[aiohttp.WSMessage]:
        while self.num_sent != self.most:
            self.num_sent += 1
            yield self.message

    async def send_bytes(self, data: bytes) -> None:
        await anyio.sleep_forever()

    async def close(self, code: int = 1000, message: bytes = b"") -> None:
        self.reason = message


async def test_link_full_of_frames_lets_others_run(pool: Pool) -> None:
    flood: Any = Flood(KILL * 1000)
    async with anyio.create_task_group() as group:
        group.start_soon(LinkedClient(pool, lambda num_bytes: True).serve, flood)
        while flood.num_sent < 20:
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()


async def test_unread_responses_of_a_link_are_counted_and_bounded(pool: Pool) -> None:
    held = HeldBytes(50_000)
    refused = encode({"op": "run", "id": 1, "code": None})
    flood: Any = Flood(refused, most=5000)
    await LinkedClient(pool, partial(held.hold, "link")).serve(flood)
    assert b"max_held_mib" in flood.reason
    assert held.total > 40_000


async def test_link_takes_no_frame_that_is_long_to_parse(pool: Pool) -> None:
    async with service(pool) as client, client.http.ws_connect(client.url + "/v1/link") as link:
        await link.receive()
        await link.send_bytes(encode({"op": "run", "id": 1, "code": [[]] * 5000}))
        assert "at most 1000 values" in str((await link.receive()).extra)


async def test_long_frame_goes_in_several_messages(pool: Pool) -> None:
    async with service(pool) as client:
        async with Pool(BARE.model_copy(update={"hosts": [client.url], "backend": "auto"})) as far:
            text = "größe" * 300_000
            result = await far.run("print(len(input()))", stdin=text)
            assert result.stdout == "1500000\n"


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/run", b'{"code":"1","x":[' + b"{}," * 2000 + b"{}]}", 413, "at most 1000 values"),
        ("/v1/run/batch", b'{"calls":[' + b"[]," * 1_100_000 + b"[]]}", 413, "values and names"),
        ("/v1/run/batch", b'{"calls":[' + b'{"x":1},' * 65_000 + b"{}]}", 400, "calls.0.code"),
        ("/v1/run", json.dumps({f"a{n}": 1 for n in range(400)}).encode(), 400, "401 fields"),
    ],
)
async def test_body_that_is_long_to_parse_or_to_refuse(
    client: Client, path: str, body: bytes, status: int, says: str
) -> None:
    got, answer = await client.post(path, body)
    assert (got, answer["error"]["type"]) == (
        status,
        "too_large" if status == 413 else "bad_request",
    )
    assert says in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 200


async def test_code_that_is_full_of_brackets_is_a_single_value(client: Client) -> None:
    code = 'len("' + r"[{,:\"" * 50_000 + '")'
    _, answer = await client.post("/v1/run", {"code": code})
    assert answer["result"] == "250000"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/run", "POST"),
        ("POST", "/healthz", "GET,HEAD"),
        ("PATCH", "/v1/sessions/x", "DELETE"),
    ],
)
async def test_another_method_is_told_which_are_allowed(
    client: Client, method: str, path: str, allowed: str
) -> None:
    async with client.http.request(method, client.url + path) as response:
        assert (response.status, response.headers["Allow"]) == (405, allowed)
        assert (await response.json())["error"]["type"] == "http"


async def test_mistake_of_ours_has_an_answer_of_the_same_form(
    pool: Pool, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool, "stats", lambda: 1 / 0)
    status, answer = await client("GET", "/v1/stats")
    assert (status, answer["error"]["type"]) == (500, "internal")
    assert [record.message for record in caplog.records] == ["GET /v1/stats failed"]


async def test_only_with_the_token(pool: Pool) -> None:
    async with service(pool, token=SecretStr("hush")) as client:
        assert (await client.post("/v1/run", {"code": "1"}))[0] == 401
        for wrong in ("Bearer husk", "Basic hush", "Bearer", "Bearer hushhush"):
            headers = {"Authorization": wrong}
            assert (await client.post("/v1/run", {"code": "1"}, headers=headers))[0] == 401
            assert (await client("GET", "/v1/link", headers=headers))[0] == 401
        right = {"Authorization": "Bearer hush"}
        assert (await client.post("/v1/run", {"code": "1"}, headers=right))[0] == 200
        assert (await client("GET", "/healthz"))[0] == 200


@pytest.mark.parametrize("header", ["Host", "Origin"])
async def test_foreign_pages_are_refused(pool: Pool, client: Client, header: str) -> None:
    before = pool.stats()["calls"]
    value = "evil.example" if header == "Host" else "http://evil.example"
    status, answer = await client.post("/v1/run", {"code": "1"}, headers={header: value})
    assert status == 403
    assert header in answer["error"]["message"]
    assert pool.stats()["calls"] == before


def test_only_guards_with_a_token_accept_any_host_name() -> None:
    right, wrong = {"Authorization": "Bearer t"}, {"Authorization": "Bearer u"}
    for name in ("10.0.0.7:8010", "[::1]:8010", "node-4:8010", "box.lan"):
        for guard in (Guard("0.0.0.0", "t"), Guard("127.0.0.1", "t")):
            assert guard.refusal("/run", {"Host": name, **right}) is None
            refusal = guard.refusal("/run", {"Host": name, **wrong})
            assert refusal is not None
            assert refusal[0] == 401
    local = Guard("127.0.0.1", None, ["box.lan"])
    assert local.refusal("/run", {"Host": "box.lan:8010"}) is None
    refusal = local.refusal("/run", {"Host": "node-4:8010"})
    assert refusal is not None
    assert refusal[0] == 403
    assert "allowed_hosts" in refusal[1]


async def test_code_judge(client: Client) -> None:
    ask = {"type": "python", "solution": "print(input())", "input": "7"}
    _, ran = await client.post("/run", {**ask, "sub_id": "a"})
    assert ran.pop("cost") > 0
    assert ran == {
        "sub_id": "a", "success": True, "run_success": True, "reason": "", "stdout": "7\n",
        "stderr": "",
    }  # fmt: skip
    _, judged = await client.post("/judge", {**ask, "expected_output": " 7 "})
    assert (judged["success"], judged["run_success"]) == (True, True)
    assert judged["sub_id"]
    assert "stdout" not in judged
    _, judged = await client.post("/judge", {**ask, "expected_output": "8"})
    assert (judged["success"], judged["run_success"]) == (False, True)
    assert await client("GET", "/ping") == (200, "pong")
    assert (await client("GET", "/status"))[1] == {"queue": 0, "num_workers": 4}


@pytest.mark.parametrize("form", ["batch", "long-batch"])
async def test_code_judges_batches_keep_their_order(client: Client, form: str) -> None:
    requests: list[dict[str, Any]] = [
        {"type": "python", "solution": f"print({n})", "expected_output": str(n % 40)}
        for n in range(50)
    ]
    for index in (7, 8):
        requests[index] = {"type": "math", "solution": "1", "expected_output": "1"}
    body = {"type": "batch", "sub_id": "all", "submissions": requests}
    _, judged = await client.post(f"/judge/{form}", body)
    _, ran = await client.post(f"/run/{form}", body)
    assert judged["sub_id"] == ran["sub_id"] == "all"
    for answers in (judged["results"], ran["results"]):
        assert [first["success"] for first in answers] == [
            n < 40 and n not in (7, 8) for n in range(50)
        ]
        assert [answers[n]["reason"] for n in (6, 7, 8)] == ["", "invalid_input", "invalid_input"]
    assert [first["stdout"] for first in ran["results"]][9] == "9\n"
    assert "'math'" in ran["results"][8]["stderr"]


@pytest.mark.parametrize("path", ["/run", "/judge"])
async def test_code_judges_own_client_takes_every_answer(client: Client, path: str) -> None:
    """The client's dataclass has exactly these fields."""
    for first in (
        {"type": "python", "solution": "1"},
        {"type": "cpp", "solution": "1"},
        {"type": "math", "solution": "1"},
        {"type": "python", "solution": "1", "options": {"a": "b"}},
        {"type": "python", "solution": "1 / 0"},
        {"type": "python", "solution": "#" * (9 << 20)},
    ):
        _, answer = await client.post(path, first)
        fields = ["sub_id", "success", "run_success", "cost", "reason"]
        assert list(answer) == fields + ["stdout", "stderr"] * (path == "/run")
    _, answer = await client.post("/run", {"type": "math", "solution": "1"})
    assert answer["stderr"] == "the type 'math' is not supported here, only 'python' and 'cpp'"


async def test_code_judge_keeps_the_first_characters(pool: Pool) -> None:
    code = "import sys\nprint('é' * 3_000_000)\nprint('e' * 3_000_000, file=sys.stderr)"
    ask = {"type": "python", "solution": code}
    async with service(pool) as client:
        _, answer = await client.post("/run", ask)
        assert (answer["success"], answer["stdout"], answer["stderr"]) == (
            True, "é" * 1000, "e" * 1000,
        )  # fmt: skip
    async with service(pool, code_judge_chars=20_000) as client:
        assert len((await client.post("/run", ask))[1]["stdout"]) == 20_000


@pytest.mark.parametrize("size", [70_000, 3_000_000])
async def test_code_judge_compares_all_of_a_long_output(client: Client, size: int) -> None:
    ask = {"type": "python", "solution": f"print('x' * {size})", "expected_output": "x" * size}
    assert (await client.post("/judge", ask))[1]["success"]
    ask["expected_output"] = "x" * (size // 2) + "y" + "x" * (size - size // 2 - 1)
    _, answer = await client.post("/judge", ask)
    assert (answer["success"], answer["run_success"]) == (False, True)


async def test_code_judge_says_what_it_cannot_compare(client: Client) -> None:
    ask = {"type": "python", "solution": "1", "expected_output": "x" * (5 << 20)}
    _, answer = await client.post("/run", ask)
    assert (answer["success"], answer["reason"]) == (False, "invalid_input")
    assert "expected_output has more than" in answer["stderr"]


async def test_code_judge_says_what_went_wrong(pool: Pool) -> None:
    async with service(pool, code_judge_timeout_s=2) as client:
        late = await client.post("/run", {"type": "python", "solution": FOREVER})
        assert (late[1]["reason"], late[1]["success"], late[1]["stdout"]) == (
            "worker_timeout", False, "begun\nSuicide from timeout.\n",
        )  # fmt: skip
        large = await client.post("/run", {"type": "python", "solution": "#" * (9 << 20)})
        assert (large[1]["success"], large[1]["reason"]) == (False, "")
        assert f"{8 << 20:,}" in large[1]["stderr"]
        options = {"type": "python", "solution": "1", "options": {"a": "b"}}
        assert (await client.post("/run", options))[1]["reason"] == "invalid_input"


@pytest.mark.parametrize(
    ("ask", "status", "ran"),
    [
        ({"code": "print(input())", "stdin": "x"}, "Success", ("Finished", 0, "x\n")),
        ({"code": "print('x' * 3_000_000)"}, "Success", ("Finished", 0, "x" * 3_000_000 + "\n")),
        ({"code": "print(1); raise SystemExit(3)"}, "Failed", ("Finished", 3, "1\n")),
        ({"code": FOREVER, "run_timeout": 2}, "Failed", ("TimeLimitExceeded", None, "begun\n")),
        ({"code": "x = b'1' * 10**8", "memory_limit_MB": 10}, "Failed", ("Finished", 1, "")),
        ({"code": "x = b'1' * 10**8", "memory_limit_MB": 10**6}, "Success", ("Finished", 0, "")),
        ({"code": "1", "language": "rust"}, "SandboxError", None),
        ({"code": "1", "memory_limit_MB": 512.0}, "Success", ("Finished", 0, "")),
        ({"code": "1", "files": {"a": "Yg=="}}, "SandboxError", None),
    ],
)
async def test_sandbox_fusion(client: Client, ask: Any, status: str, ran: Any) -> None:
    _, answer = await client.post("/run_code", {"language": "python", **ask})
    assert answer["status"] == status
    if ran is None:
        assert "not supported" in answer["message"]
    else:
        run = answer["run_result"]
        assert (run["status"], run["return_code"], run["stdout"]) == ran


async def test_sandbox_fusion_never_answers_with_partial_output(client: Client) -> None:
    _, answer = await client.post("/run_code", {"code": "print('x' * 5_000_000)"})
    assert (answer["status"], answer["run_result"]) == ("SandboxError", None)
    assert answer["message"].startswith("the output has 5000001 bytes; the maximum is")


async def test_document_names_every_path(pool: Pool, client: Client) -> None:
    _, document = await client("GET", "/openapi.json")
    for path, operations in document["paths"].items():
        method = next(name for name in operations if name != "parameters")
        status, _ = await client(
            method.upper(), path.replace("{id}", "x"), b"{" * (method == "post")
        )
        assert status in (200, 201, 400, 404), path
        refs = json.dumps(operations).split('"#/components/schemas/')[1:]
        for ref in refs:
            assert ref.partition('"')[0] in document["components"]["schemas"]
    assert "/v1/sessions/{id}/run" in document["paths"]
    assert set(document["components"]["schemas"]["RunRequest"]["required"]) == {"code"}


def is_described(value: Any, schema: Any, schemas: Any, reported: set[str]) -> bool:
    """Return whether a value matches a schema, as far as the service's schemas go, including
    required fields."""
    if name := schema.get("$ref"):
        return is_described(value, schemas[name.rpartition("/")[2]], schemas, reported)
    if "allOf" in schema:
        return all(is_described(value, first, schemas, reported) for first in schema["allOf"])
    if "anyOf" in schema:
        return any(is_described(value, first, schemas, reported) for first in schema["anyOf"])
    types: dict[str, type | tuple[type, ...]] = {
        "string": str, "integer": int, "number": (int, float), "boolean": bool,
        "null": type(None), "object": dict,
    }  # fmt: skip
    named = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    reported.update(schema.get("required", ()))
    return (
        any(isinstance(value, types[name]) for name in named)
        and value in schema.get("enum", [value])
        and all(
            name in value and is_described(value[name], schema["properties"][name], schemas, set())
            for name in schema.get("required", ())
        )
    )


async def test_document_describes_the_answers(client: Client) -> None:
    _, document = await client("GET", "/openapi.json")
    requests: list[tuple[str, Any, str]] = [
        ("/v1/run", {"code": "6 * 7"}, "200"),
        ("/v1/run", {"code": "1 / 0"}, "200"),
        ("/v1/run", {"code": "#" * (9 << 20)}, "200"),  # refused by the pool: an answer as well
        ("/v1/run", {}, "default"),
        ("/v1/run", b"{", "default"),
        ("/v1/run/batch", {"calls": [{"code": "1"}]}, "200"),
        ("/v1/sessions", None, "201"),
    ]
    for path, body, code in requests:
        _, answer = await client.post(path, body)
        (form,) = document["paths"][path]["post"]["responses"][code]["content"].values()
        schema = form["schema"].get("items", form["schema"])  # of a line
        reported: set[str] = set()
        assert is_described(answer, schema, document["components"]["schemas"], reported)
        assert reported == set(answer), path


def test_settings_come_as_flags_or_pairs_or_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_TOKEN", "hush")
    monkeypatch.setenv("SANDBOX_POOL__TIMEOUT_S", "7")
    got = load(["--port", "9", "host=0.0.0.0", "pool.workers=3", "--pool.backend=process"])
    assert (got.port, got.host, got.pool.workers, got.pool.backend) == (9, "0.0.0.0", 3, "process")
    assert (got.token, got.pool.timeout_s) == (SecretStr("hush"), 7)
    for inputs in (["--pool.packages", "a==1,b"], ["pool.packages=a==1,b"]):
        assert load(inputs).pool.packages == ["a==1", "b"]


def test_help_is_in_words(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(["--help"])
    stated = " ".join(capfd.readouterr().out.split())
    for internal in ("Secret", "null", "list[", "lambda", "factory", "%"):
        assert internal not in stated
    assert (
        "usage: python -m agentloop.sandbox.serve [--SETTING VALUE | SETTING=VALUE ...]" in stated
    )
    assert "--token TEXT Token that clients must send" in stated
    assert "--pool.hosts TEXT,... URLs (http://host:port) of machines that run" in stated
    assert '(default: [["numpy"], ["numpy", "sympy"]])' in stated


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["host=0.0.0.0"], "set a token"),
        (["host=0.0.0.0", "token="], "set a token"),
        (["port=x"], "port:"),
        (["pool.workers=0"], "pool.workers:"),
        (["pool.hosts=ftp://x"], "pool.hosts:"),
    ],
)
def test_bad_setting_is_named(
    arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert says in capfd.readouterr().err
