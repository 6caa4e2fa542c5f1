"""How much of the device training uses: the arithmetic that a batch needs by what the device could.

Counted as in PaLM (arXiv 2204.02311, appendix B): two operations for a weight and a token on the
way forth, four on the way back; and the attention, here causal, so half of the square. What is
computed twice to save memory counts once. Not covered: mixtures of experts, where a token meets a
part of the weights, and layers other than attention whose work grows with the length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

__all__ = ["Work", "peak_tflops"]

# Dense bfloat16, 10^12 operations a second, from the makers' data sheets; the first that is found
# in the device's name.
_PEAKS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "B100": 1750.0,
    "H200": 989.0,
    "H20": 148.0,
    "GH200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10": 125.0,
    "RTX 4090": 165.0,
    "MI300X": 1307.0,
}


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """What the device can do at most; None where that is not known, or not in this type."""
    if dtype != "bfloat16":
        return None
    words = device_name.replace("-", " ")
    return next((peak for name, peak in _PEAKS.items() if f" {name} " in f" {words} "), None)


@dataclass(frozen=True, slots=True)
class Work:
    """What a model costs.

    Attributes:
        per_token: operations for a token, in all layers, forth and back.
        per_sampled: operations for a token that was sampled, in the output layer.
        per_pair: operations for two tokens of which one attends to the other.
    """

    per_token: float
    per_sampled: float
    per_pair: float

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """None where it cannot be told. To be asked before the weights are shared out."""
        config = model.config
        if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts")):
            return None
        try:
            heads, num_layers = config.num_attention_heads, config.num_hidden_layers
            size = getattr(config, "head_dim", None) or config.hidden_size // heads
        except AttributeError:
            return None
        apart = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
        layers = [p for p in model.parameters() if id(p) not in apart and p.ndim > 1]
        # A weight that is frozen (LoRA) has no gradient of its own, but what is below it has.
        per_token = sum((6 if p.requires_grad else 4) * p.numel() for p in layers)
        output = model.get_output_embeddings().weight
        per_sampled = (6 if output.requires_grad else 4) * output.numel()
        # q k^T and the sum over v: 2 * 2 * heads * size, twice as much on the way back.
        return cls(per_token, per_sampled, 12.0 * num_layers * heads * size)

    def of_batch(self, lengths: Sequence[int], num_sampled: int) -> float:
        """Operations to train on these samples once."""
        pairs = sum(length * (length + 1) / 2 for length in lengths)
        num_tokens = sum(lengths)
        return self.per_token * num_tokens + self.per_sampled * num_sampled + self.per_pair * pairs
