"""The host's end of a computer's connection (guest.py has the other, and the frames).

A frame is handled in the step in which it arrives. Output of commands is bounded by whoever asked
for it; what comes from and goes to files moves a chunk at a time, when the other end has asked.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import socket
from collections.abc import AsyncIterator, Callable
from typing import cast

import anyio
import orjson

from agentloop.sandbox.computer.guest import CHUNK_BYTES, HEADER
from agentloop.sandbox.computer.guest_files import GuestFrame
from agentloop.sandbox.errors import ComputerLost

MAX_FRAME_BYTES = 64 << 20
OOM_NOTICE_S = 2.0
FILE_STALL_S = 60.0
"""Time for one chunk of a file: a process of the computer can stop the one that moves it."""


class ComputerEnded(OSError):
    """A computer that its own programs have ended."""


class PendingRequest:
    """A request that is under way: its output, and its end."""

    def __init__(self, id: int, on_output: Callable[[int, bytes], None]) -> None:
        self.id = id
        self.on_output = on_output
        self.done: GuestFrame | None = None
        self.acks = 0
        self._changed = anyio.Event()

    def notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def changed(self) -> None:
        await self._changed.wait()  # no deadline: the caller has one


class ComputerChannel(asyncio.Protocol):
    """A connection to a computer's first process, and the requests on it."""

    def __init__(self) -> None:
        self.ready_or_lost = anyio.Event()
        self.disconnected = anyio.Event()
        self.lost = anyio.Event()
        self.why = ""
        self.is_by_program = False
        self._ran_out = anyio.Event()  # of memory
        self._ran_out_at = -math.inf
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._requests: dict[int, PendingRequest] = {}
        self._ids = itertools.count(1)

    # -- transport ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._transport is not None:  # nobody else may connect
            cast(asyncio.Transport, transport).abort()
            return
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            size, num_data = HEADER.unpack_from(self._buffer)
            if size + num_data > MAX_FRAME_BYTES:
                self.lose("it has sent a frame that is too long")
                return
            start, end = HEADER.size + size, HEADER.size + size + num_data
            if len(self._buffer) < end:
                return
            message = orjson.loads(self._buffer[HEADER.size : start])
            payload = bytes(self._buffer[start:end])
            del self._buffer[:end]
            self._handle(message, payload)

    def connection_lost(self, error: Exception | None) -> None:
        self.disconnected.set()  # `watch` finds out why
        self.ready_or_lost.set()

    async def watch(self) -> None:
        """Wait until the connection has ended, and then end the computer.

        Where the engine may not protect the first process, programs can end it by using up the
        memory. That says nothing about the infrastructure.
        """
        await self.disconnected.wait()  # no deadline: as long as it is used
        if not self.lost.is_set():
            if self._ran_out_at < anyio.current_time() - OOM_NOTICE_S:
                with anyio.move_on_after(OOM_NOTICE_S):
                    await self._ran_out.wait()
            is_by_program = self._ran_out_at > anyio.current_time() - 2 * OOM_NOTICE_S
            why = "its memory was used up" if is_by_program else "its connection ended"
            self.lose(why, by_program=is_by_program)

    def note_oom(self) -> None:
        """Note that the kernel has killed a process of the computer for memory."""
        self._ran_out_at = anyio.current_time()
        self._ran_out.set()
        self._ran_out = anyio.Event()

    def lose(self, why: str, *, by_program: bool = False) -> None:
        """End the connection, and with it the computer."""
        if self.lost.is_set():
            return
        self.why, self.is_by_program = why, by_program
        self.lost.set()
        self.disconnected.set()
        self.ready_or_lost.set()
        if self._transport is not None:
            self._transport.abort()
        for request in list(self._requests.values()):
            request.notify()

    def hand_over(self) -> socket.socket:
        """Return the connection, for one that reads it from now on, up to its end."""
        assert self._transport is not None
        self._transport.pause_reading()
        return socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))

    # -- requests -----------------------------------------------------------------------------

    def open(self, on_output: Callable[[int, bytes], None]) -> PendingRequest:
        request = PendingRequest(next(self._ids), on_output)
        self._requests[request.id] = request
        return request

    def close(self, request: PendingRequest) -> None:
        self._requests.pop(request.id, None)

    def send(self, message: GuestFrame, data: bytes = b"") -> None:
        """Send a frame. Raises ComputerLost."""
        self.check()
        if self.disconnected.is_set():
            return  # `watch` finds out why
        assert self._transport is not None
        body = orjson.dumps(message)
        self._transport.write(HEADER.pack(len(body), len(data)) + body + data)

    def check(self) -> None:
        """Raise ComputerLost or ComputerEnded if the computer is gone."""
        if self.lost.is_set():
            if self.is_by_program:
                raise ComputerEnded(5, f"the computer was ended: {self.why}")
            raise ComputerLost(f"the computer was lost: {self.why}")

    def _handle(self, message: GuestFrame, payload: bytes) -> None:
        if message["op"] == "ready":
            self.ready_or_lost.set()
            return
        request = self._requests.get(message["id"])
        if request is None:
            return
        match message["op"]:
            case "out":
                request.on_output(message["stream"], payload)
            case "ack":
                request.acks += 1
            case "done":
                request.done = message
        request.notify()

    async def until_done(self, request: PendingRequest) -> GuestFrame:
        """Wait for the end of a request. Raises ComputerLost."""
        while request.done is None:
            self.check()
            await request.changed()
        return request.done


class FileRequest:
    """A child of the computer that moves files: bytes to it, and bytes from it.

    Raises:
        ComputerLost: also where the child has taken nothing for a minute.
        OSError: what the child could not do, with the path inside.
    """

    def __init__(self, channel: ComputerChannel, user: str, request: GuestFrame) -> None:
        self._channel = channel
        self._request = channel.open(self._take)
        self._chunks: list[bytes] = []
        self._error = bytearray()
        self._num_sent = 0
        channel.send({**request, "op": "file", "id": self._request.id, "user": user})

    def _take(self, stream: int, data: bytes) -> None:
        if stream == 1:
            self._chunks.append(data)
        else:
            self._error += data[: (16 << 10) - len(self._error)]
            self._ask_more(2)

    async def feed(self, data: bytes) -> None:
        """Send bytes, and wait until the child has taken them."""
        for start in range(0, len(data), CHUNK_BYTES):
            if self._request.done is not None:
                return  # its end says why
            self._send("data", data[start : start + CHUNK_BYTES])
            self._num_sent += 1
            with anyio.fail_after(FILE_STALL_S):
                while self._request.acks < self._num_sent and self._request.done is None:
                    self._channel.check()
                    await self._request.changed()

    def end_data(self) -> None:
        if self._request.done is None:
            self._send("eof")

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield what the child writes, until its end."""
        while True:
            while self._chunks:
                yield self._chunks.pop(0)
                self._ask_more(1)
            if self._request.done is not None:
                break
            self._channel.check()
            with anyio.fail_after(FILE_STALL_S):
                await self._request.changed()
        self.check()

    async def finish(self) -> None:
        """Wait for the end of a child that writes nothing."""
        self.end_data()
        async for _ in self.chunks():  # no deadline: each chunk has one
            pass

    def check(self) -> None:
        done = self._request.done
        if done is None or not done["status"]:
            return
        try:
            error = orjson.loads(bytes(self._error))
            raise OSError(error["errno"], error["message"], error["path"])
        except orjson.JSONDecodeError:
            text = done.get("error") or self._error.decode(errors="replace").strip()
            what = text.rpartition("\n")[2] or f"its child ended with status {done['status']}"
            raise OSError(5, what) from None

    def close(self) -> None:
        """Kill the child if it has not ended."""
        if self._request.done is None and not self._channel.lost.is_set():
            self._send("kill")
        self._channel.close(self._request)

    def _ask_more(self, stream: int) -> None:
        if self._request.done is None:
            self._channel.send({"op": "more", "id": self._request.id, "stream": stream})

    def _send(self, op: str, data: bytes = b"") -> None:
        self._channel.send({"op": op, "id": self._request.id}, data)
