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
from agentloop.analysis.entropy import score
from agentloop.config import to_toml
from agentloop.learner.batch import Batch
from agentloop.models import SMALL
from agentloop.training.learner_client.client import start_learner
from agentloop.training.learner_client.launch import RanksSettings
from agentloop.training.learner_client.settings import LearnerSettings, LoraSettings
from agentloop.training.plan.settings import TrainSettings
from agentloop.training.run.folder import RunFolder
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


async def test_entropies_are_the_models(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    expected, rollouts = [], []
    for index in range(3):
        ids = rng.integers(3, 512, 30 + index).tolist()
        logprobs, entropies = scores(ids, 10)
        first = Turn(ids[10:18], logprobs[:8], [VersionSpan("7", 0, 8)], TurnEnd.STOP)
        first.observation_ids = ids[18:20]
        second = Turn(ids[20:], logprobs[10:], [VersionSpan("7", 0, 10 + index)], TurnEnd.STOP)
        rollouts.append(Trajectory(f"1.{index}", ids[:10], [first, second]))
        expected.append(entropies[:8] + entropies[10:])
    # Two ranks, chunks of the head, adapters that a run had; and memory for the longest alone.
    settings = LearnerSettings(
        model=SMALL,
        temperature=TEMPERATURE,
        micro_batch_tokens=max(len(rollout.ids) for rollout in rollouts),
        head_chunk_tokens=4,
        lora=LoraSettings(rank=1),
    )
    async with start_learner(
        settings, RanksSettings(nproc_per_node=2), log_dir=tmp_path / "logs", on_progress=print
    ) as (learner, _):
        scored = await score(learner, rollouts, tmp_path, timeout_s=300)
    for item, entropies in zip(scored, expected, strict=True):
        np.testing.assert_allclose(item.entropies, entropies, atol=1e-4)
        assert 0 <= max(item.mismatch) < 1e-5
    assert max(map(max, expected)) > 1


def test_command_scores_with_a_real_learner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "run", to_toml(TrainSettings()))
    turn = Turn([5, 6, 7], [-1.0] * 3, [VersionSpan("7", 0, 3)], TurnEnd.STOP)
    folder.add_group(1, [{"trajectory": Trajectory("1.0", [3, 4], [turn]).to_dict()}])
    shutil.copytree(SMALL, folder.path / "weights" / "7")
    assert main(["runs", "entropy", str(folder.path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_tokens"], report["num_marked"]) == (3, 1)
