"""Folders of this machine as tars, and back."""

from __future__ import annotations

import math
import os
import tarfile
from pathlib import Path
from typing import IO


def pack_folder(
    source: Path, target: IO[bytes], max_bytes: float = math.inf, *, keeps_times: bool = True
) -> None:
    """Write a tar of a folder's contents; without times, the same contents make the same tar.

    Raises:
        ValueError: it is larger than `max_bytes`.
    """

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.mtime = member.mtime if keeps_times else 0
        member.uname = member.gname = ""
        if target.tell() + member.size > max_bytes:
            raise ValueError(f"{source} is larger than max_bytes, {max_bytes}")
        return member

    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(os.listdir(source)):
            tar.add(source / name, name, filter=plain)
    target.seek(0)


def unpack_folder(source: IO[bytes], target: Path) -> None:
    """Extract a tar that may be hostile. Raises tarfile.FilterError at what would lie outside."""
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=source, mode="r:") as tar:
        tar.extractall(target, filter="data")
