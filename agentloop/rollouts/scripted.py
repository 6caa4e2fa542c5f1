"""Play an environment with a script in place of the model: for its tests, and for dialogues.

def player(messages):
    return agentloop.call("guess", number=50)

rollout = await agentloop.play(guess, {"answer": 50, "top": 100}, player)
assert rollout.reward.value == 1.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from agentloop.agent.named_tools import resolved_tools
from agentloop.agent.rollout import Budget
from agentloop.agent.tools import Tool, ToolFunction, as_tool
from agentloop.environments.environment import Environment
from agentloop.environments.player import DialogueRow, PlayerHost, ResolveTools, Script
from agentloop.environments.rewards.reward import Grader, Reward
from agentloop.environments.tasks.task import Task, task_of
from agentloop.errors import RequestError
from agentloop.inference.sglang.sampling import Sampling
from agentloop.rollouts.player import EnvironmentPlayer
from agentloop.rollouts.record import RolloutRecord
from agentloop.rollouts.request import GroupRequest
from agentloop.rollouts.runner import GroupRunner
from agentloop.sandbox import Pool
from agentloop.trajectory import Message

_TOOL_S = 4.0  # time limit of a call of a built-in tool, as by default


@dataclass(frozen=True, slots=True)
class PlayedRollout:
    """A rollout with a script in place of the model.

    Attributes:
        reward: reward by the environment.
        dialogues: conversations, as `agentloop sft` reads them.
        record: record of the rollout; without a model, it has no token ids.
    """

    reward: Reward
    dialogues: list[DialogueRow]
    record: RolloutRecord


def call(name: str, text: str = "", /, **arguments: object) -> Message:
    """Return a message of the assistant that calls a tool, after some text if there is any."""
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": [{"id": f"call_{name}", "type": "function", "function": function}],
    }


async def play(
    environment: Environment,
    task: Task | Mapping[str, object],
    script: Script,
    *,
    budget: Budget | None = None,
    pool: Pool | None = None,
    tools: Mapping[str, Sequence[Tool | ToolFunction]] | None = None,
) -> PlayedRollout:
    """Play one rollout of an environment with a script in place of the model.

    Args:
        task: a task, or its fields.
        budget: limits of turns and time; a script has no tokens to limit.
        pool: the sandbox, for environments that use `agent.sandbox` or the built-in tools.
        tools: stand-ins for other tools that the environment names, by their names, such as
            `{"mcp:people": [lookup]}`.

    Raises:
        RequestError: the environment failed.
    """
    host = PlayerHost(script, pool, partial(_resolve_stand_ins, tools or {}, pool), [])
    if not isinstance(task, Task):
        task = replace(task_of(task, "play"), id="played")
    async with Grader(pool=pool) as grader:
        return await _play(environment, task, host, budget or Budget(), grader)


async def play_teacher(
    environment: Environment,
    task: Task,
    random: Random,
    *,
    resolve: ResolveTools,
    pool: Pool,
    grader: Grader,
    budget: Budget,
) -> PlayedRollout:
    """Play one rollout by the environment's teacher.

    A dialogue that the budget cuts short is left out, since it has no last answer to imitate.

    Args:
        resolve: returns the tools that the environment names.
        grader: checks the answers.

    Raises:
        RequestError: the environment, its teacher or a tool's infrastructure failed.
    """
    assert environment.teacher is not None
    host = PlayerHost(environment.teacher(task, random), pool, resolve, [])
    played = await _play(environment, task, host, budget, grader)
    for trajectory in played.record.all_trajectories:
        if trajectory.error is not None:
            raise RequestError(f"the teacher's rollout of task {task.id}: {trajectory.error}")
    whole = [
        dialogue for dialogue in played.dialogues if dialogue["messages"][-1]["role"] == "assistant"
    ]
    return replace(played, dialogues=whole)


async def _play(
    environment: Environment, task: Task, host: PlayerHost, budget: Budget, grader: Grader
) -> PlayedRollout:
    async with environment.opened() as opened:
        player = EnvironmentPlayer(opened, host, sampling=Sampling(), grader=grader)
        group = await GroupRunner(player, grader).run(GroupRequest(task, "played", 1, budget))
    assert host.dialogues is not None
    return PlayedRollout(group.rewards[0], host.dialogues, group.rollouts[0])


def _resolve_stand_ins(
    stand_ins: Mapping[str, Sequence[Tool | ToolFunction]],
    pool: Pool | None,
    tools: Sequence[Tool | ToolFunction | str],
) -> list[Tool]:
    """Return the tools, with those given for the names among them."""
    resolved: list[Tool] = []
    for tool in tools:
        if not isinstance(tool, str):
            resolved.append(as_tool(tool))
        elif tool in stand_ins:
            resolved += map(as_tool, stand_ins[tool])
        elif pool is not None and ":" not in tool:
            resolved += resolved_tools(
                [tool], pool=pool, servers={}, functions={}, timeout_s=_TOOL_S
            )
        else:
            argument = f"tools={{{tool!r}: [...]}}" if ":" in tool else "pool="
            raise RequestError(f"tools: {tool!r}: pass play({argument}) for it")
    return resolved
