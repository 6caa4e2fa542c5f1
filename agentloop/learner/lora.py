"""LoRA: a linear layer's weight W is frozen, and a low-rank B A added to it is trained.

See arXiv 2106.09685. peft creates and computes the layers; the learner publishes W + alpha / rank *
B A under W's own name, so that no other part has to know. Not covered: the experts of a mixture,
which are not linear layers in transformers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from agentloop.errors import ModelError
from agentloop.training.learner_client.settings import LearnerSettings

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer
    from transformers import PreTrainedModel

_NAME = "lora"


def add_adapters(model: PreTrainedModel, settings: LearnerSettings) -> None:
    """Freeze the model and add adapters to its linear layers, the same on every rank.

    B is 0 at first.

    Raises:
        ModelError: No layer has such a name, or the layer is not linear.
    """
    from peft import LoraConfig, inject_adapter_in_model

    lora = settings.lora
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.targets) or "all-linear",  # peft excludes the output layer
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        try:
            with warnings.catch_warnings(action="ignore"):  # tied weights are refused below
                inject_adapter_in_model(config, model, _NAME)
        except ValueError as error:
            raise ModelError(f"learner.lora.targets: {error}") from error
    for name, layer in adapted_layers(model).items():
        plain = type(layer.get_base_layer()) is torch.nn.Linear
        if not plain or layer is model.get_output_embeddings():
            raise ModelError(f"learner.lora.targets: {name} is not a linear layer inside the model")
    for parameter in model.parameters():
        if parameter.requires_grad:  # peft has frozen all others
            parameter.data = parameter.data.to(getattr(torch, settings.dtype))


def adapted_layers(model: torch.nn.Module) -> dict[str, LoraLayer]:
    """Return peft's layers by the names that their weights had before there were adapters."""
    if not any(".lora_" in name for name, _ in model.named_parameters()):
        return {}
    from peft.tuners.lora import LoraLayer

    layers = (
        (name, layer) for name, layer in model.named_modules() if isinstance(layer, LoraLayer)
    )
    return {f"{name}.weight": layer for name, layer in layers}


def delta(layer: LoraLayer) -> torch.Tensor:
    """Return alpha / rank * B A, in the shape of the layer's weight."""
    return layer.get_delta_weight(_NAME)


@contextmanager
def adapters_off(model: torch.nn.Module) -> Iterator[None]:
    """Let the model compute without its adapters.

    They are scaled to 0 rather than skipped, so that ZeRO 3 sees the same modules in each pass.
    """
    layers = [*adapted_layers(model).values()]
    scales = [layer.scaling[_NAME] for layer in layers]
    try:
        for layer in layers:
            layer.scaling[_NAME] = 0.0
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling[_NAME] = scale
