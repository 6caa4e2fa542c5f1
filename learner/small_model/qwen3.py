"""Qwen3 of transformers, importable in SGLang's environment too."""

from __future__ import annotations

import learner.torchvision_stub  # noqa: F401

# isort: split
from transformers import Qwen3Config, Qwen3ForCausalLM

__all__ = ["Qwen3Config", "Qwen3ForCausalLM"]
