"""Play an environment with a script in place of the model: for its tests, and for dialogues.

def player(messages):
    return agentloop.call("guess", number=50)

rollout = await agentloop.play(guess, {"answer": 50, "top": 100}, player)
assert rollout.reward.value == 1.0
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio

from agentloop.agent.rollout import Budget, Reply
from agentloop.agent.tools import Tool, ToolFunction, Tools
from agentloop.environments.environment import Environment
from agentloop.environments.episodes import EnvironmentGroups, Episode
from agentloop.environments.rewards.reward import Reward
from agentloop.environments.tasks.sources import Task
from agentloop.errors import RequestError, sole
from agentloop.events import Emit, RolloutStarted
from agentloop.inference.sglang.sampling import Sampling
from agentloop.sandbox import Pool
from agentloop.trajectory import (
    Message,
    StopReason,
    ToolCall,
    ToolCallStatus,
    ToolResult,
    Trajectory,
    Turn,
    TurnEnd,
)

__all__ = ["PlayedRollout", "Script", "call", "play"]

Said = str | Message

Script = Callable[[list[Message]], Said | Awaitable[Said]]
"""A function, async or not, of the messages so far that returns what the model says next: text, or
a message with tool calls, as made by `call`."""


@dataclass(frozen=True, slots=True)
class PlayedRollout:
    """A rollout with a script in place of the model.

    Attributes:
        reward: what the environment says that it is worth.
        dialogues: its conversations, as `agentloop sft` reads them.
        episode: its record; without a model, it has no token ids.
    """

    reward: Reward
    dialogues: list[dict[str, Any]]
    episode: Episode


def call(name: str, text: str = "", /, **arguments: Any) -> Message:
    """Return a message of the assistant that calls a tool, after some text if there is any."""
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": [{"id": f"call_{name}", "type": "function", "function": function}],
    }


async def play(
    environment: Environment,
    task: Task | Mapping[str, Any],
    script: Script,
    *,
    budget: Budget | None = None,
    pool: Pool | None = None,
) -> PlayedRollout:
    """Play one rollout of an environment with a script in place of the model.

    Args:
        task: a task, or its fields.
        budget: its numbers of turns and its time are kept to; it has no tokens.
        pool: the sandbox, for environments that use `agent.sandbox`.

    Raises:
        RequestError: the environment failed.
    """
    host = _ScriptedHost(script, pool)
    groups = EnvironmentGroups(environment, host, sampling=Sampling())
    (episode,) = await groups(
        task if isinstance(task, Task) else _task_of(task),
        size=1,
        name="played",
        budget=budget or Budget(),
        on_queued=lambda: None,
    )
    assert episode.reward is not None
    return PlayedRollout(episode.reward, host.dialogues, episode)


def _task_of(fields: Mapping[str, Any]) -> Task:
    extra = {name: value for name, value in fields.items() if name not in ("prompt", "answer")}
    return Task("played", fields.get("prompt", ""), str(fields.get("answer", "")), extra=extra)


@dataclass
class _ScriptedHost:
    """Runs conversations with a script in place of the model; implements `Host`."""

    script: Script
    pool: Any
    dialogues: list[dict[str, Any]] = field(default_factory=list)

    async def rollout(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Tool | ToolFunction | str],
        budget: Budget,
        reply: Reply | None,
        id: str,
        on_event: Emit,
        **_: Any,
    ) -> Trajectory:
        found = Trajectory(id, [], created_unix_s=time.time())
        on_event(RolloutStarted(found, ""))
        history: list[Message] = [*messages] if not isinstance(messages, str) else []
        by_name = [tool for tool in tools if isinstance(tool, str)]
        if by_name:
            raise RequestError(f"tools: a script cannot call the built-in tools {by_name}")
        opened = Tools([tool for tool in tools if not isinstance(tool, str)])
        self.dialogues.append({"messages": history, "tools": opened.schemas})
        found.stop_reason = StopReason.TIME_BUDGET
        try:
            with anyio.move_on_after(budget.timeout_s):
                async with opened:
                    found.stop_reason = await self._turns(found, history, opened, budget, reply)
        except ExceptionGroup as errors:
            raise sole(errors) from errors
        return found

    async def _turns(
        self,
        trajectory: Trajectory,
        history: list[Message],
        tools: Tools,
        budget: Budget,
        reply: Reply | None,
    ) -> StopReason:
        while True:
            said = self.script(list(history))
            said = await said if inspect.isawaitable(said) else said
            message: Message = (
                {"role": "assistant", "content": said} if isinstance(said, str) else said
            )
            history.append(message)
            turn = Turn(end=TurnEnd.STOP, text=str(message.get("content") or ""))
            trajectory.turns.append(turn)
            trajectory.answer = turn.text
            for asked_for in message.get("tool_calls") or ():
                await _run(turn, asked_for, history, tools)
            if not turn.calls:
                asked = None if reply is None else await reply(turn.text)
                if asked is None:
                    return StopReason.ANSWERED
                history.append({"role": "user", "content": asked})
            if len(trajectory.turns) >= budget.max_turns:
                return StopReason.TURN_BUDGET


async def _run(
    turn: Turn, asked_for: Mapping[str, Any], history: list[Message], tools: Tools
) -> None:
    """Run a call, and add it to the turn and its result to the messages."""
    key, name = asked_for["id"], asked_for["function"]["name"]
    arguments = asked_for["function"]["arguments"]
    turn.calls.append(ToolCall(key, name, dict(arguments), "", 0, 0))
    output = await tools.run(name, arguments)
    turn.results.append(ToolResult(key, name, output.status, output.content, 0.0, 0.0, 0.0))
    history.append({"role": "tool", "tool_call_id": key, "content": output.content})
    if output.status is ToolCallStatus.INFRASTRUCTURE:
        raise RequestError(f"{name}: {output.content}")
