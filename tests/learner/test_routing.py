"""Routing replay: the recorded experts are used, and their weights are trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'agentloop-rl[train]'")

import torch

from agentloop.errors import ModelError
from agentloop.learner.batch import Batch, make_micro_batch, normalized_weights
from agentloop.learner.errors import BatchError
from agentloop.learner.policy import TokenScorer, load_model
from agentloop.learner.routing import RoutingReplay
from agentloop.models import SMALL
from agentloop.training.learner_client.settings import LearnerSettings
from tests.learner import plain
from tests.learner.families import make_model
from tests.learner.ranks import make_siblings

pytestmark = [pytest.mark.real, pytest.mark.gate]
torch.set_num_threads(1)
WIDTH, NUM_EXPERTS = 4, 4  # two layers with two of four experts for each token


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, "qwen3_moe", norm_topk_prob=True)
    return folder


def with_experts(batch: Batch) -> Batch:
    """Return the batch with two experts a layer for two tokens in three, by id and position."""
    places = np.concatenate([np.arange(length) for length in batch.lengths])
    is_recorded = (batch.ids + places) % 3 > 0
    first = np.stack([(batch.ids + places * layer) % NUM_EXPERTS for layer in (1, 2)], 1)
    experts = np.stack([first, (first + 1 + places[:, None] % 3) % NUM_EXPERTS], 2)
    return replace(
        batch,
        expert_counts=np.where(is_recorded, WIDTH, 0).astype(np.int32),
        experts=experts[is_recorded].astype(np.uint8).ravel(),
    )


def fix_experts(model: Any, recorded: Any) -> None:
    """Let a model of transformers send the tokens of its next pass to `recorded` [T, 2, 2]."""

    def route(layer: int, router: Any) -> Any:
        def forward(hidden: Any) -> Any:
            logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
            chosen = logits.topk(2).indices
            chosen = torch.where(recorded[:, layer] < 0, chosen, recorded[:, layer])
            return logits, logits.gather(1, chosen).softmax(-1), chosen  # over these two only

        return forward

    for layer, block in enumerate(model.model.layers):
        block.mlp.gate.forward = route(layer, block.mlp.gate)


def recorded_of(batch: Batch, index: int) -> Any:
    assert batch.expert_counts is not None
    assert batch.experts is not None
    table = np.full((len(batch.ids), WIDTH), -1)
    table[batch.expert_counts > 0] = batch.experts.reshape(-1, WIDTH)
    start = int(batch.starts[index])
    return torch.from_numpy(table[start : start + batch.lengths[index]].reshape(-1, 2, 2))


@pytest.mark.parametrize(("share", "checkpointing"), [(True, False), (False, False), (True, True)])
def test_scores_and_gradients_are_those_of_fixed_experts(
    folder: Path, share: bool, checkpointing: bool
) -> None:
    batch = with_experts(make_siblings())
    settings = LearnerSettings(
        model=folder, routing_replay=True, activation_checkpointing=checkpointing
    )
    samples = range(len(batch.lengths))
    weights = normalized_weights(batch, samples)
    scorer = TokenScorer(load_model(settings), settings).train()
    micro = make_micro_batch(batch, samples, weights, share=share)
    inputs = map(torch.from_numpy, (micro.ids, micro.positions, micro.predictors, micro.targets))
    experts = torch.from_numpy(micro.experts)
    logprobs, _ = scorer(*inputs, micro.segments, None, experts)
    (logprobs * torch.from_numpy(micro.weights * micro.advantages)).sum().backward()
    by_token = torch.zeros(len(batch.ids))
    by_token[torch.from_numpy(micro.source)] = logprobs.detach()

    model = load_model(LearnerSettings(model=folder, attention="sdpa")).train()
    own = torch.zeros(len(batch.ids))
    for index in samples:
        place = plain.scores_place(batch, index)
        with torch.no_grad():
            own[place.start + 1 : place.stop] = plain.scores(model, batch, index)[0]
    expected = torch.zeros(len(batch.ids))
    for index in samples:
        fix_experts(model, recorded_of(batch, index))
        scores, _, place = plain.scores(model, batch, index)
        expected[place] = scores.detach()
        factors = torch.from_numpy((weights * batch.advantages)[place])
        (scores * factors).sum().backward()
    is_sampled = torch.from_numpy(batch.mask) == 1
    assert (by_token - expected)[is_sampled].abs().max().item() < 1e-5
    assert (own - expected)[is_sampled].abs().max().item() > 0.1, "the experts make no difference"
    wanted = dict(model.named_parameters())
    for name, parameter in scorer.model.named_parameters():
        difference = (parameter.grad - wanted[name].grad).abs().max().item()
        assert difference < 1e-5 * max(1, wanted[name].grad.abs().max().item()), name
    routers = [parameter for name, parameter in wanted.items() if "gate.weight" in name]
    assert min(router.grad.abs().max().item() for router in routers) > 1e-4


def test_without_recorded_experts_routers_choose(folder: Path) -> None:
    settings = LearnerSettings(model=folder, routing_replay=True)
    batch = make_siblings()
    micro = make_micro_batch(batch, range(3), batch.weights)
    assert micro.experts is None
    inputs = (micro.ids, micro.positions, micro.predictors, micro.targets)
    arrays = [torch.from_numpy(array) for array in inputs]
    with torch.no_grad():
        own = TokenScorer(
            load_model(LearnerSettings(model=folder)),
            settings.model_copy(update={"routing_replay": False}),
        )(*arrays, micro.segments)
        scorer = TokenScorer(load_model(settings), settings)
        scorer(*arrays, micro.segments, None, torch.zeros(len(micro.ids), WIDTH, dtype=torch.int16))
        assert torch.equal(scorer(*arrays, micro.segments)[0], own[0])


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_routers_of_an_unknown_kind_are_refused(family: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, family)
    with pytest.raises(ModelError, match=rf"learner.routing_replay: .*{family}"):
        RoutingReplay(model)


@pytest.mark.parametrize(("width", "expert"), [(2, 0), (WIDTH, NUM_EXPERTS)])
def test_experts_that_the_model_lacks_are_refused(folder: Path, width: int, expert: int) -> None:
    routing = RoutingReplay(load_model(LearnerSettings(model=folder)))
    batch = make_siblings()
    routing.check(with_experts(batch))
    num_tokens = len(batch.ids)
    counts = np.full(num_tokens, width, np.int32)
    experts = np.full(width * num_tokens, expert, np.uint8)
    with pytest.raises(BatchError, match=f"experts: {width} of a token, up to number {expert}"):
        routing.check(replace(batch, expert_counts=counts, experts=experts))


def test_shared_token_has_the_experts_of_a_later_sample_if_the_first_has_none() -> None:
    batch = with_experts(make_siblings())
    assert batch.expert_counts is not None
    assert batch.experts is not None
    length = int(batch.lengths[0])
    num_removed = int((batch.expert_counts[:length] > 0).sum())
    counts = batch.expert_counts.copy()
    counts[:length] = 0
    rest = batch.experts[num_removed * WIDTH :]
    later = replace(batch, expert_counts=counts, experts=rest)
    samples = [0, 1]
    whole, lacking = (
        make_micro_batch(each, samples, batch.weights, share=True).experts
        for each in (batch, later)
    )
    assert whole is not None
    assert lacking is not None
    assert lacking[:20].tolist() == whole[:20].tolist()  # their prompt
    assert (lacking != whole).any()


def test_model_folder_that_ships_has_no_experts() -> None:
    with pytest.raises(ModelError, match="has no experts"):
        RoutingReplay(load_model(LearnerSettings(model=SMALL)))
