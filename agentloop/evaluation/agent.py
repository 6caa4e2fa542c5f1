"""Sample on our own servers: the built-in agent, or an environment's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from agentloop.agent.rollout import Budget
from agentloop.environments.episodes import RunGroup
from agentloop.environments.tasks.sources import Task
from agentloop.evaluation.loop import EvaluatedSample

__all__ = ["AgentSampler"]


@dataclass(frozen=True, slots=True)
class AgentSampler:
    """Samples tasks with the runtime; implements `agentloop.evaluation.loop.Sampler`.

    Attributes:
        run_group: see `agentloop.environments.episodes.group_runner`.
        budget: limits of each rollout.
        wait: `Router.wait_for_capacity`.
    """

    run_group: RunGroup
    budget: Budget
    wait: Callable[[int], Awaitable[None]]

    async def wait_for_capacity(self, size: int) -> None:
        await self.wait(size)  # no deadline: groups in flight have theirs

    async def group(
        self, task: Task, *, name: str, size: int, on_queued: Callable[[], None]
    ) -> Sequence[EvaluatedSample]:
        episodes = await self.run_group(
            task, size=size, name=name, budget=self.budget, on_queued=on_queued
        )
        return [
            EvaluatedSample(
                one.trajectories,
                reward=one.reward,
                others=[one for other in one.others.values() for one in other.trajectories],
            )
            for one in episodes
        ]
