"""The service as an MCP server (streamable HTTP) with one tool, which asks the agent.

The SDK answers each request, as an ASGI application without sessions; the response is JSON. A
request lives in its handler's task, so its rollout is cancelled when the client disconnects.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import anyio
from aiohttp import web

from agentloop.agent.mcp import import_sdk
from agentloop.distribution import version
from agentloop.errors import RequestError, ServerError, SettingsError
from agentloop.plain_json import with_whole_pairs

if TYPE_CHECKING:
    from mcp.types import CallToolRequestParams, CallToolResult, ListToolsResult

_NAME = "ask_agent"
_SCHEMA = {
    "type": "object",
    "properties": {"question": {"type": "string", "description": "The question or task."}},
    "required": ["question"],
    "additionalProperties": False,
}


class AgentTool:
    """An MCP server whose only tool, `ask_agent`, returns the agent's answer to a question."""

    def __init__(self, ask: Callable[[str], Awaitable[str]], *, model_name: str) -> None:
        """
        Args:
            ask: returns the answer to a question. A RequestError or ServerError is reported to the
                client as the tool's error.
        """
        self._ask = ask
        self._description = (
            f"Ask an agent (model {model_name}) a question and get its answer. It may run tools of "
            "its own, such as Python programs, before it answers."
        )

    async def answer(self, request: web.Request, body: bytes) -> web.Response:
        """Return the response to a request with this body.

        Raises:
            web.HTTPNotImplemented: the SDK is not installed.
        """
        try:
            await import_sdk()
        except SettingsError as error:
            raise web.HTTPNotImplemented(text=str(error)) from error
        from mcp.server import Server
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

        server: object = Server(
            "agentloop", version=version(), on_list_tools=self._list, on_call_tool=self._call
        )
        body = with_whole_pairs(body.decode("utf-8", "surrogateescape")).encode(
            "utf-8", "surrogateescape"
        )
        # One for each request, so that nothing of it outlives its handler.
        manager = StreamableHTTPSessionManager(
            server, stateless=True, json_response=True, max_request_body_size=max(1, len(body))
        )
        async with manager.run():
            return await _forward(manager.handle_request, request, body)

    async def _list(self, context: object, parameters: object) -> ListToolsResult:
        from mcp.types import ListToolsResult, Tool

        tool = Tool(name=_NAME, description=self._description, input_schema=_SCHEMA)
        return ListToolsResult(tools=[tool])

    async def _call(self, context: object, parameters: CallToolRequestParams) -> CallToolResult:
        from mcp.types import CallToolResult, TextContent

        def result(text: str, *, is_error: bool = False) -> CallToolResult:
            return CallToolResult(content=[TextContent(text=text)], is_error=is_error)

        arguments = parameters.arguments or {}
        question = arguments.get("question")
        if parameters.name != _NAME:
            return result(f"there is no tool {parameters.name!r}; use {_NAME}", is_error=True)
        if not isinstance(question, str) or not question.strip() or len(arguments) > 1:
            return result("expected one argument, question: a string", is_error=True)
        try:
            return result(await self._ask(question))
        except (RequestError, ServerError) as error:
            return result(str(error), is_error=True)


async def _forward(
    application: Callable[..., Awaitable[None]], request: web.Request, body: bytes
) -> web.Response:
    """Return an ASGI application's response to a request."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    status, headers, parts = 500, list[tuple[bytes, bytes]](), list[bytes]()

    async def receive() -> Mapping[str, object]:
        if not messages:
            # no deadline: when the client disconnects, the handler and with it this is cancelled
            await anyio.sleep_forever()
        return messages.pop()

    async def send(message: Mapping[str, Any]) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], list(message.get("headers", ()))
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.scheme,
        "path": request.path,
        "query_string": request.query_string.encode(),
        "headers": [(name.lower(), value) for name, value in request.raw_headers],
    }
    await application(scope, receive, send)
    response = web.Response(status=status, body=b"".join(parts))
    for name, value in headers:
        if name.lower() != b"content-length":
            response.headers[name.decode("latin-1")] = value.decode("latin-1")
    return response
