"""The record of a group of rollouts: of the built-in agent, of an environment, of an endpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from itertools import chain
from typing import Any

from agentloop.environments.rewards.reward import Reward, said_in
from agentloop.environments.tasks.sources import Task
from agentloop.plain_json import JsonObject, dumps
from agentloop.trajectory import StopReason, Trajectory


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
        openings: what each conversation is for (`Agent.openings`), by its id.
    """

    trajectories: Sequence[Trajectory]
    reward: float | None = None
    is_trained: bool = True
    openings: Mapping[str, str] = field(default_factory=dict)

    @property
    def whole(self) -> list[Trajectory]:
        """The conversations that were not stopped by the environment."""
        return _uninterrupted(self.trajectories)

    @classmethod
    def from_dict(cls, row: JsonObject) -> AgentRecord:
        """Rebuild a record from its fields as plain data."""
        return cls(**row | {"trajectories": [*map(Trajectory.from_dict, row["trajectories"])]})


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
        recorded: what its environment has measured, by name (`Agent.record`).
        is_trained: whether the tokens of its own agent are trained on.
        openings: what each conversation of its own agent is for (`Agent.openings`), by its id.
    """

    id: str
    trajectories: Sequence[Trajectory]
    reward: Reward | None = None
    others: Mapping[str, AgentRecord] = field(default_factory=dict)
    no_reward: NoReward | None = None
    to_grade: Trajectory | None = None
    num_tokens: int | None = None
    recorded: Mapping[str, float] = field(default_factory=dict)
    is_trained: bool = True
    openings: Mapping[str, str] = field(default_factory=dict)

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
        own = self.whole if self.is_trained else []
        return [*own, *chain.from_iterable(of_others)]

    @property
    def answer(self) -> str | None:
        """The answer in what the model said last, or all of that if nothing in it is marked."""
        said = [trajectory for trajectory in self.trajectories if trajectory.answer]
        said.sort(key=lambda trajectory: trajectory.created_unix_s + trajectory.elapsed_s)
        return said_in(said[-1]) if said else None

    @property
    def num_sampled_tokens(self) -> int:
        return sum(trajectory.num_sampled_tokens for trajectory in self.all_trajectories)

    @property
    def may_count(self) -> bool:
        """True if the rollout has a reward, or an answer that can be checked."""
        if self.to_grade is not None:
            return not self.to_grade.stop_reason.is_unscorable
        return self.reward is not None and self.reward.value is not None

    @classmethod
    def from_dict(cls, row: JsonObject) -> RolloutRecord:
        """Rebuild the record of a scored rollout from its fields as plain data."""
        no_reward = row["no_reward"]
        values = {
            "trajectories": [*map(Trajectory.from_dict, row["trajectories"])],
            "reward": Reward(**row["reward"]),
            "others": {name: AgentRecord.from_dict(each) for name, each in row["others"].items()},
            "no_reward": None if no_reward is None else NoReward(no_reward),
            "to_grade": None,
        }
        return cls(**row | values)


@dataclass(frozen=True, slots=True)
class TokenCredit:
    """The advantages and weights of a trajectory's sampled tokens.

    Each is one number if it is the same for all of them, otherwise a list with one for each.
    """

    advantages: float | list[float]
    weights: float | list[float]

    @classmethod
    def of(cls, advantages: Sequence[float], weight: float) -> TokenCredit:
        """Build the credit of a trajectory. Raises ValueError if a number is not finite."""
        if not all(map(math.isfinite, [*advantages, weight])):
            raise ValueError("an advantage or a weight is not finite")
        if len(set(advantages)) <= 1:
            return cls(advantages[0] if advantages else 0.0, weight)
        return cls(list(advantages), weight)

    @property
    def mean_advantage(self) -> float:
        """The mean over the sampled tokens, for people."""
        if isinstance(self.advantages, list):
            return math.fsum(self.advantages) / len(self.advantages)
        return self.advantages

    @property
    def has_signal(self) -> bool:
        """True if the advantage of any token differs from 0."""
        if isinstance(self.advantages, list):
            return any(self.advantages)
        return bool(self.advantages)


@dataclass(slots=True, kw_only=True)
class ConversationRow:
    """A conversation of a rollout with its reward and selection: a line of a group's file.

    Attributes:
        task, truth: id of the task, and its answer.
        rollout: number of the rollout in its group.
        agent: name of the agent; empty: the rollout's own.
        reward, parts, answer, reason: the rollout's `Reward`.
        recorded: values that the environment has recorded of the rollout (`agent.record`).
        credit: advantages and weights of its tokens; None: it was not selected for training.
        dropped: why the rollout was not selected (`DropReason`).
    """

    task: str = ""
    truth: str | None = None
    rollout: int
    agent: str = ""
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    recorded: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None
    reason: str = ""
    no_reward: NoReward | None = None
    credit: TokenCredit | None = None
    dropped: str | None = None
    trajectory: Trajectory

    @property
    def advantage(self) -> float | None:
        """The mean advantage of its tokens; None: it was not selected for training."""
        return None if self.credit is None else self.credit.mean_advantage

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data for JSON, with the advantage for readers."""
        return {**asdict(self), "advantage": self.advantage}

    def to_json(self) -> bytes:
        """Return the output of `to_dict` as JSON, without copying it: each token is in it."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return dumps(values | {"advantage": self.advantage})

    @classmethod
    def from_dict(cls, row: JsonObject) -> ConversationRow:
        """Rebuild a row from the output of `to_dict`; other keys are ignored.

        Fields that files of earlier versions lack have their defaults.

        Raises:
            KeyError, TypeError, ValueError: as in `Trajectory.from_dict`.
        """
        values = {each.name: row[each.name] for each in fields(cls) if each.name in row}
        if (no_reward := row.get("no_reward")) is not None:
            values["no_reward"] = NoReward(no_reward)
        if (credit := row.get("credit")) is not None:
            values["credit"] = TokenCredit(**credit)
        return cls(**{**values, "trajectory": Trajectory.from_dict(row["trajectory"])})


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

    def rows(self) -> list[ConversationRow]:
        """Return a line of the group's file for each conversation, as if none was selected."""
        rewards = [rollout.reward or Reward(None, None, "") for rollout in self.rollouts]
        return [
            ConversationRow(
                task=self.task.id,
                truth=self.task.answer,
                rollout=index,
                agent=agent,
                reward=rewards[index].value,
                parts=rewards[index].parts,
                recorded=self.rollouts[index].recorded,
                answer=rewards[index].answer,
                reason=rewards[index].reason,
                no_reward=self.rollouts[index].no_reward,
                trajectory=trajectory,
            )
            for index, agent, trajectory in self.conversations
        ]


def _uninterrupted(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    return [
        trajectory
        for trajectory in trajectories
        if trajectory.stop_reason is not StopReason.ENVIRONMENT
    ]
