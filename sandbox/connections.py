"""Bounds on the service's connections: their number and their idle time.

    opened ──> waits for a request ──> has one ──> waits for the next ...
                 └── after a timeout, or to make room for a new connection: closed

`Connections` decides and `ConnectionLimiter` acts, by protocols between the event loop and
aiohttp's handlers of connections, which are the keys: aiohttp bounds neither the number of
connections nor the time that the head of a request may take. Requests in progress are subject to
the service's deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sys
import termios
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import anyio

SWEEP_EVERY_S = 0.25


@dataclass
class _Wait:
    until: float
    has_begun: bool
    """Whether part of the next request has arrived."""


class Connections:
    """Decides which waiting connections must be closed. Pure: the time is an argument."""

    def __init__(self, max_connections: int, request_s: float, idle_s: float) -> None:
        """
        Args:
            request_s: time limit of a request's head, from its first byte or from the start of the
                connection.
            idle_s: time limit between two requests.
        """
        self._max_connections = max_connections
        self._request_s = request_s
        self._idle_s = idle_s
        self._waiting: dict[Hashable, _Wait] = {}  # longest wait first
        self._busy: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._busy)

    def opened(self, key: Hashable, now: float) -> Hashable | None:
        """Count a new connection; return the one to close in exchange, if any."""
        replaced = None
        if len(self) >= self._max_connections and self._waiting:
            replaced = next(iter(self._waiting))
            self.closed(replaced)
        self._waiting[key] = _Wait(now + self._request_s, has_begun=True)
        return replaced

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
    """Closes connections as `Connections` decides, those that are overdue while `sweep` runs."""

    def __init__(self, connections: Connections) -> None:
        self.connections = connections
        self._transports: dict[Hashable, asyncio.Transport] = {}
        self._unsent: dict[Hashable, int] = {}

    async def sweep(self) -> None:
        """Close connections that are overdue, until cancelled."""
        while True:
            await anyio.sleep(SWEEP_EVERY_S)
            now = time.monotonic()
            for key in self.connections.overdue(now):
                unsent = _num_unsent(self._transports[key])
                if unsent and unsent != self._unsent.get(key):
                    self._unsent[key] = unsent
                    self.connections.prolong(key, now)
                else:
                    self._close(key)

    @contextlib.contextmanager
    def request(self, key: Hashable) -> Iterator[None]:
        """Mark a connection as busy with a request while the context is open."""
        self.connections.began(key)
        try:
            yield
        finally:
            self.connections.ended(key, time.monotonic())

    def opened(self, key: Hashable, transport: asyncio.Transport) -> None:
        replaced = self.connections.opened(key, time.monotonic())
        self._transports[key] = transport
        if replaced is not None:
            self._close(replaced)

    def closed(self, key: Hashable) -> asyncio.Transport | None:
        self.connections.closed(key)
        self._unsent.pop(key, None)
        return self._transports.pop(key, None)

    def _close(self, key: Hashable) -> None:
        if transport := self.closed(key):
            transport.abort()


def _num_unsent(transport: asyncio.Transport) -> int:
    """Return the number of bytes that the peer has not received, here and in the kernel."""
    in_kernel = bytearray(4)
    with contextlib.suppress(OSError):  # the socket is closed
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, in_kernel)
    return transport.get_write_buffer_size() + int.from_bytes(in_kernel, sys.byteorder)


class LimitedProtocol(asyncio.Protocol):
    """Forwards the events of a connection to its handler, and tells the limiter of them."""

    def __init__(self, limiter: ConnectionLimiter, handler: asyncio.Protocol) -> None:
        self._limiter = limiter
        self._handler = handler
        self.eof_received = handler.eof_received  # type: ignore[method-assign]
        self.pause_writing = handler.pause_writing  # type: ignore[method-assign]
        self.resume_writing = handler.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._limiter.opened(self._handler, transport)  # type: ignore[arg-type]
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._limiter.connections.received(self._handler, time.monotonic())
        self._handler.data_received(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._limiter.closed(self._handler)
        self._handler.connection_lost(error)
