"""The expected checksums of a server's tensors, and their comparison."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.inference.sglang.weight_updates import Checksum, WeightsInfo
from agentloop.training.weight_sync.checksums import Tensor, checksum, config_dtype, parts_of
from agentloop.training.weight_sync.layout import Layout
from agentloop.training.weight_sync.verify import Proof, judge, layout_of, prove

PLAIN = Layout("cpu", "float32", 1, 2)
CONFIG = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2}


def sha256(*arrays: Any) -> str:
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    return hashlib.sha256(data).hexdigest()[:16]


def of(name: str, *arrays: Any, rank: int = 0, layout: Layout = PLAIN) -> str:
    return checksum(name, [Tensor("float32", array) for array in arrays], layout, rank)


def numbered(*shape: int) -> Any:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, 0x88B6F7FE8EA8C31F),
        (3, 0x64DD2C30B3087344),
        (4, 0x987C9E71E3C3ECF7),
        (5, 0xEB637BF47D1FD1E3),
        (1000, 0x173556BF134CA141),
        (32_768, 0xE84B882314B17E50),
        (32_769, 0x85BBD23FE53F364C),
        (98_306, 0x8B57A6441678AA4D),
        (100_003, 0xEB7FC0C373226626),
    ],
)
def test_hash_of_a_gpu_is_that_of_sglangs_kernel(size: int, expected: int) -> None:
    """The values are from the kernel under Triton's interpreter; tests/integration runs it."""
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    layout = Layout("cuda", "bfloat16", 1, 2)
    assert checksum("x", [Tensor("uint8", data)], layout, 0) == f"{expected:016x}"
    if size > 1:
        parts = [Tensor("uint8", data[:1]), Tensor("uint8", data[1:])]
        assert checksum("x", parts, layout, 0) == f"{expected:016x}", "of what is fused, too"


def test_tensors_that_a_server_fuses_are_found_by_name() -> None:
    layer = "model.layers.0"
    names = [f"{layer}.self_attn.{first}_proj.weight" for first in ("q", "k", "v", "o")]
    names += [f"{layer}.self_attn.{first}_proj.bias" for first in ("q", "k", "v")]
    names += [f"{layer}.mlp.{first}_proj.weight" for first in ("gate", "up", "down")]
    names += [f"{layer}.mlp.experts.3.up_proj.weight", "model.norm.weight", "alone"]
    parts = parts_of(names)
    assert parts[f"{layer}.self_attn.qkv_proj.weight"] == tuple(names[:3])
    assert parts[f"{layer}.self_attn.qkv_proj.bias"] == tuple(names[4:7])
    assert parts[f"{layer}.mlp.gate_up_proj.weight"] == tuple(names[7:9])
    for name in (names[3], names[9], "model.norm.weight", "alone"):
        assert parts[name] == (name,)
    assert len(parts) == 7, "an expert by itself is nothing that is known"


def test_single_rank_has_the_whole_model_with_a_padded_vocabulary() -> None:
    q, k, v = numbered(4, 3), numbered(2, 3) + 50, numbered(2, 3) + 90
    assert of("a.qkv_proj.weight", q, k, v) == sha256(q, k, v)
    assert of("a.o_proj.weight", q) == sha256(q)
    zeros = np.zeros((60, 3), np.float32)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert of(name, q) == sha256(q, zeros)
        assert of(name, numbered(64, 3)) == sha256(numbered(64, 3))


def test_each_rank_has_its_part() -> None:
    """Two of four ranks share the same keys and values."""
    layout = Layout("cpu", "float32", 4, 2)
    q, k, v = numbered(8, 3), numbered(2, 3) + 50, numbered(2, 3) + 90
    down, norm = numbered(3, 8), numbered(3)
    embed = numbered(200, 3)
    zeros = np.zeros((256 - 200, 3), np.float32)
    for rank in range(4):
        rows = slice(2 * rank, 2 * rank + 2)
        reported = {
            "qkv_proj.weight": ((q, k, v), (q[rows], k[rank // 2], v[rank // 2])),
            "gate_up_proj.weight": ((q, q + 9), (q[rows], (q + 9)[rows])),
            "down_proj.weight": ((down,), (down[:, rows],)),
            "norm.weight": ((norm,), (norm,)),
            "o_proj.bias": ((norm,), (norm,)),
            "embed_tokens.weight": (
                (embed,),
                (embed[64 * rank : 64 * rank + 64], *([zeros] if rank == 3 else [])),
            ),
        }
        for name, (arrays, far) in reported.items():
            assert of(f"a.{name}", *arrays, rank=rank, layout=layout) == sha256(*far), name


def test_vocabulary_that_ranks_cannot_share_has_more_rows() -> None:
    layout, embed = Layout("cpu", "float32", 3, 3), numbered(100, 2)
    rows = np.concatenate([embed, np.zeros((192 - 100, 2), np.float32)])
    for rank in range(3):
        result = of("lm_head.weight", embed, rank=rank, layout=layout)
        assert result == sha256(rows[64 * rank : 64 * rank + 64])


def test_type_that_auto_means() -> None:
    assert [config_dtype(first) for first in (None, "float32", "bfloat16", "float16")] == [
        "float16", "float16", "bfloat16", "float16",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("info", "config", "reason"),
    [
        ({}, {}, None),
        ({"sglang": "0.5.24"}, {}, "SGLang 0.5.24"),
        ({"unusual": "quantization = fp8"}, {}, "quantization = fp8"),
        ({"dtype": "bfloat16"}, {}, "bfloat16 on a CPU"),
        ({"device": "cuda", "dtype": "bfloat16"}, {}, None),
        ({"device": "cuda", "dtype": "auto"}, {}, None),
        ({"device": "cuda", "dtype": "float8"}, {}, "the dtype float8"),
        ({"device": "xpu"}, {}, "the device xpu"),
        ({}, {"model_type": "deepseek_v3"}, "the model type deepseek_v3"),
    ],
)
def test_reason_is_given_if_expected_checksums_are_unknown(
    info: dict[str, str], config: dict[str, str], reason: str | None
) -> None:
    usual: dict[str, Any] = {"device": "cpu", "dtype": "float", "sglang": "0.5.23"}
    result = layout_of(WeightsInfo(2, **{**usual, **info}), {**CONFIG, **config})
    if reason is None:
        assert isinstance(result, Layout)
        assert (result.num_ranks, result.num_kv_heads) == (2, 2)
    else:
        assert isinstance(result, str)
        assert reason in result


EXPECTED = {("a", 0): "1", ("b", 0): "2", ("a", 1): "3", ("b", 1): "4"}


def proof(*ranks: Mapping[str, str]) -> Proof:
    result = Checksum("whole", [(rank, dict(sums)) for rank, sums in enumerate(ranks)])
    return prove(result, lambda name, rank: EXPECTED.get((name, rank)))


def test_every_rank_of_a_server_must_have_the_learners_weights() -> None:
    assert proof({"a": "1", "b": "2"}, {"a": "3", "b": "4"}) == Proof("whole", "")
    assert proof({"a": "1"}, {"a": "1"}).wrong == "its a differs from the learner's"
    assert proof({"a": "1", "b": "1"}).wrong == "its b differs from the learner's"
    first, second = proof({"a": "1", "x": "5"}), proof({"a": "1", "x": "6"})
    assert not first.wrong
    assert first.rest != second.rest != ""
    assert proof({"x": "5"}) == Proof("whole", "whole", unproven="it reports no known tensor"), (
        "then SGLang's own is all there is"
    )
    assert proof() == proof({"x": "5"})


PROOFS = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(Proof, checksum=st.sampled_from("12"), rest=st.sampled_from(["", "x", "y"]),
        wrong=st.sampled_from(["", "", "", "bad"])),
)  # fmt: skip


@given(proofs=PROOFS, remaining=st.sampled_from([None, "x", "y"]))
@settings(deadline=None)
def test_servers_are_judged_right_or_wrong(proofs: dict[str, Proof], remaining: str | None) -> None:
    result = judge(proofs, remaining)
    assert sorted([*result.right, *result.wrong]) == sorted(proofs), "each is one of the two"
    right = [proofs[url] for url in result.right]
    assert not any(first.wrong for first in right), "the learner's tensors decide"
    for url, first in proofs.items():
        if not first.wrong and not first.rest:
            assert url in result.right, "whoever has all of them needs no other"
    assert len({first.rest for first in right if first.rest}) <= 1, "no two that differ"
    votes = [first.rest for first in proofs.values() if first.rest and not first.wrong]
    if remaining is not None:
        assert result.rest == remaining
    elif result.rest is None:
        assert votes.count("x") == votes.count("y")
    else:
        assert votes.count(result.rest) > len(votes) / 2
