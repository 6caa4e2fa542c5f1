"""The forms of attention over packed samples compute the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'agentloop-rl[train]'")

import itertools

import torch

from agentloop.learner import attention, flash
from agentloop.learner.attention import arguments, flash_runs_on, packed_attention
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


def emulated_forward(
    query: Any, key: Any, value: Any, edges: Any, key_edges: Any, most: int, most_keys: int,
    dropout: float, causal: bool, debug: bool, *, scale: float | None,
) -> Any:  # fmt: skip
    """What FlashAttention computes for packed sequences; [L, heads, D] each.

    Without keys a query's output is 0, and its sum infinite.
    """
    assert (dropout, debug) == (0.0, False)
    output = torch.full_like(query, float("nan"))
    sums = torch.full(query.shape[1::-1], float("nan"))
    for rows, columns in sequences(edges, key_edges, most, most_keys):
        scores = scores_of(query[rows], key[columns], causal, scale)
        output[rows] = (scores.softmax(-1) @ heads_first(value[columns], query)).transpose(0, 1)
        sums[:, rows] = scores.logsumexp(-1) if scores.numel() else float("inf")
    return output, sums, None, None, None


def emulated_backward(
    grad: Any, query: Any, key: Any, value: Any, output: Any, sums: Any, edges: Any,
    key_edges: Any, most: int, most_keys: int, dropout: float, causal: bool, *unused: Any,
    scale: float | None,
) -> Any:  # fmt: skip
    """The gradients, from the log-sum-exp over all keys, also those of other calls."""
    grads = [torch.full_like(each, float("nan")) for each in (query, key, value)]
    for rows, columns in sequences(edges, key_edges, most, most_keys):
        weights = (scores_of(query[rows], key[columns], causal, scale) - sums[:, rows, None]).exp()
        grad_rows = grad[rows].transpose(0, 1)
        of_weights = grad_rows @ heads_first(value[columns], query).transpose(1, 2)
        inner = (grad[rows] * output[rows]).sum(-1).T[..., None]
        of_scores = weights * (of_weights - inner) * scale
        result = (
            of_scores @ heads_first(key[columns], query),
            of_scores.transpose(1, 2) @ query[rows].transpose(0, 1),
            weights.transpose(1, 2) @ grad_rows,
        )
        for total, part, where in zip(grads, result, (rows, columns, columns), strict=True):
            copies = len(part) // total.shape[1]
            total[where] = part.unflatten(0, (-1, copies)).sum(1).transpose(0, 1)
    return tuple(grads)


def sequences(edges: Any, key_edges: Any, most: int, most_keys: int) -> list[tuple[slice, slice]]:
    assert edges.dtype == key_edges.dtype == torch.int32
    pairs = ([*itertools.pairwise(each.tolist())] for each in (edges, key_edges))
    result = [(slice(*rows), slice(*columns)) for rows, columns in zip(*pairs, strict=True)]
    for limit, spans in zip((most, most_keys), zip(*result, strict=True), strict=True):
        assert all(span.stop - span.start <= limit for span in spans), "else nothing is written"
    return result


def scores_of(query: Any, key: Any, causal: bool, scale: float | None) -> Any:
    scores = query.transpose(0, 1) @ heads_first(key, query).transpose(1, 2) * scale
    future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, float("-inf")) if causal else scores


def heads_first(keys: Any, query: Any) -> Any:
    """As many heads as the query has."""
    return keys.repeat_interleave(query.shape[1] // keys.shape[1], 1).transpose(0, 1)


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
    return attention.attention_by_sample(query, key, value, segments, SIZE**-0.5)


def on_gpu(segments: tuple[PackedSegment, ...]) -> Any:
    """Return the arguments that a GPU gets, on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "to_device", lambda tensor, _: tensor)
        return arguments.__wrapped__(segments, torch.device("cuda"))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention on a CPU."""
    monkeypatch.setattr(flash, "_FORWARD", emulated_forward)
    monkeypatch.setattr(flash, "_BACKWARD", emulated_backward)
    monkeypatch.setattr(attention, "flash_runs_on", lambda _: True)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("segments", [APART, SHARED], ids=["apart", "shared"])
def test_both_forms_compute_the_same(segments: tuple[PackedSegment, ...]) -> None:
    given = on_gpu(segments)
    num_further = len(given["edges"]) - given["num_edges"]
    assert num_further == (0 if segments is APART else 2 * 2 * given["num_further"])

    def packed(query: Any, key: Any, value: Any) -> Any:
        return packed_attention(None, query, key, value, None, scaling=SIZE**-0.5, **given)[0]

    expected = output_and_gradients(partial(by_sample, segments=segments), inputs())
    result = output_and_gradients(packed, inputs())
    for first, second in zip(result, expected, strict=True):
        assert first.shape == second.shape
        assert (first - second).abs().max().item() < 1e-5


def test_torchs_own_kernel_takes_these_arguments() -> None:
    """On a device without memory, where shapes are computed and nothing else."""
    for segments in (APART, SHARED):
        query, key, value = (first[0].transpose(0, 1) for first in inputs("meta", torch.bfloat16))
        given = {
            name: value.to("meta") if isinstance(value, torch.Tensor) else value
            for name, value in on_gpu(segments).items()
        }
        names = (
            "edges", "num_edges", "num_further", "longest", "most_queries", "most_keys",
        )  # fmt: skip
        more = (*(given[name] for name in names), SIZE**-0.5)
        output, sums = flash._forward(query, key, value, *more)
        assert output.shape == (sum(LENGTHS), HEADS, SIZE)
        assert sums.shape == (HEADS, sum(LENGTHS))
        grads = flash._backward(output, query, key, value, output, sums, *more)
        assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.usefixtures("kernel")
def test_compiled_layers_are_not_compiled_again_for_other_samples() -> None:
    from torch._dynamo.utils import counters
    from transformers import AutoModelForCausalLM, Qwen3Config

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
    remaining = (PackedSegment(0, 20, 20), PackedSegment(20, 23, 23))
    longer = (
        PackedSegment(0, 6, 11),
        PackedSegment(6, 9, 9),
        PackedSegment(9, 11, 11),
        PackedSegment(11, 30, 30),
    )
    for segments in (APART, remaining, SHARED, longer, APART):
        num_tokens = segments[-1].end
        model.base_model(
            input_ids=torch.zeros((1, num_tokens), dtype=torch.int64),
            position_ids=torch.arange(num_tokens)[None],
            use_cache=False,
            **on_gpu(segments),
        )
        assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_kernel_is_for_gpus_with_half_precision() -> None:
    assert not flash_runs_on(torch.zeros(1, 2, 3, 4, dtype=torch.bfloat16))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernel_of_a_gpu_computes_the_same() -> None:
    assert flash_runs_on(inputs("cuda", torch.bfloat16)[0])

    for segments in (APART, SHARED):

        def packed(query: Any, key: Any, value: Any, given: Any = segments) -> Any:
            more = arguments(given, query.device)
            return packed_attention(None, query, key, value, None, scaling=SIZE**-0.5, **more)[0]

        def on_cpu(query: Any, key: Any, value: Any, given: Any = segments) -> Any:
            return by_sample(query.cpu(), key.cpu(), value.cpu(), given).cuda()

        expected = output_and_gradients(on_cpu, inputs("cuda"))
        result = output_and_gradients(packed, inputs("cuda", torch.bfloat16))
        for first, second in zip(result, expected, strict=True):
            assert (first.float() - second).abs().max().item() < 0.02 * second.abs().max().item()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_the_same() -> None:
    """The benchmark's, here without the compiler; on a CPU it has no backward pass."""
    query, key, value = (first.detach() for first in inputs())
    flex = flex_attention_over(LENGTHS, "cpu", compiled=False)
    result, expected = flex(query, key, value), by_sample(query, key, value)
    assert result.shape == expected.shape
    assert (result - expected).abs().max().item() < 1e-5
