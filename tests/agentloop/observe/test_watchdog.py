"""The code that blocks the loop is reported; a run without progress is reported and ended."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable

import anyio
import pytest

from agentloop.events import RolloutStarted, TurnStarted
from agentloop.observe.stalls import Stalls
from agentloop.observe.watchdog import (
    FOR_SERVICES,
    Heartbeat,
    NoProgress,
    Progress,
    WatchdogSettings,
    watch_lag,
)
from agentloop.trajectory import Trajectory
from tests.fakes import Clock
from tests.patience import patient
from tests.support import eventually

SETTINGS = WatchdogSettings(no_progress_s=10, give_up_s=100)


def elsewhere(look: Callable[[], str | None]) -> str | None:
    """Return what `look` returns in another thread, while this one waits here."""
    results: list[str | None] = []
    thread = threading.Thread(target=lambda: results.append(look()))
    thread.start()
    thread.join()
    return results[0]


def blocks_everything(heart: Heartbeat) -> str | None:
    return elsewhere(heart.look)


def test_blocking_code_is_reported() -> None:
    clock = Clock()
    heart = Heartbeat(clock=clock)
    assert heart.look() is None  # it has not begun
    heart.beat(0.5)
    clock.now_s += 1.4
    assert blocks_everything(heart) is None
    clock.now_s += 0.2
    message = blocks_everything(heart)
    assert message is not None
    assert "blocked for 1.10 s by:" in message
    assert "in blocks_everything" in message
    assert blocks_everything(heart) is None  # once is enough


def test_missing_free_processor_is_blamed_instead_of_the_code() -> None:
    clock, waits = Clock(), Clock()
    heart = Heartbeat(clock=clock, cpu_wait=waits)
    heart.beat(0.5)
    clock.now_s += 2.0
    waits.now_s += 1.2
    message = blocks_everything(heart)
    assert message == "the event loop is 1.50 s late: its thread waited 1.20 s for a processor"


def test_reports_are_rate_limited_and_omissions_counted() -> None:
    clock = Clock()
    heart = Heartbeat(clock=clock)
    messages = []
    for _ in range(5):
        heart.beat(0.5)
        clock.now_s += 20
        messages.append(heart.look())
    assert [bool(message) for message in messages] == [True, False, False, True, False]
    assert "(2 earlier occurrences not logged)" in (messages[3] or "")


def test_largest_lag() -> None:
    clock = Clock()
    heart = Heartbeat(clock=clock)
    for late_s in (0, 3, 1):
        heart.beat(0.5)
        clock.now_s += 0.5 + late_s
    assert heart.take_lag_s() == 3
    heart.beat(0.5)
    assert heart.take_lag_s() == 1
    assert heart.take_lag_s() == 0
    assert heart.largest_lag_s == 3


async def test_real_loop_that_is_blocked(caplog: pytest.LogCaptureFixture) -> None:
    heart = Heartbeat(max_lag_s=0.05, logged_every_s=0)

    def is_found() -> bool:
        return any("in hangs_until_it_is_found" in message for message in caplog.messages)

    def hangs_until_it_is_found() -> None:
        deadline = time.monotonic() + 1
        while not is_found() and time.monotonic() < deadline:
            time.sleep(0.01)

    with caplog.at_level(logging.WARNING, "agentloop.observe.watchdog"):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch_lag, heart)
            await anyio.wait_all_tasks_blocked()
            while not is_found():  # another lag of this machine's may have been told of before it
                hangs_until_it_is_found()
                await anyio.sleep(heart.max_lag_s)
            await eventually(lambda: heart.largest_lag_s >= heart.max_lag_s / 2)
            tasks.cancel_scope.cancel()


async def test_watching_thread_ends() -> None:
    def threads() -> int:
        return sum(thread.name == "watch the event loop" for thread in threading.enumerate())

    await eventually(lambda: threads() == 0)  # those of other tests
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch_lag, Heartbeat())
        await anyio.wait_all_tasks_blocked()
        assert threads() == 1
        tasks.cancel_scope.cancel()
    await eventually(lambda: threads() == 0)


def test_stall_is_logged_once_and_then_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    stalls = Stalls(clock)
    progress = Progress(stalls, SETTINGS, more=lambda: "servers: none")
    stalls.on_event(RolloutStarted(Trajectory("r", [])))
    with stalls.waiting("the learner", "a batch"):
        clock.now_s += 9
        progress.look()
        assert not caplog.messages
        for _ in range(3):
            clock.now_s += 5
            progress.look()
        assert len(caplog.messages) == 1
        assert "the learner: a batch, 14 s\n  r: its first turn, 14 s" in caplog.messages[0]
        assert "servers: none" in caplog.messages[0]
        clock.now_s += 80
        with pytest.raises(NoProgress, match=r"104 s; 2 waiting:(.|\n)*a batch"):
            progress.look()


def test_second_stall_is_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    stalls = Stalls(clock)
    progress = Progress(stalls, SETTINGS)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            clock.now_s += 99
            progress.look()
            stalls.moved()
            progress.look()
    first, *later = caplog.messages
    assert "no progress for 99 s, and no waits are known" in first
    assert later == ["progress has resumed", first, "progress has resumed"]


def test_service_without_rollouts_does_not_stall(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    stalls = Stalls(clock)
    progress = Progress(stalls, FOR_SERVICES, may_idle=True)
    clock.now_s += 1e6
    progress.look()
    assert not caplog.messages
    stalls.on_event(RolloutStarted(Trajectory("r", [])))
    clock.now_s += 61
    progress.look()
    assert "r: its first turn, 61 s" in caplog.messages[0]
    stalls.on_event(TurnStarted("r", 0))
    progress.look()
    assert caplog.messages[1:] == ["progress has resumed"]


def test_giving_up_can_be_disabled() -> None:
    clock = Clock()
    progress = Progress(Stalls(clock), SETTINGS.model_copy(update={"give_up_s": 0.0}))
    clock.now_s += 1e6
    progress.look()


async def test_no_progress_cancels_the_task_group() -> None:
    """As a task of the run's task group, its error ends everything."""
    stalls = Stalls(map(float, itertools.count()).__next__)  # each look is a second later
    settings = WatchdogSettings(no_progress_s=0.01, give_up_s=3)

    async def runs() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Progress(stalls, settings).watch)
            await anyio.sleep_forever()

    with anyio.fail_after(patient(10)), pytest.raises(BaseExceptionGroup) as caught:
        await runs()
    assert isinstance(caught.value.exceptions[0], NoProgress)
