"""What samples share is in a micro-batch once: segments, and plans that count it once."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from agentloop.learner.batch import (
    Batch,
    make_micro_batch,
    normalized_weights,
    plan,
    shared_prefixes,
)
from tests.learner.ranks import make_batch

SAMPLES = st.lists(st.lists(st.integers(1, 2), min_size=2, max_size=12), min_size=1, max_size=12)
"""Ids of samples; there are so few different ones that most samples begin alike."""


def batch_of(samples: list[list[int]], num_groups: int) -> Batch:
    lengths = [len(ids) for ids in samples]
    masks = [np.arange(n) >= 1 + index % (n - 1) for index, n in enumerate(lengths)]
    mask = np.concatenate(masks).astype(np.uint8)
    return make_batch(
        sizes=tuple(lengths),
        ids=np.concatenate(samples).astype(np.int32),
        mask=mask,
        weights=mask.astype(np.float32),
        advantages=mask.astype(np.float32),
        groups=np.arange(len(samples), dtype=np.int32) % num_groups,
    )


@given(samples=SAMPLES, num_groups=st.integers(1, 3))
def test_each_token_continues_the_tokens_of_its_sample(
    samples: list[list[int]], num_groups: int
) -> None:
    batch = batch_of(samples, num_groups)
    weights = normalized_weights(batch, range(len(samples)))
    micro = make_micro_batch(batch, range(len(samples)), weights, share=True)
    _, shared = shared_prefixes(batch, range(len(samples)))
    assert len(micro.ids) == len(batch.ids) - sum(shared)
    attended: dict[int, list[int]] = {}  # by token: what it attends to
    for start, end, last in micro.segments:
        assert start < end <= last
        for token in range(start, last):
            attended.setdefault(token, []).extend(range(start, min(end, token + 1)))
    for token, keys in attended.items():
        assert micro.positions[keys].tolist() == [*range(len(keys))]
        assert keys[-1] == token
    assert sorted(micro.source.tolist()) == np.flatnonzero(batch.mask).tolist()
    index_of = np.repeat(np.arange(len(samples)), batch.lengths)
    for predictor, target, source in zip(
        micro.predictors, micro.targets, micro.source, strict=True
    ):
        index = index_of[source]
        before = batch.ids[batch.starts[index] : source]
        np.testing.assert_array_equal(micro.ids[attended[int(predictor)]], before)
        assert target == batch.ids[source]
    np.testing.assert_array_equal(micro.weights, weights[micro.source])
    np.testing.assert_array_equal(micro.advantages, batch.advantages[micro.source])
    for number in range(len(samples)):
        assert len({index_of[source] for source in micro.source[micro.sample == number]}) == 1


@given(
    samples=SAMPLES,
    num_groups=st.integers(1, 3),
    slack=st.integers(0, 30),
    world_size=st.integers(1, 4),
)
def test_plan_counts_shared_tokens_once(
    samples: list[list[int]], num_groups: int, slack: int, world_size: int
) -> None:
    batch = batch_of(samples, num_groups)
    order, shared = shared_prefixes(batch, range(len(samples)))
    lengths = batch.lengths[order].tolist()
    budget = max(lengths) + slack
    ranks = plan(lengths, budget, world_size, shared)
    assert len({len(rank) for rank in ranks}) == 1
    planned = [indices for rank in ranks for indices in rank]
    assert sorted(i for indices in planned for i in indices) == list(range(len(samples)))
    for indices in planned:
        chosen = [order[i] for i in indices]
        micro = make_micro_batch(batch, chosen, np.zeros(len(batch.ids)), share=True)
        assert len(micro.ids) <= budget
    if not all(planned):
        assert all(len(indices) <= 1 for indices in planned)


@given(
    beginnings=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 120)), min_size=2, max_size=8, unique=True
    ),
    slack=st.integers(0, 200),
)
@example(beginnings=[(3, 7), (2, 58), (2, 77)], slack=8)
def test_small_common_beginning_counts_for_each_sample(
    beginnings: list[tuple[int, int]], slack: int
) -> None:
    samples = [
        [1] * num + [10 * num + index] * size for index, (num, size) in enumerate(beginnings)
    ]
    batch = batch_of(samples, num_groups=1)
    order, shared = shared_prefixes(batch, range(len(samples)))
    lengths = batch.lengths[order].tolist()
    (rank,) = plan(lengths, max(lengths) + slack, 1, shared)
    for indices in rank:
        chosen = [order[i] for i in indices]
        micro = make_micro_batch(batch, chosen, np.zeros(len(batch.ids)), share=True)
        assert len(micro.ids) <= max(lengths) + slack


def test_siblings_share_a_micro_batch_unless_ranks_would_be_idle() -> None:
    """Two groups of four: a prompt of 40 tokens, which each continues by 10."""
    shared = [0, 40, 40, 40, 0, 40, 40, 40]
    first, second = [0, 1, 2, 3], [4, 5, 6, 7]
    assert plan([50] * 8, 100, 1, shared) == [[first, second]]
    assert plan([50] * 8, 160, 1, shared) == [[[*first, *second]]]
    assert plan([50] * 8, 80, 2, shared) == [[first], [second]]
    assert plan([50] * 8, 80, 4, shared) == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
    assert plan([50] * 8, 70, 1, shared) == [[[0, 1, 2], [4, 5, 6], [3], [7]]]
    # What all samples share, such as a system prompt, keeps nobody together.
    assert plan([50] * 4, 100, 2, [0, 40, 40, 40]) == [[[0, 2]], [[1, 3]]]


def test_few_equal_tokens_are_not_shared() -> None:
    ids = np.arange(200, dtype=np.int32)
    ids[100:103] = ids[:3]
    batch = make_batch(sizes=(100, 100), ids=ids)
    assert shared_prefixes(batch, [0, 1])[1] == [0, 0]
    ids[100:104] = ids[:4]
    assert shared_prefixes(batch, [0, 1])[1] == [0, 4]
