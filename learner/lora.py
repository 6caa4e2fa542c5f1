"""LoRA: a linear layer's weight W stays, and B A beside it is trained (arXiv 2106.09685).

peft puts the layers in and computes them; what leaves the learner is W + alpha / rank * B A, under
W's own name, so that nobody else has to know. Not covered: the experts of a mixture, which are no
linear layers in transformers.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from agentloop.errors import ModelError
from agentloop.training.learner_settings import LearnerSettings

__all__ = ["adapted_layers", "add_adapters", "delta"]

_NAME = "lora"


def add_adapters(model: Any, settings: LearnerSettings) -> None:
    """Freeze the model, and put adapters beside its linear layers; B is 0 at first. The same
    numbers on every rank.

    Raises:
        ModelError: no layer has such a name.
    """
    from peft import LoraConfig, inject_adapter_in_model

    lora = settings.lora
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.targets) or "all-linear",  # of peft: without the output layer
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        try:
            with warnings.catch_warnings(action="ignore"):  # of tied weights: refused below
                inject_adapter_in_model(config, model, _NAME)
        except ValueError as error:
            raise ModelError(f"learner.lora.targets: {error}") from error
    for name, layer in adapted_layers(model).items():
        plain = type(layer.get_base_layer()) is torch.nn.Linear
        if not plain or layer is model.get_output_embeddings():
            raise ModelError(f"learner.lora.targets: {name} is of no linear layer inside the model")
    for parameter in model.parameters():
        if parameter.requires_grad:  # peft has frozen all others
            parameter.data = parameter.data.to(getattr(torch, settings.dtype))


def adapted_layers(model: Any) -> dict[str, Any]:
    """peft's layers, by the names that their weights had before there were adapters."""
    if not any(".lora_" in name for name, _ in model.named_parameters()):
        return {}
    from peft.tuners.lora import LoraLayer

    layers = ((name, one) for name, one in model.named_modules() if isinstance(one, LoraLayer))
    return {f"{name}.weight": layer for name, layer in layers}


def delta(layer: Any) -> Any:
    """alpha / rank * B A, of the shape of the layer's weight."""
    return layer.get_delta_weight(_NAME)
