"""What an environment talks to: it runs conversations with the model and keeps their records."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

import anyio

from agentloop.agent.rollout import Budget
from agentloop.agent.tools import Tool, ToolFunction
from agentloop.errors import AgentLoopError, ServerError
from agentloop.inference.sglang.sampling import Sampling
from agentloop.trajectory import Message, StopReason, Trajectory

__all__ = ["Agent", "AgentFailed", "RunOne"]

# The rest is the environment's own: a slow server must not make the environment late.
_SHARE_OF_TIME = 0.9


class RunOne(Protocol):
    """Runs one conversation with the model: `Runtime.rollout`."""

    def __call__(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Tool | ToolFunction | str] | None,
        sampling: Sampling,
        budget: Budget,
        id: str,
    ) -> Awaitable[Trajectory]: ...


class AgentFailed(AgentLoopError):
    """The infrastructure failed while the agent ran; the rollout gets no reward.

    An environment need not handle it. If it does, its rollout still has no reward.
    """


class Agent:
    """The agent that an environment runs.

    Attributes:
        id: the rollout's id.
        failure: the infrastructure's failure, if there was one.
    """

    def __init__(
        self,
        run: RunOne,
        *,
        id: str,
        sampling: Sampling,
        budget: Budget,
    ) -> None:
        """
        Args:
            id: id of the first trajectory; the others are `ID+1`, `ID+2`, ...
            sampling: parameters of the first conversation; the seeds of others are derived.
            budget: limits of each conversation; `timeout_s` is that of the environment as a whole,
                of which the conversations together get nine tenths.
        """
        self._ends_at = anyio.current_time() + _SHARE_OF_TIME * budget.timeout_s
        self._run = run
        self.id = id
        self._sampling = sampling
        self._budget = budget
        self._num_begun = 0
        self._found: dict[int, Trajectory] = {}
        self.failure: str | None = None

    @property
    def trajectories(self) -> list[Trajectory]:
        """The conversations that have ended, in the order in which they began."""
        return [self._found[number] for number in sorted(self._found)]

    async def run(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Tool | ToolFunction | str] = (),
        system: str | None = None,
        max_turns: int | None = None,
        max_tokens: int | None = None,
    ) -> Trajectory:
        """Let the model answer, calling tools as often as it likes.

        Args:
            messages: a question, or a conversation as OpenAI messages.
            tools: functions, built-in tools by name, or `Tool` objects. A call starts as soon as
                the model has written it.
            system: system message to put before the others.
            max_turns, max_tokens: limits of this conversation, below those of the budget.

        Returns:
            The conversation; its `answer` is what the model said last.

        Raises:
            AgentFailed: the infrastructure failed.
            RequestError: a message or a tool is invalid.
        """
        conversation = _conversation(messages, system)
        number, self._num_begun = self._num_begun, self._num_begun + 1
        key = f"{self.id}+{number}" if number else self.id
        sampling = self._sampling.of_group(str(number)) if number else self._sampling
        try:
            trajectory = await self._run(
                conversation,
                tools=list(tools),
                sampling=sampling,
                budget=self._lowered(max_turns, max_tokens),
                id=key,
            )
        except ServerError as error:
            self.failure = str(error)
            raise AgentFailed(self.failure) from error
        self._found[number] = trajectory
        if trajectory.stop_reason in (StopReason.INFRASTRUCTURE, StopReason.CANCELLED):
            self.failure = trajectory.error or str(trajectory.stop_reason)
            raise AgentFailed(self.failure)
        if trajectory.stop_reason is StopReason.TIME_BUDGET and not trajectory.used_its_time:
            self.failure = "it ran out of time, mostly waiting for servers and sandbox"
            raise AgentFailed(self.failure)
        return trajectory

    async def chat(
        self,
        messages: str | Sequence[Message],
        *,
        system: str | None = None,
        max_tokens: int | None = None,
    ) -> str:
        """Return one message of the model, which has no tools.

        Raises:
            AgentFailed: the infrastructure failed.
            RequestError: a message is invalid.
        """
        found = await self.run(messages, system=system, max_turns=1, max_tokens=max_tokens)
        return found.answer

    def _lowered(self, max_turns: int | None, max_tokens: int | None) -> Budget:
        """Return the budget, lowered to these limits and to the time that is left."""
        limits = {"max_turns": max_turns, "max_response_tokens": max_tokens}
        update: dict[str, Any] = {
            name: min(getattr(self._budget, name), limit)
            for name, limit in limits.items()
            if limit is not None
        }
        update["timeout_s"] = max(0.0, self._ends_at - anyio.current_time())
        return self._budget.model_copy(update=update)


def _conversation(messages: str | Sequence[Message], system: str | None) -> list[Message]:
    found: list[Message] = [*messages] if not isinstance(messages, str) else []
    if isinstance(messages, str):
        found.append({"role": "user", "content": messages})
    return found if system is None else [{"role": "system", "content": system}, *found]
