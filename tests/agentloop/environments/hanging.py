"""An environment that hangs with a session and a program of the sandbox, each with a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

import agentloop
from agentloop.environments.agent import Agent
from agentloop.environments.tasks.sources import Task
from agentloop.errors import RequestError
from agentloop.inference.sglang.sampling import Sampling
from agentloop.rollouts.player import EnvironmentPlayer
from agentloop.sandbox import Pool
from tests.fakes import NoModel
from tests.patience import patient
from tests.rollouts import records_of
from tests.support import eventually

__all__ = ["hang"]

_SLEEP = "os.execv('/bin/sleep', ['sleep', '{mark}'])"


async def hang(pool: Pool, mark: str) -> None:
    """Let a rollout reach its deadline, and check that it leaves no process and no session.

    Args:
        mark: a number of seconds that no other process sleeps.
    """
    sleep = _SLEEP.format(mark=mark)
    result: list[int] = []

    @agentloop.environment
    async def hangs(task: Any, agent: Agent) -> float:
        async with agent.sandbox.session() as session, anyio.create_task_group() as tasks:
            await session.run(f"import os; os.fork() or {sleep}")
            tasks.start_soon(lambda: agent.sandbox.run(f"import os; {sleep}", timeout_s=600))
            await eventually(lambda: len(_sleeping(mark)) == 2)
            result.extend(_sleeping(mark))
            await anyio.sleep_forever()
        return 1.0

    player = EnvironmentPlayer(hangs, NoModel(pool), sampling=Sampling())
    with pytest.raises(RequestError, match="ran out of time"):
        await records_of(player, Task("t", "", ""), budget=agentloop.Budget(timeout_s=patient(6)))
    assert len(result) == 2
    await eventually(lambda: not _sleeping(mark))
    await eventually(lambda: (pool.stats()["busy"], pool.stats()["sessions"]) == (0, 0))


def _sleeping(mark: str) -> list[int]:
    """Return the processes that sleep for so long, in whatever container they are."""
    result = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if words[:2] == [b"sleep", mark.encode()]:
            result.append(int(folder.name))
    return result
