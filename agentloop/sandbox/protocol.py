"""Frames between the supervisor and a worker: four bytes of length (big endian), then JSON.

To the worker     run {id, code, stdin, timeout_s, session?, opens?}   kill {id}   close {session}
                  ping
From the worker   ready {pid, python, kill_by, layers}   done {id, status, ...}   pong
                  session_lost {session, by?, id?}       fatal {why}

A session is started only by a cell with `opens`; any other cell of a session that no longer exists
is answered with `session_lost` and its `id`. `by` is an errors.LostBy.

A worker is trusted with respect to its own calls, since the code inside can reach neither the
connection nor the process that writes to it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import TypedDict

import orjson

from agentloop.sandbox.errors import ProtocolError

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 64 * 1024 * 1024


class WorkerReply(TypedDict, total=False):
    """A frame from a worker or a host (remote.py), as far as it is not a program's result."""

    op: str
    id: int
    session: int
    by: str
    status: str
    why: str
    pid: int
    own_bytes: int
    layers: dict[str, str]
    attempt: int
    slots: int
    sessions: int
    grace_s: float
    others: int
    computers: int


def encode(message: Mapping[str, object]) -> bytes:
    """Encode a message as a frame. Lone surrogates are allowed; the worker replaces them."""
    try:
        body = orjson.dumps(message)
    except TypeError:
        body = json.dumps(message).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {len(body)} bytes; the maximum is {MAX_FRAME_BYTES}")
    return HEADER.pack(len(body)) + body


class FrameReader:
    """An incremental decoder of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def __len__(self) -> int:
        """Return the number of bytes of the incomplete message."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[dict[str, object]]:
        """Return the messages that `data` completes. Raises ProtocolError on invalid frames."""
        self._buffer += data
        messages: list[dict[str, object]] = []
        while len(self._buffer) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._buffer)
            if size > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {size} bytes; the maximum is {MAX_FRAME_BYTES}")
            end = HEADER.size + size
            if len(self._buffer) < end:
                break
            messages.append(self._parse(bytes(self._buffer[HEADER.size : end])))
            del self._buffer[:end]  # only moves the buffer's start
        return messages

    @staticmethod
    def _parse(body: bytes) -> dict[str, object]:
        try:
            message = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise ProtocolError(f"not JSON: {error}") from error
        if not isinstance(message, dict):
            raise ProtocolError(f"a message must be an object, not {type(message).__name__}")
        return message
