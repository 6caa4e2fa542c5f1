"""What a pool may be told."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

import pydantic
from packaging.requirements import InvalidRequirement, Requirement
from pydantic import Field


def default_workers() -> int:
    """One worker for two cores, one at least: a worker keeps its own slots busy."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


MAX_KEPT_BYTES = 4 << 20  # of each stream; as JSON, both must fit into a frame (protocol.py)


@dataclass(frozen=True)
class OutputLimits:
    """Of one call's output, where the pool's settings do not suit."""

    max_bytes: int
    """A call that writes more ends with the status output_limit."""
    keep_bytes: int
    """Kept of each stream, at most MAX_KEPT_BYTES: half from its head, half from its tail."""

    def __post_init__(self) -> None:
        if not (0 < self.keep_bytes <= MAX_KEPT_BYTES and self.max_bytes > 0):
            raise ValueError(
                f"output: both limits are above 0, keep_bytes at most {MAX_KEPT_BYTES}"
            )

    def as_dict(self) -> dict[str, int]:
        """In a frame's words."""
        return {"max_output_bytes": self.max_bytes, "keep_output_bytes": self.keep_bytes}


class PoolSettings(pydantic.BaseModel, extra="forbid", frozen=True):
    """Settings of `sandbox.Pool`. Every one has a default that suits a laptop."""

    backend: Literal["auto", "docker", "process"] = Field(
        default="auto",
        description="Where calls run. auto: in containers where a Docker Engine listens, else in "
        "local processes.",
    )
    allow_weak_isolation: bool = Field(
        default=False,
        description="Start even where calls would not be kept apart from each other, the network "
        "and the disk. For code that you trust; `python -m sandbox doctor` says what is missing.",
    )
    engines: list[str] = Field(
        default_factory=list,
        description="Docker Engines: unix:///path or tcp://host:port. Empty: the local engine.",
    )
    engine_certs: str = Field(
        default="",
        description="Directory of ca.pem, cert.pem and key.pem for engines at tcp://. Empty: as "
        "Docker's own client, by DOCKER_TLS_VERIFY and DOCKER_CERT_PATH.",
    )
    hosts: list[str] = Field(
        default_factory=list,
        description="Machines that run `python -m sandbox.serve`: http://host:port. With hosts, "
        "calls run here as well only where `backend` or `engines` ask for it.",
    )
    hosts_token: pydantic.SecretStr | None = Field(
        default=None, description="The token of the hosts."
    )
    engine_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=120.0,
        description="The longest wait in seconds for the first answer of an engine that listens.",
    )
    image: str = Field(
        default="",
        description="Image of the containers. Empty: the project's own, built when missing.",
    )
    packages: list[str] = Field(
        default_factory=list,
        description="Packages for programs besides numpy, scipy and sympy, such as "
        "math-verify==0.8.0. They are added to the project's own image; for local processes they "
        "must be installed already.",
    )
    workers: Annotated[int, Field(ge=1)] = Field(
        default_factory=default_workers, description="Containers (or local worker processes)."
    )
    slots_per_worker: Annotated[int, Field(ge=1, le=256)] = Field(
        default=4,
        description="Calls that run at once in one worker. More calls wait, first in first out.",
    )
    sessions_per_worker: Annotated[int, Field(ge=0, le=256)] = Field(
        default=32, description="Sessions that one worker may hold. An idle one costs only memory."
    )
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = Field(
        default=4.0, description="Wall time of a call in seconds, unless the call names its own."
    )
    memory_mib: Annotated[int, Field(ge=128)] = Field(
        default=512,
        description="Memory that the processes of one call may hold together, with its directory. "
        "A worker may have that for each slot, and as much again for sessions that rest, but no "
        "more than its part of three quarters of the machine.",
    )
    scratch_mib: Annotated[int, Field(ge=1)] = Field(
        default=32, description="Size of the directory that a call can write to. It is memory."
    )
    processes_per_call: Annotated[int, Field(ge=1)] = Field(
        default=32, description="Processes and threads that one call may have."
    )
    max_output_bytes: Annotated[int, Field(ge=1024)] = Field(
        default=1 << 20, description="A call that writes more ends with the status output_limit."
    )
    keep_output_bytes: Annotated[int, Field(ge=64, le=MAX_KEPT_BYTES)] = Field(
        default=64 * 1024,
        description="Bytes kept of each stream: half from its head, half from its tail.",
    )
    max_code_bytes: Annotated[int, Field(ge=1024, le=32 << 20)] = Field(
        default=8 << 20, description="The most that code and standard input may have together."
    )
    max_waiting: Annotated[int, Field(ge=0)] = Field(
        default=100_000,
        description="Calls that may wait for a slot; further ones are `overloaded`.",
    )
    max_wait_s: Annotated[float, Field(gt=0)] = Field(
        default=600.0, description="The longest wait for a slot in seconds; then `overloaded`."
    )
    recycle_after: Annotated[int, Field(ge=1)] = Field(
        default=20_000, description="Calls after which a worker is replaced by a fresh one."
    )
    start_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=60.0,
        description="The longest start of a worker in seconds (the image is built before).",
    )
    preload: list[list[str]] = Field(
        default_factory=lambda: [["numpy"], ["numpy", "sympy"]],
        description="Modules that are loaded ahead of calls. A call is forked from the last set "
        "whose last module its code names, else from a bare interpreter, which is cheapest.",
    )

    @pydantic.field_validator("packages")
    @classmethod
    def _are_requirements(cls, packages: list[str]) -> list[str]:
        for package in packages:
            try:
                Requirement(package)
            except InvalidRequirement as error:
                why = str(error).partition("\n")[0]
                raise ValueError(f"{package!r} is not a package's name: {why}") from None
        return packages

    @pydantic.model_validator(mode="after")
    def _has_one_image(self) -> Self:
        if self.image and self.packages:
            raise ValueError(
                f"packages: they are added to the project's own image, not to {self.image!r}; "
                "leave one of the two empty"
            )
        return self

    @pydantic.field_validator("hosts")
    @classmethod
    def _are_urls(cls, hosts: list[str]) -> list[str]:
        for host in hosts:
            parts = urlsplit(host)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"a host is http://host:port, not {host!r}")
        return hosts
