"""Policy losses: pure functions of log-probabilities.

Unless stated otherwise, all tensors are float32 [M], one entry per sampled token:

    new        the policy's log-probabilities, with gradient
    old        log-probabilities in the denominator of the ratio
    engine     log-probabilities reported by the inference engine when it sampled
    advantage  the token's advantage
    weight     weight of the token in the loss; the weights of a whole update sum to 1
    sample     int64 [M], index of the token's sample, from 0

The `*_objective` functions return the quantity to maximise per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentloop.training.learner_client.settings import LossSettings

# exp(20) is 5e8: beyond any clip, and it avoids an overflow into 0 * inf.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class LossInput:
    """A micro-batch, with tensors as described at the top; `entropy` and `reference` where used."""

    new: Tensor
    old: Tensor
    engine: Tensor
    advantage: Tensor
    weight: Tensor
    sample: Tensor
    entropy: Tensor
    reference: Tensor | None = None


def ratio_of(new: Tensor, old: Tensor) -> Tensor:
    """Return exp(new - old), with the exponent clamped to [-20, 20]."""
    return torch.exp((new - old).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def clipped_objective(
    ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None = None
) -> Tensor:
    """Return min(r A, clip(r, 1 - low, 1 + high) A).

    PPO (arXiv 1707.06347), with asymmetric bounds as in DAPO (arXiv 2503.14476). With `dual` = c
    and A < 0 the result is at least c A (arXiv 1912.09729).
    """
    objective = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    if dual is None:
        return objective
    return torch.where(advantage < 0, torch.maximum(objective, dual * advantage), objective)


def gspo_ratio(new: Tensor, old: Tensor, sample: Tensor) -> Tensor:
    """Return exp(mean over the sample's tokens of (new - old)) for each of its tokens.

    GSPO (arXiv 2507.18071). All tokens of a sample must be in the same micro-batch, and have the
    same advantage.
    """
    num_samples = int(sample.max()) + 1 if sample.numel() else 0
    zeros = torch.zeros(num_samples, dtype=new.dtype, device=new.device)
    sums = zeros.index_add(0, sample, new - old)
    counts = zeros.index_add(0, sample, torch.ones_like(new)).clamp(min=1)
    mean = (sums / counts).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return torch.exp(mean)[sample]


def cispo_objective(
    new: Tensor, ratio: Tensor, advantage: Tensor, low: float, high: float
) -> Tensor:
    """Return sg(clip(r, 1 - low, 1 + high)) A log pi.

    CISPO (arXiv 2506.13585): the weight is clipped, and no token loses its gradient. The paper
    leaves the lower bound open (low = 1).
    """
    return ratio.clamp(1 - low, 1 + high).detach() * advantage * new


def importance_weight(old: Tensor, engine: Tensor, cap: float | None) -> Tensor:
    """Return min(exp(old - engine), cap) without gradient; 1 without a cap.

    Truncated importance sampling corrects for the numerical mismatch of engine and learner.
    """
    if cap is None:
        return torch.ones_like(old)
    return ratio_of(old, engine).clamp(max=cap).detach()


def k3(new: Tensor, reference: Tensor) -> Tensor:
    """Return exp(d) - d - 1 with d = reference - new.

    On samples of new, its value is an unbiased estimate of KL(new || reference), and never negative
    (Schulman, "Approximating KL Divergence", k3). Its gradient there is that of the other
    direction, KL(reference || new): the samples' own dependence on new is left out. Samples of an
    older policy are not reweighted. GRPO (arXiv 2402.03300, eq. 4) adds it to the loss; verl's
    low_var_kl and TRL's beta are the same.
    """
    d = (reference - new).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return torch.expm1(d) - d  # expm1 stays exact where both nearly agree, the usual case


def supervised_loss(new: Tensor, weight: Tensor) -> Tensor:
    """Return -sum(weight * new), the mean negative log-likelihood.

    Advantages and the engine's log-probabilities are not used.
    """
    return -(weight * new).sum()


def policy_loss(batch: LossInput, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and a dict of sums over the tokens for metrics.

    The loss is sum(weight * (-tis * objective + kl_coef * k3 - entropy_coef * entropy)). The sums
    are unweighted and without gradient:

        ratio, clipped (the clip removes the gradient, or bounds the weight), tis,
        tis_capped, entropy, kl, mismatch_kl (from the engine, at sampling, to the current policy)

    Kind sft uses `supervised_loss` and reports only the entropy.
    """
    s = settings
    if s.kind == "sft":
        return supervised_loss(batch.new, batch.weight), {"entropy": batch.entropy.detach().sum()}
    if s.kind == "gspo":
        ratio = gspo_ratio(batch.new, batch.old, batch.sample)
    else:
        ratio = ratio_of(batch.new, batch.old)
    if s.kind == "cispo":
        objective = cispo_objective(batch.new, ratio, batch.advantage, s.clip_low, s.clip_high)
    else:
        objective = clipped_objective(ratio, batch.advantage, s.clip_low, s.clip_high, s.dual_clip)
    tis = importance_weight(batch.old, batch.engine, s.tis_cap or None)
    per_token = -tis * objective
    kl = torch.zeros_like(batch.new)
    if batch.reference is not None:
        kl = k3(batch.new, batch.reference)
        per_token = per_token + s.kl_coef * kl
    if s.entropy_coef:
        per_token = per_token - s.entropy_coef * batch.entropy
    with torch.no_grad():
        sums = {
            "ratio": ratio.sum(),
            "clipped": _is_clipped(ratio, batch.advantage, s).sum(),
            "tis": tis.sum(),
            "tis_capped": (tis >= s.tis_cap).sum() if s.tis_cap else tis.sum() * 0,
            "entropy": batch.entropy.sum(),
            "mismatch_kl": k3(batch.engine, batch.new).sum(),
            "kl": kl.sum(),
        }
    return (batch.weight * per_token).sum(), sums


def _is_clipped(ratio: Tensor, advantage: Tensor, s: LossSettings) -> Tensor:
    above, below = ratio > 1 + s.clip_high, ratio < 1 - s.clip_low
    if s.kind == "cispo":
        return above | below
    clipped = ((advantage > 0) & above) | ((advantage < 0) & below)
    if s.dual_clip is not None:
        clipped |= (advantage < 0) & (ratio > s.dual_clip)
    return clipped
