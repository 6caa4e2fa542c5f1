"""Casts and byte layouts that the runtime computes with numpy, compared with torch's."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agentloop-rl[train]'")

import torch

from agentloop.learner.broadcast import Broadcaster, _tensor
from agentloop.learner.names import Conversion
from agentloop.learner.policy import Policy
from agentloop.training.learner_client.protocol import SendReply
from agentloop.training.weight_sync.checksums import checksum
from agentloop.training.weight_sync.layout import Layout

DTYPES = ["float32", "float16", "bfloat16"]
BITS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50)


@given(bits=BITS, stored=st.sampled_from(DTYPES), served=st.sampled_from(DTYPES))
@settings(deadline=None, max_examples=300)
def test_cast_is_torchs(bits: list[int], stored: str, served: str) -> None:
    """Holds for any finite number, including the smallest ones and those that overflow to
    infinity."""
    numbers = torch.from_numpy(np.array(bits, np.uint32).view(np.float32).copy())
    published = torch.nan_to_num(numbers).to(getattr(torch, stored))
    far = published.to(getattr(torch, served))
    expected = hashlib.sha256(far.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    layout = Layout("cpu", served, 1, 1)
    assert checksum("norm.weight", [_tensor(published)], layout, 0) == expected


KINDS = ["float64", "int64", "float32", "bfloat16", "float16", "int16", "uint8", "bool"]


@given(
    tensors=st.lists(
        st.tuples(st.sampled_from(KINDS), st.lists(st.integers(0, 3), max_size=2)),
        min_size=1,
        max_size=12,
    )
)
@settings(deadline=None)
def test_bucket_holds_tensors_of_different_types(tensors: list[tuple[str, list[int]]]) -> None:
    """The receiver reads the sent bytes as views, according to the layout."""
    model: Any = torch.nn.Module()
    for number, (kind, shape) in enumerate(tensors):
        numbers = torch.arange(int(np.prod(shape))).reshape(shape) + number
        model.register_buffer(f"b{number}", numbers.to(getattr(torch, kind)))
    played = SimpleNamespace(
        model=model,
        conversions=[
            Conversion((name,), {name: buffer.shape}, dict)
            for name, buffer in model.named_buffers()
        ],
        num_updates=0,
        settings=SimpleNamespace(publish_dtype="bfloat16", bucket_mib=1),
        world=SimpleNamespace(first=True, device=torch.device("cpu")),
    )
    sender = Broadcaster(cast(Policy, played))
    sent: list[Any] = []
    sender._broadcast = sent.append  # type: ignore[method-assign,assignment]
    reply = sender.send(0, Layout("cpu", "float32", 1, 1))
    assert isinstance(reply, SendReply)
    assert reply.num_bytes == len(sent[0])
    described = sender._describe(sender._buckets[0])
    start = 0
    for name, kind, shape in zip(*described.values(), strict=True):
        dtype = getattr(torch, kind)
        size = int(np.prod(shape)) * dtype.itemsize
        result = sent[0][start : start + size].view(dtype).view(shape)
        assert torch.equal(result, getattr(model, name).to(dtype))
        start += size
    assert start == len(sent[0])
