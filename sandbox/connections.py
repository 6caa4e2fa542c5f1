"""Bounds on the service's connections: their number and their idle time.

    opened ──> waits for a request ──> has one ──> waits for the next ...
                 └── after a timeout, or to make room for a new connection: closed

`Connections` decides and `ConnectionLimiter` acts, with a protocol between the event loop and
aiohttp's handler of a connection: aiohttp bounds neither the number of connections nor the time
that the head of a request may take. Requests in progress are subject to the service's deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sys
import termios
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Self

import anyio

SWEEP_EVERY_S = 0.25


@dataclass
class _Wait:
    until: float
    has_begun: bool
    """Whether part of the next request has arrived."""


class Connections:
    """Decides which waiting connections must be closed. Pure: the time is an argument."""

    def __init__(self, most: int, request_s: float, idle_s: float) -> None:
        """
        Args:
            most: largest number of connections.
            request_s: time limit of a request's head, from its first byte or from the start of the
                connection.
            idle_s: time limit between two requests.
        """
        self._most = most
        self._request_s = request_s
        self._idle_s = idle_s
        self._waiting: dict[Hashable, _Wait] = {}  # longest wait first
        self._busy: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._busy)

    def opened(self, key: Hashable, now: float) -> Hashable | None:
        """Count a new connection; return the one to close in exchange, if any."""
        in_the_way = None
        if len(self) >= self._most and self._waiting:
            in_the_way = next(iter(self._waiting))
            self.closed(in_the_way)
        self._waiting[key] = _Wait(now + self._request_s, has_begun=True)
        return in_the_way

    def received(self, key: Hashable, now: float) -> None:
        """Note the arrival of bytes. Only the first bytes of a request start its time limit."""
        wait = self._waiting.get(key)
        if wait is not None and not wait.has_begun:
            wait.has_begun, wait.until = True, now + self._request_s

    def began(self, key: Hashable) -> None:
        if self._waiting.pop(key, None) is not None:
            self._busy.add(key)

    def ended(self, key: Hashable, now: float) -> None:
        """Note that a request has been answered."""
        if key in self._busy:
            self._busy.remove(key)
            self._waiting[key] = _Wait(now + self._idle_s, has_begun=False)

    def closed(self, key: Hashable) -> None:
        self._waiting.pop(key, None)
        self._busy.discard(key)

    def overdue(self, now: float) -> list[Hashable]:
        return [key for key, wait in self._waiting.items() if wait.until <= now]

    def prolong(self, key: Hashable, now: float) -> None:
        """Prolong a connection that is overdue but still reading its last response."""
        self._waiting[key].until = now + self._request_s


class ConnectionLimiter:
    """A protocol factory that closes connections which wait for too long.

    Use it as `async with ConnectionLimiter(...) as limiter: create_server(limiter, ...)`.
    """

    def __init__(self, connections: Connections, make_handler: Callable[[], asyncio.Protocol]):
        self._connections = connections
        self._make_handler = make_handler
        self._open: dict[Hashable, asyncio.Transport] = {}
        self._unsent: dict[Hashable, int] = {}

    async def __aenter__(self) -> Self:
        self._group = await anyio.create_task_group().__aenter__()
        self._group.start_soon(self._sweep)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._group.cancel_scope.cancel()
        # Without the block's error, which is then raised as it is, not in an exception group.
        await self._group.__aexit__(None, None, None)

    def __call__(self) -> asyncio.Protocol:
        return _LimitedProtocol(self, self._make_handler())

    async def _sweep(self) -> None:
        while True:
            await anyio.sleep(SWEEP_EVERY_S)
            now = time.monotonic()
            for key in self._connections.overdue(now):
                unsent = _num_unsent(self._open[key])
                if unsent and unsent != self._unsent.get(key):
                    self._unsent[key] = unsent
                    self._connections.prolong(key, now)
                else:
                    self.close(key)

    @contextlib.contextmanager
    def request(self, key: Hashable) -> Iterator[None]:
        """Mark a connection as busy with a request while the context is open."""
        self._connections.began(key)
        try:
            yield
        finally:
            self._connections.ended(key, time.monotonic())

    def opened(self, key: Hashable, transport: asyncio.Transport) -> None:
        in_the_way = self._connections.opened(key, time.monotonic())
        self._open[key] = transport
        if in_the_way is not None:
            self.close(in_the_way)

    def received(self, key: Hashable) -> None:
        self._connections.received(key, time.monotonic())

    def close(self, key: Hashable) -> None:
        transport = self._open.get(key)
        self.closed(key)
        if transport is not None:
            transport.abort()

    def closed(self, key: Hashable) -> None:
        self._connections.closed(key)
        self._open.pop(key, None)
        self._unsent.pop(key, None)


def _num_unsent(transport: asyncio.Transport) -> int:
    """Return the number of bytes that the peer has not received, here and in the kernel."""
    in_kernel = bytearray(4)
    with contextlib.suppress(OSError):  # the socket is closed
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, in_kernel)
    return transport.get_write_buffer_size() + int.from_bytes(in_kernel, sys.byteorder)


class _LimitedProtocol(asyncio.Protocol):
    """Forwards all events to the handler, which is the connection's key."""

    def __init__(self, limiter: ConnectionLimiter, handler: asyncio.Protocol) -> None:
        self._limiter = limiter
        self._handler = handler

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._limiter.opened(self._handler, transport)  # type: ignore[arg-type]
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._limiter.received(self._handler)
        self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self._handler.eof_received()

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._limiter.closed(self._handler)
        self._handler.connection_lost(error)
