"""The names under which tensors are published: those of the folder that training started from.

    parameters of the model in memory ──transformers' conversions, reversed──> tensors of the folder

transformers loads some models under other names than their files have: the experts of a layer as
one tensor, the language model of a composite one without its prefix. Servers know the files' names
alone, and skip a tensor of any other name without an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from agentloop.errors import ModelError
from agentloop.learner.lora import adapted_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Values: TypeAlias = dict[str, Tensor]
"""Tensors by name."""

_MAX_NAMED = 3  # in an error


@dataclass(frozen=True, slots=True)
class Conversion:
    """Tensors of a model that are published together.

    Attributes:
        sources: Their names in the model.
        shapes: The shape of each published tensor by its name.
        convert: Returns the published tensors from the model's.
    """

    sources: tuple[str, ...]
    shapes: Mapping[str, torch.Size]
    convert: Callable[[Values], Values]


def named_tensors(model: torch.nn.Module) -> Values:
    """Return parameters and buffers by name, tied ones under each name, and no adapters; the same
    on every rank."""
    layers = adapted_layers(model)
    tensors: Values = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not (layers and parameter.requires_grad):  # an adapter's: merged into the weight
            tensors[name.replace(".base_layer.", ".")] = parameter
    kept = model.state_dict().keys()
    return tensors | {name: buffer for name, buffer in model.named_buffers() if name in kept}


def shape_of(tensor: Tensor) -> torch.Size:
    """Return the shape of the whole tensor, of which ZeRO 3 keeps a part on each rank."""
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


def conversions_of(model: PreTrainedModel, start: Iterable[str] | None) -> list[Conversion]:
    """Return how the model's tensors are published, in its own order.

    Args:
        start: The names in the folder that training started from; None: there are none, because the
            weights are random. A tied tensor is published under those of its names that are there.

    Raises:
        ModelError: A tensor would have a name that is not there; names some.
    """
    start_names = None if start is None else frozenset(start)
    tensors = named_tensors(model)
    convert = partial(_convert, model)
    empty = {
        name: torch.empty(shape_of(tensor), dtype=tensor.dtype, device="meta")
        for name, tensor in tensors.items()
    }
    published = {name: set(convert({name: value})) for name, value in empty.items()}
    in_memory = {
        n for n in published if start_names and not published[n] <= start_names and n in start_names
    }
    published |= {name: {name} for name in in_memory}  # as in the folder
    chosen = _without_ties(tensors, published, start_names)
    unknown = [n for n in chosen if start_names is not None and not published[n] <= start_names]
    chosen = [n for n in chosen if n not in unknown]  # without buffers that the model computes
    if unknown := [n for n in unknown if isinstance(tensors[n], torch.nn.Parameter)]:
        names = ", ".join(unknown[:_MAX_NAMED])
        raise ModelError(
            f"{type(model).__name__}: its folder has no tensor for {names} ({len(unknown)} in "
            "all), so transformers made them random, and servers would skip them when they are "
            "published. Start from a folder whose weights are those of its config.json"
        )
    conversions = []
    for sources in _together(chosen, published):
        make: Callable[[Values], Values] = dict if sources[0] in in_memory else convert
        shapes = {n: v.shape for n, v in make({name: empty[name] for name in sources}).items()}
        conversions.append(Conversion(tuple(sources), shapes, make))
    return conversions


def _convert(model: PreTrainedModel, values: Values) -> Values:
    """Return tensors of the model as `save_pretrained` would write them."""
    from transformers.core_model_loading import revert_weight_conversion

    made: Values = revert_weight_conversion(model, values)
    return made


def _without_ties(
    tensors: Values, published: Mapping[str, set[str]], start_names: frozenset[str] | None
) -> list[str]:
    """Return a name for each tensor, and further names of tied ones that the folder has."""
    tied: dict[int, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        tied[id(tensor)].append(name)
    chosen: set[str] = set()
    for names in tied.values():
        chosen.update(
            [n for n in names if start_names and published[n] <= start_names] or names[:1]
        )
    return [name for name in tensors if name in chosen]


def _together(names: Iterable[str], published: Mapping[str, set[str]]) -> list[list[str]]:
    """Divide names into those of which the same published tensors are made."""
    groups: dict[str, list[str]] = {}
    for name in names:
        group = next((groups[made] for made in published[name] if made in groups), [])
        group.append(name)
        groups |= dict.fromkeys(published[name], group)
    return list({id(group): group for group in groups.values()}.values())
