"""A published and exported model is the folder that training started from, for other programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agentloop-rl[train]'")

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from agentloop.agent.chat_format import ChatFormat
from agentloop.cli.runs.export import export
from agentloop.errors import ModelError
from agentloop.learner.names import conversions_of
from agentloop.learner.policy import load_model
from agentloop.learner.weights import publish
from agentloop.models.folder import tensor_files
from agentloop.training.learner_client.settings import LearnerSettings
from tests.learner.families import COMPOSITES, FAMILIES, make_model, read_json, shapes_in
from tests.learner.ranks import started

pytestmark = [pytest.mark.real, pytest.mark.gate]
IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


class _World:
    """A single rank."""

    first = True

    def run_beside(self, work: Callable[[], object] | None) -> None:
        if work:
            work()


def published(start: Path, folder: Path, **settings: Any) -> Path:
    """Publish the model of `start` without training it."""
    values = {"model": start, "publish_dtype": "float32", **settings}
    learner = LearnerSettings.model_validate(values)
    model = load_model(learner)
    tensors = tensor_files(start) if learner.init == "pretrained" else None
    policy = SimpleNamespace(
        model=model,
        settings=learner,
        start=tensors,
        conversions=conversions_of(model, tensors),
        world=_World(),
    )
    publish(cast(Any, policy), folder, "1")
    return folder


def logits(folder: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.float32
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("family", [*FAMILIES, *COMPOSITES])
def test_model_comes_back_with_its_names_logits_and_stop(tmp_path: Path, family: str) -> None:
    start, out = tmp_path / "start", tmp_path / "out"
    make_model(start, family)
    export(published(start, tmp_path / "published"), out)
    assert shapes_in(out) == shapes_in(start)
    assert torch.equal(logits(out), logits(start))
    ends: Any = GenerationConfig.from_pretrained(out).eos_token_id
    assert set(ChatFormat.load(start).stop_ids) <= set(ends if isinstance(ends, list) else [ends])


def test_files_beside_the_weights_come_along(tmp_path: Path) -> None:
    start, out = tmp_path / "start", tmp_path / "out"
    make_model(start, "llama")
    generation = {"do_sample": True, "temperature": 0.6, "eos_token_id": [2, 0]}
    files = {
        "LICENSE": "free",
        "generation_config.json": json.dumps(generation),
        "additional_chat_templates/tool_use.jinja": "{{ messages }}",
        "code/deep/modeling.py": "pass",
        "model.safetensors.index.json": '{"weight_map": {}}',
        "original/consolidated.00.pth": "weights",
        ".cache/huggingface/download.json": "{}",
    }
    for name, text in files.items():
        (start / name).parent.mkdir(parents=True, exist_ok=True)
        (start / name).write_text(text)
    export(published(start, tmp_path / "published"), out)
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert names >= {*files} - {*[*files][4:]}
    assert not names & {*[*files][4:]}
    assert read_json(out / "generation_config.json") == generation
    templates = AutoTokenizer.from_pretrained(out).chat_template
    assert templates == AutoTokenizer.from_pretrained(start).chat_template
    assert set(templates) == {"default", "tool_use"}


def test_another_template_takes_the_place_of_all(tmp_path: Path) -> None:
    start = tmp_path / "start"
    make_model(start, "llama")
    (start / "additional_chat_templates").mkdir()
    (start / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    template = (start / "chat_template.jinja").read_text() + "{# mine #}"
    folder = published(start, tmp_path / "published", chat_template=template)
    assert AutoTokenizer.from_pretrained(folder).chat_template == template


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_configuration_says_what_the_weights_are(tmp_path: Path, dtype: str) -> None:
    start = tmp_path / "start"
    make_model(start, "qwen3_5")
    config = read_json(start / "config.json")
    config["torch_dtype"] = config["text_config"]["dtype"] = "float16"
    (start / "config.json").write_text(json.dumps(config))
    folder = published(start, tmp_path / "published", publish_dtype=dtype)
    made = read_json(folder / "config.json")
    assert (made["dtype"], made["text_config"]["dtype"]) == (dtype, dtype)
    assert "torch_dtype" not in made
    assert {str(value.dtype) for value in load_file(folder / "model.safetensors").values()} == {
        f"torch.{dtype}"
    }


def test_experts_that_were_saved_as_in_memory_stay_so(tmp_path: Path) -> None:
    start = tmp_path / "start"
    make_model(start, "qwen3_moe").save_pretrained(start, save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in shapes_in(start))
    assert shapes_in(published(start, tmp_path / "published")) == shapes_in(start)


def test_tied_tensor_has_each_name_that_it_had(tmp_path: Path) -> None:
    start = tmp_path / "start"
    make_model(start, "llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in shapes_in(published(start, tmp_path / "published"))
    tensors = load_file(start / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, start / "model.safetensors", metadata={"format": "pt"})
    folder = published(start, tmp_path / "again")
    assert torch.equal(load_file(folder / "model.safetensors")["lm_head.weight"],
                       tensors["lm_head.weight"])  # fmt: skip


def test_folder_without_a_tensor_of_the_model_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["elsewhere.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(LearnerSettings(model=tmp_path))
    with pytest.raises(ModelError, match=r"LlamaForCausalLM: .* no tensor for model\.norm\.weight"):
        conversions_of(model, tensor_files(tmp_path))


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    config = read_json(tmp_path / "config.json")
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"quantized \(fp8\), which cannot be trained"):
        load_model(LearnerSettings(model=tmp_path))


def test_random_language_model_of_a_composite_stands_alone(tmp_path: Path) -> None:
    start = tmp_path / "start"
    make_model(start, "qwen3_5")
    folder = published(start, tmp_path / "published", init="random")
    config = read_json(folder / "config.json")
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert "vision_config" not in config
    assert logits(folder).shape[-1] == config["vocab_size"]


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_ranks_publish_experts_under_the_names_of_the_start(
    tmp_path: Path, zero_stage: int
) -> None:
    start, folder = tmp_path / "start", tmp_path / "published"
    make_model(start, "qwen3_moe")
    settings = LearnerSettings.model_validate(
        {"model": start, "zero_stage": zero_stage, "publish_dtype": "float32", "bucket_mib": 1}
    )
    with started(tmp_path / "ranks", settings, 2) as ranks:
        assert ranks.ask("publish", folder=folder, version="1")["ok"]
        reply = ranks.ask("layout", out=tmp_path / "layout")
    made, expected = (load_file(each / "model.safetensors") for each in (folder, start))
    assert {name: value.tolist() for name, value in made.items()} == {
        name: value.tolist() for name, value in expected.items()
    }
    buckets = json.loads((tmp_path / "layout").read_text())
    assert reply["num_buckets"] == len(buckets)
    assert sorted(name for bucket in buckets for name in bucket["names"]) == sorted(expected)
