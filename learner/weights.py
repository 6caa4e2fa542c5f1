"""Weights published for others to load: gathered, cast, and made visible all at once.

    parameters ──gathered, some at a time──> rank 0 ──cast──> shards ──sha256──> folder

A published folder is a model folder of transformers (safetensors, configuration, tokenizer) with an
additional `published.json`: {"version": "7", "sha256": {"model.safetensors": "..."}}.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors.torch import save_file

from agentloop.learner.errors import RankError, WriteError
from agentloop.learner.files import appear, fresh_partial, partial_of, remove_partial, writing
from agentloop.learner.lora import adapted_layers, delta
from agentloop.learner.policy import Policy, config_of
from agentloop.training.learner_client.protocol import PublishReply, Reply
from agentloop.training.learner_client.settings import LearnerSettings

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

__all__ = ["MANIFEST", "PublishedTensor", "Shard", "gather_values", "publish", "split", "verify"]

MANIFEST = "published.json"
# Files that a loader needs besides the weights; others in the folder are not copied.
_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")


def publish(policy: Policy, folder: Path, version: str) -> Reply:
    """Write the weights to `folder` (collective; rank 0 writes).

    Tied weights are written once. Rank 0's reply is a `PublishReply`.

    Raises:
        WriteError: Writing failed; the partial folder is removed.
    """
    try:
        return _publish(policy, folder, version)
    except WriteError:
        if policy.world.first:
            remove_partial(folder)
        raise


def _publish(policy: Policy, folder: Path, version: str) -> Reply:
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
    shards = split(policy.model, dtype, policy.settings.max_shard_mib << 20)
    names = _file_names(len(shards))
    sha256: dict[str, str] = {}
    for file, shard in zip(names, shards, strict=True):
        tensors = {
            tensor.name: value.to("cpu", tensor.dtype, copy=True).contiguous()
            for tensor, value in gather_values(shard, keep=first)
        }
        on_first(functools.partial(_write_shard, partial / file, tensors, sha256))
    manifest = {"version": version, "sha256": sha256}

    def complete() -> None:
        if len(shards) > 1:
            _write_index(partial, names, shards)
        _copy_others(policy.settings, partial)
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


def verify(folder: Path) -> str:
    """Check the files in `folder` against their checksums and return the version.

    Raises:
        RankError: A file differs or cannot be read; the message names it.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        for file, expected in manifest["sha256"].items():
            if _sha256(folder / file) != expected:
                raise RankError(f"{folder / file}: sha256 differs from the published one")
    except (OSError, ValueError) as error:
        raise RankError(f"{folder}: {error}") from error
    version: str = manifest["version"]
    return version


class PublishedTensor(NamedTuple):
    """A tensor as it is published. Under ZeRO 3 each rank holds a part of its sources."""

    name: str
    shape: torch.Size
    dtype: torch.dtype  # of the published tensor
    made_of: tuple[torch.Tensor, ...]
    make: Callable[[], torch.Tensor]  # computes it on the device while all of `made_of` is gathered

    @property
    def num_bytes(self) -> int:
        return int(self.shape.numel() * self.dtype.itemsize)


Shard = list[PublishedTensor]


def split(model: torch.nn.Module, dtype: torch.dtype, max_bytes: int) -> list[Shard]:
    """Split all tensors into shards of at most `max_bytes`; a larger tensor is a shard of its own.

    Floating-point tensors are published as `dtype`.
    """
    shards: list[Shard] = [[]]
    free = max_bytes
    for tensor in _tensors(model, dtype):
        size = tensor.num_bytes
        if size > free and shards[-1]:
            shards.append([])
            free = max_bytes
        shards[-1].append(tensor)
        free -= size
    return shards


def _tensors(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[PublishedTensor]:
    """Yield parameters and buffers, with tied ones once and adapters merged; the same on every
    rank."""
    layers = adapted_layers(model)
    for name, parameter in model.named_parameters():  # lists a tied one under its first name
        if layers and parameter.requires_grad:  # an adapter's: merged into the weight
            continue
        name = name.replace(".base_layer.", ".")
        if layer := layers.get(name):
            yield _merged_tensor(name, layer, dtype)
        else:
            yield _plain_tensor(name, parameter, dtype)
    kept = model.state_dict().keys()
    yield from (
        _plain_tensor(name, buffer, dtype) for name, buffer in model.named_buffers() if name in kept
    )


def _plain_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> PublishedTensor:
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    return PublishedTensor(name, _shape(tensor), kind, (tensor,), lambda: tensor)


def _merged_tensor(name: str, layer: LoraLayer, dtype: torch.dtype) -> PublishedTensor:
    weight = layer.get_base_layer().weight
    return PublishedTensor(
        name,
        _shape(weight),
        dtype,
        (weight, *(p for p in layer.parameters() if p.requires_grad)),
        lambda: weight.float() + delta(layer).float(),
    )


def _shape(tensor: torch.Tensor) -> torch.Size:
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


def gather_values(shard: Shard, *, keep: bool) -> Iterator[tuple[PublishedTensor, torch.Tensor]]:
    """Yield each tensor with its value, gathered one at a time (collective).

    A value is whole on the device until the next one. Without `keep` this rank only takes part and
    yields nothing. Every rank must exhaust the iterator.
    """
    import deepspeed

    for tensor in shard:
        parts = [part for part in tensor.made_of if hasattr(part, "ds_id")]
        with torch.no_grad(), deepspeed.zero.GatheredParameters(parts, enabled=bool(parts)):
            if keep:
                yield tensor, tensor.make().detach()


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
    (partial / "model.safetensors.index.json").write_text(text, "utf-8")


def _copy_others(settings: LearnerSettings, target: Path) -> None:
    for file in settings.model.iterdir():
        is_copied = file.suffix in _COPIED and not file.name.endswith(".index.json")
        if file.is_file() and is_copied and file.name != MANIFEST:
            shutil.copyfile(file, target / file.name)
    if settings.chat_template is not None:
        (target / "chat_template.jinja").write_text(settings.chat_template, "utf-8")
    config = config_of(settings)
    config.pop("torch_dtype", None)  # the former name
    config["dtype"] = settings.publish_dtype
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
