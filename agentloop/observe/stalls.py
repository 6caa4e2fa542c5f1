"""Track what each part is waiting for, and since when, so that no stall goes unnoticed.

The waits of rollouts are derived from events; other parts report theirs with `waiting`. A stall is
a period without any progress (no token, no finished call or rollout) while something waits.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from agentloop.events import (
    CallFinished,
    CallStarted,
    ClientAwaited,
    Event,
    GroupFinished,
    GroupStarted,
    Measured,
    RolloutAbandoned,
    RolloutFinished,
    RolloutStarted,
    TokensSampled,
    ToolRaised,
    TurnFinished,
    TurnMoved,
    TurnPlaced,
    TurnStarted,
    WeightsLoaded,
)

_MAX_LOGGED = 50  # waits in one log message


@dataclass(frozen=True, slots=True)
class Wait:
    """A rollout, or another part by name, has been waiting for `what` for `waited_s` seconds."""

    rollout_id: str
    what: str
    waited_s: float


@dataclass(slots=True)
class _Open:
    what: str
    since_s: float
    server: str = ""
    calls: dict[str, tuple[str, float]] = field(default_factory=dict)  # id to tool and start


class Stalls:
    """Tracks waits and the time of the last progress.

    Pass every event to `on_event`; `waits` lists the waits.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[str, _Open] = {}
        self._resting: set[str] = set()  # branches of sessions that wait for their clients
        self._others: list[tuple[str, str, float]] = []  # part, what it waits for, since when
        self.moved_s = clock()  # time of the last progress

    def moved(self) -> None:
        """Record progress that has no event, such as a scored group or a finished step."""
        self.moved_s = self._clock()

    @contextmanager
    def waiting(self, part: str, awaited: str) -> Iterator[None]:
        """Report a wait of a part other than a rollout, such as the learner's for a batch.

        Beginning and ending a wait both count as progress.
        """
        self.moved()
        wait = (part, awaited, self.moved_s)
        self._others.append(wait)
        try:
            yield
            self.moved()
        finally:
            self._others.remove(wait)

    def on_event(self, event: Event) -> None:
        now_s = self.moved_s = self._clock()
        match event:
            case RolloutStarted():
                self._open[event.rollout_id] = _Open("its first turn", now_s)
                return
            case RolloutFinished() | RolloutAbandoned():
                self._open.pop(event.rollout_id, None)
                self._resting.discard(event.rollout_id)
                return
            case GroupStarted() | GroupFinished() | ToolRaised() | Measured() | WeightsLoaded():
                return
        wait = self._open.get(event.rollout_id)
        if wait is None:
            return
        self._resting.discard(event.rollout_id)
        match event:
            case ClientAwaited():
                wait.what, wait.since_s = "its client", now_s
                wait.calls.clear()
                self._resting.add(event.rollout_id)
            case TurnStarted() | TurnMoved():
                wait.what, wait.since_s = "capacity on a server", now_s
            case TurnPlaced(server=server):
                wait.server = server
                wait.what, wait.since_s = f"the first token from {server}", now_s
            case TokensSampled():
                wait.what, wait.since_s = f"more tokens from {wait.server}", now_s
            case CallStarted(call=call):
                wait.calls[call.id] = (call.name, now_s)
            case CallFinished(result=result):
                wait.calls.pop(result.call_id, None)
            case TurnFinished():
                wait.calls.clear()
                wait.what, wait.since_s = "its next turn", now_s

    @property
    def no_progress_s(self) -> float:
        """Seconds without progress, or 0 if nothing waits but sessions for their clients."""
        is_waiting = len(self._open) > len(self._resting) or self._others
        return self.unmoved_s if is_waiting else 0.0

    @property
    def unmoved_s(self) -> float:
        """Seconds without progress, whether or not anything is waiting."""
        return self._clock() - self.moved_s

    def waits(self, limit: int | None = None) -> list[Wait]:
        """Return the waits of rollouts, their open calls and other parts, longest first.

        Sessions that wait for their clients come last.

        Args:
            limit: Maximum number of waits to return.
        """
        now_s = self._clock()
        waits = [(since_s, part, awaited) for part, awaited, since_s in self._others]
        for rollout_id, wait in self._open.items():
            for name, since_s in wait.calls.values():
                waits.append((since_s, rollout_id, f"the tool {name}"))
            # A turn may be over while its calls run; then it only waits for the calls.
            if not wait.calls or wait.since_s >= max(since for _, since in wait.calls.values()):
                waits.append((wait.since_s, rollout_id, wait.what))
        longest = heapq.nsmallest(
            len(waits) if limit is None else limit,
            waits,
            key=lambda wait: (wait[1] in self._resting, wait[0]),
        )
        return [Wait(part, awaited, now_s - since_s) for since_s, part, awaited in longest]

    def report(self, more: str = "") -> str:
        """Return a description of the current stall."""
        waits = self.waits()
        lines = [f"no progress for {self.no_progress_s:.0f} s; {len(waits)} waiting:"]
        lines += [f"  {w.rollout_id}: {w.what}, {w.waited_s:.0f} s" for w in waits[:_MAX_LOGGED]]
        if len(waits) > _MAX_LOGGED:
            lines.append(f"  and {len(waits) - _MAX_LOGGED} more")
        return "\n".join([*lines, *([more] if more else [])])
