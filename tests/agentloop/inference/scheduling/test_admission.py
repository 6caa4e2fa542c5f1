"""Admission of groups, and the forecast of their growth."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agentloop.inference.scheduling.admission import Admission, AdmissionLimits, Forecast


class Flight(RuleBasedStateMachine):
    """Compares the forecast's counts with plain lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.forecast = Forecast(longest=320, prior=100)
        self.lengths: dict[str, int] = {}
        self.count = 0

    @rule()
    def start(self) -> None:
        self.count += 1
        self.forecast.start(f"r{self.count}")
        self.lengths[f"r{self.count}"] = 0

    @rule(number=st.integers(0, 20), tokens=st.integers(0, 120))
    def grow(self, number: int, tokens: int) -> None:
        self.forecast.grow(f"r{number}", tokens)
        if f"r{number}" in self.lengths:
            self.lengths[f"r{number}"] += tokens

    @rule(number=st.integers(0, 20), is_complete=st.booleans())
    def end(self, number: int, is_complete: bool) -> None:
        self.forecast.end(f"r{number}", is_complete=is_complete)
        self.lengths.pop(f"r{number}", None)

    @invariant()
    def counts_agree(self) -> None:
        buckets = [min(31, length // 10) for length in self.lengths.values()]
        assert self.forecast._present == [buckets.count(bucket) for bucket in range(32)]
        assert len(self.forecast) == len(self.lengths)
        present = sum(10 * (bucket + 0.5) for bucket in buckets)
        assert present - 1e-6 <= self.forecast.peak() <= 320 * len(buckets) + 1e-6
        assert self.forecast.peak(3) >= self.forecast.peak()


TestFlight = pytest.mark.timeout(60)(Flight.TestCase)
TestFlight.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_peak_follows_the_observed_lengths() -> None:
    """All rollouts ended at 1,600 tokens, so the peak is exactly that of each."""
    forecast = Forecast(longest=3200, weight=1e-9)
    for number in range(50):
        forecast.start(f"r{number}")
        forecast.grow(f"r{number}", 1599)
        forecast.end(f"r{number}")
    assert forecast.peak(10) == pytest.approx(16_000, rel=0.05)


def test_running_rollouts_prevent_a_bias_towards_short_ones() -> None:
    """Only the short rollouts have ended yet."""
    rng = random.Random(1)
    lengths = [rng.choice([100, 3000]) for _ in range(400)]
    forecast = Forecast(longest=3200, weight=1.0)
    for number, length in enumerate(lengths):
        forecast.start(f"r{number}")
        forecast.grow(f"r{number}", min(length, 1500))
        if length <= 1500:
            forecast.end(f"r{number}")
    assert forecast.peak() > 0.5 * 200 * 1500


def test_old_observations_count_little() -> None:
    """Rollouts have become shorter during a long run."""

    def predict_peak(window: int) -> float:
        forecast = Forecast(longest=3200, weight=1.0, window=window)
        for number, length in enumerate([2999] * 1000 + [999] * 500):
            forecast.start(f"r{number}")
            forecast.grow(f"r{number}", length)
            forecast.end(f"r{number}")
        return forecast.peak(10)

    assert predict_peak(50) == pytest.approx(10_000, rel=0.1)
    assert predict_peak(10_000) > 15_000


def test_rollout_starts_once() -> None:
    forecast = Forecast(longest=100)
    forecast.start("r")
    with pytest.raises(ValueError, match="r is already in flight"):
        forecast.start("r")


def admission(**options: float) -> Admission:
    given = {"target": 1.0, "period_s": 2.0, "report_ttl_s": 15.0, **options}
    return Admission(AdmissionLimits(**given), Forecast(longest=1000, prior=500))


@given(st.integers(1000, 100_000), st.integers(1, 32), st.integers(0, 500))
def test_admitted_groups_fit_at_their_peak(capacity: int, size: int, num_prompt: int) -> None:
    made = admission()
    while made.may_start(capacity, size, num_prompt):
        for member in range(size):
            made.forecast.start(f"{made.num_in_flight}.{member}")
        made.start()
    assert made.num_in_flight >= 1  # otherwise nothing would ever begin
    held = made.forecast.peak() + num_prompt * made.num_in_flight
    assert made.num_in_flight == 1 or held <= capacity


def test_retraction_cuts_the_target_which_then_grows_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "agentloop.inference.scheduling.admission"
    monkeypatch.setattr(f"{module}._CUT", 0.5)
    monkeypatch.setattr(f"{module}._GROWTH", 0.1)
    made = admission()
    made.start()
    capacity = math.ceil(made.forecast.peak(4))  # needed for another group of four
    assert made.may_start(capacity, 4)
    made.observe(0.0, 3, 0.0)
    assert not made.may_start(capacity, 4)
    made.observe(1.0, 1, 1.0)
    assert made.target == 0.5  # the first cut has not taken effect yet
    made.observe(2.0, 0, 2.0)
    assert made.target == 0.25  # the retraction is not forgotten
    made.observe(4.0, 0, 4.0)
    assert made.target == pytest.approx(0.35)
    for step in range(3, 12):
        made.observe(2.0 * step, 0, 2.0 * step)
    assert made.target == 1.0


def test_target_does_not_grow_when_reports_stop() -> None:
    made = admission()
    targets = [made.target]
    for now_s, num_retracted in ((0.0, 1), (14.0, 0), (17.0, 0), (20.0, 1)):
        made.observe(now_s, num_retracted, 0.0)
        targets.append(made.target)
    start, cut, grown, held, cut_again = targets  # streams report retractions as well
    assert start > grown > cut > cut_again
    assert held == grown


def test_no_more_groups_end_than_started() -> None:
    made = admission()
    made.start()
    made.end()
    with pytest.raises(ValueError, match="more groups ended"):
        made.end()
