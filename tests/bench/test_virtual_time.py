"""Virtual hours take no time, keep their order, and never skip running work."""

from __future__ import annotations

import anyio
import pytest

from bench import virtual_time


def test_hour_takes_no_time_and_timers_keep_their_order() -> None:
    wakeups: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await anyio.sleep(seconds)
        wakeups.append((name, anyio.current_time()))

    async def main() -> float:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sleeper, "late", 3600.0)
            tasks.start_soon(sleeper, "soon", 1.0)
        with anyio.move_on_after(60):
            await anyio.sleep_forever()
        return anyio.current_time()

    assert virtual_time.run(main) == 3660.0
    assert wakeups == [("soon", 1.0), ("late", 3600.0)]


def test_work_of_threads_is_done_before_the_clock_advances() -> None:
    def work(results: list[str]) -> str:
        results.append("done")
        return "answer"

    async def main() -> None:
        results: list[str] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep, 0.001)
            assert await anyio.to_thread.run_sync(work, results) == "answer"
            assert anyio.current_time() == 0.0
        assert results == ["done"]
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anyio.to_thread.run_sync(work, results)
        assert results == ["done"]  # like a thread that never started

    real = anyio.to_thread.run_sync
    virtual_time.run(main)
    assert anyio.to_thread.run_sync is real


def test_deadlock_raises() -> None:
    with pytest.raises(virtual_time.Deadlock):
        virtual_time.run(anyio.Event().wait)
