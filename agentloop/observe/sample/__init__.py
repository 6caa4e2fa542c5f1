"""A small recorded training run; `python -m tools.sample_run` makes it from a real one."""

from __future__ import annotations

from pathlib import Path

SAMPLE: Path = Path(__file__).parent
"""The folder of the run."""
