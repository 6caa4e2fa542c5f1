"""Where a run stands: what people look at while they wait for it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Report", "Standing", "Unwatched", "Watch", "clock"]


@dataclass(frozen=True, slots=True)
class Standing:
    """
    Attributes:
        stage: what is done at the moment, such as "stage 2 of 3: longer".
        step, num_steps: done and to do, in this stage.
        waits: who waits for whom.
        values: figures of the last step, as they are shown, by their names.
        left_s: seconds to the end of the run at the pace so far; None: nobody knows yet.
        unit: what is counted.
    """

    stage: str
    step: int
    num_steps: int
    waits: str
    values: Mapping[str, str] = field(default_factory=dict)
    left_s: float | None = None
    unit: str = "step"


class Report(Protocol):
    """Whoever is told."""

    def __call__(self, line: str) -> None:
        """What is done now."""

    def say(self, line: str) -> None:
        """What stays to be read."""

    def show(self, standing: Standing) -> None:
        """Where it stands now."""


class Watch(Protocol):
    """Whoever sees to it that nothing stalls in silence."""

    def moved(self) -> None:
        """Something did: a group ended, a step is done."""

    def waiting(self, who: str, what: str) -> AbstractContextManager[None]:
        """Within, `who` waits for `what`."""

    def take_lag_s(self) -> float:
        """For how long the event loop was blocked at most, since this was asked."""


class Unwatched:
    """Nobody does."""

    def moved(self) -> None:
        """See `Watch`."""

    def waiting(self, who: str, what: str) -> AbstractContextManager[None]:
        """See `Watch`."""
        return nullcontext()

    def take_lag_s(self) -> float:
        """See `Watch`."""
        return 0.0


def clock(seconds: float) -> str:
    """Such as 0:07, 12:30 or 3:04:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
