"""Folders that are seen whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from learner.errors import NotWritten

__all__ = ["appear", "fresh_partial", "partial_of", "remove_partial", "writing"]


def partial_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def fresh_partial(folder: Path) -> Path:
    """An empty folder beside `folder`, to be filled; what an earlier attempt left is removed."""
    partial = partial_of(folder)
    remove_partial(folder)
    partial.mkdir(parents=True)
    return partial


def remove_partial(folder: Path) -> None:
    shutil.rmtree(partial_of(folder), ignore_errors=True)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raises NotWritten, in place of what the disk says, and how many bytes are free."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch's writer hides the one behind the other.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None and not isinstance(error, SafetensorError):
            raise
        text = (cause and cause.strerror) or str(error)
        raise NotWritten(f"{folder}: {text}{_free(folder)}") from error


def _free(folder: Path) -> str:
    there = next((one for one in folder.parents if one.is_dir()), Path("/"))
    try:
        return f" ({shutil.disk_usage(there).free} bytes free)"
    except OSError:
        return ""


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
