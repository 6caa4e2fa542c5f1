"""Settings that a learner could not train with."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from agentloop.training.learner_client.settings import LearnerSettings


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr"),
        ({"optimizer": {"lr": 1.0}}, "optimizer.lr"),
        ({"optimizer": {"betas": (0.9, 1.0)}}, "optimizer.betas.1"),
        ({"optimizer": {"betas": (-0.1, 0.9)}}, "optimizer.betas.0"),
        ({"optimizer": {"betas": (0.9, float("nan"))}}, "optimizer.betas.1"),
        ({"optimizer": {"max_grad_norm": float("inf")}}, "optimizer.max_grad_norm"),
        ({"loss": {"clip_high": float("inf")}}, "loss.clip_high"),
        ({"lora": {"alpha": float("inf")}}, "lora.alpha"),
        ({"temperature": float("inf")}, "temperature"),
        ({"collective_timeout_s": float("inf")}, "collective_timeout_s"),
        ({"seed": 2**63}, "seed"),
    ],
)
def test_number_out_of_bounds_is_refused(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(pydantic.ValidationError) as refused:
        LearnerSettings.model_validate(settings)
    (error,) = refused.value.errors()
    assert ".".join(map(str, error["loc"])) == name
