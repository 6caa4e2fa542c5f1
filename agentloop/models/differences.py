"""Files of weights as what differs from earlier ones, which a step of training changes little.

    old file ──┐
    new file ──┴─ write_difference ──> a smaller file ──┐
    old file ───────────────────────────────────────────┴─ apply_difference ──> the new file

Files are compared as 16-bit words, the size of most weights. What differs is stored as distances
between the places and as exclusive ors of the words, byte by byte, since their upper bytes are
mostly zero; deflate then takes 1.3 bytes for a changed weight of bfloat16.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from pathlib import Path

import numpy as np

DIFFERENCE = ".difference"
"""Ending of the name of a difference, after that of its file."""

_CHUNK_BYTES = 32 << 20
_HEADER = struct.Struct("<II")  # of a chunk: number of places, number of compressed bytes
_LEVEL = 1  # of compression: the fastest
_MAX_SHARE = 0.5  # of a file's size; a larger difference gains too little


def write_difference(old: Path, new: Path, target: Path) -> bool:
    """Write what differs between two files; return whether that is worth while, or else write
    nothing.

    Raises:
        OSError: a file cannot be read or written.
    """
    size = new.stat().st_size
    if old.stat().st_size != size or size % 2:
        return False
    written = 0
    with old.open("rb") as before, new.open("rb") as after, target.open("wb") as out:
        while (words := np.frombuffer(after.read(_CHUNK_BYTES), np.uint16)).size:
            changes = words ^ np.frombuffer(before.read(_CHUNK_BYTES), np.uint16)
            places = np.flatnonzero(changes).astype(np.uint32)
            gaps = np.diff(places, prepend=np.uint32(0))
            columns = (
                values.view((np.uint8, values.itemsize)).T for values in (gaps, changes[places])
            )
            body = zlib.compress(b"".join(column.tobytes() for column in columns), _LEVEL)
            written += out.write(_HEADER.pack(len(places), len(body)) + body)
            if written > _MAX_SHARE * size:
                break
    if written > _MAX_SHARE * size:
        target.unlink()
        return False
    return True


def apply_difference(old: Path, difference: Path, target: Path) -> str:
    """Write the new file from the old one and the difference; return its SHA-256.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: the difference is not one of this old file.
    """
    digest = hashlib.sha256()
    with old.open("rb") as before, difference.open("rb") as changed, target.open("wb") as out:
        while part := bytearray(before.read(_CHUNK_BYTES)):
            words = np.frombuffer(part, np.uint16)
            try:
                num, num_bytes = _HEADER.unpack(changed.read(_HEADER.size))
                body = np.frombuffer(zlib.decompress(changed.read(num_bytes)), np.uint8)
                gaps = body[: 4 * num].reshape(4, num).T.copy().view(np.uint32)
                changes = body[4 * num :].reshape(2, num).T.copy().view(np.uint16)
                words[np.cumsum(gaps, dtype=np.uint32)] ^= changes[:, 0]
            except (struct.error, zlib.error, IndexError) as error:
                raise ValueError(f"{difference}: {error}") from error
            digest.update(part)
            out.write(part)
    return digest.hexdigest()
