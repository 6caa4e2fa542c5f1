"""The settings of a fleet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import pydantic

__all__ = ["FleetSettings"]


class FleetSettings(pydantic.BaseModel):
    """Settings of rollouts on several machines for one learner, connected through Redis."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    redis: str = pydantic.Field(
        "",
        description="URL of Redis, such as redis://127.0.0.1:6379/0, or rediss:// for TLS. If set, "
        "rollouts run on machines with `agentloop rollouts`, not on the trainer's. By default, no "
        "fleet.",
    )
    password: pydantic.SecretStr | None = pydantic.Field(
        None, description="Password of Redis, if it is not in the URL."
    )
    run: str = pydantic.Field(
        "",
        pattern=r"^[\w.-]*$",
        description="Name under which runtimes find the trainer in Redis. By default, the run's "
        "name.",
    )
    lease_s: float = pydantic.Field(
        30.0,
        gt=0,
        description="Time after which a silent runtime counts as dead and its groups go to others. "
        "The trainer's value applies.",
    )
    max_tries: int = pydantic.Field(
        5,
        ge=1,
        description="Number of attempts at a group, after failures of runtimes and servers or "
        "unreadable results, before the run fails.",
    )
    give_up_s: float = pydantic.Field(
        600.0,
        gt=0,
        description="Time for which Redis, the trainer or all runtimes may be away before the "
        "process gives up.",
    )
    max_result_mib: int = pydantic.Field(
        512, ge=1, description="Maximum compressed size of a group's rollouts sent through Redis."
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _keep_the_secret(cls, values: Any) -> Any:
        """Move a password from the URL to `password`: the run's folder keeps settings, not
        secrets."""
        url = urlsplit(str(values.get("redis") or "") if isinstance(values, Mapping) else "")
        if url.password is None:
            return values
        user = f"{url.username}@" if url.username else ""
        secret, where = url.netloc.rsplit("@", 1)
        there = url.geturl().replace(f"{secret}@{where}", user + where, 1)
        return {**values, "redis": there, "password": unquote(url.password)}

    @pydantic.field_validator("redis")
    @classmethod
    def _is_a_url(cls, redis: str) -> str:
        url = urlsplit(redis)
        if redis and url.scheme not in ("redis", "rediss", "unix"):
            raise ValueError(f"{redis!r} is not of the form redis://HOST:PORT/0")
        if url.scheme == "unix" or "@" in url.netloc:
            return redis
        # After an unescaped delimiter the password would count as part of the URL and be saved.
        rest = url.path + url.fragment or url.query
        if "@" in rest:
            raise ValueError("escape /, ? and # in the URL's password as %2F, %3F and %23")
        return redis
