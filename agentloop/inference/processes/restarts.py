"""Pure: decides whether and when something that died is restarted.

Servers (inference/processes/keep_alive.py), the learner (training/recovery/resume.py) and a
training process that was killed (training/recovery/respawn.py) all follow it. Time is passed in as
`now_s`, on any monotonic clock.
"""

from __future__ import annotations

from collections import deque

_MAX_DELAY_S = 30.0


class Restarts:
    """A bound on the restarts within a sliding window, with a growing delay between them."""

    def __init__(self, max_restarts: int, *, window_s: float = 600.0) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._when: deque[float] = deque()

    def record_death(self, now_s: float) -> float | None:
        """Return the delay in seconds until the restart: 0, 1, 2, 4, ... 30; None to give up."""
        while self._when and now_s - self._when[0] >= self._window_s:
            self._when.popleft()
        if len(self._when) >= self._max_restarts:
            return None
        delay_s = 0.0 if not self._when else min(_MAX_DELAY_S, 2.0 ** (len(self._when) - 1))
        self._when.append(now_s)
        return delay_s
