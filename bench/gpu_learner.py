"""The learner's parts of `python -m bench.gpu`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from safetensors.numpy import load_file

from agentloop.learner.batch import PackedSegment
from agentloop.training.learner_client.client import start_learner
from agentloop.training.learner_client.launch import RanksSettings
from agentloop.training.learner_client.protocol import PublishRequest, StepRequest
from agentloop.training.learner_client.settings import LearnerSettings, LoraSettings
from bench.gpu_model import PartFailed, Row, Setup, Size, require_close
from bench.learner import (
    PLAIN_LOOP,
    agentic_batch,
    agentic_lengths,
    compare,
    learner_arm,
    plain_arm,
    siblings_batch,
)

_TIMEOUT_S = 300.0
_BFLOAT16 = 0.05  # by which sums in another order may differ
_THREADS = 2  # of a rank, on a CPU
_RANKS = RanksSettings(threads=_THREADS, start_timeout_s=400)


async def speed(setup: Setup) -> list[Row]:
    """Tokens per second and MFU, of the learner and of a plain loop that torch compiles."""
    settings, batches = setup.learner(), setup.batches()
    best = "compiled" if setup.on_gpu else "packed"
    async with AsyncExitStack() as stack:
        plain = plain_arm(stack, setup.folder, settings, _THREADS, best)
        ours = await learner_arm(stack, setup.folder, settings, 1, _THREADS)
        await compare(plain, [ours], batches, tolerance=_BFLOAT16)
    rows = []
    for arm, name in ((plain, f"plain loop, {best}"), (ours, "learner, ZeRO 1")):
        row = arm.row(setup.size.step_tokens)
        seconds = setup.size.step_tokens / row["tokens/s"]
        figures = {"tokens/s": row["tokens/s"], "MFU": setup.mfu(settings, batches[1], seconds)}
        rows.append({"case": name, **figures, "of the plain loop": row["ratio"]})
    return rows


async def siblings(setup: Setup) -> list[Row]:
    """Tokens per second of sixteen samples of a prompt, with what they share computed once, and for
    each of them, by the plain loop with the learner's head."""
    response = setup.size.micro_batch // 16
    rows: list[Row] = []
    for prompt in (4 * response, response // 4):
        settings = setup.learner(micro_batch_tokens=prompt + 16 * response)
        paths = [setup.folder / f"{prompt}-{seed}" for seed in range(setup.size.num_rounds + 1)]
        for seed, path in enumerate(paths):
            siblings_batch(
                seed, setup.size.vocab, groups=1, siblings=16, prompt=prompt, response=response
            ).save(path)
        async with AsyncExitStack() as stack:
            apart, shared = (
                plain_arm(stack, setup.folder, settings, _THREADS, variant)
                for variant in ("chunked", "shared")
            )
            await compare(apart, [shared], paths, tolerance=_BFLOAT16)
        for arm, form in ((apart, "for each"), (shared, "once")):
            row = arm.row(16 * (prompt + response))
            name = f"prompt of {prompt}, responses of {response}: computed {form}"
            figures = {"tokens/s": row["tokens/s"], "of computing it for each": row["ratio"]}
            rows.append({"case": name, **figures})
    return rows


async def passes(setup: Setup) -> list[Row]:
    """Speed and memory with a whole step in one pass, with passes that grow to what the memory
    holds, and without torch's compiler."""
    batches = setup.batches()
    sizes = {"a whole step in a pass": setup.size.step_tokens, "passes that grow": None}
    rows = [
        await _steps(setup, name, setup.learner(micro_batch_tokens=tokens), batches)
        for name, tokens in sizes.items()
    ]
    with patch.dict(os.environ, TORCH_COMPILE_DISABLE="1"):
        rows.append(await _steps(setup, "not compiled", setup.learner(), setup.batches()))
    return rows


async def zero(setup: Setup) -> list[Row]:
    """Speed and memory by ZeRO's stage; on one rank nothing is shared out.

    Stage 1 is what the variants of `memory` and `offload` compare with.
    """
    return await _variants(setup, {f"ZeRO {n}": {"zero_stage": n} for n in (1, 2, 3)})


async def memory(setup: Setup) -> list[Row]:
    """Speed and memory with activation checkpointing and with LoRA."""
    checkpointed, lora = {"activation_checkpointing": True}, {"lora": LoraSettings(rank=16)}
    return await _variants(
        setup,
        {
            "activation checkpointing": checkpointed,
            "LoRA of rank 16": lora,
            "both": checkpointed | lora,
        },
    )


async def offload(setup: Setup) -> list[Row]:
    """Speed and memory with the optimizer, and the weights, in the host's memory."""
    return await _variants(
        setup,
        {
            "optimizer": {"offload": "optimizer"},
            "optimizer and weights": {"offload": "optimizer+parameters", "zero_stage": 3},
        },
        # A step of the optimizer on a CPU takes seconds.
        size=dataclasses.replace(setup.size, num_rounds=min(2, setup.size.num_rounds)),
    )


async def long(setup: Setup) -> list[Row]:
    """Single samples as long as a reasoning model's."""
    rows = []
    for length in setup.size.long:
        size = dataclasses.replace(setup.size, num_rounds=min(3, setup.size.num_rounds))
        settings = setup.learner(micro_batch_tokens=length, activation_checkpointing=True)
        name = f"a sample of {length:,} tokens"
        rows.append(await _steps(setup, name, settings, setup.batches(size, [length])))
    return rows


async def head(setup: Setup) -> list[Row]:
    """Memory that both passes add to model and gradients, by the chunks of logits."""
    rows: list[Row] = []
    few = dataclasses.replace(setup.size, layers=min(4, setup.size.layers))
    batch = setup.folder / "batch"
    agentic_batch(1, few.micro_batch, few.vocab).save(batch)
    for chunk in (None, 1024, 256):
        settings = setup.learner(few, head_chunk_tokens=chunk or 1)
        file = setup.folder / "settings.json"
        file.write_text(settings.model_dump_json())
        variant = "chunked" if chunk else "packed"
        output = subprocess.check_output(
            [*PLAIN_LOOP, str(file), variant, str(batch)], timeout=_TIMEOUT_S, text=True
        )
        name = f"chunks of {chunk:,}" if chunk else "all logits"
        rows.append({"case": f"vocabulary of {few.vocab:,}, {name}", **json.loads(output)})
    return rows


async def step(setup: Setup) -> list[Row]:
    """An optimizer step in float32, next to the same one on the CPU."""
    size = dataclasses.replace(
        setup.size,
        layers=min(4, setup.size.layers),
        vocab=min(8192, setup.size.vocab),
        step_tokens=min(4096, setup.size.step_tokens),
    )
    settings = setup.learner(size, dtype="float32", publish_dtype="float32")
    batch = setup.batches(size)[0]
    results: dict[str, tuple[Mapping[str, Any], Any]] = {}
    for device in (setup.device, "cpu"):
        name = f"{device}-{len(results)}"
        hidden = patch.dict(os.environ, CUDA_VISIBLE_DEVICES="")
        with hidden if device == "cpu" else nullcontext():
            results[name] = await _one_step(setup.folder / name, settings, batch)
    (metrics, update), (expected, reference) = results.values()
    differs = float(np.linalg.norm(update - reference) / np.linalg.norm(reference))
    row = {
        "case": f"{setup.device} compared with cpu",
        "loss": metrics["loss"],
        "loss on the CPU": expected["loss"],
        "gradient norm": metrics["grad_norm"],
        "gradient norm on the CPU": expected["grad_norm"],
        "relative difference of the update": differs,
    }
    require_close("step", metrics, expected)
    if differs > 0.05:
        raise PartFailed(f"the updates differ by {differs:.1%}: {row}")
    return [row]


async def attention(setup: Setup) -> list[Row]:
    """Each kernel for packed samples: its distance from float32 on a CPU, and its time."""
    import torch

    from agentloop.learner.attention import (
        arguments,
        attention_by_sample,
        flash_runs_on,
        packed_attention,
    )

    size, lengths = setup.size, agentic_lengths(0, setup.size.micro_batch)
    edges = itertools.pairwise([0, *itertools.accumulate(lengths)])
    apart = tuple(PackedSegment(start, end, end) for start, end in edges)
    # As many tokens: a third of them a prompt, then sixteen responses.
    response = size.micro_batch // 24
    prompt = size.micro_batch - 16 * response
    shared = (
        PackedSegment(0, prompt, size.micro_batch),
        *(
            PackedSegment(start, start + response, start + response)
            for start in range(prompt, size.micro_batch, response)
        ),
    )
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(1, heads, size.micro_batch, size.head_dim, generator=generator)
        for heads in (size.heads, size.kv_heads, size.kv_heads)
    ]
    inputs.append(torch.randn(1, size.micro_batch, size.heads, size.head_dim, generator=generator))
    placed = {device: [each.to(device) for each in inputs] for device in ("cpu", setup.device)}

    def run(kernel: Callable[..., Any], dtype: Any, device: str = setup.device) -> list[Any]:
        *tensors, weights = (each.to(dtype, copy=True).requires_grad_() for each in placed[device])
        output = kernel(*tensors)
        output.backward(weights.detach())
        return [output.detach(), *(tensor.grad for tensor in tensors)]

    def packed(segments: tuple[PackedSegment, ...]) -> Callable[..., Any]:
        given = arguments(segments, torch.device(setup.device))
        return lambda q, k, v: packed_attention(None, q, k, v, None, **given)[0]

    def by_sample(segments: tuple[PackedSegment, ...]) -> Callable[..., Any]:
        return lambda q, k, v: attention_by_sample(q, k, v, segments)

    kernels = {"one sample at a time": (apart, by_sample(apart))}
    if flash_runs_on(placed[setup.device][0].bfloat16()):
        kernels["packed: torch's FlashAttention"] = (apart, packed(apart))
        kernels["the same, 16 responses to a prompt"] = (shared, packed(shared))
    if setup.on_gpu:
        flex = flex_attention_over(lengths, setup.device)
        kernels["FlexAttention, compiled"] = (apart, flex)
    exact = {
        segments: run(by_sample(segments), torch.float32, "cpu") for segments in (apart, shared)
    }
    rows = []
    for name, (segments, kernel) in kernels.items():
        outputs = run(kernel, torch.bfloat16)
        pairs = zip(outputs, exact[segments], strict=True)
        error = max(((a.float().cpu() - b).norm() / b.norm()).item() for a, b in pairs)
        if error > 0.02:
            raise PartFailed(f"{name}: differs from float32 by {error:.2%}")
        seconds = statistics.median(
            _seconds(partial(run, kernel, torch.bfloat16), setup.on_gpu)
            for _ in range(3 * size.num_rounds)
        )
        rows.append({"case": name, "ms, both passes": seconds * 1e3, "relative error": error})
    return rows


def flex_attention_over(
    lengths: Sequence[int], device: str, *, compiled: bool = True
) -> Callable[..., Any]:
    """Return torch's FlexAttention over packed samples, with the shapes of our own kernels."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(device)

    def visible(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (numbers[query] == numbers[key]) & (query >= key)

    mask = create_block_mask(visible, None, None, sum(lengths), sum(lengths), device=device)
    attend = torch.compile(flex_attention) if compiled else flex_attention
    return lambda q, k, v: attend(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)


def _seconds(work: Callable[[], Any], on_gpu: bool) -> float:
    import torch

    if on_gpu:
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - started


async def _variants(
    setup: Setup, variants: Mapping[str, Mapping[str, Any]], size: Size | None = None
) -> list[Row]:
    """Measure the learner with each of these settings; their first losses must agree."""
    rows: list[Row] = []
    for name, more in variants.items():
        row = await _steps(setup, name, setup.learner(**more), setup.batches(size))
        rows.append(row)
        require_close(name, row, rows[0])
    return rows


async def _steps(
    setup: Setup, name: str, settings: LearnerSettings, batches: Sequence[Path]
) -> Row:
    """Measure a learner's steps on all batches but the first."""
    async with start_learner(
        settings,
        _RANKS,
        log_dir=setup.folder / name,
        on_progress=lambda _: None,
    ) as (learner, _):
        replies = [
            (await learner.ask(StepRequest(batch=path), timeout_s=_TIMEOUT_S)).metrics()
            for path in batches
        ]
    row: Row = {"case": name, "loss": replies[0]["loss"]}
    if replies[0]["num_too_long"] or replies[0]["skipped"]:
        raise PartFailed(f"{name}: nothing was trained on: {replies[0]}")
    for figure, key in (("tokens/s", "tokens_per_s"), ("MFU", "mfu")):
        values = [reply[key] for reply in replies[1:] if reply.get(key) is not None]
        row[figure] = statistics.median(v for v in values if v is not None) if values else None
    peaks = [reply["peak_memory_gib"] or 0.0 for reply in replies if "peak_memory_gib" in reply]
    row["peak GiB"], row["planned GiB"] = max(peaks, default=None), setup.planned_gib(settings)
    return row


async def _one_step(
    folder: Path, settings: LearnerSettings, batch: Path
) -> tuple[Mapping[str, Any], Any]:
    """Return a step's metrics and how it changes the weights, end to end."""
    async with start_learner(settings, _RANKS, log_dir=folder, on_progress=lambda _: None) as (
        learner,
        _,
    ):
        ask = partial(learner.ask, timeout_s=_TIMEOUT_S)
        await ask(PublishRequest(folder=folder / "before", version="0"))
        reply = await ask(StepRequest(batch=batch))
        await ask(PublishRequest(folder=folder / "after", version="1"))
    before, after = (_weights(folder / name) for name in ("before", "after"))
    return reply.metrics(), after - before


def _weights(folder: Path) -> Any:
    weights: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
    return np.concatenate([weights[name].ravel() for name in sorted(weights)])
