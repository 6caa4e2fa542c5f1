"""LoRA under ZeRO 1, 2 and 3, against peft's layers in plain PyTorch, one sample at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agentloop-rl[train]'")

pytest.importorskip("peft", reason="needs peft: pip install 'agentloop-rl[train]'")

import torch
from safetensors.numpy import load as load_arrays
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from agentloop.errors import ModelError
from agentloop.learner.lora import add_adapters
from agentloop.learner.policy import load_model
from agentloop.models import SMALL
from agentloop.training.learner_client.settings import (
    LearnerSettings,
    LoraSettings,
    OptimizerSettings,
)
from tests.learner import plain
from tests.learner.ranks import Ranks, make_batch, started

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

SETTINGS = LearnerSettings(
    model=SMALL,
    micro_batch_tokens=57,
    head_chunk_tokens=16,
    publish_dtype="float32",
    max_shard_mib=1,
    collective_timeout_s=60,
    optimizer=OptimizerSettings(lr=1e-3, warmup_steps=0, eps=1e-5),
    lora=LoraSettings(rank=4, alpha=8),
    deepspeed={"zero_optimization": {"stage3_param_persistence_threshold": 0}},
)
KINDS = [(1, 1), (2, 2), (3, 2)]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"zero{kind[0]}x{kind[1]}")
def started_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Ranks, Path]]:
    stage, num_ranks = request.param
    folder = tmp_path_factory.mktemp("lora")
    settings = SETTINGS.model_copy(update={"zero_stage": stage})
    with started(folder, settings, num_ranks) as ranks:
        assert ranks.ask("save", folder=folder / "begin" / "0")["ok"]
        yield ranks, folder


@pytest.fixture
def both(started_ranks: tuple[Ranks, Path]) -> tuple[Ranks, Path]:
    ranks, folder = started_ranks
    assert ranks.ask("load", folder=folder / "begin" / "0")["num_updates"] == 0
    return ranks, folder


def published(ranks: Ranks, folder: Path) -> dict[str, Any]:
    assert ranks.ask("publish", folder=folder, version="1")["ok"]
    shards = sorted(folder.glob("*.safetensors"))
    return {name: tensor for shard in shards for name, tensor in load_file(shard).items()}


def merged_by_hand(model: Any) -> dict[str, Any]:
    """Return W + alpha / rank * B A of each layer with adapters."""
    table = dict(model.named_parameters())
    result = {}
    for name, weight in table.items():
        if name.endswith(".base_layer.weight"):
            layer = name.removesuffix(".base_layer.weight")
            a, b = (table[f"{layer}.lora_{single}.lora.weight"] for single in "AB")
            result[f"{layer}.weight"] = weight + 8 / 4 * b @ a
        elif ".lora_" not in name:
            result[name] = weight
    return result


def test_before_any_step_it_is_the_model(both: tuple[Ranks, Path]) -> None:
    ranks, folder = both
    result = published(ranks, folder / "before")
    theirs = dict(plain.load(SETTINGS).named_parameters())
    assert result.keys() == theirs.keys()
    assert all(torch.equal(result[name], theirs[name]) for name in result)
    num_parameters = sum(tensor.numel() for tensor in theirs.values())
    assert ranks.ready["num_parameters"] == num_parameters + ranks.ready["num_trained"]
    assert 0 < ranks.ready["num_trained"] < num_parameters / 10


def test_four_steps_are_those_of_plain_pytorch(both: tuple[Ranks, Path]) -> None:
    ranks, folder = both
    model = plain.load(SETTINGS)
    add_adapters(model, SETTINGS)
    before = {name: p.detach().clone() for name, p in merged_by_hand(model).items()}
    reference = plain.Plain(SETTINGS, model)
    batch = make_batch()
    batch = make_batch(old_logprobs=batch.logprobs)
    batch.save(folder / "batch")
    for _ in range(4):
        expected, result = reference.step(batch), ranks.ask("step", batch=folder / "batch")
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-4)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    weights, current = published(ranks, folder / "four"), merged_by_hand(model)
    assert weights.keys() == current.keys()
    moved = {name: (current[name] - before[name]).abs().max().item() for name in current}
    assert {name for name, by in moved.items() if by} == {
        name for name in current if name.endswith("_proj.weight")
    }
    differ = max((current[name] - weights[name]).abs().max().item() for name in current)
    print(f"largest update {max(moved.values()):.2e}, difference {differ:.2e}")
    assert max(moved.values()) > 2e-3
    assert differ < 5e-6


def test_servers_and_learner_have_the_same_model(both: tuple[Ranks, Path]) -> None:
    ranks, folder = both
    batch = make_batch(3)
    batch.save(folder / "batch")
    ranks.ask("step", batch=folder / "batch")
    assert ranks.ask("logprobs", batch=folder / "batch", out=folder / "out")["ok"]
    result = load_arrays((folder / "out").read_bytes())["logprobs"]
    published(ranks, folder / "stepped")
    model = Qwen3ForCausalLM.from_pretrained(folder / "stepped", dtype=torch.float32)
    expected = np.zeros_like(result)
    with torch.no_grad():
        for index in range(len(batch.lengths)):
            new, _, place = plain.scores(model, batch, index)
            expected[place] = new.numpy()
    np.testing.assert_allclose(result, expected * batch.mask, atol=2e-4)


def test_training_goes_on_bit_by_bit_from_adapters_alone(both: tuple[Ranks, Path]) -> None:
    ranks, folder = both
    make_batch(1).save(folder / "one")
    make_batch(2).save(folder / "two")
    assert ranks.ask("step", batch=folder / "one")["num_updates"] == 1
    assert ranks.ask("save", folder=folder / "save" / "a")["ok"]
    first = ranks.ask("step", batch=folder / "two")
    weights = ranks.ask("publish", folder=folder / "first", version="2")["sha256"]
    assert ranks.ask("load", folder=folder / "save" / "a")["num_updates"] == 1
    again = ranks.ask("step", batch=folder / "two")
    assert (again["loss"], again["grad_norm"]) == (first["loss"], first["grad_norm"])
    assert ranks.ask("publish", folder=folder / "again", version="2")["sha256"] == weights
    size = sum(file.stat().st_size for file in (folder / "save" / "a").rglob("*"))
    assert size < 0.7 * (SMALL / "model.safetensors").stat().st_size * 2  # that file is bfloat16


def test_layers_that_cannot_have_adapters_are_named() -> None:
    for target in ("nothing", "embed_tokens", "lm_head"):
        lora = LoraSettings(rank=2, targets=(target,))
        with pytest.raises(ModelError, match=f"lora.targets: .*{target}"):
            load_model(LearnerSettings(model=SMALL, lora=lora))


def test_adapters_on_some_layers_only() -> None:
    lora = LoraSettings(rank=2, targets=("q_proj", "v_proj"))
    model = load_model(LearnerSettings(model=SMALL, dtype="bfloat16", lora=lora))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[-4] for name in trained} == {"q_proj", "v_proj"}
    assert {p.dtype for p in trained.values()} == {torch.bfloat16}
