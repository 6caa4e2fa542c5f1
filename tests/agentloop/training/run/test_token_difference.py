"""The differences between the log-probabilities of engine and learner."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.training.run.token_difference import ScoredConversation, differences_of

LOGPROBS = st.floats(-30, 0, width=32)
TOKENS = st.lists(st.tuples(st.integers(0, 99), st.booleans(), LOGPROBS, LOGPROBS), max_size=40)


def conversation(tokens: list[tuple[int, bool, float, float]], name: str) -> ScoredConversation:
    return ScoredConversation(
        name=name,
        ids=[first[0] for first in tokens],
        mask=[int(first[1]) for first in tokens],
        engine=[first[2] for first in tokens],
        learner=[first[3] for first in tokens],
        versions=["3" if first[1] else None for first in tokens],
    )


@given(st.lists(TOKENS, max_size=4), st.integers(0, 5))
def test_differences_are_those_of_the_sampled_tokens(
    drawn: list[list[tuple[int, bool, float, float]]], num_worst: int
) -> None:
    result = differences_of(
        [conversation(first, str(index)) for index, first in enumerate(drawn)], num_worst=num_worst
    )
    sizes = sorted(abs(b - a) for first in drawn for _, sampled, a, b in first if sampled)
    assert result.num == len(sizes)
    assert [first.size for first in result.worst] == sizes[::-1][:num_worst]
    if not sizes:
        return
    assert result.mean == pytest.approx(sum(sizes) / len(sizes))
    assert result.max == sizes[-1]
    assert sum(size <= result.p99 for size in sizes) >= 0.99 * len(sizes)
    assert result.versions == {"3": len(sizes)}
    for first in result.worst:
        tokens = drawn[int(first.conversation)]
        assert first.id == tokens[first.index][0]
        assert list(first.before) == [id for id, *_ in tokens[: first.index]][-8:]


def test_difference_that_is_not_a_number_is_the_worst() -> None:
    result = differences_of([conversation([(1, True, -1.0, -9.0), (2, True, -1.0, math.nan)], "a")])
    assert result.worst[0].id == 2
    assert result.max == math.inf
