"""Environments for bench/kill.py: one with two agents, and one that fails."""

from __future__ import annotations

import asyncio
import math
import os
import time
from pathlib import Path
from random import Random
from typing import Any

import anyio
import anyio.to_thread

import agentloop
from agentloop.agent.tools import as_tool

__all__ = ["EFFECTS", "ask_again", "fail_at_random", "solve_and_check"]

_abandoned: list[asyncio.Future[agentloop.Trajectory]] = []


@agentloop.environment
async def solve_and_check(task: agentloop.Task, agent: agentloop.Agent) -> float:
    """Let one agent solve the task and another one check it.

    The rewards are those of coins that depend on the answers alone: the small model of the real
    runs is nearly always correct, which has no signal.
    """
    solved = await agent.run(task.prompt, tools=["python_code_with_standard_io"])
    checker = agent.other("checker")
    checked = await checker.chat(f"{task.prompt} Is it {solved.answer[:200]}?")
    checker.reward = _coin(checked)
    return _coin(solved.text)


EFFECTS = "AGENTLOOP_BENCH_EFFECTS"  # variable with the path of a file


@agentloop.environment(replayable=True)
async def ask_again(task: agentloop.Task, agent: agentloop.Agent) -> float:
    """Let the agent answer several times; its tool has effects: a line for each call."""
    num_asked = 0

    def python_code_with_standard_io(code: str, input: str = "") -> str:
        """Run a program.

        Args:
            code: the program.
            input: its standard input.
        """
        with Path(os.environ[EFFECTS]).open("a") as file:
            file.write(f"{agent.id}\n")
        time.sleep(0.05)  # so that some kills fall into calls
        return "42"

    def reply(answer: str) -> str | None:
        nonlocal num_asked
        num_asked += 1
        return None if num_asked == 5 else task.question

    tool: Any = as_tool(python_code_with_standard_io)
    tool.is_stateless = True  # what it does depends on nothing that was done before
    answered = await agent.run(task.prompt, tools=[tool], reply=reply)
    return _coin("".join(turn.text for turn in answered.turns))


@agentloop.environment(agent_errors={ValueError: -1.0})
async def fail_at_random(task: agentloop.Task, agent: agentloop.Agent) -> float | None:
    """Let the agent solve the task, and in most rollouts do something that environments may not."""
    solved = await agent.run(task.prompt)
    match Random(agent.id).randrange(10):
        case 0:
            raise KeyError("board")
        case 1:
            raise ValueError("the answer is no number")
        case 2:
            return math.nan
        case 3:
            return None
        case 4:
            _abandoned.append(asyncio.ensure_future(agent.run(task.prompt)))
        case 5:
            with anyio.move_on_after(0.001):
                await agent.run(task.prompt)
        case 6:
            await anyio.to_thread.run_sync(time.sleep, 0.01)
    return _coin(solved.text)


def _coin(text: str) -> float:
    return float(sum(text.encode()) % 2)
