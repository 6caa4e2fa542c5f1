"""The agent of an environment as a service: it answers conversations of clients.

    a client's messages ──> the first conversation of the environment's agent ──> the answer
                                └──its tools and its system message──┘

The environment runs for each answer, always on the same task, and ends with it: its tools begin
anew, and there is no reward. Not covered: agents that are programs (`agent.url`).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio

from agentloop.agent.rollout import Budget
from agentloop.agent.tools import Tool, ToolFunction
from agentloop.environments.agent import Agent, Host, conversation_of
from agentloop.environments.environment import Environment
from agentloop.environments.player import ResolveTools
from agentloop.environments.tasks.task import Task
from agentloop.errors import AgentLoopError, ServerError, place_of, sole, summary_of
from agentloop.events import Emit, ignore
from agentloop.inference.sglang.sampling import Sampling
from agentloop.plain_json import JsonObject
from agentloop.sandbox import Pool
from agentloop.trajectory import Message, Trajectory

__all__ = ["ServedAgent"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedAgent:
    """Answers conversations as the agent of an environment does.

    Attributes:
        task: the task that the environment is run on.
        sampling, budget: used for requests that have none of their own.
    """

    environment: Environment
    host: Host
    task: Task
    sampling: Sampling
    budget: Budget

    async def rollout(
        self,
        messages: str | Sequence[Message],
        *,
        sampling: Sampling | None = None,
        budget: Budget | None = None,
        on_event: Emit = ignore,
        **options: Any,
    ) -> Trajectory:
        """Answer a conversation. Takes the options of `Runtime.rollout`.

        A system message of the environment replaces that of the conversation; tools among the
        options replace those of the environment.

        Raises:
            RequestError: the request is invalid.
            ServerError: the environment failed before its agent had answered.
        """
        budget = budget or self.budget
        with anyio.move_on_after(budget.timeout_s) as scope:
            client_host = _ClientHost(
                self.host, conversation_of(messages), on_event, options, scope
            )
            agent = Agent(
                client_host,
                ignore,
                id=client_host.id,
                sampling=sampling or self.sampling,
                budget=budget,
            )
            try:
                await self.environment(self.task, agent)
            except (Exception, SystemExit) as error:  # the user's code
                if not client_host.has_ended:
                    log.warning("%s failed", self.environment.name, exc_info=error)
                    cause = sole(error)
                    reason = summary_of(cause) + (
                        f" ({place})" if (place := place_of(cause)) else ""
                    )
                    raise self._failure(f"it raised {reason}") from error
        if client_host.error is not None:
            raise client_host.error
        if client_host.trajectory is None:
            raise self._failure(f"it took {budget.timeout_s:g} s" if scope.cancel_called else "")
        return client_host.trajectory

    def _failure(self, reason: str) -> ServerError:
        problem = f"environment {self.environment.name}: its agent had no conversation"
        return ServerError(problem + (f": {reason}" if reason else ""))


@dataclass(slots=True)
class _ClientHost:
    """Runs a client's conversation in place of the agent's first one; implements `Host`.

    Attributes:
        options: the options of the request.
        scope: the environment's; it is cancelled when the conversation has ended.
    """

    host: Host
    messages: list[Message]
    on_event: Emit
    options: JsonObject
    scope: anyio.CancelScope
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    trajectory: Trajectory | None = None
    error: AgentLoopError | None = None

    @property
    def has_ended(self) -> bool:
        return self.trajectory is not None or self.error is not None

    @property
    def session_listener(self) -> None:
        """Implement `Host`: a program cannot take part in a client's conversation."""

    async def listen_for_sessions(self) -> None:
        """Implement `Host`."""

    @property
    def pool(self) -> Pool:
        return self.host.pool

    @property
    def resolve_tools(self) -> ResolveTools:
        return self.host.resolve_tools

    async def rollout(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool | ToolFunction | str],
        id: str,
        sampling: Sampling,
        budget: Budget,
        **options: Any,
    ) -> Trajectory:
        """Implement `Host`."""
        common: JsonObject = {"id": id, "sampling": sampling, "budget": budget}
        if id != self.id:  # of another agent
            return await self.host.rollout(messages, tools=tools, **common, **options)
        if self.options.get("tools") is not None:
            tools = self.options["tools"]
        of_client: JsonObject = {**self.options, "tools": tools, "on_event": self.on_event}
        try:
            conversation = _with_system(messages, self.messages)
            self.trajectory = await self.host.rollout(conversation, **common, **of_client)
        except AgentLoopError as error:
            self.error = error
        self.scope.cancel()
        await anyio.sleep_forever()  # no deadline: it ends with the scope
        raise AssertionError


def _with_system(
    environment_messages: Sequence[Message], client_messages: Sequence[Message]
) -> list[Message]:
    """Return a client's messages after the environment's system message, if there is one."""
    system = [message for message in environment_messages[:1] if message.get("role") == "system"]
    if system and client_messages and client_messages[0].get("role") in ("system", "developer"):
        client_messages = client_messages[1:]
    return [*system, *client_messages]
