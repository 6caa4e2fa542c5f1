"""Which place gets the next computer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentloop.sandbox.computer.place import in_order


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
