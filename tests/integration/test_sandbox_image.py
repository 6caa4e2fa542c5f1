"""The image, built in both ways that there are: from a base that is pulled, and from packages."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiodocker
import anyio
import pytest

from agentloop.sandbox import Pool, PoolSettings
from agentloop.sandbox.engine import connect
from agentloop.sandbox.errors import SandboxUnavailable
from agentloop.sandbox.image import build
from tests.integration.conftest import need
from tests.patience import patient

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

PINNED = """
mpmath==1.3.0 --hash=sha256:a0b2b9fe80bbcd81a6647ff13108738cfb482d481d826cc0e02f5b35e5c88d2c
"""
ADDED = ["six==1.17.0"]
LIST = """
import importlib.metadata, mpmath, six
sorted(f"{one.name}=={one.version}" for one in importlib.metadata.distributions())
"""


@pytest.fixture
async def engine(
    docker_engine: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[aiodocker.Docker]:
    """The machine's engine, where a recipe of few packages has a name of its own."""
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(PINNED)
    monkeypatch.setattr(build, "REQUIREMENTS", requirements)
    monkeypatch.setattr(build, "IMAGE_NAME", "agentloop-test-image")
    async with connect(timeout_s=60) as docker:
        try:
            yield docker
        finally:
            for name in (build.image_tag(), build.image_tag(ADDED), "agentloop-test-base:1"):
                with contextlib.suppress(aiodocker.DockerError):
                    await docker.images.delete(name, force=True)


UNREACHABLE = "127.0.0.1:1/no"


@pytest.mark.parametrize("method", ["dockerfile", "mmdebstrap"])
async def test_either_base_gives_the_packages_that_are_asked_for(
    engine: aiodocker.Docker, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = ""
    try:
        if method == "dockerfile":
            base = await some_base(engine)
        else:
            monkeypatch.setattr(build, "_dockerfile_base", lambda: UNREACHABLE)
        await build.build_image(engine, print, packages=ADDED, base=base)
    except SandboxUnavailable as error:
        need(f"the packages and the base of the image: {error}")
    settings = PoolSettings(backend="docker", workers=1, preload=[], packages=ADDED)
    async with Pool(settings, on_progress=print) as pool:  # finds it in place
        result = await pool.run(LIST, timeout_s=20)
    assert result.result is not None, result
    assert {"mpmath==1.3.0", *ADDED} <= set(json.loads(result.result.replace("'", '"')))


async def some_base(engine: aiodocker.Docker) -> str:
    """One as if it had been pulled: where no registry can be reached, under a name of our own."""
    with contextlib.suppress(aiodocker.DockerError, TimeoutError), anyio.fail_after(patient(60)):
        await engine.images.pull(build._dockerfile_base())
        return build._dockerfile_base()
    name = await build._system_base(engine, print, ())
    await engine.images.tag(name, "agentloop-test-base", tag="1")
    return "agentloop-test-base:1"


async def test_without_a_base_it_is_said(
    engine: aiodocker.Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SandboxUnavailable, match=r"the base image 127\.0\.0\.1:1/no can't be"):
        await build.build_image(engine, print, base=UNREACHABLE)
    monkeypatch.setattr(build, "_dockerfile_base", lambda: UNREACHABLE)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(build, "BASE_NAME", "agentloop-test-no-base")
    with pytest.raises(SandboxUnavailable, match=r"apt install mmdebstrap.*backend=process"):
        await build.build_image(engine, print)
