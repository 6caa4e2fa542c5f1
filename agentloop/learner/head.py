"""The output layer: log-probabilities and entropies of the targets, by few passes over the logits.

torch's compiler, where it is used, makes one pass of several operations, here and in the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from agentloop.learner.attention import PACKED, gpu_has_kernel
from agentloop.training.learner_client.settings import LearnerSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Scores: TypeAlias = tuple[Tensor, Tensor]
"""Log-probabilities and entropies of M sampled tokens, each float32 [M]."""


def uses_compiler(settings: LearnerSettings) -> bool:
    """Return whether torch's compiler is used.

    It is where packed attention has a kernel: any other form would be compiled again for other
    lengths of samples. It cannot trace the hooks of ZeRO 3. torch's own variable
    TORCH_COMPILE_DISABLE=1 turns it off.
    """
    return (
        settings.zero_stage < 3
        and settings.attention == PACKED
        and settings.dtype == "bfloat16"
        and torch.cuda.is_available()
        and gpu_has_kernel()
    )


def compile_layers(model: PreTrainedModel) -> None:
    """Let torch compile the model's layers when they first run.

    Their norms, rotations and activations are bound by memory; the compiler fuses them, which
    takes a fraction of the time. A layer that cannot be compiled runs as it is.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    torch._dynamo.config.suppress_errors = True
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile(dynamic=True)


class Head(torch.nn.Module):  # type: ignore[misc]  # mypy skips torch
    """The output layer, computed in chunks, so that at most `chunk` rows of logits exist.

    The backward pass recomputes them. It is called as one module, so that ZeRO 3 gathers the weight
    once, and equally often on all ranks.
    """

    def __init__(self, output: torch.nn.Linear, settings: LearnerSettings) -> None:
        super().__init__()
        self.weight, self.bias = output.weight, output.bias
        self._chunk = settings.head_chunk_tokens
        self._temperature = settings.temperature
        self._entropy_grad = settings.loss.entropy_coef > 0
        self._compiled = uses_compiler(settings)

    def forward(
        self, hidden_MH: Tensor, targets_M: Tensor, kept_MK: Tensor | None = None
    ) -> Scores:
        if len(hidden_MH) <= self._chunk:  # recomputing would save no memory
            return self._score(hidden_MH, targets_M, kept_MK)
        hidden, targets = hidden_MH.split(self._chunk), targets_M.split(self._chunk)
        kept = [None] * len(hidden) if kept_MK is None else kept_MK.split(self._chunk)
        options = {"use_reentrant": False, "preserve_rng_state": False}
        chunks = zip(hidden, targets, kept, strict=True)
        scored = [checkpoint(self._score, *chunk, **options) for chunk in chunks]
        logprobs, entropies = zip(*scored, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _score(self, hidden: Tensor, targets: Tensor, kept: Tensor | None) -> Scores:
        options = (self._temperature, self._entropy_grad)
        if kept is None and self._compiled:
            return _compiled_scores()(hidden, self.weight, self.bias, targets, *options)
        logits = functional.linear(hidden, self.weight, self.bias)
        if kept is None:
            return scores_of(logits, targets, *options)
        return kept_scores_of(logits, targets, kept, *options)


def scores_of(
    logits: Tensor, targets: Tensor, temperature: float, entropy_grad: bool = False
) -> Scores:
    """Return the log-probabilities of the targets and the entropies of their distributions."""
    table = logits.float()
    if temperature != 1:  # for a small model each pass over the logits is costly
        table = table / temperature
    table = table.log_softmax(-1)
    logprobs = -functional.nll_loss(table, targets, reduction="none")
    weighted = table if entropy_grad else table.detach()
    return logprobs, -torch.linalg.vecdot(weighted.exp(), weighted)


def kept_scores_of(
    logits: Tensor, targets: Tensor, kept: Tensor, temperature: float, entropy_grad: bool = False
) -> Scores:
    """Return the same of the distributions over the kept ids only.

    Args:
        kept: int32 [M, K], filled up with -1, the targets among them; a row of -1 only has the
            whole distribution.
    """
    is_kept = kept >= 0
    table = logits.gather(-1, kept.clamp(min=0).long()).float()
    if temperature != 1:
        table = table / temperature
    table = table.masked_fill(~is_kept, torch.finfo(table.dtype).min).log_softmax(-1)
    weighted = table if entropy_grad else table.detach()
    logprobs = torch.where(kept == targets[:, None], table, 0).sum(-1)
    entropies = -torch.linalg.vecdot(weighted.exp(), weighted)
    is_whole = ~is_kept[:, 0]
    if is_whole.any():  # tokens from before the distribution was cut
        whole = scores_of(logits, targets, temperature, entropy_grad)
        logprobs = torch.where(is_whole, whole[0], logprobs)
        entropies = torch.where(is_whole, whole[1], entropies)
    return logprobs, entropies


def _fusible_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    entropy_grad: bool,
) -> Scores:
    """Compute the same from the logits in two passes, and in the backward pass in one.

    Between the passes only the logits and two numbers of each row are kept. A target is found by
    comparison, because to gather it would need a table of gradients as large as the logits.
    """
    table = functional.linear(hidden, weight, bias).float()
    if temperature != 1:
        table = table / temperature
    table = table - table.detach().amax(-1, keepdim=True)
    weights = table.exp()
    total = weights.sum(-1)
    is_target = torch.arange(table.shape[-1], device=table.device) == targets[:, None]
    logprobs = torch.where(is_target, table, 0).sum(-1) - total.log()
    if not entropy_grad:
        table, weights, total = table.detach(), weights.detach(), total.detach()
    return logprobs, total.log() - (weights * table).sum(-1) / total


@cache
def _compiled_scores() -> Callable[..., Scores]:
    """Return `_fusible_scores`, compiled.

    The weight is compiled into it: of a parameter the compiler knows the shape, and code for any
    size of the vocabulary would be slower.
    """
    compiled: Callable[..., Scores] = torch.compile(_fusible_scores, dynamic=True)
    return compiled
