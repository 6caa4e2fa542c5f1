"""The images that are built for computers, kept within a bound of disk.

An image carries our label and our names alone, or it is not ours to remove: one that somebody has
named otherwise, or built on ours, stays. The engine itself remembers when an image was last used,
since whoever uses it names it anew; so the bound holds for all processes together.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, cast

import aiodocker
import aiohttp
import anyio

from agentloop.sandbox.computer.tars import pack_folder
from agentloop.sandbox.container import LABEL
from agentloop.sandbox.engine import what_it_said

log = logging.getLogger("sandbox")

IMAGE_NAME = "agentloop-task"
BUILT_LABEL = f"{LABEL}.built"
ENGINE_TIMEOUT_S = 60.0
LEAST_KEPT = timedelta(minutes=10)  # until a computer is started of it

FillFile = Callable[[IO[bytes]], Awaitable[object]]
"""Writes the tar that an image is built of into a file."""


@dataclass(frozen=True)
class BuiltImage:
    """An image of ours.

    Attributes:
        num_bytes: what its removal frees.
        in_use: whether a container is of it.
    """

    names: tuple[str, ...]
    num_bytes: int
    used_at: datetime
    in_use: bool


def next_to_remove(
    images: Sequence[BuiltImage], max_bytes: float, now: datetime
) -> BuiltImage | None:
    """Return the image to remove next, if they take too much: the one not used for longest."""
    if sum(image.num_bytes for image in images) <= max_bytes:
        return None
    unused = [image for image in images if not image.in_use and now - image.used_at > LEAST_KEPT]
    return min(unused, key=lambda image: image.used_at, default=None)


def name_image(context: IO[bytes]) -> str:
    """Return the name of the image that is built of a tar; the same contents have the same."""
    context.seek(0)
    digest = hashlib.file_digest(cast(io.BufferedReader, context), "sha256")
    return f"{IMAGE_NAME}:{digest.hexdigest()[:12]}"


def pack_image(folder: Path, context: IO[bytes]) -> str:
    """Write a folder with a Dockerfile as a tar, and return the image's name."""
    pack_folder(folder, context, keeps_times=False)
    return name_image(context)


async def mark_used(docker: aiodocker.Docker, name: str) -> None:
    """Note that an image is wanted. Raises aiodocker.DockerError, aiohttp.ClientError, OSError."""
    repository, _, tag = name.partition(":")
    with anyio.fail_after(ENGINE_TIMEOUT_S):
        await docker.images.tag(name, repository, tag=tag)


async def bound_images(docker: aiodocker.Docker, max_bytes: float) -> None:
    """Remove images of ours, the least recently used first, until they have at most `max_bytes`.

    Those that a container uses, or that were used within minutes, stay. What fails is logged.
    """
    try:
        with anyio.fail_after(ENGINE_TIMEOUT_S):
            while image := next_to_remove(await _list(docker), max_bytes, datetime.now(UTC)):
                log.info("removing an image that was not used for longest: %s", image.names[0])
                for name in image.names:
                    await docker.images.delete(name)
    except (aiodocker.DockerError, aiohttp.ClientError, OSError) as error:
        reason = what_it_said(error) or "no answer in time"
        log.warning("images could not be kept within their bound: %s", reason)


async def _list(docker: aiodocker.Docker) -> list[BuiltImage]:
    images = []
    usage = await docker._query_json("system/df", params={"type": "image"})
    for image in usage["Images"] or []:
        names = tuple(image["RepoTags"] or ())
        are_ours = bool(names) and all(name.startswith(f"{IMAGE_NAME}:") for name in names)
        if BUILT_LABEL not in (image["Labels"] or {}) or not are_ours:
            continue
        num_bytes = image["Size"] - max(0, image["SharedSize"])
        state = await docker.images.inspect(names[0])
        used_at = datetime.fromisoformat(state["Metadata"]["LastTagTime"])
        images.append(BuiltImage(names, num_bytes, used_at, image["Containers"] > 0))
    return images
