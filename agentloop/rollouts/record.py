"""The record of a group of rollouts: of the built-in agent, of an environment, of an endpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from agentloop.environments.rewards.reward import Reward
from agentloop.environments.tasks.sources import Task
from agentloop.trajectory import StopReason, Trajectory

__all__ = ["AgentRecord", "NoReward", "RolloutGroup", "RolloutRecord"]


class NoReward(StrEnum):
    """Why a rollout has no reward."""

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
        reward: its own reward; None: it gets that of the rollout.
        is_trained: whether its tokens are trained on.
    """

    trajectories: Sequence[Trajectory]
    reward: float | None = None
    is_trained: bool = True

    @property
    def whole(self) -> list[Trajectory]:
        """The conversations that were not stopped by the environment."""
        return _whole(self.trajectories)


@dataclass(slots=True)
class RolloutRecord:
    """The record of one rollout.

    Attributes:
        id: its name.
        trajectories: conversations of its agent with the model; of the built-in agent one.
        reward: its reward, once it is scored; before that, what its environment says of it.
        others: the other agents of its environment, by name.
        no_reward: why there is no reward, once that is known.
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
        others = (one for other in self.others.values() for one in other.trajectories)
        return [*self.trajectories, *others]

    @property
    def whole(self) -> list[Trajectory]:
        """The conversations of its agent that were not stopped by the environment."""
        return _whole(self.trajectories)

    @property
    def trained(self) -> list[Trajectory]:
        """The conversations of all agents that may be trained on."""
        others = (other.whole for other in self.others.values() if other.is_trained)
        return [*self.whole, *(one for whole in others for one in whole)]

    @property
    def num_sampled_tokens(self) -> int:
        return sum(one.num_sampled_tokens for one in self.all_trajectories)

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
        return [one.reward for one in self.rollouts if one.reward is not None]

    @property
    def mean_reward(self) -> float | None:
        values = [reward.value for reward in self.rewards if reward.value is not None]
        return sum(values) / len(values) if values else None

    @property
    def outage(self) -> str | None:
        """The failure of the infrastructure to which all rollouts were lost, if they were."""
        if all(one.no_reward is NoReward.INFRASTRUCTURE for one in self.rollouts):
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
            for name, other in rollout.others.items():
                for trajectory in other.trajectories:
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


def _whole(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    return [one for one in trajectories if one.stop_reason is not StopReason.ENVIRONMENT]
