"""The plan's estimate of activation memory, compared with what autograd saves."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'agentloop-rl[train]'")

import torch

from agentloop.learner.attention import PACKED, arguments, register
from agentloop.learner.batch import PackedSegment
from agentloop.training.learner_client.launch import RanksSettings
from agentloop.training.learner_client.settings import LearnerSettings
from agentloop.training.plan.resources import ModelShape, learner_memory

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]  # torch's import takes its time


NUM_TOKENS = 256


def saved_bytes(config: Any, dtype: str, checkpointing: bool) -> int:
    """Return the bytes of all tensors, except parameters, that a forward pass saves."""
    from transformers import AutoModelForCausalLM

    register()
    model = AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, dtype), attn_implementation=PACKED
    )
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    segments = (
        PackedSegment(0, NUM_TOKENS // 2, NUM_TOKENS // 2),
        PackedSegment(NUM_TOKENS // 2, NUM_TOKENS, NUM_TOKENS),
    )
    saved: dict[int, Any] = {}  # holds them, so that no address is reused

    def pack(tensor: Any) -> Any:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(
            input_ids=torch.zeros((1, NUM_TOKENS), dtype=torch.int64),
            position_ids=torch.arange(NUM_TOKENS)[None],
            attention_mask=None,
            use_cache=False,
            **arguments(segments, torch.device("cpu")),
        )
    storages = {at: tensor.untyped_storage() for at, tensor in saved.items()}
    return sum(first.nbytes() for at, first in storages.items() if at not in parameters)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_estimate_matches_what_autograd_saves(dtype: Any, checkpointing: bool) -> None:
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
    )
    shape = ModelShape(
        num_parameters=1,
        counted=False,
        dtype=dtype,
        num_layers=12,
        hidden_size=128,
        query_size=256,
        kv_size=64,
        num_kv_heads=2,
        mlp_size=352,
        vocab_size=64,
        context_length=4096,
    )
    settings = LearnerSettings(
        dtype=dtype, micro_batch_tokens=NUM_TOKENS, activation_checkpointing=checkpointing
    )
    computed = learner_memory(shape, settings, RanksSettings(), on_gpus=False).activations
    if checkpointing:  # the recomputed layer is only saved in the backward pass
        complete = settings.model_copy(update={"activation_checkpointing": False})
        computed -= (
            learner_memory(shape, complete, RanksSettings(), on_gpus=False).activations // 12
        )
    # The estimate leaves out norms and positions before and after the layers.
    share = 0.25 if checkpointing else 0.06
    assert computed == pytest.approx(saved_bytes(config, dtype, checkpointing), rel=share)
