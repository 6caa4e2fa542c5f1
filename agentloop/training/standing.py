"""Where a run stands: what people look at while they wait for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Report", "Standing", "clock"]


@dataclass(frozen=True, slots=True)
class Standing:
    """
    Attributes:
        stage: what is done at the moment, such as "stage 2 of 3: longer".
        step, num_steps: done and to do, in this stage.
        waits: who waits for whom.
        values: figures of the last step, as they are shown, by their names.
        left_s: seconds to the end of the run at the pace so far; None: nobody knows yet.
    """

    stage: str
    step: int
    num_steps: int
    waits: str
    values: Mapping[str, str] = field(default_factory=dict)
    left_s: float | None = None


class Report(Protocol):
    """Whoever is told."""

    def __call__(self, line: str) -> None:
        """What is done now."""

    def say(self, line: str) -> None:
        """What stays to be read."""

    def show(self, standing: Standing) -> None:
        """Where it stands now."""


def clock(seconds: float) -> str:
    """Such as 0:07, 12:30 or 3:04:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
