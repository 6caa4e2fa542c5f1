"""Per-turn credit: rewards of single turns beside the rollout's own. Pure.

An environment may reward turns (`Turn.reward`) and tokens (`Turn.token_rewards`). The advantage of
a token of turn t of rollout i is

    A_i + (G_it - mean_t) / (std_t + 1e-6) + its own reward

    A_i     GRPO's advantage of the rollout's reward
    G_it    the sum over the turns k from t on of discount^(k - t) r_ik; a turn without a reward
            counts as 0
    mean_t, std_t
            over the group's rollouts that reach turn t; if there is only one, or all of their G_t
            are equal, the term is 0

Turns are compared with turns of the same number, as in MT-GRPO (arXiv 2505.11821), in the
conversation of the same name where a rollout has several, and the two advantages are added, as in
GiGPO (arXiv 2505.10978). With a discount of 0 each turn gets its own reward alone; with 1, the
default, also all later ones. Token rewards are not normalised: they are on the scale of advantages,
whose standard deviation is 1. Without rewards of turns and tokens this is GRPO.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from random import Random

import pydantic

from agentloop.training.credit.grpo import group_advantages
from agentloop.training.credit.rule import Advantages, CreditArguments, CreditRule, RewardedRollout
from agentloop.trajectory import Trajectory

__all__ = ["RULE", "PerTurnArguments", "returns_to_go", "turn_advantages"]


class PerTurnArguments(CreditArguments):
    """Arguments of per-turn credit.

    Attributes:
        discount: factor by which a turn's reward counts less for each earlier turn.
    """

    discount: float = pydantic.Field(1.0, ge=0, le=1)


def returns_to_go(trajectory: Trajectory, discount: float) -> list[float]:
    """Return, for each turn, the discounted sum of its reward and those of later turns."""
    total, returns = 0.0, []
    for turn in reversed(trajectory.turns):
        total = (turn.reward or 0.0) + discount * total
        returns.append(total)
    return returns[::-1]


def turn_advantages(
    group: Sequence[RewardedRollout], arguments: PerTurnArguments, shuffler: Random | None = None
) -> list[list[list[float]]]:
    """Return the advantage of each turn, by rollout and trajectory, without the rollouts' own."""
    returns = [
        [returns_to_go(trajectory, arguments.discount) for trajectory in rollout.trajectories]
        for rollout in group
    ]
    reaching: dict[tuple[object, int], list[list[float]]] = defaultdict(list)
    for rollout, conversations in zip(group, returns, strict=True):
        names = rollout.names or range(len(conversations))
        for name, conversation in zip(names, conversations, strict=True):
            for turn in range(len(conversation)):
                reaching[name, turn].append(conversation)
    for (_, turn), counterparts in reaching.items():
        scores = group_advantages([conversation[turn] for conversation in counterparts], shuffler)
        for conversation, score in zip(counterparts, scores, strict=True):
            conversation[turn] = score
    return returns


def _advantages(
    group: Sequence[RewardedRollout], arguments: PerTurnArguments, shuffler: Random | None
) -> Advantages:
    outcomes = group_advantages([rollout.reward for rollout in group], shuffler)
    by_turn = turn_advantages(group, arguments, shuffler)
    token_rewards = _token_rewards(group, shuffler)
    return [
        [
            [
                outcome + score + next(token_rewards)
                for turn, score in zip(trajectory.turns, scores, strict=True)
                for _ in turn.output_ids
            ]
            for trajectory, scores in zip(rollout.trajectories, by_rollout, strict=True)
        ]
        for rollout, outcome, by_rollout in zip(group, outcomes, by_turn, strict=True)
    ]


def _token_rewards(group: Sequence[RewardedRollout], shuffler: Random | None) -> Iterator[float]:
    """Return the rewards of all sampled tokens; 0 for those of turns without any."""
    turns = (
        turn for rollout in group for trajectory in rollout.trajectories for turn in trajectory
    )
    rewards = [
        reward for turn in turns for reward in turn.token_rewards or [0.0] * len(turn.output_ids)
    ]
    if shuffler is not None:
        shuffler.shuffle(rewards)
    return iter(rewards)


RULE = CreditRule(_advantages, PerTurnArguments, uses_turn_rewards=True)
