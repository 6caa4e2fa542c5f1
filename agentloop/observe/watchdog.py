"""Over the event loop, and over the run: what blocks the one, and that the other moves at all.

    loop ──beat──> Heartbeat <──looks── a thread: names what the loop is at when a beat is late
    events ──> Stalls.moved_s <──looks── Progress: says who waits for whom; then ends the run

Not covered: code that holds the interpreter's lock all the while (the thread has to wait, too, and
finds what comes after it; the lag is measured all the same), and a machine that was suspended.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

import anyio
import pydantic

from agentloop.errors import AgentLoopError
from agentloop.observe.stalls import Stalls

__all__ = ["Heartbeat", "NoProgress", "Progress", "WatchdogSettings", "watch_lag"]

log = logging.getLogger(__name__)

Clock = Callable[[], float]
_STACK_DEPTH = 12  # innermost frames: the culprit and who called it, not the loop's own


class WatchdogSettings(pydantic.BaseModel):
    """When it is said that nothing moves, and by whom."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    max_lag_s: float = pydantic.Field(
        1.0, gt=0, description="The event loop blocked for longer: the log says by what."
    )
    lag_told_every_s: float = pydantic.Field(
        60.0, ge=0, description="Between two records of that; what is left out is counted."
    )
    no_progress_s: float = pydantic.Field(
        300.0,
        gt=0,
        description="When nothing has progressed for so long, the log lists what is waiting.",
    )
    give_up_s: float = pydantic.Field(
        7200.0,
        ge=0,
        description="And then the run ends. More than any deadline of a part, such as "
        "loop.step_timeout_s, which knows more about what went wrong. 0: never.",
    )


class NoProgress(AgentLoopError):
    """Nothing has moved for so long that nothing will; the message says who waits for whom."""


class Heartbeat:
    """The loop's thread makes it `beat`; another thread may `look`.

    Attributes:
        largest_lag_s: of all beats.
    """

    def __init__(self, settings: WatchdogSettings, *, clock: Clock = time.monotonic) -> None:
        """In the thread of the loop."""
        self.settings = settings
        self._clock = clock
        self._thread_id = threading.get_ident()
        self._due_s: float | None = None
        self._told_due_s: float | None = None  # the late beat that was looked at last
        self._said_s: float | None = None
        self._num_unsaid = 0
        self.largest_lag_s = self._largest_since_s = 0.0

    def beat(self, every_s: float) -> None:
        """Now, and again in `every_s`."""
        now = self._clock()
        if self._due_s is not None:
            lag_s = max(0.0, now - self._due_s)
            self.largest_lag_s = max(self.largest_lag_s, lag_s)
            self._largest_since_s = max(self._largest_since_s, lag_s)
        self._due_s = now + every_s

    def take_lag_s(self) -> float:
        """The largest since it was asked for last: a step's, for its metrics."""
        lag_s, self._largest_since_s = self._largest_since_s, 0.0
        return lag_s

    def look(self) -> str | None:
        """From another thread: what the loop's thread is at, if its beat is late. Each late beat is
        told once, and not more often than `lag_told_every_s`."""
        due_s, now = self._due_s, self._clock()
        if due_s is None or now - due_s < self.settings.max_lag_s or due_s == self._told_due_s:
            return None
        self._told_due_s = due_s
        if self._said_s is not None and now - self._said_s < self.settings.lag_told_every_s:
            self._num_unsaid += 1
            return None
        frame = sys._current_frames().get(self._thread_id)
        if frame is None or self._due_s != due_s:  # it goes on meanwhile: this is not the culprit
            return None
        stack = "".join(traceback.format_stack(frame)[-_STACK_DEPTH:])
        unsaid = f" ({self._num_unsaid} times before that were not told)" * bool(self._num_unsaid)
        self._said_s, self._num_unsaid = now, 0
        return f"the event loop is blocked for {now - due_s:.2f} s so far{unsaid}, by:\n{stack}"


async def watch_lag(heart: Heartbeat) -> None:
    """Until cancelled: measure the loop's lag, and say in the log what blocks it."""
    every_s = heart.settings.max_lag_s / 2
    over = threading.Event()

    def watch() -> None:
        while not over.wait(every_s):
            if said := heart.look():
                log.warning("%s", said)

    # A daemon that is not waited for: whatever it is at, the loop does not have to be.
    threading.Thread(target=watch, name="watch the event loop", daemon=True).start()
    try:
        while True:
            heart.beat(every_s)
            await anyio.sleep(every_s)
    finally:
        over.set()


class Progress:
    """Looks at whether anything has moved, as `stalls` hears of it (`seen`, `moved`)."""

    def __init__(
        self,
        stalls: Stalls,
        settings: WatchdogSettings,
        *,
        more: Callable[[], str] = lambda: "",
    ) -> None:
        """`more` says what else is known, as of the servers."""
        self._stalls = stalls
        self._settings = settings
        self._more = more
        self._told = False

    async def watch(self) -> None:
        """Until cancelled, or:

        Raises:
            NoProgress: nothing has moved for `give_up_s`.
        """
        self._stalls.moved()  # it begins
        while True:
            await anyio.sleep(self._settings.no_progress_s / 4)
            self.look()

    def look(self) -> None:
        """One record for each stall, one when it is over, and `NoProgress` where it never is."""
        s = self._settings
        still_s = self._stalls.unmoved_s
        if still_s < s.no_progress_s:
            if self._told:
                log.warning("it moves again")
            self._told = False
            return
        if s.give_up_s and still_s >= s.give_up_s:
            raise NoProgress(f"{self._report(still_s)}\nthe run ends: watchdog.give_up_s")
        if not self._told:
            log.error("%s", self._report(still_s))
        self._told = True

    def _report(self, still_s: float) -> str:
        if self._stalls.waits():
            return self._stalls.report(self._more())
        return f"nothing has moved for {still_s:.0f} s, and nobody says for what\n{self._more()}"
