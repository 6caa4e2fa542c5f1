"""Folders that appear atomically: complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from agentloop.learner.errors import WriteError


def partial_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def fresh_partial(folder: Path) -> Path:
    """Create an empty folder next to `folder`, to be filled; remove leftovers of earlier
    attempts."""
    partial = partial_of(folder)
    remove_partial(folder)
    partial.mkdir(parents=True)
    return partial


def remove_partial(folder: Path) -> None:
    shutil.rmtree(partial_of(folder), ignore_errors=True)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise `WriteError`, with the number of free bytes, in place of errors of the disk."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch's writer hides the OSError behind a RuntimeError.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None and not isinstance(error, SafetensorError):
            raise
        text = (cause and cause.strerror) or str(error)
        raise WriteError(f"{folder}: {text}{_free_space(folder)}") from error


def _free_space(folder: Path) -> str:
    existing = next((parent for parent in folder.parents if parent.is_dir()), Path("/"))
    try:
        return f" ({shutil.disk_usage(existing).free} bytes free)"
    except OSError:
        return ""


def appear(partial: Path, folder: Path, *, durable: bool) -> None:
    """Rename `partial` to `folder`, replacing what was there.

    With `durable` the files are synced first, so that even a power failure leaves no partial
    folder.
    """
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
