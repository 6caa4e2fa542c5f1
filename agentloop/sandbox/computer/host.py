"""The host's end of computers that a pool on another machine uses (remote.py has the protocol)."""

from __future__ import annotations

import secrets
from functools import partial
from typing import IO

import anyio
import pydantic
from aiohttp import WSMsgType, web

from agentloop.sandbox.computer.channel import FILE_STALL_S, OOM_NOTICE_S
from agentloop.sandbox.computer.computer import MAX_FOLDER_BYTES
from agentloop.sandbox.computer.machine import ComputerMachine, ComputerSpec
from agentloop.sandbox.computer.proxy import ENDED, relay
from agentloop.sandbox.computer.remote import HostReply, SocketBytes, carry
from agentloop.sandbox.errors import SandboxError
from agentloop.sandbox.pool import Pool
from agentloop.sandbox.remote import HEARTBEAT_S

REQUEST_TIMEOUT_S = 30.0
NOT_LENT = ("host", "container:")  # networks in which a computer would not be on its own

_SPEC = pydantic.TypeAdapter(ComputerSpec)


class ComputerHost:
    """Computers of pools elsewhere: each ends with its connection."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._machines: dict[str, ComputerMachine] = {}

    async def serve(self, op: str, socket: web.WebSocketResponse) -> None:
        """Do what a connection is for. It is cancelled when the client leaves."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_show_life, socket)
                try:
                    await self._serve(op, socket)
                except (SandboxError, OSError, LookupError, ValueError, TypeError) as error:
                    await socket.send_json({"error": type(error).__name__, "message": str(error)})
                group.cancel_scope.cancel()
        except* ENDED:
            pass  # the client has left

    async def _serve(self, op: str, socket: web.WebSocketResponse) -> None:
        request = await socket.receive_json(timeout=REQUEST_TIMEOUT_S)
        match op:
            case "take":
                await self._take(socket, _SPEC.validate_python(request))
            case "port":
                async with self._machines[request["key"]].connect(request["port"]) as far:
                    await socket.send_json({})
                    near = SocketBytes(socket)
                    await relay(near, far, near)
            case "changes":
                changes = await self._machines[request["key"]].list_changes()
                await socket.send_json({"changes": changes})
            case "build":
                fleet, fill = await self._pool.open_fleet(), partial(_receive_tar, socket)
                await fleet.ensure_image(request["name"], fill)
                await socket.send_json({})

    async def _take(self, socket: web.WebSocketResponse, spec: ComputerSpec) -> None:
        if spec.network.startswith(NOT_LENT):
            raise ValueError(f"network: {spec.network} is not lent to others")
        fleet, key = await self._pool.open_fleet(), secrets.token_urlsafe(16)
        machine = self._machines[key] = await fleet.take(spec)
        try:
            about: HostReply = {"key": key, "name": machine.name, "image": machine.spec.image}
            await socket.send_json({**about, "config": machine.config})
            near, channel = SocketBytes(socket, half_closes=False), machine.channel
            await carry(near, channel.hand_over())
            if near.end is None:  # the computer has ended, and not the client
                channel.connection_lost(None)
                with anyio.move_on_after(2 * OOM_NOTICE_S):
                    await channel.lost.wait()
                await socket.send_json({"why": channel.why, "by_program": channel.is_by_program})
        finally:
            del self._machines[key]
            fleet.give_back(machine)


async def _receive_tar(socket: web.WebSocketResponse, context: IO[bytes]) -> None:
    await socket.send_json({"missing": True})
    while True:
        message = await socket.receive(timeout=FILE_STALL_S)
        if message.type is not WSMsgType.BINARY or context.tell() > MAX_FOLDER_BYTES:
            raise ValueError(f"a tar of at most {MAX_FOLDER_BYTES} bytes is expected")
        if not message.data:
            return
        await anyio.to_thread.run_sync(context.write, message.data)
        await socket.send_json({})


async def _show_life(socket: web.WebSocketResponse) -> None:
    """Send pings: while we do something else than receive, the client's are not answered."""
    while True:
        await socket.ping()
        await anyio.sleep(HEARTBEAT_S / 2)
