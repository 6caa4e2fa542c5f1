"""Attention over packed samples whose cost is the sum of the samples' costs.

transformers' own "sdpa" masks samples from each other, so its time grows with the square of the
micro-batch: packing sixteen samples costs sixteen times the attention. Here each segment of a
micro-batch (batch.py) attends to itself and to the segments that it continues, in one of two forms:

    varlen       on a GPU, in bfloat16 or float16: torch's varlen_attn, FlashAttention's kernel for
                 all segments in one call, each with a copy of the keys that it attends to
    by sample    elsewhere: a call of torch's scaled_dot_product_attention for each sample; where
                 samples share tokens, on a CPU alone, a call for each segment, and one for all that
                 continues it

A model's layers get the `arguments` of a micro-batch, computed once for all of them. They tell
torch's compiler nothing about the samples that it would compile the layers again for.

If flash-attn is installed, its kernel is transformers' "flash_attention_2", which does not use this
module.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from agentloop.learner.batch import PackedSegment
from agentloop.learner.world import to_device
from agentloop.training.learner_client.settings import LearnerSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "BY_SAMPLE",
    "PACKED",
    "SEGMENTED",
    "arguments",
    "gpu_has_kernel",
    "packed_attention",
    "register",
    "varlen_runs_on",
    "why_not_shared",
]

PACKED = "packed"
BY_SAMPLE = "packed_by_sample"
SEGMENTED = (PACKED, BY_SAMPLE)
"""Names of the implementations here, which a model passes the segments of a micro-batch."""

_MAX_HEAD_DIM = 256  # FlashAttention's
_MIN_CAPABILITY = (8, 0)  # Ampere


@lru_cache(maxsize=4)
def arguments(segments: tuple[PackedSegment, ...], device: torch.device) -> Mapping[str, Any]:
    """Return what a model passes to the attention of its layers, for these segments.

    most_queries, most_keys: the most tokens of a segment; the most that any token attends to.
    starts, key_starts: int32 [segments + 1]: where a segment's queries and keys start; on a GPU.
    keys: int64: the keys of all segments; None if they are the tokens, one after the other.
    """
    keys: list[Tensor] = []
    path: list[PackedSegment] = []
    for segment in segments:
        while path and path[-1].last <= segment.start:
            path.pop()
        path.append(segment)
        keys.append(torch.cat([torch.arange(start, end) for start, end, _ in path]))
    nums_keys = [len(each) for each in keys]
    given = {"segments": segments, "most_keys": max(nums_keys)}
    if device.type == "cpu":
        return given
    shares = sum(nums_keys) > segments[-1].end
    return given | {
        "most_queries": max(end - start for start, end, _ in segments),
        "starts": _on(device, [0, *(end for _, end, _ in segments)]),
        "key_starts": _on(device, [0, *itertools.accumulate(nums_keys)]),
        "keys": to_device(torch.cat(keys), device) if shares else None,
    }


def _on(device: torch.device, edges: Sequence[int]) -> Tensor:
    return to_device(torch.tensor(edges, dtype=torch.int32), device)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each segment to itself and to what it continues, by the faster form.

    query is [1, heads, L, D]; key and value are [1, heads or fewer, L, D]. Further arguments are
    those that `arguments` returns. Returns [1, L, heads, D] and None: the interface of an attention
    function in transformers.

    Raises:
        NotImplementedError: The model needs more than causal attention.
    """
    _check_supported(attention_mask, **more)
    if dropout or not varlen_runs_on(query):
        return _by_sample(query, key, value, more["segments"], scaling, dropout), None
    return _varlen(query, key, value, scaling, **more), None


def attention_by_sample(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    """Like `packed_attention`, always one sample at a time: what the other form is compared
    with."""
    _check_supported(attention_mask, **more)
    return _by_sample(query, key, value, more["segments"], scaling, dropout), None


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
    *,
    most_keys: int,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> None:
    if attention_mask is not None or softcap or s_aux is not None:
        raise NotImplementedError(
            "packed attention supports no mask, softcap or sinks: set another learner.attention"
        )
    if sliding_window and most_keys > sliding_window:
        raise NotImplementedError(
            f"packed attention supports no sliding window of {sliding_window}"
        )


def _by_sample(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Sequence[PackedSegment],
    scaling: float | None,
    dropout: float,
) -> Tensor:
    if any(last > end for _, end, last in segments):
        shared: Tensor = _SharedAttention.apply(query, key, value, segments, scaling)
        return shared.transpose(1, 2)
    lengths = [end - start for start, end, _ in segments]
    pieces = zip(
        query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True
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


class _SharedAttention(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to mypy
    """Attention of segments on a CPU, by torch's own kernel for blocks of queries and keys.

    A segment's queries meet their keys in several blocks. The outputs of blocks are added with the
    shares that they have in the softmax over all keys, which their log-sum-exps give. With the
    log-sum-exp over all keys, the kernel's backward pass of a block gives its part of the
    gradients, as in ring attention (arXiv 2310.01889).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: Sequence[PackedSegment],
        scaling: float | None,
    ) -> Tensor:
        # Like the kernel's own output: heads last in memory.
        output = query.new_empty(query.transpose(1, 2).shape, dtype=torch.float32).transpose(1, 2)
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        for rows, columns, causal in _blocks(segments):
            part, part_sums = _KERNEL(
                query[:, :, rows],
                key[:, :, columns],
                value[:, :, columns],
                is_causal=causal,
                scale=scaling,
            )
            if causal:  # the first block of these rows
                output[:, :, rows], sums[:, :, rows] = part, part_sums
                continue
            before = sums[:, :, rows]
            after = torch.logaddexp(before, part_sums)
            output[:, :, rows] *= (before - after).exp()[..., None]
            output[:, :, rows] += part * (part_sums - after).exp()[..., None]
            sums[:, :, rows] = after
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.segments, ctx.scaling = segments, scaling
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        grads = [torch.zeros_like(each, dtype=torch.float32) for each in (query, key, value)]
        for rows, columns, causal in _blocks(ctx.segments):
            parts = _KERNEL_BACKWARD(
                grad[:, :, rows],
                query[:, :, rows],
                key[:, :, columns],
                value[:, :, columns],
                output[:, :, rows],
                sums[:, :, rows],
                dropout_p=0.0,
                is_causal=causal,
                scale=ctx.scaling,
            )
            for total, part, where in zip(grads, parts, (rows, columns, columns), strict=True):
                total[:, :, where] += part
        return *(total.to(query.dtype) for total in grads), None, None


_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _blocks(segments: Sequence[PackedSegment]) -> Iterator[tuple[slice, slice, bool]]:
    """Yield blocks of queries and keys, and whether attention in them is causal or full."""
    for start, end, _ in segments:
        yield slice(start, end), slice(start, end), True
    for start, end, last in segments:
        if last > end:
            yield slice(end, last), slice(start, end), False


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    *,
    starts: Tensor,
    key_starts: Tensor,
    most_queries: int,
    most_keys: int,
    keys: Tensor | None,
    **_: Any,
) -> Tensor:
    heads_last = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    edges = (starts, key_starts, most_queries, most_keys)
    if keys is None:
        return _attend_varlen(heads_last, edges, scaling)[None]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        copies = key.index_select(0, keys), value.index_select(0, keys)
        return _attend_varlen([query, *copies], edges, scaling)

    # The backward pass makes the copies again: kept, they could take more memory than all else.
    output = checkpoint(attend, *heads_last, use_reentrant=False, preserve_rng_state=False)
    return output[None]


def _attend_varlen(
    heads_last: Sequence[Tensor], edges: tuple[Tensor, Tensor, int, int], scaling: float | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # Causal: the last query of a segment attends to all of its keys.
    options: dict[str, Any] = {"window_size": (-1, 0), "scale": scaling}
    if _must_allow_fewer_keys():
        options["enable_gqa"] = True
    output: Tensor = varlen_attn(*heads_last, *edges, **options)
    return output


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _must_allow_fewer_keys() -> bool:
    """Return whether torch's kernel takes fewer keys than queries only if allowed to.

    torch 2.11 has no such argument, and its kernel takes them.
    """
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def why_not_shared(model: PreTrainedModel, settings: LearnerSettings, device: str) -> str | None:
    """Return why samples of this model must not share tokens, or None if they may."""
    if settings.attention not in SEGMENTED:
        return f"learner.attention = {settings.attention} finds samples by their positions"
    if device != "cpu" and not (
        settings.attention == PACKED and settings.dtype == "bfloat16" and gpu_has_kernel()
    ):
        return "on a GPU it needs learner.attention = packed, bfloat16 and torch's varlen_attn"
    config = model.config.to_dict()
    for name, value in config.items():
        if ("drop" in name or "jitter" in name) and isinstance(value, float) and value:
            return f"the model has a {name} of {value}, which is random for each sample"
    if config.get("v_head_dim") not in (None, config.get("qk_head_dim")):
        return "its heads have values and keys of different sizes"
    others = {*(config.get("layer_types") or ())} - {"full_attention", "sliding_attention"}
    if others or any(isinstance(module, nn.Conv1d) for module in model.modules()):
        return "its layers pass on a state from token to token"
    return None


def register() -> None:
    """Register the implementations with transformers under their names."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)
    AttentionInterface.register(BY_SAMPLE, attention_by_sample)
