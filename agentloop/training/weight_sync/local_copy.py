"""A node's own copy of the newest published weights, brought up to date by differences.

the shared folder ──differences of the files that the copy has, other files whole──> the copy
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from agentloop.errors import ServerError
from agentloop.models.differences import DIFFERENCE, apply_difference
from agentloop.models.folder import MANIFEST

_PREFIX = "agentloop-weights-"


class LocalCopy:
    """The newest weights in a folder of this process, which is removed with it at the latest when
    the next process makes one beside it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._newest: Path | None = None
        self._sha256: Mapping[str, str] = {}  # of its files

    @classmethod
    @contextmanager
    def within(cls, parent: Path) -> Iterator[LocalCopy]:
        """Make a copy below `parent`, and remove it at the end. Raises ServerError."""
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _remove_dead(parent)
            # Hidden from others, which would take it for a dead one's, until it is locked.
            hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
            lock = os.open(hidden, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            folder = hidden.rename(parent / hidden.name[1:])
        except OSError as error:
            raise ServerError(f"weights.local_folder: {error}") from error
        try:
            yield cls(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)

    def update(self, published: Path) -> Path:
        """Bring the copy to the version in a published folder, and return its folder. Blocks.

        Raises:
            ServerError: a file cannot be read or written, or is not as published.
        """
        try:
            manifest = json.loads((published / MANIFEST).read_text("utf-8"))
            target = self._folder / published.name
            shutil.rmtree(target, ignore_errors=True)
            weights = shutil.ignore_patterns(*manifest["sha256"], f"*{DIFFERENCE}")
            shutil.copytree(published, target, ignore=weights)
            for name, expected in manifest["sha256"].items():
                if not self._patch(published, target, manifest, name):
                    with (published / name).open("rb") as source, (target / name).open("wb") as out:
                        if _copy(source, out) != expected:
                            raise ServerError(f"{published / name}: differs from its SHA-256")
        except (OSError, ValueError, KeyError) as error:
            raise ServerError(f"{published} can't be copied to {self._folder}: {error}") from error
        if self._newest is not None and self._newest != target:
            shutil.rmtree(self._newest, ignore_errors=True)
        self._newest, self._sha256 = target, manifest["sha256"]
        return target

    def _patch(
        self, published: Path, target: Path, manifest: Mapping[str, Mapping[str, str]], name: str
    ) -> bool:
        """Make a file from the copy's, if there is a difference from that; return whether it is as
        published now."""
        base = manifest.get("base", {}).get(name)
        if self._newest is None or base is None or base != self._sha256.get(name):
            return False
        made = apply_difference(self._newest / name, published / (name + DIFFERENCE), target / name)
        return made == manifest["sha256"][name]


def _remove_dead(parent: Path) -> None:
    """Remove the copies of processes that were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)


def _copy(source: BinaryIO, target: BinaryIO) -> str:
    digest = hashlib.sha256()
    while part := source.read(1 << 24):
        digest.update(part)
        target.write(part)
    return digest.hexdigest()
