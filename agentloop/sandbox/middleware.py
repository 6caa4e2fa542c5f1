"""The service's middlewares: they bound the requests, the memory of their bodies, and their time.

request ──> counted ──> allowed (guard.py) ──> bounded ──> its body is read ──> handler
    a refusal at any of these is a RequestRefused, which becomes the response
"""

from __future__ import annotations

import logging
import time
from asyncio import Transport
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import anyio
import orjson
from aiohttp import web
from aiohttp.typedefs import Middleware

from agentloop.sandbox.api import Model, RequestRefused, ValueCounter, max_values, parse
from agentloop.sandbox.connections import Connections
from agentloop.sandbox.errors import Overloaded, ProgramUnsupported
from agentloop.sandbox.guard import Guard
from agentloop.sandbox.held_bytes import HeldBytes
from agentloop.sandbox.serve_settings import SandboxServeSettings

log = logging.getLogger("sandbox")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MIB = 1 << 20


class RequestLimits:
    """The middlewares of the service, and the reading of bodies."""

    def __init__(
        self,
        settings: SandboxServeSettings,
        max_connections: int,
        connections: Connections[Transport],
    ) -> None:
        self._connections = connections
        self._io_timeout_s = settings.io_timeout_s
        self._max_body_bytes = settings.max_body_mib * MIB
        # A service at its limits must still accept requests in order to answer them with 503.
        self._max_requests = min(settings.max_requests, max_connections // 2)
        self._max_links = min(settings.max_links, max_connections // 4)
        token = settings.token.get_secret_value() if settings.token else None
        self.guard = Guard(settings.host, token, settings.allowed_hosts)
        self.num_requests = 0
        self.num_links = 0
        self.held = HeldBytes(max(settings.max_held_mib, settings.max_body_mib) * MIB)

    @property
    def middlewares(self) -> list[Middleware]:
        return [self._errors, self._guard, self._bound]

    @contextmanager
    def link(self, request: web.Request) -> Iterator[None]:
        """Count the connection of a pool elsewhere, and the bytes that are held for it."""
        if self.num_links >= self._max_links:
            reason = f"{self._max_links} pools are already connected (max_links)"
            raise RequestRefused(503, "overloaded", reason)
        self.num_links += 1
        try:
            yield
        finally:
            self.num_links -= 1
            self.held.free(id(request))

    async def parse_body(
        self, model: type[Model], request: web.Request, empty: bytes = b""
    ) -> Model:
        """Read and validate a request's body."""
        body = await self._body(request, max_values(model))
        return parse(model, body or empty)

    async def _body(self, request: web.Request, max_num: int) -> bytearray:
        """Read the body, accounting for its bytes only as they arrive, not as announced."""
        body, values = bytearray(), ValueCounter()
        try:
            with anyio.fail_after(self._io_timeout_s):
                self._hold(request, request.content_length or 0, 0)
                while chunk := await request.content.readany():
                    self._hold(request, len(body) + len(chunk), len(body) + len(chunk))
                    body += chunk
                    if values.feed(chunk) > max_num:
                        reason = f"a request like this has at most {max_num} values and names"
                        raise RequestRefused(413, "too_large", reason)
        except TimeoutError:
            raise RequestRefused(408, "slow", "the body did not arrive in time") from None
        except web.RequestPayloadError:
            reason = "the body does not match its Content-Encoding"
            raise RequestRefused(400, "bad_request", reason) from None
        return body

    def _hold(self, request: web.Request, size: int, num_here: int) -> None:
        """Account for a body that has `size` bytes so far, until the request ends."""
        if size > self._max_body_bytes:
            reason = f"the body may have at most {self._max_body_bytes} bytes"
            raise RequestRefused(413, "too_large", reason)
        if not self.held.hold(id(request), num_here):
            raise _overload()

    @web.middleware
    async def _bound(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count a request and the bytes of its body and response, until the client has that."""
        if request.method != "POST":
            return await handler(request)
        if self.num_requests >= self._max_requests:
            raise _overload()
        self.num_requests += 1
        try:
            response = await handler(request)
            if isinstance(response, web.Response):
                await self._send(request, response)
            return response
        finally:
            self.num_requests -= 1
            self.held.free(id(request))

    async def reserve(self, request: web.Request, num_bytes: int) -> None:
        """Wait until there is memory for so large a response."""
        with anyio.move_on_after(self._io_timeout_s) as scope:
            await self.held.wait_to_hold(id(request), num_bytes)
        if scope.cancelled_caught:
            raise _overload()

    async def _send(self, request: web.Request, response: web.Response) -> None:
        """Send a response; connections.py closes the connection of a client that does not read."""
        num_bytes = len(response.body) if isinstance(response.body, bytes) else 0
        self.held.hold_anyway(id(request), num_bytes)
        self._connections.send(request.transport, time.monotonic())
        with suppress(ConnectionError):
            await response.prepare(request)
            await response.write_eof()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self.guard.admits_preflight(request.method, request.path, request.headers):
            return web.Response(status=204)
        if refusal := self.guard.refusal(request.path, request.headers):
            status, reason = refusal
            raise RequestRefused(status, "unauthorized" if status == 401 else "forbidden", reason)
        return await handler(request)

    async def allow_origin(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let pages of allowed sites read a response; a signal of aiohttp."""
        response.headers.update(self.guard.cors_headers(request.headers))

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        allowed = None
        try:
            return await handler(request)
        except RequestRefused as error:
            refused = error
        except Overloaded as error:
            refused = RequestRefused(503, "overloaded", str(error))
        except ProgramUnsupported as error:
            refused = RequestRefused(400, "unsupported", str(error), "language")
        except web.HTTPException as error:
            if error.status < 400:
                raise
            refused = RequestRefused(error.status, "http", f"{request.path}: {error.reason}")
            allowed = error.headers.get("Allow")
        except Exception:  # a bug: the client gets a well-formed error, the log the traceback
            log.exception("%s %s failed", request.method, request.path)
            refused = RequestRefused(500, "internal", "internal server error; see the server's log")
        response = json_response(refused.body, status=refused.status)
        if allowed is not None:
            response.headers["Allow"] = allowed
        if refused.status == 503:
            response.headers["Retry-After"] = "1"
        if request.content.exception() is not None:  # keep aiohttp from reading the rest
            request.content.feed_eof()
            response.force_close()
        return response


def json_response(body: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def _overload() -> RequestRefused:
    return RequestRefused(503, "overloaded", "too many requests are open here; try again later")
