"""The recipes are accepted by the commands that they name. Their values: test_sources.py."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pydantic
import pytest

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.chat_settings import ChatSettings
from agentloop.config import load_settings, to_toml
from agentloop.errors import DataError, SettingsError
from agentloop.evaluation.wiring import EvaluateSettings
from agentloop.training.plan.resources import Machine, Plan, plan
from agentloop.training.plan.settings import TrainSettings
from agentloop.training.sft.fine_tuning import Dialogue, trajectories_of
from agentloop.training.sft.run import SftSettings
from tests.support import END, TEMPLATE, template, tokenizer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "agentloop" / "cli" / "recipes"
RECIPES = sorted(FOLDER.glob("*.toml"))
QWEN3_14B = FOLDER / "qwen3-14b"
NODE = Machine(ram_bytes=1 << 40, disk_free_bytes=8 << 40, num_gpus=8, gpu_bytes=79 << 30)


def load_recipe(path: Path) -> pydantic.BaseModel:
    commands = set(re.findall(r"^# .*agentloop (sft|train|evaluate) [a-z]", path.read_text(), re.M))
    if path.name.endswith("sft.toml"):
        assert commands == {"sft"}
        return load_settings(SftSettings, [path])
    if commands == {"evaluate"}:
        return load_settings(EvaluateSettings, [path])
    assert "train" in commands
    return load_settings(TrainSettings, [path])


def train_settings(name: str) -> TrainSettings:
    return load_settings(TrainSettings, [FOLDER / f"{name}.toml"], [f"model='{QWEN3_14B}'"])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_settings_are_valid(path: Path) -> None:
    settings: Any = load_recipe(path)
    assert not settings.run.name or settings.run.name == path.stem


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_named_in_any_folder(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    extending = tmp_path / "mine.toml"
    extending.write_text(f'extends = "{path.stem}"')
    settings = load_recipe(path)
    assert load_settings(type(settings), [path.stem]) == settings
    assert load_settings(type(settings), [extending]) == settings


def test_unknown_recipe_error_lists_the_existing_ones(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no recipe 'smal' \(did you mean small\?\)"):
        load_settings(TrainSettings, ["smal"])
    with pytest.raises(SettingsError, match=r"no recipe 'x' \(did you mean .* or laptop or "):
        load_settings(TrainSettings, ["x"])
    with pytest.raises(SettingsError, match=r"small.toml: No such .*; the recipe .* is small, w"):
        load_settings(TrainSettings, [tmp_path / "small.toml"])
    with pytest.raises(SettingsError, match=r"chat.template: there is no recipe 'papier'"):
        load_settings(TrainSettings, [], ["chat.template=papier"])


def test_run_without_a_recipe_suits_a_laptop() -> None:
    laptop = Machine(ram_bytes=8 << 30, disk_free_bytes=8 << 30)
    made = plan(load_settings(TrainSettings, [], ["budget.max_response_tokens=2048"]), laptop)
    assert made.warnings == ()
    assert made.shape.num_parameters < 10**7


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_in_the_table_and_its_commands_are_there(path: Path) -> None:
    table = (ROOT / "docs" / "recipes" / "README.md").read_text()
    assert f"[{path.name}](../../agentloop/cli/recipes/{path.name})" in table
    named = re.findall(r"agentloop (?:sft|train|evaluate) ([\w-]+)", path.read_text())
    assert [name for name in named if not (FOLDER / f"{name}.toml").exists()] == []


@pytest.mark.parametrize("name", ["paper-stage1", "paper-stage2", "paper-stage3", "release-8gpu"])
def test_qwen3_14b_fits_on_gpus_of_80_gb(name: str) -> None:
    on_cluster = name.startswith("paper")
    machine = dataclasses.replace(NODE, num_gpus=64) if on_cluster else NODE
    made: Plan = plan(train_settings(name), machine)
    assert made.warnings == ()
    assert made.num_gpus == (64 if on_cluster else 8)


def test_papers_third_stage_has_other_problems() -> None:
    first, second, third = (train_settings(f"paper-stage{number}") for number in (1, 2, 3))
    assert first.tasks.paths == second.tasks.paths != third.tasks.paths


def test_papers_evaluation_asks_as_its_training_does() -> None:
    s = load_settings(EvaluateSettings, [FOLDER / "evaluate-paper.toml"])
    trained = train_settings("paper-stage3")
    names = ("system", "template", "kind")
    assert [getattr(s.tasks, n) for n in names] == [getattr(trained.tasks, n) for n in names]
    assert (s.env, s.reward) == (trained.env, trained.reward)


def test_recipe_for_one_gpu_fits_into_24_gb(tmp_path: Path) -> None:
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
    # CUDA itself takes some on both sides.
    assert max(made.phases) < 20 * (1 << 30)


# --- the chat template ----------------------------------------------------------------------------

END_OF_TEXT = "<|endoftext|>"
CALL = {"type": "function", "function": {"name": "look", "arguments": {"n": 1}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ASKED = {"role": "user", "content": "What is 2 + 2?"}


def like_qwen3_base(folder: Path) -> Path:
    """Create a tokenizer like those of Qwen3's base models, whose end of text does not end a
    turn, with a chat template that puts reasoning elsewhere."""
    transformers = pytest.importorskip("transformers")
    made = tokenizer()
    made.add_special_tokens([END_OF_TEXT])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END_OF_TEXT)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def paper_settings() -> ChatSettings:
    return train_settings("paper-stage1").chat


def imitate(chat: ChatFormat, *turns: dict[str, Any]) -> str:
    """Return the text of a dialogue that is trained on, and the markup between."""
    dialogue = Dialogue([ASKED, *turns], [TOOL], "here")
    (trajectory,) = trajectories_of(chat, dialogue, max_tool_response_tokens=512)
    return chat.decode(trajectory.ids[len(trajectory.prompt_ids) :])


@pytest.mark.timeout(120)  # transformers is slow to import
def test_recipe_for_a_base_model_produces_the_papers_format(tmp_path: Path) -> None:
    chat = ChatFormat.load(like_qwen3_base(tmp_path), paper_settings())
    assert chat.generation_prompt == "<|im_start|>assistant\n<reason>"
    assert [chat.decode([token]) for token in chat.stop_ids] == [END, END_OF_TEXT]
    prompt = chat.decode(chat.prompt([{"role": "system", "content": "Think."}, ASKED], [TOOL]))
    assert prompt.startswith("<|im_start|>system\nThink.\n\n")
    assert '<tools>\n{"type": "function", "function": {"name": "look"' in prompt
    assert prompt.endswith(
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n<reason>"
    )
    text = imitate(
        chat,
        {"role": "assistant", "content": "<reason>Hm.", "tool_calls": [CALL]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "<reason>So.</reason><answer>\\boxed{4}</answer>"},
    )
    assert text == (
        'Hm.\n<tool_call>\n{"name": "look", "arguments": {"n": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<reason>So.</reason><answer>\\boxed{4}</answer><|im_end|>"
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("message", "learned"),
    [
        ({"content": "It is 4."}, "</reason>\nIt is 4."),
        ({"content": "<answer>4</answer>"}, "</reason>\n<answer>4</answer>"),
        ({"content": "Sum.</reason>It is 4."}, "Sum.</reason>It is 4."),
        ({"content": "4", "reasoning_content": "Sum."}, "Sum.</reason>\n4"),
        (
            {"content": None, "tool_calls": [CALL]},
            '</reason>\n<tool_call>\n{"name": "look", "arguments": {"n": 1}}\n</tool_call>',
        ),
    ],
)
def test_turn_without_a_thought_is_learned_with_an_empty_one(
    tmp_path: Path, message: dict[str, Any], learned: str
) -> None:
    chat = ChatFormat.load(like_qwen3_base(tmp_path), paper_settings())
    assert imitate(chat, {"role": "assistant", **message}) == learned + END


OPENED = TEMPLATE.replace("assistant\n' }}", "assistant\n<reason>' }}")


@pytest.mark.parametrize(
    ("source", "content", "message"),
    [
        # As in the authors' template, which writes a final answer as it writes a question.
        (
            OPENED.replace("'\n' + message.content", "'\nAnswer:\n' + message.content"),
            "<reason>Sum.</reason>4",
            r"messages\[1\].content: .* set chat.template to a template that starts both in the",
        )
    ],
)
def test_unsupported_template_is_refused_with_advice(
    source: str, content: str, message: str
) -> None:
    chat = ChatFormat(tokenizer(), template(source))
    with pytest.raises(DataError, match=message):
        imitate(chat, {"role": "assistant", "content": content})


def test_template_is_kept_in_a_runs_settings(tmp_path: Path) -> None:
    settings = train_settings("paper-stage1")
    again = tmp_path / "config.toml"
    again.write_text(to_toml(settings), "utf-8")
    chat = load_settings(TrainSettings, [again]).chat
    assert chat.template == (FOLDER / "paper.jinja").read_text()
    assert chat == settings.chat
    thinking = load_settings(TrainSettings, [FOLDER / "one-gpu.toml"])
    again.write_text(to_toml(thinking), "utf-8")
    assert load_settings(TrainSettings, [again]).chat.arguments == {"enable_thinking": False}
