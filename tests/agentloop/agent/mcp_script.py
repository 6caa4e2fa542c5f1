"""An MCP server on stdin and stdout, for the tests. It is run by path, in a process of its own.

python mcp_script.py [stubborn | invalid]
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import anyio
from mcp.server import MCPServer, Server
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.stdio import stdio_server
from mcp.types import ListToolsResult, Tool

server = MCPServer("calculator", log_level="CRITICAL")
_count = 0


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


def count() -> int:
    """Count the calls of this tool."""
    global _count
    _count += 1
    return _count


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


def freeze() -> str:
    """Stop the server without ending it."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return "thawed"


def processes() -> str:
    """Start a child that outlives this server, and return the ids of both."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    return f"{os.getpid()} {child.pid}"


for tool in (add, count, fail, wait, variable, end, freeze, processes):
    server.tool()(tool)


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
        case ["stubborn"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            server.run()
            time.sleep(600)
        case ["invalid"]:
            anyio.run(_invalid)
        case _:
            server.run()


if __name__ == "__main__":
    main()
