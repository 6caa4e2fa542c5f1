"""The proxies of a computer, and connections to its ports.

    program ──127.0.0.1:3128──┐ in the computer, which has no other network
                              │ a socket of that network, held by this process
    EgressProxy: read, check, look the name up, check its addresses ──> server
    PathProxy: read, check the path ──> one server of ours

The kernel lets nothing else out: there is no interface but the loopback. The computer's first
process makes the sockets and passes them to us (guest.py); no program has a part in them.
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from urllib.parse import urlsplit

import anyio
from anyio.abc import ByteStream, SocketListener, SocketStream, TaskGroup

from agentloop.sandbox.computer.egress import (
    TLS_PORT,
    Address,
    AllowList,
    ProxyRequest,
    Refused,
    is_public,
    parse_request,
    read_address,
)
from agentloop.sandbox.errors import SandboxError

PORT = 3128  # inside
MAX_CONNECTIONS = 32
NUM_LOOKUPS = 2  # at a time, of one computer
HEAD_TIMEOUT_S, CONNECT_TIMEOUT_S = 30.0, 15.0
IDLE_S = 300.0  # without a byte in either direction
SOCKET_TIMEOUT_S, ACCEPT_PAUSE_S = 10.0, 0.2
MAX_HEAD_BYTES, END_OF_HEAD = 32 << 10, b"\r\n\r\n"
HANDSHAKE = b"\x16"  # the first byte of TLS
ENDED = (
    *(OSError, SandboxError),
    *(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError),
)

ENVIRONMENT = [
    f"{name}={value}"
    for value, lower in (
        (f"http://127.0.0.1:{PORT}", ("http_proxy", "https_proxy", "all_proxy")),
        ("localhost,127.0.0.1,::1", ("no_proxy",)),
    )
    for name in (*lower, *map(str.upper, lower))  # programs know one or the other
]


class GuestSockets:
    """TCP sockets in a computer's network, which its first process makes for us."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._lock = anyio.Lock()

    async def _make(self) -> socket.socket:
        async with self._lock:  # no deadline: each holder has one
            # A caller who went away would leave the next one an answer. That does for it, too.
            with anyio.fail_after(SOCKET_TIMEOUT_S, shield=True):
                self._connection.send(b"\0")
                await anyio.wait_readable(self._connection)
            _, fds, _, _ = socket.recv_fds(self._connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not fds:
            raise OSError(24, "the computer is gone, or can't make a socket")
        made = socket.socket(fileno=fds[0])
        made.setblocking(False)
        return made

    @asynccontextmanager
    async def connect(self, port: int) -> AsyncIterator[SocketStream]:
        """Connect to a port of the computer's loopback. Raises OSError."""
        made = await self._make()
        try:
            with anyio.fail_after(SOCKET_TIMEOUT_S):
                await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", port))
            stream = await SocketStream.from_socket(made)
        except BaseException:
            made.close()
            raise
        async with stream:
            yield stream

    async def listen(self, port: int) -> SocketListener:
        """Listen on a port of the computer's loopback. Raises OSError."""
        made = await self._make()
        made.bind(("127.0.0.1", port))
        made.listen(MAX_CONNECTIONS)
        return await SocketListener.from_socket(made)

    def close(self) -> None:
        self._connection.close()


@asynccontextmanager
async def serving(
    group: TaskGroup,
    listener: SocketListener,
    handle: Callable[[SocketStream], Awaitable[None]],
    max_connections: int = MAX_CONNECTIONS,
) -> AsyncIterator[None]:
    """Handle a bounded number of connections at a time; the end closes them and the listener."""
    places = anyio.Semaphore(max_connections)

    async def attend(stream: SocketStream) -> None:
        try:
            async with stream:
                await handle(stream)
        except ENDED:
            pass  # either end is gone
        finally:
            places.release()

    async def serve() -> None:
        with scope:
            async with listener, anyio.create_task_group() as tasks:
                while True:
                    await places.acquire()  # no deadline: each connection has one
                    try:
                        # no deadline: until the computer ends
                        tasks.start_soon(attend, await listener.accept())
                    except OSError:  # we have too many descriptors: others wait in the kernel
                        places.release()
                        await anyio.sleep(ACCEPT_PAUSE_S)

    scope = anyio.CancelScope()
    group.start_soon(serve)
    try:
        yield
    finally:
        scope.cancel()


async def relay(
    near: ByteStream,
    far: ByteStream,
    outgoing: AsyncIterable[bytes],
    one_answer: bool = False,
    idle_s: float = IDLE_S,
) -> None:
    """Copy both ways until both have ended, or nothing has moved for long.

    Args:
        outgoing: what `far` gets of what `near` sends.
        one_answer: end when `far` does.
    """
    with anyio.move_on_after(idle_s) as scope:

        async def copy(source: AsyncIterable[bytes], target: ByteStream) -> None:
            try:
                with suppress(anyio.EndOfStream):
                    # no deadline: the scope has one
                    async for data in source:
                        await target.send(data)  # no deadline: likewise
                        scope.deadline = anyio.current_time() + idle_s
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

    idle_s = IDLE_S

    def __init__(self, allowed: AllowList) -> None:
        self._allowed = allowed
        self._lookups = anyio.CapacityLimiter(NUM_LOOKUPS)

    async def handle(self, near: SocketStream) -> None:
        """Handle a connection: one request, or a tunnel."""
        try:
            with anyio.fail_after(HEAD_TIMEOUT_S):
                head, rest = await _receive_head(near)
            request = self._parse(head)
            with anyio.fail_after(CONNECT_TIMEOUT_S):
                far = await self._connect(request.host, request.port)
        except Refused as error:
            await _send(near, "403 Forbidden", f"agentloop: {error}\n")
            return
        except OSError as error:
            await _send(near, "502 Bad Gateway", f"agentloop: {error.strerror or 'no answer'}\n")
            return
        async with far:
            if request.head is None:
                await _send(near, "200 Connection established")
                await relay(near, far, _tunnelled(near, request, rest))
            else:
                outgoing = _one_request(near, request, rest)
                await relay(near, far, outgoing, one_answer=True, idle_s=self.idle_s)

    def _parse(self, head: bytes) -> ProxyRequest:
        return parse_request(head)

    async def _connect(self, host: str | Address, port: int) -> SocketStream:
        """Connect to a host by an address that may be reached. Raises Refused, OSError."""
        if not self._allowed.has(host, port):
            raise Refused(f"{host} is not listed with port {port}")
        if not isinstance(host, str):
            return await anyio.connect_tcp(str(host), port)
        look_up = partial(socket.getaddrinfo, host.encode(), port, type=socket.SOCK_STREAM)
        rows = await anyio.to_thread.run_sync(
            look_up, abandon_on_cancel=True, limiter=self._lookups
        )
        failure: Exception = Refused(f"{host} has no public address, and none that is listed")
        for address in dict.fromkeys(read_address(str(row[4][0])) for row in rows):
            if self._allowed.has(address, port) or (is_public(address) and not _is_ours(address)):
                try:
                    return await anyio.connect_tcp(str(address), port)
                except OSError as error:
                    failure = error
        raise failure


class PathProxy(EgressProxy):
    """A server for requests to the paths below one URL, `http://ADDRESS:PORT/PATH`, alone."""

    idle_s = math.inf  # a model may take long; the computer's program has a deadline

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        super().__init__(AllowList.parse(f"allow:{place.netloc}"))
        self._origin, self._path = f"http://{place.netloc}".encode(), f"{place.path}/".encode()

    def _parse(self, head: bytes) -> ProxyRequest:
        method, _, rest = head.partition(b" ")
        if not rest.startswith(self._path):
            raise Refused("nothing is served here but paths of the address that was given")
        return parse_request(method + b" " + self._origin + rest)


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
        data += await near.receive()  # no deadline: the caller has one
    if not 0 <= end <= MAX_HEAD_BYTES:
        raise Refused("the head is too long")
    return data[:end], data[end + len(END_OF_HEAD) :]


async def _send(near: SocketStream, status: str, body: str = "") -> None:
    length = f"Content-Length: {len(body)}\r\nConnection: close\r\n" if body else ""
    with anyio.fail_after(HEAD_TIMEOUT_S):
        await near.send(f"HTTP/1.1 {status}\r\n{length}\r\n{body}".encode())


async def _one_request(
    near: SocketStream, request: ProxyRequest, data: bytes
) -> AsyncIterator[bytes]:
    """Yield a request, its body, and nothing that comes behind it."""
    yield request.head or b""
    left = request.body_bytes
    while True:
        if len(data) > left:
            raise Refused("one request for each connection")
        left -= len(data)
        yield data
        data = await near.receive()  # no deadline: relay has one


async def _tunnelled(
    near: SocketStream, request: ProxyRequest, data: bytes
) -> AsyncIterator[bytes]:
    """Yield all bytes, after a look at the first ones.

    TLS must ask for the server to whom the tunnel leads: many share the addresses of one provider.
    """
    data = data or await near.receive()  # no deadline: relay has one
    if isinstance(request.host, str) and (request.port == TLS_PORT or data[:1] == HANDSHAKE):
        data = await _check_hello(near, data, request.host)
    yield data
    async for data in near:  # no deadline: likewise
        yield data


async def _check_hello(near: SocketStream, data: bytes, host: str) -> bytes:
    """Return the first message of a TLS client. Raises Refused if it asks for another server."""
    names: list[str | None] = []

    def take(tls: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> int:
        names.append(name and name.lower())
        return ssl.ALERT_DESCRIPTION_HANDSHAKE_FAILURE  # of this reader, which nobody hears

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sni_callback = take
    incoming = ssl.MemoryBIO()
    reader = context.wrap_bio(incoming, ssl.MemoryBIO(), server_side=True)
    incoming.write(data)
    while len(data) <= MAX_HEAD_BYTES:
        try:
            reader.do_handshake()
        except ssl.SSLWantReadError:
            more = await near.receive()  # no deadline: relay has one
            data += more
            incoming.write(more)
        except ssl.SSLError:
            break
    if names != [host]:
        raise Refused(f"this is no TLS with {host}")
    return data
