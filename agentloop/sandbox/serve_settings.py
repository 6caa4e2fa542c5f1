"""The settings of the HTTP service, and the limit of open files that follows from them."""

from __future__ import annotations

import resource
from typing import Self

import pydantic
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from agentloop.sandbox.flags import flags_of
from agentloop.sandbox.guard import is_loopback
from agentloop.sandbox.settings import PoolSettings

SPARE_DESCRIPTORS = 64  # reserved for the process itself, and for each worker
DESCRIPTORS_PER_WORKER = 8


class SandboxServeSettings(BaseSettings):
    """Run Python programs sent over HTTP, each confined in a process of its own.

    Settings are flags (--port 8010 --pool.workers 4), key=value (port=8010 pool.workers=4) or
    environment variables (SANDBOX_PORT, SANDBOX_POOL__WORKERS; preferably for SANDBOX_TOKEN, since
    other users can read a command line).
    """

    model_config = SettingsConfigDict(
        extra="forbid",
        env_prefix="SANDBOX_",
        env_nested_delimiter="__",
        cli_prog_name="python -m agentloop.sandbox.serve",
    )

    host: str = Field(
        "127.0.0.1",
        description="Address to listen on. Any address other than loopback requires a token.",
    )
    port: int = Field(8010, ge=0, le=65_535, description="Port to listen on. 0: any free port.")
    token: pydantic.SecretStr | None = Field(
        None,
        description="Token that clients must send as `Authorization: Bearer TOKEN`. By default, "
        "none.",
    )
    allowed_hosts: list[str] = Field(
        default_factory=list,
        description="Host names, besides its own address, under which clients may reach the "
        "service. With a token any host name is accepted, and this only lists the sites whose "
        "pages may call it.",
    )
    max_connections: int = Field(
        8192,
        ge=16,
        description="Maximum number of connections; fewer if the limit of open files is lower. A "
        "new one replaces the one that has been idle for longest.",
    )
    max_requests: int = Field(
        4096,
        ge=1,
        description="Maximum number of concurrent requests, at most half of max_connections; "
        "further ones get 503 with `Retry-After`.",
    )
    max_links: int = Field(
        64, ge=0, description="Maximum number of connections from pools on other machines."
    )
    max_body_mib: int = Field(64, ge=1, description="Maximum size of a request body.")
    max_held_mib: int = Field(
        1024,
        ge=1,
        description="Memory for all requests, links and unread responses together; beyond it, "
        "requests wait or get 503.",
    )
    io_timeout_s: float = Field(
        60.0, gt=0, description="Time for a client to send a request or to accept a response."
    )
    idle_timeout_s: float = Field(
        75.0, gt=0, description="A connection without a request for this long is closed."
    )
    session_idle_s: float = Field(
        600.0, gt=0, description="A session without a call for this long is closed."
    )
    code_judge_timeout_s: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="Wall time limit of a submission through Code Judge's routes.",
    )
    code_judge_chars: int = Field(
        1000,
        ge=0,
        description="Characters of each output stream in responses of Code Judge's routes.",
    )
    pool: PoolSettings = Field(default_factory=PoolSettings)

    @pydantic.model_validator(mode="after")
    def _is_safe(self) -> Self:
        if not is_loopback(self.host) and not (self.token and self.token.get_secret_value()):
            raise ValueError(f"host: {self.host!r} can be reached by others: set a token, too")
        if 2 * self.max_requests > self.max_connections:
            raise ValueError(
                f"max_requests: {self.max_requests} is more than half of max_connections "
                f"({self.max_connections}): lower the one or raise the other"
            )
        return self


def load(arguments: list[str]) -> SandboxServeSettings:
    """Load settings from flags, key=value and the environment.

    Exits the process for --help and for unknown flags.

    Raises:
        ValueError: a setting is invalid; the message names it.
    """
    flags = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        # A flag's value may contain an equals sign.
        is_value = before.startswith("-") and "=" not in before
        is_pair = "=" in argument and not argument.startswith("-") and not is_value
        flags.append(f"--{argument}" if is_pair else argument)
    try:
        return SandboxServeSettings(_cli_settings_source=flags_of(SandboxServeSettings)(args=flags))
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, problem["loc"]))
        raise ValueError(f"{field}: {problem['msg']}" if field else problem["msg"]) from None
    except SettingsError as error:
        raise ValueError(str(error)) from None


def num_connections(settings: SandboxServeSettings) -> int:
    """Return the largest number of connections that leaves file descriptors for the workers."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return settings.max_connections
    return max(16, min(settings.max_connections, limit - _num_spare(settings)))


def _num_spare(settings: SandboxServeSettings) -> int:
    pool = settings.pool
    return SPARE_DESCRIPTORS + DESCRIPTORS_PER_WORKER * (pool.workers + len(pool.hosts))


def raise_descriptor_limit(settings: SandboxServeSettings) -> None:
    """Raise the limit of open files as far as the settings need and the process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = settings.max_connections + _num_spare(settings)
    if resource.RLIM_INFINITY not in (soft, hard):
        target = min(target, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
