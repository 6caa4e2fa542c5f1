"""HTTP helpers: JSON responses, errors in OpenAI's format, and bodies with a deadline.

The constants describe responses and headers for the OpenAPI document.
"""

from __future__ import annotations

import re
import time
import uuid
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
from aiohttp import web

from agentloop.aio import task_group
from agentloop.errors import AgentLoopError, RequestError, UnknownModel, UnknownSession
from agentloop.plain_json import dumps
from agentloop.sandbox.openapi import JSON, Response, Responses
from agentloop.serving.schemas import ErrorBody


def _error(description: str) -> Response:
    return Response(description, {JSON: ErrorBody})


_PING_S = 15.0
_ID = web.RequestKey("id", str)

BODY_ERRORS: Responses = {
    400: _error("The request is invalid; the message names the field."),
    408: _error("The body did not arrive in time."),
    413: _error("The body is larger than `serve.max_body_mib`."),
    415: _error("The body's `Content-Encoding` is neither gzip nor deflate."),
    503: _error("The infrastructure failed, or no new work is accepted."),
}
UNKNOWN_MODEL: Responses = {404: _error("The requested model is not served.")}
REFUSALS: Responses = {
    401: _error("The token is missing or wrong."),
    403: _error("The `Host` is not the server's, or the `Origin` is another site."),
}
REQUEST_ID = {
    "X-Request-Id": {
        "description": "The request's own id if it is well-formed, else a new one.",
        "required": True,
        "schema": {"type": "string"},
    }
}


class EventStream:
    """A response of server-sent events, which begins with the first of them.

    While nothing is sampled (in a queue, during a prefill or a tool's run), it says so every 15 s,
    because proxies and clients give up on a connection that is silent for a minute.
    """

    def __init__(
        self, request: web.Request, *, timeout_s: float, ping: bytes = b": nothing new\n\n"
    ) -> None:
        """
        Args:
            timeout_s: Time for the client to accept an event.
            ping: The event to send while there is nothing new; by default, a comment.
        """
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        self._request, self._timeout_s, self._ping = request, timeout_s, ping
        self._writing = anyio.Lock()
        self._sent_s = time.monotonic()

    @property
    def has_begun(self) -> bool:
        """True if the status was sent; before, an error can still set it."""
        return self.response.prepared

    async def send(self, data: bytes) -> None:
        """Send events.

        Raises:
            ConnectionResetError: The client did not read in time.
        """
        async with self._writing:  # no deadline: send() has one
            if not self.response.prepared:
                await self.response.prepare(self._request)
            await send(self._request, self.response, data, timeout_s=self._timeout_s)
            self._sent_s = time.monotonic()

    @asynccontextmanager
    async def alive(self) -> AsyncIterator[None]:
        """Send pings while this context lasts."""
        async with task_group(only_first=True) as tasks:
            tasks.start_soon(self._send_pings)
            yield
            tasks.cancel_scope.cancel()

    async def _send_pings(self) -> None:
        while True:
            wait_s = self._sent_s + _PING_S - time.monotonic()
            if wait_s > 0:
                await anyio.sleep(wait_s)
            else:
                await self.send(self._ping)  # no deadline: it has one


def event_line(data: object) -> bytes:
    """Return one event of a stream."""
    return b"data: " + dumps(data) + b"\n\n"


def json_response(body: object, status: int = 200) -> web.Response:
    return web.Response(body=dumps(body), status=status, content_type="application/json")


def error_body(
    message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> ErrorBody:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_of(error: AgentLoopError) -> tuple[int, ErrorBody]:
    """Return the HTTP status and the body for an error."""
    if not isinstance(error, RequestError):
        return 503, error_body(str(error), "server_error")
    named = re.match(r"([a-z_][\w.\[\]]*): ", str(error))
    body = error_body(
        str(error), "invalid_request_error", param=named and named[1], code=error.code
    )
    is_unknown = isinstance(error, UnknownModel | UnknownSession)
    return 404 if is_unknown else 400, body


def id_of(request: web.Request) -> str:
    """Return a request's id: the caller's own if it is well-formed, else a new one."""
    if _ID not in request:
        id = request.headers.get("X-Request-Id", "")
        is_plain = re.fullmatch(r"[\w.:-]{1,128}", id, re.ASCII)
        request[_ID] = id if is_plain else f"req_{uuid.uuid4().hex}"
    return request[_ID]


async def name_request(request: web.Request, response: web.StreamResponse) -> None:
    """Set X-Request-Id on a response."""
    name = id_of(request)
    response.headers["X-Request-Id"] = name
    response.headers["Request-Id"] = name  # where Anthropic's clients look


async def read_body(request: web.Request, timeout_s: float) -> bytes:
    """Return the body of a request.

    Raises:
        web.HTTPException: it did not arrive in time, is too large or badly encoded.
    """
    try:
        with anyio.fail_after(timeout_s):
            body = await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text="the body did not arrive in time") from None
    except web.RequestPayloadError:
        raise web.HTTPBadRequest(text="the body was cut off") from None
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding == "identity":
        return body
    return _decompress(body, encoding, request.client_max_size)


def _decompress(body: bytes, encoding: str, max_size: int) -> bytes:
    """Decompress a body.

    Not left to aiohttp, whose parser answers an encoding that it lacks in a form of its own.
    """
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise web.HTTPUnsupportedMediaType(
            text=f"Content-Encoding: {encoding:.50} is not supported by this server; use gzip"
        )
    # Some clients mean by deflate the plain stream, without the header that the standard requires.
    is_plain = encoding == "deflate" and body[:1] and body[0] & 0xF != zlib.DEFLATED
    stream = zlib.decompressobj(-zlib.MAX_WBITS if is_plain else zlib.MAX_WBITS | 32)
    try:
        data = stream.decompress(body, max_size + 1)
    except zlib.error:
        data = b""
    if len(data) > max_size:
        raise web.HTTPRequestEntityTooLarge(max_size, len(data))
    if not stream.eof:
        raise web.HTTPBadRequest(text="the body does not match its Content-Encoding")
    return data


async def send(
    request: web.Request, response: web.StreamResponse, data: bytes, *, timeout_s: float
) -> None:
    """Write to the client within the deadline.

    A client that does not read is treated as disconnected, since it occupies a rollout slot and
    the buffered response.

    Raises:
        ConnectionResetError: the client did not read in time.
    """
    with _reading(request, timeout_s):
        await response.write(data)  # no deadline: _reading() has one


def has_left(request: web.Request) -> bool:
    """Return whether the client is known to have disconnected."""
    return request.transport is None or request.transport.is_closing()


async def send_whole(request: web.Request, response: web.Response, *, timeout_s: float) -> None:
    """Write a response to its end within the deadline, so that its handler knows if that fails.

    Raises:
        ConnectionResetError: the client has gone, or did not read in time.
    """
    with _reading(request, timeout_s):
        await response.prepare(request)
        await response.write_eof()


@contextmanager
def _reading(request: web.Request, timeout_s: float) -> Iterator[None]:
    """Close the connection, and raise ConnectionResetError, if the client does not read in time."""
    try:
        with anyio.fail_after(timeout_s):
            yield
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()  # close() would wait for the client
        raise ConnectionResetError("the client does not read the response") from None
