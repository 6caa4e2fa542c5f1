"""Play rollouts in an environment; the built-in agent, which answers the prompt, is one.

Failures are attributed where they happen:

    the infrastructure   a conversation was lost to it: no reward
    the environment      it raised, returned nonsense or ran out of time: no reward
    the agent            an exception that the environment declares as its doing (`agent_errors`):
                         the declared reward; all else is what the environment returns

Whatever ends a rollout, it ends in one place, where all numbers that its environment has handed
over are checked (`_record`).

A rollout's time begins when its group is admitted. Nothing that happens after the environment has
returned or run out of time counts: conversations that still run are stopped.

If the environment fails for each rollout of a group, the task is refused, and a run of refused
tasks ends the run.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NotRequired, Protocol, TypedDict, Unpack

import anyio

from agentloop.agent.tools import Tool
from agentloop.aio import Slot
from agentloop.environments.agent import Agent, Host, conversation_of
from agentloop.environments.environment import (
    Environment,
    EnvSettings,
    load,
    reward_of,
    with_checked_rewards,
)
from agentloop.environments.mixture import RunEnvironment
from agentloop.environments.player import PlayerHost
from agentloop.environments.rewards.reward import Grader, Reward, finite_number
from agentloop.environments.siblings import Siblings
from agentloop.environments.tasks.sources import Task
from agentloop.errors import (
    EnvironmentFailed,
    InfrastructureFailed,
    RewardError,
    ServerError,
    leaves,
    message_of,
    place_of,
    sole,
    summary_of,
)
from agentloop.events import Emit, Event, RolloutFinished, RolloutStarted, ignore
from agentloop.inference.scheduling.group_gate import AdmittedGroup
from agentloop.inference.sglang.sampling import Sampling
from agentloop.rollouts.record import AgentRecord, NoReward, RolloutRecord
from agentloop.rollouts.request import GroupRequest, Purpose
from agentloop.rollouts.runner import Player, Sibling
from agentloop.trajectory import Message, StopReason, Trajectory

log = logging.getLogger(__name__)

_ENVIRONMENT = StopReason.ENVIRONMENT
_INFRASTRUCTURE = StopReason.INFRASTRUCTURE

# The environment has more time than its conversations, for its own code: a slow server must not
# make the environment late.
_TIME_FACTOR = 1.1
# An environment that has not ended this long after its time is left behind in what it waits for.
_GRACE_S = 5.0


OnEnd = Callable[[str, bool], None]
"""Called with a rollout's name when it ends, and with whether it ended normally."""


class Gate(Protocol):
    """Keeps groups waiting until they may start; implemented by `Router`."""

    def group(
        self, name: str, size: int, num_prompt: int, *, is_single: bool
    ) -> AbstractAsyncContextManager[AdmittedGroup]: ...


class Runner(Host, Protocol):
    """Runs conversations; implemented by `agentloop.runtime.Runtime`."""

    @property
    def router(self) -> Gate: ...

    @property
    def own_tools(self) -> list[Tool]: ...

    async def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]: ...


class PlayerOptions(TypedDict):
    """The options of an `EnvironmentPlayer`."""

    sampling: Sampling
    emit: NotRequired[Emit]
    grader: NotRequired[Grader | None]
    with_text: NotRequired[bool]
    has_names: NotRequired[bool]


def environment_player(
    settings: EnvSettings, runner: Runner, **options: Unpack[PlayerOptions]
) -> EnvironmentPlayer | AgentPlayer:
    """Return what plays the environment of the settings, or else the agent on each prompt.

    Takes the options of `EnvironmentPlayer`.

    Raises:
        SettingsError: there is no such environment, or an argument of it is invalid.
    """
    environment = load(settings)
    if environment is None:
        return AgentPlayer(runner, runner.own_tools, **options)
    return EnvironmentPlayer(environment, runner, gate=runner.router, **options)


def player_of(
    environments: Sequence[RunEnvironment], runner: Runner, **options: Unpack[PlayerOptions]
) -> Player:
    """Return what plays each task in its environment, with that environment's budget.

    Takes the options of `environment_player`, and raises the same.
    """
    players = {
        environment.name: environment_player(environment.env, runner, **options)
        for environment in environments
    }
    return players[""] if "" in players else _MixedPlayer(environments, players)


def endpoint_player_of(
    environments: Sequence[RunEnvironment],
    host: PlayerHost,
    *,
    max_groups: int,
    **options: Unpack[PlayerOptions],
) -> Player:
    """Return the same, with an endpoint in place of the model.

    Takes the options of `EnvironmentPlayer`.

    Args:
        max_groups: maximum number of groups in flight.

    Raises:
        SettingsError: an environment cannot be loaded.
    """
    gate = _SlotGate(max_groups)
    players: dict[str, Player] = {}
    for run_environment in environments:
        environment = run_environment.load()
        assert environment is not None, "an endpoint has no tools of its own"
        players[run_environment.name] = EnvironmentPlayer(environment, host, gate=gate, **options)
    return players[""] if "" in players else _MixedPlayer(environments, players)


class _SlotGate:
    """Admits a number of groups at a time, where there are no servers of ours (`Gate`)."""

    def __init__(self, num_slots: float) -> None:
        self._slots = anyio.CapacityLimiter(num_slots)

    @asynccontextmanager
    async def group(
        self, name: str, size: int, num_prompt: int, *, is_single: bool
    ) -> AsyncIterator[AdmittedGroup]:
        async with Slot(self._slots):  # no deadline: groups in flight have theirs
            yield AdmittedGroup(name, ())


class _MixedPlayer:
    """Plays each task in its environment (`Player`)."""

    def __init__(
        self, environments: Sequence[RunEnvironment], players: Mapping[str, Player]
    ) -> None:
        self._environments = {environment.name: environment for environment in environments}
        self._players = players

    def group(self, request: GroupRequest) -> AbstractAsyncContextManager[Sequence[Sibling]]:
        """Implement `Player`."""
        name = request.task.env
        budget = self._environments[name].budget_of(request.budget)
        return self._players[name].group(replace(request, budget=budget))


class EnvironmentPlayer:
    """Plays rollouts in an environment (`Player`)."""

    def __init__(
        self,
        environment: Environment,
        host: Host,
        *,
        sampling: Sampling,
        emit: Emit = ignore,
        grader: Grader | None = None,
        gate: Gate | None = None,
        with_text: bool = False,
        has_names: bool = True,
    ) -> None:
        """
        Args:
            sampling: parameters; with a seed, each rollout has its own.
            emit: called with the events of all conversations.
            grader: checks answers for `agent.grade`; None: the environment must do so itself.
            gate: where a group waits until it may start; None: it starts at once.
            with_text: see `Agent`.
            has_names: whether seeds are derived from the name of the group, too.
        """
        self._environment = environment
        self._host = host
        self._sampling = sampling
        self._emit = emit
        self._with_text = with_text
        self._grader = grader
        self._gate = gate or _SlotGate(math.inf)
        self._has_names = has_names

    @asynccontextmanager
    async def group(self, request: GroupRequest) -> AsyncIterator[list[EnvironmentSibling]]:
        """Implement `Player`."""
        prompt_ids = await self._prompt_ids(request.task)
        request.queued.set()
        num_prompt, is_single = len(prompt_ids or ()), prompt_ids is not None
        async with self._gate.group(
            request.name, request.size, num_prompt, is_single=is_single
        ) as admitted:
            siblings = await self._siblings(request, prompt_ids, admitted.end)
            yield siblings
        failures = [sibling.failure for sibling in siblings if sibling.failure is not None]
        if len(failures) == request.size:
            raise EnvironmentFailed(f"environment {self._environment.name}: {failures[0]}")

    async def _prompt_ids(self, task: Task) -> list[int] | None:
        """Return the prompt with which each rollout begins and ends, if it is known beforehand."""
        return None

    async def _siblings(
        self, request: GroupRequest, prompt_ids: list[int] | None, on_end: OnEnd
    ) -> list[EnvironmentSibling]:
        task, name, budget = request.task, request.name, request.budget
        if prompt_ids is None:  # an environment may have clients, the built-in agent has none
            await self._host.listen_for_sessions()
        sampling = self._sampling.of_group(name) if self._has_names else self._sampling
        if request.purpose is Purpose.TRAIN:
            sampling = sampling.for_training()
        siblings = Siblings(name, prompt_ids)
        opened, is_kept = request.open_group, self._environment.replayable
        counts: dict[str, int] = {}

        def emit_labelled(event: Event) -> None:
            # A conversation that shares no prompt with its siblings is one of the group, too.
            if isinstance(event, RolloutStarted):
                event = replace(event, group=name)
            elif isinstance(event, RolloutFinished) and event.num_tokens is not None:
                counts[event.rollout_id] = event.num_tokens
            self._emit(event)

        return [
            EnvironmentSibling(
                self._environment,
                task,
                Agent(
                    self._host,
                    emit_labelled,
                    id=f"{name}.{index}",
                    sampling=sampling.of_sibling(index),
                    budget=budget,
                    with_text=self._with_text,
                    grade=partial(self._grader.score, task=task) if self._grader else None,
                    siblings=siblings,
                    journals=opened.rollout(f"{name}.{index}") if is_kept else None,
                ),
                budget.timeout_s,
                on_end,
                counts,
                opened.ended(f"{name}.{index}"),
            )
            for index in range(request.size)
        ]


class AgentPlayer(EnvironmentPlayer):
    """Lets the built-in agent answer each task's prompt (`Player`): an environment of one line."""

    def __init__(
        self, runner: Runner, tools: Sequence[Tool], **options: Unpack[PlayerOptions]
    ) -> None:
        """Takes the options of `EnvironmentPlayer`, besides the tools of the agent."""

        async def agent(task: Task, agent: Agent) -> Trajectory:
            return await agent.run(task.prompt, tools=tools)

        replayable = all(getattr(tool, "may_repeat", False) for tool in tools)
        super().__init__(
            _BuiltIn(agent, replayable=replayable), runner, gate=runner.router, **options
        )
        self._runner = runner
        self._tools = tools

    async def _prompt_ids(self, task: Task) -> list[int]:
        return await self._runner.prompt_ids(conversation_of(task.prompt), self._tools)


class _BuiltIn(Environment):
    """The built-in agent as an environment: what fails in it is not the work of a user."""


@dataclass(slots=True)
class EnvironmentSibling:
    """A rollout in an environment (`Sibling`).

    Attributes:
        counts: sampled tokens of conversations, where an endpoint has counted them.
        ended: its record, if it was played and scored before a kill.
        failure: error of the environment, once it has failed.
    """

    environment: Environment
    task: Task
    agent: Agent
    timeout_s: float
    on_end: OnEnd
    counts: Mapping[str, int]
    ended: RolloutRecord | None = None
    failure: str | None = None

    async def play(self) -> RolloutRecord:
        """Implement `Sibling`."""
        if self.ended is not None:
            self.on_end(self.agent.id, True)
            if self.ended.no_reward is NoReward.ENVIRONMENT and self.ended.reward is not None:
                self.failure = self.ended.reward.reason
            return self.ended
        end, record = await self._run()
        self.on_end(self.agent.id, end.cut is None)
        if end.cut is _ENVIRONMENT and end.reward is not None:
            self.failure = end.reward.reason
        counted = [self.counts.get(trajectory.id) for trajectory in record.trajectories]
        record.num_tokens = None if None in counted else sum(filter(None, counted))
        return record

    def cut_off(self) -> RolloutRecord:
        """Implement `Sibling`."""
        if self.ended is not None:
            return self.ended
        _, record = _record(self.agent, _STRAGGLER)
        return record

    async def _run(self) -> tuple[_End, RolloutRecord]:
        """Run the environment; return how the rollout ended, and its record at that moment.

        It runs in a task of its own: it can then be left behind, whatever it does with its
        cancellation, and what it does wrong with cancel scopes stays its own.

        Raises:
            RewardError: the user's reward function failed.
        """
        agent, is_late = self.agent, False

        def end_of(value: object, error: BaseException | None) -> tuple[_End, RolloutRecord]:
            if agent.failure is not None:
                end = _End.without_reward(agent.failure, _INFRASTRUCTURE)
            elif any(
                trajectory.stop_reason is StopReason.CANCELLED for trajectory in agent.trajectories
            ):
                end = _End.without_reward("it was cancelled", StopReason.CANCELLED)
            elif is_late:
                reason = f"the environment ran out of time ({self.timeout_s:g} s)"
                end = _End.without_reward(reason, _ENVIRONMENT)
            elif error is None:
                end = self._end_of_value(value)
            else:
                try:
                    end = self._end_of_error(error)
                except Exception:  # it ends the run
                    agent.close(_ENVIRONMENT)
                    raise
            agent.close(end.cut, error)
            return _record(agent, end)

        async def run() -> tuple[_End, RolloutRecord]:
            try:
                value = await self.environment(self.task, agent)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # whatever it is: the environment is the user's code
                return end_of(None, error)
            return end_of(value, None)  # in the same step: what happens later does not count

        # Not in a task group: that would wait for an environment that ignores its cancellation.
        running = asyncio.ensure_future(run())
        stop_reason = StopReason.STRAGGLER  # if this is cancelled
        try:
            elapsed_s = self.timeout_s - agent.time_left_s  # before a kill
            await asyncio.wait([running], timeout=_TIME_FACTOR * self.timeout_s - elapsed_s)
            stop_reason = _ENVIRONMENT
        finally:
            is_late = not running.done()
            if is_late:
                agent.close(stop_reason)
                running.cancel()
                with anyio.move_on_after(_GRACE_S, shield=True):
                    await asyncio.wait([running])
        if running.done() and not running.cancelled():
            return running.result()
        return end_of(None, None)

    def _end_of_value(self, value: object) -> _End:
        """Return the end of a rollout of which the environment has returned a value."""
        if isinstance(value, Trajectory):
            return _End(None, to_grade=value)
        try:
            return _End(reward_of(value, self.environment.weights))
        except Exception as error:  # a value may be anything
            return _End.of_bad_value(error)

    def _end_of_error(self, error: BaseException) -> _End:
        """Return the end of a rollout in which the environment raised an error.

        Raises:
            RewardError: the user's reward function failed.
            RequestError: the task is no valid request of the built-in agent.
        """
        for leaf in leaves(error):
            if isinstance(leaf, RewardError):  # a function of the settings
                raise leaf from None
            if isinstance(leaf, InfrastructureFailed | ServerError):
                reason = message_of(leaf) or type(leaf).__name__
                return _End.without_reward(reason, _INFRASTRUCTURE)
        cause = sole(error)
        if isinstance(self.environment, _BuiltIn):
            raise cause
        description = summary_of(cause)
        description += f" ({place})" if (place := place_of(cause)) else ""
        reward = self.environment.reward_of_error(error)
        if reward is not None:
            return _End(
                Reward(reward, None, f"the agent caused {description}"), StopReason.ANSWERED
            )
        log.warning("%s failed on task %s", self.environment.name, self.task.id, exc_info=error)
        return _End.without_reward(f"the environment raised {description}", _ENVIRONMENT)


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a rollout.

    Attributes:
        cut: how conversations that were cut off by it ended; None: the environment ended them.
        to_grade: the conversation whose answer is to be checked, for the reward.
    """

    reward: Reward | None
    cut: StopReason | None = None
    to_grade: Trajectory | None = None

    @classmethod
    def without_reward(cls, reason: str, cut: StopReason) -> _End:
        """Return the end of a rollout without a reward."""
        return cls(Reward(None, None, f"{_PREFIXES.get(cut, '')}{reason}"), cut)

    @classmethod
    def of_bad_value(cls, error: Exception) -> _End:
        """Return the end of a rollout of which the environment has handed over a bad value."""
        return cls.without_reward(
            f"the environment gave a bad value: {message_of(error)}", _ENVIRONMENT
        )

    @property
    def may_have_reward(self) -> bool:
        """True if the rollout ended by what its agent did."""
        return self.cut in (None, StopReason.ANSWERED)


_NO_REWARD = {
    _INFRASTRUCTURE: NoReward.INFRASTRUCTURE,
    _ENVIRONMENT: NoReward.ENVIRONMENT,
    StopReason.STRAGGLER: NoReward.STOPPED,
    StopReason.CANCELLED: NoReward.CANCELLED,
}
_PREFIXES = {_INFRASTRUCTURE: "infrastructure: "}
_STRAGGLER = _End.without_reward(
    "stopped: enough rollouts of its group had ended", StopReason.STRAGGLER
)


def _record(agent: Agent, end: _End) -> tuple[_End, RolloutRecord]:
    """Return how a rollout ended, and its record as it is now.

    If the environment has given a turn, a token or another agent what is no finite number, it has
    failed, however it ended; none of these rewards is kept.
    """
    try:
        records = _agent_records(agent)
    except Exception as error:  # a value may be anything
        end = _End.of_bad_value(error) if end.may_have_reward else end
        records = _agent_records(agent, with_rewards=False)
    own_record = records.pop("")
    no_reward = None if end.cut is None else _NO_REWARD.get(end.cut)
    record = RolloutRecord(
        agent.id,
        own_record.trajectories,
        end.reward,
        records,
        no_reward,
        end.to_grade,
        recorded=agent.recorded,
        is_trained=own_record.is_trained,
        openings=own_record.openings,
    )
    if not record.all_trajectories:  # a record, so that the reason is not lost
        reason = end.reward.reason if end.reward is not None and end.cut is not None else None
        empty = Trajectory(agent.id, [], [], end.cut or _ENVIRONMENT, reason)
        empty.created_unix_s = time.time()
        record.trajectories = [empty]
        if record.may_count:
            record.reward = Reward(None, None, "its agent did not run: nothing was sampled")
            record.no_reward = NoReward.NOT_SAMPLED
    reward = record.reward
    if reward is not None and reward.value is not None and reward.answer is None:
        record.reward = replace(reward, answer=record.answer)
    return end, record


def _agent_records(agent: Agent, *, with_rewards: bool = True) -> dict[str, AgentRecord]:
    """Return the records of all agents of a rollout by their names; its own has the name "".

    Raises:
        ValueError: a reward that the environment has given to one is not a finite number.
    """
    agents = {"": agent, **agent.others}
    return {name: _agent_record(each, with_rewards) for name, each in agents.items()}


def _agent_record(agent: Agent, with_rewards: bool) -> AgentRecord:
    """Return the record of an agent, with turns that nobody else changes."""
    copy = with_checked_rewards if with_rewards else _without_rewards
    reward = agent.reward if with_rewards else None
    if reward is not None:
        reward = finite_number(reward, f"reward of {agent.id}")
    trajectories = [copy(trajectory) for trajectory in agent.trajectories]
    return AgentRecord(trajectories, reward, bool(agent.is_trained), agent.openings)


def _without_rewards(trajectory: Trajectory) -> Trajectory:
    turns = [replace(turn, reward=None, token_rewards=[]) for turn in trajectory]
    return replace(trajectory, turns=turns)
