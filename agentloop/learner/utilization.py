"""Model FLOPs utilization (MFU): the operations that a batch needs over what the device could do.

Operations are counted as in PaLM (arXiv 2204.02311, appendix B): per weight and token two in the
forward pass and four in the backward pass, plus attention, which is causal here and so costs half
of the square. Recomputed activations count once, and so do tokens that samples share. Not covered:
mixtures of experts, where a token meets only some of the weights, and layers other than attention
whose cost grows with the length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Dense bfloat16, 10^12 operations a second, from the vendors' data sheets. The first name found in
# the device's name wins.
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
    """Return the peak of the device in 10^12 operations a second, or None if it is unknown."""
    if dtype != "bfloat16":
        return None
    words = device_name.replace("-", " ")
    return next((peak for name, peak in _PEAKS.items() if f" {name} " in f" {words} "), None)


@dataclass(frozen=True, slots=True)
class Work:
    """The cost of training a model, in operations.

    Attributes:
        per_token: Per token, in all layers, forward and backward.
        per_sampled: Per sampled token, in the output layer.
        per_pair: Per pair of tokens of which one attends to the other.
    """

    per_token: float
    per_sampled: float
    per_pair: float

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self | None:
        """Return the cost of `model`, or None if it is unknown.

        Call it before ZeRO partitions the weights.
        """
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
        # A frozen weight (LoRA) needs no gradient of its own, but passes one to the layers below.
        per_token = sum((6 if p.requires_grad else 4) * p.numel() for p in layers)
        output = model.get_output_embeddings().weight
        per_sampled = (6 if output.requires_grad else 4) * output.numel()
        # q k^T and the sum over v: 2 * 2 * heads * size, and twice as much in the backward pass.
        return cls(per_token, per_sampled, 12.0 * num_layers * heads * size)

    def of_batch(
        self, lengths: Sequence[int], num_sampled: int, shared: Sequence[int] = ()
    ) -> float:
        """Return the operations needed to train on these samples once.

        Args:
            shared: for each sample, how many of its first tokens are computed with another one's.
        """
        num_tokens = sum(lengths) - sum(shared)
        pairs = sum(n * (n + 1) / 2 for n in lengths) - sum(n * (n + 1) / 2 for n in shared)
        return self.per_token * num_tokens + self.per_sampled * num_sampled + self.per_pair * pairs
