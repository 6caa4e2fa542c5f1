"""Weights that others can load: gathered, cast, and visible all at once.

    parameters ──gathered, some at a time──> rank 0 ──cast──> shards ──sha256──> folder

A published folder is a model folder of transformers' (safetensors, configuration, tokenizer),
and `published.json`: {"version": "7", "sha256": {"model.safetensors": "..."}}.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from learner.errors import LearnerError
from learner.files import appear, fresh_partial
from learner.lora import adapted_layers, delta
from learner.policy import Policy

__all__ = [
    "MANIFEST",
    "Shard",
    "Whole",
    "gathered",
    "publish",
    "published_dtype",
    "size_of",
    "split",
    "verify",
]

MANIFEST = "published.json"
# What a loader needs beside the weights; anything else in the folder stays there.
_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")


def publish(policy: Policy, folder: Path, version: str) -> dict[str, Any]:
    """Write the weights into `folder`. Every rank comes here; rank 0 writes.

    Tied weights are written once. Returns on rank 0: version, sha256 by file, num_bytes, seconds.
    """
    begun = time.perf_counter()
    first = policy.world.first
    dtype = getattr(torch, policy.settings.publish_dtype)
    partial = fresh_partial(folder) if first else folder
    shards = split(policy.model, dtype, policy.settings.max_shard_mib << 20)
    names = _file_names(len(shards))
    sha256 = {}
    for file, shard in zip(names, shards, strict=True):
        tensors = {
            name: tensor.detach().to("cpu", published_dtype(tensor, dtype), copy=True).contiguous()
            for name, tensor in gathered(shard, keep=first)
        }
        if first:
            save_file(tensors, partial / file, metadata={"format": "pt"})
            (partial / file).chmod(0o644)  # safetensors writes 0600
            sha256[file] = _sha256(partial / file)
    if not first:
        return {}
    if len(shards) > 1:
        _write_index(partial, names, shards)
    _copy_others(policy.settings.model, partial, policy.settings.publish_dtype)
    manifest = {"version": version, "sha256": sha256}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
    num_bytes = sum((partial / file).stat().st_size for file in names)
    appear(partial, folder, durable=False)  # after a crash they are published anew
    return {**manifest, "num_bytes": num_bytes, "seconds": time.perf_counter() - begun}


def verify(folder: Path) -> str:
    """The version in `folder`, after its files were compared with their checksums.

    Raises:
        LearnerError: it names the file that differs.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        for file, expected in manifest["sha256"].items():
            if _sha256(folder / file) != expected:
                raise LearnerError(f"{folder / file}: not what was published: sha256 differs")
    except (OSError, ValueError) as error:
        raise LearnerError(f"{folder}: {error}") from error
    version: str = manifest["version"]
    return version


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor as others see it. Under ZeRO 3 each rank holds a part of what it is made of.

    Attributes:
        dtype, shape: of the tensor before it is cast.
        made_of: parameters, or a buffer.
        make: gives it, on the device, while all of `made_of` is gathered.
    """

    dtype: Any
    shape: torch.Size
    made_of: tuple[Any, ...]
    make: Callable[[], Any]

    @property
    def nbytes(self) -> int:
        return self.numel() * int(self.dtype.itemsize)

    def numel(self) -> int:
        return int(self.shape.numel())

    def is_floating_point(self) -> bool:
        return bool(self.dtype.is_floating_point)


Shard = list[tuple[str, Whole]]


def split(model: Any, dtype: Any, max_bytes: int) -> list[Shard]:
    """All tensors by name, in shards of at most `max_bytes` if one tensor does not take more;
    floats count as `dtype`."""
    shards: list[Shard] = [[]]
    free = max_bytes
    for name, tensor in _tensors(model):
        size = size_of(tensor, dtype)
        if size > free and shards[-1]:
            shards.append([])
            free = max_bytes
        shards[-1].append((name, tensor))
        free -= size
    return shards


def published_dtype(tensor: Any, dtype: Any) -> Any:
    """`dtype` for what is floating point; others keep their own."""
    return dtype if tensor.is_floating_point() else tensor.dtype


def size_of(tensor: Whole, dtype: Any) -> int:
    """Bytes of the tensor, published as `dtype`."""
    return tensor.numel() * int(published_dtype(tensor, dtype).itemsize)


def _tensors(model: Any) -> Iterator[tuple[str, Whole]]:
    """Parameters and buffers, tied ones once, adapters merged into the weights beside them. The
    same on every rank."""
    layers = adapted_layers(model)
    for name, parameter in model.named_parameters():  # a tied one under its first name
        if layers and parameter.requires_grad:  # an adapter's: it comes with the weight
            continue
        name = name.replace(".base_layer.", ".")
        layer = layers.get(name)
        yield name, _merged(parameter, layer) if layer else _as_it_is(parameter)
    kept = model.state_dict().keys()
    yield from ((name, _as_it_is(one)) for name, one in model.named_buffers() if name in kept)


def _as_it_is(tensor: Any) -> Whole:
    return Whole(tensor.dtype, _shape(tensor), (tensor,), lambda: tensor)


def _merged(weight: Any, layer: Any) -> Whole:
    adapters = (p for p in layer.parameters() if p.requires_grad)
    return Whole(
        torch.float32,
        _shape(weight),
        (weight, *adapters),
        lambda: weight.float() + delta(layer).float(),
    )


def _shape(tensor: Any) -> torch.Size:
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))  # ZeRO 3 leaves none in place


def gathered(shard: Shard, *, keep: bool) -> Iterator[tuple[str, Any]]:
    """One tensor at a time is whole on the device, until the next one; without `keep` this rank
    only helps with it. Every rank comes here, and to the end."""
    import deepspeed

    for name, whole in shard:
        parts = [part for part in whole.made_of if hasattr(part, "ds_id")]
        with torch.no_grad(), deepspeed.zero.GatheredParameters(parts, enabled=bool(parts)):
            if keep:
                yield name, whole.make()


def _file_names(num_shards: int) -> list[str]:
    if num_shards == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]


def _write_index(partial: Path, names: list[str], shards: list[Shard]) -> None:
    where = {name: file for file, shard in zip(names, shards, strict=True) for name, _ in shard}
    total = sum((partial / file).stat().st_size for file in names)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    text = json.dumps(index, indent=2) + "\n"
    (partial / "model.safetensors.index.json").write_text(text, "utf-8")


def _copy_others(source: Path, target: Path, dtype: str) -> None:
    for file in source.iterdir():
        known = file.suffix in _COPIED and not file.name.endswith(".index.json")
        if file.is_file() and known and file.name != MANIFEST:
            shutil.copyfile(file, target / file.name)
    config = json.loads((target / "config.json").read_text("utf-8"))
    config.pop("torch_dtype", None)  # its name of old
    config["dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
