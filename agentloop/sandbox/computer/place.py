"""A place where computers run: this machine's engine (fleet.py), or a host (remote.py)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from agentloop.sandbox.computer.machine import ComputerMachine, ComputerSpec

IMAGE_COMPUTERS = 4  # a place without an image is as good as one with so many computers more


class ComputerPlace(Protocol):
    """Starts and ends computers.

    Attributes:
        folder: a directory of this machine, which is removed at the end.
        images: those that computers have been started of, or that were built; "", its own.
        max_computers: how many may be open.
    """

    folder: Path
    images: set[str]

    @property
    def max_computers(self) -> int: ...

    @property
    def num_computers(self) -> int:
        """How many are open, or wanted."""
        ...

    async def take(self, spec: ComputerSpec) -> ComputerMachine:
        """Return a machine that is ready; `give_back` must follow.

        Raises:
            Overloaded: as many are in use as may be, for too long.
            ProgramUnsupported: the image is not there and can't be pulled.
            SandboxUnavailable: it did not start, or the place is gone.
        """
        ...

    def give_back(self, machine: ComputerMachine) -> None:
        """End a machine; its container is removed meanwhile."""
        ...

    async def ensure_image(self, name: str, folder: Path, timeout_s: float) -> None:
        """Build an image from a folder with a Dockerfile, unless it is there.

        Raises:
            SandboxUnavailable: a step of it failed, or the place did.
        """
        ...


def in_order(places: Iterable[ComputerPlace], image: str) -> list[ComputerPlace]:
    """Return places, the best for a computer first: with room, and the fewest computers."""

    def cost(place: ComputerPlace) -> tuple[bool, int]:
        is_full = place.num_computers >= place.max_computers
        return is_full, place.num_computers + IMAGE_COMPUTERS * (image not in place.images)

    return sorted(places, key=cost)
