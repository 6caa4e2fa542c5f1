"""DropCounter items are counted and logged at most once a minute."""

from __future__ import annotations

import logging
import threading

import pytest

from agentloop.observe.exporters.drop_counter import DropCounter


def test_drops_are_logged_at_intervals(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    now_s = 0.0
    dropped = DropCounter("lines of x", clock=lambda: now_s)
    dropped.report()
    assert caplog.messages == []
    for now_s in (0.0, 1.0, 59.0, 61.0, 62.0):
        dropped.add(2, f"why at {now_s:g}")
    dropped.report()
    dropped.report()
    assert caplog.messages == [
        "lines of x: dropped 2 (2 in total): why at 0",
        "lines of x: dropped 6 (8 in total): why at 61",
        "lines of x: dropped 2 (10 in total): why at 62",
    ]


def test_counting_is_thread_safe() -> None:
    dropped = DropCounter("lines of x", clock=lambda: 0.0)

    def add() -> None:
        for _ in range(1000):
            dropped.add(1, "")

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dropped.num == 4000
