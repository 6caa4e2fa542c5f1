"""The host's end of a link (remote.py), over which a pool on another machine sends calls."""

from __future__ import annotations

import dataclasses
import logging
import reprlib
from collections.abc import Callable

import aiohttp
import anyio
import anyio.lowlevel
from aiohttp import web

from agentloop.sandbox.api import LinkRequest, check, has_more_values, max_values
from agentloop.sandbox.errors import LostBy, ProtocolError, SandboxError, SessionLost
from agentloop.sandbox.pool import Pool
from agentloop.sandbox.protocol import FrameReader, encode
from agentloop.sandbox.remote import Outbox
from agentloop.sandbox.results import CallResult, CallStatus
from agentloop.sandbox.sessions import Sessions
from agentloop.sandbox.slots import GRACE_S

log = logging.getLogger("sandbox")

LOAD_EVERY_S = 0.25
MAX_REASON_BYTES = 123  # limit of a WebSocket's close frame


class _Frames(FrameReader):
    """A frame reader for clients, which are not trusted."""

    @staticmethod
    def _parse(body: bytes) -> dict[str, object]:
        limit = max_values(LinkRequest)
        if has_more_values(body, limit):
            raise ProtocolError(f"a frame may have at most {limit} values")
        return FrameReader._parse(body)


class LinkedClient:
    """A connected client with its calls and sessions, which end with the connection."""

    def __init__(self, pool: Pool, hold: Callable[[int], bool]) -> None:
        """
        Args:
            hold: called with the number of bytes held for the client; returns whether it is
                within the bound.
        """
        self._pool = pool
        self._hold = hold
        self._num_held = 0  # bytes held for open calls
        self._reader = _Frames()
        self._outbox = Outbox()
        self._calls: dict[int, tuple[object, anyio.CancelScope]] = {}  # with their sessions
        # Admit twice as many calls as there are slots, so that no slot waits for the network.
        self._num_slots = 2 * pool.stats()["slots"]

    async def serve(self, socket: web.WebSocketResponse) -> None:
        """Serve the client until it leaves; close the connection, with a reason, on a bad frame."""
        reason = ""
        async with anyio.create_task_group() as self._group:
            self._sessions = Sessions(self._pool, self._group)
            self._group.start_soon(self._outbox.send_all, socket)
            self._greet()
            self._group.start_soon(self._send_load)
            try:
                # no deadline: until the client leaves, which the heartbeat detects
                async for message in socket:
                    if message.type is aiohttp.WSMsgType.BINARY:
                        for frame in self._reader.feed(message.data):
                            self._on_frame(frame)
                        if not self._count():
                            raise ProtocolError("this host's memory is used up (max_held_mib)")
                        await anyio.lowlevel.checkpoint()  # yield: there may be many more frames
            except ProtocolError as error:
                reason = str(error)
            finally:
                self._group.cancel_scope.cancel()
        if reason:
            log.warning("closing a client's connection: %s", reason)
            close_reason = reason.encode("ascii", "replace")[:MAX_REASON_BYTES]
            await socket.close(code=aiohttp.WSCloseCode.PROTOCOL_ERROR, message=close_reason)

    def _count(self) -> bool:
        """Account for the bytes that are held for the client: frames that have come in part, open
        calls, and responses that the client has not read. Return whether they are within the bound.
        """
        return self._hold(len(self._reader) + self._num_held + len(self._outbox))

    def _greet(self) -> None:
        settings = self._pool.settings
        self._send(
            op="ready",
            slots=self._num_slots,
            sessions=settings.max_sessions,
            grace_s=settings.max_wait_s + 2 * GRACE_S,
            layers=self._pool.stats()["layers"],
        )

    async def _send_load(self) -> None:
        last_sent = 0, 0
        while True:
            stats = self._pool.stats()
            num_others = max(0, stats["busy"] + stats["waiting"] - len(self._calls))
            if (load := (num_others, stats["computers"])) != last_sent:
                self._send(op="load", others=num_others, computers=stats["computers"])
                last_sent = load
            self._count()  # what the client has read is free again
            await anyio.sleep(LOAD_EVERY_S)

    def _on_frame(self, frame: dict[str, object]) -> None:
        match frame:
            case {"op": "run", "id": int(call_id)} if call_id in self._calls:
                raise ProtocolError(f"the id {call_id} belongs to a call that is still open")
            case {"op": "run", "id": int(call_id)} if len(self._calls) < 2 * self._num_slots:
                scope = anyio.CancelScope()
                self._calls[call_id] = frame.get("session"), scope
                self._group.start_soon(self._call, call_id, frame, scope)
            case {"op": "run", "id": int(call_id)}:
                self._report_failure(
                    call_id, CallStatus.OVERLOADED, "more calls than announced slots"
                )
            case {"op": "kill", "id": int(call_id)}:
                if call_id in self._calls:
                    self._calls[call_id][1].cancel()
            case {"op": "close", "session": int(session)}:
                for used_session, scope in self._calls.values():
                    if used_session == session:  # which may still be opening
                        scope.cancel()
                self._sessions.close(session)
            case _:
                raise ProtocolError(f"unknown frame: {reprlib.repr(frame)}")

    async def _call(self, call_id: int, frame: dict[str, object], scope: anyio.CancelScope) -> None:
        size = sum(len(text) for text in frame.values() if isinstance(text, str))
        self._num_held += size
        try:
            with scope:
                result = await self._run(check(LinkRequest, frame))
                if lost_by := self._sessions.lost_by(frame.get("session")):
                    self._report_loss(frame["session"], lost_by)
                self._send(**_fields(result) | {"op": "done", "id": call_id})
                return
            self._report_failure(call_id, CallStatus.CANCELLED, "killed by its caller")
        except SessionLost as error:
            self._report_loss(frame["session"], error.by, id=call_id)
        except (SandboxError, ValueError) as error:
            self._report_failure(call_id, CallStatus.SANDBOX_ERROR, str(error))
        finally:
            del self._calls[call_id]
            self._num_held -= size
            self._count()

    async def _run(self, request: LinkRequest) -> CallResult:
        call = request.arguments()
        if request.native:
            return await self._pool.run_native(call, request.output)
        if request.session is None:
            return await self._pool.run(**call, output=request.output)
        if request.opens and request.session not in self._sessions:
            await self._sessions.open(request.session)
        if request.session not in self._sessions:
            raise SessionLost("there is no such session here")
        return await self._sessions.run(request.session, **call)

    def _send(self, **frame: object) -> None:
        self._outbox.put(encode(frame))

    def _report_loss(self, session: object, by: LostBy, **more: int) -> None:
        self._send(op="session_lost", session=session, by=by, **more)

    def _report_failure(self, call_id: int, status: CallStatus, reason: str) -> None:
        self._send(op="done", id=call_id, status=status, why=reason)


def _fields(result: CallResult) -> dict[str, object]:
    """Return a result as a frame's fields, the inverse of CallResult.from_frame."""
    fields = dataclasses.asdict(result)
    if result.status.is_unscorable:
        del fields["run_s"]
        fields["why"] = result.error.message if result.error else ""
    return fields
