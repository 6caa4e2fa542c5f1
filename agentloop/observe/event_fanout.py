"""Distribute events to all readers of a run or service."""

from __future__ import annotations

import logging

from agentloop.events import Emit, Event

log = logging.getLogger(__name__)


class EventFanout:
    """Calls each reader with every event.

    A reader that raises is removed and logged once, so that its error does not end a rollout.
    """

    def __init__(self, *readers: Emit) -> None:
        self._readers = list(readers)

    def __call__(self, event: Event) -> None:
        for reader in [*self._readers]:
            try:
                reader(event)
            except Exception:
                log.exception("a reader of events failed and was removed: %r", reader)
                self.remove(reader)

    def add(self, reader: Emit) -> None:
        self._readers.append(reader)

    def remove(self, reader: Emit) -> None:
        """Remove a reader, if it is present."""
        if reader in self._readers:
            self._readers.remove(reader)
