"""The losses against values computed by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'agentloop-rl[train]'")

import torch

from agentloop.learner.loss import (
    LossInput,
    cispo_objective,
    clipped_objective,
    gspo_ratio,
    importance_weight,
    k3,
    policy_loss,
    ratio_of,
    supervised_loss,
)
from agentloop.training.learner_client.settings import LossSettings

pytestmark = [pytest.mark.real, pytest.mark.gate]
VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "loss.json").read_text("utf-8"))
LOW, HIGH = 0.2, 0.28


def tensor(*values: float) -> Any:
    return torch.tensor(values, dtype=torch.float64)


def logs(*ratios: float) -> Any:
    return tensor(*ratios).log()


@pytest.mark.parametrize("case", VECTORS["clipped"])
def test_clipped_objective_and_its_slope(case: dict[str, Any]) -> None:
    new = logs(case["ratio"]).requires_grad_()
    ratio = ratio_of(new, tensor(0.0))
    result = clipped_objective(ratio, tensor(case["advantage"]), LOW, HIGH, case.get("dual"))
    result.sum().backward()
    assert result.item() == pytest.approx(case["objective"])
    assert new.grad.item() == pytest.approx(case["slope"])


@pytest.mark.parametrize("case", VECTORS["cispo"])
def test_cispo_clips_the_weight_and_keeps_the_slope(case: dict[str, Any]) -> None:
    new = tensor(case["new"]).requires_grad_()
    ratio = ratio_of(new, new.detach() - math.log(case["ratio"]))
    result = cispo_objective(new, ratio, tensor(case["advantage"]), LOW, HIGH)
    result.sum().backward()
    assert result.item() == pytest.approx(case["objective"])
    assert new.grad.item() == pytest.approx(case["slope"])


@pytest.mark.parametrize("case", VECTORS["gspo"])
def test_gspo_has_one_ratio_for_a_sequence(case: dict[str, Any]) -> None:
    new = logs(*case["ratios"]) - 3
    result = gspo_ratio(new, torch.full_like(new, -3), torch.tensor(case["sample"]))
    assert result.tolist() == pytest.approx(case["sequence_ratio"])


@pytest.mark.parametrize("case", VECTORS["importance_weight"])
def test_importance_weights_are_truncated(case: dict[str, Any]) -> None:
    old = (logs(case["ratio"]) - 1).requires_grad_()
    result = importance_weight(old, tensor(-1.0), case["cap"])
    assert result.item() == pytest.approx(case["weight"])
    assert not result.requires_grad


@pytest.mark.parametrize("case", VECTORS["k3"])
def test_k3(case: dict[str, Any]) -> None:
    """The ratio is new / other, because the tokens are samples of new."""
    assert k3(logs(case["ratio"]), tensor(0.0)).item() == pytest.approx(case["value"])


def test_k3_is_unbiased() -> None:
    new, second = tensor(0.5, 0.3, 0.2), tensor(0.2, 0.3, 0.5)
    kl = (new * (new / second).log()).sum()
    assert (new * k3(new.log(), second.log())).sum().item() == pytest.approx(kl.item())


def test_gradient_of_k3_is_that_of_the_reverse_direction() -> None:
    """On samples of the policy, whose probabilities have no gradient in the loss."""
    logits, second = tensor(0.4, -1.0, 0.3).requires_grad_(), tensor(0.2, 0.3, 0.5)
    new = logits.log_softmax(0)
    (slope,) = torch.autograd.grad((new.exp().detach() * k3(new, second.log())).sum(), logits)
    new = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((second * (second.log() - new)).sum(), logits)
    assert slope.tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize("case", VECTORS["supervised"])
def test_supervised_loss_and_its_slope(case: dict[str, Any]) -> None:
    new = tensor(*case["new"]).requires_grad_()
    loss = supervised_loss(new, tensor(*case["weight"]))
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"])
    assert new.grad.tolist() == pytest.approx(case["slope"])


@pytest.mark.parametrize("case", VECTORS["policy_loss"], ids=lambda case: case["about"][:40])
def test_loss_of_a_micro_batch(case: dict[str, Any]) -> None:
    new = torch.full((len(case["ratio"]),), -2.0, dtype=torch.float64)
    old = new - logs(*case["ratio"])
    reference = case.get("reference_ratio")
    batch = LossInput(
        new=new,
        old=old,
        engine=old - logs(*case["tis"]),
        advantage=tensor(*case["advantage"]),
        weight=tensor(*case["weight"]),
        sample=torch.tensor(case["sample"]),
        entropy=tensor(*case["entropy"]),
        reference=None if reference is None else new - logs(*reference),
    )
    loss, sums = policy_loss(batch, LossSettings(**case["settings"]))
    assert loss.item() == pytest.approx(case["loss"])
    result = {name: value.item() for name, value in sums.items()}
    assert {name: result[name] for name in case["sums"]} == pytest.approx(case["sums"])


def test_mismatch_is_between_engine_and_policy() -> None:
    zeros = tensor(0.0)
    batch = LossInput(
        new=logs(0.5), old=zeros, engine=zeros, advantage=zeros, weight=zeros,
        sample=torch.tensor([0]), entropy=zeros,
    )  # fmt: skip
    _, sums = policy_loss(batch, LossSettings())
    assert sums["mismatch_kl"].item() == pytest.approx(0.5 + math.log(2) - 1)


@pytest.mark.parametrize("kind", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("gap", [-500.0, 500.0])
def test_no_gap_however_wide_makes_a_gradient_infinite(kind: Any, gap: float) -> None:
    new = torch.tensor([-1.0, -1.0], requires_grad=True)
    batch = LossInput(
        new=new, old=new.detach() + gap, engine=new.detach() - gap,
        advantage=torch.tensor([1.0, -1.0]), weight=torch.tensor([0.5, 0.5]),
        sample=torch.tensor([0, 1]), entropy=torch.zeros(2), reference=new.detach() + gap,
    )  # fmt: skip
    loss, sums = policy_loss(batch, LossSettings(kind=kind, kl_coef=0.1))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(new.grad).all()
    assert all(torch.isfinite(value) for value in sums.values())


def test_grpo_at_ratio_one_is_the_policy_gradient() -> None:
    """Only the gradient is checked: sum(weight * A * d log pi)."""
    new = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantage, weight = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.2, 0.3, 0.5])
    batch = LossInput(
        new=new, old=new.detach(), engine=new.detach(), advantage=advantage, weight=weight,
        sample=torch.tensor([0, 1, 2]), entropy=torch.zeros(3),
    )  # fmt: skip
    policy_loss(batch, LossSettings())[0].backward()
    assert new.grad.tolist() == pytest.approx((-weight * advantage).tolist())
