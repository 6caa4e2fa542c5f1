"""Which tokens are marked, their kinds, and the statistics."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.analysis.entropy import (
    Kind,
    Sampled,
    TokenPosition,
    analyze,
    k3,
    mark_highest,
    nearest_version,
)

# Few values, so that many are equal.
entropies = st.lists(st.sampled_from([0.0, 0.1, 0.25, 1.5, 2.0]) | st.floats(0, 12), max_size=60)
shares = st.sampled_from([0.05, 0.1, 0.2, 1 / 3, 0.7, 1.0])


@st.composite
def turns(draw: st.DrawFn) -> Sampled:
    entropies = draw(st.lists(st.floats(0, 12), max_size=20))
    ids = draw(st.lists(st.integers(0, 5), min_size=len(entropies), max_size=len(entropies)))
    ends = sorted(draw(st.sets(st.integers(0, len(entropies)), max_size=4)))
    calls = tuple(zip(ends[::2], ends[1::2], strict=False))
    return Sampled(ids, entropies, calls, draw(st.booleans()))


rollouts = st.lists(st.lists(turns(), max_size=4), max_size=4)


@given(entropies, shares)
def test_the_highest_are_marked_and_no_more_than_the_share(
    entropies: list[float], share: float
) -> None:
    marks = mark_highest(entropies, share)
    above = [entropy for entropy, mark in zip(entropies, marks, strict=True) if mark]
    below = [entropy for entropy, mark in zip(entropies, marks, strict=True) if not mark]
    assert not above or not below or min(above) >= max(below)
    assert len(above) - 1 < share * len(entropies) + 1e-6
    assert len(above) >= share * len(entropies) - 1e-6


@given(entropies)
def test_ties_are_marked_first_come_first_served(entropies: list[float]) -> None:
    flat = [1.0] * len(entropies)
    marks = mark_highest(flat, 0.2)
    assert marks == sorted(marks, reverse=True)


def test_a_share_of_a_round_number_is_round() -> None:
    """0.1 * 30 is 3.0000000000000004."""
    assert [sum(mark_highest([1.0] * num, 0.1)) for num in (0, 1, 10, 11, 30)] == [0, 1, 1, 2, 3]


@given(rollouts, shares)
def test_every_token_is_counted_once(rollouts: list[list[Sampled]], share: float) -> None:
    analysis = analyze(rollouts, share)
    sampled = [
        (kind, id, entropy)
        for turns in rollouts
        for turn in turns
        for kind, id, entropy in zip(turn.kinds, turn.ids, turn.entropies, strict=True)
    ]
    assert analysis.num == len(sampled)
    sizes = [sum(len(turn.ids) for turn in turns) for turns in rollouts]
    assert analysis.num_rollouts == sum(size > 0 for size in sizes)
    assert analysis.num_marked == sum(sum(mark_highest([0.0] * size, share)) for size in sizes)
    for kind, figures in analysis.kinds.items():
        mine = [(id, entropy) for turns, id, entropy in sampled if turns is kind]
        ids = Counter(id for id, _ in mine)
        assert figures.num == len(mine)
        assert figures.num_marked == sum(token.num_marked for token in figures.tokens)
        assert all(1 <= token.num_marked <= token.num == ids[token.id] for token in figures.tokens)
        if mine:
            mean = math.fsum(entropy for _, entropy in mine) / len(mine)
            assert figures.mean_entropy == pytest.approx(mean)
        order = [token.num_marked for token in figures.tokens]
        assert order == sorted(order, reverse=True)


@given(rollouts)
def test_the_reported_position_of_the_highest_entropy_is_right(
    rollouts: list[list[Sampled]],
) -> None:
    for kind, figures in analyze(rollouts, 1.0).kinds.items():
        for token in figures.tokens:
            at = token.highest
            turn = rollouts[at.rollout][at.turn]
            assert turn.ids[at.token] == token.id
            assert turn.kinds[at.token] is kind
            assert turn.entropies[at.token] >= token.mean_entropy - 1e-9


@given(rollouts)
def test_with_all_marked_nothing_is_left_out(rollouts: list[list[Sampled]]) -> None:
    analysis = analyze(rollouts, 1.0)
    assert analysis.num_marked == analysis.num
    for figures in analysis.kinds.values():
        assert sum(token.num for token in figures.tokens) == figures.num


def test_text_calls_and_what_follows_a_result_are_told_apart() -> None:
    """The rollout reasons, makes a call and reads the result."""
    first = Sampled([7, 8, 9, 9], [0.1, 3.0, 0.2, 0.3], calls=((2, 4),))
    second = Sampled([7, 5], [2.0, 0.0], after_result=True)
    analysis = analyze([[first, second]], 0.5)
    assert first.kinds == [Kind.FORKING, Kind.FORKING, Kind.CALL, Kind.CALL]
    assert analysis.threshold == 0.3
    kinds = analysis.kinds
    assert [(figures.num, figures.num_marked) for figures in kinds.values()] == [
        (2, 1),
        (2, 1),
        (2, 1),
    ]
    (fork,), (reflection,) = kinds[Kind.FORKING].tokens, kinds[Kind.REFLECTION].tokens
    assert (fork.id, fork.num, fork.mean_entropy) == (8, 1, 3.0)
    assert (reflection.id, reflection.highest) == (7, TokenPosition(0, 1, 0))
    (call,) = kinds[Kind.CALL].tokens
    assert (call.id, call.num, call.num_marked, call.mean_entropy) == (9, 2, 1, 0.3)


def test_each_rollout_has_a_share_of_its_own() -> None:
    """A rollout of high entropy everywhere does not take all the marks."""
    sure, unsure = Sampled([1] * 10, [0.1] * 10), Sampled([2] * 10, [5.0] * 10)
    tokens = analyze([[sure], [unsure]], 0.2).kinds[Kind.FORKING].tokens
    assert [(token.id, token.num_marked) for token in tokens] == [(2, 2), (1, 2)]


def test_an_analysis_of_no_rollouts_is_empty() -> None:
    analysis = analyze([])
    assert (analysis.num, analysis.num_rollouts, analysis.mean_entropy) == (0, 0, 0.0)
    assert set(analysis.kinds) == set(Kind)


@given(
    st.dictionaries(st.integers(0, 30), st.integers(1, 100)),
    st.sets(st.integers(0, 30), min_size=1),
)
def test_no_other_weights_are_nearer(sampled: dict[int, int], kept: set[int]) -> None:
    chosen = nearest_version(sampled, kept)
    assert chosen in kept

    def distance(version: int) -> int:
        return sum(abs(version - sampled_version) * num for sampled_version, num in sampled.items())

    assert all(distance(chosen) <= distance(candidate) for candidate in kept)
    if len(sampled) == 1 and set(sampled) <= kept:
        assert chosen in sampled


def test_the_newest_of_equally_near_weights_are_taken() -> None:
    assert nearest_version({5: 10}, [4, 6]) == 6
    assert nearest_version({}, [0, 3, 2]) == 3
    with pytest.raises(ValueError, match="empty"):
        nearest_version({1: 1}, [])


@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), max_size=20))
def test_the_divergence_is_never_negative(pairs: list[tuple[float, float]]) -> None:
    engine, scored = [before for before, _ in pairs], [after for _, after in pairs]
    assert k3(engine, scored) >= 0
    assert k3(engine, engine) == 0
    if pairs and max(abs(before - after) for before, after in pairs) > 0.1:
        assert k3(engine, scored) > 0


def test_the_divergence_is_that_of_the_metrics() -> None:
    assert k3([-1.0, -2.0], [-1.5, -2.0]) == pytest.approx((math.exp(-0.5) - 0.5) / 2)
