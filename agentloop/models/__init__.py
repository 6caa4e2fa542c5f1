"""The models that ship with the package. Only paths: loading them is the server's affair."""

from __future__ import annotations

from pathlib import Path

__all__ = ["SMALL"]

SMALL: Path = Path(__file__).parent / "small"
"""The directory of the small model (its README.md is the model card)."""
