"""Ten thousand calls while workers, containers and once the engine itself are killed.

The engine is a private one: nobody else's containers are hurt.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import aiodocker
import aiohttp
import anyio
import pytest

from agentloop.sandbox import Pool, PoolSettings
from agentloop.sandbox.engine import connect
from agentloop.sandbox.errors import SandboxUnavailable
from tests.integration.private_engine import PrivateEngine, private_engine
from tests.patience import patient
from tests.sandbox.chaos import Tally, answers, kill_an_owner, kill_at_random, run_load

pytestmark = [pytest.mark.anyio, pytest.mark.real, pytest.mark.timeout(900)]

NUM_CALLS = 10_000
KILL_EVERY = 250  # answers on average, one process
KILL_CONTAINER_EVERY = 1000
RECOVERY_S = 60  # what failed to start waits longer for the next try
ENGINE_DOWN_S = 4.0


@pytest.fixture(scope="module")
async def private(anyio_backend: str) -> AsyncIterator[PrivateEngine]:
    async with private_engine() as engine:
        yield engine


@pytest.fixture
async def engine(private: PrivateEngine) -> PrivateEngine:
    if not private.running:  # an earlier test has killed it, and failed
        await private.start()
    for group in private.cgroups():  # or has killed it at work
        with contextlib.suppress(OSError):
            os.rmdir(group)
    return private


@pytest.fixture
def scratch(private: PrivateEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What the sandbox takes for the system's temporary directory."""
    path = private.folder / "tmp"
    path.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(path))
    yield path
    shutil.rmtree(path)


def settings_for(engine: PrivateEngine) -> PoolSettings:
    return PoolSettings(
        backend="docker", engines=[engine.url], workers=3, preload=[["math"]], memory_mib=256
    )


async def kill_containers(
    engine: PrivateEngine, tally: Tally, dice: random.Random, killed: Counter[str]
) -> None:
    """Until cancelled, by the engine's own means."""
    async for _ in answers(tally, KILL_CONTAINER_EVERY, dice):
        with contextlib.suppress(SandboxUnavailable, aiodocker.DockerError, aiohttp.ClientError):
            async with connect(engine.url) as docker:
                result = await docker.containers.list()
                if result:
                    await dice.choice(result).kill()
                    killed["container"] += 1


async def names(engine: PrivateEngine) -> list[str]:
    async with connect(engine.url) as docker:
        return [c["Names"][0] for c in await docker.containers.list(all=True)]


async def wait_until(happened: Callable[[], Awaitable[bool]], within_s: float = RECOVERY_S) -> None:
    with anyio.fail_after(patient(within_s)):
        while not await happened():  # noqa: ASYNC110 - the engine sets no event
            await anyio.sleep(0.05)


async def check_that_nothing_is_left(
    engine: PrivateEngine, scratch: Path | None = None, *, killed_at_work: bool = False
) -> None:
    """No container, and of none a process, a control group or a directory. An engine that is
    killed while it makes a container forgets it, and its control group, empty, stays."""

    async def remaining() -> list[object]:
        groups = [] if killed_at_work else engine.cgroups()
        return [*await names(engine), *engine.pids(), *groups]

    with anyio.move_on_after(RECOVERY_S):
        while await remaining():  # noqa: ASYNC110 - the engine sets no event
            await anyio.sleep(0.05)
    assert await remaining() == []
    assert scratch is None or os.listdir(scratch) == []


async def test_calls_while_everything_is_killed(engine: PrivateEngine, scratch: Path) -> None:
    dice = random.Random(7)
    tally, killed = Tally([0] * NUM_CALLS), Counter[str]()
    async with Pool(settings_for(engine)) as pool:
        began = time.monotonic()
        async with anyio.create_task_group() as group:

            async def kill_engine() -> None:
                async def a_third() -> bool:
                    return tally.ends.total() > NUM_CALLS / 3

                await wait_until(a_third, within_s=300)
                await engine.kill()
                killed["engine"] += 1
                await anyio.sleep(ENGINE_DOWN_S)
                await engine.start()

            group.start_soon(
                kill_at_random, ["server", "zygote", "call", "call"], engine.servers,
                tally, KILL_EVERY, dice, killed,
            )  # fmt: skip
            group.start_soon(kill_containers, engine, tally, dice, killed)
            async with anyio.create_task_group() as calls:
                calls.start_soon(kill_engine)
                await run_load(pool, NUM_CALLS, tally)
            group.cancel_scope.cancel()
        took_s = time.monotonic() - began
        print(f"\n{took_s:.1f} s, {dict(killed)}, {dict(tally.ends)}, second {tally.second}")
        print(pool.stats())
        tally.check()
        assert tally.ends["right"] > 0.95 * NUM_CALLS
        assert killed["engine"] == 1
        assert min(killed[kind] for kind in ("server", "zygote", "call", "container")) > 0

        async def complete() -> bool:
            stats = pool.stats()
            return bool(stats["workers"] == pool.settings.workers and stats["busy"] == 0)

        await wait_until(complete)
        again = Tally([0] * 200)
        await run_load(pool, 200, again)
        assert again.ends == {"right": 200}
    await check_that_nothing_is_left(engine, scratch, killed_at_work=True)


async def test_killing_the_owner_under_load_leaves_nothing(
    engine: PrivateEngine, scratch: Path
) -> None:
    await kill_an_owner(settings_for(engine), scratch)
    async with Pool(settings_for(engine)) as pool:
        assert (await pool.run("print(1)")).stdout == "1\n"
    await check_that_nothing_is_left(engine, scratch)


async def test_leftover_containers_are_removed_when_the_engine_is_back(
    engine: PrivateEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """A pool whose engine is down waits for it, quietly, and tidies up itself."""
    settings = settings_for(engine).model_copy(update={"workers": 1, "max_wait_s": 200.0})
    async with Pool(settings) as pool:
        first = f"/agentloop-sandbox-{pool._queue.workers[0].link.worker_id}"
        await engine.kill()
        (server,) = engine.servers()
        os.kill(server, signal.SIGKILL)
        results = []

        async def call() -> None:
            results.append(await pool.run("print(1)"))

        async with anyio.create_task_group() as group:
            group.start_soon(call)

            async def noticed() -> bool:
                return not pool.stats()["workers"] and bool(pool._why)

            await wait_until(noticed)
            await anyio.sleep(3)  # a few tries
            assert results == []
            await engine.start()
        assert results[0].stdout == "1\n"
        assert len(caplog.records) < 5

        async def gone() -> bool:
            return first not in await names(engine)

        await wait_until(gone)
    await check_that_nothing_is_left(engine)


async def test_loss_of_one_of_two_engines(engine: PrivateEngine) -> None:
    """What ran on the lost one runs on the other from then on."""
    engines = {"engines": [engine.url, "unix:///var/run/docker.sock"], "workers": 2}
    async with Pool(settings_for(engine).model_copy(update=engines)) as pool:
        (server,) = engine.servers()  # one worker on each
        await engine.kill()
        os.kill(server, signal.SIGKILL)

        async def complete() -> bool:
            return bool(pool.stats()["lost"] and pool.stats()["workers"] == 2)

        await wait_until(complete)
        tally = Tally([0] * 100)
        await run_load(pool, 100, tally)
        assert tally.ends == {"right": 100}
        await engine.start()
    await check_that_nothing_is_left(engine)


async def test_pool_closes_while_its_engine_is_down(engine: PrivateEngine) -> None:
    with anyio.fail_after(patient(2 * RECOVERY_S)) as scope:
        async with Pool(settings_for(engine)) as pool:
            assert (await pool.run("print(1)")).ok
            await engine.kill()
            scope.deadline = anyio.current_time() + RECOVERY_S

    async def ended() -> bool:  # the workers have seen the end of their connections
        return not engine.pids()

    await wait_until(ended)
    await engine.start()
    async with Pool(settings_for(engine)):
        pass
    await check_that_nothing_is_left(engine)


@pytest.mark.full
async def test_killed_computers_leave_and_share_nothing(private: PrivateEngine) -> None:
    """Some rounds of the command, in a pid namespace, since much is killed."""
    apart = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    command = [*apart, sys.executable, "-m", "tests.integration.killed_computers", "--num", "40"]
    done = await anyio.run_process(command, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
