"""Routing replay: a mixture-of-experts model trains on the experts that the servers used.

A router picks the experts with the largest logits. Where two are nearly equal, rounding decides,
and the learner would send a token to other experts than the server that sampled it: its
log-probability is then that of another network. Here routers pick the recorded experts. Their
weights are still computed from the learner's logits, so that routers are trained as well.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from agentloop.errors import ModelError
from agentloop.learner.batch import Batch
from agentloop.learner.errors import BatchError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Routers of transformers that return (logits, weights, experts) of tokens, where the weights are
# the softmax over all experts, at those chosen.
_ROUTERS = ("Qwen3MoeTopKRouter",)
_Routing: TypeAlias = tuple[Tensor, Tensor, Tensor]


class RoutingReplay:
    """Replaces the experts that a model's routers choose.

    Attributes:
        experts: int16 [L, width]: the experts of the tokens of the forward pass, and of the
            backward pass after it if that recomputes activations; as many for each layer of the
            model, with or without a router. -1: the router chooses. None: it does for all tokens.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Take over the model's routers.

        Raises:
            ModelError: It has none of a known kind.
        """
        self.experts: Tensor | None = None
        config = model.config.get_text_config()
        routers = [
            (int(re.findall(r"\.layers\.(\d+)\.", name)[0]), module)
            for name, module in model.named_modules()
            if type(module).__name__ in _ROUTERS
        ]
        if not routers:
            raise ModelError(
                f"learner.routing_replay: {type(model).__name__} ({config.model_type}) has no "
                f"experts, or routers of an unknown kind; known: {', '.join(_ROUTERS)}"
            )
        self._top_k: int = config.num_experts_per_tok
        self._width: int = config.num_hidden_layers * self._top_k
        self._num_experts: int = config.num_experts
        for layer, router in routers:
            router.register_forward_hook(partial(self._route, layer * self._top_k))

    def check(self, batch: Batch) -> None:
        """Check that the experts of a batch are the model's.

        Raises:
            BatchError: They are not.
        """
        if batch.experts is None or batch.expert_counts is None or not batch.experts.size:
            return
        width, expert = int(batch.expert_counts.max()), int(batch.experts.max())
        if width != self._width or expert >= self._num_experts:
            raise BatchError(
                f"experts: {width} of a token, up to number {expert}; the model sends one to "
                f"{self._width}, in all layers, and has {self._num_experts} in each"
            )

    def _route(self, first: int, router: torch.nn.Module, _: object, own: _Routing) -> _Routing:
        logits, _weights, chosen = own
        if self.experts is None:
            return own
        recorded = self.experts[:, first : first + self._top_k].long()
        experts = torch.where(recorded >= 0, recorded, chosen)
        weights = logits.softmax(-1, dtype=torch.float).gather(-1, experts)
        if router.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), experts
