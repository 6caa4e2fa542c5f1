"""List what agentloop's commands need and this machine has, and how to get what is missing.

Nothing is started: packages are looked up, and Docker Engine is asked for the sandbox's image.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiodocker
import anyio

from agentloop.distribution import conflict, install_hint, is_installed
from agentloop.errors import SettingsError
from agentloop.inference.processes.server_log import NOT_INSTALLED
from agentloop.inference.processes.supervise import ServerSettings, require_device
from agentloop.sandbox import SandboxUnavailable
from agentloop.sandbox.engine import connect
from agentloop.sandbox.errors import NoEngine
from agentloop.sandbox.image import has_image, image_tag

_MIN_FREE_GB = 5
_CONNECT_S = 5.0
_INSTALL_ENGINE = (
    "; start it, or install it: https://docs.docker.com/engine/install "
    "(`python -m agentloop.sandbox doctor` shows the isolation without it)"
)
# What each optional part is for, by the extra that installs it, and its modules.
_EXTRAS = {
    "train": ("agentloop train, agentloop sft", ("torch", "deepspeed", "peft")),
    "data": ("tasks of the Hugging Face hub and of parquet files", ("datasets", "pyarrow")),
    "ray": ("training on several machines", ("ray",)),
    "mcp": ("tools of MCP servers", ("mcp",)),
    "otel": ("traces", ("opentelemetry.sdk",)),
}


@dataclass(frozen=True, slots=True)
class Check:
    """A part that agentloop may need.

    Attributes:
        purpose: The use of the part.
        is_there: whether it was found.
        is_optional: whether most commands work without it.
        remedy: how to get it; "" if it is there.
    """

    name: str
    purpose: str
    is_there: bool
    is_optional: bool
    remedy: str


def examine(
    *,
    installed: Callable[[str], bool] = is_installed,
    which: Callable[[str], str | None] = shutil.which,
    image: Callable[[], bool | Exception] | None = None,
    free_gb: Callable[[], float] | None = None,
) -> list[Check]:
    """Look for the parts; the arguments take the place of this machine in tests.

    Args:
        image: returns whether the engine has the sandbox's image, or why it cannot be asked.
    """
    has_gpu = which("nvidia-smi") is not None
    has_image = (image or _engine_has_image)()
    no_engine = has_image if isinstance(has_image, Exception) else None
    clash = conflict()
    checks = [
        _check("package agentloop", "no other project in the place of ours", not clash, clash),
        _check(
            "SGLang",
            "models on this machine (chat, serve, train); other endpoints need none",
            installed("sglang"),
            "python -m agentloop.inference.install",
        ),
        _check(
            "NVIDIA GPU",
            "large models; small ones run on the CPU",
            has_gpu,
            "install NVIDIA's driver, if there is a GPU",
            is_optional=True,
        ),
        _check(
            "Docker Engine",
            "calls in containers; otherwise in local processes",
            no_engine is None,
            str(no_engine) + _INSTALL_ENGINE * isinstance(no_engine, NoEngine),
            # Local processes take its place only where nothing names an engine.
            is_optional=isinstance(no_engine, NoEngine) and not os.environ.get("DOCKER_HOST"),
        ),
        _check(
            f"sandbox image {image_tag()}",
            "what containers start from; otherwise it is built when it is first needed",
            has_image is True,
            "python -m agentloop.sandbox.image build, with Docker Engine; takes some minutes",
            is_optional=True,
        ),
        _check(
            "disk space",
            f"at least {_MIN_FREE_GB} GB for runs, here",
            (free_gb or _free_gb)() >= _MIN_FREE_GB,
            "free some, or set run.folder to another disk",
        ),
    ]
    for extra, (purpose, modules) in _EXTRAS.items():
        missing = [name for name in modules if not installed(name)]
        name = f"extra {extra}" + (f" (lacks {', '.join(missing)})" if missing else "")
        hint = install_hint(extra)
        checks.append(_check(name, purpose, not missing, hint, is_optional=True))
    return checks


def require_servers(settings: ServerSettings) -> None:
    """Check that servers can be started here, before anything else is.

    Raises:
        SettingsError: SGLang or the GPU that the settings ask for is missing.
    """
    require_device(settings)
    if not is_installed("sglang"):
        raise SettingsError(NOT_INSTALLED)


def report(checks: Sequence[Check]) -> str:
    """Return the checks as text: what is there, then what is missing and how to get it."""
    lines = [f"ok       {check.name}: {check.purpose}" for check in checks if check.is_there]
    for check in checks:
        if not check.is_there:
            word = "optional" if check.is_optional else "MISSING "
            lines += [f"{word} {check.name}: {check.purpose}", f"           {check.remedy}"]
    lines += ["", "How a model's conversations are read: agentloop doctor MODEL"]
    return "\n".join(lines)


def _check(
    name: str, purpose: str, is_there: bool, remedy: str, *, is_optional: bool = False
) -> Check:
    return Check(name, purpose, is_there, is_optional, "" if is_there else remedy)


def _engine_has_image() -> bool | Exception:
    """Return whether Docker Engine has the sandbox's image, or why it cannot be asked."""

    async def ask() -> bool:
        async with connect(timeout_s=_CONNECT_S) as docker:
            return await has_image(docker, image_tag())  # no deadline: requests have one

    try:
        return anyio.run(ask)
    except (SandboxUnavailable, aiodocker.DockerError) as error:
        return error


def _free_gb() -> float:
    return shutil.disk_usage(Path.cwd()).free / 1e9
