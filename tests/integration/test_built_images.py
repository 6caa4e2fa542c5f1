"""Images of computers are kept within a bound of disk, by a real engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import aiodocker
import pytest

from agentloop.sandbox import Pool, PoolSettings
from agentloop.sandbox.computer import images
from agentloop.sandbox.engine import connect
from agentloop.sandbox.image.build import has_image, image_tag

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

NAME = "agentloop-test-task"
SETTINGS = PoolSettings(backend="docker", workers=1, preload=[], built_images_gib=7_000_000 / 2**30)
RECIPE = f"FROM {image_tag()}\nRUN head -c 3000000 /dev/urandom > /{{}}\n"


@pytest.fixture
async def engine(
    docker_engine: None, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[aiodocker.Docker]:
    """The machine's engine, where images of other pools are not ours."""
    monkeypatch.setattr(images, "IMAGE_NAME", NAME)
    monkeypatch.setattr(images, "LEAST_KEPT", timedelta(0))
    async with connect(timeout_s=60) as docker:
        try:
            yield docker
        finally:
            for image in await docker.images.list():
                for name in image["RepoTags"] or ():
                    if name.startswith(NAME):
                        await docker.images.delete(name, force=True)


async def test_least_recently_used_image_is_removed(
    engine: aiodocker.Docker, tmp_path: Path
) -> None:
    async with Pool(SETTINGS, on_progress=print) as pool:

        async def build(name: str) -> str:
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            (folder / "Dockerfile").write_text(RECIPE.format(name))
            return await pool.build_image(folder)

        first, second = await build("first"), await build("second")
        assert await build("first") == first  # it is used once more
        third = await build("third")
        assert [await has_image(engine, name) for name in (first, second, third)] == [
            True, False, True,
        ]  # fmt: skip
        # What somebody has named is theirs, and what a computer uses stays.
        await engine.images.tag(first, f"{NAME}-of-somebody", tag="1")
        async with pool.computer(third):
            second, fourth = await build("second"), await build("fourth")
            assert [await has_image(engine, name) for name in (first, second, third, fourth)] == [
                True, False, True, True,
            ]  # fmt: skip
