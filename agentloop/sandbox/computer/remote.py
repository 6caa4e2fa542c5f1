"""Computers on a `sandbox.serve` host, over WebSockets (host.py has the other end).

What follows /v1/computer/, its request, and what the host answers:

    take {image, network, limits}  {key, name, image, config}, the frames of guest.py both ways,
                                   {why, by_program}. The computer ends with the connection
    port {key, port}               {}, then bytes both ways; an empty message ends a direction
    changes {key}                  {changes}
    build {name}                   {}, or {missing}: pieces of a tar are each answered with {}, and
                                   an empty one behind them when the image is built
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from socket import SHUT_WR, socketpair
from socket import socket as Socket
from tempfile import TemporaryFile
from typing import TypeAlias, TypedDict, cast

import aiohttp
import anyio
import orjson
from aiohttp import WSMsgType, web
from anyio.abc import ByteStream, SocketListener, TaskGroup, TaskStatus

from agentloop.sandbox.computer.changes import Change
from agentloop.sandbox.computer.channel import ComputerChannel
from agentloop.sandbox.computer.images import FillFile
from agentloop.sandbox.computer.machine import ComputerMachine, ComputerSpec
from agentloop.sandbox.computer.proxy import relay
from agentloop.sandbox.container import ImageConfig
from agentloop.sandbox.errors import (
    Overloaded,
    ProgramUnsupported,
    SandboxError,
    SandboxUnavailable,
)
from agentloop.sandbox.remote import HEARTBEAT_S, MAX_MESSAGE_BYTES, HostBackend

PATH = "/v1/computer"
REFUSALS = {error.__name__: error for error in (Overloaded, ProgramUnsupported)}

WebSocket: TypeAlias = aiohttp.ClientWebSocketResponse | web.WebSocketResponse


class HostReply(TypedDict, total=False):
    """An answer of the host; `error` and `message` say why there is none."""

    key: str
    name: str
    image: str
    config: ImageConfig
    changes: list[Change]
    missing: bool
    why: str
    by_program: bool
    error: str
    message: str


class SocketBytes(ByteStream):
    """The binary messages of a WebSocket as a stream.

    Attributes:
        end: what the text message had that ended it; None as long as the other end is there.
    """

    def __init__(self, socket: WebSocket, *, half_closes: bool = True) -> None:
        self.end: HostReply | None = None
        self._socket, self._half_closes = socket, half_closes

    async def receive(self, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
        message = await self._socket.receive()  # no deadline: until the other end leaves
        if message.type is WSMsgType.BINARY:
            if not message.data:
                raise anyio.EndOfStream
            return cast(bytes, message.data)
        self.end = orjson.loads(message.data) if message.type is WSMsgType.TEXT else {}
        raise anyio.BrokenResourceError

    async def send(self, item: bytes) -> None:
        await self._socket.send_bytes(item)  # no deadline: the computer's heartbeat detects a loss

    async def send_eof(self) -> None:
        if self._half_closes:
            await self.send(b"")  # no deadline: likewise

    async def aclose(self) -> None:
        pass  # whoever has opened the WebSocket closes it


class FrameBytes(ByteStream):
    """A socket that frames go through. AnyIO's logs an error when it is cancelled at its end."""

    def __init__(self, socket: Socket) -> None:
        self._socket, self._loop = socket, asyncio.get_running_loop()

    async def receive(self, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
        if not (data := await self._loop.sock_recv(self._socket, max_bytes)):
            raise anyio.EndOfStream
        return data

    async def send(self, item: bytes) -> None:
        await self._loop.sock_sendall(self._socket, item)

    async def send_eof(self) -> None:
        self._socket.shutdown(SHUT_WR)

    async def aclose(self) -> None:
        self._socket.close()


async def carry(near: SocketBytes, frames: Socket) -> None:
    """Carry frames both ways until either end is gone."""
    async with FrameBytes(frames) as far:
        await relay(near, far, near, one_answer=True, idle_s=math.inf)


class HostPlace:
    """Computers on a host."""

    def __init__(self, host: HostBackend, folder: Path, group: TaskGroup) -> None:
        self.folder = folder
        self.images = {""}
        self._host, self._group = host, group
        self._num_own = self.num_promised = 0

    @property
    def max_computers(self) -> int:
        """Number of computers that there may be; 0 while the host is not connected."""
        link = self._host.link
        return link.hello["sessions"] if link and not link.lost.is_set() else 0

    @property
    def num_computers(self) -> int:
        # The host is late to tell of our own, and alone knows others'.
        return max(self._num_own, self._host.link.num_computers if self._host.link else 0)

    async def ensure_image(self, name: str, fill: FillFile) -> None:
        async with self._asking("build", name=name) as (socket, reply):
            if "missing" in reply:
                with TemporaryFile() as context:
                    await fill(context)
                    context.seek(0)
                    data = b"-"
                    while data:
                        data = context.read(MAX_MESSAGE_BYTES)
                        await socket.send_bytes(data)  # no deadline: it has a heartbeat
                        await self._answer(socket)

    async def take(self, spec: ComputerSpec) -> ComputerMachine:
        self._num_own += 1
        try:
            machine: ComputerMachine = await self._group.start(self._live, spec)
        except BaseException:
            self._num_own -= 1
            raise
        return machine

    def give_back(self, machine: ComputerMachine) -> None:
        self._num_own -= 1
        machine.channel.lose("it was closed")

    async def _live(self, spec: ComputerSpec, *, task_status: TaskStatus[ComputerMachine]) -> None:
        """Hold a computer until its channel is lost."""
        channel = ComputerChannel()
        try:
            async with self._asking("take", **asdict(spec)) as (socket, reply):
                inner, outer = socketpair()
                inner.setblocking(False)
                outer.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.connect_accepted_socket(lambda: channel, inner)
                async with anyio.create_task_group() as tasks:
                    key, spec = reply["key"], replace(spec, image=reply["image"])
                    about = spec, channel, tasks, reply["name"], reply["config"]
                    reach = (
                        partial(self._connect_port, key),
                        self._listen,
                        partial(self._list_changes, key),
                    )
                    task_status.started(ComputerMachine(*about, *reach))
                    near = SocketBytes(socket, half_closes=False)
                    try:
                        await carry(near, outer)
                    finally:
                        end = near.end or {}
                        why = end.get("why", f"the connection to the host {self._host.url} ended")
                        channel.lose(why, by_program=end.get("by_program", False))
                        tasks.cancel_scope.cancel()
        except SandboxError:
            if not channel.lost.is_set():
                raise

    @asynccontextmanager
    async def _connect_port(self, key: str, port: int) -> AsyncIterator[SocketBytes]:
        async with self._asking("port", None, key=key, port=port) as (socket, _):
            yield SocketBytes(socket)

    async def _listen(self, port: int) -> SocketListener:
        raise ProgramUnsupported(
            f"the host {self._host.url} leads no port of a computer to this machine: a program "
            "inside of a task's computer needs an engine here"
        )

    async def _list_changes(self, key: str) -> list[Change]:
        async with self._asking("changes", key=key) as (_, reply):
            return [(path, kind) for path, kind in reply["changes"]]

    @asynccontextmanager
    async def _asking(
        self, op: str, heartbeat_s: float | None = HEARTBEAT_S, **request: object
    ) -> AsyncIterator[tuple[WebSocket, HostReply]]:
        """Open a connection with a request; yield it, and the answer. Raises SandboxError."""
        async with self._host.connect(f"{PATH}/{op}", heartbeat_s) as socket:
            await socket.send_json(request)
            yield socket, await self._answer(socket)

    async def _answer(self, socket: WebSocket) -> HostReply:
        # no deadline: the host has one for whatever it does, and the heartbeat detects its loss
        message = await socket.receive()
        where = f"the host {self._host.url}"
        if message.type is not WSMsgType.TEXT:
            raise SandboxUnavailable(f"{where} has closed the connection")
        reply: HostReply = orjson.loads(message.data)
        if "error" in reply:
            raise REFUSALS.get(reply["error"], SandboxUnavailable)(f"{where}: {reply['message']}")
        return reply
