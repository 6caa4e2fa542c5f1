"""The status of a run, numbers in its words, and interfaces for reports and for stall detection."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of a run.

    Attributes:
        stage: the current stage, such as "stage 2 of 3: longer".
        step, num_steps: completed and total steps of this stage.
        waits: description of the current activity.
        values: formatted metrics of the last step, by name.
        left_s: estimated seconds to the end of the run; None: not known yet.
        unit: the unit of `step`.
    """

    stage: str
    step: int
    num_steps: int
    waits: str
    values: Mapping[str, str] = field(default_factory=dict)
    left_s: float | None = None
    unit: str = "step"


class Reporter(Protocol):
    """Displays the progress of a run."""

    def __call__(self, line: str) -> None:
        """Show the current activity."""

    def say(self, line: str) -> None:
        """Print a line that stays on the screen."""

    def show(self, status: RunStatus) -> None:
        """Show the current status."""


class StatusWatch(Protocol):
    """Detects stalls of a run."""

    def moved(self) -> None:
        """Report progress: a group has ended, or a step is complete."""

    def waiting(self, who: str, what: str) -> AbstractContextManager[None]:
        """Report that `who` waits for `what` while the context is open."""

    def take_lag_s(self) -> float:
        """Return the longest blocking of the event loop since the last call, in seconds."""


class Unwatched:
    """A `StatusWatch` that does nothing."""

    def moved(self) -> None:
        """Implement `StatusWatch`."""

    def waiting(self, who: str, what: str) -> AbstractContextManager[None]:
        """Implement `StatusWatch`."""
        return nullcontext()

    def take_lag_s(self) -> float:
        """Implement `StatusWatch`."""
        return 0.0


def clock(seconds: float) -> str:
    """Format a duration, such as 0:07, 12:30 or 3:04:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def count_of(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun, in the plural unless it is 1: `1 server`, `2,000 tasks`.

    Args:
        plural: the plural, if it is not the noun with an s.
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
