"""Write TensorBoard event files with scalars.

A file is a sequence of records (TFRecord: length, checksum of the length, data, checksum of the
data), each an `Event` of TensorFlow's event.proto in Protocol Buffers' wire format. Only five
fields are needed, so they are written here: tensorboardX imports torch if it is installed, which
takes seconds and hundreds of MiB, as does PyTorch's own writer. tests/integration reads the files
with TensorBoard.

    Event    1 wall_time: double   2 step: int64   3 file_version: string   5 summary: Summary
    Summary  1 value: repeated Value
    Value    1 tag: string         2 simple_value: float
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["EventFile"]

_FIXED64, _BYTES, _FIXED32 = 1, 2, 5  # wire types; 0 is a varint


class EventFile:
    """An event file in a folder (`Sink`); `tensorboard --logdir RUNS` shows all runs in it.

    Files of other processes in the same folder belong to the same run. Methods raise OSError if the
    file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self, run_name: str, config: Mapping[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (self._folder / name).open("ab")
        self._write(_field(3, b"brain.Event:2"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        summary = b"".join(
            _field(1, _field(1, tag.encode()) + _key(2, _FIXED32) + _float32(value))
            for tag, value in values.items()
        )
        self._write(_key(2, 0) + _varint(step) + _field(5, summary))

    def close(self) -> None:
        self._file.close()

    def _write(self, fields: bytes) -> None:
        event = _key(1, _FIXED64) + struct.pack("<d", time.time()) + fields
        length = struct.pack("<Q", len(event))
        self._file.write(length + _checksum(length) + event + _checksum(event))
        self._file.flush()


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _field(number: int, data: bytes) -> bytes:
    return _key(number, _BYTES) + _varint(len(data)) + data


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, value))


def _varint(number: int) -> bytes:
    """Encode seven bits per byte, lowest first; negative numbers as 64-bit two's complement."""
    number &= 2**64 - 1
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC32C = _crc_table()


def _checksum(data: bytes) -> bytes:
    """Return the CRC-32C (RFC 3720), masked as in TFRecord."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC32C[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
