"""Attention of segments on a GPU, by torch's FlashAttention for packed sequences.

A call of the kernel takes sequences, each with its queries and its keys, next to each other. The
first call is causal attention of each segment to itself. In each further one, what continues a
segment attends to all of that segment, for all segments that continue equally many others. So there
are as many calls as segments on the longest path, and no key is copied.

The outputs of calls are added with the shares that they have in the softmax over all keys, which
their log-sum-exps give. With the log-sum-exp over all keys, the kernel's backward pass of a call
gives its part of the gradients, as in ring attention (arXiv 2310.01889).

torch's compiler sees one operation, whose arguments tell it nothing about the samples that it would
compile the layers again for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from agentloop.learner.batch import PackedSegment, paths
from agentloop.learner.world import to_device

_FORWARD = torch.ops.aten._flash_attention_forward
_BACKWARD = torch.ops.aten._flash_attention_backward
_FEWEST = 2  # With a limit of one query the kernel's sums have another shape.


def edges_of(segments: Sequence[PackedSegment], device: torch.device) -> dict[str, object]:
    """Return the arguments of `attend` that depend on the segments.

    edges: int32: where segments start and end; after them, for each further call, where the queries
        of its sequences start and end, and where their keys do.
    num_edges, num_further: how many of the segments, and of either kind of a further call.
    longest: tokens of the longest segment.
    most_queries, most_keys: of a sequence of further calls. Some have queries and no keys, some
        keys and no queries.
    """
    calls: dict[int, list[PackedSegment]] = defaultdict(list)
    for *continues, segment in paths(segments):
        if segment.last > segment.end:
            calls[len(continues)].append(segment)
    continued = [segment for call in calls.values() for segment in call]
    most_queries = max((_FEWEST, *(last - end for _, end, last in continued)))
    most_keys = max((_FEWEST, *(end - start for start, end, _ in continued)))
    size = segments[-1].end
    further = [_sequences(call, size, most_queries, most_keys) for call in calls.values()]
    length = max(map(len, further), default=_FEWEST)
    padded = [[*each, *([(size, size)] * (length - len(each)))] for each in further]
    edges = [0, *(end for _, end, _ in segments)]
    for call in padded:
        for of_kind in zip(*call, strict=True):
            edges += of_kind
    return {
        "edges": to_device(torch.tensor(edges, dtype=torch.int32), device),
        "num_edges": len(segments) + 1,
        "num_further": length,
        "longest": max((_FEWEST, *(end - start for start, end, _ in segments))),
        "most_queries": most_queries,
        "most_keys": most_keys,
    }


def _sequences(
    continued: Sequence[PackedSegment], size: int, most_queries: int, most_keys: int
) -> list[tuple[int, int]]:
    """Return where the queries and keys of a call's sequences start, and end.

    The kernel writes nothing for what is beyond its limits, so that queries without keys, and keys
    without queries, are in sequences that keep them, too.
    """
    edges = [(0, 0)]
    for start, end, last in (*continued, PackedSegment(size, size, size)):
        query, key = edges[-1]
        edges += [(at, key) for at in (*range(query + most_queries, end, most_queries), end)]
        edges += [(end, at) for at in (*range(key + most_keys, start, most_keys), start)]
        edges.append((last, end))
    return edges


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    *,
    edges: Tensor,
    num_edges: int,
    num_further: int,
    longest: int,
    most_queries: int,
    most_keys: int,
    **_: object,
) -> Tensor:
    """Return the attention, [L, heads, D], of query, key and value, [L, heads or fewer, D]."""
    output: Tensor
    output, _sums = _operation(
        query, key, value, edges, num_edges, num_further, longest, most_queries, most_keys, scaling
    )
    return output


def _calls(
    edges: Tensor, num_edges: int, num_further: int, longest: int, most_queries: int, most_keys: int
) -> Iterator[tuple[object, ...]]:
    """Yield, for each call: edges of queries and keys, their limits, no dropout, and whether it is
    causal."""
    own, further = edges[:num_edges], edges[num_edges:]
    yield own, own, longest, longest, 0.0, True
    for queries, keys in further.view(-1, 2, num_further).unbind():
        yield queries, keys, most_queries, most_keys, 0.0, False


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edges: Tensor,
    num_edges: int,
    num_further: int,
    longest: int,
    most_queries: int,
    most_keys: int,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the attention and the log-sum-exps of the scores of each query, [heads, L]."""
    first, *others = _calls(edges, num_edges, num_further, longest, most_queries, most_keys)
    output, sums, *_ = _FORWARD(query, key, value, *first, False, scale=scale)
    for call in others:
        part, part_sums, *_ = _FORWARD(query, key, value, *call, False, scale=scale)
        # Of a query without keys the kernel's output is 0 and its sum infinite.
        part_sums = part_sums.masked_fill(part_sums.isposinf(), -math.inf)
        share = (part_sums - sums).sigmoid().T[..., None]
        output = torch.lerp(output.float(), part.float(), share)
        sums = torch.logaddexp(sums, part_sums)
    return output.to(query.dtype).contiguous(), sums


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    edges: Tensor,
    num_edges: int,
    num_further: int,
    longest: int,
    most_queries: int,
    most_keys: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    # What dropout would need.
    unused = grad.new_empty(2, dtype=torch.uint64), grad.new_empty(0)
    tensors = (grad.contiguous(), query, key, value, output, sums)
    calls = _calls(edges, num_edges, num_further, longest, most_queries, most_keys)
    parts = (_BACKWARD(*tensors, *call, *unused, scale=scale) for call in calls)
    # A key's gradient is not 0 in two calls at most, a query's in those of its path.
    totals = (reduce(torch.add, of_tensor) for of_tensor in zip(*parts, strict=True))
    grad_query, grad_key, grad_value = (total.contiguous() for total in totals)
    return grad_query, grad_key, grad_value


_SEGMENTS = (
    "Tensor edges, SymInt num_edges, SymInt num_further, SymInt longest, SymInt most_queries, "
    "SymInt most_keys, float? scale"
)
_operation = torch.library.custom_op(
    "agentloop::attend",
    _forward,
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {_SEGMENTS}) -> (Tensor, Tensor)",
)
_backward_operation = torch.library.custom_op(
    "agentloop::attend_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor output, Tensor sums, "
    f"{_SEGMENTS}) -> (Tensor, Tensor, Tensor)",
)


@_operation.register_fake  # type: ignore[untyped-decorator]  # mypy skips torch
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _size = query.shape
    sums = query.new_empty((num_heads, num_tokens), dtype=torch.float32)
    return query.new_empty(query.shape), sums


@_backward_operation.register_fake  # type: ignore[untyped-decorator]
def _(grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in tensors[:3])


def _keep(
    ctx: FunctionCtx, inputs: tuple[Tensor | int | float | None, ...], output: tuple[Tensor, Tensor]
) -> None:
    query, key, value, edges, *ctx.numbers = inputs
    ctx.save_for_backward(query, key, value, *output, edges)


def _differentiate(ctx: FunctionCtx, grad: Tensor, _grad_sums: Tensor) -> tuple[Tensor | None, ...]:
    grads: tuple[Tensor, ...] = _backward_operation(grad, *ctx.saved_tensors, *ctx.numbers)
    return *grads, *([None] * (1 + len(ctx.numbers)))


_operation.register_autograd(_differentiate, setup_context=_keep)
