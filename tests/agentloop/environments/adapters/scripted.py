"""A host whose model is a function of the conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio.lowlevel

from agentloop.agent.rollout import Budget
from agentloop.agent.tools import Tools
from agentloop.environments.environment import Environment, open_tasks
from agentloop.environments.tasks.sources import Task, TasksSettings
from agentloop.errors import sole
from agentloop.events import RolloutStarted
from agentloop.inference.sglang.sampling import Sampling
from agentloop.rollouts.player import EnvironmentPlayer
from agentloop.rollouts.record import RolloutRecord
from agentloop.trajectory import (
    Message,
    StopReason,
    ToolCall,
    ToolCallStatus,
    Trajectory,
    Turn,
    TurnEnd,
)
from tests.fakes import NoModel
from tests.rollouts import records_of

Said = str | tuple[str, dict[str, Any]]
"""A message, or a tool call: name and arguments."""


class Scripted(NoModel):
    """Runs conversations with a function of the messages so far in place of the model."""

    def __init__(self, script: Callable[[list[Message]], Said], pool: Any = None) -> None:
        super().__init__(pool)
        self.script = script
        self.asked: list[tuple[str, list[Message], list[str]]] = []  # id, messages, tools
        self.seen: list[Message] = []  # of the newest conversation

    async def rollout(
        self, messages: Any, *, tools: Any, budget: Budget, reply: Any, id: str, **options: Any
    ) -> Trajectory:
        names = [schema["function"]["name"] for schema in Tools(tools).schemas]
        self.asked.append((id, list(messages), names))
        result = Trajectory(id, [9], stop_reason=StopReason.ANSWERED)
        options["on_event"](RolloutStarted(result, ""))
        self.seen = list(messages)
        try:
            async with Tools(tools) as running:
                return await self._converse(result, self.seen, running, budget, reply)
        except ExceptionGroup as group:
            raise sole(group) from None

    async def _converse(
        self,
        result: Trajectory,
        observed: list[Message],
        running: Tools,
        budget: Budget,
        reply: Any,
    ) -> Trajectory:
        while True:
            await anyio.lowlevel.checkpoint()
            stated = self.script(observed)
            turn = Turn(output_ids=[1], logprobs=[-1.0], end=TurnEnd.STOP)
            result.turns.append(turn)
            if isinstance(stated, tuple):
                turn.calls.append(ToolCall(f"call_{len(self.asked)}", *stated, "", 0, 1))
                output = await running.run(*stated)
                if output.status is ToolCallStatus.CALLER:
                    result.stop_reason = StopReason.CALLER_TOOLS
                    return result
                observed.append({"role": "tool", "content": f"{output.status}: {output.content}"})
                continue
            turn.text = result.answer = stated
            text = await reply(stated) if reply is not None else None
            if text is None:
                return result
            if len(result.turns) == budget.max_turns:
                result.stop_reason = StopReason.TURN_BUDGET
                return result
            observed += [
                {"role": "assistant", "content": stated},
                {"role": "user", "content": text},
            ]


def task_of(environment: Environment, seed: int = 0) -> Task:
    """Return a task of the environment's own."""
    return next(open_tasks(TasksSettings(seed=seed), environment))


async def play(
    environment: Environment, host: Any, *, size: int = 1, timeout_s: float = 60, seed: int = 0
) -> Sequence[RolloutRecord]:
    """Run a group of the environment's own task."""
    return await records_of(
        EnvironmentPlayer(environment, host, sampling=Sampling(seed=7)),
        task_of(environment, seed),
        size=size,
        budget=Budget(timeout_s=timeout_s, max_turns=50),
    )
