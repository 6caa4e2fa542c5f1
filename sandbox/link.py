"""The supervisor's side of one worker: who is waiting for which answer.

Decisions are synchronous: a frame that arrives settles its call and frees its slot in the same
step, and the owner (the pool) is told by a callback. There is no reader task to fall behind.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, cast

import anyio

from sandbox.errors import LostBy, ProtocolError, SandboxUnavailable
from sandbox.protocol import FrameReader, encode

BEAT_S = 5.0
MAX_SILENT_BEATS = 3  # then a worker counts as hung

_ids = itertools.count(1)


def next_id() -> int:
    return next(_ids)


class Pending:
    """A call that a worker has and has not answered. `reply` stays None if the worker is lost."""

    __slots__ = ("done", "reply")

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.reply: dict[str, Any] | None = None


class OpenSession:
    """A session that its owner has not closed yet."""

    __slots__ = ("has_begun", "lost_by")

    def __init__(self) -> None:
        self.has_begun = False  # the cell that opens it has been sent
        self.lost_by: LostBy | None = None


class Link:
    """Frames to and from one worker, over whatever carries bytes."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.ready = anyio.Event()
        self.lost = anyio.Event()
        self.hello: dict[str, Any] = {}
        self.why = ""  # set when the worker told why it dies, or when we know
        self.pending: dict[int, Pending] = {}
        self.sessions: dict[int, OpenSession] = {}
        self.write: Callable[[bytes], None] = lambda data: None
        self.on_settled: Callable[[], None] = lambda: None
        self._reader = FrameReader()
        self._heard = False

    def submit(self, message: dict[str, Any]) -> Pending:
        """Send a call; its answer arrives in the Pending. Raises ProtocolError for one that is
        longer than a frame can be."""
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

    def tell(self, message: dict[str, Any]) -> None:
        if not self.lost.is_set():
            self.write(encode(message))

    def open_session(self, session_id: int) -> OpenSession:
        """Take note of a session: its process is started by its first cell."""
        session = self.sessions[session_id] = OpenSession()
        return session

    def close_session(self, session_id: int) -> None:
        """End a session's process; what the worker says of it from now on is ignored."""
        session = self.sessions.pop(session_id)
        if session.has_begun:
            self.tell({"op": "close", "session": session_id})

    async def watch(self) -> None:
        """Return when the worker is lost; lose it if it says nothing for some beats in a row.

        Beats are counted, not seconds: where our own loop was held up, there was no time to hear.
        """
        num_silent = 0
        while not self.lost.is_set():
            self._heard = False
            self.tell({"op": "ping"})
            with anyio.move_on_after(BEAT_S):
                await self.lost.wait()
            num_silent = 0 if self._heard else num_silent + 1
            if num_silent == MAX_SILENT_BEATS:
                self.lose(f"it said nothing for {MAX_SILENT_BEATS * BEAT_S:g} s")

    def feed(self, data: bytes) -> None:
        self._heard = True
        try:
            for message in self._reader.feed(data):
                self._on_message(message)
        except ProtocolError as error:
            self.lose(str(error))

    def lose(self, why: str) -> None:
        """The worker is gone: every open call is settled without an answer."""
        if self.lost.is_set():
            return
        self.why = self.why or why
        self.lost.set()
        for call_id in list(self.pending):
            self._settle(call_id, None)

    def _on_message(self, message: dict[str, Any]) -> None:
        match message.get("op"):
            case "done":
                self._settle(message["id"], message)
            case "ready":
                self.hello = message
                self.ready.set()
            case "session_lost":
                self._on_session_lost(message)
            case "pong":
                pass
            case "fatal":
                self.why = str(message.get("why"))
            case other:
                raise ProtocolError(f"unknown message {other!r}")

    def _on_session_lost(self, message: dict[str, Any]) -> None:
        session = self.sessions.get(message["session"])
        if session is not None and session.lost_by is None:  # else it is told again
            session.lost_by = LostBy(message.get("by", LostBy.INFRASTRUCTURE))
        if "id" in message:  # a cell that has not run
            self._settle(message["id"], None)

    def _settle(self, call_id: int, reply: dict[str, Any] | None) -> None:
        pending = self.pending.pop(call_id, None)
        if pending is not None:
            pending.reply = reply
            pending.done.set()
            self.on_settled()


class SocketProtocol(asyncio.Protocol):
    """A Link over a socket: bytes go straight from the loop into the frame reader."""

    def __init__(self, link: Link, greeting: bytes = b"") -> None:
        self._link = link
        self._greeting = greeting
        self._transport: asyncio.Transport | None = None

    def connection_made(self, made: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, made)  # uvloop's is one, but not by inheritance
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
        """Close it, also where the other end has not read what was written."""
        if self._transport is not None:
            self._transport.abort()


async def wait_ready(link: Link, timeout_s: float) -> None:
    """Until the worker says that it is ready. Raises SandboxUnavailable with what is known."""
    with anyio.move_on_after(timeout_s):
        async with anyio.create_task_group() as group:

            async def fail_early() -> None:
                await link.lost.wait()  # no deadline: it ends with the wait beside it
                group.cancel_scope.cancel()

            group.start_soon(fail_early)
            await link.ready.wait()
            group.cancel_scope.cancel()
    if not link.ready.is_set():
        why = link.why or f"it was not ready after {timeout_s:g} s"
        raise SandboxUnavailable(f"worker {link.worker_id} did not start: {why}")
