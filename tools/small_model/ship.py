"""The model's directory: files that transformers and SGLang load, and the model card."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils.logging import disable_progress_bar

from tools.small_model.qwen3 import Qwen3ForCausalLM
from tools.small_model.tokenizer import load as load_tokenizer
from tools.small_model.tokenizer import save as save_tokenizer
from tools.small_model.train import SmallModelSettings

WEIGHTS = "model.safetensors"


def save(model: Any, tokenizer: Any, directory: Path) -> None:
    """Write weights (bf16), configurations, tokenizer and template into `directory`."""
    disable_progress_bar()
    directory.mkdir(parents=True, exist_ok=True)
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    (directory / WEIGHTS).chmod(0o644)  # safetensors writes 0600
    save_tokenizer(tokenizer, directory)


def load(directory: Path) -> tuple[Any, Any]:
    """Return the model (float32, as SGLang serves it on a CPU) and the tokenizer."""
    disable_progress_bar()
    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval(), load_tokenizer(directory)


def digest(directory: Path) -> str:
    """Return the SHA-256 of the weights' file."""
    return hashlib.sha256((directory / WEIGHTS).read_bytes()).hexdigest()


def write_card(
    directory: Path,
    settings: SmallModelSettings,
    accuracies: dict[str, float],
    *,
    minutes: float,
    num_cases: int,
) -> None:
    """Write README.md: the card's template with this model's figures."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    model, _ = load(directory)
    rows = [f"| {skill} | {right:.1%} |" for skill, right in accuracies.items()]
    card = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    text = card.format(
        parameters=f"{model.num_parameters() / 1e6:.2f} million",
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        kv_heads=config["num_key_value_heads"],
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        tokens=f"{settings.steps * settings.batch_tokens / 1e6:.0f} million",
        steps=settings.steps,
        seed=settings.seed,
        minutes=round(minutes),
        cases=num_cases,
        command=f"python -m tools.small_model --evaluate DIR --cases {num_cases}",
        table="\n".join(rows) or "| not measured | |",
        max_tokens=settings.max_tokens,
    )
    (directory / "README.md").write_text(text, encoding="utf-8")
