"""Restarts of servers, with processes that die on demand; real ones are in test_supervise.py."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import anyio
import pytest

from agentloop.errors import ServerError, ServerStartError
from agentloop.inference.processes.keep_alive import keep_alive
from agentloop.inference.processes.supervise import ServerProcess, ServerSettings
from tests.fakes import RecordedClients
from tests.support import eventually


class Process:
    """A server process that dies when it is told to."""

    def __init__(self, url: str, *failures: ServerStartError) -> None:
        self.url = url
        self.log_path: Path | None = None
        self.alive = True
        self.num_starts = 0
        self.num_stops = 0
        self.may_start = anyio.Event()
        self.may_start.set()
        self._failures = deque(failures)  # of the next starts
        self._how = ""
        self._dead = anyio.Event()

    def die(self, ending: str) -> None:
        self.alive, self._how = False, ending
        self._dead.set()

    async def wait_dead(self) -> str:
        await self._dead.wait()
        return self._how

    async def restart(self, on_progress: Callable[[str], None]) -> None:
        self.num_starts += 1
        await self.may_start.wait()
        if self._failures:
            raise self._failures.popleft()
        self._dead = anyio.Event()
        self.alive = True

    async def stop(self) -> None:
        self.num_stops += 1
        if self.alive:
            self.die("was killed")


async def keep(clients: RecordedClients, *processes: Process, **options: float) -> None:
    clients.known |= {process.url for process in processes}
    settings = ServerSettings(**options)
    await keep_alive(cast("list[ServerProcess]", processes), settings, clients)


@asynccontextmanager
async def keeping(
    clients: RecordedClients, *processes: Process, **options: float
) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            await keep(clients, *processes, **options)

        tasks.start_soon(run)
        yield
        tasks.cancel_scope.cancel()


async def test_server_that_dies_is_restarted_and_its_clients_know_first() -> None:
    a, b, clients = Process("a"), Process("b"), RecordedClients()
    async with keeping(clients, a, b):
        a.die("exit status 1\nthe log's tail")
        await eventually(lambda: a.alive)
    assert clients.calls == ["a exited: exit status 1", "a restarting"]
    assert (a.num_starts, b.num_starts) == (1, 0)


async def test_dead_server_restarts_after_the_learner_frees_the_gpus() -> None:
    process, clients = Process("a"), RecordedClients()
    clients.may_start = anyio.Event()
    async with keeping(clients, process):
        process.die("killed")
        await eventually(lambda: bool(clients.calls))
        await anyio.wait_all_tasks_blocked()
        assert (clients.calls, process.num_starts) == (["a exited: killed"], 0)
        clients.may_start.set()
        await eventually(lambda: process.alive)


async def test_server_that_was_retired_stays_dead() -> None:
    process, clients = Process("a"), RecordedClients()
    clients.disabled.add("a")
    async with keeping(clients, process):
        process.die("ended")
        await eventually(lambda: clients.calls == ["a exited: ended"])
        await anyio.wait_all_tasks_blocked()
    assert process.num_starts == 0


async def test_last_server_given_up_is_error_with_its_log(caplog: pytest.LogCaptureFixture) -> None:
    a, b, clients = Process("a"), Process("b"), RecordedClients()
    a.die("killed")
    b.die("exit status 7\nout of memory")
    with pytest.RaisesGroup(
        pytest.RaisesExc(ServerError, match=r"(?s)no server is left.*: .*(out of memory|killed)")
    ):
        await keep(clients, a, b, max_restarts=0)
    assert {"a given up", "b given up"} <= set(clients.calls)
    assert {"giving up a", "giving up b"} <= set(re.findall("giving up [ab]", caplog.text))
    assert a.num_starts == b.num_starts == 0


async def test_servers_of_others_are_enough() -> None:
    process, clients = Process("a"), RecordedClients("elsewhere")
    async with keeping(clients, process, max_restarts=0):
        process.die("ended")
        await eventually(lambda: clients.calls[-1:] == ["a given up"])
        await anyio.wait_all_tasks_blocked()


async def test_restart_that_fails_is_cleaned_up_and_counts() -> None:
    process, clients = Process("a", ServerStartError("exit status 3")), RecordedClients()
    process.die("killed")
    with pytest.RaisesGroup(pytest.RaisesExc(ServerError, match="exit status 3")):
        await keep(clients, process, max_restarts=1)
    assert clients.calls == [
        "a exited: killed",
        "a restarting",
        "a exited: exit status 3",
        "a given up",
    ]
    assert process.num_stops == 1


async def test_unresponsive_server_is_killed_and_restarted() -> None:
    process, clients = Process("a"), RecordedClients()
    clients.dead.add("a")
    async with keeping(clients, process, unresponsive_s=0.02):
        await eventually(lambda: process.num_stops == 1)
        clients.dead.clear()
        await eventually(lambda: process.alive)
    assert clients.calls[:2] == ["a exited: was killed", "a restarting"]


async def test_server_need_not_answer_while_it_starts() -> None:
    process, clients = Process("a"), RecordedClients()
    process.may_start = anyio.Event()
    clients.dead.add("a")
    ticks = 0
    is_dead = clients.is_dead

    def counting(url: str) -> bool:
        nonlocal ticks
        ticks += 1
        return is_dead(url)

    clients.is_dead = counting  # type: ignore[method-assign]
    async with keeping(clients, process, Process("b"), unresponsive_s=0.02):
        process.die("killed")
        process.alive = True  # the new process runs, but is not ready
        await eventually(lambda: process.num_starts == 1)
        before = ticks
        await eventually(lambda: ticks >= before + 20)  # looks at the other server
        assert process.num_stops == 0
        clients.dead.clear()
        process.may_start.set()
        await eventually(lambda: len(clients.calls) == 2)
