"""Rewards of a group to advantages. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["group_advantages"]

_EPSILON = 1e-6


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / (std + 1e-6) over the selected rollouts of one group.

    std is the unbiased one, with n - 1 below (GRPO, arXiv 2402.03300; the epsilon is verl's).
    Where all rewards are equal nothing can be learned: every advantage is exactly 0.

    Raises:
        ValueError: a reward is not finite.
    """
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"a reward is not finite: {list(rewards)}")
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
    scale = math.sqrt(variance) + _EPSILON
    return [(reward - mean) / scale for reward in rewards]
