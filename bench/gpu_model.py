"""Parts of `python -m bench.gpu` that all share: the model's size, settings and costs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from agentloop.training.learner_client.launch import RanksSettings
from agentloop.training.learner_client.settings import LearnerSettings, OptimizerSettings
from agentloop.training.plan.resources import ModelShape, learner_memory
from bench.learner import agentic_batch

__all__ = ["FULL", "SIZES", "TINY", "PartFailed", "Row", "Setup", "Size"]

Row = dict[str, Any]
"""A row of the result table: `case`, and figures by name."""


class PartFailed(Exception):
    """A measured value is wrong."""


@dataclass(frozen=True)
class Size:
    """The size of a measurement.

    Attributes:
        hidden, layers, heads, kv_heads, head_dim, mlp, vocab: Dimensions of a Qwen3.
        micro_batch: Tokens in a forward pass, at least those of the longest agentic sample.
        step_tokens: Tokens in an optimizer step.
        long: Lengths of single samples.
        num_rounds: Steps that are measured, after one to warm up.
        num_requests, num_tokens: Concurrent requests of a server, tokens of each.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    micro_batch: int
    step_tokens: int
    long: tuple[int, ...]
    num_rounds: int
    num_requests: int
    num_tokens: int

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": max(self.long),
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
        }


# Qwen3-0.6B's.
FULL = Size(
    hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, mlp=3072, vocab=151_936,
    micro_batch=8192, step_tokens=32_768, long=(12_288, 32_768), num_rounds=5,
    num_requests=64, num_tokens=1000,
)  # fmt: skip
TINY = Size(
    hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=192, vocab=512,
    micro_batch=2048, step_tokens=4096, long=(768, 2048), num_rounds=1,
    num_requests=4, num_tokens=60,
)  # fmt: skip
SIZES = {"full": FULL, "tiny": TINY}


@dataclass(frozen=True)
class Setup:
    """The device of a part, its size and a folder of its own."""

    device: str
    size: Size
    folder: Path

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @cached_property
    def device_name(self) -> str:
        """The name of the device as its vendor gives it."""
        import torch

        return torch.cuda.get_device_name() if self.on_gpu else "cpu"

    def learner(self, size: Size | None = None, **more: Any) -> LearnerSettings:
        """Write a model of random weights, unless it exists; return the settings of its learner."""
        size = size or self.size
        folder = self.folder / f"model-{size.layers}-{size.vocab}"
        if not folder.exists():
            _write_model(folder, size, self.device)
        usual = {
            "model": folder,
            "dtype": "bfloat16",
            "zero_stage": 1,
            "micro_batch_tokens": size.micro_batch,
            "optimizer": OptimizerSettings(lr=1e-5, warmup_steps=0),
        }
        return LearnerSettings.model_validate(usual | more)

    def batches(self, size: Size | None = None, lengths: Sequence[int] = ()) -> list[Path]:
        """Write one batch to warm up and one for each round."""
        size = size or self.size
        num_tokens = sum(lengths) if lengths else size.step_tokens
        paths = []
        for seed in range(size.num_rounds + 1):
            path = self.folder / f"batch-{size.vocab}-{num_tokens}-{seed}.safetensors"
            agentic_batch(seed, num_tokens, size.vocab, lengths).save(path)
            paths.append(path)
        return paths

    def planned_gib(self, settings: LearnerSettings) -> float:
        """Return what `agentloop train --dry-run` would say of the learner's memory."""
        shape = ModelShape.read(settings.model)
        return learner_memory(shape, settings, RanksSettings(), self.on_gpu).total / 2**30

    def mfu(self, settings: LearnerSettings, batch: Path, seconds: float) -> float | None:
        """Return the utilization of the device if it trains on `batch` within `seconds`."""
        import torch

        from agentloop.learner.batch import Batch
        from agentloop.learner.policy import load_model
        from agentloop.learner.utilization import Work, peak_tflops

        peak = peak_tflops(self.device_name, settings.dtype)
        with torch.device("meta"):
            work = Work.of(load_model(settings.model_copy(update={"init": "random"})))
        if peak is None or work is None:
            return None
        loaded = Batch.load(batch)
        return (
            work.of_batch(loaded.lengths.tolist(), int(loaded.mask.sum())) / seconds / (peak * 1e12)
        )


def _write_model(folder: Path, size: Size, device: str) -> None:
    """Write a model in bfloat16, once for all learners of a part.

    On a CPU it takes a learner half a minute to draw as many weights in bfloat16.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(size.config()))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**size.config()))
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, parameter in model.named_parameters():
        drawn = torch.ones(parameter.shape, device=device)  # norms
        if parameter.ndim > 1:
            drawn.normal_(0, 0.02, generator=generator)
        weights[name] = drawn.bfloat16().cpu()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def require_close(name: str, metrics: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Check that a first step has the same loss.

    Raises:
        PartFailed: It differs by more than bfloat16 explains.
    """
    loss, expected_loss = metrics["loss"], expected["loss"]
    if (
        loss is None
        or expected_loss is None
        or abs(loss - expected_loss) > 0.05 * abs(expected_loss) + 5e-4
    ):
        raise PartFailed(f"{name}: the first step's loss is {loss}, not {expected_loss}")
