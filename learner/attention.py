"""Attention over packed samples whose cost is the sum of the samples' costs.

transformers' own "sdpa" masks samples from each other, so its time grows with the square of the
micro-batch: packing sixteen samples costs sixteen times the attention. Here each sample attends
only to itself, in one of two forms:

    varlen       on a GPU, in bfloat16 or float16: torch's varlen_attn, FlashAttention's kernel for
                 all samples in one call
    by sample    elsewhere: a call of torch's scaled_dot_product_attention for each sample

A model's layers get the `arguments` of a micro-batch, computed once for all of them. They tell
torch's compiler nothing about the samples that it would compile the layers again for.

If flash-attn is installed, its kernel is transformers' "flash_attention_2", which does not use this
module.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from agentloop.learner.world import to_device

__all__ = [
    "BY_SAMPLE",
    "PACKED",
    "SEGMENTED",
    "arguments",
    "gpu_has_kernel",
    "packed_attention",
    "register",
    "varlen_runs_on",
]

PACKED = "packed"
BY_SAMPLE = "packed_by_sample"
SEGMENTED = (PACKED, BY_SAMPLE)
"""Names of the implementations here, which a model passes the lengths of its samples."""

_MAX_HEAD_DIM = 256  # FlashAttention's
_MIN_CAPABILITY = (8, 0)  # Ampere


def arguments(segments: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """Return what a model passes to the attention of its layers, for samples of these lengths."""
    if device.type != "cuda":
        return {"segments": segments}
    return {"segments": segments, "starts": _starts(segments, device), "longest": max(segments)}


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Sequence[int],
    starts: Tensor | None = None,
    longest: int = 0,
    scaling: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each of `segments`, lengths that sum to L, by the faster form.

    query is [1, heads, L, D]; key and value are [1, heads or fewer, L, D]. `starts` and `longest`
    are as `arguments` returns them. Returns [1, L, heads, D] and None: the interface of an
    attention function in transformers.

    Raises:
        NotImplementedError: The model needs more than causal attention.
    """
    _check_supported(attention_mask, segments, **more)
    if dropout or not varlen_runs_on(query):
        return _by_sample(query, key, value, segments, scaling, dropout), None
    if starts is None:
        starts, longest = _starts(tuple(segments), query.device), max(segments)
    return _varlen(query, key, value, starts, longest, scaling), None


def attention_by_sample(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Sequence[int],
    scaling: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    """Like `packed_attention`, always one sample at a time: what the other form is compared
    with."""
    _check_supported(attention_mask, segments, **more)
    return _by_sample(query, key, value, segments, scaling, dropout), None


def varlen_runs_on(query: Tensor) -> bool:
    """Return whether torch's kernel for packed samples supports tensors like this one."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] <= _MAX_HEAD_DIM
        and gpu_has_kernel()
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch is Any to mypy
def gpu_has_kernel() -> bool:
    """Return whether this process's GPU has torch's kernel for packed samples."""
    available: bool = torch.backends.cuda.is_flash_attention_available()
    return available and torch.cuda.get_device_capability() >= _MIN_CAPABILITY


def _check_supported(
    attention_mask: Tensor | None,
    segments: Sequence[int],
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> None:
    if attention_mask is not None or softcap or s_aux is not None:
        raise NotImplementedError(
            "packed attention supports no mask, softcap or sinks: set another learner.attention"
        )
    if sliding_window and max(segments) > sliding_window:
        raise NotImplementedError(
            f"packed attention supports no sliding window of {sliding_window}"
        )


def _by_sample(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Sequence[int],
    scaling: float | None,
    dropout: float,
) -> Tensor:
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
    return torch.cat(outputs, 2).transpose(1, 2).contiguous()


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scaling: float | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": (-1, 0)}  # causal
    if _must_allow_fewer_keys():
        options["enable_gqa"] = True
    heads_last = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    out: Tensor = varlen_attn(
        *heads_last, starts, starts, longest, longest, scale=scaling, **options
    )
    return out[None]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _must_allow_fewer_keys() -> bool:
    """Return whether torch's kernel takes fewer keys than queries only if allowed to.

    torch 2.11 has no such argument, and its kernel takes them.
    """
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


@lru_cache(maxsize=4)
def _starts(segments: tuple[int, ...], device: torch.device) -> Tensor:
    """Return where each segment starts, and the end of the last: int32 [segments + 1].

    All layers of a model share it.
    """
    edges = torch.tensor([0, *segments], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return to_device(edges, device)


def register() -> None:
    """Register the implementations with transformers under their names."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)
    AttentionInterface.register(BY_SAMPLE, attention_by_sample)
