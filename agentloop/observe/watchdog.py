"""Watch the event loop and the run: report what blocks the loop, and end a run without progress.

    loop ──beat──> Heartbeat <──looks── a thread: logs the loop's stack when a beat is late
    events ──> Stalls.moved_s <──looks── Progress: logs all waits, then ends the run

Two cases are not covered: code that holds the interpreter lock the whole time (the thread waits as
well and logs whatever follows, although the lag is still measured), and a suspended machine.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pydantic

from agentloop.aio import task_group
from agentloop.errors import AgentLoopError
from agentloop.observe.stalls import Stalls

log = logging.getLogger(__name__)

Clock = Callable[[], float]
_STACK_DEPTH = 12  # innermost frames: the blocking code and its callers, without the loop's own


class WatchdogSettings(pydantic.BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Time limits for a blocked event loop and for a run without progress."""

    no_progress_s: float = pydantic.Field(
        300.0,
        gt=0,
        description="Log what everyone is waiting for after this long without progress.",
    )
    give_up_s: float = pydantic.Field(
        7200.0,
        ge=0,
        description="End the run after this long without progress. 0: never. It should be longer "
        "than other deadlines, such as loop.step_timeout_s, whose errors are more specific.",
    )


FOR_SERVICES = WatchdogSettings(no_progress_s=60.0, give_up_s=0.0)
"""The limits of services and evaluations: their clients and samples have deadlines of their own."""


class NoProgress(AgentLoopError):
    """The run has made no progress for too long; the message lists what everyone is waiting for."""


class Heartbeat:
    """Detects a blocked event loop: its thread calls `beat`, and another thread calls `look`.

    Attributes:
        max_lag_s: Lag from which on the loop counts as blocked.
        largest_lag_s: Largest lag of all beats.
    """

    def __init__(
        self,
        *,
        max_lag_s: float = 1.0,
        logged_every_s: float = 60.0,
        clock: Clock = time.monotonic,
        cpu_wait: Clock | None = None,
    ) -> None:
        """Call it in the thread of the event loop.

        Args:
            cpu_wait: Returns for how many seconds the thread has been ready to run without getting
                a processor; by default, as Linux counts it.
        """
        self.max_lag_s = max_lag_s
        self._logged_every_s = logged_every_s
        self._clock = clock
        self._thread_id = threading.get_ident()
        self._cpu_wait = cpu_wait or partial(_cpu_wait_s, threading.get_native_id())
        self._cpu_wait_s = self._cpu_wait()  # at the last beat
        self._due_s: float | None = None
        self._seen_due_s: float | None = None  # the last late beat that `look` has seen
        self._logged_s: float | None = None
        self._num_omitted = 0
        self.largest_lag_s = self._largest_since_s = 0.0

    def beat(self, every_s: float) -> None:
        """Record a beat; the next one is due in `every_s` seconds."""
        now_s = self._clock()
        if self._due_s is not None:
            lag_s = max(0.0, now_s - self._due_s)
            self.largest_lag_s = max(self.largest_lag_s, lag_s)
            self._largest_since_s = max(self._largest_since_s, lag_s)
        self._cpu_wait_s = self._cpu_wait()
        self._due_s = now_s + every_s

    def take_lag_s(self) -> float:
        """Return the largest lag since the last call."""
        lag_s, self._largest_since_s = self._largest_since_s, 0.0
        return lag_s

    def look(self) -> str | None:
        """Return a message with the loop's stack if its beat is late, else None.

        Call it from another thread. Each late beat is reported once, and at most one per
        `logged_every_s`.
        """
        due_s, now_s = self._due_s, self._clock()
        if due_s is None or now_s - due_s < self.max_lag_s or due_s == self._seen_due_s:
            return None
        self._seen_due_s = due_s
        if self._logged_s is not None and now_s - self._logged_s < self._logged_every_s:
            self._num_omitted += 1
            return None
        frame = sys._current_frames().get(self._thread_id)
        # The loop has resumed, so this stack is not the cause.
        if frame is None or self._due_s != due_s:
            return None
        lag_s, cpu_wait_s = now_s - due_s, self._cpu_wait() - self._cpu_wait_s
        omitted = f" ({self._num_omitted} earlier occurrences not logged)" * bool(self._num_omitted)
        self._logged_s, self._num_omitted = now_s, 0
        if cpu_wait_s > lag_s / 2:  # what it was about to do is not to blame
            return (
                f"the event loop is {lag_s:.2f} s late{omitted}: "
                f"its thread waited {cpu_wait_s:.2f} s for a processor"
            )
        stack = "".join(traceback.format_stack(frame)[-_STACK_DEPTH:])
        return f"the event loop has been blocked for {lag_s:.2f} s{omitted} by:\n{stack}"


def _cpu_wait_s(thread: int) -> float:
    """Return for how long a thread of this process has waited for a processor; 0 if unknown."""
    try:
        with open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # not Linux, or a kernel without these statistics
        return 0.0


async def watch_lag(heart: Heartbeat) -> None:
    """Measure the loop's lag and log what blocks it, until cancelled."""
    every_s = heart.max_lag_s / 2
    over = threading.Event()

    def watch() -> None:
        while not over.wait(every_s):
            if message := heart.look():
                log.warning("%s", message)

    # A daemon thread, so that the loop never waits for it.
    threading.Thread(target=watch, name="watch the event loop", daemon=True).start()
    try:
        while True:
            heart.beat(every_s)
            await anyio.sleep(every_s)
    finally:
        over.set()


class Progress:
    """Logs a lack of progress, as reported to `stalls`, and finally ends the run."""

    def __init__(
        self,
        stalls: Stalls,
        settings: WatchdogSettings,
        *,
        more: Callable[[], str] = lambda: "",
        may_idle: bool = False,
    ) -> None:
        """
        Args:
            more: Returns additional information for the log, such as the state of the servers.
            may_idle: Whether it is no stall if nothing waits, as in a service.
        """
        self._stalls = stalls
        self._settings = settings
        self._more = more
        self._may_idle = may_idle
        self._is_logged = False

    async def watch(self) -> None:
        """Check for progress periodically, until cancelled.

        Raises:
            NoProgress: There was no progress for `give_up_s`.
        """
        self._stalls.moved()  # start counting now
        while True:
            await anyio.sleep(self._settings.no_progress_s / 4)
            self.look()

    def look(self) -> None:
        """Log the start and the end of a stall, and raise NoProgress if it lasts too long."""
        s = self._settings
        unmoved_s = self._stalls.no_progress_s if self._may_idle else self._stalls.unmoved_s
        if unmoved_s < s.no_progress_s:
            if self._is_logged:
                log.warning("progress has resumed")
            self._is_logged = False
            return
        if s.give_up_s and unmoved_s >= s.give_up_s:
            raise NoProgress(f"{self._report(unmoved_s)}\nending the run: watchdog.give_up_s")
        if not self._is_logged:
            log.error("%s", self._report(unmoved_s))
        self._is_logged = True

    def _report(self, unmoved_s: float) -> str:
        if self._stalls.waits():
            return self._stalls.report(self._more())
        return f"no progress for {unmoved_s:.0f} s, and no waits are known\n{self._more()}"


class RunWatch:
    """Watch over the event loop and the run's progress, as a `run_status.StatusWatch`."""

    def __init__(self, stalls: Stalls) -> None:
        self.moved = stalls.moved
        self.waiting = stalls.waiting
        self.heart = Heartbeat()
        self.take_lag_s = self.heart.take_lag_s


@asynccontextmanager
async def watching(
    settings: WatchdogSettings, stalls: Stalls, more: Callable[[], str]
) -> AsyncIterator[RunWatch]:
    """Watch the loop and the run while the context is open; `more` is that of `Progress`."""
    watch = RunWatch(stalls)
    progress = Progress(stalls, settings, more=more)
    async with task_group() as tasks:
        tasks.start_soon(watch_lag, watch.heart)
        tasks.start_soon(progress.watch)
        yield watch
        tasks.cancel_scope.cancel()
