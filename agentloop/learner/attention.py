"""Attention over packed samples whose cost is the sum of the samples' costs.

transformers' own "sdpa" masks samples from each other, so its time grows with the square of the
micro-batch: packing sixteen samples costs sixteen times the attention. Here each segment of a
micro-batch (batch.py) attends to itself and to the segments that it continues, in one of two forms:

    flash        on a GPU, in bfloat16 or float16: FlashAttention's kernel for all segments in one
                 call, and one more for each level of segments that they continue (flash.py)
    by sample    elsewhere: a call of torch's scaled_dot_product_attention for each sample; where
                 samples share tokens, on a CPU alone, a call for each segment, and one for all that
                 continues it

A model's layers get the `arguments` of a micro-batch, computed once for all of them, and
layers that pass on a state from token to token the `state_arguments`.

If flash-attn is installed, its kernel is transformers' "flash_attention_2", which does not use this
module.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from agentloop.learner import flash
from agentloop.learner.batch import PackedSegment, paths
from agentloop.training.learner_client.settings import LearnerSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKED = "packed"
"""Name of the implementation here, which a model passes the segments of a micro-batch."""

_MAX_HEAD_DIM = 256  # FlashAttention's
_MIN_CAPABILITY = (8, 0)  # Ampere


@lru_cache(maxsize=4)
def arguments(segments: tuple[PackedSegment, ...], device: torch.device) -> Mapping[str, Any]:
    """Return what a model passes to the attention of its layers, for these segments.

    On a GPU these are also `flash.edges_of` the segments. `most_attended` is the number of tokens
    that the last one of the longest sample attends to.
    """
    most_attended = max(sum(end - start for start, end, _ in path) for path in paths(segments))
    edges = {} if device.type == "cpu" else flash.edges_of(segments, device)
    return {"segments": segments, "most_attended": most_attended} | edges


@lru_cache(maxsize=4)
def state_arguments(
    segments: tuple[PackedSegment, ...], device: torch.device
) -> Mapping[str, object]:
    """Return what tells layers with a state where samples begin; the segments must be samples.

    transformers' kernels for a GPU read it. Its code in plain torch ignores it, which a learner
    notices as it starts.
    """
    lengths = [end - start for start, end, _ in segments]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    samples = torch.arange(len(lengths), dtype=torch.int32)
    return {
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "seq_idx": samples.repeat_interleave(torch.tensor(lengths))[None].to(device),
    }


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
    _check_supported(module, attention_mask, **more)
    if dropout or not flash_runs_on(query):
        return attention_by_sample(query, key, value, more["segments"], scaling, dropout), None
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return flash.attend(query, key, value, scaling, **more)[None], None


def flash_runs_on(query: Tensor) -> bool:
    """Return whether torch's FlashAttention supports tensors like this one."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] <= _MAX_HEAD_DIM
        and gpu_has_kernel()
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # mypy skips torch
def gpu_has_kernel() -> bool:
    """Return whether this process's GPU has torch's FlashAttention."""
    available: bool = torch.backends.cuda.is_flash_attention_available()
    return available and torch.cuda.get_device_capability() >= _MIN_CAPABILITY


def _check_supported(
    module: nn.Module,
    attention_mask: Tensor | None,
    *,
    most_attended: int,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> None:
    if attention_mask is not None or softcap or s_aux is not None:
        raise NotImplementedError(
            "packed attention supports no mask, softcap or sinks: set another learner.attention"
        )
    if sliding_window and most_attended > sliding_window:
        raise NotImplementedError(
            f"packed attention supports no sliding window of {sliding_window}"
        )
    chunk = getattr(getattr(module, "config", None), "attention_chunk_size", None)
    if chunk and most_attended > chunk:
        raise NotImplementedError(f"packed attention supports no chunks of {chunk} tokens")


def attention_by_sample(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Sequence[PackedSegment],
    scaling: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return the attention of segments, [1, L, heads, D], one sample at a time."""
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


class _SharedAttention(torch.autograd.Function):  # type: ignore[misc]  # mypy skips torch
    """Attention of segments on a CPU, by torch's own kernel for blocks of queries and keys.

    A segment's queries meet their keys in several blocks. The outputs of blocks are added with the
    shares that they have in the softmax over all keys, which their log-sum-exps give. With the
    log-sum-exp over all keys, the kernel's backward pass of a block gives its part of the
    gradients, as in ring attention (arXiv 2310.01889).
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
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
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
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


def why_not_shared(model: PreTrainedModel, settings: LearnerSettings, device: str) -> str | None:
    """Return why samples of this model must not share tokens, or None if they may."""
    if settings.attention != PACKED:
        return f"learner.attention = {settings.attention} finds samples by their positions"
    if device != "cpu" and not (settings.dtype == "bfloat16" and gpu_has_kernel()):
        return "on a GPU it needs bfloat16 and torch's FlashAttention"
    config = model.config.to_dict()
    for name, value in config.items():
        if ("drop" in name or "jitter" in name) and isinstance(value, float) and value:
            return f"the model has a {name} of {value}, which is random for each sample"
    if config.get("v_head_dim") not in (None, config.get("qk_head_dim")):
        return "its heads have values and keys of different sizes"
    if has_state(model):
        return "its layers pass on a state from token to token"
    return None


def has_state(model: PreTrainedModel) -> bool:
    """Return whether layers pass on a state from token to token, besides keys and values."""
    kinds = {*(getattr(model.config.get_text_config(), "layer_types", None) or ())}
    others = kinds - {"full_attention", "sliding_attention", "chunked_attention"}
    return bool(others) or any(isinstance(module, nn.Conv1d) for module in model.modules())


def register() -> None:
    """Register the implementation with transformers under its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)
