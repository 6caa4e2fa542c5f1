"""Sampling parameters, and what SGLang is given of them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from agentloop.inference.sglang.sampling import Sampling


def test_without_stop_ids_the_models_end_token_is_ignored() -> None:
    """Otherwise SGLang stops at the model's own end token."""
    params = Sampling().to_sglang(max_new_tokens=1, stop_ids=())
    assert (params["stop_token_ids"], params["ignore_eos"]) == ([], True)
    assert "ignore_eos" not in Sampling().to_sglang(max_new_tokens=1, stop_ids=(9,))


def test_parameters_have_sglangs_names_and_values() -> None:
    assert Sampling(top_k=0).to_sglang(max_new_tokens=1, stop_ids=())["top_k"] == -1  # all
    seeded = Sampling(seed=7).to_sglang(max_new_tokens=1, stop_ids=())
    assert seeded["sampling_seed"] == 7


def test_each_group_has_its_own_seed() -> None:
    assert Sampling().of_group("a") == Sampling()
    first, second = (Sampling(seed=7).of_group(name) for name in ("a", "b"))
    assert first == Sampling(seed=7).of_group("a")
    assert len({first.seed, second.seed, Sampling(seed=8).of_group("a").seed}) == 3
    assert first.seed is not None
    assert 0 <= first.seed < 1 << 63


def test_each_sibling_has_its_own_seed_within_63_bits() -> None:
    last = (1 << 63) - 1
    seeds = [Sampling(seed=last).of_sibling(index).seed for index in range(3)]
    assert seeds == [last, 0, 1]
    assert Sampling().of_sibling(1) == Sampling()


def test_only_what_the_learner_needs_is_recorded_for_training() -> None:
    whole, cut = Sampling(seed=3), Sampling(seed=3, top_k=20)
    assert not whole.for_training().records_kept_ids
    assert not cut.records_kept_ids
    recorded = cut.for_training().of_group("g").of_sibling(1)
    assert pickle.loads(pickle.dumps(recorded)).records_kept_ids
    assert not recorded.records_experts
    replayed = whole.with_routing_replay()
    assert replayed.for_training().of_group("g").of_sibling(1).records_experts
    assert not replayed.records_experts
    assert recorded.to_sglang(max_new_tokens=1, stop_ids=()) == cut.of_group("g").of_sibling(
        1
    ).to_sglang(max_new_tokens=1, stop_ids=())


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"topp": 1}]
)
def test_sampling_is_checked_when_it_is_built(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Sampling(**bad)
