"""RunControl: conditions are checked at each change, waits are reported, pauses end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest

from agentloop.training.run.control import Drained, RunControl
from agentloop.training.run.status import Unwatched


class Watch(Unwatched):
    """Records waits, in the order in which they begin and end."""

    def __init__(self) -> None:
        self.told: list[str] = []

    @contextmanager
    def waiting(self, name: str, kind: str) -> Iterator[None]:
        self.told.append(f"{name} waits for {kind}")
        yield
        self.told.append(f"{name} no longer waits for {kind}")


async def test_condition_that_holds_is_not_reported() -> None:
    watch = Watch()
    await RunControl(watch).wait_until(lambda: True, "somebody", lambda: "nothing")
    assert watch.told == []


async def test_changed_reason_for_waiting_is_reported() -> None:
    watch, current = Watch(), ["a slot"]
    control = RunControl(watch)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(control.wait_until, lambda: not current, "a task", lambda: current[0])
        await anyio.wait_all_tasks_blocked()
        for change in (["a slot"], ["memory"], []):
            current[:] = change
            control.notify()
            await anyio.wait_all_tasks_blocked()
    assert watch.told == [
        "a task waits for a slot",
        "a task no longer waits for a slot",
        "a task waits for memory",
        "a task no longer waits for memory",
    ]


@pytest.mark.parametrize("drained", [False, True])
async def test_pause_ends_when_it_is_resumed_or_drained(drained: bool) -> None:
    control = RunControl()
    control.pause(True)
    errors: list[Exception] = []
    ended = anyio.Event()

    async def wait() -> None:
        try:
            await control.wait_while_paused("a test")
        except Drained as error:
            errors.append(error)
        ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert not ended.is_set()
        if drained:
            control.drain()
        else:
            control.pause(False)
        await ended.wait()
    assert len(errors) == drained
