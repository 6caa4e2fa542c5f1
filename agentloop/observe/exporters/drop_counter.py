"""Count what a reader of events had to drop, and log it at intervals."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

_EVERY_S = 60.0


class DropCounter:
    """Counts dropped items and logs them at once, then at most once a minute. Thread-safe.

    Call `report` at the end to log the remainder.

    Attributes:
        num: Total number of dropped items.
    """

    def __init__(self, items: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            items: Describes them in the log, such as "events of runs/x/events.jsonl".
        """
        self._items = items
        self._clock = clock
        self._lock = threading.Lock()
        self._logged_s: float | None = None
        self._num_logged = 0
        self._reason = ""
        self.num = 0

    def add(self, num: int, reason: str) -> None:
        with self._lock:
            self.num += num
            self._reason = reason
            now_s = self._clock()
            if self._logged_s is not None and now_s - self._logged_s < _EVERY_S:
                return
            self._logged_s = now_s
        self.report()

    def report(self) -> None:
        """Log the items that were dropped since the last log message, if any."""
        with self._lock:
            num, self._num_logged = self.num - self._num_logged, self.num
        if num:
            log.warning(
                "%s: dropped %d (%d in total): %s", self._items, num, self.num, self._reason
            )
