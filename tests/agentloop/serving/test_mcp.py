"""The service as an MCP server: asked by the SDK's client, and refused as any other request."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
import mcp
import pytest

from agentloop.errors import ServerUnavailable
from tests.agentloop.serving.test_app import Service, says, service
from tests.patience import patient
from tests.support import eventually

LIST = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
ACCEPT = {"Accept": "application/json", "Content-Type": "application/json"}


@asynccontextmanager
async def client(at: Service, *, mode: str = "auto", token: str = "") -> AsyncIterator[Any]:
    from mcp.client.streamable_http import streamable_http_client

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with httpx2.AsyncClient(headers=headers, timeout=patient(30), trust_env=False) as http:
        transport = streamable_http_client(f"{at.url}/mcp", http_client=http)
        async with mcp.Client(transport, mode=mode) as asks:
            yield asks


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_mcp_client_asks_the_agent(mode: str) -> None:
    async with service(says("It is 1776.")) as at, client(at, mode=mode) as asks:
        (tool,) = (await asks.list_tools()).tools
        assert tool.name == "ask_agent"
        assert "fake" in tool.description
        result = await asks.call_tool("ask_agent", {"question": "What is 37 times 48?"})
        assert not result.is_error
        assert [block.text for block in result.content] == ["It is 1776."]
        assert at.router.num_open == 0
        assert await at.metric("agentloop_rollouts_total") == 1


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("ask_agent", {"question": 3}, "expected one argument, question: a string"),
        ("ask_agent", {"question": "a", "n": 2}, "expected one argument, question: a string"),
        ("ask_agent", None, "expected one argument, question: a string"),
        ("ask", {"question": "a"}, "there is no tool 'ask'; use ask_agent"),
        ("ask_agent", {"question": "a " * 100_000}, "maximum context length"),
    ],
)
async def test_wrong_call_is_an_error_of_the_tool(name: str, arguments: Any, message: str) -> None:
    async with service() as at, client(at) as asks:
        result = await asks.call_tool(name, arguments)
        assert result.is_error
        assert message in result.content[0].text


async def test_failed_rollout_is_an_error_of_the_tool() -> None:
    async with service([ServerUnavailable("no server is left")]) as at, client(at) as asks:
        result = await asks.call_tool("ask_agent", {"question": "What is 37 times 48?"})
        assert result.is_error
        assert "no server is left" in result.content[0].text


async def test_client_that_disconnects_ends_its_rollout() -> None:
    async with service([anyio.sleep_forever]) as at, anyio.create_task_group() as tasks:

        async def ask() -> None:
            async with client(at) as asks:
                await asks.call_tool("ask_agent", {"question": "What is 37 times 48?"})

        tasks.start_soon(ask)
        await eventually(lambda: at.router.num_open == 1)
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await eventually(lambda: at.router.num_open == 0)


async def test_guard_holds() -> None:
    body = json.dumps(LIST).encode()
    async with service(serve={"port": 0, "token": "s3cret"}) as at:
        async with at.http.post(f"{at.url}/mcp", data=body, headers=ACCEPT) as response:
            assert response.status == 401
        async with client(at, token="s3cret") as asks:
            assert len((await asks.list_tools()).tools) == 1
    async with service() as at:
        headers = {**ACCEPT, "Origin": "http://elsewhere.example"}
        async with at.http.post(f"{at.url}/mcp", data=body, headers=headers) as response:
            assert response.status == 403


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'{"jsonrpc": "2.0", "method": "notifications/initialized"}', 202),
    ],
)
async def test_other_bodies_are_answered_by_the_protocol(body: bytes, status: int) -> None:
    async with service() as at:
        async with at.http.post(f"{at.url}/mcp", data=body, headers=ACCEPT) as response:
            assert response.status == status
        async with at.http.get(f"{at.url}/mcp") as response:
            assert response.status == 405


async def test_without_the_sdk_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentloop.distribution.is_installed", lambda module: False)
    async with service() as at:
        async with at.http.post(f"{at.url}/mcp", json=LIST, headers=ACCEPT) as response:
            assert response.status == 501
            assert "pip install 'agentloop-rl[mcp]'" in await response.text()
