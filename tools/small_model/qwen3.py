"""Qwen3 of transformers, importable in SGLang's environment too."""

from __future__ import annotations

# isort: split
from transformers import Qwen3Config, Qwen3ForCausalLM

__all__ = ["Qwen3Config", "Qwen3ForCausalLM"]
