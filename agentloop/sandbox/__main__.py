"""`python -m agentloop.sandbox doctor`: report the isolation layers of this machine, for containers
and for local processes, and which of the two a pool uses by default.

The exit status is 1 if a pool with default settings does not start.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import aiodocker
import anyio

from agentloop.sandbox.engine import connect
from agentloop.sandbox.errors import SandboxError
from agentloop.sandbox.image import has_image, image_tag
from agentloop.sandbox.pool import Pool
from agentloop.sandbox.settings import PoolSettings

PROBE = "import os; print(6 * 7, os.getuid())"
ENGINE_TIMEOUT_S = 30.0  # shorter than a pool's, because a person is waiting
NAMES = {"docker": "containers", "process": "local processes"}


async def examine(progress: Callable[[str], None]) -> dict[str, object]:
    """Start a worker of each backend, and then a pool with default settings.

    The image is built if it is missing; the layers say whether it was there.

    Returns:
        backends: the layers of each backend, with their states; only "unavailable" if no worker
            starts.
        backend: that of the pool, or None if it refuses to start, and `reason` says why.
        isolated: whether it started.
    """
    image = await _image_state()
    backends = {
        f"containers (image {image_tag()})": {**image, **await _layers("docker", progress)},
        "local processes": await _layers("process", progress),
    }
    backend, reason = None, ""
    try:
        async with Pool(_settings("auto"), on_progress=progress) as pool:
            backend = pool.stats()["backend"]
    except SandboxError as error:
        reason = str(error)
    isolated = backend is not None
    return {"isolated": isolated, "backend": backend, "reason": reason, "backends": backends}


def as_text(report: dict[str, Any]) -> str:
    """Format a report: an aligned block for each backend, and the verdict."""
    lines = []
    for title, layers in report["backends"].items():
        width = max(map(len, layers))
        lines += [title, *(f"  {name:<{width}}  {state}" for name, state in layers.items())]
    if report["isolated"]:
        verdict = (
            f"By default, a pool on this machine runs calls in {NAMES[report['backend']]}, "
            "isolated from each other, the network and the disk."
        )
    else:
        verdict = f"By default, a pool does not start on this machine: {report['reason']}."
    return "\n".join([*lines, "", verdict])


async def _image_state() -> dict[str, str]:
    """Say whether the local engine has the image; empty if no engine answers."""
    with suppress(SandboxError, aiodocker.DockerError):
        async with connect(timeout_s=ENGINE_TIMEOUT_S) as docker:
            in_place = await has_image(docker, image_tag())
            return {"image": "in place" if in_place else "was missing: built by this command"}
    return {}


async def _layers(backend: str, progress: Callable[[str], None]) -> dict[str, str]:
    settings = _settings(backend, allow_weak_isolation=True)  # to report missing layers
    try:
        async with Pool(settings, on_progress=progress) as pool:
            with anyio.fail_after(30):
                result = await pool.run(PROBE)
            test_call = f"{result.status} in {result.run_s * 1000:.1f} ms"
            return {**pool.stats()["layers"], "test call": test_call}
    except SandboxError as error:
        return {"unavailable": str(error)}


def _settings(backend: str, **more: Any) -> PoolSettings:
    minimal = {"workers": 1, "preload": [], "engine_timeout_s": ENGINE_TIMEOUT_S}
    return PoolSettings.model_validate({"backend": backend, **minimal, **more})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m agentloop.sandbox", description=__doc__)
    parser.add_argument("action", choices=["doctor"])
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(arguments)
    report = anyio.run(examine, partial(print, file=sys.stderr, flush=True))
    print(json.dumps(report, indent=2) if options.json else as_text(report))
    return 0 if report["isolated"] else 1


if __name__ == "__main__":
    sys.exit(main())
