"""Folders that are seen whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["appear", "fresh_partial"]


def fresh_partial(folder: Path) -> Path:
    """An empty folder beside `folder`, to be filled; what an earlier attempt left is removed."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def appear(partial: Path, folder: Path, *, durable: bool) -> None:
    """Rename `partial` to `folder`. What was there is replaced. With `durable` the files are on
    disk before, so that not even a machine that stops leaves half of them."""
    if durable:
        for file in partial.rglob("*"):
            _sync(file)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(partial, folder)
    if durable:
        _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
