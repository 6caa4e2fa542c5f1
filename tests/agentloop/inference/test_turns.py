"""A turn goes on from its exact ids, wherever its streams break."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentloop.inference.sglang.frames import Chunk
from agentloop.inference.sglang.sampling import Sampling
from agentloop.inference.turns import Generation, OngoingTurn
from agentloop.trajectory import TurnEnd

STOP = 99


def turn(*, max_new_tokens: int = 50) -> OngoingTurn:
    generation = Generation("r", "t", [1, 2, 3], Sampling(), max_new_tokens, (STOP,), group="g")
    return OngoingTurn(generation, lambda chunk: None)


@given(st.lists(st.lists(st.integers(0, 98), max_size=5), max_size=6))
def test_rest_begins_where_the_last_stream_broke(streams: list[list[int]]) -> None:
    ongoing, names = turn(), set[str]()
    for number, ids in enumerate(streams):
        remaining = ongoing.remaining()
        names.add(remaining.rid)
        assert remaining.ids == [1, 2, 3, *ongoing.received]
        assert len(remaining.ids) + remaining.max_new_tokens == 3 + 50
        assert (remaining.key, remaining.group) == ("t", "g")
        ongoing.received += ids
        assert ongoing.missing_end() is None
        assert len(names) == number + 1  # SGLang aborts by name: none is used twice
    assert ongoing.generation.ids == [1, 2, 3]


def test_only_the_frame_that_ends_it_may_be_missing() -> None:
    assert turn().missing_end() is None
    stopped, full = turn(), turn(max_new_tokens=2)
    stopped.received += [5, STOP]
    full.received += [5, 6]
    assert stopped.missing_end() == Chunk([], [], "", end=TurnEnd.STOP)
    assert full.missing_end() == Chunk([], [], "", end=TurnEnd.LENGTH)
