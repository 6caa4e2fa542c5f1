"""An MCP server on stdin and stdout, for the tests. It is run by path, in a process of its own.

python mcp_script.py [invalid]
"""

from __future__ import annotations

import os
import sys

import anyio
from mcp.server import MCPServer, Server
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.stdio import stdio_server
from mcp.types import ListToolsResult, Tool, ToolAnnotations

server = MCPServer("calculator", log_level="CRITICAL")


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


def fail(why: str) -> str:
    """Fail."""
    raise ToolError(why)


async def wait(seconds: float) -> str:
    """Wait."""
    await anyio.sleep(seconds)
    return "done"


def variable(name: str) -> str:
    """Look up a variable of the environment."""
    return os.environ.get(name, "(unset)")


def end(status: int) -> str:
    """End the server in the middle of this call."""
    print("bye", file=sys.stderr, flush=True)
    os._exit(status)


class Meeting:
    """A barrier at which calls of `meet` and `watch` wait for each other."""

    def __init__(self) -> None:
        self.num_here = 0
        self.is_complete = False
        self.over = anyio.Event()

    async def attend(self) -> str:
        self.num_here += 1
        if self.num_here == 2:
            self.is_complete = True
            self.over.set()
        await self.over.wait()
        self.num_here -= 1
        return "together" if self.is_complete else "alone"


meeting = Meeting()


async def meet() -> str:
    """Wait for a second call, or for `adjourn`; return whether there was a second one."""
    return await meeting.attend()


async def watch() -> str:
    """Do as `meet` does."""
    return await meeting.attend()


async def adjourn() -> str:
    """End the waits of `meet` and `watch`, and those of later calls."""
    meeting.over.set()
    return "adjourned"


READ_ONLY = ToolAnnotations(read_only_hint=True)
for tool in (add, fail, wait, variable, end, meet):
    server.tool()(tool)
for tool in (watch, adjourn):
    server.tool(annotations=READ_ONLY)(tool)


async def _invalid() -> None:
    async def tools(context: object, params: object) -> ListToolsResult:
        return ListToolsResult(
            tools=[Tool(name="odd", input_schema={"type": "object", "properties": 3})]
        )

    low = Server("odd", on_list_tools=tools)
    async with stdio_server() as (incoming, outgoing):
        await low.run(incoming, outgoing, low.create_initialization_options())


def main() -> None:
    match sys.argv[1:]:
        case ["invalid"]:
            anyio.run(_invalid)
        case _:
            server.run()


if __name__ == "__main__":
    main()
