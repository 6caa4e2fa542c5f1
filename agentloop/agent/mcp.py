"""Tools of MCP servers (Model Context Protocol), through the official SDK.

    McpServerSettings   a program to start here, or a URL
    McpServer           the connection to a server, which is made again when it is lost
    mcp_server          a server that belongs to one rollout

    call ──> a result            the model reads it, `[error]` first if the tool failed
         ├─> no result in time   `[timeout]`, if the server still answers other requests
         ├─> no readable answer  fails at once; the rollout has no reward
         ├─> a hung server       is ended and started again; the rollout has no reward
         └─> a lost connection   is made again; the rollout has no reward

A server that is started here runs under a guardian (inference/processes/guardian.py), so that
nothing of it is left when we end. The SDK's own log records are in the loggers `mcp.*`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Self, TextIO, TypeVar
from urllib.parse import urlsplit

import anyio
import anyio.abc
import pydantic

from agentloop.agent.tools import Arguments, RunTool, Schema, Tool, ToolOutput
from agentloop.aio import LimiterVar, Signal, limiter_in, task_group
from agentloop.distribution import require, version
from agentloop.errors import McpServerError, RequestError, SettingsError, leaves, message_of
from agentloop.inference.processes.restarts import Restarts
from agentloop.inference.processes.supervise import stdio_guarded
from agentloop.inference.proxies import proxy_for
from agentloop.plain_json import dumps
from agentloop.trajectory import ToolCallStatus

if TYPE_CHECKING:
    from mcp import Client, types
    from mcp.client._transport import TransportStreams
    from mcp.shared.message import SessionMessage

log = logging.getLogger(__name__)
V = TypeVar("V")

_MAX_RESTARTS = 10
_PROBE_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 10.0
_TAIL_BYTES = 2000
_MAX_QUOTED = 200  # characters of an answer that cannot be read
# The SDK's message for an HTTP error whose body is no JSON-RPC. The code is that of a failed tool.
_HTTP_ERROR = "Server returned an error response"
_starting = LimiterVar("_starting")  # of programs at a time, so that none of many takes too long


def with_plain_names(values: dict[str, V]) -> dict[str, V]:
    """Return a table whose names the user chooses, after a check of these.

    Raises:
        ValueError: one of them has other characters than letters, digits, `_` and `-`.
    """
    for name in values:
        if not re.fullmatch(r"[\w-]+", name, re.ASCII):
            raise ValueError(f"{name!r}: a name has only letters, digits, _ and -")
    return values


class McpServerSettings(pydantic.BaseModel):
    """An MCP server. `mcp:NAME` in `tools` are all of its tools, `mcp:NAME/TOOL` is one."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    command: tuple[str, ...] = pydantic.Field(
        (),
        description="Program and arguments of a server to start on this machine, which talks on "
        "its stdin and stdout. `python` is the interpreter that runs agentloop.",
    )
    url: str | None = pydantic.Field(
        None, description="URL of a running server (streamable HTTP), instead of `command`."
    )
    env: dict[str, str] = pydantic.Field(
        default_factory=dict,
        description="Environment of the program, besides HOME, PATH and a few others. `${NAME}` in "
        "a value is replaced by that variable of our own environment.",
    )
    headers: dict[str, str] = pydantic.Field(
        default_factory=dict,
        description="HTTP headers of requests to the URL, such as a token; `${NAME}` as in `env`.",
    )
    timeout_s: pydantic.PositiveFloat = pydantic.Field(
        30.0, description="Time limit of one call of a tool."
    )
    start_timeout_s: pydantic.PositiveFloat = pydantic.Field(
        60.0, description="Time for the server to start, or to be reached, and to list its tools."
    )
    max_concurrent: pydantic.PositiveInt = pydantic.Field(
        64, description="Maximum number of concurrent calls; further ones wait."
    )

    _plain = pydantic.field_validator("env", "headers")(with_plain_names)

    @pydantic.model_validator(mode="after")
    def _is_one_server(self) -> Self:
        if bool(self.command) == (self.url is not None):
            raise ValueError("set either command or url")
        if self.url is None and self.headers:
            raise ValueError("headers: only a server with a url gets headers")
        if self.url is not None:
            if self.env:
                raise ValueError("env: only a server with a command has an environment")
            url = urlsplit(self.url)
            if url.scheme not in ("http", "https") or not url.hostname:
                raise ValueError(f"url: {self.url!r} is not of the form http://HOST/PATH")
        return self


class McpTool:
    """A tool of an MCP server (`agentloop.agent.tools.Tool`).

    Attributes:
        state: the server, if it may keep state for one rollout: then its calls take turns.
    """

    def __init__(
        self, server: McpServer, name: str, schema: Schema, *, is_read_only: bool = False
    ) -> None:
        self.name = name
        self.schema = schema
        self.state = None if server.is_shared or is_read_only else server
        self._server = server

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RunTool]:
        yield self._run

    async def _run(self, arguments: Arguments, /) -> ToolOutput:
        return await self._server.call(self.name, arguments)


class McpServer:
    """The connection to an MCP server.

    Attributes:
        name: the server's name in messages.
        tools: the server's tools, as of the last connection.
        is_shared: whether it serves all rollouts, and is connected to again when it is lost.
    """

    def __init__(
        self, name: str, settings: McpServerSettings, *, log_path: Path | None = None
    ) -> None:
        """
        Args:
            log_path: file for the stderr of a server that is started here; None: a temporary one.
        """
        self.name = name
        self.settings = settings
        self.tools: list[McpTool] = []
        self._log_path = log_path
        self._slots = anyio.CapacityLimiter(settings.max_concurrent)
        self._client: Client | None = None  # the SDK's, while there is a connection
        self._lost = anyio.Event()  # of the current connection
        self._why = f"{self} is not connected"
        self._last_words = ""  # the end of its stderr
        self.is_shared = False
        self._changed = Signal()

    def __str__(self) -> str:
        return f"the MCP server {self.name}"

    async def keep_connected(
        self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Stay connected until cancelled. A lost connection is made again, and a server restarted.

        Raises:
            RequestError, McpServerError: the first connection failed, as in `stay_connected`.
            McpServerError: a server that is started here has ended too often.
        """
        self.is_shared = True
        restarts = Restarts(_MAX_RESTARTS if self.settings.command else sys.maxsize)
        await self.stay_connected(task_status=task_status)
        while (delay_s := restarts.record_death(time.monotonic())) is not None:
            log.error("%s: connecting again", self._why)
            await anyio.sleep(delay_s)
            try:
                await self.stay_connected()
            except (McpServerError, RequestError) as error:
                self._why = str(error)
        raise McpServerError(
            f"given up after {_MAX_RESTARTS} restarts within ten minutes: {self._why}"
        )

    async def stay_connected(
        self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Connect, list the tools, and return when the connection is lost.

        Raises:
            RequestError: the server cannot be used: its program is missing or ends by itself, or
                a tool has an invalid schema.
            McpServerError: it cannot be reached, or was not ready in time.
            SettingsError: the environment names a proxy that cannot be used.
        """
        from mcp import Client
        from mcp.types import Implementation

        lost = self._lost = anyio.Event()
        self._last_words = ""
        client = Client(
            self._transport(lost),
            client_info=Implementation(name="agentloop", version=version()),
            cache=None,
        )
        start_s, is_ready = self.settings.start_timeout_s, False
        try:
            async with AsyncExitStack() as starting:
                if self.settings.command:
                    await starting.enter_async_context(limiter_in(_starting, os.cpu_count() or 1))
                with anyio.CancelScope(deadline=anyio.current_time() + start_s) as scope:
                    async with client:
                        self.tools = await self._list_tools(client)
                        await starting.aclose()
                        scope.deadline = math.inf
                        self._client, is_ready = client, True
                        self._changed.notify()
                        task_status.started()
                        try:
                            await lost.wait()  # no deadline: as long as the connection lasts
                        finally:
                            self._client = None
                            scope.deadline = anyio.current_time() + _CLOSE_TIMEOUT_S
        except Exception as errors:  # the SDK raises errors of its own and of HTTP, in groups
            error = next(leaves(errors))
            problem = message_of(error) or type(error).__name__
            if isinstance(error, RequestError | SettingsError):
                raise error from None
            if not is_ready and self.settings.command and lost.is_set():
                raise RequestError(f"{self} ended as it started{self._last_words}") from error
            if not is_ready:
                raise McpServerError(
                    f"{self} cannot be used: {problem}{self._last_words}"
                ) from error
            self._lose(lost, f"was lost: {problem}")
        if not is_ready:
            raise McpServerError(
                f"{self} was not ready within {start_s:g} s (`start_timeout_s`){self._last_words}"
            )
        self._why += self._last_words

    def _lose(self, lost: anyio.Event, reason: str) -> None:
        """Record how a connection was lost, and have it closed."""
        if not lost.is_set():
            self._why = f"{self} {reason}"
            lost.set()

    async def call(self, tool: str, arguments: Arguments) -> ToolOutput:
        """Call a tool, and say in the output how it went."""
        try:
            json.dumps(arguments, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:  # a lone surrogate, for example
            return ToolOutput(ToolCallStatus.BAD_ARGUMENTS, f"[bad arguments] {error}")
        async with self._slots:  # no deadline: each call ahead has one
            client, lost = await self._wait_for_client(), self._lost
            started_s = time.monotonic()
            if client is None:
                return ToolOutput(ToolCallStatus.INFRASTRUCTURE, self._why, started_s)
            try:
                with anyio.move_on_after(self.settings.timeout_s):
                    result = await client.call_tool(tool, dict(arguments))
                    return ToolOutput(*_outcome(result), started_s)
            except Exception as error:  # of the server's or of the SDK, whatever it is
                if self._client is client:
                    return ToolOutput(*self._failure(error, lost), started_s)
                return ToolOutput(ToolCallStatus.INFRASTRUCTURE, self._why, started_s)
            if await _answers(client):
                text = f"[timeout] stopped after {self.settings.timeout_s:g} s"
                return ToolOutput(ToolCallStatus.TIMEOUT, text, started_s)
            self._lose(lost, "does not answer")
            return ToolOutput(ToolCallStatus.INFRASTRUCTURE, f"{self} does not answer", started_s)

    async def _wait_for_client(self) -> Client | None:
        """Return the SDK's client; None if there is no connection, and not again in time either."""
        with anyio.move_on_after(self.settings.timeout_s):
            while self._client is None and self.is_shared:
                await self._changed.wait()
        return self._client

    def _failure(self, error: Exception, lost: anyio.Event) -> tuple[ToolCallStatus, str]:
        """Attribute an error of a call to the arguments, the tool or the connection."""
        from mcp import MCPError, types

        if isinstance(error, pydantic.ValidationError):  # a result without what it has to have
            return ToolCallStatus.INFRASTRUCTURE, f"{self}: {error}"
        if not isinstance(error, MCPError):
            return ToolCallStatus.ERROR, f"[error] {message_of(error)}"
        is_http_error = self.settings.url is not None and error.message == _HTTP_ERROR
        match error.code:
            case types.INVALID_PARAMS:
                return ToolCallStatus.BAD_ARGUMENTS, f"[bad arguments] {error.message}"
            case types.INVALID_REQUEST:  # its session is gone, for example after a restart
                self._lose(lost, f"has refused a request: {error.message}")
            case types.CONNECTION_CLOSED | types.METHOD_NOT_FOUND | types.PARSE_ERROR:
                pass
            case _ if not is_http_error:
                return ToolCallStatus.ERROR, f"[error] {error.message}"
        return ToolCallStatus.INFRASTRUCTURE, f"{self}: {error.message}"

    async def _list_tools(self, client: Client) -> list[McpTool]:
        tools: list[McpTool] = []
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                is_read_only = (
                    tool.annotations is not None and tool.annotations.read_only_hint is True
                )
                tools.append(
                    McpTool(self, tool.name, self._schema(tool), is_read_only=is_read_only)
                )
            if not (cursor := page.next_cursor):
                return tools

    def _schema(self, tool: types.Tool) -> Schema:
        from jsonschema import Draft202012Validator, SchemaError
        from jsonschema.validators import validator_for

        parameters = tool.input_schema
        try:
            validator_for(parameters, default=Draft202012Validator).check_schema(parameters)
            if parameters.get("type") != "object":
                raise SchemaError("its type must be object")
        except SchemaError as error:
            raise RequestError(
                f"{self}: the input schema of tool {tool.name!r} is invalid: {error.message}"
            ) from error
        function = {"name": tool.name, "description": tool.description or ""}
        return {"type": "function", "function": {**function, "parameters": parameters}}

    @asynccontextmanager
    async def _transport(self, lost: anyio.Event) -> AsyncIterator[TransportStreams]:
        """Yield the streams of messages from and to the server; note when the first one ends."""
        relayed, ours = anyio.create_memory_object_stream["SessionMessage"](0)

        async def relay(incoming: AsyncIterator[SessionMessage | Exception]) -> None:
            with relayed, suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                async for message in incoming:  # no deadline: as long as the connection lasts
                    if isinstance(message, Exception):  # the SDK would only log it
                        message = self._read_anyway(message, lost)
                    if message is not None:
                        await relayed.send(message)  # no deadline: the SDK reads at once
                self._lose(lost, "has ended")

        opened = self._http() if self.settings.url is not None else self._stdio()
        with relayed, ours:
            async with opened as (incoming, outgoing), anyio.create_task_group() as tasks:
                tasks.start_soon(relay, incoming)
                yield ours, outgoing
                tasks.cancel_scope.cancel()

    def _read_anyway(self, error: Exception, lost: anyio.Event) -> SessionMessage | None:
        """Return the failure of the call that a line answers which is no message of the protocol.

        If it is not known which one, the connection is given up, and all calls fail. Other text
        that a program prints is passed over.
        """
        from mcp.shared.message import SessionMessage
        from mcp.types import PARSE_ERROR, ErrorData, JSONRPCError

        answer, call_ids = _unreadable_answer(error)
        if not answer:
            return None
        problem = f"gave an answer that cannot be read: {answer[:_MAX_QUOTED]!r}"
        if len(call_ids) != 1:
            self._lose(lost, problem)
            return None
        failure = ErrorData(code=PARSE_ERROR, message=problem)
        return SessionMessage(JSONRPCError(jsonrpc="2.0", id=call_ids.pop(), error=failure))

    @asynccontextmanager
    async def _http(self) -> AsyncIterator[TransportStreams]:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        assert self.settings.url is not None
        async with httpx2.AsyncClient(
            headers=self._expand_variables("headers"),
            timeout=httpx2.Timeout(self.settings.start_timeout_s, read=None),  # a call has its own
            transport=httpx2.AsyncHTTPTransport(
                limits=httpx2.Limits(max_connections=None), proxy=proxy_for(self.settings.url)
            ),
            follow_redirects=True,
        ) as http:
            async with streamable_http_client(self.settings.url, http_client=http) as streams:
                yield streams

    @asynccontextmanager
    async def _stdio(self) -> AsyncIterator[TransportStreams]:
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        env = self._expand_variables("env")
        name, *options = self.settings.command
        command = [sys.executable if name == "python" else name, *options]
        if shutil.which(command[0], path=env.get("PATH")) is None:
            raise RequestError(f"{self}: there is no program {name!r}")
        program, *arguments = stdio_guarded(command)
        server = StdioServerParameters(command=program, args=arguments, env=env)
        with self._open_log() as errors:
            try:
                async with stdio_client(server, errors) as streams:
                    yield streams
            finally:
                self._last_words = _tail_of(errors)

    def _open_log(self) -> TextIO:
        if self._log_path is None:
            return tempfile.TemporaryFile("w+")
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        return self._log_path.open("w+")

    def _expand_variables(self, field: str) -> dict[str, str]:
        """Return `env` or `headers` with our own environment's variables filled in."""

        def variable(match: re.Match[str]) -> str:
            if (value := os.environ.get(match[1])) is None:
                raise RequestError(f"{self}: {field}: the environment has no variable {match[1]}")
            return value

        values: Mapping[str, str] = getattr(self.settings, field)
        return {name: re.sub(r"\$\{(\w+)\}", variable, text) for name, text in values.items()}


@asynccontextmanager
async def mcp_servers(
    settings: Mapping[str, McpServerSettings], *, log_dir: Path | None = None
) -> AsyncIterator[Mapping[str, McpServer]]:
    """Connect to servers, yield them by name, and stay connected until the block is left.

    Args:
        log_dir: folder for the stderr of those that are started here.

    Raises:
        RequestError, McpServerError: as `McpServer.keep_connected`.
        SettingsError: the SDK is not installed.
    """
    if settings:
        await import_sdk()
    logs = {name: log_dir and log_dir / f"mcp-{name}.log" for name in settings}
    servers = {
        name: McpServer(name, server_settings, log_path=logs[name])
        for name, server_settings in settings.items()
    }
    async with task_group() as tasks:
        async with anyio.create_task_group() as starting:
            for server in servers.values():
                starting.start_soon(tasks.start, server.keep_connected)
        yield servers
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def mcp_server(
    command: Sequence[str] = (),
    *,
    url: str | None = None,
    env: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 30.0,
    start_timeout_s: float = 60.0,
) -> AsyncIterator[list[Tool]]:
    """Start an MCP server, or connect to one, and yield its tools; end it when the block is left.

        async with agentloop.mcp_server(["python", "game.py"]) as tools:
            await agent.run("Play.", tools=tools)

    The server belongs to this block, so it may keep the state of a rollout. If it dies, this state
    is lost, so it is not restarted: a conversation that calls it fails as if another part of the
    infrastructure had, and the rollout has no reward.

    Args:
        command: program and arguments of a server that talks on its stdin and stdout.
        url: URL of a running server (streamable HTTP), instead of `command`.
        env: environment of the program, besides HOME, PATH and a few others.
        headers: HTTP headers of requests to the URL.
        timeout_s: time limit of one call.
        start_timeout_s: time for the server to be ready and to list its tools.

    Raises:
        RequestError: an argument is invalid, or the server cannot be used: its program is missing
            or ends by itself, or a tool has an invalid schema.
        ServerError: the server cannot be reached, or was not ready in time.
        SettingsError: the SDK is not installed.
    """
    try:
        settings = McpServerSettings(
            command=tuple(command),
            url=url,
            env=dict(env or {}),
            headers=dict(headers or {}),
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
        )
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(map(str, problem["loc"])) or "mcp_server"
        raise RequestError(f"{field}: {problem['msg']}") from error
    await import_sdk()
    server = McpServer(shlex.join(command) or str(url), settings)
    async with task_group() as tasks:
        await tasks.start(server.stay_connected)
        yield [*server.tools]
        tasks.cancel_scope.cancel()


async def import_sdk() -> None:
    """Import the SDK in a thread, since it takes a second.

    Raises:
        SettingsError: it is not installed; the message says how to install it.
    """
    require("mcp", {"mcp": "MCP servers"})
    await anyio.to_thread.run_sync(import_module, "mcp")


async def _answers(client: Client) -> bool:
    """Return whether the server answers any request at all."""
    with anyio.move_on_after(_PROBE_TIMEOUT_S), suppress(Exception):
        await client.list_tools()
        return True
    return False


def _unreadable_answer(error: Exception) -> tuple[str, set[int]]:
    """Return a line that was meant as an answer, "" if it was not, and the ids of calls in it."""
    if not isinstance(error, pydantic.ValidationError):
        return str(error), set()
    inputs = [problem["input"] for problem in error.errors(include_url=False)]
    for sent in inputs:
        if isinstance(sent, Mapping) and "jsonrpc" in sent:  # JSON, but not of the protocol's form
            call_id = sent.get("id")
            return json.dumps(sent), {call_id} if isinstance(call_id, int) else set()
    line = str(inputs[0])
    if not (line.lstrip().startswith("{") or '"jsonrpc"' in line):
        return "", set()
    return line, {int(call_id) for call_id in re.findall(r'"id"\s*:\s*(\d+)', line)}


def _outcome(result: types.CallToolResult) -> tuple[ToolCallStatus, str]:
    parts = [_text(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [dumps(result.structured_content).decode()]
    text = "\n".join(parts) or "(no output)"
    if result.is_error:
        return ToolCallStatus.ERROR, f"[error] {text}"
    return ToolCallStatus.OK, text


def _text(block: types.ContentBlock) -> str:
    """Return a block of a result as text; of other media than text only their type."""
    match block.type:
        case "text":
            return str(block.text)
        case "resource" if getattr(block.resource, "text", None) is not None:
            return str(block.resource.text)
        case "resource":
            return f"[{block.resource.mime_type or 'data'}: {block.resource.uri}]"
        case "resource_link":
            return f"[{block.name}: {block.uri}]"
        case kind:
            return f"[{kind}: {block.mime_type}]"


def _tail_of(file: TextIO) -> str:
    """Return the end of what a server has written to its stderr, for a message."""
    size = os.fstat(file.fileno()).st_size
    tail = os.pread(file.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
    text = tail.decode(errors="replace").strip()
    return f"; its stderr ends with:\n{text}" if text else ""
