"""The host's end of computers that a pool on another machine uses (remote.py has the protocol)."""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from tempfile import TemporaryFile

import anyio
import orjson
import pydantic
from aiohttp import WSMsgType, web
from anyio.abc import UNIXSocketStream

from agentloop.sandbox.computer.channel import FILE_STALL_S, OOM_NOTICE_S
from agentloop.sandbox.computer.computer import MAX_FOLDER_BYTES
from agentloop.sandbox.computer.machine import ComputerMachine, ComputerSpec
from agentloop.sandbox.computer.proxy import relay
from agentloop.sandbox.computer.remote import SocketBytes
from agentloop.sandbox.errors import SandboxError
from agentloop.sandbox.pool import Pool
from agentloop.sandbox.protocol import JsonObject

REQUEST_TIMEOUT_S = 30.0
# A computer in these would be none of its own.
REFUSED_NETWORKS = ("host", "container:")

_SPEC = pydantic.TypeAdapter(ComputerSpec)


class ComputerHost:
    """Computers of pools elsewhere: each ends with its connection."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._machines: dict[str, ComputerMachine] = {}

    async def serve(self, op: str, socket: web.WebSocketResponse) -> None:
        """Do what a connection is for, until the client leaves."""
        with suppress(ConnectionError, anyio.BrokenResourceError):  # it has left
            try:
                request = orjson.loads(await socket.receive_str(timeout=REQUEST_TIMEOUT_S))
                match op:
                    case "take":
                        await self._take(socket, _SPEC.validate_python(request))
                    case "port":
                        await self._port(socket, self._machines[request["key"]], request["port"])
                    case "changes":
                        await self._list_changes(socket, self._machines[request["key"]])
                    case "build":
                        await self._build(socket, request["name"], float(request["timeout_s"]))
                    case _:
                        raise ValueError(f"{op} is none of take, port, changes and build")
            except (SandboxError, OSError, LookupError, ValueError, TypeError) as error:
                refusal = {"error": type(error).__name__, "message": str(error)}
                await _send(socket, refusal)

    async def _take(self, socket: web.WebSocketResponse, spec: ComputerSpec) -> None:
        if spec.network.startswith(REFUSED_NETWORKS):
            raise ValueError(f"network: {spec.network} is not lent to others")
        fleet = await self._pool.open_fleet()
        key, machine = secrets.token_urlsafe(16), None
        try:
            async with _while_connected(socket):
                machine = self._machines[key] = await fleet.take(spec)
            about = {"key": key, "name": machine.name, "image": machine.spec.image}
            await _send(socket, {**about, "config": machine.config})
            await _carry(socket, machine)
        finally:
            if machine is not None:
                del self._machines[key]
                fleet.give_back(machine)

    async def _port(
        self, socket: web.WebSocketResponse, machine: ComputerMachine, port: int
    ) -> None:
        async with await machine.connect(port) as far:
            await _send(socket, {})
            near = SocketBytes(socket)
            await relay(near, far, near)

    async def _list_changes(self, socket: web.WebSocketResponse, machine: ComputerMachine) -> None:
        async with _while_connected(socket):
            changes = await machine.list_changes()
        await _send(socket, {"changes": changes})

    async def _build(self, socket: web.WebSocketResponse, name: str, timeout_s: float) -> None:
        fleet = await self._pool.open_fleet()
        is_missing = not await fleet.has_image(name)
        await _send(socket, {"missing": is_missing})
        if not is_missing:
            return
        with TemporaryFile() as context:
            while True:
                message = await socket.receive(timeout=FILE_STALL_S)
                if message.type is not WSMsgType.BINARY or context.tell() > MAX_FOLDER_BYTES:
                    raise ValueError(f"a tar of at most {MAX_FOLDER_BYTES} bytes is expected")
                if not message.data:
                    break
                await anyio.to_thread.run_sync(context.write, message.data)
                await _send(socket, {})
            async with _while_connected(socket):
                await fleet.build_image(name, context, timeout_s)
        await _send(socket, {})


async def _carry(socket: web.WebSocketResponse, machine: ComputerMachine) -> None:
    """Carry frames between a client and a computer, and tell the client why the computer ended."""
    near, channel = SocketBytes(socket), machine.channel
    async with await UNIXSocketStream.from_socket(channel.hand_over()) as far:
        await relay(near, far, near, one_answer=True, idle_s=math.inf)
    if not socket.closed:
        channel.connection_lost(None)
        with anyio.move_on_after(2 * OOM_NOTICE_S):
            await channel.lost.wait()
        await _send(socket, {"why": channel.why, "by_program": channel.is_by_program})


@asynccontextmanager
async def _while_connected(socket: web.WebSocketResponse) -> AsyncIterator[None]:
    """Cancel the block and raise ConnectionError if the client leaves. It must send nothing."""
    failure: Exception | None = ConnectionResetError("the client has left")

    async def watch() -> None:
        await socket.receive()  # no deadline: the block has one, and the heartbeat
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        try:
            yield
            failure = None
        except Exception as error:  # the task group would wrap it
            failure = error
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _send(socket: web.WebSocketResponse, message: JsonObject) -> None:
    await socket.send_str(orjson.dumps(message).decode())
