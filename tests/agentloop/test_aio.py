"""The task group that unwraps errors, the place in a limiter, the signal, garbage collection."""

from __future__ import annotations

import asyncio
import gc
import weakref
from functools import partial

import anyio
import pytest

from agentloop.aio import (
    Signal,
    Slot,
    collect_garbage_rarely,
    exempt_from_collection,
    let_callbacks_use_anyio,
    task_group,
)


async def fail(error: Exception, *, once_cancelled: bool = False) -> None:
    try:
        if once_cancelled:
            await anyio.sleep_forever()
    finally:
        raise error


async def fail_both(*, only_first: bool) -> None:
    async with task_group(only_first=only_first) as tasks:
        tasks.start_soon(partial(fail, KeyError("late"), once_cancelled=True))
        tasks.start_soon(fail, ValueError("early"))


async def test_single_error_is_raised_by_itself_with_its_cause() -> None:
    error, cause = KeyError("it"), ValueError("deep")
    error.__cause__ = cause

    async def run() -> None:
        async with task_group() as outer, task_group() as inner:
            outer.start_soon(anyio.sleep_forever)
            inner.start_soon(fail, error)

    with pytest.raises(KeyError) as caught:
        await run()
    assert caught.value.__cause__ is cause


async def test_error_of_the_block_is_raised_by_itself() -> None:
    async def run() -> None:
        async with task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            raise KeyError("it")

    with pytest.raises(KeyError):
        await run()


async def test_several_errors_are_raised_as_a_group() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await fail_both(only_first=False)
    assert {type(error) for error in caught.value.exceptions} == {KeyError, ValueError}


async def test_only_the_first_of_several_errors_can_be_raised() -> None:
    with pytest.raises((KeyError, ValueError)):
        await fail_both(only_first=True)


async def test_signal_wakes_those_that_wait_and_nobody_later() -> None:
    signal, woken = Signal(), list[str]()

    async def wait(name: str) -> None:
        await signal.wait()
        woken.append(name)

    async with anyio.create_task_group() as tasks:
        signal.notify()  # before anybody waits: it has no effect
        for name in ("a", "b"):
            tasks.start_soon(wait, name)
        await anyio.wait_all_tasks_blocked()
        assert woken == []
        signal.notify()
        await anyio.wait_all_tasks_blocked()
        assert sorted(woken) == ["a", "b"]
        tasks.start_soon(wait, "c")
        await anyio.wait_all_tasks_blocked()
        assert len(woken) == 2
        signal.notify()
    assert woken[2:] == ["c"]


async def test_free_slot_is_taken_without_giving_way() -> None:
    limiter, events = anyio.CapacityLimiter(1), list[str]()

    async def wait_too() -> None:
        events.append("other")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait_too)
        async with Slot(limiter):
            assert (limiter.borrowed_tokens, events) == (1, [])
    assert (limiter.borrowed_tokens, events) == (0, ["other"])


async def test_slots_are_taken_in_turn_and_none_is_lost() -> None:
    limiter, order = anyio.CapacityLimiter(1), list[int]()

    async def wait(number: int, scope: anyio.CancelScope) -> None:
        with scope:
            async with Slot(limiter):
                order.append(number)

    scopes = [anyio.CancelScope() for _ in range(4)]
    async with anyio.create_task_group() as tasks:
        async with Slot(limiter):
            for number, scope in enumerate(scopes):
                tasks.start_soon(wait, number, scope)
            await anyio.wait_all_tasks_blocked()
            scopes[1].cancel()
            await anyio.wait_all_tasks_blocked()
        async with Slot(limiter):  # those who waited go first
            assert order == [0, 2, 3]
    assert limiter.borrowed_tokens == 0


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_only_what_exists_is_exempt_from_collections() -> None:
    thresholds = gc.get_threshold()
    existing, garbage_then = Node(), weakref.ref(Node())
    try:
        collect_garbage_rarely()
        exempt_from_collection()
        assert garbage_then() is None, "garbage is not kept"
        assert gc.get_freeze_count() > 0
        assert not any(node is existing for node in gc.get_objects())
        later = weakref.ref(Node())
        gc.collect()
        assert later() is None
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def test_callbacks_below_asyncio_run_know_the_event_loop() -> None:
    async def main() -> anyio.CancelScope:
        let_callbacks_use_anyio()
        loop = asyncio.get_running_loop()
        made: asyncio.Future[anyio.CancelScope] = loop.create_future()
        loop.set_exception_handler(lambda _, context: made.set_exception(context["exception"]))
        loop.call_soon(lambda: made.set_result(anyio.CancelScope()))
        return await made

    assert asyncio.run(main())
