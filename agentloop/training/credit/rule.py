"""The parts of a rule of credit assignment. Pure.

A rule gives each sampled token of a group's rollouts an advantage, and names the learner's
objective that takes them. The weight of a token in the loss is the same for all rules: see
`token_weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, TypeAlias

import pydantic

from agentloop.training.learner_client.settings import Objective
from agentloop.trajectory import Trajectory

Aggregate: TypeAlias = Literal["group", "batch", "sequence"]
Advantages: TypeAlias = list[list[list[float]]]
"""One number for each sampled token, by rollout and trajectory."""


@dataclass(frozen=True, slots=True)
class RewardedRollout:
    """A rollout to train on.

    Attributes:
        trajectories: the rollout's conversations with the model, one or more.
        teacher: the teacher's log-probabilities of the sampled tokens of each trajectory, if the
            rule needs them.
        names: names of the conversations, by which those are compared that begin differently in
            each rollout, or that begin alike in one. By default, their places.
    """

    reward: float
    trajectories: Sequence[Trajectory]
    teacher: Sequence[Sequence[float]] = ()
    names: Sequence[str] = ()


class CreditArguments(pydantic.BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Arguments that every rule takes.

    Attributes:
        aggregate: unit over which the token losses are averaged first: the tokens of a group, of
            the whole batch, or of a sequence. By default, the rule's.
        shuffle_rewards: a control experiment in which nothing should be learned: rollouts, turns
            and tokens are trained with the rewards of others of their group, in random order.
    """

    aggregate: Aggregate | None = None
    shuffle_rewards: bool = False


@dataclass(frozen=True, slots=True)
class CreditRule:
    """A rule of credit assignment.

    Attributes:
        advantages: takes the rollouts of a group that are trained on, the arguments, and what
            shuffles their rewards, or None.
        arguments: type of the arguments.
        needs_teacher: whether the rollouts must have the teacher's log-probabilities. Such a rule
            also learns from groups whose rewards are all equal, and from all of their rollouts.
        uses_turn_rewards: whether it takes `Turn.reward` and `Turn.token_rewards` into account.
    """

    advantages: Callable[[Sequence[RewardedRollout], Any, Random | None], Advantages]
    arguments: type[CreditArguments] = CreditArguments
    aggregate: Aggregate = "group"
    objective: Objective = "grpo"
    needs_teacher: bool = False
    uses_turn_rewards: bool = False


def token_weights(group: Sequence[RewardedRollout], aggregate: Aggregate) -> list[list[float]]:
    """Return the weight of a sampled token of each trajectory, by rollout.

    The learner divides by the sum of the weights in an update, so the loss is

    group: the mean over the groups of the mean over a group's tokens (rStar2, arXiv 2508.20722,
    eq. 6); batch: the mean over all tokens (DAPO, arXiv 2503.14476); sequence: the mean over the
    trajectories of the mean over a trajectory's tokens (GRPO as first published).
    """
    total = sum(
        trajectory.num_sampled_tokens for rollout in group for trajectory in rollout.trajectories
    )

    def weight(trajectory: Trajectory) -> float:
        if aggregate == "batch":
            return 1.0
        return 1 / max(1, total if aggregate == "group" else trajectory.num_sampled_tokens)

    return [[weight(trajectory) for trajectory in rollout.trajectories] for rollout in group]
