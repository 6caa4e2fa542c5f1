"""The settings of a pool."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

import pydantic
from packaging.requirements import InvalidRequirement, Requirement
from pydantic import Field


def default_workers() -> int:
    """Return the default number of workers: one per two cores, since each runs several calls."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


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

    def as_dict(self) -> dict[str, int]:
        """Return the limits as fields of a frame."""
        return {"max_output_bytes": self.max_bytes, "keep_output_bytes": self.keep_bytes}


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
        description="Docker Engines: unix:///path or tcp://host:port. Empty: the local engine.",
    )
    engine_certs: str = Field(
        default="",
        description="Directory of ca.pem, cert.pem and key.pem for engines at tcp://. Empty: from "
        "DOCKER_TLS_VERIFY and DOCKER_CERT_PATH, like Docker's client.",
    )
    hosts: list[str] = Field(
        default_factory=list,
        description="Machines that run `agentloop.sandbox.serve`: http://host:port. With hosts, "
        "calls run on this machine only if `backend` or `engines` is set.",
    )
    hosts_token: pydantic.SecretStr | None = Field(default=None, description="Token for the hosts.")
    engine_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=120.0,
        description="Time limit in seconds for an engine's first response.",
    )
    image: str = Field(
        default="",
        description="Image of the containers. Empty: the project's own, built if missing.",
    )
    packages: list[str] = Field(
        default_factory=list,
        description="Packages for programs besides numpy, scipy and sympy, such as "
        "math-verify==0.8.0. They are added to the project's own image; with local processes they "
        "must already be installed.",
    )
    workers: Annotated[int, Field(ge=1)] = Field(
        default_factory=default_workers, description="Containers (or local worker processes)."
    )
    slots_per_worker: Annotated[int, Field(ge=1, le=256)] = Field(
        default=4,
        description="Concurrent calls per worker. Further calls wait, first in, first out.",
    )
    sessions_per_worker: Annotated[int, Field(ge=0, le=256)] = Field(
        default=32, description="Open sessions per worker. An idle one only costs memory."
    )
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = Field(
        default=4.0, description="Wall time limit in seconds of calls that do not set their own."
    )
    memory_mib: Annotated[int, Field(ge=128)] = Field(
        default=512,
        description="Memory limit of all processes of one call together, including its directory. "
        "A worker may use that per slot, and the same again for idle sessions, but no more than "
        "its share of three quarters of the machine's memory.",
    )
    scratch_mib: Annotated[int, Field(ge=1)] = Field(
        default=32, description="Size of a call's writable directory, which is in memory."
    )
    processes_per_call: Annotated[int, Field(ge=1)] = Field(
        default=32, description="Processes and threads per call."
    )
    max_output_bytes: Annotated[int, Field(ge=1024)] = Field(
        default=1 << 20,
        description="Largest output in bytes; a call that writes more ends with output_limit.",
    )
    keep_output_bytes: Annotated[int, Field(ge=64, le=MAX_KEPT_BYTES)] = Field(
        default=64 * 1024,
        description="Bytes kept of each stream, half from its start and half from its end.",
    )
    max_code_bytes: Annotated[int, Field(ge=1024, le=32 << 20)] = Field(
        default=8 << 20, description="Largest size of code and standard input together."
    )
    max_waiting: Annotated[int, Field(ge=0)] = Field(
        default=100_000,
        description="Calls that may wait for a slot; further ones end as `overloaded`.",
    )
    max_wait_s: Annotated[float, Field(gt=0)] = Field(
        default=600.0, description="Longest wait for a slot in seconds; then `overloaded`."
    )
    recycle_after: Annotated[int, Field(ge=1)] = Field(
        default=20_000, description="Number of calls after which a worker is replaced."
    )
    start_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=60.0,
        description="Time limit for the start of a worker in seconds, without building the image.",
    )
    preload: list[list[str]] = Field(
        default_factory=lambda: [["numpy"], ["numpy", "sympy"]],
        description="Sets of modules that are imported ahead of calls. A call is forked from the "
        "last set whose last module its code names, otherwise from a bare interpreter, which is "
        "cheapest.",
    )

    @pydantic.field_validator("packages")
    @classmethod
    def _are_requirements(cls, packages: list[str]) -> list[str]:
        for package in packages:
            try:
                Requirement(package)
            except InvalidRequirement as error:
                why = str(error).partition("\n")[0]
                raise ValueError(f"{package!r} is not a valid requirement: {why}") from None
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
