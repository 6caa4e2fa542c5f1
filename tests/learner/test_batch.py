"""Batches: the file format, the weights of tokens, and the assignment to ranks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from agentloop.learner.batch import Batch, make_micro_batch, normalized_weights, parts, plan
from agentloop.learner.errors import BatchError
from agentloop.training.credit.rule import RewardedRollout, token_weights
from agentloop.trajectory import Trajectory, Turn
from tests.learner.ranks import make_batch, with_kept_ids

LENGTHS = st.lists(st.integers(2, 100), min_size=1, max_size=40)
WORLD_SIZES = st.integers(1, 8)


def test_batch_comes_back_from_its_file(tmp_path: Path) -> None:
    batch = make_batch(ref_logprobs=np.zeros(150, np.float32))
    batch.save(tmp_path / "batch.safetensors")
    back = Batch.load(tmp_path / "batch.safetensors")
    assert back.old_logprobs is None
    names = ("ids", "mask", "logprobs", "advantages", "weights", "lengths", "groups")
    for name in (*names, "ref_logprobs"):
        np.testing.assert_array_equal(getattr(back, name), getattr(batch, name))


def changed(name: str, at: int, value: float) -> Any:
    array = getattr(make_batch(), name).copy()
    array[at] = value
    return array


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"ids": np.zeros(150, np.int64)}, "ids: expected int32 [150]"),
        (
            {"ids": np.zeros((), np.int32)},
            "ids: expected int32 [1], one for each token",
        ),
        ({"lengths": np.zeros((), np.int32)}, "lengths: expected int32 [1]"),
        ({"mask": np.zeros(149, np.uint8)}, "mask: expected uint8 [150], one for each token"),
        (
            {"advantages": np.zeros(3, np.float32)},
            "advantages: expected float32 [150], one for each token",
        ),
        ({"lengths": np.asarray([40, 25, 33, 51], np.int32)}, "their sum 150"),
        ({"lengths": np.asarray([149, 1, 0, 0], np.int32)}, "each must be at least 2"),
        ({"ids": changed("ids", 7, -1)}, "must not be negative"),
        ({"mask": changed("mask", 7, 2)}, "mask must be 0 or 1"),
        ({"mask": changed("mask", 40, 1)}, "sample 1 begins with a sampled token"),
        ({"mask": np.zeros(150, np.uint8)}, "sample 0 has no sampled token"),
        ({"advantages": changed("advantages", 2, np.nan)}, "advantages: token 2 of the batch is"),
        ({"advantages": changed("advantages", 40, 1)}, "advantages: token 40 of the batch was not"),
        ({"weights": changed("weights", 40, 1)}, "weights: token 40 of the batch was not sampled"),
        ({"weights": changed("weights", 41, -1)}, "weights: token 41 of the batch is negative"),
        ({"logprobs": changed("logprobs", 41, -np.inf)}, "logprobs: token 41"),
        ({"old_logprobs": changed("logprobs", 1, np.nan)}, "old_logprobs: token 1"),
    ],
)
def test_invalid_batch_is_refused(arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=re.escape(message)):
        make_batch(**arrays)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("kept_counts", lambda counts: counts + 1, "kept: expected int32"),
        ("kept_counts", lambda counts: counts[::-1].copy(), "kept_counts: expected 0 where mask"),
        ("kept_counts", lambda counts: None, "kept_counts, kept: expected both"),
        ("kept", lambda kept: kept[1:], "kept: expected int32"),
        ("kept", lambda kept: kept[::-1].copy(), "is not once among its ids"),
        ("kept", lambda kept: kept.astype(np.int64), "kept: expected int32"),
        ("kept", lambda kept: None, "kept_counts, kept: expected both"),
    ],
)
def test_kept_ids_of_other_tokens_are_refused(name: str, change: Any, message: str) -> None:
    batch = with_kept_ids(make_batch())
    with pytest.raises(BatchError, match=re.escape(message)):
        replace(batch, **{name: change(getattr(batch, name))})


@pytest.mark.parametrize(
    ("counts", "experts", "message"),
    [
        ([2] * 5, [0] * 9, "experts: expected uint8 [10], one for each one of expert_counts"),
        ([2, 0, 1, 0, 0], [0] * 3, "expert_counts: expected 0 or the same number"),
        ([2, 0, 2, 0, 0], None, "expert_counts, experts: expected both or none"),
    ],
)
def test_experts_of_other_tokens_are_refused(counts: Any, experts: Any, message: str) -> None:
    arrays = {"expert_counts": np.asarray(counts, np.int32)}
    if experts is not None:
        arrays["experts"] = np.asarray(experts, np.uint8)
    with pytest.raises(BatchError, match=re.escape(message)):
        make_batch(0, (5,), **arrays)


def test_samples_that_fit_keep_their_kept_ids() -> None:
    batch = with_kept_ids(make_batch())
    fitting = batch.up_to(40)
    assert fitting is not None
    assert fitting.kept is not None
    assert fitting.kept_counts is not None
    assert batch.kept is not None
    assert batch.kept_counts is not None
    assert fitting.kept_counts.tolist() == batch.kept_counts[:98].tolist()
    assert fitting.kept.tolist() == batch.kept[: fitting.kept_counts.sum()].tolist()


@pytest.mark.parametrize(("name", "size"), [("BF16", 2), ("F8_E4M3", 1), ("F8_E5M2", 1)])
def test_type_that_numpy_lacks_is_named(tmp_path: Path, name: str, size: int) -> None:
    header = {"logprobs": {"dtype": name, "shape": [8], "data_offsets": [0, 8 * size]}}
    text = json.dumps(header).encode()
    file = tmp_path / "batch"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8 * size))
    with pytest.raises(BatchError, match=re.escape(str(file))):
        Batch.load(file)


def test_values_of_tokens_that_were_not_sampled_are_not_checked() -> None:
    make_batch(logprobs=changed("logprobs", 40, np.nan))


def test_invalid_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "batch.safetensors"
    with pytest.raises(BatchError, match=r"batch.safetensors: No such file"):
        Batch.load(file)
    file.write_bytes(b"hello, this is no tensor")
    with pytest.raises(BatchError, match=r"batch.safetensors: not a safetensors file"):
        Batch.load(file)
    make_batch().save(file)
    arrays = load(file.read_bytes())
    file.write_bytes(save({**arrays, "reward": arrays["advantages"]}))
    with pytest.raises(BatchError, match="unknown tensor reward"):
        Batch.load(file)
    del arrays["groups"]
    file.write_bytes(save(arrays))
    with pytest.raises(BatchError, match="missing tensor groups"):
        Batch.load(file)
    file.write_bytes(save({**arrays, "groups": arrays["lengths"][:2]}))
    with pytest.raises(BatchError, match=r"batch.safetensors: groups: expected int32 \[4\]"):
        Batch.load(file)


def small(how: Any) -> Batch:
    """Return two groups: samples of 1 and 3 sampled tokens, and one of 2, weighed as `how` says."""
    masks = [[0, 1], [0, 1, 1, 1], [0, 0, 1, 1]]
    rollouts = [
        RewardedRollout(0.0, [Trajectory("", [], [Turn(output_ids=[5] * sum(mask))])])
        for mask in masks
    ]
    weights = [*token_weights(rollouts[:2], how), *token_weights(rollouts[2:], how)]
    mask = np.concatenate(masks)
    return Batch(
        ids=np.arange(10, dtype=np.int32),
        mask=mask.astype(np.uint8),
        logprobs=np.zeros(10, np.float32),
        advantages=mask.astype(np.float32),
        weights=(np.repeat(np.concatenate(weights), [2, 4, 4]) * mask).astype(np.float32),
        lengths=np.asarray([2, 4, 4], np.int32),
        groups=np.asarray([7, 7, 3], np.int32),
    )


@pytest.mark.parametrize(
    ("how", "weights"),
    [
        ("group", [0, 1 / 8, 0, 1 / 8, 1 / 8, 1 / 8, 0, 0, 1 / 4, 1 / 4]),
        ("batch", [0, 1 / 6, 0, 1 / 6, 1 / 6, 1 / 6, 0, 0, 1 / 6, 1 / 6]),
        ("sequence", [0, 1 / 3, 0, 1 / 9, 1 / 9, 1 / 9, 0, 0, 1 / 6, 1 / 6]),
    ],
)
def test_weights_of_an_update(how: Any, weights: list[float]) -> None:
    assert normalized_weights(small(how), [0, 1, 2]) == pytest.approx(weights)


def test_weights_of_an_update_on_a_part_of_the_batch() -> None:
    assert normalized_weights(small("group"), [2]) == pytest.approx([0] * 8 + [0.5, 0.5])


def test_update_may_have_no_weight_at_all() -> None:
    batch = make_batch(weights=np.zeros(150, np.float32))
    assert not normalized_weights(batch, [0, 1]).any()


@given(seed=st.integers(0, 2**32 - 1), lengths=LENGTHS)
def test_weights_of_an_update_sum_to_one(seed: int, lengths: list[int]) -> None:
    batch = make_batch(seed, tuple(lengths))
    assert normalized_weights(batch, range(len(lengths))).sum() == pytest.approx(1, abs=1e-4)


@given(groups=st.lists(st.integers(0, 5), min_size=1), num_parts=st.integers(1, 4))
def test_groups_stay_together_in_a_part(groups: list[int], num_parts: int) -> None:
    result = parts(groups, num_parts)
    assert sorted(i for part in result for i in part) == list(range(len(groups)))
    assert all(result)
    assert len(result) == min(num_parts, len(set(groups)))
    kept = [{groups[i] for i in part} for part in result]
    assert sum(map(len, kept)) == len(set(groups))


@given(lengths=LENGTHS, slack=st.integers(0, 200), world_size=WORLD_SIZES)
def test_plan(lengths: list[int], slack: int, world_size: int) -> None:
    budget = max(lengths) + slack
    ranks = plan(lengths, budget, world_size)
    assert len(ranks) == world_size
    assert len({len(rank) for rank in ranks}) == 1
    bins = [first for rank in ranks for first in rank]
    assert sorted(i for first in bins for i in first) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in first) <= budget for first in bins)
    if not all(bins):
        assert all(len(first) <= 1 for first in bins), (
            "padded although a micro-batch could be halved"
        )
    assert len([first for first in bins if not first]) < world_size
    full = [first for first in bins if first]
    assert len(full) <= 2 * sum(lengths) // budget + world_size, "packed loosely"


@given(lengths=LENGTHS, world_size=WORLD_SIZES)
def test_unpackable_samples_get_separate_micro_batches(lengths: list[int], world_size: int) -> None:
    ranks = plan(lengths, 100, world_size, packs=False)
    bins = [each for rank in ranks for each in rank]
    assert sorted(i for each in bins for i in each) == [*range(len(lengths))]
    assert max(map(len, bins)) == 1


@given(lengths=LENGTHS, world_size=WORLD_SIZES)
def test_load_of_ranks_is_balanced(lengths: list[int], world_size: int) -> None:
    ranks = plan(lengths, 100, world_size)
    loads = [sum(lengths[i] for first in rank for i in first) for rank in ranks]
    assert max(loads) - min(loads) <= 100


@given(seed=st.integers(0, 2**32 - 1), lengths=LENGTHS, limit=st.integers(1, 100))
def test_samples_up_to_a_length(seed: int, lengths: list[int], limit: int) -> None:
    batch = make_batch(seed, tuple(lengths))
    kept = [i for i, length in enumerate(lengths) if length <= limit]
    result = batch.up_to(limit)
    if result is None:
        assert not kept
        return
    assert result.lengths.tolist() == [lengths[i] for i in kept]
    np.testing.assert_array_equal(result.groups, batch.groups[kept])
    spans = [slice(start, start + n) for start, n in zip(batch.starts, lengths, strict=True)]
    for name in ("ids", "mask", "logprobs", "advantages", "weights"):
        expected = np.concatenate([getattr(batch, name)[spans[i]] for i in kept])
        np.testing.assert_array_equal(getattr(result, name), expected)


def test_sample_that_is_too_long_is_named() -> None:
    with pytest.raises(BatchError, match="sample 1 has 65 tokens: raise micro_batch_tokens"):
        plan([3, 65], 64, 2)


@given(seed=st.integers(0, 2**32 - 1), lengths=LENGTHS, world_size=WORLD_SIZES)
def test_micro_batches_hold_what_the_batch_holds(
    seed: int, lengths: list[int], world_size: int
) -> None:
    batch = make_batch(seed, tuple(lengths))
    weights = normalized_weights(batch, range(len(lengths)))
    observed: list[int] = []
    for rank in plan(lengths, 128, world_size):
        for samples in rank:
            micro = make_micro_batch(batch, samples, weights)
            assert (micro.ids[micro.predictors + 1] == micro.targets).all()
            assert (micro.positions[micro.predictors + 1] > 0).all(), "predicted by another sample"
            if not samples:
                assert micro.weights.sum() == 0
                continue
            observed.extend(micro.source.tolist())
            assert (micro.ids[micro.predictors + 1] == batch.ids[micro.source]).all()
            assert np.count_nonzero(micro.positions == 0) == len(samples)
            assert micro.sample.max() == len(samples) - 1
            np.testing.assert_array_equal(micro.advantages, batch.advantages[micro.source])
            np.testing.assert_array_equal(micro.engine, batch.logprobs[micro.source])
            np.testing.assert_array_equal(micro.weights, weights[micro.source])
    assert sorted(observed) == np.flatnonzero(batch.mask).tolist()
