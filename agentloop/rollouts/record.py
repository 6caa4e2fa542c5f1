"""The record of a group of rollouts: of the built-in agent, of an environment, of an endpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any

from agentloop.environments.rewards.reward import Reward
from agentloop.environments.tasks.sources import Task
from agentloop.trajectory import StopReason, Trajectory

__all__ = ["AgentRecord", "NoReward", "RolloutGroup", "RolloutRecord"]


class NoReward(StrEnum):
    """The reason why a rollout has no reward."""

    INFRASTRUCTURE = "infrastructure"  # it failed
    ENVIRONMENT = "environment"  # it failed, or ran out of time
    STOPPED = "stopped"  # enough of its siblings had ended
    CANCELLED = "cancelled"  # by a person
    NOT_SAMPLED = "not_sampled"  # the model said nothing
    OTHER_WEIGHTS = "other_weights"  # than those that the group is of
    TEACHER = "teacher"  # it refuses the rollout
    NOT_GIVEN = "not_given"  # neither by the environment nor by the check of the answer


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """The record of another agent of a rollout.

    Attributes:
        reward: reward of this agent; None: it gets that of the rollout.
        is_trained: whether its tokens are trained on.
    """

    trajectories: Sequence[Trajectory]
    reward: float | None = None
    is_trained: bool = True

    @property
    def whole(self) -> list[Trajectory]:
        """The conversations that were not stopped by the environment."""
        return _uninterrupted(self.trajectories)


@dataclass(slots=True)
class RolloutRecord:
    """The record of one rollout.

    Attributes:
        id: name of the rollout.
        trajectories: conversations of its agent with the model; of the built-in agent one.
        reward: reward, once it is scored; before that, the one that its environment returned.
        others: the other agents of its environment, by name.
        no_reward: reason why there is no reward, once that is known.
        to_grade: the conversation whose answer is to be checked, for the reward.
        num_tokens: sampled tokens, as an endpoint has counted them; None: those of the record.
    """

    id: str
    trajectories: Sequence[Trajectory]
    reward: Reward | None = None
    others: Mapping[str, AgentRecord] = field(default_factory=dict)
    no_reward: NoReward | None = None
    to_grade: Trajectory | None = None
    num_tokens: int | None = None

    @property
    def all_trajectories(self) -> list[Trajectory]:
        """The conversations of all agents, at least one."""
        of_others = (agent.trajectories for agent in self.others.values())
        return [*self.trajectories, *chain.from_iterable(of_others)]

    @property
    def whole(self) -> list[Trajectory]:
        """The conversations of its agent that were not stopped by the environment."""
        return _uninterrupted(self.trajectories)

    @property
    def trained(self) -> list[Trajectory]:
        """The conversations of all agents that may be trained on."""
        of_others = (agent.whole for agent in self.others.values() if agent.is_trained)
        return [*self.whole, *chain.from_iterable(of_others)]

    @property
    def num_sampled_tokens(self) -> int:
        return sum(trajectory.num_sampled_tokens for trajectory in self.all_trajectories)

    @property
    def may_count(self) -> bool:
        """True if the rollout has a reward, or an answer that can be checked."""
        if self.to_grade is not None:
            return not self.to_grade.stop_reason.is_unscorable
        return self.reward is not None and self.reward.value is not None


@dataclass(slots=True)
class RolloutGroup:
    """The rollouts of a task, each with its reward."""

    task: Task
    rollouts: Sequence[RolloutRecord]

    @property
    def rewards(self) -> list[Reward]:
        return [rollout.reward for rollout in self.rollouts if rollout.reward is not None]

    @property
    def mean_reward(self) -> float | None:
        values = [reward.value for reward in self.rewards if reward.value is not None]
        return sum(values) / len(values) if values else None

    @property
    def outage(self) -> str | None:
        """The failure of the infrastructure to which all rollouts were lost, if they were."""
        if all(rollout.no_reward is NoReward.INFRASTRUCTURE for rollout in self.rollouts):
            return self.rewards[0].reason
        return None

    @property
    def conversations(self) -> Iterator[tuple[int, str, Trajectory]]:
        """Each trajectory with its rollout's number and its agent's name.

        The name is empty for the rollout's own agent.
        """
        for index, rollout in enumerate(self.rollouts):
            for trajectory in rollout.trajectories:
                yield index, "", trajectory
            for name, agent in rollout.others.items():
                for trajectory in agent.trajectories:
                    yield index, name, trajectory

    def rows(self) -> list[dict[str, Any]]:
        """Return a line of the group's file for each conversation, as if none was selected."""
        return [
            {
                "task": self.task.id,
                "truth": self.task.answer,
                "rollout": index,
                "agent": agent,
                "reward": reward.value,
                "parts": dict(reward.parts),
                "answer": reward.answer,
                "reason": reward.reason,
                "no_reward": self.rollouts[index].no_reward,
                "advantage": None,
                "credit": None,
                "dropped": None,
                "trajectory": trajectory.to_dict(),
            }
            for index, agent, trajectory in self.conversations
            for reward in [self.rewards[index]]
        ]


def _uninterrupted(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    return [
        trajectory
        for trajectory in trajectories
        if trajectory.stop_reason is not StopReason.ENVIRONMENT
    ]
