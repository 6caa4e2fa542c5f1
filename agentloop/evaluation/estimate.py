"""Estimate avg@k and pass@k from samples of n tasks, with confidence intervals. Pure.

avg@k is the mean over tasks of the mean reward of a task's samples. pass@k is the mean over tasks
of the probability that at least one of k samples is correct; with c correct ones among m >= k
samples, its unbiased estimate is

    1 - C(m - c, k) / C(m, k)          (Chen et al. 2021, arXiv 2107.03374, Eq. 1)

Both are means of one number x_i per task, so the task is the unit of sampling: samples of the same
task are correlated, and an interval that assumes independence is far too narrow. The interval is
for the mean over the population of problems from which the tasks are drawn.

It is Wilson's interval (1927) with an effective number of independent samples:

    p = mean of the x_i,  s^2 = their variance (n - 1 in the denominator)
    n_eff = p (1 - p) / (s^2 / n),  at least n, and at most the number of samples (for pass@k: of
            groups of k samples); n where p is 0 or 1
    centre (p + q / 2) / (1 + q),  half width sqrt(q (p (1 - p) + q / 4)) / (1 + q)

where q = c^2 / n_eff, and c is a quantile of Student's t with n - 1 degrees of freedom, since s^2
is estimated as well. By the law of total variance, a task counts for at least one sample and, for
avg@k, for at most the number of its samples. (Korn and Graubard 1998 use such an n_eff for
proportions in clustered surveys.)

A bootstrap over tasks is not used: with few tasks its percentiles are too narrow, and they collapse
to a point if all tasks or no tasks are solved, which thirty tasks do not justify.
docs/evaluate.md has the coverage of both, as measured.

For rewards other than 0 and 1, which have no such bounds, the interval is p +- c s / sqrt(n).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks and its confidence interval.

    Attributes:
        num_tasks: Number of tasks with enough samples.
    """

    value: float
    low: float
    high: float
    num_tasks: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def avg_at_k(rewards: Sequence[Sequence[float]], confidence: float = 0.95) -> Estimate | None:
    """Return the mean over tasks of their mean reward; tasks without samples are ignored.

    Args:
        rewards: The rewards of each task's samples.

    Returns:
        None if no task has a sample.
    """
    sampled = [task_rewards for task_rewards in rewards if task_rewards]
    means = [statistics.fmean(task_rewards) for task_rewards in sampled]
    if all(reward in (0, 1) for task_rewards in sampled for reward in task_rewards):
        return _of_shares(means, sum(map(len, sampled)), confidence)
    return _of_numbers(means, confidence)


def pass_at_k(
    rewards: Sequence[Sequence[float]], k: int, confidence: float = 0.95
) -> Estimate | None:
    """Return the mean over tasks of the probability that one of k samples has a positive reward.

    Tasks with fewer than k samples are ignored.

    Returns:
        None if no task has k samples.
    """
    sampled = [task_rewards for task_rewards in rewards if len(task_rewards) >= k]
    chances = [
        solved_by_any(len(task_rewards), sum(reward > 0 for reward in task_rewards), k)
        for task_rewards in sampled
    ]
    return _of_shares(chances, sum(len(task_rewards) // k for task_rewards in sampled), confidence)


def solved_by_any(num_samples: int, num_right: int, k: int) -> float:
    """Return the unbiased estimate of the probability that one of k (<= num_samples) is correct."""
    # With integers this is exact and equals the product in the paper's code.
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def sampling_error(rewards: Sequence[Sequence[float]]) -> float | None:
    """Return the standard error of avg@k over new samples of the same tasks.

    This is how much another run of the evaluation differs by chance. None if a task has fewer than
    two samples.
    """
    sampled = [task_rewards for task_rewards in rewards if task_rewards]
    if not sampled or min(map(len, sampled)) < 2:
        return None
    variances = [statistics.variance(task_rewards) / len(task_rewards) for task_rewards in sampled]
    return math.sqrt(math.fsum(variances)) / len(sampled)


def _of_shares(values: Sequence[float], num_samples: int, confidence: float) -> Estimate | None:
    """Estimate the mean of values in [0, 1] from at most `num_samples` independent samples."""
    n = len(values)
    if not n:
        return None
    mean = statistics.fmean(values)
    if n == 1:  # a single task says nothing about other problems
        return Estimate(mean, 0.0, 1.0, n)
    spread = statistics.variance(values, mean)
    max_variance = mean * (1 - mean)
    num_effective = float(n)
    if 0 < mean < 1:
        worth = max_variance * n / spread if spread > 0 else math.inf
        num_effective = min(max(float(n), worth), float(max(n, num_samples)))
    square = student_t(n - 1, confidence) ** 2 / num_effective
    centre = (mean + square / 2) / (1 + square)
    half = math.sqrt(square * (max_variance + square / 4)) / (1 + square)
    # The mean is inside the interval, except for rounding.
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
    """Return c such that |T| <= c with probability `confidence`, for T with Student's distribution
    of at least one degree of freedom."""
    # Bisect over an angle, whose range is bounded: t = tan(angle) sqrt(degrees).
    low, high = 0.0, math.pi / 2
    while (middle := (low + high) / 2) not in (low, high):
        if _within(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return math.tan(low) * math.sqrt(degrees)


def _within(angle: float, degrees: int) -> float:
    """Return P(|T| <= tan(angle) sqrt(degrees)); Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for index in range(3 if odd else 2, degrees, 2):
        term *= cosine * cosine * (index - 1) / index
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
