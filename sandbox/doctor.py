"""Report the isolation layers of this machine, for containers and for local processes, and which of
the two a pool uses by default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio

from agentloop.sandbox.errors import SandboxError
from agentloop.sandbox.image import image_tag
from agentloop.sandbox.pool import Pool
from agentloop.sandbox.settings import PoolSettings

PROBE = "import os; print(6 * 7, os.getuid())"
ENGINE_TIMEOUT_S = 30.0  # shorter than a pool's, because a person is waiting
NAMES = {"docker": "containers", "process": "local processes"}


@dataclass(frozen=True)
class Report:
    """Results of `python -m agentloop.sandbox doctor`."""

    backends: dict[str, dict[str, str]]
    """The layers of each backend, with their states; only "unavailable" if no worker starts."""
    backend: str | None
    """The backend of a pool with default settings; None if such a pool refuses to start."""
    reason: str
    """The reason for the refusal."""

    @property
    def is_isolated(self) -> bool:
        return self.backend is not None

    def as_dict(self) -> dict[str, Any]:
        return {
            "isolated": self.is_isolated,
            "backend": self.backend,
            "reason": self.reason,
            "backends": self.backends,
        }

    def __str__(self) -> str:
        verdict = f"By default, a pool does not start on this machine: {self.reason}."
        if self.backend is not None:
            verdict = (
                f"By default, a pool on this machine runs calls in {NAMES[self.backend]}, isolated "
                "from each other, the network and the disk."
            )
        return f"{_table(self.backends)}\n\n{verdict}"


async def examine(progress: Callable[[str], None]) -> Report:
    """Start a worker of each backend, and then a pool with default settings."""
    backends = {
        f"containers (image {image_tag()})": await _layers("docker", progress),
        "local processes": await _layers("process", progress),
    }
    try:
        async with Pool(_settings("auto"), on_progress=progress) as pool:
            return Report(backends, pool.stats()["backend"], "")
    except SandboxError as error:
        return Report(backends, None, str(error))


async def _layers(backend: str, progress: Callable[[str], None]) -> dict[str, str]:
    settings = _settings(backend, allow_weak_isolation=True)  # to report missing layers
    try:
        async with Pool(settings, on_progress=progress) as pool:
            with anyio.fail_after(30):
                result = await pool.run(PROBE)
            layers = dict(pool.stats()["layers"])
            return layers | {"test call": f"{result.status} in {result.run_s * 1000:.1f} ms"}
    except SandboxError as error:
        return {"unavailable": str(error)}


def _settings(backend: str, **more: Any) -> PoolSettings:
    minimal = {"workers": 1, "preload": [], "engine_timeout_s": ENGINE_TIMEOUT_S}
    return PoolSettings.model_validate({"backend": backend, **minimal, **more})


def _table(backends: dict[str, dict[str, str]]) -> str:
    """Format an aligned block for each backend; the state of a missing layer begins with "no"."""
    lines = []
    for title, layers in backends.items():
        lines.append(title)
        width = max(map(len, layers))
        lines += [f"  {name:<{width}}  {text}" for name, text in layers.items()]
    return "\n".join(lines)
