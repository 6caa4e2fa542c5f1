"""Checkpoints are loaded by more or fewer ranks than saved them, or with another ZeRO stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agentloop-rl[train]'")

from safetensors.torch import load_file

from agentloop.models import SMALL
from agentloop.training.learner_client.settings import LearnerSettings
from tests.learner.ranks import Ranks, make_batch, started
from tests.learner.test_ranks import SETTINGS

pytestmark = [pytest.mark.real, pytest.mark.timeout(480)]  # two learners' starts

WRITERS = [(1, 1), (2, 2), (3, 2)]  # (ZeRO stage, number of ranks)
READERS = [(1, 2), (2, 1), (3, 1)]
Written = Callable[[tuple[int, int]], tuple[Path, dict[str, Any]]]
BFLOAT16_LORA = {"dtype": "bfloat16", "lora": {"rank": 4, "alpha": 8}}


def changed(**values: Any) -> LearnerSettings:
    optimizer = {**SETTINGS.optimizer.model_dump(), "weight_decay": 0.1}
    return LearnerSettings.model_validate(
        {**SETTINGS.model_dump(), "optimizer": optimizer, **values}
    )


def write(folder: Path, stage: int, num_ranks: int, **values: Any) -> dict[str, Any]:
    """Save before the first step and after two; return the results of the third."""
    make_batch().save(folder / "batch")
    with started(folder / "ranks", changed(zero_stage=stage, **values), num_ranks) as ranks:
        assert ranks.ask("save", folder=folder / "0", state={"step": 0})["ok"]
        for _ in range(2):
            ranks.ask("step", batch=folder / "batch", lr=1e-3)
        assert ranks.ask("save", folder=folder / "2", state={"step": 2})["ok"]
        return step(ranks, folder, folder / "expected")


def step(ranks: Ranks, folder: Path, out: Path) -> dict[str, Any]:
    result = ranks.ask("step", batch=folder / "batch", lr=1e-3)
    assert ranks.ask("publish", folder=out, version="3")["ok"]
    weights = [load_file(shard) for shard in sorted(out.glob("*.safetensors"))]
    return {**result, "weights": {name: first for part in weights for name, first in part.items()}}


def differ(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Write each checkpoint when a test first asks for it."""

    @cache
    def by(writer: tuple[int, int]) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("written")
        return folder, write(folder, *writer)

    return by


@pytest.fixture(scope="module", params=READERS, ids=lambda kind: f"zero{kind[0]}x{kind[1]}")
def reader(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    stage, num_ranks = request.param
    folder = tmp_path_factory.mktemp("reader")
    # Also stage 3 with its default threshold, where each rank holds these small weights whole.
    with started(folder, changed(zero_stage=stage, deepspeed={}), num_ranks) as ranks:
        yield ranks


@pytest.mark.parametrize("writer", WRITERS, ids=lambda kind: f"of-zero{kind[0]}x{kind[1]}")
def test_training_resumes_with_other_ranks_as_with_the_same(
    reader: Ranks, written: Written, writer: tuple[int, int], tmp_path: Path
) -> None:
    folder, expected = written(writer)
    loaded = reader.ask("load", folder=folder / "2")
    assert loaded["ok"], loaded
    assert (loaded["num_updates"], loaded["state"]["step"]) == (2, 2)
    result = step(reader, folder, tmp_path / "found")
    assert result["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    start = load_file(SMALL / "model.safetensors")
    assert differ(expected["weights"], start) > 1e-3
    assert differ(result["weights"], expected["weights"]) < 5e-6
    assert list(folder.glob(".*")) == [], "the converted checkpoint is removed"
    refused = reader.ask("load", folder=folder / "0")
    assert "before the first step; start a new run instead" in refused["error"]


def test_adapters_in_bfloat16_too(tmp_path: Path) -> None:
    expected = write(tmp_path, 3, 2, **BFLOAT16_LORA)
    with started(tmp_path / "one", changed(zero_stage=2, **BFLOAT16_LORA), 1) as ranks:
        loaded = ranks.ask("load", folder=tmp_path / "2")
        assert loaded["ok"], loaded
        result = step(ranks, tmp_path, tmp_path / "found")
        assert result["loss"] == pytest.approx(expected["loss"], abs=2e-3)
        assert differ(result["weights"], expected["weights"]) < 2e-3
        # A checkpoint that cannot be converted is refused and changes nothing.
        (tmp_path / "2" / "zero" / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
        refused = ranks.ask("load", folder=tmp_path / "2")
        assert (refused["ok"], refused["fatal"]) == (False, False)
        assert "saved with num_ranks 2, zero_stage 3" in refused["error"]
        assert "cannot be read with num_ranks 1, zero_stage 2" in refused["error"]
        assert ranks.ask("step", batch=tmp_path / "batch")["num_updates"] == 4


@pytest.mark.parametrize(("writer", "reader_"), [((1, 2), (3, 1)), ((2, 1), (1, 2))])
def test_bfloat16_under_zero_1_uses_another_optimizer_of_deepspeed(
    writer: tuple[int, int], reader_: tuple[int, int], tmp_path: Path
) -> None:
    expected = write(tmp_path, *writer, dtype="bfloat16")
    settings = changed(zero_stage=reader_[0], dtype="bfloat16")
    with started(tmp_path / "others", settings, reader_[1]) as ranks:
        loaded = ranks.ask("load", folder=tmp_path / "2")
        assert loaded["ok"], loaded
        result = step(ranks, tmp_path, tmp_path / "found")
        assert result["loss"] == pytest.approx(expected["loss"], abs=2e-3)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5e-3)
        assert differ(result["weights"], expected["weights"]) < 4e-3
