"""What a runtime does when servers of its own die."""

from __future__ import annotations

import logging
from typing import Any, cast

import anyio
import pytest

from agentloop.errors import ServerError
from agentloop.inference.supervise import ServerProcess
from agentloop.runtime import _watch

pytestmark = pytest.mark.anyio


class Mortal:
    """A server that dies when it is told to."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.dead = anyio.Event()

    async def wait_dead(self) -> str:
        await self.dead.wait()
        return "was killed by SIGKILL"


async def test_one_of_two_may_die_loudly(caplog: pytest.LogCaptureFixture) -> None:
    first, second = Mortal("http://first"), Mortal("http://second")
    processes = cast(list[ServerProcess], [first, second])
    caplog.set_level(logging.ERROR)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_watch, processes)
        await anyio.wait_all_tasks_blocked()
        first.dead.set()
        await anyio.wait_all_tasks_blocked()
        assert "http://first died: was killed by SIGKILL" in caplog.text
        tasks.cancel_scope.cancel()


async def test_the_last_one_ends_the_runtime() -> None:
    servers: list[Any] = [Mortal("http://first"), Mortal("http://second")]
    for server in servers:
        server.dead.set()
    with pytest.RaisesGroup(pytest.RaisesExc(ServerError, match="no server is left")):
        await _watch(servers)
