"""The loss of a micro-batch that is not finite."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agentloop-rl[train]'")

import torch

from agentloop.learner.policy import Policy
from agentloop.training.learner_client.settings import LossSettings

pytestmark = [pytest.mark.real, pytest.mark.gate]


@pytest.mark.parametrize("reference", [-1.0, math.nan])
def test_loss_that_is_not_finite_has_no_finite_gradient(reference: float) -> None:
    logprobs = torch.tensor([-0.1, -0.2], requires_grad=True)
    far_away = np.array([-3.0, -4.0], dtype=np.float32)  # both ratios are clipped
    micro = SimpleNamespace(
        old=far_away,
        engine=far_away,
        advantages=np.ones(2, dtype=np.float32),
        weights=np.ones(2, dtype=np.float32),
        sample=np.zeros(2, dtype=np.int64),
        reference=np.full(2, reference, dtype=np.float32),
    )
    policy = SimpleNamespace(
        engine=None,
        settings=SimpleNamespace(loss=LossSettings(kl_coef=0.1)),
        _score=lambda micro, engine: (logprobs, torch.zeros(2)),
        _on_device=torch.from_numpy,
    )
    loss, _ = Policy._forward_loss(cast(Any, policy), cast(Any, micro))
    loss.backward()
    gradient = cast(Any, logprobs.grad)
    assert bool(gradient.isfinite().any()) is not math.isnan(reference)
