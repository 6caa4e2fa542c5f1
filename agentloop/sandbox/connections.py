"""Bounds on the service's connections: their number and their idle time.

    opened ──> waits for a request ──> has one ──> waits for the next ...
                 └── after a timeout, or to make room for a new connection: closed

`Connections` decides; `close_overdue` and the protocol between the event loop and aiohttp's handler
of a connection act: aiohttp bounds neither the number of connections nor the time that the head of
a request may take. Requests in progress are subject to the service's deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sys
import termios
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import anyio

SWEEP_EVERY_S = 0.25

Key = TypeVar("Key", bound=Hashable)


@dataclass
class _Wait:
    until: float
    has_begun: bool
    """Whether part of the next request has arrived."""
    num_unsent: int = 0


class Connections(Generic[Key]):
    """Decides which waiting connections must be closed. Pure: the time is an argument.

    A key of None is that of a connection that is gone already.
    """

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
        self._waiting: dict[Key | None, _Wait] = {}  # longest wait first
        self._busy: set[Key | None] = set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._busy)

    def add(self, key: Key, now_s: float) -> Key | None:
        """Count a new connection; return the one to close in exchange, if any."""
        replaced = None
        if len(self) >= self._max_connections and self._waiting:
            replaced = next(iter(self._waiting))
            self.remove(replaced)
        self._waiting[key] = _Wait(now_s + self._request_s, has_begun=True)
        return replaced

    def receive(self, key: Key | None, now_s: float) -> None:
        """Note the arrival of bytes. Only the first bytes of a request start its time limit."""
        wait = self._waiting.get(key)
        if wait is not None and not wait.has_begun:
            wait.has_begun, wait.until = True, now_s + self._request_s

    def begin(self, key: Key | None) -> None:
        if self._waiting.pop(key, None) is not None:
            self._busy.add(key)

    def send(self, key: Key | None, now_s: float) -> None:
        """Note that a response is being sent, which its client must read."""
        self._wait(key, now_s + self._request_s)

    def end(self, key: Key | None, now_s: float) -> None:
        """Note that a request has been answered."""
        self._wait(key, now_s + self._idle_s)

    def _wait(self, key: Key | None, until: float) -> None:
        if key in self._busy or key in self._waiting:
            self.remove(key)
            self._waiting[key] = _Wait(until, has_begun=False)

    def remove(self, key: Key | None) -> None:
        self._waiting.pop(key, None)
        self._busy.discard(key)

    def overdue(self, now_s: float) -> list[Key]:
        waiting = self._waiting.items()
        return [key for key, wait in waiting if key is not None and wait.until <= now_s]

    def prolong(self, key: Key, num_unsent: int, now_s: float) -> bool:
        """Prolong an overdue connection if its peer is still reading its last response, of which
        so many bytes are left; return whether it is."""
        wait = self._waiting[key]
        if num_unsent in (0, wait.num_unsent):
            return False
        wait.num_unsent, wait.until = num_unsent, now_s + self._request_s
        return True


async def close_overdue(connections: Connections[asyncio.Transport]) -> None:
    """Close connections that have waited for too long, until cancelled."""
    while True:
        await anyio.sleep(SWEEP_EVERY_S)
        now_s = time.monotonic()
        for transport in connections.overdue(now_s):
            if not connections.prolong(transport, _num_unsent(transport), now_s):
                connections.remove(transport)
                transport.abort()


def _num_unsent(transport: asyncio.Transport) -> int:
    """Return the number of bytes that the peer has not received, here and in the kernel."""
    in_kernel = bytearray(4)
    with contextlib.suppress(OSError):  # the socket is closed
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, in_kernel)
    return transport.get_write_buffer_size() + int.from_bytes(in_kernel, sys.byteorder)


class LimitedProtocol(asyncio.Protocol):
    """Passes the events of a connection to its handler. `Connections` knows it by its transport."""

    def __init__(
        self, connections: Connections[asyncio.Transport], handler: asyncio.Protocol
    ) -> None:
        self._connections = connections
        self._handler = handler
        self._transport: asyncio.Transport | None = None
        self.eof_received = handler.eof_received  # type: ignore[method-assign]
        self.pause_writing = handler.pause_writing  # type: ignore[method-assign]
        self.resume_writing = handler.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        if replaced := self._connections.add(self._transport, time.monotonic()):
            replaced.abort()
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._connections.receive(self._transport, time.monotonic())
        self._handler.data_received(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.remove(self._transport)
        self._handler.connection_lost(error)
