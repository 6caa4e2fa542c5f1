"""The estimates, compared with brute force and with tables."""

from __future__ import annotations

import itertools
import math
import statistics
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.evaluation.estimate import (
    Estimate,
    avg_at_k,
    pass_at_k,
    sampling_error,
    solved_by_any,
    student_t,
)

ANY_TIME = settings(deadline=None)
REWARDS = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=7)
TASKS = st.lists(REWARDS, min_size=1, max_size=12)
SHARES = st.floats(0, 1)


@ANY_TIME
@given(REWARDS, st.data())
def test_pass_at_k_is_the_share_of_successful_choices(
    rewards: list[float], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(rewards)))
    choices = list(itertools.combinations(rewards, k))
    share = statistics.fmean(any(choice) for choice in choices)
    assert solved_by_any(len(rewards), rewards.count(1), k) == pytest.approx(share)


@ANY_TIME
@given(st.integers(1, 6), st.integers(0, 6), st.integers(1, 6))
def test_pass_at_k_is_unbiased(num_samples: int, sixths: int, k: int) -> None:
    """Its expectation over all outcomes of m samples is 1 - (1 - p)^k."""
    if k > num_samples:
        return
    p = Fraction(sixths, 6)
    mean = sum(
        math.comb(num_samples, right)
        * p**right
        * (1 - p) ** (num_samples - right)
        * Fraction(solved_by_any(num_samples, right, k)).limit_denominator(10**6)
        for right in range(num_samples + 1)
    )
    assert mean == 1 - (1 - p) ** k


@ANY_TIME
@given(TASKS)
def test_avg_at_k_weighs_tasks_equally(rewards: list[list[float]]) -> None:
    estimate = avg_at_k(rewards)
    assert estimate is not None
    assert estimate.value == pytest.approx(
        statistics.fmean(sum(task_rewards) / len(task_rewards) for task_rewards in rewards)
    )
    assert estimate.num_tasks == len(rewards)


@ANY_TIME
@given(TASKS, st.floats(0.01, 0.99))
def test_interval_is_within_0_and_1_and_contains_the_estimate(
    rewards: list[list[float]], confidence: float
) -> None:
    for estimate in (avg_at_k(rewards, confidence), pass_at_k(rewards, 1, confidence)):
        assert estimate is not None
        assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
        assert estimate.low < estimate.high


@ANY_TIME
@given(TASKS)
def test_interval_widens_with_its_confidence(rewards: list[list[float]]) -> None:
    narrow, wide = avg_at_k(rewards, 0.8), avg_at_k(rewards, 0.99)
    assert narrow is not None
    assert wide is not None
    assert wide.low <= narrow.low
    assert narrow.high <= wide.high


@ANY_TIME
@given(TASKS)
def test_interval_is_symmetric_in_correct_and_wrong(rewards: list[list[float]]) -> None:
    estimate = avg_at_k(rewards)
    mirrored = avg_at_k([[1 - reward for reward in task_rewards] for task_rewards in rewards])
    assert estimate is not None
    assert mirrored is not None
    assert (mirrored.value, mirrored.low, mirrored.high) == pytest.approx(
        (1 - estimate.value, 1 - estimate.high, 1 - estimate.low)
    )


@ANY_TIME
@given(REWARDS.filter(lambda rewards: len(rewards) > 1))
def test_with_one_sample_per_task_it_is_wilsons_interval(rewards: list[float]) -> None:
    n, p = len(rewards), statistics.fmean(rewards)
    c = student_t(n - 1, 0.95)
    # A bound x is where the score test just does not reject: |p - x| = c sqrt(x (1 - x) / n).
    estimate = avg_at_k([[reward] for reward in rewards])
    assert estimate is not None
    for bound in (estimate.low, estimate.high):
        if 0 < bound < 1:
            assert abs(p - bound) == pytest.approx(c * math.sqrt(bound * (1 - bound) / n))


@ANY_TIME
@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=20), st.integers(2, 16))
def test_repeated_samples_do_not_narrow_the_interval(rewards: list[float], k: int) -> None:
    once = avg_at_k([[reward] for reward in rewards])
    again = avg_at_k([[reward] * k for reward in rewards])
    assert once is not None
    assert again is not None
    assert (again.low, again.high) == pytest.approx((once.low, once.high))


def test_independent_samples_narrow_the_interval() -> None:
    few = avg_at_k([[1.0], [0.0]] * 15)
    many = avg_at_k([[1.0, 0.0] * 8] * 30)
    assert few is not None
    assert many is not None
    assert many.high - many.low < 0.6 * (few.high - few.low)


def test_thirty_solved_tasks_do_not_prove_that_all_are_solved() -> None:
    estimate = avg_at_k([[1.0] * 16] * 30)
    assert estimate is not None
    assert estimate.high == 1
    assert estimate.low == pytest.approx(1 / (1 + student_t(29, 0.95) ** 2 / 30))


def test_interval_of_a_single_task_is_from_0_to_1() -> None:
    assert avg_at_k([[1.0, 1.0, 0.0]]) == Estimate(2 / 3, 0, 1, 1)


def test_rewards_outside_0_and_1_use_the_t_interval() -> None:
    estimate = avg_at_k([[2.0, 4.0], [1.0], [5.0]])
    assert estimate is not None
    assert estimate.value == 3
    assert estimate.high - estimate.value == pytest.approx(student_t(2, 0.95) * 2 / math.sqrt(3))
    assert estimate.low == pytest.approx(6 - estimate.high)


def test_tasks_with_too_few_samples_are_ignored() -> None:
    rewards = [[1.0, 0.0], [], [0.0], [1.0, 1.0]]
    average, passed = avg_at_k(rewards), pass_at_k(rewards, 2)
    assert average is not None
    assert passed is not None
    assert (average.value, average.num_tasks) == (0.5, 3)
    assert (passed.value, passed.num_tasks) == (1, 2)
    assert avg_at_k([[], []]) is None
    assert pass_at_k(rewards, 3) is None


FEW = st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=3)


@pytest.mark.timeout(60)
@ANY_TIME
@given(st.lists(FEW, min_size=1, max_size=2))
@pytest.mark.full
def test_sampling_error_is_unbiased_for_its_square(rewards: list[list[float]]) -> None:
    """Over all ways to redraw each task's samples with replacement, the mean of the square is the
    variance of the mean."""
    draws = [
        list(itertools.product(task_rewards, repeat=len(task_rewards))) for task_rewards in rewards
    ]
    squares, means = [], []
    for drawn_rewards in itertools.product(*draws):
        error = sampling_error(drawn_rewards)
        assert error is not None
        squares.append(error**2)
        means.append(statistics.fmean(map(statistics.fmean, drawn_rewards)))
    assert statistics.fmean(squares) == pytest.approx(statistics.pvariance(means))


def test_single_samples_of_tasks_have_no_sampling_error() -> None:
    assert sampling_error([[1.0], [0.0]]) is None
    assert sampling_error([]) is None


@pytest.mark.parametrize(
    ("degrees", "confidence", "expected"),
    [  # a printed table's
        (1, 0.95, 12.7062),
        (2, 0.95, 4.3027),
        (3, 0.99, 5.8409),
        (4, 0.9, 2.1318),
        (9, 0.95, 2.2622),
        (29, 0.95, 2.0452),
        (120, 0.95, 1.9799),
    ],
)
def test_students_quantiles(degrees: int, confidence: float, expected: float) -> None:
    assert student_t(degrees, confidence) == pytest.approx(expected, abs=6e-5)


@ANY_TIME
@given(st.integers(1, 12), st.floats(0.05, 0.98))
def test_students_density_integrates_to_the_confidence(degrees: int, confidence: float) -> None:
    bound, steps = student_t(degrees, confidence), 2000
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2))
    scale /= math.sqrt(degrees * math.pi)
    points = [bound * (index + 0.5) / steps for index in range(steps)]
    density = [scale * (1 + t * t / degrees) ** (-(degrees + 1) / 2) for t in points]
    assert 2 * math.fsum(density) * bound / steps == pytest.approx(confidence, abs=2e-3)
