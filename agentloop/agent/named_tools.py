"""Tools by name: built-in ones, those of MCP servers, and Python functions.

    jupyter_code      a built-in tool (sandbox_tools.py)
    mcp:NAME          all tools of an MCP server in the settings
    mcp:NAME/TOOL     one of them
    module:function   a Python function, or a `Tool`

Functions are imported only if the settings name them: names also come from clients of the service.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from agentloop.agent.mcp import McpServer
from agentloop.agent.sandbox_tools import JupyterCode, PaperPythonCode, PythonCode
from agentloop.agent.threads import sharing_connections
from agentloop.agent.tool_formats import ToolFormat
from agentloop.agent.tools import CallerTool, Tool, ToolFunction, as_tool
from agentloop.config import import_named
from agentloop.errors import RequestError, SettingsError
from agentloop.sandbox import Pool

_BUILT_IN = {tool.name: tool for tool in (PythonCode, PaperPythonCode, JupyterCode)}

AnyTool = Tool | ToolFunction | str | Mapping[str, object]
"""A tool, a Python function, a name as in the setting `tools`, or the schema of a tool that the
caller runs."""


def check_tool_name(name: str, servers: Collection[str]) -> None:
    """Check the form of a name, and that `servers` has the MCP server.

    Raises:
        ValueError: the name cannot be that of a tool.
    """
    kind, _, target = name.partition(":")
    if kind == "mcp":
        server = target.partition("/")[0]
        if server not in servers:
            known_servers = ", ".join(servers) or "none"
            raise ValueError(
                f"{name!r}: there is no MCP server {server!r} (known: {known_servers})"
            )
    elif name not in _BUILT_IN and not (kind and target):
        raise ValueError(_unknown(name))


def imported_tools(names: Iterable[str]) -> dict[str, Tool]:
    """Import the tools that are named as `module:function`.

    Raises:
        SettingsError: one of them cannot be imported, or is no tool.
    """
    tools: dict[str, Tool] = {}
    for name in names:
        if name not in _BUILT_IN and not name.startswith("mcp:"):
            try:
                with sharing_connections():
                    tools[name] = as_tool(import_named(name, "tools"))
            except RequestError as error:
                raise SettingsError(f"{error} (from tools: {name})") from error
    return tools


def resolved_tools(
    tools: Sequence[AnyTool],
    *,
    pool: Pool,
    servers: Mapping[str, McpServer],
    functions: Mapping[str, Tool],
    timeout_s: float,
    tool_format: ToolFormat = "plain",
) -> list[Tool]:
    """Return the tools themselves for names, functions and schemas.

    Args:
        pool: sandbox of the built-in tools.
        servers: the MCP servers by name.
        functions: the result of `imported_tools`.
        timeout_s: time limit of a call of a built-in tool.
        tool_format: wording of the built-in tools.

    Raises:
        RequestError: a name is unknown, or a function cannot become a tool.
    """

    def tools_named(name: str) -> Iterator[Tool]:
        if name in _BUILT_IN:
            yield _BUILT_IN[name](pool, timeout_s=timeout_s, tool_format=tool_format)
        elif name in functions:
            yield functions[name]
        elif name.startswith("mcp:"):
            yield from _of_server(name, servers)
        else:
            raise RequestError(f"tools: {_unknown(name)}")

    if isinstance(tools, str):
        raise RequestError(f"tools: expected a list, not {tools!r}")
    resolved: list[Tool] = []
    for tool in tools:
        if isinstance(tool, str):
            resolved += tools_named(tool)
        elif isinstance(tool, Mapping):
            resolved.append(CallerTool(tool))
        else:
            resolved.append(as_tool(tool))
    return resolved


def _of_server(name: str, servers: Mapping[str, McpServer]) -> Sequence[Tool]:
    try:
        check_tool_name(name, servers)
    except ValueError as error:
        raise RequestError(f"tools: {error}") from error
    server, slash, tool = name.removeprefix("mcp:").partition("/")
    offered = servers[server].tools
    wanted = [candidate for candidate in offered if candidate.name == tool or not slash]
    if slash and not wanted:
        names = ", ".join(candidate.name for candidate in offered) or "none"
        raise RequestError(f"tools: {name!r}: the server has no such tool; it has: {names}")
    return wanted


def _unknown(name: str) -> str:
    return (
        f"{name!r} is unknown; expected a built-in tool ({', '.join(_BUILT_IN)}), mcp:NAME, "
        "mcp:NAME/TOOL, or module:function of a Python function that the setting `tools` names"
    )
