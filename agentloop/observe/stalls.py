"""Who waits for what, and since when: so that nothing stalls in silence.

Reads the events of rollouts. A stall is a time in which nothing at all has moved: no token came, no
call and no rollout ended, while there are rollouts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from agentloop.events import (
    CallFinished,
    CallStarted,
    Event,
    RolloutAbandoned,
    RolloutFinished,
    RolloutStarted,
    TokensSampled,
    TurnFinished,
    TurnMoved,
    TurnPlaced,
    TurnStarted,
)

__all__ = ["Stalls", "Wait"]

log = logging.getLogger(__name__)

_MAX_TOLD = 50  # waits in one log record


@dataclass(frozen=True, slots=True)
class Wait:
    """A rollout waits for `what`, for `waited_s` seconds."""

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
        self.moved_s = clock()  # when anything last moved

    def seen(self, event: Event) -> None:
        now = self.moved_s = self._clock()
        match event:
            case RolloutStarted():
                self._open[event.rollout_id] = _Open("its first turn", now)
                return
            case RolloutFinished() | RolloutAbandoned():
                self._open.pop(event.rollout_id, None)
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
        """Seconds in which nothing has moved; 0 where there is nothing that could."""
        return self._clock() - self.moved_s if self._open else 0.0

    def waits(self) -> list[Wait]:
        """Each open rollout and each of its open calls, the longest wait first."""
        now = self._clock()
        found = []
        for rollout_id, one in self._open.items():
            for name, since_s in one.calls.values():
                found.append(Wait(rollout_id, f"the tool {name}", now - since_s))
            # While its calls run, a turn may be over; then they are all that it waits for.
            if not one.calls or one.since_s >= max(since for _, since in one.calls.values()):
                found.append(Wait(rollout_id, one.what, now - one.since_s))
        return sorted(found, key=lambda wait: -wait.waited_s)

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
