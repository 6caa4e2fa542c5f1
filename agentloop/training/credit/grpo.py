"""GRPO: every token of a rollout gets the rollout's advantage within its group. Pure.

GSPO and CISPO have the same advantages, and other objectives of the learner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from agentloop.training.credit.rule import Advantages, CreditArguments, CreditRule, RewardedRollout

_EPSILON = 1e-6
_ROUNDING = 5e-7  # relative to the largest reward, or to 1: that of a few sums in float32


def are_equal(rewards: Sequence[float]) -> bool:
    """Return whether rewards differ by no more than rounding, such as sums in another order."""
    spread = max(rewards, default=0.0) - min(rewards, default=0.0)
    return spread <= _ROUNDING * max([1.0, *map(abs, rewards)])


def group_advantages(rewards: Sequence[float], shuffler: Random | None = None) -> list[float]:
    """Return (r - mean) / (std + 1e-6) for the selected rollouts of one group.

    The standard deviation is unbiased, with a denominator of n - 1 (GRPO, arXiv 2402.03300; the
    epsilon is verl's). If all rewards are equal but for rounding, every advantage is exactly 0.
    With `shuffler` they are in random order.

    Raises:
        ValueError: A reward is not finite.
    """
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"a reward is not finite: {list(rewards)}")
    if are_equal(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
    scale = math.sqrt(variance) + _EPSILON
    advantages = [(reward - mean) / scale for reward in rewards]
    if shuffler is not None:
        shuffler.shuffle(advantages)
    return advantages


def _rollout_advantages(
    group: Sequence[RewardedRollout], arguments: CreditArguments, shuffler: Random | None
) -> Advantages:
    """Return the advantage of each rollout for each of its sampled tokens."""
    scores = group_advantages([rollout.reward for rollout in group], shuffler)
    return [
        [[score] * trajectory.num_sampled_tokens for trajectory in rollout.trajectories]
        for rollout, score in zip(group, scores, strict=True)
    ]


GRPO = CreditRule(_rollout_advantages)
GSPO = CreditRule(_rollout_advantages, aggregate="sequence", objective="gspo")
"""One policy ratio for a whole sequence (arXiv 2507.18071); its tokens need one advantage."""
CISPO = CreditRule(_rollout_advantages, objective="cispo")
"""Clipped, detached importance weights (arXiv 2506.13585)."""
