"""Where computers run: on this machine's engine (fleet.py), or on hosts (remote.py)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from agentloop.sandbox.computer.fleet import Fleet
from agentloop.sandbox.computer.remote import HostPlace

IMAGE_COMPUTERS = 4  # a place without an image is as good as one with so many computers more

ComputerPlace: TypeAlias = Fleet | HostPlace


def in_order(places: Iterable[ComputerPlace], image: str) -> list[ComputerPlace]:
    """Return places, the best for a computer first: with room, and the fewest computers."""

    def cost(place: ComputerPlace) -> tuple[bool, int]:
        is_full = place.num_computers >= place.max_computers
        return is_full, place.num_computers + IMAGE_COMPUTERS * (image not in place.images)

    return sorted(places, key=cost)
