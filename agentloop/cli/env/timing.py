"""The time of a rollout by what it was spent on, from the rollout's events. Pure but for the clock.

At each instant a rollout counts as doing the first of these that applies: the model generates, a
tool runs, it waits for a server or for a slot to run a tool, the environment's own code runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from itertools import pairwise

from agentloop.events import (
    CallFinished,
    CallStarted,
    Event,
    RolloutAbandoned,
    TurnFinished,
    TurnMoved,
    TurnPlaced,
    TurnSampled,
    TurnStarted,
)


class Activity(StrEnum):
    """An activity of a rollout; earlier ones hide later ones at the same time."""

    MODEL = "model"
    TOOLS = "tools"
    WAITING = "waiting"
    ENVIRONMENT = "environment"


Span = tuple[Activity, float, float]
"""An activity, its start and its end, in seconds of one clock."""


def seconds_by_activity(
    spans: Iterable[Span], start_s: float, end_s: float
) -> dict[Activity, float]:
    """Return the seconds that each activity took between `start_s` and `end_s`; their sum is all.

    Spans may overlap. Time that no span covers is the environment's own.
    """
    cut = [(activity, max(start_s, a), min(end_s, b)) for activity, a, b in spans]
    edges = sorted({start_s, end_s, *(edge for _, a, b in cut if a < b for edge in (a, b))})
    seconds = dict.fromkeys(Activity, 0.0)
    order = list(Activity)
    for start, end in pairwise(edges):
        active = [activity for activity, a, b in cut if a <= start and end <= b]
        seconds[min(active, key=order.index, default=Activity.ENVIRONMENT)] += end - start
    return seconds


class Timeline:
    """Collects the spans of a rollout's conversations from their events."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spans: list[Span] = []
        self._open: dict[tuple[str, str], tuple[Activity, float]] = {}  # rollout and call

    @property
    def spans(self) -> Sequence[Span]:
        """The spans that have ended."""
        return self._spans

    def on_event(self, event: Event) -> None:
        """Take note of an event that happens now."""
        match event:
            case TurnStarted(rollout_id=key) | TurnMoved(rollout_id=key):
                self._change(key, Activity.WAITING)
            case TurnPlaced(rollout_id=key):
                self._change(key, Activity.MODEL)
            case TurnSampled(rollout_id=key):
                self._close((key, ""))
            case CallStarted(rollout_id=key, call=call):
                self._open[key, call.id] = Activity.TOOLS, self._clock()
            case CallFinished(rollout_id=key, result=result):
                queued_s = max(0.0, result.started_s - result.dispatched_s)
                self._close((key, result.call_id), queued_s)
            case TurnFinished(rollout_id=key) | RolloutAbandoned(rollout_id=key):
                for open_key in [open_key for open_key in self._open if open_key[0] == key]:
                    self._close(open_key)

    def _change(self, key: str, activity: Activity) -> None:
        self._close((key, ""))
        self._open[key, ""] = activity, self._clock()

    def _close(self, key: tuple[str, str], queued_s: float = 0.0) -> None:
        """End what is open, of which the first `queued_s` seconds were spent waiting."""
        if key not in self._open:
            return
        activity, start = self._open.pop(key)
        end = self._clock()
        queued_until_s = min(end, start + queued_s)
        self._spans += [(Activity.WAITING, start, queued_until_s), (activity, queued_until_s, end)]
