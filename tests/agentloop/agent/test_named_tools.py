"""Tools by name: which names are accepted, and what they lead to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import pytest

from agentloop.agent.mcp import McpServer, McpServerSettings, McpTool
from agentloop.agent.named_tools import imported_tools, resolved_tools
from agentloop.agent.sandbox_tools import PythonCode
from agentloop.agent.tools import CallerTool, Tool
from agentloop.config import load_settings, to_toml
from agentloop.errors import RequestError, SettingsError
from agentloop.runtime import Settings
from agentloop.sandbox import Pool, PoolSettings

MODULE = '''
def convert(celsius: float) -> float:
    """Convert to Fahrenheit."""
    return celsius * 1.8 + 32


def undocumented(x: int) -> int:
    return x


number = 3
'''


class IdlePool:
    settings = PoolSettings()


def far(*names: str) -> McpServer:
    server = McpServer("far", McpServerSettings(url="http://far/mcp"))
    server.tools = [
        McpTool(server, name, {"function": {"name": name}}, is_read_only=False) for name in names
    ]
    return server


def resolve(*tools: Any, functions: dict[str, Tool] | None = None) -> list[Tool]:
    return resolved_tools(
        tools,
        pool=cast(Pool, IdlePool()),
        servers={"far": far("find", "fetch")},
        functions=functions or {},
        timeout_s=1.0,
    )


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_named_tools.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_named_tools", raising=False)
    return "my_named_tools"


def test_each_name_leads_to_its_tools(module: str) -> None:
    functions = imported_tools([PythonCode.name, "mcp:far", f"{module}:convert"])
    tools = resolve(
        "mcp:far/fetch",
        PythonCode.name,
        f"{module}:convert",
        {"type": "function", "function": {"name": "theirs"}},
        lambda_like,
        functions=functions,
    )
    assert [tool.name for tool in tools] == [
        "fetch", PythonCode.name, "convert", "theirs", "lambda_like"
    ]  # fmt: skip
    assert isinstance(tools[1], PythonCode)
    assert isinstance(tools[3], CallerTool)
    assert [tool.name for tool in resolve("mcp:far")] == ["find", "fetch"]


def lambda_like() -> int:
    """Return one."""
    return 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("multiply", "'multiply' is unknown; expected a built-in tool (python_code_with"),
        ("mcp:near", "'mcp:near': there is no MCP server 'near' (known: far)"),
        ("mcp:far/look", "'mcp:far/look': the server has no such tool; it has: find, fetch"),
    ],
)
def test_unknown_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        resolve(name)
    assert str(refused.value).startswith(f"tools: {message}")


def test_function_that_the_settings_do_not_name_is_not_imported(module: str) -> None:
    """Otherwise a client of the service could run any function."""
    with pytest.raises(RequestError, match="that the setting `tools` names"):
        resolve(f"{module}:convert")
    assert module not in sys.modules


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("nothing", "tools: my_named_tools has no 'nothing'"),
        ("undocumented", "cannot become a tool: .*no docstring.* .from tools: my_named_tools:und"),
        ("number", "tools: 3 is neither a function nor a tool"),
    ],
)
def test_object_that_is_not_a_tool_is_refused(module: str, attribute: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        imported_tools([f"{module}:{attribute}"])


def test_missing_module_is_named() -> None:
    with pytest.raises(SettingsError, match="tools: there is no module 'no_such_module'"):
        imported_tools(["no_such_module:convert"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tools=['multiply']"], "tools: 'multiply' is unknown; expected a built-in tool"),
        (["tools=['mcp:far']"], "tools: 'mcp:far': there is no MCP server 'far' (known: none)"),
        (["mcp.far.url='far'"], "mcp.far: url: 'far' is not of the form http://HOST/PATH"),
        (["mcp.far.uri='http://far'"], "unknown setting 'mcp.far.uri' (did you mean"),
        (["mcp={'f/r' = {url = 'http://far'}}"], "mcp: 'f/r': a name has only letters, digits"),
        (["mcp.far.timeout_s=3"], "mcp.far: set either command or url"),
    ],
)
def test_wrong_settings_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(Settings, [], overrides)
    assert message in str(refused.value)


def test_servers_in_a_file_are_read_and_written_back(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        'tools = ["mcp:far/find", "my_tools:convert"]\n'
        '[mcp.far]\nurl = "https://far/mcp"\nheaders = { X-Token = "${TOKEN}" }\n'
        '[mcp.near]\ncommand = ["python", "server.py"]\nenv = { MODE = "fast" }\ntimeout_s = 3\n'
    )
    settings = load_settings(Settings, [file])
    assert settings.mcp["near"].command == ("python", "server.py")
    assert settings.mcp["far"].headers == {"X-Token": "${TOKEN}"}
    file.write_text(to_toml(settings))
    assert load_settings(Settings, [file]) == settings
