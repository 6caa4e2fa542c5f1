"""The recipes: each says which command takes it, and that command takes it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pydantic
import pytest

from agentloop.config import load_settings
from agentloop.evaluate import EvaluateSettings
from agentloop.sft import SftSettings
from agentloop.train import TrainSettings
from agentloop.training.plan import Machine, Plan, plan

FOLDER = Path(__file__).parents[2] / "docs" / "recipes"
RECIPES = sorted(FOLDER.glob("*.toml"))
QWEN3_14B = FOLDER / "qwen3-14b"
NODE = Machine(ram_bytes=1 << 40, disk_free_bytes=8 << 40, num_gpus=8, gpu_bytes=79 << 30)


def loaded(path: Path) -> pydantic.BaseModel:
    commands = set(
        re.findall(r"^# .*agentloop (sft|train|evaluate) docs/recipes/", path.read_text(), re.M)
    )
    if path.name.endswith("sft.toml"):
        assert commands == {"sft"}
        return load_settings(SftSettings, [path])
    if path.name.startswith("evaluate"):
        assert commands == {"evaluate"}
        return load_settings(EvaluateSettings, [path])
    assert "train" in commands
    return load_settings(TrainSettings, [path])


def train_settings(name: str) -> TrainSettings:
    return load_settings(TrainSettings, [FOLDER / f"{name}.toml"], [f"model='{QWEN3_14B}'"])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipes_settings_are_valid(path: Path) -> None:
    settings: Any = loaded(path)
    assert not settings.run.name or settings.run.name == path.stem


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_in_the_table_and_its_commands_are_there(path: Path) -> None:
    assert f"[{path.name}]({path.name})" in (FOLDER / "README.md").read_text()
    named = re.findall(r"docs/recipes/([\w.-]+\.toml)", path.read_text())
    assert [name for name in named if not (FOLDER / name).exists()] == []


@pytest.mark.parametrize("name", ["paper-stage1", "paper-stage2", "paper-stage3", "release-8gpu"])
def test_qwen3_14b_fits_on_eight_gpus_of_80_gb(name: str) -> None:
    made: Plan = plan(train_settings(name), NODE)
    assert made.warnings == ()
    assert made.num_gpus == 8


def test_the_papers_stages() -> None:
    """arXiv 2508.20722, section 4: length, steps, turns."""
    stages = [train_settings(f"paper-stage{number}") for number in (1, 2, 3)]
    assert [s.budget.max_response_tokens for s in stages] == [8192, 12288, 12288]
    assert [s.loop.steps for s in stages] == [300, 85, 125]
    assert [s.budget.max_turns for s in stages] == [10, 10, 15]
    for s in stages:
        assert (s.loop.tasks_per_step, s.loop.group_size, s.roc.down_sample_to_n) == (512, 32, 16)
        assert (s.learner.optimizer.lr, s.learner.optimizer.warmup_steps) == (1e-6, 20)
        assert (s.learner.loss.clip_low, s.learner.loss.clip_high) == (0.2, 0.28)
        assert not s.learner.loss.tis_cap
        assert not s.learner.loss.kl_coef
        assert s.sampling.temperature == 1
    assert stages[2].tasks.paths != stages[1].tasks.paths == stages[0].tasks.paths


def test_the_papers_evaluation() -> None:
    """arXiv 2508.20722, section 5: samples, temperature, length, turns."""
    s = load_settings(EvaluateSettings, [FOLDER / "evaluate-paper.toml"])
    assert (s.evaluate.num_samples, s.sampling.temperature) == (16, 0.6)
    assert (s.budget.max_response_tokens, s.budget.max_turns) == (30 * 1024, 30)
    trained = train_settings("paper-stage3")
    asked = ("system", "template", "kind")
    assert [getattr(s.tasks, n) for n in asked] == [getattr(trained.tasks, n) for n in asked]
    assert (s.tools, s.reward) == (trained.tools, trained.reward)


def test_the_released_form() -> None:
    roc = train_settings("release-8gpu").roc
    assert (roc.form, roc.down_sample_to_n) == ("released", 16)
    assert (roc.min_zero_reward_trace_num, roc.min_non_zero_reward_trace_num) == (2, 2)
    assert roc.reject_equal_reward
    assert roc.roc_error_ratio
    assert roc.roc_answer_format


def test_one_gpu_of_24_gb_is_enough_for_its_recipe(tmp_path: Path) -> None:
    qwen3_600m = """{"model_type": "qwen3", "dtype": "bfloat16", "hidden_size": 1024,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
        "tie_word_embeddings": true, "max_position_embeddings": 40960}"""
    (tmp_path / "config.json").write_text(qwen3_600m)
    settings = load_settings(TrainSettings, [FOLDER / "one-gpu.toml"], [f"model='{tmp_path}'"])
    made = plan(settings, Machine(32 << 30, 100 << 30, num_gpus=1, gpu_bytes=24 << 30))
    assert made.shape.num_parameters == 596_049_920
    assert made.warnings == ()
    assert made.num_gpus == 1
    # The server takes 0.35 of it; CUDA itself takes some on both sides.
    assert made.learner.total + 0.35 * (24 << 30) < 21 * (1 << 30)
