"""Sample with our own agent loop: rollouts with tools on our servers."""

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
        room: `Router.wait_for_capacity`.
    """

    run_group: Callable[..., Awaitable[Sequence[Trajectory]]]
    room: Callable[[int], Awaitable[None]]

    async def wait_for_capacity(self, size: int) -> None:
        await self.room(size)

    async def group(
        self, task: Task, *, name: str, size: int, on_queued: Callable[[], None]
    ) -> Sequence[EvaluatedSample]:
        trajectories = await self.run_group(task.prompt, size=size, name=name, on_queued=on_queued)
        return [EvaluatedSample(trajectory) for trajectory in trajectories]
