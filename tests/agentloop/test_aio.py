"""The task group that unwraps errors, and the signal."""

from __future__ import annotations

import anyio
import pytest

from agentloop.aio import Signal, task_group

pytestmark = pytest.mark.anyio


async def fail(error: Exception) -> None:
    raise error


async def fail_after_cancellation(error: Exception) -> None:
    try:
        await anyio.sleep_forever()
    finally:
        raise error


async def test_a_single_error_is_raised_by_itself_with_its_cause() -> None:
    cause = ValueError("deep")

    async def fail_from_cause() -> None:
        raise KeyError("it") from cause

    with pytest.raises(KeyError) as caught:
        async with task_group() as outer, task_group() as inner:
            outer.start_soon(anyio.sleep_forever)
            inner.start_soon(fail_from_cause)
    assert caught.value.__cause__ is cause


async def test_the_error_of_the_block_is_raised_by_itself() -> None:
    with pytest.raises(KeyError):
        async with task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            raise KeyError("it")


@pytest.mark.parametrize("only_first", [False, True])
async def test_several_errors_are_raised_as_a_group_or_the_first_alone(only_first: bool) -> None:
    with pytest.raises(BaseException) as caught:
        async with task_group(only_first=only_first) as tasks:
            tasks.start_soon(fail_after_cancellation, KeyError("late"))
            tasks.start_soon(fail, ValueError("early"))
    if only_first:
        assert isinstance(caught.value, (KeyError, ValueError))
    else:
        assert isinstance(caught.value, ExceptionGroup)
        assert {type(one) for one in caught.value.exceptions} == {KeyError, ValueError}


async def test_a_signal_wakes_those_that_wait_and_nobody_later() -> None:
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
