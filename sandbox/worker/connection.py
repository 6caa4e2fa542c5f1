"""The connection to the supervisor: frames of JSON, each with its size in front."""

from __future__ import annotations

import json
import os
import select
import struct
from typing import Any

HEADER = struct.Struct(">I")  # bytes of JSON that follow (sandbox/protocol.py)

_to_json = json.JSONEncoder(ensure_ascii=False).encode


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

    def read(self) -> list[dict[str, Any]]:
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
        frames = []
        while len(self._inbox) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._inbox)
            end = HEADER.size + size
            if len(self._inbox) < end:
                break
            frames.append(json.loads(bytes(self._inbox[HEADER.size : end])))
            del self._inbox[:end]
        return frames

    def send(self, frame: dict[str, Any]) -> None:
        """Send a frame, however slowly the supervisor reads. Raises EOFError if it is gone."""
        data = _to_json(frame).encode("utf-8", "replace")
        unsent = memoryview(HEADER.pack(len(data)) + data)
        while unsent:
            try:
                unsent = unsent[os.write(self.write_fd, unsent) :]
            except BlockingIOError:
                select.select([], [self.write_fd], [])
            except OSError:
                raise EOFError from None
