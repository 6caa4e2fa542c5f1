"""Several readers of the same events are independent."""

from __future__ import annotations

import pytest

from agentloop.events import Event, RolloutAbandoned
from agentloop.observe.event_fanout import EventFanout


def test_a_failing_reader_is_removed_and_the_others_continue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[Event] = []

    def fails(event: Event) -> None:
        seen.append(event)
        raise KeyError("its own")

    others: list[Event] = []
    readers = EventFanout(fails, others.append)
    readers.add(others.append)
    event = RolloutAbandoned("r")
    readers(event)
    readers(event)
    assert (seen, others) == ([event], [event] * 4)
    assert len(caplog.records) == 1
    assert "was removed" in caplog.text


def test_a_removed_reader_gets_no_events() -> None:
    seen: list[Event] = []
    readers = EventFanout(seen.append)
    readers.remove(seen.append)
    readers.remove(print)
    readers(RolloutAbandoned("r"))
    assert seen == []
