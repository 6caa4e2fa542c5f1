"""What an environment talks to: it runs conversations with the model and keeps their records."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import anyio

from agentloop.agent.rollout import Budget, Reply
from agentloop.agent.tools import Tool, ToolFunction
from agentloop.environments.conversation import Conversation
from agentloop.environments.sandbox import EnvironmentSandbox
from agentloop.errors import AgentFailed, ServerError
from agentloop.events import Emit, Event, RolloutStarted
from agentloop.inference.sglang.sampling import Sampling
from agentloop.sandbox import Pool
from agentloop.trajectory import Message, StopReason, Trajectory

__all__ = ["Agent", "Host", "UserReply"]

# The rest is the environment's own: a slow server must not make the environment late.
_SHARE_OF_TIME = 0.9

UserReply = Callable[[str], "str | None | Awaitable[str | None]"]
"""A function, async or not, of the model's answer that returns the user's next message, or None."""


class Host(Protocol):
    """Runs conversations with the model, and programs; implemented by `agentloop.Runtime`."""

    @property
    def pool(self) -> Pool: ...

    async def rollout(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Tool | ToolFunction | str],
        sampling: Sampling,
        budget: Budget,
        reply: Reply | None,
        id: str,
        on_event: Emit,
    ) -> Trajectory: ...


class Agent:
    """The agent that an environment runs.

    Attributes:
        id: the rollout's id; that of another agent has the agent's name after a plus sign.
        is_trained: whether its tokens are trained on.
        reward: of another agent: its own reward, a number; None: the rollout's.
    """

    def __init__(
        self,
        host: Host,
        emit: Emit,
        *,
        id: str,
        sampling: Sampling,
        budget: Budget,
        is_trained: bool = True,
        main: Agent | None = None,
    ) -> None:
        """
        Args:
            emit: called with the events of all conversations.
            id: id of the first trajectory; the others are `ID+1`, `ID+2`, ...
            sampling: parameters of the first conversation; the seeds of others are derived.
            budget: limits of each conversation; `timeout_s` is that of the environment as a whole,
                of which the conversations together get nine tenths.
            main: the agent of which this is another one.
        """
        self._ends_at = (
            anyio.current_time() + _SHARE_OF_TIME * budget.timeout_s
            if main is None
            else main._ends_at
        )
        self._host = host
        self._emit = emit
        self.id = id
        self.is_trained = is_trained
        self.reward: float | None = None
        self._sampling = sampling
        self._budget = budget
        self._main = main
        self._failure: str | None = None
        self._num_begun = 0
        self._found: dict[int, Trajectory] = {}
        self._others: dict[str, Agent] = {}

    @property
    def failure(self) -> str | None:
        """The infrastructure's failure during the rollout, if there was one."""
        return self._main.failure if self._main is not None else self._failure

    @property
    def trajectories(self) -> list[Trajectory]:
        """The agent's own conversations, in the order in which they began."""
        return [self._found[number] for number in sorted(self._found)]

    @property
    def others(self) -> dict[str, Agent]:
        """The other agents by name."""
        return dict(self._others)

    @property
    def sandbox(self) -> EnvironmentSandbox:
        """The sandbox, for what must not run in this process, such as code of the model."""
        return EnvironmentSandbox(self._host.pool, self._failed)

    def other(self, name: str, *, is_trained: bool = True) -> Agent:
        """Return another agent of the same model, such as an opponent or a checker.

        The same name gives the same agent. Its conversations are recorded under its name, and get
        the rollout's reward unless its `reward` is set. Rewards are compared within the group, for
        each name by itself.

        Args:
            is_trained: whether to train on its tokens.

        Raises:
            ValueError: the name is not an identifier, or this is another agent itself.
        """
        if self._main is not None:
            raise ValueError(f"{self.id} is another agent itself: ask the rollout's own agent")
        if not name.isidentifier():
            raise ValueError(f"{name!r} is not a name such as checker or player_2")
        if name not in self._others:
            self._others[name] = Agent(
                self._host,
                self._emit,
                id=f"{self.id}+{name}",
                sampling=self._sampling.of_group(name),
                budget=self._budget,
                is_trained=is_trained,
                main=self,
            )
        return self._others[name]

    async def run(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Tool | ToolFunction | str] = (),
        system: str | None = None,
        reply: UserReply | None = None,
        max_turns: int | None = None,
        max_tokens: int | None = None,
    ) -> Trajectory:
        """Let the model answer, calling tools as often as it likes.

        Args:
            messages: a question, or a conversation as OpenAI messages.
            tools: functions, built-in tools by name, or `Tool` objects. A call starts as soon as
                the model has written it.
            system: system message to put before the others.
            reply: called with each answer of the model; the conversation goes on with what it
                returns, and ends when that is None. It is called for the last answer too.
            max_turns, max_tokens: limits of this conversation, below those of the budget.

        Returns:
            The conversation; its `answer` is what the model said last.

        Raises:
            AgentFailed: the infrastructure failed.
            RequestError: a message or a tool is invalid.
        """
        number, self._num_begun = self._num_begun, self._num_begun + 1
        clock = _ReplyClock(reply) if reply is not None else None

        def observe(event: Event) -> None:
            if isinstance(event, RolloutStarted):
                self._found[number] = event.record
            self._emit(event)

        try:
            trajectory = await self._host.rollout(
                _conversation(messages, system),
                tools=list(tools),
                sampling=self._sampling.of_group(str(number)) if number else self._sampling,
                budget=self._lowered(max_turns, max_tokens),
                reply=clock,
                id=f"{self.id}+{number}" if number else self.id,
                on_event=observe,
            )
        except ServerError as error:
            raise self._failed(str(error)) from error
        except BaseException:  # the environment's, or it has been stopped
            if (cut := self._found.get(number)) is not None:
                cut.stop_reason = StopReason.ENVIRONMENT
            raise
        self._found[number] = trajectory
        if trajectory.stop_reason in (StopReason.INFRASTRUCTURE, StopReason.CANCELLED):
            raise self._failed(trajectory.error or str(trajectory.stop_reason))
        if trajectory.stop_reason is StopReason.TIME_BUDGET and not trajectory.used_its_time:
            if clock is not None and clock.elapsed_s >= trajectory.elapsed_s / 2:
                trajectory.stop_reason = StopReason.ENVIRONMENT
                raise TimeoutError(f"its replies took {clock.elapsed_s:.3g} s, most of the time")
            raise self._failed("it ran out of time, mostly waiting for servers and sandbox")
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

    @asynccontextmanager
    async def conversation(self, **options: Any) -> AsyncIterator[Conversation]:
        """Have a conversation message by message; takes the options of `run`, except `reply`.

            async with agent.conversation(system="Play chess.") as talk:
                while not (game.is_over or talk.has_ended):
                    game.play(await talk.ask(game.position))
        """
        async with Conversation.open(self.run, options) as conversation:
            yield conversation

    def _failed(self, why: str) -> AgentFailed:
        """Record a failure of the infrastructure, and return it as an error."""
        main = self._main or self
        main._failure = main._failure or why
        return AgentFailed(why)

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


class _ReplyClock:
    """Calls an environment's `reply` and measures how long that takes."""

    def __init__(self, reply: UserReply) -> None:
        self._reply = reply
        self.elapsed_s = 0.0

    async def __call__(self, answer: str) -> str | None:
        begun = anyio.current_time()
        try:
            found = self._reply(answer)
            text = await found if inspect.isawaitable(found) else found
        finally:
            self.elapsed_s += anyio.current_time() - begun
        if not isinstance(text, str | None):
            raise TypeError(f"reply: expected a string or None, got {text!r}")
        return text


def _conversation(messages: str | Sequence[Message], system: str | None) -> list[Message]:
    found: list[Message] = [*messages] if not isinstance(messages, str) else []
    if isinstance(messages, str):
        found.append({"role": "user", "content": messages})
    return found if system is None else [{"role": "system", "content": system}, *found]
