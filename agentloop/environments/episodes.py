"""Run groups of rollouts: of an environment, or of the built-in agent on a task's prompt.

Failures are attributed where they happen:

    the infrastructure   a conversation was lost to it: no reward
    the environment      it raised, returned nonsense or ran out of time: no reward
    the agent            an exception that the environment declares as its doing (`agent_errors`):
                         the declared reward; all else is what the environment returns

A rollout's time begins when its group is admitted. Nothing that happens after the environment has
returned or run out of time counts: conversations that still run are stopped.

If the environment fails for each rollout of a group, the task is refused, and a run of refused
tasks ends the run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import anyio

from agentloop.agent.rollout import Budget
from agentloop.environments.agent import Agent, Host, Siblings
from agentloop.environments.environment import (
    Environment,
    EnvSettings,
    check_turn_rewards,
    load,
    reward_of,
)
from agentloop.environments.rewards.reward import Grader, Reward, finite_number
from agentloop.environments.tasks.sources import Task
from agentloop.errors import (
    EnvironmentFailed,
    InfrastructureFailed,
    RewardError,
    ServerError,
    leaves,
    place_of,
    sole,
)
from agentloop.events import Emit, Event, RolloutStarted, ignore
from agentloop.inference.scheduling.group_gate import AdmittedGroup
from agentloop.inference.sglang.sampling import Sampling
from agentloop.trajectory import StopReason, Trajectory

__all__ = ["EnvironmentGroups", "Episode", "OtherAgent", "PromptGroups", "RunGroup", "group_runner"]

log = logging.getLogger(__name__)

_ENVIRONMENT = StopReason.ENVIRONMENT
_INFRASTRUCTURE = StopReason.INFRASTRUCTURE

# The environment has more time than its conversations, for its own code: a slow server must not
# make the environment late.
_TIME_FACTOR = 1.1
# An environment that has not ended this long after its time is left behind in what it waits for.
_GRACE_S = 5.0


class Gate(Protocol):
    """Keeps groups waiting until they may start; implemented by `Router`."""

    def group(
        self, name: str, size: int, num_prompt: int, *, is_single: bool
    ) -> AbstractAsyncContextManager[AdmittedGroup]: ...


class Runner(Host, Protocol):
    """Runs conversations; implemented by `agentloop.runtime.Runtime`."""

    @property
    def run_group(self) -> Callable[..., Awaitable[Sequence[Trajectory]]]: ...

    @property
    def router(self) -> Gate: ...


def group_runner(
    settings: EnvSettings,
    runner: Runner,
    sampling: Sampling,
    emit: Emit,
    grader: Grader,
    *,
    with_text: bool = False,
) -> RunGroup:
    """Return what runs groups: the environment of the settings, or the agent on each prompt.

    Args:
        grader: checks the answers of an environment that does not do it itself.
        with_text: decode the tokens of events as they arrive, for people to read.

    Raises:
        SettingsError: there is no such environment, or an argument of it is invalid.
    """
    environment = load(settings)
    if environment is None:
        return PromptGroups(partial(runner.run_group, on_event=emit, with_text=with_text))
    return EnvironmentGroups(
        environment,
        runner,
        sampling=sampling,
        emit=emit,
        grader=grader,
        gate=runner.router,
        with_text=with_text,
    )


@dataclass(frozen=True, slots=True)
class OtherAgent:
    """The record of another agent of a rollout.

    Attributes:
        reward: its own reward; None: it gets that of the rollout.
        is_trained: whether its tokens are trained on.
    """

    trajectories: Sequence[Trajectory]
    reward: float | None = None
    is_trained: bool = True

    @property
    def whole(self) -> list[Trajectory]:
        """The conversations that were not stopped by the environment."""
        return [one for one in self.trajectories if one.stop_reason is not _ENVIRONMENT]


@dataclass(slots=True)
class Episode:
    """The record of one rollout.

    Attributes:
        id: its name.
        trajectories: conversations of its agent with the model; of the built-in agent one.
        reward: what its environment says that it is worth; None: its answer is to be checked.
        others: the other agents of its environment, by name.
        lost_to: INFRASTRUCTURE or ENVIRONMENT, if that failed, so that there is no reward.
    """

    id: str
    trajectories: Sequence[Trajectory]
    reward: Reward | None = None
    others: Mapping[str, OtherAgent] = field(default_factory=dict)
    lost_to: StopReason | None = None

    @property
    def all_trajectories(self) -> list[Trajectory]:
        """The conversations of all agents, at least one."""
        others = (one for other in self.others.values() for one in other.trajectories)
        return [*self.trajectories, *others]

    @property
    def whole(self) -> list[Trajectory]:
        """The conversations of its agent that were not stopped by the environment."""
        return [one for one in self.trajectories if one.stop_reason is not _ENVIRONMENT]

    @property
    def trained(self) -> list[Trajectory]:
        """The conversations of all agents that may be trained on."""
        others = (other.whole for other in self.others.values() if other.is_trained)
        return [*self.whole, *(one for whole in others for one in whole)]

    @property
    def num_sampled_tokens(self) -> int:
        return sum(one.num_sampled_tokens for one in self.all_trajectories)


class RunGroup(Protocol):
    """Runs the rollouts of a group."""

    async def __call__(
        self,
        task: Task,
        *,
        size: int,
        name: str,
        budget: Budget,
        on_queued: Callable[[], None],
        enough: int = 0,
    ) -> Sequence[Episode]:
        """Run `size` rollouts of a task concurrently.

        Args:
            name: name of the group; the rollouts are `NAME.0`, `NAME.1`, ...
            on_queued: called when the group is queued for capacity.
            enough: stop the remaining rollouts when this many have ended; 0: never.

        Raises:
            RequestError: the task cannot be run.
            EnvironmentFailed: the environment failed on all rollouts.
        """
        ...


class PromptGroups:
    """Lets the built-in agent answer the task's prompt (`RunGroup`)."""

    def __init__(self, run_group: Callable[..., Awaitable[Sequence[Trajectory]]]) -> None:
        """
        Args:
            run_group: `Runtime.run_group`.
        """
        self._run_group = run_group

    async def __call__(self, task: Task, *, enough: int = 0, **options: Any) -> Sequence[Episode]:
        """Implement `RunGroup`."""
        if enough:
            options["enough"] = enough
        found = await self._run_group(task.prompt, **options)
        return [
            Episode(one.id, [one], lost_to=_INFRASTRUCTURE if _is_lost(one) else None)
            for one in found
        ]


class EnvironmentGroups:
    """Runs an environment on the task (`RunGroup`)."""

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
    ) -> None:
        """
        Args:
            sampling: parameters; with a seed, each rollout has its own.
            emit: called with the events of all conversations.
            grader: checks answers for the environment; None: it must do so itself.
            gate: where a group waits until it may start; None: it starts at once.
            with_text: as for `Agent`.
        """
        self._environment = environment
        self._host = host
        self._sampling = sampling
        self._emit = emit
        self._with_text = with_text
        self._grader = grader
        self._gate = gate

    async def __call__(
        self,
        task: Task,
        *,
        size: int,
        name: str,
        budget: Budget,
        on_queued: Callable[[], None],
        enough: int = 0,
    ) -> Sequence[Episode]:
        """Implement `RunGroup`."""
        on_queued()
        if self._gate is None:
            return await self._run(task, size, name, budget, enough)
        async with self._gate.group(name, size, 0, is_single=False) as group:
            return await self._run(task, size, name, budget, enough, group)

    async def _run(
        self,
        task: Task,
        size: int,
        name: str,
        budget: Budget,
        enough: int,
        group: AdmittedGroup | None = None,
    ) -> Sequence[Episode]:
        await self._host.listen_for_sessions()
        sampling = self._sampling.of_group(name)
        siblings = Siblings(name)
        grade = partial(self._grader.score, task=task) if self._grader else None

        def labelled(event: Event) -> None:
            # A conversation that shares no prompt with its siblings is one of the group, too.
            if isinstance(event, RolloutStarted):
                event = replace(event, group=name)
            self._emit(event)

        agents = [
            Agent(
                self._host,
                labelled,
                id=f"{name}.{index}",
                sampling=sampling.of_sibling(index),
                budget=budget,
                with_text=self._with_text,
                grade=grade,
                siblings=siblings,
            )
            for index in range(size)
        ]
        ends: dict[int, _End] = {}
        episodes: dict[int, Episode] = {}

        async def play(index: int) -> None:
            agent = agents[index]
            end, episode = await self._played(task, agent, budget.timeout_s)
            if group is not None:
                group.end(agent.id, end.cut is None)
            if end.to_grade is not None:  # not in the environment's time
                episode.reward = await agent.grade(end.to_grade)
            ends[index], episodes[index] = end, episode
            num_scored = sum(
                one.reward is not None and one.reward.value is not None for one in episodes.values()
            )
            if enough and num_scored == enough:
                playing.cancel_scope.cancel()

        async with anyio.create_task_group() as playing:
            for index in range(size):
                playing.start_soon(play, index)
        failures = [one.reward.reason for one in ends.values() if one.cut is _ENVIRONMENT]
        if len(failures) == size:
            raise EnvironmentFailed(f"environment {self._environment.name}: {failures[0]}")
        return [
            episodes.get(index) or _episode(agent, _STRAGGLER) for index, agent in enumerate(agents)
        ]

    async def _played(self, task: Task, agent: Agent, timeout_s: float) -> tuple[_End, Episode]:
        """Run the environment; return how the rollout ended, and its record at that moment.

        It runs in a task of its own: it can then be left behind, whatever it does with its
        cancellation, and what it does wrong with cancel scopes stays its own.

        Raises:
            RewardError: the user's reward function failed.
        """
        is_late = False

        def end_of(value: Any, error: BaseException | None) -> tuple[_End, Episode]:
            agent.close(None if error is None and not is_late else _ENVIRONMENT)
            if agent.failure is not None:
                end = _End.lost(agent.failure, _INFRASTRUCTURE)
            elif is_late:
                why = f"the environment ran out of time ({timeout_s:g} s)"
                end = _End.lost(why, _ENVIRONMENT)
            else:
                end = self._valued(value, agent) if error is None else self._failed(error, task)
            return end, _episode(agent, end)

        async def run() -> tuple[_End, Episode]:
            try:
                value = await self._environment(task, agent)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # whatever it is: the environment is the user's code
                return end_of(None, error)
            return end_of(value, None)  # in the same step: what happens later does not count

        running = asyncio.ensure_future(run())
        try:
            await asyncio.wait([running], timeout=_TIME_FACTOR * timeout_s)
        finally:
            is_late = not running.done()
            if is_late:
                agent.close(_ENVIRONMENT)
                running.cancel()
                with anyio.move_on_after(_GRACE_S, shield=True):
                    await asyncio.wait([running])
        if running.done() and not running.cancelled():
            return running.result()
        return end_of(None, None)

    def _valued(self, value: Any, agent: Agent) -> _End:
        """Return the end of a rollout of which the environment has returned a value."""
        try:
            for one in (agent, *agent.others.values()):
                check_turn_rewards(one.trajectories)
                if one.reward is not None:
                    one.reward = finite_number(one.reward, f"reward of {one.id}")
            if isinstance(value, Trajectory):
                return _End(_UNGRADED, to_grade=value)
            return _End(reward_of(value, self._environment.weights))
        except Exception as error:  # a value may be anything
            return _End.lost(f"the environment gave a bad value: {error}", _ENVIRONMENT)

    def _failed(self, error: BaseException, task: Task) -> _End:
        """Return the end of a rollout in which the environment raised an error.

        Raises:
            RewardError: the user's reward function failed.
        """
        for leaf in leaves(error):
            if isinstance(leaf, RewardError):  # a function of the settings
                raise leaf from None
            if isinstance(leaf, InfrastructureFailed | ServerError):
                return _End.lost(str(leaf), _INFRASTRUCTURE)
        cause = sole(error)
        what = f"{type(cause).__name__}: {cause}".removesuffix(": ")
        what += f" ({place})" if (place := place_of(cause)) else ""
        reward = self._environment.reward_of_error(error)
        if reward is not None:
            return _End(Reward(reward, None, f"the agent caused {what}"), StopReason.ANSWERED)
        log.warning("%s failed on task %s", self._environment.name, task.id, exc_info=error)
        return _End.lost(f"the environment raised {what}", _ENVIRONMENT)


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a rollout.

    Attributes:
        cut: how conversations that were cut off by it ended; None: the environment ended them.
        to_grade: the conversation whose answer is to be checked, for the reward.
    """

    reward: Reward
    cut: StopReason | None = None
    to_grade: Trajectory | None = None

    @classmethod
    def lost(cls, why: str, cut: StopReason) -> _End:
        """Return the end of a rollout without a reward."""
        return cls(Reward(None, None, f"{_PREFIXES.get(cut, '')}{why}"), cut)


_UNGRADED = Reward(None, None, "not graded yet")
_PREFIXES = {_INFRASTRUCTURE: "infrastructure: "}
_STRAGGLER = _End.lost("stopped: enough rollouts of its group had ended", StopReason.STRAGGLER)


def _is_lost(trajectory: Trajectory) -> bool:
    """Return whether a rollout of the built-in agent was lost to the infrastructure."""
    if trajectory.stop_reason is StopReason.TIME_BUDGET:
        return not trajectory.used_its_time
    return trajectory.stop_reason is _INFRASTRUCTURE


def _episode(agent: Agent, end: _End) -> Episode:
    """Return the record of a rollout as it is now."""
    others = {
        name: OtherAgent(_copies(one), one.reward, one.is_trained)
        for name, one in agent.others.items()
    }
    lost_to = end.cut if end.cut in (_ENVIRONMENT, _INFRASTRUCTURE) else None
    episode = Episode(agent.id, _copies(agent), end.reward, others, lost_to)
    if not episode.all_trajectories:  # a record, so that the reason is not lost
        why = end.reward.reason if end.cut is not None else None
        empty = Trajectory(agent.id, [], [], end.cut or _ENVIRONMENT, why)
        empty.created_unix_s = time.time()
        episode.trajectories = [empty]
        if end.reward.value is not None:
            episode.reward = Reward(None, None, "its agent did not run: nothing was sampled")
    if end.cut is not None:
        for one in episode.all_trajectories:
            if one.stop_reason is _ENVIRONMENT:  # cut off by what ended the rollout
                one.stop_reason = end.cut
    return episode


def _copies(agent: Agent) -> list[Trajectory]:
    """Return an agent's conversations with turns that nobody else changes."""
    return [
        replace(one, turns=[replace(turn, token_rewards=[*turn.token_rewards]) for turn in one])
        for one in agent.trajectories
    ]
