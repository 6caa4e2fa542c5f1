"""Address, tokens and access checks of the service, with errors in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import pydantic
from aiohttp import web
from aiohttp.typedefs import Handler

from agentloop.sandbox.guard import OPEN_PATHS, Guard, is_loopback
from agentloop.serving.exchange import error_in_form_of
from agentloop.serving.http import error_body


class ServeSettings(pydantic.BaseModel):
    """The HTTP service."""

    model_config = pydantic.ConfigDict(extra="forbid")

    host: str = pydantic.Field(
        "127.0.0.1",
        description="Address to listen on. Any address other than loopback requires a token.",
    )
    port: int = pydantic.Field(
        8000, ge=0, le=65_535, description="Port to listen on. 0: any free port."
    )
    token: pydantic.SecretStr | None = pydantic.Field(
        None,
        description="Token that clients must send as `Authorization: Bearer TOKEN`. By default, "
        "none.",
    )
    control_token: pydantic.SecretStr | None = pydantic.Field(
        None,
        description="Token that the page requires before it may pause, drain or cancel, or write a "
        "checkpoint. By default, a random one, which is printed.",
    )
    allowed_hosts: list[str] = pydantic.Field(
        default_factory=list,
        description="Host names, besides its own address, under which clients may reach the "
        "service. With a token any host name is accepted, and this only lists the sites whose "
        "pages may call it.",
    )
    max_rollouts: int = pydantic.Field(
        1024, ge=1, description="Maximum number of concurrent rollouts; further requests wait."
    )
    max_body_mib: int = pydantic.Field(8, ge=1, description="Maximum size of a request body.")
    io_timeout_s: float = pydantic.Field(
        60.0, gt=0, description="Time for a client to send its request or to accept a response."
    )

    @pydantic.model_validator(mode="after")
    def _needs_token(self) -> Self:
        if not is_loopback(self.host) and not self.token:
            raise ValueError(
                f"host {self.host!r} is reachable from other machines: set serve.token as well"
            )
        return self


def _is_open(path: str) -> bool:
    """Return whether a path needs no token; the page asks for the token itself."""
    if path.startswith("/v1/sessions/"):  # a session's key, in its path, replaces the token
        return True
    return path in OPEN_PATHS or path in ("/", "/health") or path.startswith("/page/")


class ApiGuard(Guard):
    """Checks each request before it reaches a handler; refuses it in OpenAI's error format."""

    def __init__(self, settings: ServeSettings) -> None:
        token = settings.token.get_secret_value() if settings.token else None
        super().__init__(settings.host, token, settings.allowed_hosts, open_paths=_is_open)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self.admits_preflight(request.method, request.path, request.headers):
            return web.Response(status=204)
        refusal = self.refusal(request.path, _with_bearer(request.headers))
        if refusal is None:
            return await handler(request)
        status, reason = refusal
        is_token = status == 401
        kind = "authentication_error" if is_token else "permission_error"
        code = "invalid_api_key" if is_token else None
        body = error_in_form_of(request, status, error_body(reason, kind, code=code))
        return web.json_response(body, status=status)

    def add_to(self, app: web.Application) -> None:
        """Check the requests of an application, after its other middlewares so far."""
        app.middlewares.append(self.middleware)
        app.on_response_prepare.append(self._allow_origin)

    async def _allow_origin(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let pages of allowed sites read a response."""
        response.headers.update(self.cors_headers(request.headers))


def _with_bearer(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return headers in which a key of Anthropic's or Azure's clients is where OpenAI's have it."""
    keys = [headers[name] for name in ("X-Api-Key", "Api-Key") if name in headers]
    if "Authorization" in headers or not keys:
        return headers
    names = ("Host", "Origin")
    kept = {name: headers[name] for name in names if name in headers}
    return {**kept, "Authorization": f"Bearer {keys[0]}"}
