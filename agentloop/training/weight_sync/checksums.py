"""Compute the checksum that SGLang reports for each tensor of a model. Pure; needs only numpy.

    published tensors ──fuse, pad, shard for a rank, cast──> a tensor of the server ──> 64 bits

This reproduces SGLang 0.5.16 and 0.5.23 for the models in `MODELS`. Sources: `load_weights` of the
models, the `weight_loader`s of their layers, and `tensor_hash`, which is SHA-256 on a CPU and a
custom hash on a GPU. Not covered: quantized weights, experts, attention whose ranks are not the
tensor-parallel ranks, and weights packed for a CPU with AMX.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from agentloop.training.weight_sync.layout import Layout

VERSIONS = ("0.5.16", "0.5.23")
MODELS = ("llama", "mistral", "qwen2", "qwen3")

Array = np.ndarray

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_BY_ROWS = ("qkv_proj", "gate_up_proj", "embed_tokens", "lm_head")
_BY_COLUMNS = ("o_proj", "down_proj")
_VOCABULARY = ("embed_tokens", "lm_head")
_PAD_ROWS = 64  # vocabularies are padded to a multiple of this

_STORED_AS = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


class Tensor(NamedTuple):
    """A tensor with the name of its dtype. bfloat16, unknown to numpy, is stored as uint16 bits."""

    dtype: str
    array: Array


def config_dtype(name: str | None) -> str:
    """Return the dtype that SGLang's --dtype=auto chooses for the `dtype` in config.json."""
    return "float16" if name in (None, "float32") else name


def parts_of(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Map each tensor of a server to the published tensors that it is made of, in order."""
    parts: dict[str, tuple[str, ...]] = {}
    published = set(names)
    for name in published:
        module, _, kind = name.rpartition(".")
        above, _, last = module.rpartition(".")
        for fused, members in _FUSED.items():
            if last in members:
                made = tuple(f"{above}.{member}.{kind}" for member in members)
                if published.issuperset(made):
                    parts[f"{above}.{fused}.{kind}"] = made
                break
        else:
            parts[name] = (name,)
    return parts


def checksum(name: str, parts: Sequence[Tensor], layout: Layout, rank: int) -> str:
    """Return the checksum of the server's tensor `name` on a tensor-parallel rank.

    `parts` are the published tensors that it is made of, as in `parts_of`.
    """
    module = name.split(".")[-2] if "." in name else name
    arrays = [
        _cut(_cast(part, layout.dtype), module, index, layout, rank)
        for index, part in enumerate(parts)
    ]
    if layout.device == "cuda":
        return f"{_gpu_hash(np.concatenate([_bytes(array) for array in arrays])):016x}"
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(_bytes(array).data)
    return digest.hexdigest()[:16]


def _cut(array: Array, module: str, index: int, layout: Layout, rank: int) -> Array:
    """Return the rank's shard of a part."""
    num = layout.num_ranks
    if module in _VOCABULARY:
        return _rows_of_vocabulary(array, num, rank)
    if module == "qkv_proj" and index and num > layout.num_kv_heads:  # KV heads are replicated
        num, rank = layout.num_kv_heads, rank * layout.num_kv_heads // num
    if module in _BY_ROWS:
        return np.array_split(array, num)[rank]
    if module in _BY_COLUMNS and array.ndim > 1:
        return np.array_split(array, num, axis=1)[rank]
    return array


def _rows_of_vocabulary(array: Array, num: int, rank: int) -> Array:
    pad = _PAD_ROWS if _rounded_up(len(array), _PAD_ROWS) % num == 0 else _PAD_ROWS * num
    size = _rounded_up(len(array), pad) // num
    rows = array[rank * size : (rank + 1) * size]
    return np.concatenate([rows, np.zeros((size - len(rows), *rows.shape[1:]), rows.dtype)])


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _cast(tensor: Tensor, dtype: str) -> Array:
    """Cast like `torch.Tensor.to`, rounding half to even."""
    if tensor.dtype == dtype or tensor.dtype not in _STORED_AS:
        return tensor.array
    array = tensor.array
    if tensor.dtype == "bfloat16":
        array = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return array.astype(_STORED_AS[dtype])
    bits = array.astype(np.float32).view(np.uint32)
    rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + rounding) >> np.uint32(16)).astype(np.uint16)


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


# --- SGLang's hash on a GPU -----------------------------------------------------------------------
#
# sglang/kernels/ops/memory/gpu_tensor_hash.py: two sums of mixed 32-bit words for each tile, mixed
# again, and the sum of all tiles, mixed. The tests compare it with that kernel, run by Triton's
# interpreter.

_TILE = 8192  # words
_CHUNK = 16 * _TILE  # small enough for a cache
_SEED = 0x243F6A88
_LANES = (
    (0x27D4EB2D, _SEED, 15),
    (0x165667B1, (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF, 13),
)
_64 = (1 << 64) - 1


def _gpu_hash(data: Array) -> int:
    num_words = -(-len(data) // 4)
    if not num_words:
        return 0
    size, total = np.uint32(4 * num_words & 0xFFFFFFFF), 0
    for start in range(0, num_words, _CHUNK):
        words = data[4 * start : 4 * (start + _CHUNK)]
        if len(words) % 4:
            words = np.concatenate([words, np.zeros(-len(words) % 4, np.uint8)])
        words = words.view(np.uint32)
        places = np.arange(start, start + len(words), dtype=np.uint64).astype(np.uint32)
        high, low = (_mix(_sums(words, places, *lane) ^ size).astype(np.uint64) for lane in _LANES)
        total += int((high << np.uint64(32) | low).sum(dtype=np.uint64))
    total &= _64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        total = (total ^ total >> shift) * factor & _64
    return total ^ total >> 31


def _sums(words: Array, places: Array, factor: int, seed: int, turn: int) -> Array:
    """Return the sum of mixed words of each tile."""
    mixed = places * np.uint32(factor)
    mixed += np.uint32(seed)
    mixed ^= (places << np.uint32(turn)) | (places >> np.uint32(32 - turn))
    mixed ^= words
    tiles = np.arange(0, len(words), _TILE)
    sums: Array = np.add.reduceat(_mix(mixed), tiles, dtype=np.uint32)
    return sums


def _mix(words: Array) -> Array:
    """Mix 32-bit words in place and return them."""
    words ^= words >> np.uint32(16)
    words *= np.uint32(0x85EBCA6B)
    words ^= words >> np.uint32(13)
    words *= np.uint32(0xC2B2AE35)
    words ^= words >> np.uint32(16)
    return words
