"""Weights published for others to load: gathered, cast, and made visible all at once.

    parameters ──gathered, some at a time──> rank 0 ──cast──> shards ──sha256──> folder

A published folder is a model folder of transformers (safetensors, configuration, tokenizer) with an
additional `published.json`: {"version": "7", "sha256": {"model.safetensors": "..."}, "base": {}}.
`base` has the checksums of the files that there are differences from (differences.py). Its tensors
have the names of the folder that training started from (names.py), and those that are not trained,
such as the vision tower of a composite model, are that folder's.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from agentloop.learner.errors import WriteError
from agentloop.learner.files import appear, fresh_partial, partial_of, remove_partial, writing
from agentloop.learner.lora import adapted_layers, delta
from agentloop.learner.names import Conversion, named_tensors
from agentloop.learner.policy import Policy, config_of
from agentloop.models.differences import DIFFERENCE, write_difference
from agentloop.models.folder import INDEX, MANIFEST, copy_others, true_config
from agentloop.training.learner_client.protocol import PublishReply, Reply

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

_FLOATS = ("F64", "F32", "F16", "BF16")  # in safetensors


def publish(policy: Policy, folder: Path, version: str, base: Path | None = None) -> Reply:
    """Write the weights to `folder` (collective; rank 0 writes).

    Rank 0's reply is a `PublishReply`.

    Raises:
        WriteError: Writing failed; the partial folder is removed.
    """
    try:
        return _publish(policy, folder, version, base)
    except WriteError:
        if policy.world.first:
            remove_partial(folder)
        raise


def _publish(policy: Policy, folder: Path, version: str, base: Path | None) -> Reply:
    start_s = time.perf_counter()
    world, first = policy.world, policy.world.first
    dtype = getattr(torch, policy.settings.publish_dtype)
    partial = partial_of(folder)

    def on_first(work: Callable[[], object]) -> None:
        def write() -> None:
            with writing(folder):
                work()

        world.run_beside(write if first else None)

    on_first(lambda: fresh_partial(folder))
    tensors_of_all = itertools.chain(
        trained_tensors(policy, dtype), _tensors_of_start(policy, dtype)
    )
    shards = split(tensors_of_all, policy.settings.max_shard_mib << 20)
    names = _file_names(len(shards))
    sha256: dict[str, str] = {}
    for file, shard in zip(names, shards, strict=True):
        tensors = {
            tensor.name: value.to("cpu", tensor.dtype, copy=True).contiguous()
            for tensor, value in gather_values(shard, keep=first)
        }
        on_first(functools.partial(_write_shard, partial / file, tensors, sha256))

    def complete() -> None:
        differ_from = _differences(partial, base, names)
        manifest = {"version": version, "sha256": sha256, "base": differ_from}
        if len(shards) > 1:
            _write_index(partial, names, shards)
        _write_others(policy, partial)
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
        appear(partial, folder, durable=False)  # after a crash they are published again

    on_first(complete)
    if not first:
        return Reply()
    num_bytes = sum((folder / file).stat().st_size for file in names)
    seconds = time.perf_counter() - start_s
    return PublishReply(version=version, sha256=sha256, num_bytes=num_bytes, seconds=seconds)


def _write_shard(path: Path, tensors: dict[str, torch.Tensor], sha256: dict[str, str]) -> None:
    save_file(tensors, path, metadata={"format": "pt"})  # releases the GIL while it writes
    path.chmod(0o644)  # safetensors writes 0600
    sha256[path.name] = _sha256_of(path, tensors)


def _sha256_of(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    """Return the expected checksum of the file: its header, and the tensors as they are in memory.

    Comparing it with the file on disk detects any corruption in between.
    """
    with path.open("rb") as file:
        size = file.read(8)
        header = file.read(int.from_bytes(size, "little"))
    digest = hashlib.sha256(size + header)
    places = {name: place for name, place in json.loads(header).items() if name in tensors}
    for name in sorted(places, key=lambda name: places[name]["data_offsets"]):
        digest.update(memoryview(tensors[name].reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


def _differences(folder: Path, base: Path | None, names: Sequence[str]) -> dict[str, str]:
    """Write the files' differences from those of `base`; return the SHA-256 of each of these."""
    if base is None or not (base / MANIFEST).is_file():
        return {}
    before = json.loads((base / MANIFEST).read_text("utf-8"))["sha256"]
    return {
        name: before[name]
        for name in names
        if name in before
        and write_difference(base / name, folder / name, folder / (name + DIFFERENCE))
    }


class PublishedTensor(NamedTuple):
    """A tensor as it is published. Under ZeRO 3 each rank holds a part of its sources.

    Tensors that are computed together have the same `make`.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype  # of the published tensor
    made_of: tuple[torch.Tensor, ...]
    # Computes values by name, on the device, while all of `made_of` is gathered.
    make: Callable[[], Mapping[str, torch.Tensor]]

    @property
    def num_bytes(self) -> int:
        return int(self.shape.numel() * self.dtype.itemsize)


Shard = list[PublishedTensor]


def split(tensors: Iterable[PublishedTensor], max_bytes: int) -> list[Shard]:
    """Split tensors into shards of at most `max_bytes`; a larger tensor is a shard of its own."""
    shards: list[Shard] = [[]]
    free = max_bytes
    for tensor in tensors:
        size = tensor.num_bytes
        if size > free and shards[-1]:
            shards.append([])
            free = max_bytes
        shards[-1].append(tensor)
        free -= size
    return shards


def trained_tensors(policy: Policy, dtype: torch.dtype) -> Iterator[PublishedTensor]:
    """Yield the model's parameters and buffers, with adapters merged; the same on every rank.

    Floating-point tensors are published as `dtype`.
    """
    layers = adapted_layers(policy.model)
    tensors = named_tensors(policy.model)
    for conversion in policy.conversions:
        values = {name: _value(tensors[name], layers.get(name)) for name in conversion.sources}
        made_of = tuple(part for parts, _ in values.values() for part in parts)
        make = functools.partial(_convert, conversion, values)
        source = tensors[conversion.sources[0]]
        kind = dtype if source.is_floating_point() else source.dtype
        for name, shape in conversion.shapes.items():
            yield PublishedTensor(name, shape, kind, made_of, make)


_Value: TypeAlias = tuple[tuple[torch.Tensor, ...], Callable[[], torch.Tensor]]
"""What a tensor is made of, and what makes it."""


def _value(tensor: torch.Tensor, layer: LoraLayer | None) -> _Value:
    if layer is None:
        return (tensor,), lambda: tensor
    adapters = (p for p in layer.parameters() if p.requires_grad)
    return (tensor, *adapters), lambda: tensor.float() + delta(layer).float()


def _convert(conversion: Conversion, values: Mapping[str, _Value]) -> Mapping[str, torch.Tensor]:
    return conversion.convert({name: make() for name, (_, make) in values.items()})


def _tensors_of_start(policy: Policy, dtype: torch.dtype) -> Iterator[PublishedTensor]:
    """Yield the tensors of the folder that training started from which the model does not have."""
    published = {name for conversion in policy.conversions for name in conversion.shapes}
    for name, path in sorted((policy.start or {}).items()):
        if name in published:
            continue
        with safe_open(path, "pt") as file:
            place = file.get_slice(name)
            is_float = place.get_dtype() in _FLOATS
            kind = dtype if is_float else file.get_tensor(name).dtype
            shape = torch.Size(place.get_shape())
        yield PublishedTensor(name, shape, kind, (), functools.partial(_read, path, name))


def _read(path: Path, name: str) -> Mapping[str, torch.Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name)}


def gather_values(shard: Shard, *, keep: bool) -> Iterator[tuple[PublishedTensor, torch.Tensor]]:
    """Yield each tensor with its value; gather what is computed together (collective).

    A value is whole on the device until the next one. Without `keep` this rank only takes part and
    yields nothing. Every rank must exhaust the iterator.
    """
    import deepspeed

    for _, tensors in itertools.groupby(shard, key=lambda tensor: id(tensor.make)):
        first, *others = tensors
        parts = [part for part in first.made_of if hasattr(part, "ds_id")]
        with torch.no_grad(), deepspeed.zero.GatheredParameters(parts, enabled=bool(parts)):
            if keep:
                values = first.make()
                yield from ((tensor, values[tensor.name].detach()) for tensor in (first, *others))


def _file_names(num_shards: int) -> list[str]:
    if num_shards == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]


def _write_index(partial: Path, names: list[str], shards: list[Shard]) -> None:
    where = {
        tensor.name: file for file, shard in zip(names, shards, strict=True) for tensor in shard
    }
    total = sum((partial / file).stat().st_size for file in names)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    text = json.dumps(index, indent=2) + "\n"
    (partial / INDEX).write_text(text, "utf-8")


def _write_others(policy: Policy, target: Path) -> None:
    settings, model = policy.settings, policy.model
    copy_others(settings.model, target, template=settings.chat_template)
    (target / "README.md").unlink(missing_ok=True)  # the model card describes other weights
    config, kind = config_of(settings), type(model).__name__
    if policy.start is None and kind not in config.get("architectures", [kind]):
        # Random weights of the language model of a composite one are a model by themselves.
        config = {**model.config.to_dict(), "architectures": [kind]}
    config = true_config(config, settings.publish_dtype)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
