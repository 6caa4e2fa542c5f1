"""Load the tokenizer of a model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from agentloop.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_HUB_TIMEOUT_S = 5.0


def load_tokenizer(model_path: str | Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a model folder, or of a hub name that is cached or can be downloaded.

    Raises:
        ModelError: There is no such model, or it has no fast tokenizer.
    """
    quiet_about_torch()
    # Imported here because it takes 0.7 s; AutoTokenizer would import torch as well.
    from transformers import PreTrainedTokenizerFast

    name = str(model_path)
    folder = Path(model_path).expanduser()
    # transformers would take the path of a missing folder for a hub name, and try for minutes.
    if not folder.is_dir() and (folder.is_absolute() or name.startswith((".", "~"))):
        raise ModelError(f"model: there is no folder {name!r}")
    is_folder = folder.is_dir()
    hub_problem = "" if is_folder else _hub_problem(name)
    try:
        hf = PreTrainedTokenizerFast.from_pretrained(
            str(folder) if is_folder else name, local_files_only=is_folder or bool(hub_problem)
        )
    except (OSError, ValueError, KeyError) as error:
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        # "..., one of:" and a list of packages is what transformers says of missing files.
        reason = "it has no tokenizer.json" if first.rstrip().endswith(":") else first
        if is_folder:
            raise ModelError(f"no usable tokenizer in {name!r}: {reason}") from error
        raise ModelError(
            f"model: {name!r} is neither a folder nor a model that could be loaded from the "
            f"Hugging Face hub or its cache ({hub_problem or reason}). Check the name, or download "
            "the model (hf download OWNER/NAME --local-dir FOLDER) and set model to the folder"
        ) from error
    if not isinstance(getattr(hf, "backend_tokenizer", None), Tokenizer):
        raise ModelError(f"{name!r} has no fast tokenizer (tokenizer.json)")
    return hf


def _hub_problem(name: str) -> str:
    """Return why the hub has no such model or cannot be asked, or an empty text.

    This is one request without retries: without it, transformers may retry for minutes.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
    except HFValidationError:
        return "the hub has no such names"
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except RepositoryNotFoundError:
        return "the hub has no such model, or only for those whose HF_TOKEN it knows"
    except Exception as error:  # of its HTTP client, which depends on its version
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        return f"the hub cannot be asked: {first}"
    return ""


def quiet_about_torch() -> None:
    """Keep transformers from saying, as it is imported, that it found no PyTorch.

    The runtime only uses its tokenizers and templates, and never needs PyTorch.
    """
    logging.getLogger("transformers").addFilter(_is_not_about_torch)


def _is_not_about_torch(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("PyTorch was not found")


def eos_ids(folder: Path) -> list[int]:
    """Return the tokens that end a generation by the model's folder, if it says."""
    try:
        value = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    ids = value if isinstance(value, list) else [value]
    return [id for id in ids if isinstance(id, int)]


def padded_vocab_size(folder: Path) -> int:
    """Return the number of rows of the model's embedding, or 0 if its folder does not say."""
    try:
        config = json.loads((folder / "config.json").read_text())
        return int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
