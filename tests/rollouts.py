"""Players of made-up rollouts, and groups of a player without their rewards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agentloop.agent.rollout import Budget
from agentloop.environments.rewards.reward import Reward
from agentloop.environments.tasks.sources import Task
from agentloop.rollouts.record import NoReward, RolloutRecord
from agentloop.rollouts.request import GroupRequest
from agentloop.rollouts.runner import Player, play_siblings
from agentloop.trajectory import StopReason, Trajectory


async def records_of(
    player: Player,
    task: Task,
    *,
    size: int = 1,
    name: str = "1-t",
    budget: Budget | None = None,
    enough: int = 0,
) -> list[RolloutRecord]:
    """Play a group, and return its records before they are scored."""
    async with player.group(GroupRequest(task, name, size, budget or Budget())) as siblings:
        return await play_siblings(siblings, enough=enough)


@dataclass
class Finished:
    """A rollout that has ended already (`Sibling`)."""

    record: RolloutRecord

    async def play(self) -> RolloutRecord:
        return self.record

    def cut_off(self) -> RolloutRecord:
        return self.record


@dataclass
class GroupPlayer:
    """Plays the rollouts that a function makes (`Player`).

    Attributes:
        run_group: makes the trajectories of a group, with the arguments `size`, `name` and `budget`
            besides the prompt; or their records.
    """

    run_group: Callable[..., Awaitable[Sequence[Trajectory | RolloutRecord]]]

    @asynccontextmanager
    async def group(self, request: GroupRequest) -> AsyncIterator[list[Finished]]:
        request.queued.set()
        made = await self.run_group(
            request.task.prompt, size=request.size, name=request.name, budget=request.budget
        )
        yield [
            Finished(record_of(result) if isinstance(result, Trajectory) else result)
            for result in made
        ]


def record_of(trajectory: Trajectory) -> RolloutRecord:
    """Return the record of a rollout whose answer is to be checked."""
    is_lost = trajectory.stop_reason is StopReason.INFRASTRUCTURE
    no_reward = NoReward.INFRASTRUCTURE if is_lost else None
    return RolloutRecord(trajectory.id, [trajectory], no_reward=no_reward, to_grade=trajectory)


def reward_in(record: RolloutRecord) -> Reward:
    """Return the reward of a record, which must have one."""
    assert record.reward is not None
    return record.reward
