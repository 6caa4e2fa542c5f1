"""The models that ship with the package. Only paths: loading them is the server's affair."""

from __future__ import annotations

from pathlib import Path

__all__ = ["SMALL", "not_a_model"]

SMALL: Path = Path(__file__).parent / "small"
"""The directory of the small model (its README.md is the model card)."""


def not_a_model(folder: Path) -> str:
    """Return what to tell somebody who named `folder` as a model, where it has no config.json."""
    return (
        f"{folder} is no model folder: it has no config.json. A model of the Hugging Face hub is "
        f"fetched by: hf download OWNER/NAME --local-dir {folder}"
    )
