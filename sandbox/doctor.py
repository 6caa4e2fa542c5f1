"""Which walls stand on this machine, for containers and for local processes, and which a pool uses
that is told nothing."""

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
ENGINE_TIMEOUT_S = 30.0  # a pool waits for longer, but not somebody who looks at a terminal
NAMES = {"docker": "containers", "process": "local processes"}


@dataclass(frozen=True)
class Report:
    """Results of `python -m agentloop.sandbox doctor`."""

    forms: dict[str, dict[str, str]]
    """Layer by layer what holds in each form; a single "unavailable" where no worker comes up."""
    backend: str | None
    """Where a pool with default settings runs its calls; None where it refuses to start."""
    why: str
    """Why it refuses."""

    @property
    def is_isolated(self) -> bool:
        return self.backend is not None

    def as_dict(self) -> dict[str, Any]:
        return {
            "isolated": self.is_isolated,
            "backend": self.backend,
            "why": self.why,
            "forms": self.forms,
        }

    def __str__(self) -> str:
        verdict = f"By default a pool does not start here: {self.why}."
        if self.backend is not None:
            verdict = (
                f"By default a pool runs its calls in {NAMES[self.backend]} here, where they are "
                "isolated from each other, the network and the disk."
            )
        return f"{_table(self.forms)}\n\n{verdict}"


async def examine(progress: Callable[[str], None]) -> Report:
    """Start a worker of each form, and then a pool with default settings."""
    forms = {
        f"containers (image {image_tag()})": await _layers("docker", progress),
        "local processes": await _layers("process", progress),
    }
    try:
        async with Pool(_settings("auto"), on_progress=progress) as pool:
            return Report(forms, pool.stats()["backend"], "")
    except SandboxError as error:
        return Report(forms, None, str(error))


async def _layers(backend: str, progress: Callable[[str], None]) -> dict[str, str]:
    settings = _settings(backend, allow_weak_isolation=True)  # to tell what is weak
    try:
        async with Pool(settings, on_progress=progress) as pool:
            with anyio.fail_after(30):
                result = await pool.run(PROBE)
            layers = dict(pool.stats()["layers"])
            return layers | {"a call": f"{result.status} in {result.run_s * 1000:.1f} ms"}
    except SandboxError as error:
        return {"unavailable": str(error)}


def _settings(backend: str, **more: Any) -> PoolSettings:
    few = {"workers": 1, "preload": [], "engine_timeout_s": ENGINE_TIMEOUT_S}
    return PoolSettings.model_validate({"backend": backend, **few, **more})


def _table(forms: dict[str, dict[str, str]]) -> str:
    """Format one aligned block for each form; a missing layer begins with "no"."""
    lines = []
    for title, layers in forms.items():
        lines.append(title)
        width = max(map(len, layers))
        lines += [f"  {name:<{width}}  {text}" for name, text in layers.items()]
    return "\n".join(lines)
