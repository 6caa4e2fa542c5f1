"""Calls without real workers: how those that wait for a slot end."""

from __future__ import annotations

import anyio
import pytest

from agentloop.sandbox import CallResult, CallStatus
from agentloop.sandbox.calls import Calls
from agentloop.sandbox.link import Link
from agentloop.sandbox.slots import PoolWorker
from tests.sandbox.conftest import BARE


async def test_call_that_waits_while_the_pool_closes_is_cancelled() -> None:
    calls = Calls(BARE)
    results: list[CallResult] = []

    async def run() -> None:
        results.append(await calls.run(calls.message("1", "", None, None)))

    async with anyio.create_task_group() as group:
        calls.open(group)
        group.start_soon(run)
        await anyio.wait_all_tasks_blocked()
        assert results == []
        calls.close()
    assert [result.status for result in results] == [CallStatus.CANCELLED]
    assert calls.counts[CallStatus.CANCELLED] == 1
    with pytest.raises(RuntimeError, match="the pool is not open"):
        calls.message("1", "", None, None)


async def test_cell_that_waits_for_a_lost_worker_has_no_result() -> None:
    calls = Calls(BARE)
    worker = PoolWorker(Link("x"), BARE)
    worker.free = 0
    calls.queue.workers.append(worker)
    results: list[CallResult | None] = []

    async def run() -> None:
        message = calls.message("1", "", None, None)
        results.append(await calls.run_cell(message, worker))

    async with anyio.create_task_group() as group:
        calls.open(group)
        group.start_soon(run)
        await anyio.wait_all_tasks_blocked()
        worker.link.lose("it vanished")
        calls.queue.serve()
    assert results == [None]
    assert not any(calls.counts.values())
