"""What a reader of events had to leave out: counted, and told of now and then."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

__all__ = ["Dropped"]

log = logging.getLogger(__name__)

_EVERY_S = 60.0


class Dropped:
    """Call `add` from any thread. The log has the first of it at once, the rest once a minute at
    most, and `tell` says what was not told.

    Attributes:
        num: in all.
    """

    def __init__(self, what: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`what` is left out, in plain words, such as "events of runs/x/events.jsonl"."""
        self._what = what
        self._clock = clock
        self._lock = threading.Lock()
        self._said_s: float | None = None
        self._num_said = 0
        self._why = ""
        self.num = 0

    def add(self, num: int, why: str) -> None:
        with self._lock:
            self.num += num
            self._why = why
            now = self._clock()
            if self._said_s is not None and now - self._said_s < _EVERY_S:
                return
            self._said_s = now
        self.tell()

    def tell(self) -> None:
        """What was left out, if any of it was not told yet."""
        with self._lock:
            num, self._num_said = self.num - self._num_said, self.num
        if num:
            log.warning("%s: left out %d (%d in all): %s", self._what, num, self.num, self._why)
