"""Benchmark of the learner: speed relative to plain PyTorch, gain of packing, memory by vocabulary.

    python -m bench.learner speed                tokens per second, as ratios to the plain loop
    python -m bench.learner packing              packed samples compared with padded ones
    python -m bench.learner siblings             what samples share, computed once and for each
    python -m bench.learner memory               peak of one pass by vocabulary and by head
    python -m bench.learner all --json out.json

speed: the learner's real processes, asked over their socket, next to a process with a typical
handwritten loop: the same weights, micro-batches and attention, all logits of a micro-batch at
once, AdamW, clipped gradients. Each arm's step runs between two steps of the plain loop, and its
ratio is taken to their mean, because the machine's speed varies from minute to minute. It is an
error if an arm's first loss or gradient norm differs from the plain loop's. The plain loop is
bench/plain_loop.py.

Lengths are agentic (a long tail: median 330 tokens, mean about 440, at most 2,048). The models are
Qwen3 with random weights, created on the fly; their heads have the fraction of the parameters that
they have in Qwen3 of 0.6B to 4B. Not measured: several machines, bfloat16, anything that needs a
GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from agentloop.child_environment import wait_policy
from agentloop.learner.batch import Batch
from agentloop.training.learner_client.client import start_learner
from agentloop.training.learner_client.launch import RanksSettings
from agentloop.training.learner_client.protocol import StepRequest
from agentloop.training.learner_client.settings import LearnerSettings, OptimizerSettings
from bench.command import numbers, parser_for, words
from bench.micro_batches import PACKED, arrange, waste
from bench.sandbox import cpu_of_tree

PLAIN_LOOP = (sys.executable, "-m", "bench.plain_loop")
_MAX_LENGTH = 2048
_GROUP = 8
_STEP_TIMEOUT_S = 600.0

PACKINGS = ("packed", "masked", "sorted", "unsorted")
# Hidden size, layers, heads, vocabulary.
SIZES = {"0.8M": (128, 3, 4, 512), "4.5M": (256, 5, 4, 2048), "23M": (512, 6, 8, 8192)}

# --- training data --------------------------------------------------------------------------------


def agentic_lengths(seed: int, num_tokens: int) -> list[int]:
    """Return lengths of trajectories that sum to `num_tokens`; log-normal, from 32 to 2,048."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while (num_left := num_tokens - sum(lengths)) > 0:
        drawn = int(np.clip(rng.lognormal(math.log(330), 0.8), 32, _MAX_LENGTH))
        if num_left - drawn < 32:  # the minimum length
            drawn = num_left if num_left <= _MAX_LENGTH else num_left // 2
        lengths.append(drawn)
    return lengths


def agentic_batch(
    seed: int, num_tokens: int, vocab: int, fixed_lengths: Sequence[int] = ()
) -> Batch:
    """Return a batch of random ids, with the lengths that are given or else agentic ones.

    A fifth of each sample is the prompt. Three quarters of the rest are sampled, in turns of 96
    tokens with observations of 32.
    """
    lengths = np.asarray(fixed_lengths or agentic_lengths(seed, num_tokens), np.int32)
    rng = np.random.default_rng(seed)
    masks = [(np.arange(n) >= n // 5) & ((np.arange(n) - n // 5) % 128 < 96) for n in lengths]
    mask = np.concatenate(masks).astype(np.uint8)
    mask[np.cumsum(lengths) - lengths] = 0
    groups = np.arange(len(lengths), dtype=np.int32) // _GROUP
    counts = np.bincount(np.repeat(groups, lengths), weights=mask)
    return Batch(
        ids=rng.integers(0, vocab, num_tokens, dtype=np.int32),
        mask=mask,
        logprobs=(-math.log(vocab) - 0.1 * rng.random(num_tokens)).astype(np.float32) * mask,
        advantages=np.repeat(rng.choice(np.asarray([-1, 1], np.float32), len(lengths)), lengths)
        * mask,
        weights=(mask / counts[np.repeat(groups, lengths)]).astype(np.float32),
        lengths=lengths,
        groups=groups,
    )


def siblings_batch(
    seed: int, vocab: int, *, groups: int, siblings: int, prompt: int, response: int
) -> Batch:
    """Return a batch of random ids: prompts with `siblings` responses each."""
    rng = np.random.default_rng(seed)
    num_samples, length = groups * siblings, prompt + response
    ids = rng.integers(0, vocab, (num_samples, length), dtype=np.int32)
    ids[:, :prompt] = np.repeat(ids[::siblings, :prompt], siblings, 0)
    mask = np.tile(np.arange(length) >= prompt, num_samples)
    noise = 0.1 * rng.random(mask.size)
    signs = rng.choice(np.asarray([-1, 1], np.float32), num_samples)
    return Batch(
        ids=ids.ravel(),
        mask=mask.astype(np.uint8),
        logprobs=((-math.log(vocab) - noise) * mask).astype(np.float32),
        advantages=np.repeat(signs, length) * mask,
        weights=mask.astype(np.float32),
        lengths=np.full(num_samples, length, np.int32),
        groups=np.repeat(np.arange(groups, dtype=np.int32), siblings),
    )


# --- arms, and how they are compared --------------------------------------------------------------


class Arm:
    """A measured program and its rounds.

    Rounds are wall-clock and CPU seconds of all its processes, and the speed by either as a ratio
    to the base arm's.
    """

    def __init__(self, name: str, step: Callable[[Path], Awaitable[Mapping[str, Any]]]) -> None:
        self.name, self.step = name, step
        self.seconds: list[tuple[float, float]] = []
        self.ratios: list[tuple[float, float]] = []

    async def measure(self, batch: Path) -> None:
        wall_s, cpu_s = time.perf_counter(), cpu_of_tree(os.getpid())
        await self.step(batch)
        cpu_s, wall_s = cpu_of_tree(os.getpid()) - cpu_s, time.perf_counter() - wall_s
        self.seconds.append((wall_s, cpu_s))

    def row(self, num_tokens: int) -> dict[str, Any]:
        wall_s, cpu_s = map(statistics.median, zip(*self.seconds, strict=True))
        ratios, cpu_ratios = zip(*self.ratios or [(1.0, 1.0)], strict=True)
        return {
            "arm": self.name,
            "tokens/s": num_tokens / wall_s,
            "tokens/CPU s": num_tokens / cpu_s,
            "ratio": statistics.median(ratios),
            "ratio by CPU": statistics.median(cpu_ratios),
            "ratios": ratios,
            "by CPU": cpu_ratios,
        }


async def compare(
    base: Arm, arms: Sequence[Arm], batches: Sequence[Path], *, tolerance: float = 0.01
) -> None:
    """Run all arms. The first batch is a warm-up and checks the arms' results against the
    base's."""
    expected = await base.step(batches[0])
    for arm in arms:
        result = await arm.step(batches[0])
        for name in ("loss", "grad_norm"):
            if not math.isclose(
                result[name], expected[name], rel_tol=tolerance, abs_tol=tolerance / 100
            ):
                raise SystemExit(f"{arm.name}: {name} {result[name]}, not {expected[name]}")
    for batch in batches[1:]:
        await base.measure(batch)
        for arm in arms:
            await arm.measure(batch)
            await base.measure(batch)
            wall, cpu = np.mean(base.seconds[-2:], axis=0) / arm.seconds[-1]
            arm.ratios.append((float(wall), float(cpu)))
            print(f"  {arm.name}: {wall:.3f}, by CPU time {cpu:.3f}", file=sys.stderr)


def plain_arm(
    stack: AsyncExitStack, folder: Path, settings: LearnerSettings, threads: int, variant: str
) -> Arm:
    path = folder / f"{variant}.json"
    path.write_text(settings.model_dump_json())
    command, pipe = [*PLAIN_LOOP, str(path), variant], subprocess.PIPE
    # The same as for the learner's ranks.
    environment = {**os.environ, **wait_policy(os.environ), "OMP_NUM_THREADS": str(threads)}
    # A session of its own, like the learner's ranks: Linux schedules CPU time by session.
    # At the end its stdin is closed, which ends it.
    process = stack.enter_context(
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment, start_new_session=True
        )
    )

    async def step(batch: Path) -> Mapping[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        print(batch, file=process.stdin, flush=True)
        result: dict[str, Any] = json.loads(process.stdout.readline())
        return result

    return Arm(f"plain, {variant}", step)


async def learner_arm(
    stack: AsyncExitStack, folder: Path, settings: LearnerSettings, ranks: int, threads: int
) -> Arm:
    name = f"ZeRO {settings.zero_stage}, {ranks} x {threads} threads"
    learner, _ = await stack.enter_async_context(
        start_learner(
            settings,
            RanksSettings(nproc_per_node=ranks, threads=threads),
            log_dir=folder / name,
            on_progress=lambda _: None,
        )
    )

    async def step(batch: Path) -> Mapping[str, Any]:
        reply = await learner.ask(StepRequest(batch=batch), timeout_s=_STEP_TIMEOUT_S)
        return reply.metrics()

    return Arm(name, step)


def _settings(
    folder: Path, size: str, budget: int, chunk: int, vocab: int | None = None
) -> LearnerSettings:
    hidden, layers, heads, usual_vocab = SIZES[size]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab or usual_vocab,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 64,
        "max_position_embeddings": _MAX_LENGTH,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    optimizer = OptimizerSettings(lr=1e-5, warmup_steps=0)
    return LearnerSettings(
        model=folder,
        init="random",
        micro_batch_tokens=budget,
        head_chunk_tokens=chunk,
        optimizer=optimizer,
    )


def _batches(folder: Path, size: str, options: argparse.Namespace) -> list[Path]:
    """Write a small batch for warming up and one for each round."""
    paths = [folder / f"batch-{seed}.safetensors" for seed in range(options.rounds + 1)]
    for seed, path in enumerate(paths):
        agentic_batch(seed, options.tokens if seed else 2048, SIZES[size][-1]).save(path)
    return paths


# --- the benchmarks -------------------------------------------------------------------------------


async def speed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure, for each size and number of threads, one rank with all threads and one rank per
    thread."""
    rows = []
    for size, threads in ((s, t) for s in options.sizes for t in options.threads):
        print(f"{size}, {threads} threads", file=sys.stderr)
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            settings = _settings(folder, size, options.micro_batch, options.head_chunk)
            plain, *arms = (
                plain_arm(stack, folder, settings, threads, variant)
                for variant in ("packed", "chunked")
            )
            for ranks in [1] if threads == 1 or options.one_rank else [1, threads]:
                for stage in options.stages:
                    staged = settings.model_copy(update={"zero_stage": stage})
                    arm = await learner_arm(stack, folder, staged, ranks, threads // ranks)
                    arms.append(arm)
            await compare(plain, arms, _batches(folder, size, options))
        shape = {"size": size, "threads": threads}
        rows += [{**shape, **arm.row(options.tokens)} for arm in (plain, *arms)]
    return rows


async def packing(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the same samples in the plain loop, packed and padded; `waste` is the fraction of
    padding."""
    rows = []
    for size in options.sizes:
        print(f"{size}, packing", file=sys.stderr)
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            settings = _settings(folder, size, options.micro_batch, options.head_chunk)
            batches = _batches(folder, size, options)
            arms = [
                plain_arm(stack, folder, settings, max(options.threads), variant)
                for variant in PACKINGS
            ]
            await compare(arms[0], arms[1:], batches)
            lengths = [Batch.load(path).lengths.tolist() for path in batches[1:]]
        for variant, arm in zip(PACKINGS, arms, strict=True):
            shares = [
                waste(sample_lengths, arrange(sample_lengths, options.micro_batch, variant))
                for sample_lengths in lengths
            ]
            wasted = 0.0 if variant in PACKED else statistics.median(shares)
            rows.append({"size": size, "waste": wasted, **arm.row(options.tokens)})
    return rows


async def siblings(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure siblings by the ratio of prompt to response, with what they share computed for each
    of them, and once, by the plain loop with the learner's head."""
    shapes = {
        "4": {"groups": 1, "siblings": 16, "prompt": 512, "response": 128},
        "1/4": {"groups": 1, "siblings": 16, "prompt": 128, "response": 512},
        "1/16": {"groups": 1, "siblings": 16, "prompt": 32, "response": 512},
        "nothing shared": {"groups": 12, "siblings": 1, "prompt": 512, "response": 128},
    }
    rows = []
    for size, (name, shape) in itertools.product(options.sizes, shapes.items()):
        print(f"{size}, prompt to response {name}", file=sys.stderr)
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            settings = _settings(folder, size, options.micro_batch, options.head_chunk)
            batches = [folder / f"batch-{seed}" for seed in range(options.rounds + 1)]
            for seed, path in enumerate(batches):
                siblings_batch(seed, SIZES[size][-1], **shape).save(path)
            apart, shared = (
                plain_arm(stack, folder, settings, max(options.threads), variant)
                for variant in ("chunked", "shared")
            )
            await compare(apart, [shared], batches)
            num_tokens = len(Batch.load(batches[0]).ids)
        shaped = {"size": size, "prompt to response": name}
        rows += [{**shaped, **arm.row(num_tokens)} for arm in (apart, shared)]
    return rows


async def memory(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the peak that a forward and a backward pass add to model and gradients, in
    processes."""
    rows = []
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(options.threads))}
    for vocab, chunk in ((v, c) for v in options.vocab for c in (None, *options.chunks)):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            settings = _settings(folder, "4.5M", options.micro_batch, chunk or 1, vocab)
            (folder / "settings.json").write_text(settings.model_dump_json())
            agentic_batch(1, options.micro_batch, vocab).save(folder / "batch")
            variant = "chunked" if chunk else "packed"
            command = [*PLAIN_LOOP, str(folder / "settings.json"), variant, str(folder / "batch")]
            output = subprocess.check_output(command, env=environment, timeout=_STEP_TIMEOUT_S)
        rows.append({"vocabulary": vocab, "chunk": chunk or "none", **json.loads(output)})
        print(f"  {rows[-1]}", file=sys.stderr)
    return rows


# --- the command ----------------------------------------------------------------------------------

BENCHMARKS = {"speed": speed, "packing": packing, "siblings": siblings, "memory": memory}


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [" | ".join(rows[0]), "|".join("---" for _ in rows[0])]
    lines += [" | ".join(map(_cell, row.values())) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_cell, value))
    return f"{value:,.{0 if value > 50 else 2}f}" if isinstance(value, float) else str(value)


def _parser() -> argparse.ArgumentParser:
    parser = parser_for("learner", __doc__)
    parser.add_argument("what", choices=[*BENCHMARKS, "all"])
    parser.add_argument("--sizes", type=words, default=["4.5M"])
    parser.add_argument(
        "--threads", type=numbers, default=[2], help="numbers of threads; 1,2 measures both"
    )
    parser.add_argument("--stages", type=numbers, default=[1, 2, 3], help="stages of ZeRO")
    parser.add_argument("--one-rank", action="store_true", help="measure one rank only")
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens per step")
    parser.add_argument("--micro-batch", type=int, default=4096, help="tokens per forward pass")
    parser.add_argument(
        "--head-chunk", type=int, default=1024, help="tokens per chunk of the learner's head"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab", type=numbers, default=[512, 32_768, 151_936])
    parser.add_argument(
        "--chunks", type=numbers, default=[1024, 256], help="chunk sizes of the head"
    )
    parser.add_argument("--json", type=Path, help="file for all figures")
    return parser


async def _run(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    results = {}
    for name in list(BENCHMARKS) if options.what == "all" else [options.what]:
        results[name] = await BENCHMARKS[name](options)
        print(f"{name}\n\n{_table(results[name])}\n", flush=True)
    return results


def main() -> None:
    options = _parser().parse_args()
    results = anyio.run(_run, options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
