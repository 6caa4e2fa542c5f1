"""Which of the images built for computers is removed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from agentloop.sandbox.computer.images import BuiltImage, next_to_remove

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def image(name: str, *, hours: float, in_use: bool = False, num_bytes: int = 10) -> BuiltImage:
    return BuiltImage((name,), num_bytes, NOW - timedelta(hours=hours), in_use)


def test_least_recently_used_goes_first_beyond_the_bound() -> None:
    images = [image("new", hours=1), image("old", hours=3), image("older", hours=4, in_use=True)]
    removed = next_to_remove(images, 29, NOW)
    assert removed is not None
    assert removed.names == ("old",)
    assert next_to_remove(images, 30, NOW) is None


def test_images_in_use_or_just_used_stay() -> None:
    images = [image("just used", hours=0.1), image("in use", hours=4, in_use=True)]
    assert next_to_remove(images, 0, NOW) is None
