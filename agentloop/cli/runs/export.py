"""`agentloop runs export`: write a run's model to a folder that transformers and SGLang can load.

    runs/NAME/weights/40 (train) or runs/NAME/model (sft) ──verify──> cast ──rename──> OUT

Weights are verified against the checksums that they were published with, and cast without torch:
bfloat16 is the upper half of float32.
Not covered: DeepSpeed checkpoints. Quantized weights are copied, never cast.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import struct
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from agentloop.cli import console
from agentloop.agent.chat_format import ChatFormat
from agentloop.errors import AgentLoopError, ModelError, SettingsError

__all__ = ["ModelSource", "export", "find", "main"]

Dtype = Literal["bfloat16", "float32"]

_MANIFEST = "published.json"
_INDEX = "model.safetensors.index.json"
# Files that a loader needs besides the weights.
_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
_NAMES = {"BF16": "bfloat16", "F32": "float32", "F16": "float16", "F64": "float64"}
_MAX_HEADER_BYTES = 100 << 20  # as in safetensors itself
_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model folder, with its run and the version it was published as, if there are any."""

    folder: Path
    run: Path | None
    version: str | None


def find(source: Path, step: int | None = None) -> ModelSource:
    """Find the weights in a run's folder, or in a model folder.

    Args:
        step: the step whose weights to take; None: the newest.

    Raises:
        ModelError: there are no such weights.
    """
    if (source / "config.json").is_file():
        if step is not None:
            raise ModelError(f"{source} is a model folder: it has no steps")
        run = source.parent.parent if source.parent.name == "weights" else source.parent
        return ModelSource(source, run if _is_run(run) else None, _version(source))
    if not _is_run(source):
        raise ModelError(
            f"{source}: neither a run's folder (config.toml) nor a model folder (config.json)"
        )
    versions = {
        int(path.name): path
        for path in sorted((source / "weights").glob("[0-9]*"))
        if path.name.isdecimal() and (path / "config.json").is_file()
    }
    model = source / "model"
    if step is None and (model / "config.json").is_file():
        return ModelSource(model, source, _version(model))
    chosen = max(versions, default=None) if step is None else step
    if chosen not in versions:
        there = ", ".join(map(str, sorted(versions))) or "none"
        wanted = "" if step is None else f" of step {step}"
        raise ModelError(
            f"{source}: no published weights{wanted} (available: {there}); a run keeps its newest"
        )
    return ModelSource(versions[chosen], source, _version(versions[chosen]))


def export(
    source: Path, out: Path, *, dtype: Dtype | None = None, step: int | None = None
) -> ModelSource:
    """Write the model of `source` to `out`, atomically, and return the location of the source.

    Raises:
        ModelError: the model is missing or incomplete, or it differs from the published one.
        SettingsError: `out` exists or cannot be written.
    """
    found = find(source, step)
    if out.exists() or out.is_symlink():
        raise SettingsError(f"{out}: already exists; name another folder")
    sha256 = _check(found.folder)
    ChatFormat.load(found.folder)  # check that the runtime can use its tokenizer and template
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        _write(found, partial, list(sha256), dtype)
        _add_card(found, partial, sha256 if dtype is None else {})
        for file in partial.iterdir():
            _sync(file)
        partial.rename(out)
        _sync(out.parent)
    except OSError as error:
        raise SettingsError(f"{error.filename or out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return found


def _is_run(folder: Path) -> bool:
    return (folder / "config.toml").is_file()


def _version(folder: Path) -> str | None:
    if not (folder / _MANIFEST).is_file():
        return None
    version: str = _read_json(folder / _MANIFEST).get("version", "")
    return version


def _check(folder: Path) -> dict[str, str]:
    """Verify the weight files; return their SHA-256 by name, "" if none was published."""
    published: dict[str, str] = {}
    if (folder / _MANIFEST).is_file():
        published = _read_json(folder / _MANIFEST).get("sha256", {})
    files = list(published)
    if (folder / _INDEX).is_file():
        files = sorted(set(_read_json(folder / _INDEX).get("weight_map", {}).values()))
    files = files or ["model.safetensors"]
    for file in files:
        if not (folder / file).is_file():
            raise ModelError(f"{folder}: {file} is missing")
        if published and _sha256(folder / file) != published.get(file):
            raise ModelError(f"{folder / file}: differs from the published file (SHA-256)")
    return {file: published.get(file, "") for file in files}


def _write(found: ModelSource, out: Path, weights: Sequence[str], dtype: Dtype | None) -> None:
    for file in found.folder.iterdir():
        if file.is_file() and file.suffix in _COPIED and file.name != _MANIFEST:
            shutil.copyfile(file, out / file.name)
    kinds: Counter[str] = Counter()
    num_bytes = 0
    for name in weights:
        source, target = found.folder / name, out / name
        if dtype is None:
            shutil.copyfile(source, target)
        else:
            _cast_file(source, target, dtype)
        with target.open("rb") as stream:
            for tensor in _header(stream, target).values():
                size = tensor["data_offsets"][1] - tensor["data_offsets"][0]
                kinds[_NAMES.get(tensor["dtype"], "")] += size
                num_bytes += size
    if (out / _INDEX).is_file():
        index = _read_json(out / _INDEX)
        _write_json(out / _INDEX, index | {"metadata": {"total_size": num_bytes}})
    config = _read_json(out / "config.json")
    config.pop("torch_dtype", None)  # the former name of "dtype"
    if most := kinds.most_common(1)[0][0]:
        config["dtype"] = most
    _write_json(out / "config.json", config)
    if not (out / "generation_config.json").is_file():
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        ends = {name: config[name] for name in names if config.get(name) is not None}
        _write_json(out / "generation_config.json", ends)


def _cast_file(source: Path, target: Path, dtype: Dtype) -> None:
    """Copy a safetensors file, casting floating-point tensors to `dtype`."""
    wanted = next(short for short, name in _NAMES.items() if name == dtype)
    with source.open("rb") as file, target.open("wb") as out:
        tensors = _header(file, source)
        begin = file.tell()
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        order = sorted(tensors, key=lambda name: tensors[name]["data_offsets"][0])
        for name in order:
            kind, (start, end) = tensors[name]["dtype"], tensors[name]["data_offsets"]
            if kind.startswith("F") and kind not in _NAMES:
                raise ModelError(
                    f"{source}: {name} has dtype {kind}, which cannot be cast: omit --dtype"
                )
            size = end - start
            if kind in _NAMES:
                size = size // _WIDTHS[kind] * _WIDTHS[wanted]
            new = wanted if kind in _NAMES else kind
            header[name] = {**tensors[name], "dtype": new, "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        out.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            start, end = tensors[name]["data_offsets"]
            file.seek(begin + start)
            for data in _chunks(file, end - start):
                out.write(_cast(data, tensors[name]["dtype"], header[name]["dtype"]))


_WIDTHS = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}


def _cast(data: bytes, old: str, new: str) -> bytes:
    """Cast little-endian floats from dtype `old` to `new`, rounding half to even."""
    if old == new:
        return data
    import numpy as np  # a dependency of transformers

    if old == "BF16":
        wide = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        wide = np.frombuffer(data, {"F16": "<f2", "F32": "<f4", "F64": "<f8"}[old]).astype("<f4")
    if new == "F32":
        return wide.tobytes()
    bits = wide.view("<u4")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    # Rounding would turn the largest NaN into a zero.
    return np.where(np.isnan(wide), np.uint32(0x7FC0), rounded).astype("<u2").tobytes()


def _chunks(file: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    while num_bytes:
        data = file.read(min(num_bytes, _CHUNK_BYTES))
        num_bytes -= len(data)
        yield data


def _header(file: BinaryIO, path: Path) -> dict[str, dict[str, Any]]:
    """Read a safetensors header, by tensor name, and leave the file at the start of the data."""
    size = int.from_bytes(file.read(8), "little")
    try:
        if not 0 < size <= _MAX_HEADER_BYTES:
            raise ValueError(f"its header has {size} bytes")
        header: dict[str, dict[str, Any]] = json.loads(file.read(size))
    except ValueError as error:
        raise ModelError(f"{path}: not a safetensors file: {error}") from error
    header.pop("__metadata__", None)
    end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if path.stat().st_size < 8 + size + end:
        raise ModelError(f"{path}: the file is truncated")
    return header


def _add_card(found: ModelSource, out: Path, sha256: Mapping[str, str]) -> None:
    """Write README.md: a run's settings and last metrics, or a copy of the model's own."""
    if found.run is None:
        if (found.folder / "README.md").is_file():
            shutil.copyfile(found.folder / "README.md", out / "README.md")
        return
    name = found.run.resolve().name
    config = (found.run / "config.toml").read_text("utf-8").strip()
    lines = [
        *("---", "library_name: transformers", "pipeline_tag: text-generation", "---"),
        *(f"# {name}", "", f"Trained with agentloop; weight version {found.version or 'unknown'}."),
        *_metrics_table(found.run / "metrics.jsonl"),
        *("", "## Settings", "", "```toml", config, "```"),
    ]
    files = [f"{checksum}  {file}" for file, checksum in sha256.items() if checksum]
    if files:
        lines += ["", "## SHA-256", "", "```", *files, "```"]
    (out / "README.md").write_text("\n".join(lines) + "\n", "utf-8")


def _metrics_table(path: Path) -> Iterator[str]:
    """Yield Markdown tables of the last step and of the last evaluation."""
    last: dict[bool, dict[str, Any]] = {}
    for row in _rows(path):
        last[any(name.startswith("held_out/") for name in row)] = row
    for is_evaluation, row in sorted(last.items()):
        kind = "evaluation" if is_evaluation else "step"
        yield from ("", f"## The last {kind}", "", "| | |", "|---|---|")
        for name, value in row.items():
            yield f"| {name} | {f'{value:.4g}' if isinstance(value, float) else value} |"


def _rows(path: Path) -> Iterable[dict[str, Any]]:
    if not path.is_file():
        return
    for line in path.read_text("utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # an incomplete line of a run that was killed
            continue


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def main(arguments: list[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="agentloop runs export",
        description="Export a run's weights as a model folder that transformers and SGLang load.",
    )
    parser.add_argument(
        "source", type=Path, metavar="RUN", help="a run's folder, such as runs/first, or a model"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to create")
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        help="dtype of the weights (default: as published)",
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="export the weights of this step (default: newest)"
    )
    parser.add_argument("--json", action="store_true", help="print what was exported as JSON")
    options = parser.parse_args(arguments)
    try:
        with console.ProgressLine("Checking and writing the weights", after_s=2.0):
            found = export(options.source, options.out, dtype=options.dtype, step=options.step)
    except AgentLoopError as error:
        print(f"agentloop: error: {error}", file=sys.stderr)
        return 2
    version = "" if found.version is None else f", version {found.version}"
    if options.json:
        console.print_json({"out": options.out, **asdict(found)})
    else:
        print(f"{options.out}: the model of {found.folder}{version}")
    return 0
