"""Percentiles of how long turns and calls take, of those that ended lately. Pure: no clocks.

turns, calls ──durations of four kinds──> the last minute's, or a run's ──> p50 and p95
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import TypedDict

_WINDOW_S = 60.0
_MAX_KEPT = 2_000  # durations of a kind; sorting them takes less than a millisecond


class Duration(StrEnum):
    """A duration of a turn or of a call."""

    FIRST_TOKEN = "first_token"  # from the turn's start, waits included, to its first token
    TOKEN = "token"  # per output token after the first
    TURN = "turn"  # from its start to its last token; its calls may run on
    CALL = "call"  # from its dispatch to its result, the wait for a slot included


def of_turn(
    started_s: float, first_token_s: float | None, generated_s: float, num_tokens: int
) -> Iterator[tuple[Duration, float]]:
    """Yield the durations of a turn that has ended; none of one that has sampled nothing.

    Tokens arrive in frames, often several at once, so the time per token is that of the whole turn
    after its first frame, divided by the number of tokens after the first one. It is a little short
    for a turn of a few tokens, since the record does not say how many the first frame had.
    """
    if first_token_s is None or generated_s < first_token_s:
        return
    yield Duration.FIRST_TOKEN, max(0.0, first_token_s - started_s)
    yield Duration.TURN, max(0.0, generated_s - started_s)
    if num_tokens > 1:
        yield Duration.TOKEN, (generated_s - first_token_s) / (num_tokens - 1)


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """Return the smallest of the sorted values that at least this share of them do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summary_of(durations: Mapping[Duration, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Return, of each kind that there are some of, their number and percentiles in milliseconds."""
    summary = {}
    for kind in Duration:
        if ordered := sorted(durations.get(kind, ())):
            summary[str(kind)] = {
                "num": len(ordered),
                "p50": round(1000 * nearest_rank(ordered, 0.5), 2),
                "p95": round(1000 * nearest_rank(ordered, 0.95), 2),
            }
    return summary


class LatencyShown(TypedDict):
    """The durations that the page shows; `of` is the result of `summary_of`."""

    window_s: float
    max_kept: int
    of: dict[str, dict[str, float]]


class RecentDurations:
    """The durations of what ended in the last minute, of each kind the newest 2,000."""

    def __init__(self) -> None:
        self._kept: dict[Duration, deque[tuple[float, float]]] = {
            kind: deque(maxlen=_MAX_KEPT) for kind in Duration
        }

    def add(self, kind: Duration, now_s: float, seconds: float) -> None:
        """Add the duration of something that ends now."""
        self._kept[kind].append((now_s, seconds))

    def to_dict(self, now_s: float) -> LatencyShown:
        recent = {
            kind: [seconds for at, seconds in kept if now_s - at < _WINDOW_S]
            for kind, kept in self._kept.items()
        }
        return {"window_s": _WINDOW_S, "max_kept": _MAX_KEPT, "of": summary_of(recent)}
