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
        ids=[one[0] for one in tokens],
        mask=[int(one[1]) for one in tokens],
        engine=[one[2] for one in tokens],
        learner=[one[3] for one in tokens],
        versions=["3" if one[1] else None for one in tokens],
    )


@given(st.lists(TOKENS, max_size=4), st.integers(0, 5))
def test_differences_are_those_of_the_sampled_tokens(
    drawn: list[list[tuple[int, bool, float, float]]], num_worst: int
) -> None:
    found = differences_of(
        [conversation(one, str(index)) for index, one in enumerate(drawn)], num_worst=num_worst
    )
    sizes = sorted(abs(b - a) for one in drawn for _, sampled, a, b in one if sampled)
    assert found.num == len(sizes)
    assert [one.size for one in found.worst] == sizes[::-1][:num_worst]
    if not sizes:
        return
    assert found.mean == pytest.approx(sum(sizes) / len(sizes))
    assert found.max == sizes[-1]
    assert sum(size <= found.p99 for size in sizes) >= 0.99 * len(sizes)
    assert found.versions == {"3": len(sizes)}
    for one in found.worst:
        tokens = drawn[int(one.conversation)]
        assert one.id == tokens[one.index][0]
        assert list(one.before) == [id for id, *_ in tokens[: one.index]][-8:]


def test_a_difference_that_is_not_a_number_is_the_worst() -> None:
    found = differences_of([conversation([(1, True, -1.0, -9.0), (2, True, -1.0, math.nan)], "a")])
    assert found.worst[0].id == 2
    assert found.max == math.inf
