"""Several readers of the same events are independent."""

from __future__ import annotations

import pytest

from agentloop.events import Event, RolloutAbandoned
from agentloop.observe.event_fanout import EventFanout


def test_failing_reader_is_removed(caplog: pytest.LogCaptureFixture) -> None:
    failed: list[Event] = []

    def fails(event: Event) -> None:
        failed.append(event)
        raise KeyError("its own")

    received: list[Event] = []
    readers = EventFanout(fails, received.append)
    readers.add(received.append)
    event = RolloutAbandoned("r")
    readers(event)
    readers(event)
    assert (failed, received) == ([event], [event] * 4)
    assert len(caplog.records) == 1
    assert "was removed" in caplog.text


def test_removed_reader_gets_no_events() -> None:
    received: list[Event] = []
    readers = EventFanout(received.append)
    readers.remove(received.append)
    readers.remove(print)
    readers(RolloutAbandoned("r"))
    assert received == []
