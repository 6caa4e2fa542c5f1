"""Run groups of rollouts: of an environment, or of the built-in agent on a task's prompt.

Failures are attributed where they happen:

    the infrastructure   a conversation was lost to it: no reward
    the environment      it raised, returned nonsense or ran out of time: no reward
    the agent            all else is what the model did: the environment returns its worth

If the environment fails for each rollout of a group, the task is refused, and a run of refused
tasks ends the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import anyio

from agentloop.agent.rollout import Budget
from agentloop.environments.agent import Agent, AgentFailed, RunOne
from agentloop.environments.environment import (
    Environment,
    EnvSettings,
    check_turn_rewards,
    load,
    reward_of,
)
from agentloop.environments.rewards.reward import Reward
from agentloop.environments.tasks.sources import Task
from agentloop.errors import RequestError
from agentloop.events import Emit, Event, RolloutStarted
from agentloop.inference.sglang.sampling import Sampling
from agentloop.trajectory import Trajectory

__all__ = ["EnvironmentGroups", "Episode", "PromptGroups", "RunGroup", "group_runner"]

log = logging.getLogger(__name__)


class Runner(Protocol):
    """Runs conversations; implemented by `agentloop.runtime.Runtime`."""

    @property
    def rollout(self) -> Callable[..., Awaitable[Trajectory]]: ...

    @property
    def run_group(self) -> Callable[..., Awaitable[Sequence[Trajectory]]]: ...


def group_runner(settings: EnvSettings, runner: Runner, sampling: Sampling, emit: Emit) -> RunGroup:
    """Return what runs groups: the environment of the settings, or the agent on each prompt.

    Raises:
        SettingsError: there is no such environment, or an argument of it is invalid.
    """
    environment = load(settings)
    if environment is None:
        return PromptGroups(partial(runner.run_group, on_event=emit, with_text=False))

    def conversation(group: str) -> RunOne:
        def labelled(event: Event) -> None:
            # The prompts of a group may differ, so the router must not take them for siblings.
            if isinstance(event, RolloutStarted):
                event = replace(event, group=group)
            emit(event)

        return partial(runner.rollout, on_event=labelled)

    return EnvironmentGroups(environment, conversation, sampling=sampling)


@dataclass(slots=True)
class Episode:
    """The record of one rollout.

    Attributes:
        id: its name.
        trajectories: its conversations with the model, at least one; of the built-in agent one.
        reward: what its environment says that it is worth; None: its answer is to be checked.
    """

    id: str
    trajectories: Sequence[Trajectory]
    reward: Reward | None = None

    @property
    def num_sampled_tokens(self) -> int:
        return sum(one.num_sampled_tokens for one in self.trajectories)


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
        return [Episode(one.id, [one]) for one in found]


class EnvironmentGroups:
    """Runs an environment on the task (`RunGroup`)."""

    def __init__(
        self,
        environment: Environment,
        run: Callable[[str], RunOne],
        *,
        sampling: Sampling,
    ) -> None:
        """
        Args:
            run: returns what runs a conversation of the group with this name.
            sampling: parameters; with a seed, each rollout has its own.
        """
        self._environment = environment
        self._run = run
        self._sampling = sampling

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
        sampling = self._sampling.of_group(name)
        run = self._run(name)
        agents = [
            Agent(run, id=f"{name}.{index}", sampling=sampling.of_sibling(index), budget=budget)
            for index in range(size)
        ]
        rewards: dict[int, Reward] = {}
        failures: list[str] = []

        async def play(index: int) -> None:
            reward, is_own_failure = await self._played(task, agents[index], budget.timeout_s)
            rewards[index] = reward
            if is_own_failure:
                failures.append(reward.reason)
            if enough and sum(one.value is not None for one in rewards.values()) == enough:
                playing.cancel_scope.cancel()

        on_queued()
        async with anyio.create_task_group() as playing:
            for index in range(size):
                playing.start_soon(play, index)
        if len(failures) == size:
            raise RequestError(f"environment {self._environment.name}: {failures[0]}")
        straggler = Reward(None, None, "stopped: enough of its group had ended")
        found = [rewards.get(index, straggler) for index in range(size)]
        return [
            Episode(agent.id, agent.trajectories or [_empty(agent.id, reward)], reward)
            for agent, reward in zip(agents, found, strict=True)
        ]

    async def _played(self, task: Task, agent: Agent, timeout_s: float) -> tuple[Reward, bool]:
        """Run the environment; return its reward, and whether it is to blame for having none."""
        why, is_own = f"the environment ran out of time ({timeout_s:g} s)", True
        try:
            with anyio.move_on_after(timeout_s):
                reward = reward_of(await self._environment(task, agent), self._environment.weights)
                check_turn_rewards(agent.trajectories)
                if agent.failure is None:
                    return reward, False
                why, is_own = agent.failure, False
        except AgentFailed as error:
            why, is_own = str(error), False
        except Exception as error:  # whatever it is: the environment is the user's code
            log.warning("%s failed on task %s", self._environment.name, task.id, exc_info=True)
            why = f"the environment raised {type(error).__name__}: {error}"
        if not is_own:
            why = f"infrastructure: {why}"
        return Reward(None, None, why), is_own


def _empty(id: str, reward: Reward) -> Trajectory:
    """Return the record of a rollout without a conversation, so that its reason is not lost."""
    return Trajectory(id, [], created_unix_s=time.time(), error=reward.reason)
