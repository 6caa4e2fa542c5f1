"""Map the errors of handlers to HTTP responses, in the form of the request's protocol."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from aiohttp import web
from aiohttp.typedefs import Handler

from agentloop.errors import RequestError, ServerError
from agentloop.sandbox.openapi import Route
from agentloop.serving.exchange import error_in_form_of
from agentloop.serving.http import error_body, error_of, json_response
from agentloop.serving.schemas import ErrorBody

log = logging.getLogger(__name__)


class ErrorResponses:
    """A middleware that answers requests whose handler has failed."""

    def __init__(
        self,
        routes: Sequence[Route],
        *,
        begin: Callable[[web.Request], None] = lambda request: None,
    ) -> None:
        """
        Args:
            routes: The service's routes, listed in the answer to a request of any other.
            begin: Called before each request.
        """
        self._routes = routes
        self._begin = begin

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._begin(request)
        try:
            return await handler(request)
        except (RequestError, ServerError) as error:
            return _error_response(request, *error_of(error))
        except web.HTTPException as error:
            if error.status < 400:
                raise
            kind = "invalid_request_error" if error.status < 500 else "server_error"
            message, code = error.text or error.reason, None
            if request.match_info.http_exception is not None:  # no route
                message, code = self._not_offered(request), "unknown_url"
            answer = _error_response(request, error.status, error_body(message, kind, code=code))
            if isinstance(error, web.HTTPMethodNotAllowed):
                answer.headers["Allow"] = error.headers["Allow"]
            return answer
        except ConnectionError as error:  # the client has disconnected and will not read this
            return _error_response(request, 408, error_body(str(error), "invalid_request_error"))
        except Exception:  # a bug: the client gets a well-formed error, the log the traceback
            # The route, not the path: that of a session has its key.
            route = request.match_info.route.resource
            where = route.canonical if route is not None else "an unknown path"
            log.exception("%s %s failed", request.method, where)
            return _error_response(
                request, 500, error_body("internal server error", "server_error")
            )

    def _not_offered(self, request: web.Request) -> str:
        offered = ", ".join(f"{route.method} {route.template}" for route in self._routes)
        return f"{request.method} {request.path} does not exist; available: {offered}"


def _error_response(request: web.Request, status: int, body: ErrorBody) -> web.Response:
    """Return an error in the form of the request's protocol."""
    return json_response(error_in_form_of(request, status, body), status=status)
