"""Every kind of tool runs while the model goes on writing the turn that called it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

import anyio
import pytest

import agentloop
from agentloop.agent.mcp import mcp_server
from agentloop.agent.rollout import Rollout
from agentloop.agent.sandbox_tools import JupyterCode, PaperPythonCode, PythonCode
from agentloop.events import CallFinished, Event
from agentloop.sandbox import Pool
from agentloop.trajectory import StopReason, ToolCallStatus
from tests.agentloop.agent.test_mcp import RAW, SDK, shared_server
from tests.agentloop.agent.test_tools import Stateful
from tests.patience import patient
from tests.sandbox.conftest import BARE
from tests.support import END, ScriptedEngine, call_text, chat_format, chunks, written

pytestmark = [
    pytest.mark.timeout(60),  # workers and servers are started
    pytest.mark.skipif(sys.platform != "linux", reason="guardians look at /proc"),
]

CHAT = chat_format()


class Counter:
    """A game whose methods are tools."""

    def __init__(self) -> None:
        self.count = 0

    def step(self) -> int:
        """Count one more."""
        self.count += 1
        return self.count

    @agentloop.concurrent
    async def look(self) -> int:
        """Return the count."""
        return self.count


def plain() -> str:
    """Say something."""
    return "plain"


async def later() -> str:
    """Say something later."""
    await anyio.lowlevel.checkpoint()
    return "later"


@asynccontextmanager
async def of_a_shared_server() -> AsyncIterator[Any]:
    async with shared_server(SDK) as server:
        yield server.tools


Opened = Callable[[Pool], AbstractAsyncContextManager[Any]]

KINDS: dict[str, tuple[Opened, str, Mapping[str, Any], str]] = {
    "a function": (lambda _: nullcontext([plain]), "plain", {}, "plain"),
    "an async function": (lambda _: nullcontext([later]), "later", {}, "later"),
    "a method": (lambda _: nullcontext([Counter().step]), "step", {}, "1"),
    "a concurrent method": (lambda _: nullcontext([Counter().look]), "look", {}, "0"),
    "an object": (lambda _: nullcontext([Stateful()]), "stateful", {}, "1.1"),
    "a program": (
        lambda pool: nullcontext([PythonCode(pool)]),
        PythonCode.name, {"code": "print(6 * 7)"}, "42",
    ),
    "the paper's program": (
        lambda pool: nullcontext([PaperPythonCode(pool)]),
        PaperPythonCode.name, {"code": "print(6 * 7)"}, "42",
    ),
    "a notebook": (
        lambda pool: nullcontext([JupyterCode(pool)]), JupyterCode.name, {"code": "6 * 7"}, "42"
    ),
    "a shared MCP server": (lambda _: of_a_shared_server(), "add", {"a": 2, "b": 3}, "5"),
    "a rollout's own MCP server": (lambda _: mcp_server(RAW), "count", {}, "1"),
}  # fmt: skip


@pytest.fixture(scope="module")
async def pool() -> AsyncIterator[Pool]:
    async with Pool(BARE) as pool:
        yield pool


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.full
async def test_call_ends_before_the_turn_that_wrote_it(kind: str, pool: Pool) -> None:
    opened, name, arguments, output = KINDS[kind]
    ended = anyio.Event()

    def observe(event: Event) -> None:
        if isinstance(event, CallFinished):
            ended.set()

    async def until_ended() -> None:
        with anyio.fail_after(patient(30)):
            await ended.wait()

    call, after = written(CHAT, call_text(name, arguments)), written(CHAT, f" and more{END}")
    engine = ScriptedEngine(
        [*chunks(call, end=None), until_ended, *chunks(after, offset=len(call))],
        chunks(written(CHAT, f"done{END}")),
    )
    async with opened(pool) as tools:
        trajectory = await Rollout(
            engine=engine,
            chat=CHAT,
            messages=[{"role": "user", "content": "Do it."}],
            tools=tools,
            emit=observe,
        ).run()
    assert trajectory.stop_reason is StopReason.ANSWERED
    (result,) = trajectory.results
    assert (result.status, result.content.strip()) == (ToolCallStatus.OK, output)
