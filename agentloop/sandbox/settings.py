"""The settings of a pool."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

import pydantic
from packaging.requirements import InvalidRequirement, Requirement
from pydantic import Field


def default_workers() -> int:
    """Return the default number of workers: two per core, since calls also wait."""
    return 2 * len(os.sched_getaffinity(0))


DEBIAN = "debian:"  # before the name of a package of Debian's, as in debian:g++
MAX_CODE_BYTES = 8 << 20  # of a call's code and standard input together
MAX_KEPT_BYTES = 4 << 20  # per stream; as JSON, both must fit into a frame (protocol.py)


@dataclass(frozen=True)
class OutputLimits:
    """Limits of one call's output, which override the pool's settings."""

    max_bytes: int
    """Largest output in bytes; a call that writes more ends with the status output_limit."""
    keep_bytes: int
    """Bytes kept of each stream, half from its start and half from its end; at most
    MAX_KEPT_BYTES."""

    def __post_init__(self) -> None:
        if not (0 < self.keep_bytes <= MAX_KEPT_BYTES and self.max_bytes > 0):
            raise ValueError(
                f"output: both limits must be above 0, keep_bytes at most {MAX_KEPT_BYTES}"
            )


def split_packages(packages: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return Python's packages and Debian's, each sorted."""
    debian = sorted(name.removeprefix(DEBIAN) for name in packages if name.startswith(DEBIAN))
    return sorted(name for name in packages if not name.startswith(DEBIAN)), debian


class PoolSettings(pydantic.BaseModel, extra="forbid", frozen=True):
    """Settings of `sandbox.Pool`. The defaults suit a laptop."""

    backend: Literal["auto", "docker", "process"] = Field(
        default="auto",
        description="Where calls run. auto: in containers if a Docker Engine listens, otherwise in "
        "local processes.",
    )
    allow_weak_isolation: bool = Field(
        default=False,
        description="Start even if calls are not isolated from each other, the network and the "
        "disk. Only for trusted code; `python -m agentloop.sandbox doctor` lists what is missing.",
    )
    engines: list[str] = Field(
        default_factory=list,
        description="Docker Engines to use, as unix:///path or tcp://host:port. By default, the "
        "local engine.",
    )
    engine_certs: str = Field(
        default="",
        description="Folder with ca.pem, cert.pem and key.pem for engines at tcp://. By default, "
        "taken from DOCKER_TLS_VERIFY and DOCKER_CERT_PATH, as Docker's client does.",
    )
    hosts: list[str] = Field(
        default_factory=list,
        description="URLs (http://host:port) of machines that run `python -m "
        "agentloop.sandbox.serve`. If set, calls run on this machine only if `backend` or "
        "`engines` is set, too.",
    )
    hosts_token: pydantic.SecretStr | None = Field(
        default=None, description="Token that the hosts require."
    )
    engine_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=120.0, description="Time limit for an engine's first response."
    )
    image: str = Field(
        default="",
        description="Image of the containers. By default, the project's own, which is built if it "
        "is missing.",
    )
    runtime: str = Field(
        default="",
        description="The engines' runtime for containers, such as runsc (gVisor) for a kernel of "
        "their own. By default, the engine's default.",
    )
    packages: list[str] = Field(
        default_factory=list,
        description="Packages for programs besides numpy, scipy and sympy, such as "
        "math-verify==0.8.0, or debian:g++ for one of Debian's. They are added to the project's "
        "own image; for local processes they must be installed already.",
    )
    workers: Annotated[int, Field(ge=1)] = Field(
        default_factory=default_workers,
        description="Number of containers, or of local worker processes, for calls; each runs one "
        "call at a time. Further calls wait, first in, first out. By default, two for every core.",
    )
    max_sessions: Annotated[int, Field(ge=0)] = Field(
        default=64,
        description="Number of open notebook sessions, and of open computers. Each has a container "
        "of its own, beside those for calls; an idle one only costs memory.",
    )
    built_images_gib: Annotated[float, Field(ge=0)] = Field(
        default=20.0,
        description="Disk for images that were built of folders, such as those of Harbor tasks. "
        "Beyond it, the least recently used that no computer uses are removed.",
    )
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = Field(
        default=4.0, description="Wall time limit of a call that does not set its own."
    )
    memory_mib: Annotated[int, Field(ge=128)] = Field(
        default=512,
        description="Memory limit of a call, for all of its processes and its directory together.",
    )
    scratch_mib: Annotated[int, Field(ge=1)] = Field(
        default=32,
        description="Size of a call's writable directory. It is in memory and counts towards "
        "memory_mib.",
    )
    processes_per_call: Annotated[int, Field(ge=1)] = Field(
        default=32, description="Maximum number of processes and threads of a call."
    )
    max_wait_s: Annotated[float, Field(gt=0)] = Field(
        default=600.0,
        description="Time that a call may wait for a slot; then it ends with the status "
        "overloaded.",
    )
    start_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=60.0, description="Time for a worker to start, not counting a build of the image."
    )
    preload: list[list[str]] = Field(
        default_factory=lambda: [["numpy"], ["numpy", "sympy"]],
        description="Sets of modules to import in advance, so that calls start faster. A call is "
        "forked from the last set whose last module its code mentions, otherwise from a bare "
        "interpreter, which is cheapest.",
    )

    @pydantic.field_validator("packages")
    @classmethod
    def _are_requirements(cls, packages: list[str]) -> list[str]:
        for package in packages:
            if re.fullmatch(rf"{DEBIAN}[a-z0-9][a-z0-9.+-]+", package):
                continue
            try:
                Requirement(package)
            except InvalidRequirement as error:
                reason = str(error).partition("\n")[0]
                raise ValueError(f"{package!r} is not a valid requirement: {reason}") from None
        return packages

    @pydantic.model_validator(mode="after")
    def _has_one_image(self) -> Self:
        if self.image and self.packages:
            raise ValueError(
                f"packages: can only be added to the project's own image, not to {self.image!r}; "
                "leave one of the two empty"
            )
        return self

    @pydantic.field_validator("hosts")
    @classmethod
    def _are_urls(cls, hosts: list[str]) -> list[str]:
        for host in hosts:
            parts = urlsplit(host)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"a host must be http://host:port, not {host!r}")
        return hosts
