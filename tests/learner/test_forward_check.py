"""The learner's forward pass against the model's own logits, and models for which they differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agentloop-rl[train]'")

import torch
from safetensors.numpy import load_file

from agentloop.errors import ModelError
from agentloop.learner.attention import why_not_shared
from agentloop.learner.forward_check import ForwardComparison, compare, depends_on_longest
from agentloop.learner.policy import TokenScorer, load_model
from agentloop.training.learner_client.settings import LearnerSettings
from tests.learner import plain
from tests.learner.families import make_model
from tests.learner.ranks import make_batch, started

pytestmark = [pytest.mark.real, pytest.mark.gate]


def compared(folder: Path, family: str, dtype: str = "float32", **config: Any) -> ForwardComparison:
    make_model(folder, family, **config)
    settings = LearnerSettings.model_validate({"model": folder, "dtype": dtype})
    model = load_model(settings)
    scorer = TokenScorer(model, settings).eval()

    def score(micro: Any) -> Any:
        inputs = (micro.ids, micro.positions, micro.predictors, micro.targets)
        return scorer(*map(torch.from_numpy, inputs), micro.segments)

    return compare(scorer, score, share=why_not_shared(model, settings, "cpu") is None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text", "glm4", "qwen3_moe"])
def test_samples_are_packed_where_nothing_leaks(tmp_path: Path, family: str, dtype: str) -> None:
    result = compared(tmp_path, family, dtype)
    result.require_same(dtype)
    assert result.why_not_packed(dtype) is None


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next", "falcon_h1", "lfm2"])
def test_samples_are_not_packed_where_a_state_would_leak(tmp_path: Path, family: str) -> None:
    result = compared(tmp_path, family)
    result.require_same("float32")
    assert "packed, their log-probabilities would differ by" in str(
        result.why_not_packed("float32")
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "config"),
    [("cohere", {}), ("granite", {}), ("falcon_h1", {"lm_head_multiplier": 0.3})],
)
def test_model_that_scales_its_logits_is_refused(
    tmp_path: Path, family: str, config: dict[str, Any], dtype: str
) -> None:
    result = compared(tmp_path, family, dtype, **config)
    with pytest.raises(ModelError, match=r"ForCausalLM cannot be trained: .* of its own logits"):
        result.require_same(dtype)


def test_model_whose_layers_pass_nothing_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"StableLmForCausalLM cannot be trained: .* fails"):
        compared(tmp_path, "stablelm")


def test_weights_that_are_not_finite_are_refused() -> None:
    nothing = np.zeros((2, 3), np.float32)
    with pytest.raises(ModelError, match="differ"):
        ForwardComparison("Model", nothing, nothing * np.nan, nothing).require_same("float32")


def test_rotary_embeddings_that_depend_on_the_longest_sample_prevent_packing() -> None:
    from transformers import LlamaConfig

    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = LlamaConfig(max_position_embeddings=64, rope_parameters=rope)
    assert depends_on_longest(config, 64) is None
    assert "above 64 tokens" in str(depends_on_longest(config, 65))
    assert depends_on_longest(LlamaConfig(max_position_embeddings=64), 65) is None


@pytest.mark.parametrize(("num_ranks", "zero_stage"), [(1, 2), (2, 3)])
def test_scores_of_unpacked_samples_equal_the_models(
    tmp_path: Path, num_ranks: int, zero_stage: int
) -> None:
    folder, batch, out = tmp_path / "model", tmp_path / "batch", tmp_path / "scores"
    model = make_model(folder, "qwen3_5_text")
    samples = make_batch(sizes=(40, 25, 33))
    samples.save(batch)
    settings = LearnerSettings.model_validate({"model": folder, "zero_stage": zero_stage})
    with started(tmp_path / "ranks", settings, num_ranks) as ranks:
        reply = ranks.ask("logprobs", batch=batch, out=out)
        assert reply.get("num_tokens"), reply
    logprobs_T = load_file(out)["logprobs"]
    for index in range(len(samples.lengths)):
        expected, _, place = plain.scores(model, samples, index)
        sampled = samples.mask[place] == 1
        expected = expected.detach().numpy()[sampled]
        assert logprobs_T[place][sampled] == pytest.approx(expected, abs=1e-4)
