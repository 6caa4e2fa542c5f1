"""Resample-on-Correct: quotas, penalties, both forms and exclusions."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import hypothesis
import numpy as np
import pydantic
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentloop.config import load_settings
from agentloop.training.credit.roc import (
    MIN_PENALTY,
    DropReason,
    Rejected,
    RocSettings,
    Trace,
    penalty,
    quotas,
    resample,
)
from agentloop.trajectory import StopReason, ToolCallStatus, ToolResult, Trajectory, Turn

VECTORS = json.loads((Path(__file__).parents[3] / "vectors" / "roc.json").read_text("utf-8"))
PAPER = RocSettings(down_sample_to_n=16)
RELEASED = RocSettings(
    form="released",
    down_sample_to_n=16,
    min_zero_reward_trace_num=2,
    min_non_zero_reward_trace_num=2,
)
ODD = RocSettings(down_sample_to_n=15, min_zero_reward_trace_num=1, min_non_zero_reward_trace_num=2)
TWO = RocSettings(down_sample_to_n=2)


def trace(reward: float | None, *, calls: int = 1, failed: int = 0, answers: int = 1) -> Trace:
    return Trace(reward, calls, failed, answers, num_turns=calls + 1)


def group(num_positives: int, num_negatives: int) -> list[Trace]:
    return [trace(1.0)] * num_positives + [trace(0.0)] * num_negatives


def of_paper(changes: dict[str, Any]) -> RocSettings:
    """Return the paper's settings with changes."""
    return RocSettings(**{"down_sample_to_n": 16} | changes)


@st.composite
def settings(draw: st.DrawFn, max_n: int = 20) -> RocSettings:
    n = draw(st.integers(-1, max_n))
    maximum = n if n > 0 else max_n
    floor = draw(st.integers(-1, maximum))
    return RocSettings(
        form=draw(st.sampled_from(["paper", "released"])),
        down_sample_to_n=n,
        reject_equal_reward=draw(st.booleans()),
        roc_error_ratio=draw(st.booleans()),
        roc_answer_format=draw(st.booleans()),
        min_zero_reward_trace_num=floor,
        min_non_zero_reward_trace_num=draw(st.integers(-1, maximum - max(0, floor))),
    )


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    calls = draw(st.integers(0, 5))
    return Trace(
        reward=draw(st.sampled_from([1.0, 0.0, None])),
        num_calls=calls,
        num_failed_calls=draw(st.integers(0, calls)),
        num_answers=draw(st.integers(0, 4)),
        num_turns=draw(st.integers(0, 6)),
        num_pairs=draw(st.sampled_from([None, 0, 1, 3])),
    )


GROUPS = st.lists(traces(), max_size=40)


@pytest.mark.parametrize("vector", VECTORS["penalties"], ids=lambda vector: vector["name"])
def test_vectors_of_penalties(vector: dict[str, Any]) -> None:
    assert penalty(Trace(**vector["trace"]), RocSettings(**vector["settings"])) == pytest.approx(
        vector["penalty"], abs=1e-12
    )


@pytest.mark.parametrize("vector", VECTORS["quotas"], ids=json.dumps)
def test_vectors_of_quotas(vector: dict[str, Any]) -> None:
    actual = quotas(vector["num_positives"], vector["num_negatives"], of_paper(vector["settings"]))
    assert actual == (vector["keep_positives"], vector["keep_negatives"])


@pytest.mark.parametrize("vector", VECTORS["choices"], ids=lambda vector: vector["name"])
def test_vectors_of_choices(vector: dict[str, Any]) -> None:
    made = [Trace(**first) for first in vector["traces"]]
    choice = resample(made, of_paper(vector["settings"]), Random(0))
    assert choice.rejected == vector["rejected"]
    assert choice.dropped == {int(index): cause for index, cause in vector["dropped"].items()}
    assert choice.kept == vector["kept"]


@given(st.integers(0, 64), st.integers(0, 64), settings())
def test_quotas_sum_to_n_and_do_not_exceed_the_traces(
    num_positives: int, num_negatives: int, settings: RocSettings
) -> None:
    n = settings.down_sample_to_n
    if not 0 < n <= num_positives + num_negatives:
        return
    positives, negatives = quotas(num_positives, num_negatives, settings)
    assert positives + negatives == n
    assert 0 <= positives <= num_positives
    assert 0 <= negatives <= num_negatives
    assert positives >= min(settings.min_non_zero_reward_trace_num, num_positives)
    assert negatives >= min(settings.min_zero_reward_trace_num, num_negatives)


@given(st.integers(0, 32))
def test_half_of_the_negatives_are_kept_if_m_is_2n(num_negatives: int) -> None:
    kept = quotas(32 - num_negatives, num_negatives, PAPER)
    assert kept == (16 - num_negatives // 2, num_negatives // 2)


@given(st.integers(1, 30), st.integers(0, 60), st.integers(0, 60))
def test_released_quotas_are_the_roundings_if_they_sum_to_n(
    n: int, num_positives: int, num_negatives: int
) -> None:
    total = num_positives + num_negatives
    if n > total:
        return
    rounded = round(num_positives * n / total), round(num_negatives * n / total)
    settings = RocSettings(form="released", down_sample_to_n=n)
    actual = quotas(num_positives, num_negatives, settings)
    assert actual == rounded or (n % 2 and sum(rounded) != n)


# What the released code does with a group, written down anew from its rule. A rollout is a text for
# each turn, and whether each of its calls failed; turns are counted as agentloop counts them.
Rolled = tuple[list[str], list[bool]]


def released_penalty(rollout: Rolled, settings: RocSettings) -> float:
    turns, failures = rollout
    text = "\n".join(turns)
    error_ratio = sum(failures) / len(failures) if failures else 0.5
    num_closed, at = 0, 0
    while True:  # the shortest that begin at an opening tag, from left to right
        opened = text.find("<answer>", at)
        closed = text.find("</answer>", opened) if opened >= 0 else -1
        if closed < 0:
            break
        num_closed, at = num_closed + 1, closed + len("</answer>")
    answer_format = 1.0
    if 0 < num_closed == text.count("<answer>") == text.count("</answer>"):
        answer_format = min((num_closed - 1) / len(turns), 1.0)
    parts = (settings.roc_error_ratio, error_ratio), (settings.roc_answer_format, answer_format)
    return sum(value for is_on, value in parts if is_on)


def half_even(value: Fraction) -> int:
    below = value.numerator // value.denominator
    above_half = value - below - Fraction(1, 2)
    return below + (above_half > 0 or (above_half == 0 and below % 2 == 1))


def released_choice(
    rollouts: list[Rolled], rewards: list[float], settings: RocSettings
) -> list[int] | None:
    """Return the indexes that are kept, or None if the released code fails."""
    n, total = settings.down_sample_to_n, len(rollouts)
    if total < n or (settings.reject_equal_reward and len(set(rewards)) == 1):
        return []
    if total == n:
        return list(range(total))
    right = [i for i in range(total) if rewards[i] > 0]
    wrong = [i for i in range(total) if rewards[i] <= 0]
    right.sort(key=lambda i: (released_penalty(rollouts[i], settings), i))
    num_right, num_wrong = (half_even(Fraction(len(side) * n, total)) for side in (right, wrong))
    least_wrong = min(settings.min_zero_reward_trace_num, len(wrong))
    least_right = min(settings.min_non_zero_reward_trace_num, len(right))
    if num_wrong <= least_wrong:
        num_right, num_wrong = n - least_wrong, least_wrong
    if num_right <= least_right:
        num_right, num_wrong = least_right, n - least_right
    if num_right + num_wrong != n:
        return None
    return sorted(right[:num_right] + wrong[:num_wrong])


TURN = st.lists(st.sampled_from(["<answer>", "</answer>", "<answer>7</answer>", "so "]), max_size=3)
ROLLED = st.tuples(
    st.lists(TURN.map("".join), min_size=1, max_size=4), st.lists(st.booleans(), max_size=3)
)


@hypothesis.settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(ROLLED, st.sampled_from([0.0, 1.0])), max_size=34), settings(17))
@example([((["<answer>7</answer>"], [False]), 1.0)] * 4 + [(([""], []), 0.0)] * 20, ODD)
@example([((["<answer> <answer>7</answer>"], [False]), 1.0)] * 2 + [(([""], []), 0.0)] * 2, TWO)
@example([((["<answer>", "7</answer>"], [False]), 1.0)] * 2 + [(([""], []), 0.0)] * 2, TWO)
@pytest.mark.full
def test_released_form_matches_the_released_code(
    group: list[tuple[Rolled, float]], settings: RocSettings
) -> None:
    settings = settings.model_copy(update={"form": "released"})
    if settings.down_sample_to_n <= 0:
        return
    status = {True: ToolCallStatus.ERROR, False: ToolCallStatus.OK}
    made = []
    for (texts, failures), reward in group:
        turns = [Turn(text=text) for text in texts]
        turns[-1].results = [result(status[failed]) for failed in failures]
        made.append(Trace.of([Trajectory("t", [1], turns, StopReason.ANSWERED)], reward))
    choice = resample(made, settings, Random(0))
    rollouts, rewards = [first for first, _ in group], [reward for _, reward in group]
    assert choice.penalties == [released_penalty(first, settings) for first in rollouts]
    expected = released_choice(rollouts, rewards, settings)
    if expected is None:
        assert settings.down_sample_to_n % 2
        assert len(choice.kept) == settings.down_sample_to_n
    else:
        assert choice.kept == expected


@given(GROUPS, settings(), st.integers())
def test_every_trace_is_kept_or_dropped_with_a_reason(
    group: list[Trace], settings: RocSettings, seed: int
) -> None:
    choice = resample(group, settings, Random(seed))
    n = settings.down_sample_to_n
    scored = [index for index, first in enumerate(group) if first.reward is not None]
    assert sorted([*choice.kept, *choice.dropped]) == list(range(len(group)))
    assert choice.kept == sorted(choice.kept)
    assert len(choice.penalties) == len(group)
    if choice.rejected is None:
        assert len(choice.kept) == (n if n > 0 else len(scored))
        assert scored
    else:
        assert choice.kept == []
    for index, cause in choice.dropped.items():
        expected: set[DropReason] = {DropReason.NO_REWARD}
        if index in scored:
            side = DropReason.POSITIVE if group[index].reward else DropReason.NEGATIVE
            expected = {DropReason.GROUP_REJECTED if choice.rejected else side}
        assert {cause} == expected


@given(GROUPS, settings(), st.integers())
def test_seed_reproduces_the_choice(group: list[Trace], settings: RocSettings, seed: int) -> None:
    assert resample(group, settings, Random(seed)) == resample(group, settings, Random(seed))


@given(GROUPS, settings(), st.integers())
def test_released_form_is_deterministic(
    group: list[Trace], settings: RocSettings, seed: int
) -> None:
    rng = Random(seed)
    before = rng.getstate()
    resample(group, settings.model_copy(update={"form": "released"}), rng)
    assert rng.getstate() == before


@given(GROUPS, settings(), st.integers())
def test_infrastructure_failures_do_not_affect_the_other_traces(
    group: list[Trace], settings: RocSettings, seed: int
) -> None:
    scored = [index for index, first in enumerate(group) if first.reward is not None]
    complete = resample(group, settings, Random(seed))
    without = resample([group[index] for index in scored], settings, Random(seed))
    assert complete.kept == [scored[index] for index in without.kept]
    assert complete.rejected == without.rejected


@given(GROUPS, settings())
def test_released_form_keeps_cleanest_and_first(group: list[Trace], settings: RocSettings) -> None:
    settings = settings.model_copy(update={"form": "released"})
    choice = resample(group, settings, Random(0))
    for index, cause in choice.dropped.items():
        for kept in choice.kept:
            if cause is DropReason.NEGATIVE and group[kept].reward == 0.0:
                assert kept < index
            if cause is DropReason.POSITIVE and group[kept].reward == 1.0:
                assert (choice.penalties[kept], kept) < (choice.penalties[index], index)


@given(traces(), settings())
def test_penalty_is_at_most_one_for_each_part(one: Trace, settings: RocSettings) -> None:
    assert 0 <= penalty(one, settings) <= settings.roc_error_ratio + settings.roc_answer_format


def test_disabled_part_of_the_penalty_does_not_count() -> None:
    flawed = trace(1.0, calls=2, failed=1, answers=0)
    assert penalty(flawed, RocSettings()) == 1.5
    assert penalty(flawed, RocSettings(roc_error_ratio=False)) == 1.0
    assert penalty(flawed, RocSettings(roc_answer_format=False)) == 0.5
    assert penalty(flawed, RocSettings(roc_error_ratio=False, roc_answer_format=False)) == 0.0


def share_kept(index: int, traces: list[Trace], settings: RocSettings, *, draws: int) -> float:
    rng = Random(7)
    return sum(index in resample(traces, settings, rng).kept for _ in range(draws)) / draws


def test_positives_are_drawn_in_inverse_proportion_to_their_penalty() -> None:
    """One of two traces kept is a positive, with odds of 1/0.25 to 1/1."""
    settings = RocSettings(down_sample_to_n=2)
    group = [trace(1.0, calls=4, failed=1), trace(1.0, failed=1), trace(0.0), trace(0.0)]
    assert share_kept(0, group, settings, draws=4000) == pytest.approx(0.8, abs=0.03)


def test_flawless_positive_is_much_more_likely_but_not_certain() -> None:
    settings = RocSettings(down_sample_to_n=2)
    worst = trace(1.0, calls=2, failed=1)
    group = [trace(1.0), worst, trace(0.0), trace(0.0)]
    odds = 1 / MIN_PENALTY, 1 / penalty(worst, settings)
    share = share_kept(1, group, settings, draws=4000)
    assert share == pytest.approx(odds[1] / sum(odds), abs=0.01)
    assert share > 0


def test_flawless_positives_are_equally_likely() -> None:
    settings = RocSettings(down_sample_to_n=4)
    rng = Random(3)
    kept = Counter[int]()
    for _ in range(3000):
        kept.update(resample(group(4, 4), settings, rng).kept)
    for index in range(8):  # positives and negatives
        assert kept[index] / 3000 == pytest.approx(0.5, abs=0.05)


def test_negatives_are_drawn_uniformly() -> None:
    settings = RocSettings(down_sample_to_n=2)
    traces = [trace(0.0), trace(0.0, calls=3, failed=3, answers=0), trace(1.0), trace(1.0)]
    assert share_kept(1, traces, settings, draws=2000) == pytest.approx(0.5, abs=0.05)


def test_groups_that_are_rejected() -> None:
    def rejected(group: list[Trace], **changes: Any) -> Rejected | None:
        return resample(group, RocSettings(down_sample_to_n=4, **changes), Random(0)).rejected

    assert rejected(group(8, 0)) is Rejected.EQUAL_REWARDS
    assert rejected(group(0, 8)) is Rejected.EQUAL_REWARDS
    assert rejected(group(8, 0), reject_equal_reward=False) is None
    assert rejected(group(1, 2)) is Rejected.TOO_FEW
    assert rejected([*group(2, 1), trace(None), trace(None)]) is Rejected.TOO_FEW
    assert rejected(group(1, 3)) is None
    assert rejected([]) is Rejected.TOO_FEW
    parts = [(0.1, 0.2, 0.3), (0.3, 0.2, 0.1), (0.2, 0.3, 0.1), (0.1, 0.3, 0.2)]
    in_float32 = [trace(float(sum(map(np.float32, each), np.float32(0)))) for each in parts]
    assert rejected([trace(sum(each)) for each in parts]) is Rejected.EQUAL_REWARDS
    assert rejected(in_float32) is Rejected.EQUAL_REWARDS


def test_without_a_target_all_scored_traces_are_kept() -> None:
    choice = resample([*group(3, 2), trace(None)], RocSettings(down_sample_to_n=-1), Random(0))
    assert choice.kept == [0, 1, 2, 3, 4]
    assert choice.dropped == {5: DropReason.NO_REWARD}
    assert resample([trace(None)], RocSettings(down_sample_to_n=0), Random(0)).rejected


def test_negative_reward_is_a_wrong_answer() -> None:
    group = [trace(-1.0)] * 2 + [trace(0.5)] * 2
    choice = resample(group, RocSettings(down_sample_to_n=2), Random(0))
    assert sorted(choice.dropped.values()) == [DropReason.NEGATIVE, DropReason.POSITIVE]


def test_minimums_that_exceed_n_are_rejected() -> None:
    with pytest.raises(pydantic.ValidationError, match="more than down_sample_to_n"):
        RocSettings(
            down_sample_to_n=3, min_zero_reward_trace_num=2, min_non_zero_reward_trace_num=2
        )
    unlimited = RocSettings(down_sample_to_n=-1, min_zero_reward_trace_num=2)
    assert unlimited.min_zero_reward_trace_num == 2


def test_settings_come_from_overrides() -> None:
    made = load_settings(RocSettings, overrides=["form=released", "down_sample_to_n=8"])
    assert (made.form, made.down_sample_to_n) == ("released", 8)


def result(status: ToolCallStatus) -> ToolResult:
    return ToolResult("c", "tool", status, "max error 1e-9", 0.0, 0.0, 0.0)


def rollout(*turns: tuple[str, list[ToolCallStatus]], reason: StopReason) -> Trajectory:
    made = [Turn(text=text, results=[result(first) for first in calls]) for text, calls in turns]
    return Trajectory("t", [1], made, reason)


def test_trace_is_counted_from_the_record() -> None:
    trajectory = rollout(
        (
            "<answer>1</answer>",
            [ToolCallStatus.OK, ToolCallStatus.TIMEOUT, ToolCallStatus.MALFORMED],
        ),
        (
            "<answer>2</answer> <answer>open",
            [ToolCallStatus.CANCELLED, ToolCallStatus.INFRASTRUCTURE],
        ),
        ("<answer>3</answer>", []),
        reason=StopReason.ANSWERED,
    )
    actual = Trace.of([trajectory], 1.0)
    assert actual == Trace(
        1.0, num_calls=3, num_failed_calls=2, num_answers=3, num_turns=3, num_pairs=0
    )


@pytest.mark.parametrize("status", ToolCallStatus)
def test_calls_fail_by_their_status_alone(status: ToolCallStatus) -> None:
    actual = Trace.of([rollout(("", [status]), reason=StopReason.ANSWERED)], 1.0)
    assert actual.num_failed_calls == status.failed
    ours = status in (ToolCallStatus.CANCELLED, ToolCallStatus.INFRASTRUCTURE)
    assert actual.num_calls == (not ours)


def test_infrastructure_failures_have_no_reward_even_if_one_is_given() -> None:
    assert Trace.of([rollout(("", []), reason=StopReason.INFRASTRUCTURE)], 0.0).reward is None


def test_penalties_with_the_turns_of_the_published_code() -> None:
    """The published code omits the first turn, so its values are those of one turn less."""
    settings = RocSettings()
    for made, theirs in [
        (Trace(1.0, 0, 0, 1, 1), 1.5),
        (Trace(1.0, 1, 0, 1, 2), 0.0),
        (Trace(1.0, 1, 1, 1, 2), 1.0),
        (Trace(1.0, 1, 0, 2, 2), 1.0),
        (Trace(1.0, 3, 0, 2, 4), 1 / 3),
        (Trace(1.0, 1, 0, 0, 2), 1.0),
    ]:
        fewer = dataclasses.replace(made, num_turns=made.num_turns - 1)
        assert penalty(fewer, settings) == pytest.approx(theirs)


def test_published_scripts_quotas() -> None:
    assert [quotas(p, 32 - p, RELEASED) for p in (1, 2, 16, 31)] == [
        (1, 15), (2, 14), (8, 8), (15, 1)
    ]  # fmt: skip
