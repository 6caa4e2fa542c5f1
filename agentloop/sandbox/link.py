"""The supervisor's end of a worker's connection: its open calls and sessions.

Decisions are synchronous: an arriving frame settles its call and frees its slot in the same step,
and a callback notifies the owner (the pool). There is no reader task that could fall behind.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import cast

import anyio

from agentloop.sandbox.errors import LostBy, ProtocolError, SandboxUnavailable
from agentloop.sandbox.protocol import FrameReader, WorkerReply, encode
from agentloop.sandbox.worker.connection import WorkerFrame

SPARE_BYTES = 16 << 20  # of a worker's limit: page tables and the like, beside a call's own memory
BEAT_S = 5.0
MAX_SILENT_BEATS = 3  # after that a worker is considered hung

next_id = itertools.count(1).__next__
"""Return a new id of a call or session."""


@dataclass(eq=False, slots=True)
class Pending:
    """A call in progress on a worker. `reply` stays None if the worker is lost."""

    done: anyio.Event = field(default_factory=anyio.Event)
    reply: WorkerReply | None = None


@dataclass(eq=False, slots=True)
class OpenSession:
    """A session that is open on a worker."""

    has_begun: bool = False  # whether its first cell has been sent
    lost_by: LostBy | None = None


class Link:
    """The protocol state of one worker's connection, independent of the transport."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.ready_or_lost = anyio.Event()
        self.lost = anyio.Event()
        self.hello: WorkerReply = {}
        self.why = ""  # the reason for its loss, if known
        self.pending: dict[int, Pending] = {}
        self.sessions: dict[int, OpenSession] = {}
        self.write: Callable[[bytes], None] = lambda data: None
        self.on_settled: Callable[[], None] = lambda: None
        self.on_worn: Callable[[], None] = lambda: None
        # Sets the memory limit of its cgroup, in bytes. Raises OSError where that is refused.
        self.set_memory: Callable[[int], Awaitable[None]] | None = None
        self._memory_bytes = math.nan  # that limit, beside its own bytes; nan: unknown
        self._reader = FrameReader()
        self._heard = False

    def submit(self, message: WorkerFrame) -> Pending:
        """Send a call; its reply arrives in the Pending.

        Raises:
            ProtocolError: the call is too long for a frame.
        """
        session = self.sessions.get(message.get("session", 0))
        data = encode({**message, "opens": True} if session and not session.has_begun else message)
        if session:
            session.has_begun = True
        pending = self.pending[message["id"]] = Pending()
        if self.lost.is_set():
            self._settle(message["id"], None)
        else:
            self.write(data)
        return pending

    async def limit_memory(self, num_bytes: int) -> None:
        """Limit the memory of its calls, beside what the worker needs for itself.

        A limit lower than the one in force is not set where the worker holds more, such as in a
        session or while the last call's processes end: then only what its call allocates itself is
        limited.

        Raises:
            SandboxUnavailable: the engine failed, or refused the limit, so that the one in force is
                lower or unknown.
        """
        if self.set_memory is None or num_bytes == self._memory_bytes:
            return
        in_force, self._memory_bytes = self._memory_bytes, math.nan  # if this is cancelled
        try:
            await self.set_memory(self.hello["own_bytes"] + SPARE_BYTES + num_bytes)
        except OSError as error:
            if not num_bytes < in_force:
                raise SandboxUnavailable(f"a worker's memory limit was not set: {error}") from error
            self._memory_bytes = in_force
        else:
            self._memory_bytes = num_bytes

    def tell(self, message: WorkerFrame) -> None:
        if not self.lost.is_set():
            self.write(encode(message))

    def open_session(self, session_id: int) -> OpenSession:
        """Register a session; its first cell will start its process."""
        session = self.sessions[session_id] = OpenSession()
        return session

    def close_session(self, session_id: int) -> None:
        """End a session's process and ignore further messages about it."""
        session = self.sessions.pop(session_id)
        if session.has_begun:
            self.tell({"op": "close", "session": session_id})

    async def watch(self) -> None:
        """Wait until the worker is lost; declare it lost if it is silent for several heartbeats.

        Heartbeats are counted, not seconds, because a blocked event loop would have received
        nothing.
        """
        num_silent = 0
        while not self.lost.is_set():
            self._heard = False
            self.tell({"op": "ping"})
            with anyio.move_on_after(BEAT_S):
                await self.lost.wait()
            num_silent = 0 if self._heard else num_silent + 1
            if num_silent == MAX_SILENT_BEATS:
                self.lose(f"it was silent for {MAX_SILENT_BEATS * BEAT_S:g} s")

    def feed(self, data: bytes) -> None:
        self._heard = True
        try:
            for message in self._reader.feed(data):
                self._on_message(cast(WorkerReply, message))
        except ProtocolError as error:
            self.lose(str(error))

    def lose(self, reason: str) -> None:
        """Mark the worker as lost and settle all open calls without a reply."""
        if self.lost.is_set():
            return
        self.why = self.why or reason
        self.lost.set()
        self.ready_or_lost.set()
        for call_id in list(self.pending):
            self._settle(call_id, None)

    def _on_message(self, message: WorkerReply) -> None:
        match message.get("op"):
            case "done":
                self._settle(message["id"], message)
            case "ready":
                self.hello = message
                self.ready_or_lost.set()
            case "session_lost":
                self._on_session_lost(message)
            case "worn":
                self.on_worn()
            case "pong":
                pass
            case "fatal":
                self.why = str(message.get("why"))
            case unknown:
                raise ProtocolError(f"unknown message {unknown!r}")

    def _on_session_lost(self, message: WorkerReply) -> None:
        session = self.sessions.get(message["session"])
        if session is not None and session.lost_by is None:  # keep the first cause
            session.lost_by = LostBy(message.get("by", LostBy.INFRASTRUCTURE))
        if "id" in message:  # of a cell that was not run
            self._settle(message["id"], None)

    def _settle(self, call_id: int, reply: WorkerReply | None) -> None:
        pending = self.pending.pop(call_id, None)
        if pending is not None:
            pending.reply = reply
            pending.done.set()
            self.on_settled()


class SocketProtocol(asyncio.Protocol):
    """The asyncio protocol of a Link over a socket, which passes bytes to the frame reader."""

    def __init__(self, link: Link, greeting: bytes = b"") -> None:
        self._link = link
        self._greeting = greeting
        self._transport: asyncio.Transport | None = None

    def connection_made(self, base: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, base)  # uvloop's transport does not inherit from it
        if self._transport is not None:  # one worker, one connection
            transport.abort()
            return
        self._transport = transport
        self._link.write = transport.write
        if self._greeting:
            transport.write(self._greeting)

    def data_received(self, data: bytes) -> None:
        self._link.feed(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._link.lose(f"its connection ended{f' ({error})' if error else ''}")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once, discarding data that the peer has not read."""
        if self._transport is not None:
            self._transport.abort()


async def wait_ready(link: Link, timeout_s: float) -> None:
    """Wait until the worker is ready. Raises SandboxUnavailable, with the reason if known."""
    with anyio.move_on_after(timeout_s):
        await link.ready_or_lost.wait()
    if not link.hello:
        reason = link.why or f"it was not ready after {timeout_s:g} s"
        raise SandboxUnavailable(f"worker {link.worker_id} did not start: {reason}")
