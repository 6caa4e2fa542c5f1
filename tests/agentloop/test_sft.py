"""`agentloop sft`: its settings; and, with a real learner, a start from random weights."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from agentloop.__main__ import main
from agentloop.config import load_settings, to_toml
from agentloop.groups.teacher import lessons
from agentloop.models import SMALL
from agentloop.sft import SftSettings, sft
from agentloop.train import TrainSettings
from agentloop.training.standing import Standing

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"


def test_every_setting_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "--list-settings"]) == 0
    listed = capsys.readouterr().out
    assert "loop.epochs = 3\n" in listed
    assert 'learner.init = "pretrained"\n' in listed


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("loop.epoch=1", "did you mean 'loop.epochs'?"),
        ("data.paths=[]", "data.paths: name a file"),
        ("learner.optimizer.lr=0.1", "learner.optimizer.lr: set loop.lr"),
        ("learner.config.num_hidden_layers=2", "learner.config: .*init = random"),
        ("learner.model=x", "learner.model: set model"),
        ("learner.chat_template=x", "learner.chat_template: set chat.template"),
        ("chat.template=gone.jinja", "chat.template: 'gone.jinja' cannot be read: No such file"),
        ("learner.loss.clip_low=0.1", "learner.loss: it is that of the kind sft"),
        ("model=/gone", "model: /gone is no model folder"),
        ('data.paths=["gone.jsonl"]', "gone.jsonl: No such file"),
    ],
)
def test_what_is_wrong_is_named_before_anything_starts(
    setting: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sft", 'data.paths=["x.jsonl"]', setting]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_a_runs_own_settings_can_be_used_again(tmp_path: Path) -> None:
    settings = load_settings(SftSettings, overrides=["data.teacher=9", "learner.init=random"])
    again = tmp_path / "config.toml"
    again.write_text(to_toml(settings), "utf-8")
    assert load_settings(SftSettings, [again]) == settings


def test_the_laptops_stages_fit_together() -> None:
    """What is learned from rollouts is asked with the tools, and about what, it was taught."""
    settings = load_settings(TrainSettings, [RECIPES / "laptop.toml"])
    assert settings.start is not None
    (row,) = lessons(1, levels=[2])
    assert settings.tools == [tool["function"]["name"] for tool in row["tools"]]
    assert set(settings.tasks.levels) <= set(settings.start.data.levels)
    assert not settings.tasks.system
    limit = settings.start.data.max_tool_response_tokens
    assert limit == settings.budget.max_tool_response_tokens
    assert settings.loop.evaluate_tasks <= settings.tasks.held_out


class Said:
    """Progress, kept."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        print(line)

    def say(self, line: str) -> None:
        self.lines.append(line)

    def show(self, standing: Standing) -> None:
        pass


@pytest.mark.anyio
@pytest.mark.real
@pytest.mark.timeout(600)
async def test_random_weights_learn_to_imitate(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agentloop-rl[train]'")
    model = tmp_path / "tiny"
    shutil.copytree(SMALL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    own = "{#- ours -#}" + (SMALL / "chat_template.jinja").read_text("utf-8")
    (tmp_path / "own.jinja").write_text(own, "utf-8")
    overrides = [
        f"model={model}",
        f"chat.template={tmp_path / 'own.jinja'}",
        "data.teacher=120",
        f"run.folder={tmp_path}",
        "run.name=first",
        "loop.epochs=2",
        "loop.lr=3e-3",
        "loop.batch_tokens=2500",
        "learner.init=random",
        "learner.config.num_hidden_layers=2",
        "learner.micro_batch_tokens=5000",
        "ranks.count=2",
    ]
    said = Said()
    settings = load_settings(SftSettings, overrides=overrides)
    published = await sft(settings, said)  # type: ignore[arg-type]
    lines = (tmp_path / "first" / "metrics.jsonl").read_text("utf-8").splitlines()
    losses = [json.loads(line)["learner/loss"] for line in lines]
    assert losses[0] == pytest.approx(6.24, abs=0.2)  # ln 512: it knows nothing
    assert losses[-1] < 5
    assert (published / "model.safetensors").stat().st_size > 500_000
    assert (published / "tokenizer.json").read_bytes() == (SMALL / "tokenizer.json").read_bytes()
    assert (published / "chat_template.jinja").read_text("utf-8") == own
    config = json.loads((published / "config.json").read_text("utf-8"))
    assert (config["num_hidden_layers"], len(config["layer_types"])) == (2, 2)
    assert said.lines[0].startswith("120 samples, ")
