"""A model's folder: its weights, and the files beside them that other programs read.

What is published or exported is such a folder, made from the one that training started from. The
files beside the weights come along whatever they are, also those in subfolders, such as a chat
template for each purpose; only weights are left out, which would be those of another model.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open

from agentloop.errors import ModelError
from agentloop.plain_json import JsonObject

INDEX = "model.safetensors.index.json"
MANIFEST = "published.json"
_SINGLE = "model.safetensors"
_WEIGHTS = (
    ".bin", ".ckpt", ".gguf", ".h5", ".index.json", ".msgpack", ".npz", ".onnx", ".ot", ".pt",
    ".pth", ".safetensors", ".safetensors.difference",
)  # fmt: skip
_TEMPLATES = ("chat_template.json", "additional_chat_templates", "chat_templates")


def read_json(path: Path) -> JsonObject:
    """Return the object in a JSON file. Raises ModelError if there is none."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return value


def tensor_files(folder: Path) -> dict[str, Path] | None:
    """Return the file of each tensor, or None if the folder has no safetensors files.

    Like transformers, prefer a single file to an index.

    Raises:
        ModelError: A file is damaged.
    """
    try:
        if (folder / _SINGLE).is_file():
            with safe_open(folder / _SINGLE, "np") as file:
                return dict.fromkeys(file.keys(), folder / _SINGLE)
        if (folder / INDEX).is_file():
            places = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
            return {name: folder / file for name, file in places.items()}
    except SafetensorError as error:
        raise ModelError(
            f"{folder / _SINGLE}: truncated, or not a safetensors file: {error}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder / INDEX}: cannot be read: {error!r}") from error
    return None


def copy_others(source: Path, target: Path, *, template: str | None = None) -> None:
    """Copy all files but weights into `target`, and those of subfolders that are not hidden.

    Args:
        template: Text of the chat template that takes the place of all the folder's.
    """
    for path in sorted(source.iterdir()):
        if path.name.startswith(".") or path.name in ("__pycache__", MANIFEST):
            continue
        if template is not None and path.name in _TEMPLATES:
            continue
        if path.is_dir():
            copy_others(path, target / path.name)
        elif path.is_file() and not path.name.endswith(_WEIGHTS):
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / path.name)
    if template is not None:
        (target / "chat_template.jinja").write_text(template, "utf-8")
        _drop_template(target / "tokenizer_config.json")


def _drop_template(file: Path) -> None:
    """Remove the chat templates from a tokenizer's configuration: one by name might be chosen."""
    if file.is_file():
        config = read_json(file)
        if config.pop("chat_template", None) is not None:
            file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def true_config(
    config: JsonObject, dtype: str | None, *, quantized: bool = False, is_part: bool = False
) -> JsonObject:
    """Return a model's configuration with entries that are true of its weights.

    Args:
        dtype: Name of the weights' type, also of the parts of a composite model; None: as it says.
        quantized: Whether the weights are quantized as it says.
        is_part: Whether this is the configuration of a part.
    """
    made: JsonObject = {
        name: true_config(value, dtype, is_part=True)
        if isinstance(value, dict) and name.endswith("_config") and name != "quantization_config"
        else value
        for name, value in config.items()
        if name != "quantization_config" or quantized
    }
    named = [made.pop(name) for name in ("dtype", "torch_dtype") if name in made]  # new and former
    if dtype is not None and (named or not is_part):
        made["dtype"] = dtype
    elif named:
        made["dtype"] = named[0]
    return made
