"""Environments and a server for tests of commands that play them."""

from __future__ import annotations

import threading
from typing import Any

import anyio

import agentloop
from agentloop.models import SMALL
from tests.support import FakeSGLang

SAID = "<tool_response></tool_response>y"
"""The text of the ids with which `server` responds."""


def server() -> FakeSGLang:
    return FakeSGLang([5, 6, 99], None, context_length=4000, max_total_num_tokens=80_000)


def settings_for(fake: FakeSGLang) -> list[str]:
    """Return the settings of a command that uses the server."""
    return [f"servers=['{fake.url}']", f"model='{SMALL}'", "sandbox.backend=process"]


@agentloop.environment(tasks=lambda rng: {"answer": rng.randint(1, 999), "mood": "[good]"})
async def two_talks(task: Any, agent: agentloop.Agent, *, half: float = 0.5) -> dict[str, float]:
    """Hold two conversations, the second one within the first one's time."""

    async def ask(question: str) -> None:
        await agent.run(question)

    async with anyio.create_task_group() as talks:
        talks.start_soon(ask, f"First question about {task.answer}?")
        talks.start_soon(ask, "Second question?")
    agent.record(talks=2)
    return {"whole": 1.0, "half": half}


@agentloop.environment(tasks=lambda rng: {"answer": rng.randint(1, 9)})
async def broken(task: Any, agent: agentloop.Agent) -> float:
    await agent.run("Before it breaks?")
    raise KeyError("board")


@agentloop.environment(tasks=lambda rng: {"answer": rng.randint(1, 9)})
async def undecided(task: Any, agent: agentloop.Agent) -> None:
    await agent.run("What is it worth?")


@agentloop.environment(tasks=lambda rng: {"answer": rng.randint(1, 999)})
async def two_replies(task: Any, agent: agentloop.Agent) -> float:
    """Answer the model twice, after a system message."""
    replies = iter(["[cold] [/red]", "warm"])
    await agent.run("Your guess?", system="Play a game.", reply=lambda answer: next(replies, None))
    return 1.0


@agentloop.environment(tasks=lambda rng: {"answer": rng.randint(1, 999)})
async def silent(task: Any, agent: agentloop.Agent) -> dict[str, float]:
    """Return a reward, in every second rollout without a conversation."""
    if agent.id.endswith("1"):
        return {"spoke": 0.0}
    await agent.run("Are you there?")
    return {"spoke": 1.0}


is_noticed = threading.Event()


@agentloop.environment(tasks=lambda rng: {"answer": rng.randint(1, 9)})
async def blocking(task: Any, agent: agentloop.Agent) -> float:
    """Block the event loop until a test sets `is_noticed`."""
    await agent.run("Ready?")
    assert is_noticed.wait(60)
    return 1.0
