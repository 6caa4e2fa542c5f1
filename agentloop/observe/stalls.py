"""Who waits for what, and since when: so that nothing stalls in silence.

Reads the events of rollouts; other parts say themselves what they wait for (`waiting`). A stall is
a time in which nothing at all has moved: no token came, no call and no rollout ended, while
somebody waits.
"""

from __future__ import annotations

import heapq
import logging
import operator
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import anyio

from agentloop.events import (
    CallFinished,
    CallStarted,
    Event,
    GroupFinished,
    GroupStarted,
    Measured,
    RolloutAbandoned,
    RolloutFinished,
    RolloutStarted,
    TokensSampled,
    TurnFinished,
    TurnMoved,
    TurnPlaced,
    TurnStarted,
    WeightsLoaded,
)

__all__ = ["Stalls", "Wait"]

log = logging.getLogger(__name__)

_MAX_TOLD = 50  # waits in one log record


@dataclass(frozen=True, slots=True)
class Wait:
    """A rollout, or another part by its name, waits for `what`, for `waited_s` seconds."""

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
    """Tell it of every event (`seen`); ask it who waits (`waits`); or let it `watch`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[str, _Open] = {}
        self._others: list[tuple[str, str, float]] = []  # who waits, for what, since when
        self.moved_s = clock()  # when anything last moved

    def moved(self) -> None:
        """Something did of which there is no event: a group was scored, a step is done."""
        self.moved_s = self._clock()

    @contextmanager
    def waiting(self, who: str, what: str) -> Iterator[None]:
        """What is no rollout waits within: `with stalls.waiting("the learner", "a batch")`. To
        begin to wait, and to get it, is to move."""
        self.moved()
        one = (who, what, self.moved_s)
        self._others.append(one)
        try:
            yield
            self.moved()
        finally:
            self._others.remove(one)

    def seen(self, event: Event) -> None:
        now = self.moved_s = self._clock()
        match event:
            case RolloutStarted():
                self._open[event.rollout_id] = _Open("its first turn", now)
                return
            case RolloutFinished() | RolloutAbandoned():
                self._open.pop(event.rollout_id, None)
                return
            case GroupStarted() | GroupFinished() | Measured() | WeightsLoaded():
                return
        one = self._open.get(event.rollout_id)
        if one is None:
            return
        match event:
            case TurnStarted() | TurnMoved():
                one.what, one.since_s = "room on a server", now
            case TurnPlaced(server=server):
                one.server = server
                one.what, one.since_s = f"the first token from {server}", now
            case TokensSampled():
                one.what, one.since_s = f"more tokens from {one.server}", now
            case CallStarted(call=call):
                one.calls[call.id] = (call.name, now)
            case CallFinished(result=result):
                one.calls.pop(result.call_id, None)
            case TurnFinished():
                one.calls.clear()
                one.what, one.since_s = "its next turn", now

    @property
    def still_s(self) -> float:
        """Seconds in which nothing has moved; 0 where nobody waits for anything."""
        return self.unmoved_s if self._open or self._others else 0.0

    @property
    def unmoved_s(self) -> float:
        """Seconds in which nothing has moved, whether or not anybody waits."""
        return self._clock() - self.moved_s

    def waits(self, most: int | None = None) -> list[Wait]:
        """Each open rollout, each of its open calls, and other parts: the longest wait first, and
        so many at `most`."""
        now = self._clock()
        found = [(since_s, who, what) for who, what, since_s in self._others]
        for rollout_id, one in self._open.items():
            for name, since_s in one.calls.values():
                found.append((since_s, rollout_id, f"the tool {name}"))
            # While its calls run, a turn may be over; then they are all that it waits for.
            if not one.calls or one.since_s >= max(since for _, since in one.calls.values()):
                found.append((one.since_s, rollout_id, one.what))
        since = operator.itemgetter(0)
        longest = heapq.nsmallest(len(found) if most is None else most, found, key=since)
        return [Wait(who, what, now - since_s) for since_s, who, what in longest]

    async def watch(self, after_s: float, more: Callable[[], str] = lambda: "") -> None:
        """Until cancelled: one log record for each stall of `after_s`, and one when it is over.

        `more` says what else is known, as of the servers.
        """
        told = False
        while True:
            await anyio.sleep(after_s / 4)
            if self.still_s < after_s:
                if told:
                    log.warning("it moves again")
                told = False
            elif not told:
                told = True
                log.warning("%s", self.report(more()))

    def report(self, more: str = "") -> str:
        """What a stall looks like, for people."""
        waits = self.waits()
        lines = [f"nothing has moved for {self.still_s:.0f} s; {len(waits)} wait:"]
        lines += [f"  {w.rollout_id}: {w.what}, {w.waited_s:.0f} s" for w in waits[:_MAX_TOLD]]
        if len(waits) > _MAX_TOLD:
            lines.append(f"  and {len(waits) - _MAX_TOLD} more")
        return "\n".join([*lines, *([more] if more else [])])
