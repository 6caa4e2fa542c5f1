"""All who read the events of one run or service."""

from __future__ import annotations

import logging

from agentloop.events import Emit, Event

__all__ = ["Readers"]

log = logging.getLogger(__name__)


class Readers:
    """Call it with an event to tell each of them. Nobody's rollout ends because a reader has a
    mistake: who raises is not told again, and the log says so, once."""

    def __init__(self, *readers: Emit) -> None:
        self._readers = list(readers)

    def __call__(self, event: Event) -> None:
        for reader in [*self._readers]:
            try:
                reader(event)
            except Exception:
                log.exception("a reader of events failed, and is told no more: %r", reader)
                self.remove(reader)

    def add(self, reader: Emit) -> None:
        self._readers.append(reader)

    def remove(self, reader: Emit) -> None:
        """Where it is there."""
        if reader in self._readers:
            self._readers.remove(reader)
