"""The KL divergence to the initial weights, with a frozen copy and with LoRA, against PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agentloop-rl[train]'")

pytest.importorskip("peft", reason="needs peft: pip install 'agentloop-rl[train]'")

from agentloop.learner.lora import add_adapters
from agentloop.models import SMALL
from agentloop.training.learner_client.settings import (
    LearnerSettings,
    LoraSettings,
    LossSettings,
    OptimizerSettings,
)
from tests.learner.plain import Plain, load
from tests.learner.ranks import Ranks, make_batch, started, with_kept_ids

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

KL = 0.5
SETTINGS = LearnerSettings(
    model=SMALL,
    micro_batch_tokens=57,
    head_chunk_tokens=16,
    collective_timeout_s=60,
    loss=LossSettings(kl_coef=KL),
    optimizer=OptimizerSettings(lr=1e-4, warmup_steps=0, eps=1e-5),
    deepspeed={"zero_optimization": {"stage3_param_persistence_threshold": 0}},
)
LORA = LoraSettings(rank=4, alpha=8)
KINDS = [(2, 1, None), (1, 2, None), (3, 2, None), (2, 1, LORA), (3, 2, LORA)]


@pytest.fixture(
    scope="module",
    params=KINDS,
    ids=lambda kind: f"zero{kind[0]}x{kind[1]}{'-lora' if kind[2] else ''}",
)
def kind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LearnerSettings, Ranks, Path]]:
    stage, num_ranks, lora = request.param
    folder = tmp_path_factory.mktemp("reference")
    update = {"zero_stage": stage, "lora": lora or LoraSettings()}
    settings = SETTINGS.model_copy(update=update)
    with started(folder, settings, num_ranks) as ranks:
        assert ranks.ask("save", folder=folder / "begin" / "0")["ok"]
        yield settings, ranks, folder


def plain(settings: LearnerSettings) -> Plain:
    model: Any = load(settings)
    if settings.lora.rank:
        add_adapters(model, settings)
    return Plain(settings, model)


@pytest.mark.parametrize("is_cut", [False, True])
def test_reference_is_the_initial_model(
    kind: tuple[LearnerSettings, Ranks, Path], is_cut: bool
) -> None:
    settings, ranks, folder = kind
    assert ranks.ask("load", folder=folder / "begin" / "0")["num_updates"] == 0
    batch = make_batch()
    batch = make_batch(old_logprobs=batch.logprobs)
    if is_cut:
        batch = replace(with_kept_ids(batch), old_logprobs=batch.logprobs / 4)
    batch.save(folder / "batch")
    expected = plain(settings)
    for step in range(3):
        wanted, result = expected.step(batch), ranks.ask("step", batch=folder / "batch")
        assert result["kl"] == pytest.approx(wanted["kl"], rel=2e-2, abs=1e-6)
        assert result["loss"] == pytest.approx(wanted["loss"], rel=1e-3, abs=2e-4)
        assert result["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-2)
        if step == 0:
            assert result["kl"] == pytest.approx(0, abs=1e-6)
        else:
            assert result["kl"] > 5e-5, "the steps are too small to tell"
        assert result["ref_logprobs_s"] > 0


def test_checkpoint_does_not_move_the_reference(kind: tuple[LearnerSettings, Ranks, Path]) -> None:
    _, ranks, folder = kind
    ranks.ask("load", folder=folder / "begin" / "0")
    make_batch(1).save(folder / "one")
    ranks.ask("step", batch=folder / "one")
    assert ranks.ask("save", folder=folder / "later" / "1")["ok"]
    first = ranks.ask("step", batch=folder / "one")
    ranks.ask("load", folder=folder / "later" / "1")
    again = ranks.ask("step", batch=folder / "one")
    assert first["kl"] > 1e-5
    assert (again["kl"], again["loss"]) == (first["kl"], first["loss"])
