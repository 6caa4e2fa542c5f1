"""A plain torch process in place of a server: joins a group as SGLang does and saves what it
receives.

    python peer.py ADDRESS PORT RANK WORLD_SIZE NAME LAYOUT OUT

It prints a line before and after it joins.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed import distributed_c10d as c10d


def main() -> None:
    address, port, rank, size, name, layout, out = sys.argv[1:]
    print("here", flush=True)
    store, *_ = next(dist.rendezvous(f"tcp://{address}:{port}", int(rank), int(size)))
    group, _ = c10d._new_process_group_helper(
        int(size), int(rank), [], dist.Backend("gloo"), dist.PrefixStore(name, store), name,
        timeout=c10d.default_pg_timeout,
    )  # fmt: skip
    print("joined", flush=True)
    received = {}
    for bucket in json.loads(Path(layout).read_text()):
        tensors = [
            torch.empty(shape, dtype=getattr(torch, dtype))
            for dtype, shape in zip(bucket["dtypes"], bucket["shapes"], strict=True)
        ]
        flat = torch.empty(sum(one.nbytes for one in tensors), dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        group.broadcast([flat], options).wait()
        start = 0
        for key, tensor in zip(bucket["names"], tensors, strict=True):
            end = start + tensor.nbytes
            received[key] = flat[start:end].view(tensor.dtype).view(tensor.shape).clone()
            start = end
    save_file(received, out)


if __name__ == "__main__":
    main()
