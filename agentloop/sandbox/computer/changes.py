"""The files of a container that differ from its image's.

The engine compares both trees, which takes it a second for an image of some size. Where we may read
the layer in which overlayfs keeps the differences, which is root on this machine, it takes as long
as there are differences.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TypeAlias

import anyio

from agentloop.sandbox.container import ContainerEngine

Change: TypeAlias = tuple[str, int]
"""A path, and the engine's number for what happened to it."""

CHANGED, ADDED, REMOVED = 0, 1, 2


async def list_changes(engine: ContainerEngine, name: str) -> list[Change]:
    """Return the changes, directories before what is in them.

    A directory that was removed and made anew is there both as removed and as it is now.

    Raises:
        aiodocker.DockerError, aiohttp.ClientError, OSError: the engine failed.
    """
    if engine.has_plain_overlay:
        state = await engine.docker._query_json(f"containers/{name}/json")
        layers = state["GraphDriver"]["Data"]
        try:
            return await anyio.to_thread.run_sync(
                read_layer, Path(layers["UpperDir"]), layers["LowerDir"].split(":")
            )
        except OSError:
            pass  # not ours to read
    listed = await engine.docker._query_json(f"containers/{name}/changes")
    return [(change["Path"], change["Kind"]) for change in listed or ()]


def read_layer(upper: Path, lower: list[str]) -> list[Change]:
    """Return the changes of a layer of overlayfs, above others. Raises OSError."""
    changes: list[Change] = []
    pending = [""]
    while pending:
        folder = pending.pop()
        with os.scandir(f"{upper}{folder}") as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}"
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                    changes.append((path, REMOVED))
                    continue
                if entry.is_dir(follow_symlinks=False):
                    pending.append(path)
                    if _is_opaque(entry.path):
                        changes.append((path, REMOVED))
                exists = any(os.path.lexists(f"{layer}{path}") for layer in lower)
                changes.append((path, CHANGED if exists else ADDED))
    return sorted(changes)


def _is_opaque(path: str) -> bool:
    """Return whether a directory hides those of the same name below."""
    try:
        return os.getxattr(path, "trusted.overlay.opaque", follow_symlinks=False) == b"y"
    except OSError:
        return False
