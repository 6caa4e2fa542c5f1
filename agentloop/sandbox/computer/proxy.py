"""The proxy of a computer with an allow-list, and connections to its ports.

    program ──127.0.0.1:3128──┐ in the computer, which has no other network
                              │ a socket of the computer's, held by this process
    EgressProxy: read, check, look the name up, check its addresses ──> server

The kernel lets nothing else out: there is no interface but the loopback. The computer's first
process makes sockets in its network and passes them to us (guest.py), so its programs have no part
in what listens there, and bytes take no way around.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from ipaddress import ip_address

import anyio
from anyio.abc import SocketListener, SocketStream, TaskGroup, TaskStatus

from agentloop.sandbox.computer.egress import (
    HANDSHAKE,
    TLS_PORT,
    Address,
    AllowList,
    ProxyRequest,
    Refused,
    is_public,
    parse_request,
    plain,
    read_server_name,
)

PORT = 3128  # inside
MAX_CONNECTIONS = 32
NUM_LOOKUPS = 2  # at a time, of one computer
HEAD_TIMEOUT_S, CONNECT_TIMEOUT_S = 30.0, 15.0
IDLE_S = 300.0  # without a byte in either direction
SOCKET_TIMEOUT_S, ACCEPT_PAUSE_S = 10.0, 0.2
MAX_HEAD_BYTES, END_OF_HEAD = 32 << 10, b"\r\n\r\n"
ENDED = (OSError, anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)

_URL = f"http://127.0.0.1:{PORT}"
_LOCAL = "localhost,127.0.0.1,::1"
_VARIABLES = {"http_proxy": _URL, "https_proxy": _URL, "all_proxy": _URL, "no_proxy": _LOCAL}
ENVIRONMENT = [
    f"{name}={value}"
    for lower, value in _VARIABLES.items()
    for name in (lower, lower.upper())  # programs know one or the other
]

Handler = Callable[[SocketStream], Awaitable[None]]


class GuestSockets:
    """TCP sockets in a computer's network, which its first process makes for us."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._lock = anyio.Lock()

    async def _make(self) -> socket.socket:
        async with self._lock:
            # A caller who went away would leave the next one an answer. That does for it, too.
            with anyio.fail_after(SOCKET_TIMEOUT_S, shield=True):
                self._connection.send(b"\0")
                await anyio.wait_readable(self._connection)
            flags = socket.MSG_CMSG_CLOEXEC
            data, fds, _, _ = socket.recv_fds(self._connection, 1, 1, flags)
        if not fds:
            raise OSError(24, "the computer can't make a socket" if data else "it is gone")
        made = socket.socket(fileno=fds[0])
        made.setblocking(False)
        return made

    async def connect(self, port: int) -> SocketStream:
        """Connect to a port of the computer's loopback. Raises OSError."""
        made = await self._make()
        try:
            with anyio.fail_after(SOCKET_TIMEOUT_S):
                await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", port))
            return await SocketStream.from_socket(made)
        except BaseException:
            made.close()
            raise

    async def listen(self, port: int) -> SocketListener:
        """Listen on a port of the computer's loopback. Raises OSError."""
        made = await self._make()
        made.bind(("127.0.0.1", port))
        made.listen(MAX_CONNECTIONS)
        return await SocketListener.from_socket(made)

    def close(self) -> None:
        self._connection.close()


async def _serve(
    listener: SocketListener, handle: Handler, *, task_status: TaskStatus[anyio.CancelScope]
) -> None:
    """Handle connections until cancelled, a bounded number at a time; more wait in the kernel."""
    places = anyio.Semaphore(MAX_CONNECTIONS)

    async def attend(stream: SocketStream) -> None:
        try:
            async with stream:
                await handle(stream)
        except ENDED:
            pass  # either end is gone
        finally:
            places.release()

    async with listener, anyio.create_task_group() as group:
        task_status.started(group.cancel_scope)
        while True:
            await places.acquire()  # no deadline: each connection has one
            try:
                group.start_soon(attend, await listener.accept())
            except OSError:  # this process has too many descriptors: those who wait, wait
                places.release()
                await anyio.sleep(ACCEPT_PAUSE_S)


@asynccontextmanager
async def serving(
    group: TaskGroup, listener: SocketListener, handle: Handler
) -> AsyncIterator[None]:
    """Serve a listener; at the end it is closed, and its connections with it."""
    scope = await group.start(partial(_serve, listener, handle))
    try:
        yield
    finally:
        scope.cancel()


async def relay(
    near: SocketStream, far: SocketStream, outgoing: AsyncIterable[bytes], *, one_answer: bool
) -> None:
    """Copy both ways until both have ended, or nothing has moved for long.

    Args:
        outgoing: what `far` gets of what `near` sends.
        one_answer: end when `far` does.
    """
    with anyio.move_on_after(IDLE_S) as scope:

        async def copy(source: AsyncIterable[bytes], target: SocketStream) -> None:
            try:
                async for data in source:
                    await target.send(data)
                    scope.deadline = anyio.current_time() + IDLE_S
                await target.send_eof()
            except (*ENDED, Refused):
                scope.cancel()
            if one_answer and source is far:
                scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(copy, outgoing, far)
            group.start_soon(copy, far, near)


class EgressProxy:
    """An HTTP proxy that connects to what an allow-list has, and to nothing else."""

    def __init__(self, allowed: AllowList) -> None:
        self._allowed = allowed
        self._lookups = anyio.CapacityLimiter(NUM_LOOKUPS)

    async def handle(self, near: SocketStream) -> None:
        """Handle a connection: one request, or a tunnel."""
        try:
            with anyio.fail_after(HEAD_TIMEOUT_S):
                head, rest = await _receive_head(near)
            request = parse_request(head)
            far = await self._connect(request.host, request.port)
        except Refused as error:
            await _answer(near, "403 Forbidden", str(error))
            return
        except (OSError, TimeoutError) as error:
            await _answer(near, "502 Bad Gateway", error.strerror or "no connection")
            return
        async with far:
            if request.head is None:
                with anyio.fail_after(HEAD_TIMEOUT_S):
                    await near.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
                await relay(near, far, _tunnelled(near, request, rest), one_answer=False)
            else:
                await relay(near, far, _one_request(near, request, rest), one_answer=True)

    async def _connect(self, host: str, port: int) -> SocketStream:
        """Connect to a host by an address that may be reached. Raises Refused, OSError."""
        address = self._allowed.check_host(host, port)
        with anyio.fail_after(CONNECT_TIMEOUT_S):
            if address is not None:
                return await anyio.connect_tcp(str(address), port)
            admitted = [
                found
                for found in await self._look_up(host, port)
                if self._allowed.lists(found, port) or (is_public(found) and not _is_ours(found))
            ]
            if not admitted:
                raise Refused(f"{host} has no public address; that which it has is not listed")
            error: OSError | None = None
            for address in admitted:
                try:
                    return await anyio.connect_tcp(str(address), port)
                except OSError as failure:
                    error = failure
            assert error is not None
            raise error

    async def _look_up(self, host: str, port: int) -> list[Address]:
        try:
            rows = await anyio.to_thread.run_sync(
                partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM),
                abandon_on_cancel=True,
                limiter=self._lookups,
            )
        except (OSError, UnicodeError) as error:
            raise OSError(5, f"{host} is not known") from error
        return list(dict.fromkeys(plain(ip_address(row[4][0])) for row in rows))


def _is_ours(address: Address) -> bool:
    """Return whether the kernel would deliver to this machine itself; no packet is sent."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(address), TLS_PORT))
        except OSError:  # there is no way to it
            return False
        return str(probe.getsockname()[0]) == str(address)


async def _receive_head(near: SocketStream) -> tuple[bytes, bytes]:
    """Return the head of a request, and what came behind it."""
    data = b""
    while (end := data.find(END_OF_HEAD)) < 0 and len(data) <= MAX_HEAD_BYTES:
        data += await near.receive()
    if not 0 <= end <= MAX_HEAD_BYTES:
        raise Refused("the head is too long")
    return data[:end], data[end + len(END_OF_HEAD) :]


async def _answer(near: SocketStream, status: str, reason: str) -> None:
    body = f"agentloop: {reason}\n".encode()
    with anyio.fail_after(HEAD_TIMEOUT_S):
        await near.send(
            f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n".encode()
            + body
        )


async def _one_request(
    near: SocketStream, request: ProxyRequest, rest: bytes
) -> AsyncIterator[bytes]:
    """Yield a request, its body, and nothing that comes behind it."""
    assert request.head is not None
    yield request.head
    left = request.body_bytes
    async for data in _all(near, rest):
        if len(data) > left:
            raise Refused("one request for each connection")
        left -= len(data)
        yield data


async def _tunnelled(
    near: SocketStream, request: ProxyRequest, rest: bytes
) -> AsyncIterator[bytes]:
    """Yield all bytes, after a look at the first ones.

    TLS must ask for the server to whom the tunnel leads: many share the addresses of one provider.
    """
    chunks = _all(near, rest)
    data = await anext(chunks, b"")
    if request.is_name and (request.port == TLS_PORT or data[:1] == HANDSHAKE):
        while (name := read_server_name(data)) is None:
            data += await near.receive()
        if name != request.host:
            raise Refused(f"this tunnel leads to {request.host}")
    yield data
    async for data in chunks:
        yield data


async def _all(near: SocketStream, first: bytes) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for data in near:
        yield data
