"""Who may talk to the service: the address it listens on, tokens, Host and Origin.

On loopback no token is needed, so a page in the user's own browser must not get through: DNS
rebinding is stopped by an exact check of Host, a cross-site request by one of Origin.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Awaitable, Callable
from typing import Self

import pydantic
from aiohttp import web

from agentloop.api.openai import error_body

__all__ = ["Guard", "ServeSettings", "is_loopback"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_OPEN_PATHS = ("/healthz",)


class ServeSettings(pydantic.BaseModel):
    """The HTTP service."""

    model_config = pydantic.ConfigDict(extra="forbid")

    host: str = pydantic.Field(
        "127.0.0.1", description="Address to listen on; other than loopback only with a token."
    )
    port: int = pydantic.Field(8000, ge=0, le=65_535, description="Port; 0 finds a free one.")
    token: pydantic.SecretStr | None = pydantic.Field(
        None, description="Callers must send it as `Authorization: Bearer ...`."
    )
    allowed_hosts: list[str] = pydantic.Field(
        default_factory=list,
        description="Names, besides its own address, that callers may reach it by.",
    )
    max_rollouts: int = pydantic.Field(
        1024, ge=1, description="Rollouts in flight; more wait their turn."
    )
    max_body_mib: int = pydantic.Field(8, ge=1, description="A larger request is refused.")

    @pydantic.model_validator(mode="after")
    def _needs_token(self) -> Self:
        if not is_loopback(self.host) and not self.token:
            raise ValueError(
                f"host {self.host!r} can be reached by others: set serve.token as well"
            )
        return self


def is_loopback(host: str) -> bool:
    """Whether an address or name stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """Decides on each request before any handler sees it."""

    def __init__(self, settings: ServeSettings) -> None:
        self._token = settings.token.get_secret_value().encode() if settings.token else None
        self._any_address = settings.host in ("0.0.0.0", "::")
        self._names = {settings.host.lower(), *(name.lower() for name in settings.allowed_hosts)}
        if is_loopback(settings.host) or self._any_address:
            self._names |= {"localhost", "127.0.0.1", "::1"}

    def refusal(
        self, *, path: str, host: str | None, origin: str | None, authorization: str | None
    ) -> tuple[int, str] | None:
        """None for a welcome request, else a status and the reason."""
        if not self._known_host(host):
            return 403, f"Host {host!r} is not one of this server's; see serve.allowed_hosts"
        if origin is not None and not self._known_origin(origin):
            return 403, f"Origin {origin!r} may not use this server"
        if path in _OPEN_PATHS or self._token is None:
            return None
        scheme, _, given = (authorization or "").partition(" ")
        # Bytes of a header that are no UTF-8 arrive as surrogates.
        given_bytes = given.strip().encode("utf-8", "surrogatepass")
        if scheme.lower() == "bearer" and secrets.compare_digest(given_bytes, self._token):
            return None
        return 401, "a token is needed: send `Authorization: Bearer TOKEN`"

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = self.refusal(
            path=request.path,
            host=request.headers.get("Host"),
            origin=request.headers.get("Origin"),
            authorization=request.headers.get("Authorization"),
        )
        if refusal is None:
            return await handler(request)
        status, reason = refusal
        kind = "authentication_error" if status == 401 else "permission_error"
        return web.json_response(error_body(reason, kind), status=status)

    def _known_host(self, host: str | None) -> bool:
        name = _host_name(host or "")
        if name in self._names:
            return True
        return self._any_address and _is_address(name)

    def _known_origin(self, origin: str) -> bool:
        scheme, separator, rest = origin.partition("://")
        return bool(separator) and scheme in ("http", "https") and self._known_host(rest)


def _host_name(host: str) -> str:
    """The name or address of a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
