"""The forms of attention over packed samples compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'agentloop-rl[train]'")

import itertools

import torch

from agentloop.learner import attention
from agentloop.learner.attention import packed_attention, varlen_runs_on
from bench.gpu_learner import flex_attention_over

pytestmark = [pytest.mark.real, pytest.mark.gate]

SEGMENTS = (5, 1, 9)
HEADS, KEY_HEADS, SIZE = 4, 2, 8


def emulated(
    query: Any, key: Any, value: Any, starts: Any, other_starts: Any, longest: int, scale: Any
) -> Any:
    """What varlen_attn is documented to compute, for causal attention: [L, heads, D] each."""
    copies = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(copies, 1) for tensor in (key, value))
    assert starts is other_starts
    assert starts.dtype == torch.int32
    edges = starts.tolist()
    assert max(end - start for start, end in itertools.pairwise(edges)) == longest
    outputs = []
    for start, end in itertools.pairwise(edges):
        q, k, v = (one[start:end].transpose(0, 1) for one in (query, key, value))
        scores = q @ k.transpose(1, 2) * scale
        future = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        outputs.append(scores.masked_fill(future, float("-inf")).softmax(-1) @ v)
    return torch.cat(outputs, 1).transpose(0, 1)


def grouped(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Signature of torch 2.13."""
    assert (window_size, enable_gqa, max_q) == ((-1, 0), True, max_k)
    return emulated(query, key, value, cu_seq_q, cu_seq_k, max_q, scale)


def windowed(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Any:  # fmt: skip
    """Signature of torch 2.11, which needs no permission for fewer keys than queries."""
    assert (window_size, max_q) == ((-1, 0), max_k)
    return emulated(query, key, value, cu_seq_q, cu_seq_k, max_q, scale)


def inputs(device: str = "cpu", dtype: Any = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, heads, sum(SEGMENTS), SIZE, generator=generator)
        .to(device, dtype)
        .requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]


def output_and_gradients(compute: Callable[..., Any], tensors: list[Any]) -> list[Any]:
    output = compute(*tensors)
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).view(output.shape)
    return [output, *torch.autograd.grad((output * weights).sum(), tensors)]


def by_sample(query: Any, key: Any, value: Any) -> Any:
    return attention.attention_by_sample(
        None, query, key, value, None, segments=SEGMENTS, scaling=SIZE**-0.5
    )[0]


@pytest.mark.parametrize("kernel", [grouped, windowed])
@pytest.mark.parametrize("given", [False, True], ids=["segments", "starts"])
def test_packed_samples_have_the_same_attention_as_separate_ones(
    kernel: Callable[..., Any], given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is an emulation of torch's, which runs on GPUs alone."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "varlen_runs_on", lambda _: True)
    starts = attention._starts(SEGMENTS, torch.device("cpu"))
    more = {"starts": starts, "longest": max(SEGMENTS)} if given else {}

    def packed(query: Any, key: Any, value: Any) -> Any:
        return packed_attention(
            None, query, key, value, None, segments=[*SEGMENTS], scaling=SIZE**-0.5, **more
        )[0]

    expected = output_and_gradients(by_sample, inputs())
    found = output_and_gradients(packed, inputs())
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max().item() < 1e-5


def test_torchs_own_kernel_takes_these_arguments() -> None:
    """On a device without memory, where shapes are computed and nothing else."""
    pytest.importorskip("torch.nn.attention.varlen")
    query, key, value = inputs("meta", torch.bfloat16)
    starts = attention._starts(SEGMENTS, query.device)
    output = attention._varlen(query, key, value, starts, max(SEGMENTS), SIZE**-0.5)
    assert output.shape == (1, sum(SEGMENTS), HEADS, SIZE)
    output.sum().backward()
    assert key.grad.shape == key.shape


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers_are_not_compiled_again_for_other_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo.utils import counters
    from transformers import AutoModelForCausalLM, Qwen3Config

    monkeypatch.setattr(attention, "varlen_runs_on", lambda _: True)
    monkeypatch.setattr(attention, "_varlen", lambda query, *_: query.transpose(1, 2))
    attention.register()
    config = Qwen3Config(
        vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, head_dim=SIZE,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.PACKED)
    for layer in model.base_model.layers:
        layer.compile(dynamic=True, backend="eager")
    torch._dynamo.reset()
    counters.clear()
    for segments in (SEGMENTS, (20, 3), (7,)):
        starts = attention._starts(segments, torch.device("cpu"))
        model.base_model(
            input_ids=torch.zeros((1, sum(segments)), dtype=torch.int64),
            position_ids=torch.cat([torch.arange(length) for length in segments])[None],
            use_cache=False,
            segments=segments,
            starts=starts,
            longest=max(segments),
        )
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_the_kernel_is_for_gpus_with_half_precision() -> None:
    assert not varlen_runs_on(torch.zeros(1, 2, 3, 4, dtype=torch.bfloat16))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_of_a_gpu_computes_the_same() -> None:
    query, key, value = inputs("cuda", torch.bfloat16)
    assert varlen_runs_on(query)

    def packed(query: Any, key: Any, value: Any) -> Any:
        return packed_attention(
            None, query, key, value, None, segments=SEGMENTS, scaling=SIZE**-0.5
        )[0]

    expected = output_and_gradients(by_sample, inputs("cuda"))
    found = output_and_gradients(packed, [query, key, value])
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other).abs().max().item() < 0.02 * other.abs().max().item()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_the_same() -> None:
    """The benchmark's, here without the compiler; on a CPU it has no backward pass."""
    query, key, value = (one.detach() for one in inputs())
    flex = flex_attention_over(SEGMENTS, "cpu", compiled=False)
    found, expected = flex(query, key, value), by_sample(query, key, value)
    assert found.shape == expected.shape
    assert (found - expected).abs().max().item() < 1e-5
