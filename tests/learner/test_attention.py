"""The forms of attention over packed samples compute the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'agentloop-rl[train]'")

import itertools

import torch

from agentloop.learner import attention
from agentloop.learner.attention import arguments, packed_attention, varlen_runs_on
from agentloop.learner.batch import PackedSegment
from bench.gpu_learner import flex_attention_over

pytestmark = [pytest.mark.real, pytest.mark.gate]

LENGTHS = (5, 1, 9)
APART = (PackedSegment(0, 5, 5), PackedSegment(5, 6, 6), PackedSegment(6, 15, 15))
SHARED = (
    PackedSegment(0, 5, 12),
    PackedSegment(5, 6, 10),
    *(PackedSegment(6, 9, 9), PackedSegment(9, 10, 10)),  # both continue the second
    PackedSegment(10, 12, 12),  # continues the first
    PackedSegment(12, 15, 15),
)
HEADS, KEY_HEADS, SIZE = 4, 2, 8


def emulated(
    query: Any, key: Any, value: Any, starts: Any, key_starts: Any, longest: Any, scale: Any
) -> Any:
    """What varlen_attn is documented to compute, for causal attention: [L, heads, D] each.

    The last query of a segment attends to all of its keys, the one before it to all but one.
    """
    copies = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(copies, 1) for tensor in (key, value))
    assert starts.dtype == key_starts.dtype == torch.int32
    rows, columns = ([*itertools.pairwise(edges.tolist())] for edges in (starts, key_starts))
    assert longest == tuple(max(end - start for start, end in each) for each in (rows, columns))
    outputs = []
    for (start, end), (first, last) in zip(rows, columns, strict=True):
        q = query[start:end].transpose(0, 1)
        k, v = (tensor[first:last].transpose(0, 1) for tensor in (key, value))
        scores = q @ k.transpose(1, 2) * scale
        seen = last - first - (end - start)  # before the first query
        future = torch.ones(end - start, last - first, dtype=torch.bool).triu(1 + seen)
        outputs.append(scores.masked_fill(future, float("-inf")).softmax(-1) @ v)
    return torch.cat(outputs, 1).transpose(0, 1)


def grouped(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Signature of torch 2.13."""
    assert (window_size, enable_gqa) == ((-1, 0), True)
    return emulated(query, key, value, cu_seq_q, cu_seq_k, (max_q, max_k), scale)


def windowed(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Any:  # fmt: skip
    """Signature of torch 2.11, which needs no permission for fewer keys than queries."""
    assert window_size == (-1, 0)
    return emulated(query, key, value, cu_seq_q, cu_seq_k, (max_q, max_k), scale)


def inputs(device: str = "cpu", dtype: Any = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, heads, sum(LENGTHS), SIZE, generator=generator)
        .to(device, dtype)
        .requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]


def output_and_gradients(compute: Callable[..., Any], tensors: list[Any]) -> list[Any]:
    output = compute(*tensors)
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).view(output.shape)
    return [output, *torch.autograd.grad((output * weights).sum(), tensors)]


def by_sample(query: Any, key: Any, value: Any, segments: tuple[PackedSegment, ...] = APART) -> Any:
    more = arguments(segments, query.device)
    return attention.attention_by_sample(None, query, key, value, None, scaling=SIZE**-0.5, **more)[
        0
    ]


def on_gpu(segments: tuple[PackedSegment, ...]) -> Any:
    """Return the arguments that a GPU gets, on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "to_device", lambda tensor, _: tensor)
        return arguments.__wrapped__(segments, torch.device("cuda"))


@pytest.mark.parametrize("kernel", [grouped, windowed])
@pytest.mark.parametrize("segments", [APART, SHARED], ids=["apart", "shared"])
def test_both_forms_compute_the_same(
    kernel: Callable[..., Any], segments: tuple[PackedSegment, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is an emulation of torch's, which runs on GPUs alone."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "varlen_runs_on", lambda _: True)
    given = on_gpu(segments)
    assert (given["keys"] is None) == (segments is APART), "nothing is copied without need"

    def packed(query: Any, key: Any, value: Any) -> Any:
        return packed_attention(None, query, key, value, None, scaling=SIZE**-0.5, **given)[0]

    expected = output_and_gradients(partial(by_sample, segments=segments), inputs())
    found = output_and_gradients(packed, inputs())
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max().item() < 1e-5


def test_torchs_own_kernel_takes_these_arguments() -> None:
    """On a device without memory, where shapes are computed and nothing else."""
    pytest.importorskip("torch.nn.attention.varlen")
    for segments in (APART, SHARED):
        query, key, value = inputs("meta", torch.bfloat16)
        given = {
            name: value.to("meta") if isinstance(value, torch.Tensor) else value
            for name, value in on_gpu(segments).items()
        }
        output = attention._varlen(query, key, value, SIZE**-0.5, **given)
        assert output.shape == (1, sum(LENGTHS), HEADS, SIZE)
        output.sum().backward()
        assert key.grad.shape == key.shape


def test_keys_that_are_copied_for_a_gpu_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the passes there are only the tensors that the copies are made of."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", grouped)
    query, key, value = inputs()
    kept: set[int] = set()

    def note(tensor: Any) -> Any:
        kept.add(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        attention._varlen(query, key, value, SIZE**-0.5, **on_gpu(SHARED))
    assert max(kept, default=0) <= query.numel()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers_are_not_compiled_again_for_other_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo.utils import counters
    from transformers import AutoModelForCausalLM, Qwen3Config

    monkeypatch.setattr(attention, "varlen_runs_on", lambda _: True)
    monkeypatch.setattr(attention, "_attend_varlen", lambda heads_last, *_: heads_last[0])
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
    others = (PackedSegment(0, 20, 20), PackedSegment(20, 23, 23))
    longer = (
        PackedSegment(0, 6, 11),
        PackedSegment(6, 9, 9),
        PackedSegment(9, 11, 11),
        PackedSegment(11, 30, 30),
    )
    for segments, num_graphs in ((APART, 1), (others, 1), (SHARED, 2), (longer, 2), (APART, 2)):
        num_tokens = segments[-1].end
        model.base_model(
            input_ids=torch.zeros((1, num_tokens), dtype=torch.int64),
            position_ids=torch.arange(num_tokens)[None],
            use_cache=False,
            **on_gpu(segments),
        )
        assert counters["stats"]["unique_graphs"] == num_graphs
    assert not counters["graph_break"]


def test_the_kernel_is_for_gpus_with_half_precision() -> None:
    assert not varlen_runs_on(torch.zeros(1, 2, 3, 4, dtype=torch.bfloat16))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_of_a_gpu_computes_the_same() -> None:
    assert varlen_runs_on(inputs("cuda", torch.bfloat16)[0])

    for segments in (APART, SHARED):

        def packed(query: Any, key: Any, value: Any, given: Any = segments) -> Any:
            more = arguments(given, query.device)
            return packed_attention(None, query, key, value, None, scaling=SIZE**-0.5, **more)[0]

        def on_cpu(query: Any, key: Any, value: Any, given: Any = segments) -> Any:
            return by_sample(query.cpu(), key.cpu(), value.cpu(), given).cuda()

        expected = output_and_gradients(on_cpu, inputs("cuda"))
        found = output_and_gradients(packed, inputs("cuda", torch.bfloat16))
        for one, other in zip(found, expected, strict=True):
            assert (one.float() - other).abs().max().item() < 0.02 * other.abs().max().item()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_the_same() -> None:
    """The benchmark's, here without the compiler; on a CPU it has no backward pass."""
    query, key, value = (one.detach() for one in inputs())
    flex = flex_attention_over(LENGTHS, "cpu", compiled=False)
    found, expected = flex(query, key, value), by_sample(query, key, value)
    assert found.shape == expected.shape
    assert (found - expected).abs().max().item() < 1e-5
