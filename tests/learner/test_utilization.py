"""The count of a batch's operations, compared with torch's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'agentloop-rl[train]'")

import torch
from torch.utils.flop_counter import FlopCounterMode

from agentloop.learner.policy import load_model
from agentloop.learner.utilization import Work, peak_tflops
from agentloop.models import SMALL
from agentloop.training.learner_client.settings import LearnerSettings

pytestmark = [pytest.mark.real, pytest.mark.gate]
LENGTH = 200


@pytest.mark.parametrize("frozen", [False, True])
def test_count_equals_torchs(frozen: bool) -> None:
    """torch counts one sample through transformers' model.

    Its attention computes the whole square, so the pairs that a causal one omits are added.
    """
    settings = LearnerSettings(model=SMALL, attention="eager")
    model = load_model(settings)
    if frozen:  # all but the embeddings at the bottom, as with adapters
        model.requires_grad_(False)
        model.get_input_embeddings().register_forward_hook(
            lambda module, args, output: output.detach().requires_grad_()
        )
    work = Work.of(model)
    assert work is not None
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 500, (1, LENGTH)))
    with FlopCounterMode(display=False) as counted:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    pairs = LENGTH * (LENGTH - 1) / 2
    expected = work.of_batch([LENGTH], LENGTH) + work.per_pair * pairs
    assert counted.get_total_flops() == pytest.approx(expected, rel=1e-3)


def test_pairs_are_within_a_sample() -> None:
    work = Work(per_token=100, per_sampled=10, per_pair=1)
    assert work.of_batch([2, 3], 3) == 500 + 30 + 3 + 6


def test_shared_tokens_count_once() -> None:
    """The last token of the second sample attends to all three of its tokens."""
    work = Work(per_token=100, per_sampled=10, per_pair=1)
    assert work.of_batch([2, 3], 3, [0, 2]) == 300 + 30 + 3 + 3


def test_unknown_model_has_no_count() -> None:
    config: Any = SimpleNamespace(num_experts=8)
    assert Work.of(SimpleNamespace(config=config)) is None
    assert Work.of(SimpleNamespace(config=SimpleNamespace())) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GH200 480GB", 989),
        ("cpu", None),
    ],
)
def test_peak_of_devices(name: str, peak: float | None) -> None:
    assert peak_tflops(name, "bfloat16") == peak
    assert peak_tflops(name, "float32") is None
