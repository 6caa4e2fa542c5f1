"""EvaluatedSample with our own agent loop: rollouts with tools on our servers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from agentloop.evaluation.loop import EvaluatedSample
from agentloop.tasks.sources import Task
from agentloop.trajectory import Trajectory

__all__ = ["Agent"]


@dataclass(frozen=True, slots=True)
class Agent:
    """Samples tasks with the runtime; implements `agentloop.evaluation.loop.Sampler`.

    Attributes:
        run_group: `Runtime.run_group`.
        room: `Router.has_room`.
    """

    run_group: Callable[..., Awaitable[Sequence[Trajectory]]]
    room: Callable[[int], Awaitable[None]]

    async def has_room(self, size: int) -> None:
        await self.room(size)

    async def group(
        self, task: Task, *, name: str, size: int, at_gate: Callable[[], None]
    ) -> Sequence[EvaluatedSample]:
        trajectories = await self.run_group(task.prompt, size=size, name=name, at_gate=at_gate)
        return [EvaluatedSample(trajectory) for trajectory in trajectories]
