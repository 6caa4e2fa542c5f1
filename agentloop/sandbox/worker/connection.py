"""The connection to the supervisor: frames of JSON, each with its size in front."""

from __future__ import annotations

import json
import os
import select
import struct
from collections.abc import Iterator
from typing import TypedDict, TypeGuard

HEADER = struct.Struct(">I")  # bytes of JSON that follow (sandbox/protocol.py)

PIECE = 64 << 10  # characters

_to_json = json.JSONEncoder(ensure_ascii=False).encode


class WorkerFrame(TypedDict, total=False):
    """A frame to a worker (sandbox/protocol.py)."""

    op: str
    id: int
    code: str
    stdin: str
    timeout_s: float
    memory_mib: int
    max_output_bytes: int
    keep_output_bytes: int
    native: bool  # the code becomes another program
    session: int
    opens: bool


class Connection:
    """Reads and writes frames."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd, self.write_fd = read_fd, write_fd
        self._inbox = bytearray()
        for fd in self.fds:
            os.set_inheritable(fd, False)
            os.set_blocking(fd, False)

    @property
    def fds(self) -> set[int]:
        return {self.read_fd, self.write_fd}

    def read(self) -> list[WorkerFrame]:
        """Return the frames that have arrived. Raises EOFError if the supervisor is gone."""
        try:
            data = os.read(self.read_fd, 1 << 18)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            raise EOFError
        self._inbox += data
        frames: list[WorkerFrame] = []
        while len(self._inbox) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._inbox)
            end = HEADER.size + size
            if len(self._inbox) < end:
                break
            text = self._inbox[HEADER.size : end].decode("utf-8", "surrogatepass")
            del self._inbox[:end]  # at once: a frame may be large, and memory small
            frames.append(json.loads(text))
        return frames

    def send(self, frame: dict[str, object]) -> None:
        """Send a frame, however slowly the supervisor reads. Raises EOFError if it is gone."""
        if not any(map(_is_long, frame.values())):
            data = _to_json(frame).encode("utf-8", "replace")
            self._write(HEADER.pack(len(data)) + data)
            return
        self._write(HEADER.pack(sum(map(len, _pieces(frame)))))
        for piece in _pieces(frame):
            self._write(piece)

    def _write(self, data: bytes) -> None:
        unsent = memoryview(data)
        while unsent:
            try:
                unsent = unsent[os.write(self.write_fd, unsent) :]
            except BlockingIOError:
                select.select([], [self.write_fd], [])
            except OSError:
                raise EOFError from None


def _is_long(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) > PIECE


def _pieces(frame: dict[str, object]) -> Iterator[bytes]:
    """Yield the JSON of a frame in pieces, none of which takes much memory."""
    before = "{"
    for name, value in frame.items():
        yield f"{before}{_to_json(name)}:".encode()
        if _is_long(value):
            yield b'"'
            for start in range(0, len(value), PIECE):
                yield _to_json(value[start : start + PIECE])[1:-1].encode("utf-8", "replace")
            yield b'"'
        else:
            yield _to_json(value).encode("utf-8", "replace")
        before = ","
    yield b"}"
