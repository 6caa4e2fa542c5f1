"""`agentloop runs export`: write a run's model to a folder that transformers and SGLang can load.

    runs/NAME/weights/40 (train) or runs/NAME/model (sft) ──verify──> cast ──rename──> OUT

Weights are verified against the checksums that they were published with. They are cast without
torch, one file at a time, which has to fit in memory.
Not covered: DeepSpeed checkpoints. Quantized weights are copied, never cast.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from agentloop.agent.chat_format import ChatFormat
from agentloop.cli import console
from agentloop.errors import AgentLoopError, ModelError, SettingsError
from agentloop.launch.progress import ProgressLine
from agentloop.models.folder import (
    INDEX,
    MANIFEST,
    copy_others,
    read_json,
    tensor_files,
    true_config,
)
from agentloop.observe.runs import read_metrics

Dtype = Literal["bfloat16", "float32"]

_NAMES = {"BF16": "bfloat16", "F32": "float32", "F16": "float16", "F64": "float64"}
_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


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
    if not versions:
        raise ModelError(f"{source}: it has no published weights yet")
    if chosen not in versions:
        available = ", ".join(map(str, sorted(versions)))
        wanted = "" if step is None else f" of step {step}"
        raise ModelError(
            f"{source}: no published weights{wanted} (available: {available}); a run keeps only "
            "its newest. For those of a checkpoint, go back to it: agentloop train --resume RUN "
            "--from STEP"
        )
    return ModelSource(versions[chosen], source, _version(versions[chosen]))


def export(
    source: Path, out: Path, *, dtype: Dtype | None = None, step: int | None = None
) -> ModelSource:
    """Write the model of `source` to `out`, atomically, and return the location of the source.

    Raises:
        ModelError: the model is missing or incomplete, it differs from the published one, or it
            cannot be written.
        SettingsError: `out` exists.
    """
    model = find(source, step)
    if out.exists() or out.is_symlink():
        raise SettingsError(f"{out}: already exists; name another folder")
    sha256 = _check(model.folder)
    # Also checks that the runtime can use its tokenizer and template.
    stop_ids = ChatFormat.load(model.folder).stop_ids
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        _write(model, partial, list(sha256), dtype)
        _write_ends(partial, stop_ids)
        _add_card(model, partial, sha256 if dtype is None else {})
        for file in partial.rglob("*"):
            _sync(file)
        partial.rename(out)
        _sync(out.parent)
    except OSError as error:
        raise ModelError(f"{error.filename or out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return model


def _is_run(folder: Path) -> bool:
    return (folder / "config.toml").is_file()


def _version(folder: Path) -> str | None:
    if not (folder / MANIFEST).is_file():
        return None
    version: str = read_json(folder / MANIFEST).get("version", "")
    return version


def _check(folder: Path) -> dict[str, str]:
    """Verify the weight files; return their SHA-256 by name, "" if none was published."""
    published: dict[str, str] = {}
    if (folder / MANIFEST).is_file():
        published = read_json(folder / MANIFEST).get("sha256", {})
    places = {} if published else tensor_files(folder) or {}
    files = list(published) or sorted({path.name for path in places.values()})
    files = files or ["model.safetensors"]
    for file in files:
        if not (folder / file).is_file():
            raise ModelError(f"{folder}: {file} is missing")
        if published and _sha256(folder / file) != published.get(file):
            raise ModelError(f"{folder / file}: differs from the published file (SHA-256)")
    return {file: published.get(file, "") for file in files}


def _write(model: ModelSource, out: Path, weights: Sequence[str], dtype: Dtype | None) -> None:
    copy_others(model.folder, out)
    config = read_json(out / "config.json")
    if dtype is not None and config.get("quantization_config"):
        raise ModelError(f"{model.folder}: quantized weights cannot be cast: omit --dtype")
    kinds: Counter[str] = Counter()
    num_bytes = 0
    for name in weights:
        source, target = model.folder / name, out / name
        if dtype is None:
            shutil.copyfile(source, target)
        else:
            _cast_file(source, target, dtype)
        with _open_weights(target) as file:
            for tensor in map(file.get_slice, file.keys()):
                kinds[_NAMES.get(tensor.get_dtype(), "")] += math.prod(tensor.get_shape())
        with target.open("rb") as stream:
            num_bytes += target.stat().st_size - 8 - int.from_bytes(stream.read(8), "little")
    if len(weights) > 1:
        index = read_json(model.folder / INDEX)
        _write_json(out / INDEX, index | {"metadata": {"total_size": num_bytes}})
    stored_dtype = kinds.most_common(1)[0][0] or None
    _write_json(out / "config.json", true_config(config, stored_dtype, quantized=True))


def _write_ends(out: Path, stop_ids: Iterable[int]) -> None:
    """Let generation end where the model was trained to end a turn."""
    path, names = out / "generation_config.json", ("bos_token_id", "eos_token_id", "pad_token_id")
    config = read_json(out / "config.json")
    generation = {name: config[name] for name in names if config.get(name) is not None}
    if path.is_file():
        generation = read_json(path)
    ends = generation.get("eos_token_id")
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    missing = [id for id in stop_ids if id not in known]
    if missing:
        ids = [*known, *missing]
        generation["eos_token_id"] = ids if len(ids) > 1 else ids[0]
    if missing or not path.is_file():
        _write_json(path, generation)


def _cast_file(source: Path, target: Path, dtype: Dtype) -> None:
    """Copy a safetensors file, casting floating-point tensors to `dtype`."""
    tensors = {}
    with _open_weights(source) as file:
        for name in file.keys():  # noqa: SIM118
            kind = file.get_slice(name).get_dtype()
            if kind.startswith("F") and kind not in _NAMES:
                raise ModelError(
                    f"{source}: {name} has dtype {kind}, which cannot be cast: omit --dtype"
                )
            tensor = file.get_tensor(name)
            if kind in _NAMES:
                with np.errstate(over="ignore"):  # too large for bfloat16: infinite
                    tensor = tensor.astype(_DTYPES[dtype])
            tensors[name] = tensor
    save_file(tensors, target, metadata={"format": "pt"})


@contextmanager
def _open_weights(path: Path) -> Iterator[Any]:
    """Open a safetensors file; one that is damaged or truncated is a `ModelError`."""
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except SafetensorError as error:
        raise ModelError(f"{path}: truncated, or not a safetensors file: {error}") from error


def _add_card(model: ModelSource, out: Path, sha256: Mapping[str, str]) -> None:
    """Write README.md with a run's settings and last metrics; a model by itself keeps its own."""
    if model.run is None:
        return
    name = model.run.resolve().name
    config = (model.run / "config.toml").read_text("utf-8").strip()
    lines = [
        *("---", "library_name: transformers", "pipeline_tag: text-generation", "---"),
        *(
            f"# {name}",
            "",
            f"Trained with agentloop; weight version {model.version or 'unknown'}."
            + (" No step has changed these weights." if model.version == "0" else ""),
        ),
        *_metrics_table(model.run),
        *("", "## Settings", "", "```toml", config, "```"),
    ]
    files = [f"{checksum}  {file}" for file, checksum in sha256.items() if checksum]
    if files:
        lines += ["", "## SHA-256", "", "```", *files, "```"]
    (out / "README.md").write_text("\n".join(lines) + "\n", "utf-8")


def _metrics_table(run: Path) -> Iterator[str]:
    """Yield Markdown tables of the last step and of the last evaluation."""
    last: dict[bool, dict[str, object]] = {}
    for row in read_metrics(run):
        last[any(name.startswith("held_out/") for name in row)] = row
    for is_evaluation, row in sorted(last.items()):
        kind = "evaluation" if is_evaluation else "step"
        yield from ("", f"## Last {kind}", "", "| | |", "|---|---|")
        for name, value in row.items():
            yield f"| {name} | {f'{value:.4g}' if isinstance(value, float) else value} |"


def _write_json(path: Path, value: Mapping[str, object]) -> None:
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
        with ProgressLine("Checking and writing the weights", after_s=2.0):
            model = export(options.source, options.out, dtype=options.dtype, step=options.step)
    except AgentLoopError as error:
        print(f"agentloop: error: {error}", file=sys.stderr)
        return 2
    version = "" if model.version is None else f", version {model.version}"
    if options.json:
        console.print_json({"out": options.out, **asdict(model)})
    else:
        print(f"{options.out}: exported from {model.folder}{version}")
        if model.version == "0":
            print("These are the weights that training began with: no step has changed them.")
    return 0
