"""Where computers run: on this machine's engine (fleet.py), or on hosts (remote.py)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TypeAlias

import anyio

from agentloop.sandbox.computer.fleet import Fleet
from agentloop.sandbox.computer.images import pack_image
from agentloop.sandbox.computer.machine import ComputerMachine, ComputerSpec
from agentloop.sandbox.computer.remote import HostPlace
from agentloop.sandbox.errors import ProgramUnsupported, SandboxUnavailable

IMAGE_COMPUTERS = 4  # a place without an image is as good as one with so many computers more

ComputerPlace: TypeAlias = Fleet | HostPlace


def in_order(places: Iterable[ComputerPlace], image: str) -> list[ComputerPlace]:
    """Return places, the best for a computer first: with room, and the fewest computers."""

    def cost(place: ComputerPlace) -> tuple[bool, int]:
        num_computers = place.num_computers + place.num_promised
        is_full = num_computers >= place.max_computers
        return is_full, num_computers + IMAGE_COMPUTERS * (image not in place.images)

    return sorted(places, key=cost)


class ComputerPlaces:
    """The places of a pool. Each method raises as those of a place, and of Fleet."""

    def __init__(self, open_fleet: Callable[[], Awaitable[Fleet]]) -> None:
        self.hosts: list[HostPlace] = []
        self._open_fleet = open_fleet
        self._built: dict[str, Path] = {}

    async def take(self, spec: ComputerSpec) -> tuple[ComputerPlace, ComputerMachine]:
        """Take a machine at the best place, or at the next one if that fails."""
        failure: Exception = SandboxUnavailable("no host is connected")
        for place in await self._in_order(spec.image):
            try:
                place.num_promised += 1  # others that choose meanwhile see it
                try:
                    await self._ensure_image(place, spec.image)
                finally:
                    place.num_promised -= 1
                return place, await place.take(spec)
            except (SandboxUnavailable, ProgramUnsupported) as error:
                failure = error
        raise failure

    async def build_image(self, folder: Path) -> str:
        """Build an image at the best place, or at the next one if that fails; at others, once a
        computer of it is taken there."""
        with TemporaryFile() as context:
            name = await anyio.to_thread.run_sync(pack_image, folder, context)
        self._built[name] = folder
        failure = SandboxUnavailable("no host is connected")
        for place in await self._in_order(name):
            try:
                await self._ensure_image(place, name)
                return name
            except SandboxUnavailable as error:
                failure = error
        raise failure

    async def _ensure_image(self, place: ComputerPlace, name: str) -> None:
        if folder := self._built.get(name):

            async def fill(context: IO[bytes]) -> None:
                await anyio.to_thread.run_sync(pack_image, folder, context)

            await place.ensure_image(name, fill)
        place.images.add(name)

    async def _in_order(self, image: str) -> list[ComputerPlace]:
        places: list[ComputerPlace] = [host for host in self.hosts if host.max_computers]
        try:
            places.append(await self._open_fleet())
        except ProgramUnsupported:  # this machine has no engine
            if not self.hosts:
                raise
        return in_order(places, image)
