"""Describe how a server stores a model's weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a model's weights on a server.

    Attributes:
        device: "cpu" or "cuda".
        dtype: "float32", "float16" or "bfloat16".
        num_ranks: number of tensor-parallel ranks.
        num_kv_heads: number of the model's KV heads.
    """

    device: str
    dtype: str
    num_ranks: int
    num_kv_heads: int
