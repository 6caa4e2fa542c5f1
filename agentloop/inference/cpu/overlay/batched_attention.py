"""Attention for many requests at once on a CPU, in place of SGLang's loop over them.

    requests ──similar lengths──> groups ──> indices and a mask, once per forward pass
                                         └─> one attention each, in every layer

SGLang's `torch_native` backend calls `scaled_dot_product_attention` for one request after the
other, in each layer. Small models on a CPU then spend most of their time between these calls. Here
requests of similar lengths form a group: their keys and values are gathered by index and padded, a
mask hides the padding, and query heads that share a key are folded into the queries. `register` is
a plugin of SGLang (entry point `sglang.srt.plugins`), which replaces the backend under its name.

Not covered, and left to SGLang's loop: sliding windows, cross attention and encoders, and prompts
of which the mask would be large.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS, alloc_with_pin_memory
from torch.nn.functional import scaled_dot_product_attention

_SLACK = 1.25  # the longest of a group may be this many times as long as its shortest,
_SLACK_TOKENS = 32  # and this many tokens longer
_MAX_MASK = 1 << 22  # elements of a group's mask, for one query head per key


@dataclass(frozen=True)
class Group:
    """Requests whose attention is computed in one call, padded to the longest.

    Attributes:
        slots: where their keys and values are in the cache, [requests * keys].
        shape: numbers of requests, queries and keys, padded.
        rows: rows of the batch's queries, [requests * queries]; None: all of them, in order.
        kept: which of these rows are no padding; None: all.
        mask: 0 where a query sees a key, else minus infinity, [requests, 1, queries, keys].
    """

    slots: torch.Tensor
    shape: tuple[int, int, int]
    rows: torch.Tensor | None
    kept: torch.Tensor | None
    mask: torch.Tensor


def group_by_length(num_queries: list[int], num_keys: list[int]) -> list[list[int]]:
    """Return groups of requests of similar lengths, each by its place in the batch."""
    groups: list[list[int]] = []
    for index in sorted(range(len(num_keys)), key=lambda i: (num_keys[i], num_queries[i])):
        if groups:
            shortest = num_keys[groups[-1][0]]
            queries = max(num_queries[index], *(num_queries[i] for i in groups[-1]))
            padded = (len(groups[-1]) + 1) * queries * num_keys[index]
            if num_keys[index] <= _SLACK * shortest + _SLACK_TOKENS and padded <= _MAX_MASK:
                groups[-1].append(index)
                continue
        groups.append([index])
    return groups


class BatchedAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """SGLang's `torch_native` backend, with one call per group of requests."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._groups: list[Group | int] | None = None  # of this forward; a number: one by the loop

    def init_forward_metadata(self, forward_batch: object) -> None:
        super().init_forward_metadata(forward_batch)
        self._groups = None

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        **options: object,
    ) -> torch.Tensor:
        loop = partial(super()._run_sdpa_forward_decode, encoder_lens=encoder_lens, **options)
        heads = (query, output, k_cache, v_cache)
        return self._run(loop, heads, req_to_token, (req_pool_indices, seq_lens))

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        **options: object,
    ) -> torch.Tensor:
        loop = partial(super()._run_sdpa_forward_extend, encoder_lens=encoder_lens, **options)
        heads = (query, output, k_cache, v_cache)
        lengths = (seq_lens, extend_prefix_lens, extend_seq_lens)
        return self._run(loop, heads, req_to_token, (req_pool_indices, *lengths))

    def _run(
        self,
        loop: partial[torch.Tensor],
        heads: tuple[torch.Tensor, ...],
        req_to_token: torch.Tensor,
        requests: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """Attend by groups, and by SGLang's `loop` what they do not cover.

        Args:
            heads: query, output, and the caches of keys and values.
            requests: for each, its row of `req_to_token` and its length; in a prefill also the
                lengths of what is cached and of its queries.
        """
        query, output, k_cache, v_cache = heads
        options = loop.keywords
        is_decode = len(requests) == 2
        if (
            options["encoder_lens"] is not None
            or options.get("sliding_window_size") is not None
            or not (is_decode or options.get("causal"))
        ):
            return loop(*heads, req_to_token, *requests)
        num_queries = torch.ones_like(requests[1]) if is_decode else requests[-1]
        if self._groups is None:
            keys, queries = requests[1].tolist(), num_queries.tolist()
            self._groups = [
                _group(members, queries, keys, req_to_token, requests[0], query.dtype)
                if len(members) > 1 or queries[members[0]] * keys[members[0]] <= _MAX_MASK
                else members[0]
                for members in group_by_length(queries, keys)
            ]
        for group in self._groups:
            if isinstance(group, Group):
                _attend(group, query, output, k_cache, v_cache, options.get("scaling"))
                continue
            start = int(num_queries[:group].sum())
            rows = slice(start, start + int(num_queries[group]))
            request = (each[group : group + 1] for each in requests)
            loop(query[rows], output[rows], k_cache, v_cache, req_to_token, *request)
        return output


def _group(
    members: list[int],
    all_queries: list[int],
    all_keys: list[int],
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    dtype: torch.dtype,
) -> Group:
    num_queries = torch.tensor([all_queries[i] for i in members])
    num_keys = torch.tensor([all_keys[i] for i in members])
    shape = (len(members), int(num_queries.max()), int(num_keys.max()))
    key = torch.arange(shape[2])
    slots = req_to_token[req_pool_indices[torch.tensor(members)], : shape[2]].to(torch.int64)
    slots = slots.masked_fill_(key >= num_keys[:, None], 0)  # what is there belongs to nobody
    query = torch.arange(shape[1])
    position = (num_keys - num_queries)[:, None] + query  # of a query in its sequence
    # Queries that are padding see their sequence's keys, so that no row is without any.
    hidden = key > position.clamp(max=num_keys[:, None] - 1)[:, :, None]
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    starts = torch.tensor([0, *all_queries]).cumsum(0)[torch.tensor(members)]
    is_query = query < num_queries[:, None]
    rows = (starts[:, None] + query).masked_fill_(~is_query, 0).flatten()
    kept = None if bool(is_query.all()) else is_query.flatten().nonzero().squeeze(1)
    in_order = kept is None and len(members) == len(all_keys) and members == sorted(members)
    return Group(slots.flatten(), shape, None if in_order else rows, kept, mask[:, None])


def _attend(
    group: Group,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scaling: float | None,
) -> None:
    """Write the attention of a group's queries to their rows of `output`.

    Args:
        query: [tokens, heads, head size].
        output: [tokens, heads, value size].
        k_cache: [slots, key heads, head size].
        v_cache: [slots, key heads, value size].
    """
    num, queries, keys = group.shape
    heads, key_heads = query.shape[1], k_cache.shape[1]
    shared = heads // key_heads  # queries per key
    rows = query if group.rows is None else query.index_select(0, group.rows)
    q = rows.view(num, queries, key_heads, shared, -1).permute(0, 2, 3, 1, 4)
    k = k_cache.index_select(0, group.slots).to(query.dtype).view(num, keys, key_heads, -1)
    v = v_cache.index_select(0, group.slots).to(query.dtype).view(num, keys, key_heads, -1)
    mask = group.mask
    if queries > 1 and shared > 1:
        mask = mask[:, :, None].expand(-1, -1, shared, -1, -1).reshape(num, 1, -1, keys)
    attended = scaled_dot_product_attention(
        q.reshape(num, key_heads, shared * queries, -1),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        scale=scaling,
    )
    attended = attended.view(num, key_heads, shared, queries, -1).permute(0, 3, 1, 2, 4)
    attended = attended.reshape(num * queries, heads, -1)
    if group.rows is None:
        output.copy_(attended)
    elif group.kept is None:
        output[group.rows] = attended
    else:
        output[group.rows[group.kept]] = attended[group.kept]


def register() -> None:
    """Make SGLang's `torch_native` attention this one, and its tables of host memory plain memory.

    In the latter it keeps what it returns besides tokens, such as the experts of each token.
    """
    register_attention_backend("torch_native")(BatchedAttention)
    ALLOC_MEMORY_FUNCS["cpu"] = alloc_with_pin_memory  # by default, registered with CUDA
