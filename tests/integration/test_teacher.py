"""A real SGLang server as a teacher: its log-probabilities, and a step of distillation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any, cast

import httpx
import numpy as np
import pytest

from tests.fakes import RecordedProgress
from tests.patience import patient

pytest.importorskip("torch", reason="needs torch: pip install 'agentloop-rl[train]'")

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from agentloop.config import load_settings
from agentloop.models import SMALL
from agentloop.token_records import KeptIds
from agentloop.training.credit.rule import RewardedRollout
from agentloop.training.credit.settings import CreditSettings, assign
from agentloop.training.plan.settings import TrainSettings
from agentloop.training.teacher_client import open_teacher
from agentloop.training.wiring import train
from agentloop.trajectory import Trajectory, Turn

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

RECIPE = Path(__file__).parents[2] / "agentloop" / "cli" / "recipes" / "small.toml"
NOISE = 0.5
TOKENIZER = Tokenizer.from_file(str(SMALL / "tokenizer.json"))


async def sampled(url: str, ids: list[int], *, is_cut: bool = False) -> Turn:
    """Return a turn that the server samples after `ids`."""
    body: dict[str, Any] = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
    }
    if is_cut:
        body["sampling_params"] |= {"top_p": 0.9, "top_k": 20}
        body["return_sampling_mask"] = True
    async with httpx.AsyncClient(timeout=patient(60)) as client:
        answer = (await client.post(f"{url}/generate", json=body)).raise_for_status().json()
    if is_cut:
        kept = KeptIds(answer["meta_info"]["output_token_sampling_mask"])
        logprobs = answer["meta_info"]["output_token_sampling_logprobs"]
        return Turn(answer["output_ids"], logprobs, kept=kept)
    logprobs = [single[0] for single in answer["meta_info"]["output_token_logprobs"]]
    return Turn(answer["output_ids"], logprobs)


def disturbed(folder: Path) -> Path:
    """Return a copy of the model whose weights are a little off."""
    shutil.copytree(SMALL, folder)
    rng, file = np.random.default_rng(0), folder / "model.safetensors"
    weights = {name: tensor.float() for name, tensor in load_file(file).items()}
    for name, tensor in weights.items():
        noise = torch.from_numpy(rng.normal(size=tuple(tensor.shape)).astype(np.float32))
        weights[name] = tensor + NOISE * tensor.std() * noise if tensor.ndim > 1 else tensor
    save_file(weights, file, {"format": "pt"})
    return folder


async def test_student_comes_back_to_its_teacher(sglang_url: str, tmp_path: Path) -> None:
    """The loss is the reverse KL divergence, since all policy ratios are 1."""
    overrides = [
        f"model={disturbed(tmp_path / 'model')}", f"run.folder={tmp_path}", "run.name=student",
        "credit=distill", f"credit.args.teacher={sglang_url}", "loop.steps=6",
        "loop.prompts_per_step=8", "loop.group_size=8", "loop.evaluate_every=0",
        "learner.optimizer.lr=3e-4", "ranks.nproc_per_node=1", "page=false",
    ]  # fmt: skip
    settings = load_settings(TrainSettings, [RECIPE], overrides)
    folder = await train(settings, cast(Any, RecordedProgress()))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["learner/loss"] for row in rows if "learner/loss" in row]
    print(losses)
    assert len(losses) == 6
    assert losses[0] > 0.02, "the student is too close to its teacher to begin with"
    assert sum(losses[-2:]) < 0.5 * sum(losses[:2])


@pytest.mark.parametrize("is_cut", [False, True])
async def test_teacher_agrees_with_itself(
    sglang_url: str, is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is its own teacher, so there is nothing to learn, over both turns."""
    prompt = TOKENIZER.encode("What is 37 times 48?", add_special_tokens=False).ids
    monkeypatch.setattr("agentloop.training.teacher_client._MAX_COMPARED", 100)
    first = await sampled(sglang_url, prompt, is_cut=is_cut)
    first.observation_ids = TOKENIZER.encode("1776", add_special_tokens=False).ids
    history = [*prompt, *first.output_ids, *first.observation_ids]
    second = await sampled(sglang_url, history, is_cut=is_cut)
    trajectory = Trajectory("t", prompt, [first, second])
    credit = CreditSettings(name="distill", args={"teacher": sglang_url})
    async with open_teacher(credit, TOKENIZER) as teacher:
        assert teacher is not None
        for _ in range(2):  # the second time the server has it in its cache
            result = await teacher(trajectory)
            assert result == pytest.approx([*first.logprobs, *second.logprobs], abs=1e-3)
    ((single,),) = assign([RewardedRollout(0.0, [trajectory], [result])], credit, Random(0))
    assert single.mean_advantage == pytest.approx(0, abs=1e-3)
    another = Turn(first.output_ids[::-1], [-1.0] * 24)  # tokens that it would not sample
    async with open_teacher(credit, TOKENIZER) as teacher:
        assert teacher is not None
        result = await teacher(Trajectory("t", prompt, [another]))
    assert sum(result) < sum(first.logprobs) - 10
