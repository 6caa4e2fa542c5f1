"""Which walls stand on this machine, for containers and for local processes."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from sandbox.errors import SandboxError
from sandbox.image import image_tag
from sandbox.pool import Pool
from sandbox.settings import PoolSettings

PROBE = "import os; print(6 * 7, os.getuid())"


async def examine(backend: str, progress: Callable[[str], None]) -> dict[str, str]:
    """Layer by layer what holds; a single "unavailable" where no worker comes up."""
    settings = PoolSettings.model_validate({"backend": backend, "workers": 1, "preload": []})
    try:
        async with Pool(settings, on_progress=progress) as pool:
            with anyio.fail_after(30):
                result = await pool.run(PROBE)
            layers = dict(pool.stats()["layers"])
            return layers | {"a call": f"{result.status} in {result.run_s * 1000:.1f} ms"}
    except SandboxError as error:
        return {"unavailable": str(error)}


def table(columns: dict[str, dict[str, str]]) -> str:
    """One block for each form, aligned; a missing wall begins with "no"."""
    lines = []
    for title, layers in columns.items():
        lines.append(title)
        width = max(map(len, layers))
        lines += [f"  {name:<{width}}  {text}" for name, text in layers.items()]
    return "\n".join(lines)


async def report(progress: Callable[[str], None]) -> str:
    return table(
        {
            f"containers (image {image_tag()})": await examine("docker", progress),
            "local processes": await examine("process", progress),
        }
    )
