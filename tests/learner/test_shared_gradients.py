"""Samples that share tokens: log-probabilities and gradients are those of separate samples."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'agentloop-rl[train]'")

import torch

from agentloop.learner.attention import why_not_shared
from agentloop.learner.batch import Batch, make_micro_batch, normalized_weights
from agentloop.learner.policy import TokenScorer, load_model
from agentloop.models import SMALL
from agentloop.training.learner_client.settings import LearnerSettings, LossSettings
from tests.learner.ranks import make_siblings, with_kept_ids

pytestmark = [pytest.mark.real, pytest.mark.gate]
torch.set_num_threads(1)  # on a busy machine, threads that wait for each other cost minutes
SETTINGS = LearnerSettings(model=SMALL, head_chunk_tokens=7, loss=LossSettings(entropy_coef=0.1))


def scores_and_gradients(settings: LearnerSettings, batch: Batch, *, share: bool) -> Any:
    """Return log-probabilities and entropies by token of the batch, and all gradients."""
    scorer = TokenScorer(load_model(settings), settings).train()
    samples = range(len(batch.lengths))
    micro = make_micro_batch(batch, samples, normalized_weights(batch, samples), share=share)
    inputs = (micro.ids, micro.positions, micro.predictors, micro.targets)
    kept = None if micro.kept is None else torch.from_numpy(micro.kept)
    scores = torch.stack(scorer(*map(torch.from_numpy, inputs), micro.segments, kept))
    (scores * torch.from_numpy(micro.weights * micro.advantages)).sum().backward()
    by_token = torch.zeros(2, len(batch.ids))
    by_token[:, torch.from_numpy(micro.source)] = scores.detach()
    return by_token, [parameter.grad for parameter in scorer.parameters()], len(micro.ids)


@pytest.mark.parametrize(("checkpointing", "is_cut"), [(False, False), (True, False), (True, True)])
def test_scores_and_gradients_are_those_of_each_sample_by_itself(
    checkpointing: bool, is_cut: bool
) -> None:
    settings = SETTINGS.model_copy(update={"activation_checkpointing": checkpointing})
    batch = with_kept_ids(make_siblings()) if is_cut else make_siblings()
    scores, gradients, num_tokens = scores_and_gradients(settings, batch, share=True)
    expected, remaining, num_apart = scores_and_gradients(settings, batch, share=False)
    assert num_tokens < 0.7 * num_apart
    assert (scores - expected).abs().max().item() < 1e-5
    for result, wanted in zip(gradients, remaining, strict=True):
        assert (result - wanted).abs().max().item() < 1e-5 * max(1, wanted.abs().max().item())
    scale = max(wanted.abs().max().item() for wanted in remaining)
    assert scale > 0.01, "the gradients are not just small"


def test_in_bfloat16_shared_samples_are_as_exact_as_separate_ones() -> None:
    exact, gradients, _ = scores_and_gradients(SETTINGS, make_siblings(), share=False)
    settings = SETTINGS.model_copy(update={"dtype": "bfloat16"})
    errors = []
    for share in (True, False):
        scores, result, _ = scores_and_gradients(settings, make_siblings(), share=share)
        pairs = [(scores, exact), *zip(result, gradients, strict=True)]
        errors.append([((a.float() - b).norm() / b.norm()).item() for a, b in pairs])
    for shared, apart in zip(*errors, strict=True):
        assert shared < 1.5 * apart + 0.005


@pytest.mark.parametrize(
    ("update", "config", "reason"),
    [
        ({}, {}, None),
        ({"attention": "sdpa"}, {}, "learner.attention = sdpa"),
        ({}, {"attention_dropout": 0.1}, "attention_dropout of 0.1"),
        ({}, {"router_jitter_noise": 0.01}, "router_jitter_noise of 0.01"),
        ({}, {"v_head_dim": 64, "qk_head_dim": 96}, "different sizes"),
        ({}, {"layer_types": ["linear_attention", "full_attention"]}, "pass on a state"),
    ],
)
def test_model_that_cannot_share_says_why(
    update: dict[str, Any], config: dict[str, Any], reason: str | None
) -> None:
    settings = SETTINGS.model_copy(update=update)
    model = load_model(settings)
    for name, value in config.items():
        setattr(model.config, name, value)
    result = why_not_shared(model, settings, "cpu")
    assert result == reason or (reason and reason in (result or ""))
    if reason is None:
        model.add_module("convolution", torch.nn.Conv1d(1, 1, 1))
        assert "pass on a state" in (why_not_shared(model, settings, "cpu") or "")
