"""What k samples of each of n tasks say about the model, and how sure that is. Pure.

avg@k is the mean over tasks of the mean reward of a task's samples. pass@k is the mean over tasks
of the chance that at least one of k samples is right; of c right ones among m >= k samples its
unbiased estimate is

    1 - C(m - c, k) / C(m, k)          (Chen et al. 2021, arXiv 2107.03374, Eq. 1)

Both are means of one number x_i per task, so the task is the unit: samples of one task are alike,
and an interval that takes them for independent is far too narrow. What an interval covers is the
mean over the problems that the tasks are a sample of: how another set of such problems would go.

The interval is Wilson's (1927), with as many independent samples as the x_i are worth:

    p = mean of the x_i,  s^2 = their variance (n - 1 in the denominator)
    n_eff = p (1 - p) / (s^2 / n),  at least n, and at most the number of samples (for pass@k: of
            groups of k samples); n where p is 0 or 1
    centre (p + q / 2) / (1 + q),  half width sqrt(q (p (1 - p) + q / 4)) / (1 + q)

where q = c^2 / n_eff, with c of Student's t of n - 1 degrees of freedom, for s^2 is estimated as
well. By the law of total variance a task is worth one sample at least, and for avg@k not more than
it has. (An n_eff is what Korn and Graubard 1998 use for proportions in clustered surveys.)

It is not a bootstrap over tasks: of few tasks that has too narrow percentiles, and none at all
where every task is solved, or none, which thirty tasks do not justify. `python -m bench.intervals`
counts how often each covers the truth (docs/evaluate.md).

Rewards other than 0 and 1 know no such bounds: there the interval is p +- c s / sqrt(n).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["Estimate", "avg_at_k", "pass_at_k", "sampling_error", "solved_by_any", "student_t"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks and its confidence interval.

    Attributes:
        num_tasks: that it is the mean of: those with enough samples.
    """

    value: float
    low: float
    high: float
    num_tasks: int


def avg_at_k(rewards: Sequence[Sequence[float]], confidence: float = 0.95) -> Estimate | None:
    """The mean over tasks of the mean reward of each; those without samples are left out.

    Args:
        rewards: of each task, those of its samples.

    Returns:
        None where no task has a sample.
    """
    there = [one for one in rewards if one]
    means = [statistics.fmean(one) for one in there]
    if all(reward in (0, 1) for one in there for reward in one):
        return _of_shares(means, sum(map(len, there)), confidence)
    return _of_numbers(means, confidence)


def pass_at_k(
    rewards: Sequence[Sequence[float]], k: int, confidence: float = 0.95
) -> Estimate | None:
    """The mean over tasks of the chance that one of k samples has a reward above 0; tasks with
    fewer than k samples are left out.

    Returns:
        None where no task has k samples.
    """
    there = [one for one in rewards if len(one) >= k]
    chances = [solved_by_any(len(one), sum(reward > 0 for reward in one), k) for one in there]
    return _of_shares(chances, sum(len(one) // k for one in there), confidence)


def solved_by_any(num_samples: int, num_right: int, k: int) -> float:
    """The unbiased estimate of the chance that at least one of k samples is right.

    Raises:
        ValueError: there are fewer than k samples, or more are right than there are.
    """
    if not 1 <= k <= num_samples or not 0 <= num_right <= num_samples:
        raise ValueError(f"k={k}: {num_right} right of {num_samples} samples")
    # In integers: it is exact, and the product of the paper's code is the same.
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def sampling_error(rewards: Sequence[Sequence[float]]) -> float | None:
    """The standard error of avg@k over new samples of these same tasks: by how much another run of
    this evaluation differs by chance. None where a task has a single sample, which does not tell.
    """
    there = [one for one in rewards if one]
    if not there or min(map(len, there)) < 2:
        return None
    variances = [statistics.variance(one) / len(one) for one in there]
    return math.sqrt(math.fsum(variances)) / len(there)


def _of_shares(values: Sequence[float], num_samples: int, confidence: float) -> Estimate | None:
    """Of values in [0, 1]; `num_samples` independent ones at most are in them."""
    n = len(values)
    if not n:
        return None
    mean = statistics.fmean(values)
    if n == 1:  # what other problems are like, one does not tell
        return Estimate(mean, 0.0, 1.0, n)
    spread = statistics.variance(values, mean)
    most = mean * (1 - mean)
    num_effective = float(n)
    if 0 < mean < 1:
        worth = most * n / spread if spread > 0 else math.inf
        num_effective = min(max(float(n), worth), float(max(n, num_samples)))
    square = student_t(n - 1, confidence) ** 2 / num_effective
    centre = (mean + square / 2) / (1 + square)
    half = math.sqrt(square * (most + square / 4)) / (1 + square)
    # The mean lies within by construction, but for rounding.
    return Estimate(mean, min(max(0.0, centre - half), mean), max(min(1.0, centre + half), mean), n)


def _of_numbers(values: Sequence[float], confidence: float) -> Estimate | None:
    n = len(values)
    if not n:
        return None
    mean = statistics.fmean(values)
    half = math.inf
    if n > 1:
        half = student_t(n - 1, confidence) * statistics.stdev(values, mean) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


@lru_cache(maxsize=1024)
def student_t(degrees: int, confidence: float) -> float:
    """The c for which |T| <= c has the probability `confidence`, T of Student's distribution.

    Raises:
        ValueError: `degrees` is less than 1, or `confidence` not between 0 and 1.
    """
    if degrees < 1 or not 0 < confidence < 1:
        raise ValueError(f"degrees={degrees}, confidence={confidence}")
    # In the angle, in which the distribution has a bounded range: t = tan(angle) sqrt(degrees).
    low, high = 0.0, math.pi / 2
    while (middle := (low + high) / 2) not in (low, high):
        if _within(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return math.tan(low) * math.sqrt(degrees)


def _within(angle: float, degrees: int) -> float:
    """P(|T| <= tan(angle) sqrt(degrees)): Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for index in range(3 if odd else 2, degrees, 2):
        term *= cosine * cosine * (index - 1) / index
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
