"""Tiny random models of several families, each on the shipped model's tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open

from agentloop.models import SMALL

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 512,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": None,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA = {
    "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
    "mamba_n_groups": 1, "lm_head_multiplier": 1.0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {},
    "glm4": {},
    "qwen3_moe": _EXPERTS,
    "mixtral": {"num_local_experts": 4},
    "qwen3_5_text": _DELTA_NET,
    "qwen3_next": _DELTA_NET | _EXPERTS | {"shared_expert_intermediate_size": 16},
    "falcon_h1": _MAMBA,
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "cohere": {"logit_scale": 0.5},
    "granite": {"logits_scaling": 8.0},
    "stablelm": {},
}
# Models of several parts, of which the language model is trained.
COMPOSITES: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "text_config": _SIZES | _DELTA_NET,
        "vision_config": {
            "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
            "out_hidden_size": 32, "patch_size": 4, "num_position_embeddings": 16,
        },
    },
    "gemma3": {
        "text_config": _SIZES,
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        },
    },
}  # fmt: skip


def make_model(folder: Path, family: str, **config: Any) -> Any:
    """Save a random model and the shipped tokenizer in `folder`; return the model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    is_composite = family in COMPOSITES
    sizes = COMPOSITES[family] if is_composite else _SIZES | FAMILIES[family]
    kind: Any = AutoModelForImageTextToText if is_composite else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        values = AutoConfig.for_model(family, **(sizes | config))
        model: Any = kind.from_config(values, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4)  # makes differences visible
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(SMALL / name, folder / name)
    return model


def shapes_in(folder: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor in the files of a model's folder."""
    shapes: dict[str, list[int]] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return shapes


def read_json(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return values
