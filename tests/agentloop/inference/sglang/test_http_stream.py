"""A streamed POST request, against a server that sends raw bytes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.inference.sglang.http_stream import PostStream, StreamBroken
from tests.patience import patient

GONE = (anyio.EndOfStream, anyio.BrokenResourceError)
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@asynccontextmanager
async def serving(answer: Callable[[SocketStream], Awaitable[None]]) -> AsyncIterator[str]:
    """Answer each connection by `answer`, after which it is closed; yield the server's URL."""

    async def handle(client: SocketStream) -> None:
        async with client:
            await answer(client)

    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(listener.serve, handle)
        yield f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
        tasks.cancel_scope.cancel()


def collect(pieces: list[bytes]) -> Callable[[bytes], bool]:
    def on_data(data: bytes) -> bool:
        pieces.append(data)
        return False

    return on_data


def sending(*pieces: bytes) -> Callable[[SocketStream], Awaitable[None]]:
    async def answer(client: SocketStream) -> None:
        await client.receive()
        for piece in pieces:
            await client.send(piece)

    return answer


async def receive(url: str, **options: Any) -> tuple[PostStream, list[bytes]]:
    """Run one request to its end; return it with the pieces of its body."""
    pieces: list[bytes] = []
    stream = PostStream(url, b"{}", options.pop("on_data", collect(pieces)))
    await stream.run(connect_timeout_s=5.0)
    return stream, pieces


async def test_request_has_a_path_a_host_and_its_length() -> None:
    heard = bytearray()

    async def answer(client: SocketStream) -> None:
        while not heard.endswith(b"[1, 2]"):
            heard.extend(await client.receive())
        await client.send(OK + b"Content-Length: 0\r\n\r\n")

    async with serving(answer) as url:
        stream = PostStream(f"{url}/generate?a=1", b"[1, 2]", lambda data: False)
        await stream.run(connect_timeout_s=5.0)
        host = url.removeprefix("http://").encode()
    assert stream.status == 200
    head, _, body = bytes(heard).partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    assert first == b"POST /generate?a=1 HTTP/1.1"
    assert {b"Host: " + host, b"Content-Length: 6", b"Connection: close"} <= set(lines)
    assert body == b"[1, 2]"


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.binary(min_size=1, max_size=20), max_size=5),
    st.lists(st.integers(0, 200), max_size=6),
)
def test_body_is_the_same_however_it_is_split(chunks: list[bytes], cuts: list[int]) -> None:
    sent = CHUNKED + b"".join(map(chunk, chunks)) + chunk(b"")
    edges = [0, *sorted(min(at, len(sent)) for at in cuts), len(sent)]
    pieces: list[bytes] = []

    async def feed() -> PostStream:
        stream = PostStream("http://nobody", b"", collect(pieces))
        for start, end in itertools.pairwise(edges):
            stream.data_received(sent[start:end])
        return stream

    assert asyncio.run(feed()).status == 200
    assert b"".join(pieces) == b"".join(chunks)
    assert all(pieces)  # each has something in it


async def test_chunks_of_one_read_arrive_as_one_piece() -> None:
    pieces: list[bytes] = []
    stream = PostStream("http://nobody", b"", collect(pieces))
    stream.data_received(CHUNKED + chunk(b"a") + chunk(b"b"))
    stream.data_received(chunk(b"c"))
    assert pieces == [b"ab", b"c"]


async def test_reader_may_end_the_stream() -> None:
    closed = anyio.Event()

    async def answer(client: SocketStream) -> None:
        await client.receive()
        await client.send(CHUNKED + chunk(b"enough"))
        with pytest.raises(GONE):
            await client.receive()
        closed.set()

    async with serving(answer) as url:
        await receive(url, on_data=lambda data: data == b"enough")
        with anyio.fail_after(patient(10)):
            await closed.wait()


async def test_body_of_a_refusal_is_kept_up_to_a_limit() -> None:
    body = b"x" * 100_000
    head = b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with serving(sending(head, body)) as url:
        stream, pieces = await receive(url)
    assert (stream.status, pieces) == (503, [])
    assert stream.error_body == body[:65_536]


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        ([], "the connection was closed"),
        ([OK + b"Content-Length: 9\r\n\r\nhalf"], "the connection was closed"),
        ([CHUNKED + chunk(b"half")], "the connection was closed"),
        ([b"SSH-2.0-OpenSSH\r\n"], "not valid HTTP"),
        ([CHUNKED + b"zz\r\n"], "not valid HTTP"),
    ],
)
async def test_response_that_is_cut_or_invalid_is_broken(sent: list[bytes], error: str) -> None:
    async with serving(sending(*sent)) as url:
        with pytest.raises(StreamBroken, match=error):
            await receive(url)


async def test_error_of_the_reader_is_raised() -> None:
    def refuse(data: bytes) -> bool:
        raise ZeroDivisionError

    async with serving(sending(CHUNKED + chunk(b"a"))) as url:
        with pytest.raises(ZeroDivisionError):
            await receive(url, on_data=refuse)


@pytest.mark.parametrize("cause", ["broken off", "cancelled"])
async def test_stream_that_is_given_up_closes_its_connection(cause: str) -> None:
    closed, received = anyio.Event(), anyio.Event()

    async def answer(client: SocketStream) -> None:
        await client.receive()
        await client.send(CHUNKED + chunk(b"a"))
        with pytest.raises(GONE):
            await client.receive()
        closed.set()

    async with serving(answer) as url, anyio.create_task_group() as tasks:

        def on_data(data: bytes) -> bool:
            received.set()
            return False

        stream = PostStream(url, b"{}", on_data)

        async def run() -> None:
            with pytest.raises(StreamBroken, match="not wanted"):
                await stream.run(connect_timeout_s=5.0)

        tasks.start_soon(run)
        with anyio.fail_after(patient(10), shield=True):
            await received.wait()
            if cause == "broken off":
                stream.break_off("not wanted")
            else:
                tasks.cancel_scope.cancel()
            await closed.wait()


async def test_server_that_is_not_there_is_broken() -> None:
    async with serving(sending()) as url:
        pass
    with pytest.raises(StreamBroken):
        await receive(url)


async def test_connecting_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*arguments: object, **options: object) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", never)
    stream = PostStream("http://127.0.0.1:1", b"", lambda data: False)
    with pytest.raises(StreamBroken, match=r"could not connect within 0\.01 s"):
        await stream.run(connect_timeout_s=0.01)


async def test_stream_broken_off_while_it_connects_sends_nothing() -> None:
    heard: list[bytes] = []

    async def answer(client: SocketStream) -> None:
        with pytest.raises(GONE):
            heard.append(await client.receive())

    async with serving(answer) as url:
        stream = PostStream(url, b"{}", lambda data: False)
        stream.break_off("too late")
        with pytest.raises(StreamBroken, match="too late"):
            await stream.run(connect_timeout_s=5.0)
    assert heard == []
