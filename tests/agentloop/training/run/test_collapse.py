"""Collapses are detected soon and traced to their start; ordinary training raises no alarm.

The series are made up, but for one: nobody has published the paper's own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.training.run.collapse import (
    Collapse,
    CollapseSettings,
    Rule,
    Verdict,
    checkpoint_before,
    report,
)

SETTINGS = CollapseSettings()
SOON = SETTINGS.window // 2 + 1 + SETTINGS.patience
"""Steps from a sharp fall to the verdict: half of the window has to see it, and then it counts."""

# Of a run of the small model on a laptop (docs/recipes), 8 tasks a step: as noisy as they come.
MEASURED = (
    *(0.20, 0.28, 0.36, 0.30, 0.37, 0.52, 0.49, 0.63, 0.59, 0.58, 0.58, 0.77, 0.72, 0.66, 0.72),
    *(0.87, 0.85, 0.83, 0.66, 0.70, 0.70, 0.80, 0.83, 0.78, 0.92, 0.67, 0.78, 0.91, 0.89, 0.88),
    *(0.81, 0.94, 0.97, 0.70, 0.86, 0.80, 0.89, 0.77, 0.92, 0.92, 0.92, 0.88, 0.92, 0.84, 0.91),
    *(0.96, 0.94, 0.91, 0.94, 0.92),
)

# Another one, by reward, entropy and norm of the gradients. Where all is solved, there are none.
# fmt: off
SOLVED: list[tuple[float, float | None, float | None]] = [
    (0.37, 0.071, 0.087), (0.47, 0.057, 0.085), (0.57, 0.055, 0.091), (0.55, 0.059, 0.1),
    (0.64, 0.051, 0.09), (0.7, 0.051, 0.1), (0.73, 0.045, 0.12), (0.8, 0.044, 0.1),
    (0.82, 0.04, 0.094), (0.84, 0.036, 0.1), (0.88, 0.034, 0.1), (0.84, 0.033, 0.1),
    (0.84, 0.029, 0.099), (0.87, 0.029, 0.11), (0.91, 0.026, 0.11), (0.96, 0.025, 0.12),
    (0.89, 0.024, 0.11), (0.96, 0.019, 0.11), (0.97, 0.024, 0.13), (0.98, 0.017, 0.14),
    (0.98, 0.021, 0.18), (0.98, 0.012, 0.42), (0.98, 0.016, 0.52), (1.0, None, None),
    (0.99, 0.0092, 0.19), (1.0, None, None), (0.99, 0.022, 0.27), (0.98, 0.01, 0.35),
    (0.98, 0.0077, 0.11), (0.99, 0.0074, 0.33), (1.0, None, None), (1.0, None, None),
    (0.98, 0.008, 0.19), (0.98, 0.017, 0.18), (1.0, None, None), (0.98, 0.014, 0.5),
    (0.99, 0.0075, 0.2), (0.99, 0.013, 0.54), (1.0, None, None), (0.99, 0.0065, 0.13),
    (1.0, None, None), (1.0, None, None), (0.98, 0.013, 0.12), (0.99, 0.02, 0.2), (0.98, 0.02, 0.2),
    (0.98, 0.014, 0.45), (0.98, 0.0076, 0.26), (1.0, None, None), (1.0, None, None),
]
# fmt: on

Row = dict[str, Any]


def row(step: int, reward: float | None, **learner: Any) -> Row:
    return {
        "step": step,
        "reward": reward,
        "length_mean": 4000.0,
        "truncated": learner.pop("truncated", 0.05),
        "num_without_reward": 0,
        "learner/entropy": learner.pop("entropy", 0.3),
        "learner/grad_norm": learner.pop("gradient", 0.2),
        "learner/mismatch_kl": learner.pop("mismatch", 1e-3),
        "learner/skipped": learner.pop("skipped", 0),
        **learner,
    }


def series(num: int, make: Callable[[int], Row]) -> list[Row]:
    return [make(step) for step in range(1, num + 1)]


def judged(rows: Iterable[Row], settings: CollapseSettings = SETTINGS) -> Verdict | None:
    """Return the first verdict."""
    collapse = Collapse(settings)
    return next((result for first in rows if (result := collapse.observe(first))), None)


def noisy(value: float, spread: float, draw: random.Random) -> float:
    return min(1.0, max(0.0, value + draw.gauss(0, spread)))


def the_papers(seed: int = 0) -> list[Row]:
    """Yield 510 steps of rising reward, then a fall to a tenth within forty, with exploding
    entropy and gradients."""
    draw = random.Random(seed)

    def make(step: int) -> Row:
        down = max(0.0, min(1.0, (step - 510) / 40))
        up = 0.25 + 0.45 * (1 - math.exp(-step / 150))
        return row(
            step,
            noisy(up * (1 - 0.9 * down), 0.03, draw),
            entropy=0.3 * math.exp(3 * down) * draw.uniform(0.9, 1.1),
            gradient=0.2 * math.exp(4 * down) * draw.uniform(0.5, 2),
            mismatch=1e-3 * math.exp(6 * down),
            truncated=0.05 + 0.5 * down,
        )

    return series(600, make)


def test_papers_collapse() -> None:
    for seed in range(5):
        rows = the_papers(seed)
        verdict = judged(rows)
        assert verdict is not None
        assert 510 < verdict.step <= 550
        assert verdict.last_good is not None
        assert 500 <= verdict.last_good <= 520
        assert verdict.last_good < verdict.since < verdict.step
        assert checkpoint_before(verdict, range(50, 551, 50)) in (450, 500)


def test_fallen_reward_alone_is_a_collapse() -> None:
    rows = [{"step": first["step"], "reward": first["reward"]} for first in the_papers()]
    verdict = judged(rows)
    assert verdict is not None
    assert verdict.rule is Rule.REWARD
    assert verdict.step < 565
    assert verdict.why.startswith("the reward fell from 0.69")


@pytest.mark.parametrize(
    ("rule", "bad"),
    [
        (Rule.REWARD, {"reward": 0.2}),
        (Rule.ENTROPY_LOW, {"entropy": 0.004}),
        (Rule.ENTROPY_HIGH, {"entropy": 2.0, "reward": 0.4}),
        (Rule.GRADIENT, {"gradient": 3.0, "reward": 0.4}),
        (Rule.GRADIENT, {"gradient": None, "skipped": 1, "reward": 0.4}),
        (Rule.TRUNCATED, {"truncated": 0.5, "reward": 0.4}),
        (Rule.MISMATCH, {"mismatch": 0.2}),
    ],
)
def test_each_rule_finds_its_own(rule: Rule, bad: dict[str, Any]) -> None:
    """A violation from step 101 on is detected after the window and the patience."""
    verdict = judged(
        series(200, lambda step: row(step, **({"reward": 0.6} | (bad if step > 100 else {}))))
    )
    assert verdict is not None
    assert (verdict.rule, verdict.step) == (rule, 100 + SOON - 1)
    assert verdict.since == verdict.step - SETTINGS.patience + 1
    assert verdict.last_good == 100


@pytest.mark.parametrize(
    "alone", [{"entropy": 2.0}, {"gradient": 3.0}, {"truncated": 0.5}, {"skipped": 1}]
)
def test_learning_run_may_change_these_metrics(alone: dict[str, Any]) -> None:
    """These metrics count only together with a declining reward."""
    assert not judged(series(200, lambda step: row(step, 0.6, **(alone if step > 100 else {}))))


def test_policy_that_loses_its_entropy() -> None:
    """The entropy falls to nothing over 200 steps while the reward is constant."""
    draw = random.Random(0)
    rows = series(
        200, lambda step: row(step, noisy(0.5, 0.03, draw), entropy=0.6 * math.exp(-step / 25))
    )
    verdict = judged(rows)
    assert verdict is not None
    assert verdict.rule is Rule.ENTROPY_LOW
    assert verdict.step < 130


def test_low_entropy_is_allowed_once_the_tasks_are_solved() -> None:
    assert not judged(series(400, lambda step: row(step, 1.0, entropy=0.6 * math.exp(-step / 25))))


def test_runs_that_were_measured() -> None:
    assert not judged(row(step, reward) for step, reward in enumerate(MEASURED, 1))
    assert not judged(
        row(step, reward, entropy=entropy, gradient=gradient)
        for step, (reward, entropy, gradient) in enumerate(SOLVED, 1)
    )


@pytest.mark.parametrize("seed", range(10))
def test_ordinary_noisy_run(seed: int) -> None:
    """The reward rises to 0.7 in 500 steps, with longer answers and less entropy; each is a
    mean of 128 rollouts."""
    draw = random.Random(seed)

    def make(step: int) -> Row:
        share = step / 500
        return row(
            step,
            noisy(0.1 + 0.6 * share, 0.08, draw),
            entropy=0.5 * math.exp(-2 * share) * draw.uniform(0.5, 2),
            gradient=0.1 * math.exp(2 * share) * draw.lognormvariate(0, 1),
            mismatch=draw.lognormvariate(-6, 1.5),
            truncated=noisy(0.3 * share, 0.05, draw),
        )

    assert not judged(series(500, make))


@pytest.mark.parametrize("reward", [0.0, 1.0, None])
def test_reward_that_never_moves(reward: float | None) -> None:
    assert not judged(series(300, lambda step: row(step, reward, entropy=None)))


def test_long_start_without_reward_is_not_a_collapse() -> None:
    """Rewards are rare, so half of their mean is insignificant."""
    draw = random.Random(0)
    rows = series(300, lambda step: row(step, max(0.0, draw.gauss(0.01, 0.02))))
    rows += [row(step, min(0.8, (step - 300) / 100)) for step in range(301, 500)]
    assert not judged(rows)
    rows += [row(step, 0.1) for step in range(500, 550)]
    assert judged(rows)


def test_while_the_reward_rises_nothing_is_a_collapse() -> None:
    rows = series(150, lambda step: row(step, min(step, 100) / 200, mismatch=0.2))
    verdict = judged(rows)
    assert verdict is not None
    assert verdict.rule is Rule.MISMATCH
    assert verdict.since > 100


def test_step_without_the_metric_neither_counts_nor_clears() -> None:
    """A step that trains on nothing lacks the metric, so detection takes twice as long."""

    def make(step: int) -> Row:
        learned = {} if step % 2 else {"mismatch": None}
        return row(step, 0.6, **({"mismatch": 0.2} | learned))

    verdict = judged(series(100, make))
    assert verdict is not None
    assert verdict.step == 2 * (SETTINGS.window + SETTINGS.patience - 1) - 1


# What cannot be a collapse in any order: the reward near its best, the
# entropy not far below its highest, the mismatch below its bound.
HARMLESS = st.builds(
    row,
    step=st.just(0),
    reward=st.none() | st.floats(0.6, 0.7),
    entropy=st.none() | st.floats(0.01, 0.4),
    gradient=st.none() | st.floats(0, 1e9),
    mismatch=st.none() | st.floats(-1, 0.1),
    truncated=st.floats(0, 1),
    skipped=st.integers(0, 1),
)
ANYTHING = st.builds(
    row,
    step=st.just(0),
    reward=st.none() | st.floats(-10, 0.7),
    entropy=st.floats(0.0, 1e9),
    gradient=st.none() | st.floats(0, 1e9),
    mismatch=st.floats(allow_nan=True, allow_infinity=True),
)
TIGHT = CollapseSettings(window=5, patience=1)  # whatever is bad is found at once


def numbered(rows: Sequence[Row]) -> list[Row]:
    return [{**first, "step": step} for step, first in enumerate(rows, 1)]


@given(st.lists(HARMLESS, max_size=60))
def test_noise_within_the_bounds_is_never_a_collapse(rows: list[Row]) -> None:
    assert not judged(numbered(rows), TIGHT)


@given(st.lists(ANYTHING, max_size=15))
def test_outliers_move_nothing(outliers: list[Row]) -> None:
    """One in three values is arbitrary: fewer than half of any window."""
    rows = [first for outlier in outliers for first in (row(0, 0.65), row(0, 0.65), outlier)]
    assert not judged(numbered(rows), TIGHT)


@given(
    st.integers(SETTINGS.window, 60),
    st.floats(0.3, 1.0),
    st.floats(0, 0.4),
    st.randoms(use_true_random=False),
)
def test_sharp_fall_is_found_at_once_and_dated(
    num_good: int, best: float, share: float, draw: random.Random
) -> None:
    good = [best * draw.uniform(0.9, 1) for _ in range(num_good)]
    rows = numbered([row(0, value) for value in [*good, *[best * share] * (SOON + 5)]])
    verdict = judged(rows)
    assert verdict is not None
    assert verdict.rule is Rule.REWARD
    assert num_good < verdict.step <= num_good + SOON
    assert verdict.last_good is not None
    assert num_good - SETTINGS.window <= verdict.last_good <= num_good


def test_stage_begins_with_a_clean_sheet() -> None:
    """Tasks that every rollout solves are dropped for the stage, so a lower reward is expected."""
    before = series(100, lambda step: row(step, 0.8))
    after = [row(step, 0.3) for step in range(101, 200)]
    assert judged([*before, *after])
    assert not judged([*before, {"step": 100, "filter/num_left": 5}, *after])
    assert not judged([*before, *({**first, "stage": "2"} for first in after)])


def test_resumed_run_reaches_the_same_verdict() -> None:
    rows = the_papers()
    verdict = judged(rows)
    assert verdict is not None
    for cut in (5, 300, verdict.step - 1):
        collapse = Collapse.replay(SETTINGS, rows[:cut], step=cut)
        assert (
            next(result for first in rows[cut:] if (result := collapse.observe(first))) == verdict
        )


def test_rows_of_other_things_are_passed_over() -> None:
    rows = series(100, lambda step: row(step, 0.6))
    remaining = [{"step": first["step"], "held_out/reward": 0.0} for first in rows]
    assert not judged(first for pair in zip(rows, remaining, strict=True) for first in pair)


def test_detector_can_be_switched_off() -> None:
    assert not judged(the_papers(), CollapseSettings(patience=0))


def test_report() -> None:
    rows = the_papers()
    verdict = Verdict(Rule.GRADIENT, "the norm rose", step=530, since=521, last_good=512)
    text = report(verdict, [*rows, {"step": 530, "held_out/reward": 0.1}], [400, 450, 500, 520])
    assert "collapsed at step 530" in text
    assert "The norm rose (medians), since step 521. Rule: `gradient`" in text
    assert "The last good step was 512" in text
    assert "Continue from the checkpoint of step 500" in text
    table = [line for line in text.splitlines() if line.startswith("| 5")]
    assert [line.split()[1] for line in table] == [str(step) for step in range(521, 531)]
    assert "learner.optimizer.lr" in text


@pytest.mark.parametrize("rule", Rule)
def test_report_where_little_is_known(rule: Rule) -> None:
    rows: list[Row] = [{"step": 1, "reward": None}]
    text = report(Verdict(rule, "why", 1, 1, None), rows, [])
    assert "No step was good." in text
    assert "start a new run" in text
    assert "| 1 | - | - |" in text


def test_checkpoint_is_older_than_the_last_good_step() -> None:
    """The rollouts of step 50 are sampled with the weights of step 49."""
    verdict = Verdict(Rule.REWARD, "why", 70, 60, 50)
    assert checkpoint_before(verdict, [30, 40, 50, 60]) == 40
    assert checkpoint_before(verdict, [50]) is None
