"""The recipes are accepted by the commands that they name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pydantic
import pytest

from agentloop.agent.chat_format import ChatFormat, ChatSettings
from agentloop.cli.evaluate import EvaluateSettings
from agentloop.cli.resource_plan import Machine, Plan, plan
from agentloop.cli.sft import SftSettings
from agentloop.cli.train import TrainSettings
from agentloop.config import load_settings, to_toml
from agentloop.errors import DataError
from agentloop.sandbox.guard import Guard
from agentloop.training.sft import Dialogue, trajectories_of
from tests.support import END, TEMPLATE, template, tokenizer

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


def value(settings: Any, name: str) -> Any:
    for part in name.split("."):
        settings = getattr(settings, part)
    return settings


# Of arXiv 2508.20722: where it stands there, the setting, and its value in each stage.
PAPER = [
    ("section 4, stage 1, 2, 3", "budget.max_response_tokens", [8192, 12288, 12288]),
    ("section 4, stage 1, 2, 3", "loop.steps", [300, 85, 125]),
    ("section 4, T", "budget.max_turns", [10, 10, 15]),
    ("section 4, batch size", "loop.prompts_per_step", [512] * 3),
    ("GRPO-RoC, 2G", "loop.group_size", [32] * 3),
    ("GRPO-RoC, G", "roc.down_sample_to_n", [16] * 3),
    ("Eq. 4-5", "roc.form", ["paper"] * 3),
    ("section 4, AdamW", "learner.optimizer.lr", [1e-6] * 3),
    ("section 4, warm-up", "learner.optimizer.warmup_steps", [20] * 3),
    ("Eq. 6, epsilon low", "learner.loss.clip_low", [0.2] * 3),
    ("Eq. 6, epsilon high", "learner.loss.clip_high", [0.28] * 3),
    ("Eq. 6, 1 / sum of |o_i|", "credit.args", [{"aggregate": "group"}] * 3),
    ("Eq. 6, no entropy term", "learner.loss.entropy_coef", [0.0] * 3),
    ("Eq. 6, no importance weight", "learner.loss.tis_cap", [0.0] * 3),
    ("section 4, temperature", "sampling.temperature", [1.0] * 3),
]


@pytest.mark.parametrize(("where", "name", "values"), PAPER, ids=[name for _, name, _ in PAPER])
def test_the_papers_stages(where: str, name: str, values: list[Any]) -> None:
    stages = [train_settings(f"paper-stage{number}") for number in (1, 2, 3)]
    assert [value(stage, name) for stage in stages] == values, where


def test_the_papers_third_stage_has_other_problems() -> None:
    first, second, third = (train_settings(f"paper-stage{number}") for number in (1, 2, 3))
    assert first.tasks.paths == second.tasks.paths != third.tasks.paths


# Of arXiv 2508.20722, section 4.
PAPER_SFT = [
    ("epochs", "loop.epochs", 3),
    ("learning rate", "loop.lr", 5e-6),
    ("warm-up ratio", "loop.warmup", 0.04),
    ("128 dialogues, of 1,024 tokens", "loop.batch_tokens", 128 * 1024),
]


@pytest.mark.parametrize(("where", "name", "expected"), PAPER_SFT)
def test_the_papers_supervised_start(where: str, name: str, expected: Any) -> None:
    assert value(loaded(FOLDER / "paper-sft.toml"), name) == expected, where


def test_the_papers_recipes_say_what_starts_and_starts_again_elsewhere() -> None:
    s = train_settings("paper-stage1")
    text = (FOLDER / "paper.toml").read_text()
    assert s.ranks.port  # or each restart has another, and the other nodes' lines are worth nothing
    assert {urlsplit(url).port for url in s.servers} == {30000}
    assert "--port 30000" in text
    assert {urlsplit(url).port for url in s.sandbox.hosts} == {8010}
    assert "SANDBOX_TOKEN=... python -m agentloop.sandbox.serve --host 0.0.0.0 --port 8010" in text
    guard = Guard("0.0.0.0", "a token")
    for url in s.sandbox.hosts:
        asked = {"Host": urlsplit(url).netloc, "Authorization": "Bearer a token"}
        assert guard.refusal("/v1/link", asked) is None


def test_the_papers_evaluation() -> None:
    """arXiv 2508.20722, section 5: samples, temperature, length, turns."""
    s = load_settings(EvaluateSettings, [FOLDER / "evaluate-paper.toml"])
    assert (s.evaluate.num_samples, s.sampling.temperature) == (16, 0.6)
    assert (s.budget.max_response_tokens, s.budget.max_turns) == (30 * 1024, 30)
    trained = train_settings("paper-stage3")
    asked = ("system", "template", "kind")
    assert [getattr(s.tasks, n) for n in asked] == [getattr(trained.tasks, n) for n in asked]
    assert (s.tools, s.reward) == (trained.tools, trained.reward)


# Of microsoft/rStar at ecbfb94: an option of examples/run_qwen3-14b_rstar2_agent_weave.sh; of
# rstar2_agent/config (yaml); or of verl's trainer/config at d0dc976, which it stands on (verl).
RELEASE = [
    ("actor_rollout_ref.model.path=Qwen3-14B-Base", "model", "models/Qwen3-14B-Base"),
    ("data.train_files=dapo-math-17k-en", "tasks.paths", [Path("data/dapo-en.jsonl")]),
    ("data.train_batch_size=128", "loop.prompts_per_step", 128),
    ("actor.ppo_mini_batch_size=128", "learner.updates_per_batch", 1),
    ("data.max_response_length=8192", "budget.max_response_tokens", 8192),
    ("yaml: max_assistant_turns: 5", "budget.max_turns", 5),
    ("tool_config_path=python_tool_config.yaml", "tools", ["python_code_with_standard_io"]),
    ("README: MAX_EXECUTION_TIME=4", "tool_timeout_s", 4.0),
    ("trainer.total_training_steps=200", "loop.steps", 200),
    ("trainer.test_freq=5", "loop.evaluate_every", 5),
    ("rollout.n=32", "loop.group_size", 32),
    ("verl: rollout.temperature: 1.0", "sampling.temperature", 1.0),
    ("rollout.tensor_model_parallel_size=4", "server.tp_size", 4),
    ("trainer.n_gpus_per_node=8, of 4 a server", "server.count", 2),
    ("trainer.n_gpus_per_node=8", "ranks.nproc_per_node", 8),
    ("trainer.nnodes=1", "ranks.nodes", 1),
    ("actor.ppo_max_token_len_per_gpu=20480", "learner.micro_batch_tokens", 20480),
    ("model.enable_gradient_checkpointing=True", "learner.activation_checkpointing", True),
    ("fsdp_config.optimizer_offload=False", "learner.offload", "none"),
    ("actor.optim.lr=1e-6", "learner.optimizer.lr", 1e-6),
    ("actor.optim.lr_warmup_steps=20", "learner.optimizer.warmup_steps", 20),
    ("verl: optim.weight_decay: 0.01", "learner.optimizer.weight_decay", 0.01),
    ("verl: grad_clip: 1.0", "learner.optimizer.max_grad_norm", 1.0),
    ("actor.clip_ratio_low=0.2", "learner.loss.clip_low", 0.2),
    ("actor.clip_ratio_high=0.28", "learner.loss.clip_high", 0.28),
    ("verl: clip_ratio_c: 3.0", "learner.loss.dual_clip", 3.0),
    ("verl: loss_agg_mode: token-mean", "credit.args", {"aggregate": "batch"}),
    ("actor.entropy_coeff=0", "learner.loss.entropy_coef", 0.0),
    ("down_sampling_config.down_sample_to_n=16", "roc.down_sample_to_n", 16),
    ("down_sampling_config.reject_equal_reward=True", "roc.reject_equal_reward", True),
    ("down_sampling_config.roc_error_ratio=True", "roc.roc_error_ratio", True),
    ("down_sampling_config.roc_answer_format=True", "roc.roc_answer_format", True),
    ("down_sampling_config.min_zero_reward_trace_num=2", "roc.min_zero_reward_trace_num", 2),
    (
        "down_sampling_config.min_non_zero_reward_trace_num=2",
        "roc.min_non_zero_reward_trace_num",
        2,
    ),
    ("down_sample/roc.py", "roc.form", "released"),
]
# What is another, and stands in the recipe's head.
RELEASE_OTHERS = [
    ("rollout.gpu_memory_utilization=0.8", "server.extra_args", ("--mem-fraction-static", "0.25")),
    ("data.val_files=aime2024", "tasks.held_out", 64),
    ("verl: multi_turn.max_tool_response_length: 256", "budget.max_tool_response_tokens", 256),
    ("trainer.save_freq=-1", "loop.checkpoint_every", 25),
]


@pytest.mark.parametrize(
    ("option", "name", "expected"),
    [*RELEASE, *RELEASE_OTHERS],
    ids=[name for _, name, _ in [*RELEASE, *RELEASE_OTHERS]],
)
def test_the_release(option: str, name: str, expected: Any) -> None:
    settings = load_settings(TrainSettings, [FOLDER / "release-8gpu.toml"])
    assert value(settings, name) == expected, option


@pytest.mark.parametrize("word", ["0.8", "AIME 2024", "256 characters", "Checkpoints", "2,048"])
def test_differences_from_the_release_are_listed(word: str) -> None:
    head, _, _ = (FOLDER / "release-8gpu.toml").read_text().partition("\nextends")
    assert word in head


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


def imitated(chat: ChatFormat, *turns: dict[str, Any]) -> str:
    """Return the text of a dialogue that is trained on, and the markup between."""
    dialogue = Dialogue([ASKED, *turns], [TOOL], "here")
    (trajectory,) = trajectories_of(chat, dialogue, max_tool_response_tokens=512)
    return chat.decode(trajectory.ids[len(trajectory.prompt_ids) :])


@pytest.mark.timeout(120)  # transformers is slow to import
def test_a_base_model_is_trained_in_the_papers_form_without_work_by_hand(tmp_path: Path) -> None:
    chat = ChatFormat.load(like_qwen3_base(tmp_path), paper_settings())
    assert chat.generation_prompt == "<|im_start|>assistant\n<reason>"
    assert [chat.decode([token]) for token in chat.stop_ids] == [END, END_OF_TEXT]
    prompt = chat.decode(chat.prompt([{"role": "system", "content": "Think."}, ASKED], [TOOL]))
    assert prompt.startswith("<|im_start|>system\nThink.\n\n")
    assert '<tools>\n{"type": "function", "function": {"name": "look"' in prompt
    assert prompt.endswith(
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n<reason>"
    )
    said = imitated(
        chat,
        {"role": "assistant", "content": "<reason>Hm.", "tool_calls": [CALL]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "<reason>So.</reason><answer>\\boxed{4}</answer>"},
    )
    assert said == (
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
def test_a_turn_without_a_thought_is_learned_with_an_empty_one(
    tmp_path: Path, message: dict[str, Any], learned: str
) -> None:
    chat = ChatFormat.load(like_qwen3_base(tmp_path), paper_settings())
    assert imitated(chat, {"role": "assistant", **message}) == learned + END


OPENED = TEMPLATE.replace("assistant\n' }}", "assistant\n<reason>' }}")


@pytest.mark.parametrize(
    ("source", "content", "said"),
    [
        (OPENED, "It is 4.", r"messages\[1\].content: .* begin the content with <reason>"),
        # As in the authors' template, which writes a final answer as it writes a question.
        (
            OPENED.replace("'\n' + message.content", "'\nAnswer:\n' + message.content"),
            "<reason>Sum.</reason>4",
            r"messages\[1\].content: .* set chat.template to a template that starts both in the",
        ),
    ],
)
def test_a_template_that_cannot_be_imitated_is_refused_with_what_to_do(
    source: str, content: str, said: str
) -> None:
    chat = ChatFormat(tokenizer(), template(source))
    with pytest.raises(DataError, match=said):
        imitated(chat, {"role": "assistant", "content": content})


def test_the_template_is_kept_in_a_runs_settings(tmp_path: Path) -> None:
    settings = train_settings("paper-stage1")
    again = tmp_path / "config.toml"
    again.write_text(to_toml(settings), "utf-8")
    chat = load_settings(TrainSettings, [again]).chat
    assert chat.template == (FOLDER / "paper.jinja").read_text()
    assert chat == settings.chat
    thinking = load_settings(TrainSettings, [FOLDER / "one-gpu.toml"])
    again.write_text(to_toml(thinking), "utf-8")
    assert load_settings(TrainSettings, [again]).chat.arguments == {"enable_thinking": False}
