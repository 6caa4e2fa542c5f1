"""Paths of the models that ship with the package."""

from __future__ import annotations

from pathlib import Path

SMALL: Path = Path(__file__).parent / "small"
"""The directory of the small model (its README.md is the model card)."""


def not_a_model(folder: Path) -> str:
    """Return the error message for a `folder` without a config.json."""
    return (
        f"{folder} is not a model folder: it has no config.json. To download a model of the "
        f"Hugging Face hub, run: hf download OWNER/NAME --local-dir {folder}"
    )
