"""Computers on a `sandbox.serve` host, over WebSockets (host.py has the other end).

    /v1/computer/take {image, network, limits}
        -> {key, name, image, config}, then the frames of guest.py both ways, and at last
           {why, by_program}. It ends with the connection.
    /v1/computer/port {key, port}
        -> {}, then bytes both ways; an empty message is the end of a direction
    /v1/computer/changes {key}
        -> {changes}
    /v1/computer/build {name, timeout_s}
        -> {missing}. If so, a tar follows; its pieces are answered with {}, and an empty one behind
           them when the image is built.

Objects are JSON, in text messages; {error, message} instead is a refusal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, cast

import aiohttp
import anyio
import anyio.abc
import orjson
from aiohttp import WSMsgType, web
from anyio.abc import TaskGroup

from agentloop.sandbox.computer.changes import Change
from agentloop.sandbox.computer.channel import ComputerChannel
from agentloop.sandbox.computer.images import pack_image
from agentloop.sandbox.computer.machine import ComputerMachine, ComputerSpec
from agentloop.sandbox.errors import (
    Overloaded,
    ProgramUnsupported,
    SandboxError,
    SandboxUnavailable,
)
from agentloop.sandbox.owner import make_dir, remove_tree
from agentloop.sandbox.protocol import MAX_FRAME_BYTES, JsonObject
from agentloop.sandbox.remote import HEARTBEAT_S, MAX_MESSAGE_BYTES, HostBackend, Outbox

PATH = "/v1/computer"
REFUSALS = {error.__name__: error for error in (Overloaded, ProgramUnsupported)}

Socket = aiohttp.ClientWebSocketResponse | web.WebSocketResponse


class SocketBytes(anyio.abc.ByteStream):
    """The binary messages of a WebSocket as a stream of bytes."""

    def __init__(self, socket: Socket, stack: AsyncExitStack | None = None) -> None:
        """
        Args:
            stack: what is closed with it.
        """
        self._socket = socket
        self._stack = stack or AsyncExitStack()

    async def receive(self, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
        message = await self._socket.receive()  # no deadline: until the other end leaves
        if message.type is not WSMsgType.BINARY:
            raise anyio.BrokenResourceError
        if not message.data:
            raise anyio.EndOfStream
        return cast(bytes, message.data)

    async def send(self, item: bytes) -> None:
        try:
            await self._socket.send_bytes(item)
        except (aiohttp.ClientError, RuntimeError) as error:  # it is closing
            raise anyio.BrokenResourceError from error

    async def send_eof(self) -> None:
        await self.send(b"")

    async def aclose(self) -> None:
        await self._stack.aclose()


class _Transport:
    """Writes a channel's frames to a WebSocket."""

    def __init__(self, outbox: Outbox) -> None:
        self.write = outbox.put

    def abort(self) -> None:
        pass  # whoever waits for the channel's loss closes it


class HostPlace:
    """Computers on a host. Its end, or that of a connection, ends those that it had."""

    def __init__(self, host: HostBackend, folder: Path, group: TaskGroup) -> None:
        self.folder = folder
        self.images = {""}
        self._host, self._group = host, group
        self._num_own = 0

    @property
    def max_computers(self) -> int:
        return self._host.link.hello["sessions"] if self._host.link else 0

    @property
    def num_computers(self) -> int:
        # The host tells of its own ones late, and of others' at all.
        return max(self._num_own, self._host.link.num_computers if self._host.link else 0)

    async def take(self, spec: ComputerSpec) -> ComputerMachine:
        self._num_own += 1
        try:
            machine: ComputerMachine = await self._group.start(self._live, spec)
        except BaseException:
            self._num_own -= 1
            raise
        self.images |= {spec.image, machine.spec.image}
        return machine

    def give_back(self, machine: ComputerMachine) -> None:
        self._num_own -= 1
        machine.channel.lose("it was closed")

    async def ensure_image(self, name: str, folder: Path, timeout_s: float) -> None:
        async with self._connect("build") as socket:
            reply = await self._ask(socket, {"name": name, "timeout_s": timeout_s})
            if reply["missing"]:
                with TemporaryFile() as context:
                    await anyio.to_thread.run_sync(pack_image, folder, context)
                    data = b"-"
                    while data:
                        data = await anyio.to_thread.run_sync(context.read, MAX_MESSAGE_BYTES)
                        await self._ask(socket, data)
        self.images.add(name)

    async def _live(
        self, spec: ComputerSpec, *, task_status: anyio.abc.TaskStatus[ComputerMachine]
    ) -> None:
        """Hold a computer until its channel is lost."""
        channel, outbox = ComputerChannel(), Outbox()
        channel.connection_made(cast(Any, _Transport(outbox)))
        try:
            async with self._connect("take") as socket:
                reply = await self._ask(socket, dataclasses.asdict(spec))
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(outbox.send_all, socket)
                    tasks.start_soon(self._read, socket, channel)
                    machine = ComputerMachine(
                        dataclasses.replace(spec, image=reply["image"]),
                        channel,
                        tasks,
                        reply["name"],
                        reply["config"],
                        partial(self._connect_port, reply["key"]),
                        partial(self._list_changes, reply["key"]),
                    )
                    task_status.started(machine)
                    try:
                        await channel.lost.wait()  # no deadline: as long as it is used
                    finally:
                        channel.lose("the pool was closed")
                        tasks.cancel_scope.cancel()
        except SandboxError:
            if not channel.lost.is_set():
                raise

    async def _read(self, socket: Socket, channel: ComputerChannel) -> None:
        why, by_program = f"the connection to the host {self._host.url} ended", False
        try:
            # no deadline: until the host leaves, which the heartbeat detects
            async for message in socket:
                if message.type is WSMsgType.TEXT:
                    end = orjson.loads(message.data)
                    why, by_program = end["why"], end["by_program"]
                else:
                    channel.data_received(message.data)
        except (ValueError, LookupError, TypeError) as error:
            why = f"the host {self._host.url} has sent what is no frame: {error!r}"
        channel.lose(why, by_program=by_program)

    async def _connect_port(self, key: str, port: int) -> SocketBytes:
        try:
            async with AsyncExitStack() as stack:
                socket = await stack.enter_async_context(self._connect("port", None))
                await self._ask(socket, {"key": key, "port": port})
                return SocketBytes(socket, stack.pop_all())
        except SandboxError as error:
            raise OSError(5, str(error)) from error

    async def _list_changes(self, key: str) -> list[Change]:
        async with self._connect("changes") as socket:
            reply = await self._ask(socket, {"key": key})
            return [(path, kind) for path, kind in reply["changes"]]

    @asynccontextmanager
    async def _connect(
        self, op: str, heartbeat_s: float | None = HEARTBEAT_S
    ) -> AsyncIterator[Socket]:
        async with self._host.connect(f"{PATH}/{op}", heartbeat_s, MAX_FRAME_BYTES) as socket:
            yield socket

    async def _ask(self, socket: Socket, request: JsonObject | bytes) -> JsonObject:
        """Return the answer to a message. Raises SandboxError."""
        if isinstance(request, bytes):
            await socket.send_bytes(request)
        else:
            await socket.send_str(orjson.dumps(request).decode())
        # no deadline: the host has one for whatever it does, and the heartbeat detects its loss
        message = await socket.receive()
        where = f"the host {self._host.url}"
        if message.type is not WSMsgType.TEXT:
            raise SandboxUnavailable(f"{where} has closed the connection")
        reply: JsonObject = orjson.loads(message.data)
        if "error" in reply:
            raise REFUSALS.get(reply["error"], SandboxUnavailable)(f"{where}: {reply['message']}")
        return reply


@asynccontextmanager
async def open_host_place(host: HostBackend) -> AsyncIterator[HostPlace]:
    """Use a host for computers; the end ends those that are open."""
    folder = make_dir()
    try:
        async with anyio.create_task_group() as group:
            try:
                yield HostPlace(host, folder, group)
            finally:
                group.cancel_scope.cancel()
    finally:
        remove_tree(folder)
