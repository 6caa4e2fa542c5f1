"""Attention over packed samples whose cost is the sum of the samples' costs.

transformers' own "sdpa" masks samples from each other, so its time grows with the square of the
micro-batch: packing sixteen samples costs sixteen times the attention. Here each sample is a
separate call of torch's kernel. flash-attn's kernel takes all of them in one call; it is
transformers' own `attention = "flash_attention_2"` and does not use this module.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["PACKED", "packed_attention", "register"]

PACKED = "packed"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Sequence[int],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention within each of `segments`, lengths that sum to L.

    query is [1, heads, L, D]; key and value are [1, heads or fewer, L, D]. Returns [1, L, heads, D]
    and None: the interface of an attention function in transformers.

    Raises:
        NotImplementedError: The model needs more than causal attention.
    """
    if attention_mask is not None or softcap or s_aux is not None:
        raise NotImplementedError(
            "packed attention supports no mask, softcap or sinks: set another learner.attention"
        )
    if sliding_window and max(segments) > sliding_window:
        raise NotImplementedError(
            f"packed attention supports no sliding window of {sliding_window}"
        )
    pieces = zip(
        query.split(segments, 2), key.split(segments, 2), value.split(segments, 2), strict=True
    )
    outputs = [
        functional.scaled_dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            scale=scaling,
            dropout_p=dropout,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        for q, k, v in pieces
    ]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def register() -> None:
    """Register this attention with transformers under the name `packed`."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)
