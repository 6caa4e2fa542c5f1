"""Which place gets the next computer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentloop.sandbox.computer.place import ComputerPlaces, in_order
from agentloop.sandbox.errors import ProgramUnsupported, SandboxUnavailable


def place(num_computers: int, *images: str, max_computers: int = 8) -> Any:
    counts = {"num_computers": num_computers - 1, "num_promised": 1}
    return SimpleNamespace(**counts, max_computers=max_computers, images={"", *images})


@pytest.mark.parametrize(
    ("places", "best"),
    [
        ([place(2), place(1), place(3)], 1),
        ([place(1, max_computers=1), place(7)], 1),
        ([place(0), place(3, "task")], 1),
        ([place(0), place(5, "task")], 0),
        ([place(0), place(1, "task", max_computers=1)], 0),
    ],
)
def test_room_comes_first_then_few_computers_and_the_image(places: list[Any], best: int) -> None:
    assert in_order(places, "task")[0] is places[best]


def test_every_place_has_an_image_of_its_own() -> None:
    places = [place(1, "task"), place(0)]
    assert in_order(places, "")[0] is places[1]


async def test_image_is_built_on_another_host_if_the_first_is_gone(tmp_path: Path) -> None:
    async def no_engine() -> Any:
        raise ProgramUnsupported("this machine has no engine")

    async def refuse(*_: object) -> None:
        raise SandboxUnavailable("cannot connect to the host")

    async def build(name: str, _fill: object) -> None:
        built.append(name)

    built: list[str] = []
    (tmp_path / "Dockerfile").write_text("FROM scratch")
    places = ComputerPlaces(no_engine)
    gone, alive = place(0), place(1)
    gone.ensure_image, alive.ensure_image = refuse, build
    places.hosts = [gone, alive]
    assert built == [await places.build_image(tmp_path)]
    places.hosts.pop()
    with pytest.raises(SandboxUnavailable, match="cannot connect"):
        await places.build_image(tmp_path)
