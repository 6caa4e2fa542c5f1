"""HTTP helpers: JSON responses, errors in OpenAI's format, and bodies with a deadline.

The constants describe responses and headers for the OpenAPI document.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
from aiohttp import web

from agentloop.api.schemas import ErrorBody
from agentloop.errors import AgentLoopError, RequestError, UnknownModel, UnknownSession
from agentloop.plain_json import dumps
from agentloop.sandbox.openapi import JSON, Response, Responses

__all__ = [
    "BODY_ERRORS",
    "REFUSALS",
    "REQUEST_ID",
    "UNKNOWN_MODEL",
    "error_body",
    "error_of",
    "event_line",
    "event_stream",
    "has_left",
    "json_response",
    "name_request",
    "read_body",
    "send",
    "send_whole",
]


def _error(description: str) -> Response:
    return Response(description, {JSON: ErrorBody})


BODY_ERRORS: Responses = {
    400: _error("The request is invalid; the message names the field."),
    408: _error("The body did not arrive in time."),
    413: _error("The body is larger than `serve.max_body_mib`."),
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


def event_stream() -> web.StreamResponse:
    """Return a response of server-sent events, not prepared yet."""
    return web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )


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


async def name_request(request: web.Request, response: web.StreamResponse) -> None:
    """Set X-Request-Id on a response: the caller's own if it is well-formed, else a new one."""
    request_id = request.headers.get("X-Request-Id", "")
    is_plain = re.fullmatch(r"[\w.:-]{1,128}", request_id, re.ASCII)
    name = request_id if is_plain else f"req_{uuid.uuid4().hex}"
    response.headers["X-Request-Id"] = name
    response.headers["Request-Id"] = name  # where Anthropic's clients look


async def read_body(request: web.Request, timeout_s: float) -> bytes:
    """Return the body of a request.

    Raises:
        web.HTTPException: it did not arrive in time, is too large or badly encoded.
    """
    try:
        with anyio.fail_after(timeout_s):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text="the body did not arrive in time") from None
    except web.RequestPayloadError:
        raise web.HTTPBadRequest(text="the body does not match its Content-Encoding") from None


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
