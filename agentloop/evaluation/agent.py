"""Sample the agent: the built-in one, or an environment's, which an endpoint may play."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import anyio

from agentloop.agent.rollout import Budget
from agentloop.environments.episodes import RunGroup
from agentloop.environments.tasks.sources import Task
from agentloop.evaluation.loop import EvaluatedSample
from agentloop.events import Emit, Event, RolloutFinished

__all__ = ["AgentSampler", "EndpointAgentSampler"]


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


class EndpointAgentSampler:
    """Samples environments whose agent an endpoint plays; implements `Sampler`."""

    def __init__(
        self, run_group: Callable[[Emit], RunGroup], budget: Budget, *, max_groups: int, emit: Emit
    ) -> None:
        """
        Args:
            run_group: returns what runs groups, and passes their events on.
            max_groups: maximum number of groups in flight: there are no servers to wait for.
        """
        self._slots = anyio.CapacityLimiter(max_groups)
        self._num_tokens: dict[str, int] = {}  # of conversations that have ended, by their ids
        self._emit = emit
        self._agent = AgentSampler(run_group(self._on_event), budget, self.wait_for_capacity)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, RolloutFinished) and event.num_tokens is not None:
            self._num_tokens[event.rollout_id] = event.num_tokens
        self._emit(event)

    async def wait_for_capacity(self, size: int) -> None:
        async with self._slots:  # no deadline: groups in flight have theirs
            return

    async def group(
        self, task: Task, *, name: str, size: int, on_queued: Callable[[], None]
    ) -> Sequence[EvaluatedSample]:
        async with self._slots:  # no deadline: groups in flight have theirs
            samples = await self._agent.group(task, name=name, size=size, on_queued=on_queued)
        return [replace(one, num_tokens=self._tokens_of(one)) for one in samples]

    def _tokens_of(self, sample: EvaluatedSample) -> int | None:
        """Return the tokens that the endpoint has counted, if it does."""
        counts = {one.id: self._num_tokens.pop(one.id, None) for one in sample.all_trajectories}
        own = [count for one in sample.trajectories if (count := counts[one.id]) is not None]
        return sum(own) if own else None
