"""Replacement for SGLang's native kernel package, which has no wheel for a plain CPU.

SGLang imports many names from it; on a CPU, with torch_native attention, it calls only those
defined here. Any other name raises NotImplementedError when it is called. Not covered: speculative
decoding, quantised weights, mixtures of experts.
"""

import functools
from collections.abc import Callable

import torch

__version__ = "0.0.0+agentloop.cpu"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new KV slots into its row of the request-to-token table.

    Request i owns row `req_pool_indices[i]` and gets columns `start_offset[i]:end_offset[i]`;
    `out_cache_loc` holds the slots of all requests, one after the other.
    """
    slots = out_cache_loc.to(req_to_token.dtype)
    taken = 0
    for row, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
    ):
        req_to_token[row, start:end] = slots[taken : taken + end - start]
        taken += end - start


def _ignoring_pin_memory(function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def call_unpinned(*args: object, pin_memory: bool = False, **kwargs: object) -> object:
        return function(*args, **kwargs)

    return call_unpinned


# LoRA and a few others pin host memory on any device; torch refuses that without an accelerator.
if not torch.cuda.is_available():
    for _name in ("arange", "empty", "full", "ones", "tensor", "zeros"):
        setattr(torch, _name, _ignoring_pin_memory(getattr(torch, _name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self


def __getattr__(name: str) -> Callable[..., object]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: object, **kwargs: object) -> object:
        raise NotImplementedError(f"sgl_kernel.{name} is not implemented on a CPU")

    return absent
