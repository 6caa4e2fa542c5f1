"""Two thousand calls while local workers are killed at random, and then their owner."""

from __future__ import annotations

import contextlib
import os
import random
from collections import Counter
from pathlib import Path

import anyio
import pytest

from agentloop.sandbox import Pool, PoolSettings
from tests.sandbox.chaos import (
    Tally,
    answers,
    children,
    descendants,
    kill_an_owner,
    kill_at_random,
    run_load,
)
from tests.sandbox.test_pool import runs, wait_until

pytestmark = [pytest.mark.timeout(240), pytest.mark.full]

NUM_CALLS = 2_000
RECOVERY_S = 60  # workers that were killed in their start wait longer for the next try
SETTINGS = PoolSettings(backend="process", workers=2, preload=[["math"]])


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    os.chmod(tmp_path, 0o755)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.full
async def test_calls_while_workers_are_killed(scratch: Path) -> None:
    dice = random.Random(7)
    tally, killed = Tally([0] * NUM_CALLS), Counter[str]()
    remaining = set(children(os.getpid()))
    observed: set[int] = set()

    def outers() -> list[int]:
        return [pid for pid in children(os.getpid()) if pid not in remaining]

    def servers() -> list[int]:
        observed.update(descendants(os.getpid()))
        return [server for outer in outers() for server in children(outer)]

    async with Pool(SETTINGS) as pool:
        async with anyio.create_task_group() as group:

            async def kill_outers() -> None:
                """Kill the parts that wait outside of the namespaces."""
                async for _ in answers(tally, 1000, dice):
                    with contextlib.suppress(ProcessLookupError, IndexError):
                        os.kill(dice.choice(outers()), 9)

            kinds = ["server", "zygote", "call", "call"]
            group.start_soon(kill_at_random, kinds, servers, tally, 80, dice, killed)
            group.start_soon(kill_outers)
            await run_load(pool, NUM_CALLS, tally)
            group.cancel_scope.cancel()
        print(killed, tally.ends, pool.stats())
        tally.check()
        assert tally.ends["right"] > 0.9 * NUM_CALLS
        await wait_until(lambda: pool.stats()["workers"] == SETTINGS.workers, RECOVERY_S)
        assert pool.stats()["busy"] == 0
        again = Tally([0] * 100)
        await run_load(pool, 100, again)
        assert again.ends == {"right": 100}
        observed.update(descendants(os.getpid()))
    await wait_until(lambda: not any(runs(pid) for pid in observed - remaining - {os.getpid()}))
    assert os.listdir(scratch) == []


async def test_killing_the_owner_under_load_leaves_nothing(scratch: Path) -> None:
    family = await kill_an_owner(SETTINGS, scratch)
    assert len(family) >= 6  # for each worker an outer, a server and a zygote at least
    await wait_until(lambda: not any(map(runs, family)))
    async with Pool(SETTINGS) as pool:
        assert (await pool.run("print(1)")).stdout == "1\n"
    assert os.listdir(scratch) == []
