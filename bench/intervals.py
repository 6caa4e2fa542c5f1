"""Coverage of the confidence intervals of `agentloop evaluate`, compared with other common ones.

    python -m bench.intervals

Tasks are drawn from a population whose probabilities of success are Beta distributed: similar (a +
b = 20), of any difficulty (2), or nearly always or never solved (0.5), like competition problems.
Each has k samples. A correct 95% interval covers the population's mean in 95% of all evaluations.

    agentloop    agentloop/evaluation/estimate.py
    t            mean and Student's t of the tasks' means
    bootstrap    percentiles of 2,000 bootstraps over tasks
    independent  Wilson's, as if all samples were of different tasks
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from agentloop.evaluation.estimate import avg_at_k, pass_at_k, student_t

_Z = statistics.NormalDist().inv_cdf(0.975)
Interval = tuple[float, float]


def ours(right: Any, k: int) -> Interval:
    estimate = avg_at_k([[1.0] * int(c) + [0.0] * (k - int(c)) for c in right])
    assert estimate is not None
    return estimate.low, estimate.high


def by_t(right: Any, k: int) -> Interval:
    means = right / k
    half = student_t(len(means) - 1, 0.95) * means.std(ddof=1) / math.sqrt(len(means))
    return means.mean() - half, means.mean() + half


def independent(right: Any, k: int) -> Interval:
    n, p = len(right) * k, right.mean() / k
    centre, half = p + _Z**2 / 2 / n, _Z * math.sqrt(p * (1 - p) / n + _Z**2 / 4 / n**2)
    return (centre - half) / (1 + _Z**2 / n), (centre + half) / (1 + _Z**2 / n)


def bootstrap(draw: Any) -> Callable[[Any, int], Interval]:
    def interval(right: Any, k: int) -> Interval:
        n = len(right)
        means = (right / k)[draw.integers(0, n, (2000, n))].mean(axis=1)
        low, high = numpy.percentile(means, [2.5, 97.5])
        return float(low), float(high)

    return interval


def coverage(
    methods: Sequence[Callable[[Any, int], Interval]],
    *,
    num_tasks: int,
    k: int,
    mean: float,
    concentration: float,
    repeats: int,
    draw: Any,
) -> list[tuple[float, float]]:
    """Return, per method, the fraction of evaluations that cover the mean, and the mean width."""
    hits, widths = [0] * len(methods), [0.0] * len(methods)
    for _ in range(repeats):
        chances = draw.beta(mean * concentration, (1 - mean) * concentration, num_tasks)
        right = draw.binomial(k, chances)
        for index, method in enumerate(methods):
            low, high = method(right, k)
            hits[index] += low - 1e-12 <= mean <= high + 1e-12
            widths[index] += min(high, 1) - max(low, 0)
    return [(hit / repeats, width / repeats) for hit, width in zip(hits, widths, strict=True)]


def pass_coverage(*, num_tasks: int, k: int, at: int, mean: float, concentration: float,
                  repeats: int, draw: Any) -> float:  # fmt: skip
    """Return the fraction of evaluations whose interval covers the population's pass@`at`."""
    a, b = mean * concentration, (1 - mean) * concentration
    lost = math.exp(
        math.lgamma(b + at) + math.lgamma(a + b) - math.lgamma(b) - math.lgamma(a + b + at)
    )
    hits = 0
    for _ in range(repeats):
        right = draw.binomial(k, draw.beta(a, b, num_tasks))
        estimate = pass_at_k([[1.0] * int(c) + [0.0] * (k - int(c)) for c in right], at)
        assert estimate is not None
        hits += estimate.low - 1e-12 <= 1 - lost <= estimate.high + 1e-12
    return hits / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = numpy.random.default_rng(options.seed)
    methods = {"agentloop": ours, "t": by_t, "bootstrap": bootstrap(draw),
               "independent": independent}  # fmt: skip
    print("tasks   k  mean  a+b  " + "".join(f"{name:>18}" for name in methods) + "   pass@k/2")
    worst: dict[tuple[int, str], float] = {}
    for n, k, mean, concentration in itertools.product(
        (10, 30, 100), (1, 4, 16), (0.1, 0.5, 0.9, 0.97), (0.5, 2.0, 20.0)
    ):
        options_of_case: dict[str, Any] = {"num_tasks": n, "k": k, "mean": mean,
                                "concentration": concentration, "draw": draw}  # fmt: skip
        coverages = coverage(list(methods.values()), repeats=options.repeats, **options_of_case)
        for name, (share, _) in zip(methods, coverages, strict=True):
            worst[n, name] = min(worst.get((n, name), 1.0), share)
        cells = "".join(f"{share:>10.3f} ({width:.3f})" for share, width in coverages)
        some = (
            f"{pass_coverage(at=k // 2, repeats=options.repeats, **options_of_case):.3f}"
            if k > 1
            else "-"
        )
        print(f"{n:>5}  {k:>2}  {mean:.2f}  {concentration:>4}  {cells}   {some:>8}", flush=True)
    print("\nlowest coverage:")
    for n in (10, 30, 100):
        print(f"{n:>5} tasks  " + "".join(f"{name}: {worst[n, name]:.3f}  " for name in methods))


if __name__ == "__main__":
    main()
