"""An environment with two agents, for bench/kill.py."""

from __future__ import annotations

import agentloop

__all__ = ["solve_and_check"]


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


def _coin(text: str) -> float:
    return float(sum(text.encode()) % 2)
