"""Convert the rewards of a group to advantages. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["group_advantages"]

_EPSILON = 1e-6


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Return (r - mean) / (std + 1e-6) for the selected rollouts of one group.

    The standard deviation is unbiased, with a denominator of n - 1 (GRPO, arXiv 2402.03300; the
    epsilon is verl's). If all rewards are equal, every advantage is exactly 0.

    Raises:
        ValueError: A reward is not finite.
    """
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"a reward is not finite: {list(rewards)}")
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
    scale = math.sqrt(variance) + _EPSILON
    return [(reward - mean) / scale for reward in rewards]
