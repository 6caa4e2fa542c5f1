"""The agent of an environment: it runs conversations with the model and keeps their records."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol, SupportsFloat, Unpack

import anyio

from agentloop.agent.rollout import Budget
from agentloop.agent.sessions import ModelSession, ModelSessions
from agentloop.agent.sessions.history import context_key, opening_key
from agentloop.agent.tools import Tool, ToolFunction
from agentloop.agent.turn_journal import Journals
from agentloop.environments.conversation import Conversation, ReplyClock, Stops, UserReply
from agentloop.environments.endpoint import Endpoint
from agentloop.environments.player import (
    OtherModel,
    Player,
    PlayerHost,
    ResolveTools,
    RolloutOptions,
)
from agentloop.environments.rewards.reward import Reward, finite_number
from agentloop.environments.sandbox import EnvironmentSandbox
from agentloop.environments.siblings import Siblings, names_of
from agentloop.errors import AgentLoopError, InfrastructureFailed, RequestError, ServerError
from agentloop.events import Emit, Event, RolloutStarted
from agentloop.inference.sglang.sampling import Sampling
from agentloop.sandbox import Pool
from agentloop.trajectory import Message, StopReason, Trajectory

__all__ = [
    "Agent",
    "Grade",
    "Host",
    "SessionOpener",
    "conversation_of",
]

# What an ended agent's conversation takes to be refused: a loop that ignores errors stays slow.
_REFUSAL_S = 1.0

Grade = Callable[[Trajectory], Awaitable[Reward]]
"""Returns the reward of a conversation, by the setting `reward`."""


class SessionOpener(Protocol):
    """Opens and serves sessions; implemented by `agentloop.serving.sessions`.

    Attributes:
        sessions: the open ones.
        socket: a unix socket on which they are served.
    """

    sessions: ModelSessions
    socket: Path

    def url_of(self, session: ModelSession) -> str:
        """Return the base URL of a session for Anthropic's clients; OpenAI's add /v1."""
        ...


class Host(Protocol):
    """Runs conversations, and programs; implemented by `agentloop.Runtime` and `PlayerHost`."""

    @property
    def session_listener(self) -> SessionOpener | None:
        """The server of sessions, after `listen_for_sessions`, if there is one."""
        ...

    async def listen_for_sessions(self) -> None:
        """Serve sessions from now on, if the host can."""
        ...

    @property
    def pool(self) -> Pool: ...

    @property
    def resolve_tools(self) -> ResolveTools: ...

    async def rollout(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool | ToolFunction | str],
        **options: Unpack[RolloutOptions],
    ) -> Trajectory: ...


class _TooSlow(AgentLoopError, TimeoutError):
    """The environment has used up the time of a conversation."""


class Agent:
    """The agent that an environment runs.

    Attributes:
        id: the rollout's id; that of another agent has the agent's name after a plus sign.
        is_trained: whether its tokens are trained on.
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
        with_text: bool = False,
        main: Agent | None = None,
        grade: Grade | None = None,
        siblings: Siblings | None = None,
        journals: Journals | None = None,
    ) -> None:
        """
        Args:
            emit: called with the events of all conversations.
            id: id of the first trajectory; the others are `ID+1`, `ID+2`, ...
            sampling: parameters of the first conversation; the seeds of others are derived.
            budget: limits of each conversation; `timeout_s` is that of all conversations together.
            with_text: decode the tokens of events as they arrive, for people to read.
            main: the agent of which this is another one.
            grade: returns the reward of a conversation.
            siblings: the rollouts of the same group.
            journals: keeps what happens in the rollout; None: it cannot be repeated from that.
        """
        self._ends_at: float = anyio.current_time() + budget.timeout_s
        self._ends_at -= 0.0 if journals is None else journals.elapsed_s
        if main is not None:
            self._ends_at = main._ends_at
        self._journals: Journals | None = journals if main is None else main._journals
        self._is_closed = False
        self._running: dict[int, anyio.CancelScope] = {}  # conversations, by their numbers
        self._stops: Stops = Stops() if main is None else main._stops
        self._stop_reason = StopReason.ENVIRONMENT  # of conversations that are stopped
        self._conversing_s = 0.0  # in all conversations
        self._host = host
        self._emit = emit
        self.id = id
        self.is_trained = is_trained
        self._reward: float | None = None
        self._sampling = sampling
        self._budget = budget
        self._with_text = with_text
        self._main = main
        self._grade = grade
        self._siblings = siblings
        self._failure: str | None = None
        self._session: ModelSession | None = None
        self._trajectories: dict[int, Trajectory] = {}
        self._openings: dict[str, str] = {}
        self._others: dict[str, Agent] = {}
        self._other_arguments: dict[str, tuple[bool, Player | None]] = {}
        self._recorded: dict[str, float] = {}

    @property
    def reward(self) -> float | None:
        """The own reward of another agent, a number, which may be set; None: the rollout's.

        Raises:
            AttributeError: it is set on the rollout's own agent, whose reward the environment
                returns.
        """
        return self._reward

    @reward.setter
    def reward(self, reward: float | None) -> None:
        if self._main is None:
            raise AttributeError(
                "agent.reward: return the reward from the environment: only other agents "
                "(agent.other) have one that can be set"
            )
        self._reward = reward

    def record(self, **values: SupportsFloat) -> None:
        """Record measurements of the rollout, such as `agent.record(tries=3)`.

        They have no effect on the reward. The mean of each over the rollouts with a reward is a
        metric, such as `recorded/tries`. Of a name that is recorded again, the last value counts.

        Raises:
            RequestError: the rollout has ended.
            ValueError: a value is no finite number of at most 1e30 in magnitude.
        """
        self._refuse_if_closed()
        numbers = {name: finite_number(value, f"record: {name}") for name, value in values.items()}
        (self._main or self)._recorded.update(numbers)

    @property
    def recorded(self) -> dict[str, float]:
        """The measurements that have been recorded of the rollout so far, by name."""
        return dict((self._main or self)._recorded)

    @property
    def failure(self) -> str | None:
        """The infrastructure's failure during the rollout, if there was one."""
        main = self._main or self
        sessions = (agent._session for agent in (main, *main._others.values()))
        failures = (session.failure for session in sessions if session is not None)
        return main._failure or next((failure for failure in failures if failure), None)

    @property
    def trajectories(self) -> list[Trajectory]:
        """The agent's own conversations, in the order in which they began.

        Those of clients of its `url` come last.
        """
        trajectories = [self._trajectories[number] for number in sorted(self._trajectories)]
        return trajectories + (self._session.trajectories if self._session is not None else [])

    @property
    def openings(self) -> dict[str, str]:
        """The purpose of each of its conversations, by the conversation's id.

        Conversations with the same tools and system message are for the same.
        """
        return self._openings | (self._session.openings if self._session is not None else {})

    @property
    def url(self) -> str:
        """Base URL of an HTTP endpoint for OpenAI's clients, at which this agent's model answers.

        An unmodified program asks the model there; what it samples is recorded, exactly, and
        trained on like any conversation. It has no tools of its own: the client runs them. Its
        sampling parameters are those of the rollout: what requests say of them has no effect.

        Raises:
            RuntimeError: the agent is played by something else than our model.
        """
        return f"{self.anthropic_url}/v1"

    @property
    def anthropic_url(self) -> str:
        """The same as `url`, for Anthropic's clients."""
        return self._listener.url_of(self._opened_session)

    @property
    def key(self) -> str:
        """API key for clients of `url`, which may also send any other."""
        return self._opened_session.key

    @property
    def socket(self) -> Path:
        """A unix socket on which `url` is served, too: for containers without a network."""
        return self._listener.socket

    @property
    def queued_s(self) -> float:
        """Seconds during which its only request to `url` waited for a place at a server."""
        return self._session.queued_s if self._session is not None else 0.0

    def stop_requests(self) -> bool:
        """End the requests to `url` that are in flight, and return whether there were any.

        What the model has sampled for them is kept as conversations that ended there.
        """
        return self._session is not None and self._session.stop_requests()

    def close(
        self, stop_reason: StopReason | None = None, cause: BaseException | None = None
    ) -> None:
        """End all conversations, at `url` and of the other agents too, and refuse new ones.

        Conversations that have ended before, or that the environment has stopped, stay as they are.

        Args:
            stop_reason: how those that still run ended; None: the environment has stopped them.
                Those at `url` ended as their last turns did, unless the rollout has failed.
            cause: the error that ends the rollout: conversations that it has cut off ended so, too.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._stop_reason = stop_reason or StopReason.ENVIRONMENT
        for number, scope in self._running.items():
            scope.cancel()
            self._record_stop(number)
        if stop_reason is not None and cause is not None:
            for trajectory in self._stops.of(cause):
                trajectory.stop_reason = stop_reason
        if self._session is not None:
            has_failed = stop_reason is not None and stop_reason.is_unscorable
            self._listener.sessions.close(
                self._session, stop_reason=stop_reason if has_failed else None
            )
        for agent in self._others.values():
            agent.close(stop_reason)

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._is_closed

    @property
    def _listener(self) -> SessionOpener:
        listener = self._host.session_listener
        if listener is None:
            raise RuntimeError("url: only an agent that our model plays has one")
        return listener

    @property
    def _opened_session(self) -> ModelSession:
        if self._session is None:
            self._refuse_if_closed()
            self._session = self._listener.sessions.open(
                f"{self.id}+api",
                sampling=self._sampling.of_group("api"),
                budget=self._limited_budget(None, None),
                emit=self._emit,
                with_text=self._with_text,
                is_rollout=True,
            )
        return self._session

    @property
    def time_left_s(self) -> float:
        """Seconds until its conversations must have ended."""
        return max(0.0, self._ends_at - anyio.current_time())

    @property
    def others(self) -> dict[str, Agent]:
        """The other agents by name."""
        return dict(self._others)

    @property
    def sandbox(self) -> EnvironmentSandbox:
        """The sandbox, for what must not run in this process, such as code of the model."""
        return EnvironmentSandbox(self._host.pool, self._record_failure)

    def other(self, name: str, *, is_trained: bool = True, player: Player | None = None) -> Agent:
        """Return another agent, such as an opponent or a checker.

        The same name gives the same agent: pass the same arguments each time. Its
        conversations are recorded under its name, and get the rollout's reward unless its `reward`
        is set. Rewards are compared within the group, for each name by itself.

        Args:
            is_trained: whether to train on its tokens.
            player: plays it instead of the model: an `Endpoint`, such as a stronger model; an
                `agentloop.Runtime`, such as that of an older checkpoint; or a function of the
                messages so far, as in `agentloop.play`. It is never trained on. Its budget is that
                of `agent`, except that an endpoint and a function have no budget of tokens:
                `max_tokens` limits each of an endpoint's messages.

        Raises:
            TypeError: `player` is none of these.
            ValueError: the name is not an identifier, or this is another agent itself.
            RequestError: the arguments differ from those that the agent was made with.
        """
        if self._main is not None:
            raise ValueError(f"{self.id} is another agent itself: ask the rollout's own agent")
        if not name.isidentifier():
            raise ValueError(f"{name!r} is not a name such as checker or player_2")
        if name == "api":
            raise ValueError("'api' is the name of the conversations at `agent.url`")
        self._refuse_if_closed()
        if name not in self._others:
            self._others[name] = Agent(
                self._host if player is None else self._host_of(player),
                self._emit,
                id=f"{self.id}+{name}",
                sampling=self._sampling.of_group(name),
                budget=self._budget,
                is_trained=is_trained and player is None,
                with_text=self._with_text,
                main=self,
                grade=self._grade,
            )
        arguments = is_trained, player
        if self._other_arguments.setdefault(name, arguments) != arguments:
            raise RequestError(
                f"agent.other({name!r}): is_trained={is_trained}, player={player} are not what it "
                "was made with: pass the same arguments each time"
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
            InfrastructureFailed: the infrastructure failed.
            RequestError: a message, a tool or a limit is invalid.
        """
        if self._is_closed:
            await anyio.sleep(_REFUSAL_S)
            self._refuse_if_closed()
        conversation = conversation_of(messages, system)
        if isinstance(tools, str) or not isinstance(tools, Sequence):
            raise RequestError(f"tools: expected a list of functions or names, got {tools!r:.50}")
        budget = self._limited_budget(max_turns, max_tokens)
        if budget.timeout_s <= 0:
            raise _TooSlow("its environment has left no time for this conversation")
        number = self._free_number()
        group, prompt_ids = "", None
        if self._siblings is not None and number == 0:
            group = self._siblings.group_of(conversation, tools)
            prompt_ids = self._siblings.prompt_ids
        clock = ReplyClock(reply) if reply is not None else None

        id = f"{self.id}+{number}" if number else self.id
        journals = self._journals
        journal = journals.journal(id, self._elapsed_s) if journals is not None else None

        def observe(event: Event) -> None:
            if isinstance(event, RolloutStarted):
                self._trajectories[number] = event.record
                context = context_key([{"name": name} for name in names_of(tools)], {})
                opening = opening_key(context, conversation, is_continued=False)
                self._openings[event.record.id] = opening
            self._emit(event)

        begun_s = anyio.current_time()
        try:
            with anyio.CancelScope() as scope:
                self._running[number] = scope
                trajectory = await self._host.rollout(
                    conversation,
                    tools=list(tools),
                    sampling=self._sampling.of_group(str(number)) if number else self._sampling,
                    budget=budget,
                    reply=clock,
                    group=group,
                    prompt_ids=prompt_ids,
                    id=id,
                    on_event=observe,
                    with_text=self._with_text,
                    journal=journal,
                )
        except ServerError as error:
            raise self._record_failure(str(error)) from error
        except BaseException as error:  # the environment's, or it has been stopped
            self._record_stop(number)
            self._stops.add(error, self._trajectories.get(number))
            raise
        finally:
            self._running.pop(number, None)
            (self._main or self)._conversing_s += anyio.current_time() - begun_s
        if scope.cancel_called:  # by `close`
            self._record_stop(number)
            self._refuse_if_closed()
        self._trajectories[number] = trajectory
        if trajectory.stop_reason in (StopReason.INFRASTRUCTURE, StopReason.CANCELLED):
            raise self._record_failure(trajectory.error or str(trajectory.stop_reason))
        if trajectory.stop_reason is StopReason.TIME_BUDGET and not trajectory.used_its_time:
            self._explain_lateness(trajectory, clock)
        return trajectory

    def _explain_lateness(self, trajectory: Trajectory, clock: ReplyClock | None) -> None:
        """Raise what a conversation ran out of time for: its environment, or the infrastructure."""
        main = self._main or self
        reason = ""
        if clock is not None and clock.elapsed_s >= trajectory.elapsed_s / 2:
            reason = f"its replies took {clock.elapsed_s:.3g} s, most of the time"
        elif self._elapsed_s() - main._conversing_s > self._budget.timeout_s / 2:
            reason = "its environment spent most of the time outside of conversations"
        if reason:
            trajectory.stop_reason = StopReason.ENVIRONMENT
            raise _TooSlow(reason)
        raise self._record_failure("it ran out of time, mostly waiting for servers and sandbox")

    def _elapsed_s(self) -> float:
        return self._budget.timeout_s - self.time_left_s

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise RequestError(f"{self.id} has ended: its environment has returned")

    def _free_number(self) -> int:
        """Return the first number of no conversation; one that was refused has none."""
        return next(
            number
            for number in itertools.count()
            if number not in self._trajectories and number not in self._running
        )

    def _record_stop(self, number: int) -> None:
        """Record that the environment, or the end of the rollout, has stopped a conversation."""
        if (cut := self._trajectories.get(number)) is not None:
            cut.stop_reason = self._stop_reason

    async def chat(
        self,
        messages: str | Sequence[Message],
        *,
        system: str | None = None,
        max_tokens: int | None = None,
    ) -> str:
        """Return one message of the model, which has no tools.

        Raises:
            InfrastructureFailed: the infrastructure failed.
            RequestError: a message is invalid.
        """
        trajectory = await self.run(messages, system=system, max_turns=1, max_tokens=max_tokens)
        return trajectory.answer

    @asynccontextmanager
    async def conversation(self, **options: object) -> AsyncIterator[Conversation]:
        """Open a conversation, message by message. Takes the options of `run`, except `reply`.

        async with agent.conversation(system="Play chess.") as talk:
            while not (game.is_over or talk.has_ended):
                game.play(await talk.ask(game.position))
        """
        async with Conversation.open(self.run, options) as conversation:
            try:
                yield conversation
            except BaseException as error:  # it stops the conversation
                self._stops.add(error)
                raise

    async def grade(self, trajectory: Trajectory) -> Reward:
        """Return the reward of a conversation as an answer to the task, by the setting `reward`.

        Checking an answer takes the environment's time. To give this reward and no other, return
        the conversation from the environment: it is then checked afterwards.

        Raises:
            RewardError: the user's reward function failed; this ends the run.
            RuntimeError: there is nothing to grade with.
        """
        if self._grade is None:
            raise RuntimeError("grade: this agent has been created without a grader")
        return await self._grade(trajectory)

    def _host_of(self, player: Player) -> Host:
        if not isinstance(player, Endpoint | OtherModel) and not callable(player):
            raise TypeError(f"player: expected an endpoint, a runtime or a function: {player!r}")
        return PlayerHost(player, self._host.pool, self._host.resolve_tools)

    def _record_failure(self, reason: str) -> InfrastructureFailed:
        """Record a failure of the infrastructure, and return it as an error."""
        main = self._main or self
        main._failure = main._failure or reason
        return InfrastructureFailed(reason)

    def _limited_budget(self, max_turns: int | None, max_tokens: int | None) -> Budget:
        """Return the budget, lowered to these limits and to the time that is left.

        Raises:
            RequestError: a limit is no whole number, or below 1.
        """
        for name, limit in (("max_turns", max_turns), ("max_tokens", max_tokens)):
            if limit is not None and (not isinstance(limit, int) or limit < 1):
                raise RequestError(f"{name}: expected a number of at least 1, got {limit!r:.50}")
        limits = {
            "max_turns": max_turns,
            "max_response_tokens": max_tokens,
            "max_turn_tokens": max_tokens,  # of a player, which the former does not apply to
        }
        update: dict[str, object] = {
            name: min(getattr(self._budget, name) or limit, limit)
            for name, limit in limits.items()
            if limit is not None
        }
        update["timeout_s"] = self.time_left_s
        return self._budget.model_copy(update=update)


def conversation_of(messages: str | Sequence[Message], system: str | None = None) -> list[Message]:
    """Return the messages of a question or a conversation, after those of the system."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    elif not isinstance(messages, Sequence):
        raise RequestError(f"messages: expected text or a list of messages, got {messages!r:.50}")
    return [*messages] if system is None else [{"role": "system", "content": system}, *messages]
