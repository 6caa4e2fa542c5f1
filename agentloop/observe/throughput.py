"""A service's throughput in one line every few seconds, for its terminal."""

from __future__ import annotations

import time
from collections.abc import Callable

from agentloop.events import (
    CallFinished,
    Event,
    RolloutAbandoned,
    RolloutFinished,
    TokensSampled,
)
from agentloop.observe.in_flight import InFlight


class Throughput:
    """Counts what has happened since the last line."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s = clock()
        self._in_flight = InFlight()
        self._num_tokens = self._num_calls = self._num_answered = self._num_ended = 0

    def on_event(self, event: Event) -> None:
        """Count an event."""
        self._in_flight.on_event(event)
        match event:
            case TokensSampled():
                self._num_tokens += len(event.ids)
            case CallFinished():
                self._num_calls += 1
            case RolloutFinished():
                self._num_answered += 1
            case RolloutAbandoned():
                self._num_ended += 1

    def line(self, num_waiting: int) -> str:
        """Return the line since the last one, and begin the next; "" if nothing has happened.

        Args:
            num_waiting: requests that wait for KV capacity.
        """
        took_s = max(self._clock() - self._since_s, 1e-9)
        has_moved = self._num_tokens or self._num_calls or self._num_answered or self._num_ended
        parts = [
            f"{self._num_tokens / took_s:,.0f} tokens/s",
            f"{self._num_calls / took_s:,.1f} calls/s",
            f"{self._num_answered:,} finished",
        ]
        if self._num_ended:
            parts.append(f"{self._num_ended:,} cancelled or failed")
        parts.append(f"{len(self._in_flight):,} in flight")
        if num_waiting:
            parts.append(f"{num_waiting:,} waiting for KV capacity")
        busy = bool(has_moved or self._in_flight)
        self._since_s = self._clock()
        self._num_tokens = self._num_calls = self._num_answered = self._num_ended = 0
        return f"last {took_s:.0f} s: {', '.join(parts)}" if busy else ""
