"""The small model calls a tool of an MCP server, through the whole runtime."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from agentloop import Runtime, Sampling, SettingsError, StopReason, ToolCallStatus

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

SERVER = '''
from mcp.server import MCPServer

server = MCPServer("calculator")


@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


server.run()
'''


async def test_question_is_answered_with_the_tool_of_an_mcp_server(
    sglang_url: str, tmp_path: Path
) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    settings: Any = {
        "servers": [sglang_url],
        "mcp": {"calculator": {"command": [sys.executable, str(script)]}},
        "sandbox": {"backend": "process", "workers": 1},
    }
    async with Runtime(tools=["mcp:calculator"], **settings) as runtime:
        trajectory = await runtime.rollout("What is 37 times 48?", sampling=Sampling(temperature=0))
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert "1776" in trajectory.answer
    (result,) = trajectory.results
    assert (result.name, result.status, result.content) == ("multiply", ToolCallStatus.OK, "1776")
    with pytest.raises(SettingsError, match="the server has no such tool; it has: multiply"):
        async with Runtime(tools=["mcp:calculator/divide"], **settings):
            pass
