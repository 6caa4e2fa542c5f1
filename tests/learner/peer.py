"""A plain torch process in place of a server: joins a group as SGLang does and saves what it
receives."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed import distributed_c10d as c10d


def receive(
    port: int, rank: int, size: int, name: str, layout: Path, out: Path, end: socket.socket
) -> None:
    """Send a line to `end` once the group is complete."""
    store, *_ = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", rank, size))
    group, _ = c10d._new_process_group_helper(
        size, rank, [], dist.Backend("gloo"), dist.PrefixStore(name, store), name,
        timeout=c10d.default_pg_timeout,
    )  # fmt: skip
    end.sendall(b"joined\n")
    received = {}
    for bucket in json.loads(layout.read_text()):
        tensors = [
            torch.empty(shape, dtype=getattr(torch, dtype))
            for dtype, shape in zip(bucket["dtypes"], bucket["shapes"], strict=True)
        ]
        flat = torch.empty(sum(first.nbytes for first in tensors), dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        group.broadcast([flat], options).wait()
        start = 0
        for key, tensor in zip(bucket["names"], tensors, strict=True):
            stop = start + tensor.nbytes
            received[key] = flat[start:stop].view(tensor.dtype).view(tensor.shape).clone()
            start = stop
    save_file(received, out)
