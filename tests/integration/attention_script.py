"""Compare the servers' attention on a CPU with SGLang's own, on random batches.

It runs in a server's environment, takes the number of batches, and prints the largest difference.
"""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.plugins import load_plugins


def batch(rng: random.Random, generator: torch.Generator) -> dict[str, object]:
    num = rng.choice([1, 2, 7, 40])
    key_heads, shared, size = rng.choice([(1, 1, 8), (2, 2, 16), (1, 4, 32), (4, 1, 8)])
    is_decode = rng.random() < 0.5
    prefixes = [rng.choice([0, 0, rng.randrange(300)]) for _ in range(num)]
    queries = [1 if is_decode else rng.choice([1, rng.randrange(1, 90)]) for _ in range(num)]
    keys = [max(p + q, 1) for p, q in zip(prefixes, queries, strict=True)]
    slots = torch.randperm(sum(keys) + 1, generator=generator)
    pool = torch.full((num + 3, max(keys) + 5), 10**6)  # what lies beyond must not be read
    where = rng.sample(range(num + 3), num)
    start = 0
    for row, length in zip(where, keys, strict=True):
        pool[row, :length] = slots[start : start + length]
        start += length
    cache = (len(slots), key_heads, size)
    return {
        "query": torch.randn(sum(queries), key_heads * shared, size, generator=generator),
        "k_cache": torch.randn(cache, generator=generator),
        "v_cache": torch.randn(cache, generator=generator),
        "req_to_token": pool.to(torch.int32),
        "req_pool_indices": torch.tensor(where),
        "seq_lens": torch.tensor(keys),
        "scaling": size**-0.5,
        "enable_gqa": shared > 1,
        **(
            {"causal": False}
            if is_decode
            else {
                "causal": True,
                "extend_prefix_lens": torch.tensor(prefixes),
                "extend_seq_lens": torch.tensor(queries),
            }
        ),
    }


def attend(backend: TorchNativeAttnBackend, inputs: dict[str, object]) -> torch.Tensor:
    name = "_run_sdpa_forward_extend" if "extend_seq_lens" in inputs else "_run_sdpa_forward_decode"
    query = inputs["query"]
    assert isinstance(query, torch.Tensor)
    output = torch.full_like(query, float("nan"))
    result: torch.Tensor = getattr(backend, name)(**{**inputs, "output": output})
    return result


def main() -> None:
    load_plugins()
    batched_attention = ATTENTION_BACKENDS["torch_native"]  # SGLang's, had it not loaded our plugin
    assert batched_attention.__module__ == "batched_attention"
    runner = SimpleNamespace(device="cpu", req_to_token_pool=None, token_to_kv_pool=None)
    largest = 0.0
    for seed in range(int(sys.argv[1])):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        inputs = batch(rng, generator)
        ours, theirs = batched_attention(runner), TorchNativeAttnBackend(runner)
        for _ in range(2):  # two layers of one forward
            difference = (attend(ours, inputs) - attend(theirs, inputs)).abs().max()
            largest = max(largest, float(difference.nan_to_num(nan=float("inf"))))
        groups = ours._groups
        assert groups is not None
        assert not any(isinstance(group, int) for group in groups), "left to SGLang's loop"
        windowed = {**inputs, "sliding_window_size": 20}
        ours.init_forward_metadata(SimpleNamespace(out_cache_loc=None))
        assert torch.equal(attend(ours, windowed), attend(theirs, windowed))
        assert ours._groups is None, "a sliding window is left to SGLang's loop"
    print(largest)


if __name__ == "__main__":
    main()
