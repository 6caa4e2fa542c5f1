"""MCP servers: real ones, in processes of their own, and how they fail."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiohttp import web

import agentloop
from agentloop.agent.mcp import McpServer, McpServerSettings, import_sdk, mcp_server, mcp_servers
from agentloop.agent.rollout import Budget, Rollout
from agentloop.agent.tools import Tool, ToolOutput, Tools
from agentloop.environments.tasks.sources import Task
from agentloop.errors import McpServerError, RequestError
from agentloop.inference.sglang.sampling import Sampling
from agentloop.rollouts.player import EnvironmentPlayer
from agentloop.trajectory import StopReason, ToolCallStatus, Trajectory
from tests.rollouts import records_of, reward_in
from tests.support import (
    END,
    ScriptedEngine,
    Step,
    call_text,
    chat_format,
    chunks,
    eventually,
    serving,
)
from tests.support import written as ids_of

pytestmark = [
    pytest.mark.timeout(60),  # a server is an interpreter that imports the SDK
    pytest.mark.skipif(sys.platform != "linux", reason="guardians look at /proc"),
]

SCRIPT = Path(__file__).with_name("mcp_script.py")
RAW = [sys.executable, str(Path(__file__).with_name("mcp_raw.py"))]
SDK = [sys.executable, str(SCRIPT)]
SILENT = [sys.executable, "-c", "import time; time.sleep(600)"]
BROKEN = [sys.executable, "-c", "raise SystemExit('no licence')"]
CHAT = chat_format()


@pytest.fixture(scope="module")
async def healthy() -> AsyncIterator[McpServer]:
    """A server that no test breaks."""
    async with shared_server(SDK, env={"COLOUR": "${HOME}/blue"}) as server:
        yield server


@asynccontextmanager
async def shared_server(command: Sequence[str] = RAW, **settings: Any) -> AsyncIterator[McpServer]:
    inputs = McpServerSettings(command=tuple(command), **settings)
    async with mcp_servers({"calculator": inputs}) as servers:
        yield servers["calculator"]


async def call(tools: Sequence[Tool], name: str, /, **arguments: Any) -> ToolOutput:
    async with Tools(tools) as opened:
        return await opened.run(name, arguments)


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def says(text: str) -> list[Step]:
    ids = ids_of(CHAT, text + END)
    return list(chunks(ids, range(1, len(ids))))


async def test_tools_are_listed_and_called(healthy: McpServer) -> None:
    tools = healthy.tools
    names = ["add", "fail", "wait", "variable", "end", "meet", "watch", "adjourn"]
    assert [tool.name for tool in tools] == names
    schema = tools[0].schema["function"]
    assert schema["description"] == "Add two integers."
    assert schema["parameters"]["properties"]["a"]["type"] == "integer"
    output = await call(tools, "add", a=2, b=2**70)
    assert (output.status, output.content) == (ToolCallStatus.OK, str(2 + 2**70))
    assert output.started_s is not None
    colour = await call(tools, "variable", name="COLOUR")
    assert colour.content == f"{os.environ['HOME']}/blue"
    ours = await call(tools, "variable", name="PYTEST_VERSION")
    assert ours.content == "(unset)"


async def test_model_reads_errors_of_a_tool(
    healthy: McpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, tools = healthy._client, healthy.tools
    failed = await call(tools, "fail", why="no such city")
    assert failed.status is ToolCallStatus.ERROR
    assert failed.content.startswith("[error]")
    assert "no such city" in failed.content
    wrong = await call(tools, "add", a="many", b=1)
    assert wrong.status in (ToolCallStatus.ERROR, ToolCallStatus.BAD_ARGUMENTS)
    lone = await call(tools, "fail", why="\ud800")
    assert lone.status is ToolCallStatus.BAD_ARGUMENTS
    impatient = healthy.settings.model_copy(update={"timeout_s": 0.2})
    monkeypatch.setattr(healthy, "settings", impatient)
    late = await call(tools, "wait", seconds=60)
    assert late.status is ToolCallStatus.TIMEOUT
    assert late.content == "[timeout] stopped after 0.2 s"
    assert healthy._client is connection


async def test_calls_run_concurrently_as_many_as_are_allowed() -> None:
    async with shared_server(SDK, max_concurrent=2) as server, anyio.create_task_group() as tasks:
        ended: list[str] = []

        async def single(name: str, /, **arguments: Any) -> None:
            ended.append((await call(server.tools, name, **arguments)).content)

        for _ in range(2):
            tasks.start_soon(lambda: single("wait", seconds=60))
        await eventually(lambda: server._slots.borrowed_tokens == 2)
        tasks.start_soon(lambda: single("add", a=1, b=1))
        await eventually(lambda: server._slots.statistics().tasks_waiting == 1)
        assert ended == []
        tasks.cancel_scope.cancel()


async def test_call_lost_with_its_server_is_an_infrastructure_failure() -> None:
    async with shared_server() as server:
        lost = await call(server.tools, "end")
        assert lost.status is ToolCallStatus.INFRASTRUCTURE
        # It is restarted, and the next call waits for it.
        again = await call(server.tools, "count")
        assert (again.status, again.content) == (ToolCallStatus.OK, "1")


async def test_server_that_dies_between_calls_is_restarted_before_the_next() -> None:
    async with shared_server() as server:
        pid = int((await call(server.tools, "processes")).content.split()[0])
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: server._client is None)
        assert (await call(server.tools, "count")).status is ToolCallStatus.OK


@pytest.mark.full
async def test_hung_server_is_an_infrastructure_failure_and_is_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentloop.agent.mcp._PROBE_TIMEOUT_S", 0.2)
    async with shared_server(timeout_s=10) as server:
        server.settings = server.settings.model_copy(update={"timeout_s": 0.5})
        hung = await call(server.tools, "freeze")
        assert hung.status is ToolCallStatus.INFRASTRUCTURE
        assert "does not answer" in hung.content
        server.settings = server.settings.model_copy(update={"timeout_s": 20})
        assert (await call(server.tools, "count")).status is ToolCallStatus.OK


@pytest.mark.parametrize(
    ("tool", "keeps_connection"), [("cut", True), ("wrong", True), ("nameless", False)]
)
async def test_unreadable_answer_fails_its_call_at_once(tool: str, keeps_connection: bool) -> None:
    async with shared_server(timeout_s=600) as server:
        with anyio.fail_after(60):
            failed = await call(server.tools, tool)
            after = await call(server.tools, "count")
    assert failed.status is ToolCallStatus.INFRASTRUCTURE
    assert "gave an answer that cannot be read: '{" in failed.content
    assert after.content == ("2" if keeps_connection else "1")


async def test_other_text_between_messages_is_passed_over() -> None:
    async with shared_server() as server:
        assert (await call(server.tools, "chatty")).content == "1"


async def test_server_that_dies_too_often_ends_its_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentloop.agent.mcp._MAX_RESTARTS", 1)

    async def use() -> None:
        async with shared_server() as server:
            for _ in range(2):
                lost = await call(server.tools, "end")
                assert lost.status is ToolCallStatus.INFRASTRUCTURE
            await anyio.sleep_forever()

    with pytest.raises(McpServerError, match=r"given up after 1 restarts .*calculator has ended"):
        await use()


async def test_stderr_is_in_the_log_and_in_the_message(tmp_path: Path) -> None:
    inputs = McpServerSettings(command=tuple(RAW))
    async with mcp_servers({"calculator": inputs}, log_dir=tmp_path / "logs") as servers:
        server = servers["calculator"]
        await call(server.tools, "end")
        await eventually(lambda: "bye" in server._why)
    assert (tmp_path / "logs" / "mcp-calculator.log").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (BROKEN, "ended as it started; its stderr ends with:\nno licence"),
        ([*SDK, "invalid"], "the input schema of tool 'odd' is invalid: 3 is not of type 'object'"),
    ],
)
async def test_server_that_cannot_be_used_is_refused_with_the_reason(
    arguments: list[str], message: str
) -> None:
    with pytest.raises(RequestError) as refused:
        async with mcp_server(arguments):
            pass
    assert message in str(refused.value)


async def test_program_that_is_missing_is_refused() -> None:
    with pytest.raises(RequestError, match="there is no program 'no-such-program'"):
        async with mcp_server(["no-such-program"]):
            pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "set either command or url"),
        ({"command": ["a"], "url": "http://a/"}, "set either command or url"),
        ({"command": ["a"], "headers": {"A": "b"}}, "only a server with a url gets headers"),
        ({"url": "http://a/", "env": {"A": "b"}}, "only a server with a command"),
        ({"url": "localhost:80"}, "is not of the form http://HOST/PATH"),
        ({"command": ["a"], "timeout_s": 0}, "timeout_s: Input should be greater than 0"),
        ({"command": ["cat"], "env": {"A": "${NO_SUCH_1}"}}, "has no variable NO_SUCH_1"),
    ],
)
async def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refused:
        async with mcp_server(**options):
            pass
    assert message in str(refused.value)


@pytest.mark.full
async def test_server_that_is_not_ready_in_time_is_ended(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    program = (
        "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    )
    with pytest.raises(McpServerError, match=r"not ready within 1 s"):
        async with mcp_server([sys.executable, "-c", program, str(file)], start_timeout_s=1):
            pass
    assert not file.exists() or not alive(int(file.read_text()))


async def test_leaving_the_block_ends_all_processes_of_a_server() -> None:
    async with mcp_server([*RAW, "stubborn"]) as tools:
        pids = [int(pid) for pid in (await call(tools, "processes")).content.split()]
        assert len(pids) == 2
        assert all(map(alive, pids))
    assert not any(map(alive, pids))


@pytest.mark.full
async def test_killing_the_runtime_ends_all_processes_of_a_server() -> None:
    program = f"""
import anyio
from agentloop import mcp_server
from agentloop.agent.tools import Tools

async def main():
    async with mcp_server({[*RAW, "stubborn"]!r}) as tools, Tools(tools) as opened:
        print((await opened.run("processes", {{}})).content, flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""
    async with await anyio.open_process([sys.executable, "-c", program], stderr=None) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in (await process.stdout.receive()).split()]
        assert all(map(alive, pids))
        process.kill()
    await eventually(lambda: not any(map(alive, pids)))


async def test_two_rollouts_have_a_server_each() -> None:
    async with mcp_server(RAW) as first, mcp_server(RAW) as second:
        assert (await call(first, "count")).content == "1"
        assert (await call(first, "count")).content == "2"
        assert (await call(second, "count")).content == "1"


async def called_twice(tools: Tools, name: str, *, adjourned: bool = False) -> list[str]:
    """Call a tool twice at the same time, and then perhaps `adjourn`; return both outputs."""
    outputs: list[str] = []

    async def single() -> None:
        outputs.append((await tools.run(name, {})).content)

    async with anyio.create_task_group() as calls:
        for _ in range(2):
            calls.start_soon(single)
        await anyio.wait_all_tasks_blocked()
        if adjourned:
            await tools.run("adjourn", {})
    return outputs


async def test_calls_of_a_rollouts_own_server_take_turns() -> None:
    async with mcp_server(SDK) as server_tools, Tools(server_tools) as tools:
        assert await called_twice(tools, "meet", adjourned=True) == ["alone", "alone"]


async def test_read_only_calls_and_calls_of_shared_servers_run_together() -> None:
    async with mcp_server(SDK, timeout_s=20) as server_tools, Tools(server_tools) as tools:
        assert await called_twice(tools, "watch") == ["together", "together"]
    async with shared_server(SDK, timeout_s=20) as server, Tools(server.tools) as tools:
        assert await called_twice(tools, "meet") == ["together", "together"]


async def test_server_of_a_rollout_is_not_restarted() -> None:
    async with mcp_server(RAW) as tools:
        for name in ("end", "count", "count"):
            lost = await call(tools, name)
            assert lost.status is ToolCallStatus.INFRASTRUCTURE


async def test_rollout_calls_it_in_mid_stream(healthy: McpServer) -> None:
    async def until_called() -> None:
        await eventually(lambda: healthy._slots.borrowed_tokens == 1)

    text = call_text("wait", {"seconds": 0.01})
    first: list[Step] = [*chunks(ids_of(CHAT, text), end=None), until_called, *says("")]
    trajectory = await Rollout(
        engine=ScriptedEngine(first, says("done")),
        chat=CHAT,
        messages=[{"role": "user", "content": "Wait."}],
        tools=healthy.tools,
    ).run()
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert [result.content for result in trajectory.results] == ["done"]


async def test_rollout_whose_call_was_lost_is_not_scored() -> None:
    async with shared_server() as server:
        engine = ScriptedEngine(says(call_text("end", {})))
        trajectory = await Rollout(
            engine=engine,
            chat=CHAT,
            messages=[{"role": "user", "content": "End."}],
            tools=server.tools,
        ).run()
    assert trajectory.stop_reason is StopReason.INFRASTRUCTURE
    assert trajectory.error is not None
    assert "calculator" in trajectory.error


class Conversations:
    """Runs real rollouts on scripted turns, as `Runtime.rollout` would on servers."""

    pool: Any = None
    resolve_tools: Any = None
    session_listener: Any = None

    async def listen_for_sessions(self) -> None:
        """Do nothing: no test here has a client."""

    def __init__(self, *turns: Sequence[Step]) -> None:
        self.engine = ScriptedEngine(*turns)

    async def rollout(
        self, messages: Any, *, tools: Any, budget: Budget, id: str, **options: Any
    ) -> Trajectory:
        return await Rollout(
            engine=self.engine, chat=CHAT, messages=messages, tools=tools, budget=budget, id=id
        ).run()


@pytest.mark.full
async def test_environments_servers_are_ended_at_its_deadline() -> None:
    pids: list[int] = []

    @agentloop.environment
    async def hangs(task: Any, agent: Any) -> float:
        async with agentloop.mcp_server([*RAW, "stubborn"]) as tools:
            pids.extend(map(int, (await call(tools, "processes")).content.split()))
            await anyio.sleep_forever()
        return 1.0

    await import_sdk()  # takes a second, which is not the environment's
    player = EnvironmentPlayer(hangs, Conversations(), sampling=Sampling())
    with pytest.raises(RequestError, match="ran out of time"):
        await records_of(player, Task("t", "", "42"), size=2, budget=Budget(timeout_s=6))
    assert len(pids) == 4
    assert not any(map(alive, pids))


async def test_environment_whose_server_dies_is_not_to_blame() -> None:
    @agentloop.environment
    async def plays(task: Any, agent: Any) -> float:
        async with agentloop.mcp_server(RAW) as tools:
            await agent.run("Play.", tools=tools)
        return 0.0

    conversations = Conversations(says(call_text("end", {})))
    player = EnvironmentPlayer(plays, conversations, sampling=Sampling())
    (record,) = await records_of(player, Task("t", "", "42"), budget=Budget(timeout_s=50))
    assert reward_in(record).value is None
    assert reward_in(record).reason.startswith("infrastructure: ")


async def test_server_that_starts_too_late_is_an_infrastructure_failure() -> None:
    @agentloop.environment
    async def plays(task: Any, agent: Any) -> float:
        async with agentloop.mcp_server(SILENT, start_timeout_s=0.2):
            return 0.0

    player = EnvironmentPlayer(plays, Conversations(), sampling=Sampling())
    (record,) = await records_of(player, Task("t", "", "42"), budget=Budget(timeout_s=50))
    assert reward_in(record).reason.startswith("infrastructure: ")


# --- HTTP ---------------------------------------------------------------------------------------


@asynccontextmanager
async def over_http(port: int = 0) -> AsyncIterator[str]:
    """Serve the script's tools by HTTP in a process of its own; yield the URL."""
    program = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import socket, uvicorn\n"
        "from mcp_script import server\n"
        "bound = socket.socket(); bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        f"bound.bind(('127.0.0.1', {port})); bound.listen()\n"
        "print(bound.getsockname()[1], flush=True)\n"
        "config = uvicorn.Config(server.streamable_http_app(), log_level='error')\n"
        "uvicorn.Server(config).run(sockets=[bound])\n"
    )
    async with await anyio.open_process([sys.executable, "-c", program], stderr=None) as process:
        assert process.stdout is not None
        port = int(await process.stdout.receive())
        try:
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            with suppress(ProcessLookupError):
                process.kill()


async def test_server_by_http_is_used_alike() -> None:
    async with over_http() as url:
        inputs = McpServerSettings(url=url, timeout_s=20)
        async with mcp_servers({"far": inputs}) as servers:
            tools = servers["far"].tools
            assert (await call(tools, "add", a=1, b=2)).content == "3"
            failed = await call(tools, "fail", why="no such city")
            assert failed.status is ToolCallStatus.ERROR
            lost = await call(tools, "end", status=3)
            assert lost.status is ToolCallStatus.INFRASTRUCTURE


@pytest.mark.full
async def test_server_by_http_that_is_restarted_is_connected_to_again() -> None:
    async with over_http() as url:
        port = int(url.split(":")[2].removesuffix("/mcp"))
        async with mcp_servers({"far": McpServerSettings(url=url, timeout_s=20)}) as servers:
            tools = servers["far"].tools
            assert (await call(tools, "end", status=3)).status is ToolCallStatus.INFRASTRUCTURE
            async with over_http(port):
                statuses: list[ToolCallStatus] = []
                while ToolCallStatus.OK not in statuses:
                    statuses.append((await call(tools, "add", a=1, b=2)).status)
                # A call may meet the old session, which the new server does not know.
                assert set(statuses[:-1]) <= {ToolCallStatus.INFRASTRUCTURE}
                assert len(statuses) <= 2


async def test_server_that_cannot_be_reached_says_so() -> None:
    with pytest.raises(McpServerError, match="cannot be used"):
        async with mcp_server(url="http://127.0.0.1:9/mcp"):
            pass


def _http_answer(kind: str, message: Any) -> web.Response:
    match kind:
        case "error":
            return web.Response(status=502, text="bad gateway")
        case "no JSON":
            return web.Response(text="{", content_type="application/json")
        case "no result":
            body = {"jsonrpc": "2.0", "id": message["id"], "result": "hello"}
            return web.json_response(body)
        case "other type":
            return web.Response(text="<p>hello</p>", content_type="text/html")
        case "cut stream":
            return web.Response(
                text="event: message\ndata: {\n\n", content_type="text/event-stream"
            )
        case "empty stream":
            return web.Response(text="", content_type="text/event-stream")
        case _:  # no content
            return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": {}})


@pytest.mark.parametrize(
    "kind",
    ["error", "no JSON", "no result", "other type", "cut stream", "empty stream", "no content"],
)
async def test_http_error_is_an_infrastructure_failure_and_headers_are_sent(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCP_TEST_TOKEN", "s3cret")
    authorizations: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        authorizations.append(request.headers.get("Authorization"))
        message = await request.json()
        if "id" not in message:
            return web.Response(status=202)
        match message["method"]:
            case "initialize":
                result: Any = {
                    "protocolVersion": "2025-06-18",
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "odd", "version": "1"},
                }
            case "tools/list":
                tool = {"name": "look", "inputSchema": {"type": "object", "properties": {}}}
                result = {"tools": [tool]}
            case "tools/call":
                return _http_answer(kind, message)
            case _:
                return web.Response(status=400, text="what?")
        return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": result})

    app = web.Application()
    app.router.add_post("/mcp", answer)
    headers = {"Authorization": "Bearer ${MCP_TEST_TOKEN}"}
    async with (
        serving(app) as url,
        mcp_server(url=f"{url}/mcp", headers=headers, timeout_s=600) as tools,
    ):
        with anyio.fail_after(60):
            lost = await call(tools, "look")
    assert lost.status is ToolCallStatus.INFRASTRUCTURE
    assert set(authorizations) == {"Bearer s3cret"}
