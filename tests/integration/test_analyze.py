"""Entropies of a run's rollouts by a real learner, against plain PyTorch with whole logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agentloop-rl[train]'")

import torch

from agentloop.__main__ import main
from agentloop.cli.train import TrainSettings
from agentloop.config import load_settings, to_toml
from agentloop.learner.batch import Batch
from agentloop.models import SMALL
from agentloop.training.learner_client.settings import LearnerSettings
from agentloop.training.run_folder import RunFolder
from agentloop.trajectory import Trajectory, Turn, TurnEnd, VersionSpan
from tests.learner import plain

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

TEMPERATURE = 0.7


def scores(ids: list[int], num_prompt: int) -> tuple[list[float], list[float]]:
    """Log-probabilities and entropies of the tokens after the prompt."""
    num = len(ids)
    batch = Batch(
        ids=np.array(ids, np.int32),
        mask=np.array([0] * num_prompt + [1] * (num - num_prompt), np.uint8),
        logprobs=np.zeros(num, np.float32),
        advantages=np.zeros(num, np.float32),
        weights=np.zeros(num, np.float32),
        lengths=np.array([num], np.int32),
        groups=np.zeros(1, np.int32),
    )
    with torch.no_grad():
        model = plain.load(LearnerSettings(model=SMALL))
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight / TEMPERATURE)
        logprobs, entropies, _ = plain.scores(model, batch, 0)
    return logprobs[num_prompt - 1 :].tolist(), entropies[num_prompt - 1 :].tolist()


def test_entropies_are_the_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    expected = {}
    rows = []
    for index in range(3):
        ids = rng.integers(3, 512, 30 + index).tolist()
        logprobs, entropies = scores(ids, 10)
        first = Turn(ids[10:18], logprobs[:8], [VersionSpan("7", 0, 8)], TurnEnd.STOP)
        first.observation_ids = ids[18:20]
        second = Turn(ids[20:], logprobs[10:], [VersionSpan("7", 0, 10 + index)], TurnEnd.STOP)
        rows.append({"trajectory": Trajectory(f"1.{index}", ids[:10], [first, second]).to_dict()})
        expected[f"1.{index}"] = [entropies[:8], entropies[10:]]
    # Two ranks, chunks of the head, adapters that a run had; and memory for the longest alone.
    told = ["learner.micro_batch_tokens=8", "learner.head_chunk_tokens=4", "learner.lora.rank=4"]
    settings = load_settings(
        TrainSettings, (), [*told, f"sampling.temperature={TEMPERATURE}", "ranks.nproc_per_node=2"]
    )
    folder = RunFolder(tmp_path / "run", to_toml(settings))
    folder.add_group(1, rows)
    shutil.copytree(SMALL, folder.path / "weights" / "7")
    assert main(["runs", "entropy", str(folder.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["share_of_version"]) == ("7", 1.0)
    assert 0 <= found["mismatch_kl"] < 1e-6
    lines = (folder.path / "entropy" / "group-0000001.jsonl").read_text().splitlines()
    kept = {row["id"]: row["entropies"] for row in map(json.loads, lines)}
    assert kept.keys() == expected.keys()
    for name, turns in expected.items():
        for one, other in zip(kept[name], turns, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
    assert max(max(turn) for turns in expected.values() for turn in turns) > 1
