"""The sandbox in real containers: the table of attacks, losses, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiodocker
import anyio
import anyio.lowlevel
import pytest

from agentloop.sandbox import CallStatus, Pool, PoolSettings, Session
from agentloop.sandbox.container import LABEL
from agentloop.sandbox.engine import connect
from agentloop.sandbox.errors import SandboxUnavailable
from tests.agentloop.environments.hanging import hang
from tests.patience import patient
from tests.sandbox.attacks import (
    AFTER,
    ATTACKS,
    CHANNELS,
    PRIVILEGES,
    SECRET_BOMBS,
    SMALL_BOMBS,
    Attack,
    Channel,
    check_after,
    check_channel,
    check_neighbours,
    check_that_disks_are_apart,
    check_that_the_next_finds_nothing,
    num_seen,
)
from tests.sandbox.attribution import attribute
from tests.sandbox.test_limits import check_memory_after_names, check_shares
from tests.sandbox.test_pool import endless_before
from tests.sandbox.test_sessions import check_unread_jobs

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

SETTINGS = PoolSettings(backend="docker", workers=4, timeout_s=20)
FIRST_OF_EACH_WALL = list({attack.wall: attack for attack in reversed(ATTACKS)}.values())
FOREVER = "import time\nwhile True: time.sleep(1)"


@pytest.fixture(scope="module")
async def engine(anyio_backend: str) -> AsyncIterator[aiodocker.Docker]:
    try:
        async with connect() as docker:
            yield docker
    except SandboxUnavailable as error:
        if os.environ.get("CI"):
            pytest.fail(f"{error} Install: apt install docker.io iptables; dockerd &")
        pytest.skip(f"{error} Install: apt install docker.io iptables; dockerd &")


@pytest.fixture(scope="module")
async def pool(engine: aiodocker.Docker) -> AsyncIterator[Pool]:
    async with Pool(SETTINGS, on_progress=print) as pool:
        yield pool


async def containers(engine: aiodocker.Docker, owner: int | None = None) -> list[str]:
    """Names of our containers, running or not, that the process `owner` started."""
    prefix = f"/agentloop-sandbox-{owner or os.getpid()}-"
    actual = await engine.containers.list(all=True, filters={"label": [LABEL]})
    return [c["Names"][0] for c in actual if c["Names"][0].startswith(prefix)]


async def wait_until(happened: Callable[[], Any]) -> None:
    with anyio.fail_after(patient(60)):
        while not await happened():  # noqa: ASYNC110 - the engine sets no event
            await anyio.sleep(0.02)


@pytest.fixture(scope="module")
async def num_processes(pool: Pool) -> int:
    """How many a call sees in a worker that is at rest."""
    return num_seen(await pool.run(AFTER))


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(
            attack, id=attack.name, marks=[pytest.mark.gate] if attack in FIRST_OF_EACH_WALL else []
        )
        for attack in ATTACKS
    ],
)
async def test_attack(pool: Pool, attack: Attack, num_processes: int) -> None:
    if attack.wall == "hidden" and not hides_processes(pool):
        pytest.skip("the engine's kernel has no Landlock")
    num_lost = pool.stats()["lost"]
    result = await pool.run(attack.code, timeout_s=attack.timeout_s)
    assert result.status in attack.statuses, result
    assert attack.check(result), result
    assert result.attempt == 1
    await check_after(pool, num_processes)
    assert pool.stats()["lost"] == num_lost


@pytest.mark.gate
async def test_walls_are_up(pool: Pool, engine: aiodocker.Docker) -> None:
    """What the Engine was told, and what the kernel says of it from inside."""
    (name,) = [n for n in await containers(engine) if pool._queue.workers[0].link.worker_id in n]
    host = (await (await engine.containers.get(name[1:])).show())["HostConfig"]
    assert host["CapDrop"] == ["ALL"]
    assert host["ReadonlyRootfs"]
    assert host["OomScoreAdj"] == (-1000 if has_cap(CAP_SYS_RESOURCE) else 500)
    assert host["NetworkMode"] == "none"
    assert host["IpcMode"] == "none"
    call = pool.settings.memory_mib << 20
    assert host["MemorySwap"] == host["Memory"] >= call
    processes = pool.settings.processes_per_call
    assert processes < host["PidsLimit"] < 2048
    # No new privileges, a filter, and no capability.
    assert (await pool.run(PRIVILEGES)).stdout.split() == ["1", "2"] + 7 * ["0"]
    assert int((await pool.run("import os\nprint(os.getuid())")).stdout) >= 1000
    # Docker's default profile would allow both: this is the proof that ours is loaded.
    probe = "import ctypes, socket\nprint(ctypes.CDLL(None).syscall(425, 8, 0))\nsocket.socket(40)"
    result = await pool.run(probe)
    assert result.stdout.strip() == "-1"
    assert result.error is not None
    assert result.error.type == "PermissionError"


async def test_numpy_and_sympy(pool: Pool) -> None:
    code = (
        "import numpy, sympy\nx = sympy.Symbol('x')\n"
        "sympy.solve(x**2 - 4), int(numpy.arange(5).sum())"
    )
    result = await pool.run(code)
    assert result.result == "([-2, 2], 10)"


@pytest.mark.parametrize("channel", CHANNELS, ids=lambda channel: channel.name)
async def test_calls_beside_each_other_can_not_talk(pool: Pool, channel: Channel) -> None:
    if channel.wall == "hidden" and not hides_processes(pool):
        pytest.skip("the engine's kernel has no Landlock")
    await check_channel(pool, channel)


def hides_processes(pool: Pool) -> bool:
    return bool(pool.stats()["layers"]["other calls' processes"] == "hidden")


async def test_calls_beside_each_other_see_nothing(pool: Pool) -> None:
    await check_neighbours(pool)


async def test_full_disk_is_full_for_one_call_alone(pool: Pool) -> None:
    await check_that_disks_are_apart(pool)


async def test_next_call_finds_nothing() -> None:
    few = {"workers": 1, "max_sessions": 0, "preload": []}
    async with Pool(SETTINGS.model_copy(update=few)) as pool:
        await check_that_the_next_finds_nothing(pool)
        assert pool.stats()["lost"] == 0


# Each lasts until its limit, and takes as much as it can get meanwhile.
NOISE = {
    "a sympy call that hangs": (
        "import sympy\nn = sympy.nextprime(10**40) * sympy.nextprime(3 * 10**40)\n"
        "print(sympy.factorint(n))",
        {CallStatus.TIMEOUT},
    ),
    "a gigabyte printed": (
        "import os\nfor _ in range(1000): os.write(1, b'x' * 10**6)",
        {CallStatus.OUTPUT_LIMIT},
    ),
    "sixty busy processes": (
        "import os\nfor _ in range(30):\n  if os.fork() == 0: break\nwhile True: pass",
        {CallStatus.TIMEOUT},
    ),
    "a memory bomb": ("x = []\nwhile True: x.append(b'1' * 10**7)", {CallStatus.OOM}),
}


@pytest.mark.parametrize("noise", NOISE)
async def test_neighbours_do_not_notice(pool: Pool, noise: str) -> None:
    """Beside it calls are right, and a session keeps what it has. They take longer only as
    processors are shared: not many times as long."""
    code, expected = NOISE[noise]
    timeout_s = 2 if CallStatus.TIMEOUT in expected else 60

    async def quick() -> float:
        result = await pool.run("print(open('f', 'w').write('x' * 10_000))", timeout_s=30)
        assert result.stdout == "10000\n", result
        return result.run_s

    async def slowdown(session: Session) -> float:
        """Return the ratio of the time of a call beside the noise to that of a call alone."""
        alone = statistics.median([await quick() for _ in range(30)])
        beside: list[float] = []
        async with anyio.create_task_group() as group:

            async def be_noisy() -> None:
                ends.append((await pool.run(code, timeout_s=timeout_s)).status)

            ends: list[CallStatus] = []
            group.start_soon(be_noisy)
            group.start_soon(be_noisy)
            while len(ends) < 2 or len(beside) < 20:
                beside.append(await quick())
                assert (await session.run("x + 1", timeout_s=30)).result == "42"
        assert set(ends) <= expected
        return statistics.median(beside) / alone

    async with pool.session() as session:
        await session.run("x = 41")
        # What else the machine does may begin or end meanwhile: then both are measured again.
        assert await slowdown(session) < 20 or await slowdown(session) < 20


CAP_SYS_RESOURCE = 24


def has_cap(number: int) -> bool:
    status = Path("/proc/self/status").read_text()
    return bool(int(status.split("CapEff:")[1].split()[0], 16) >> number & 1)


async def test_memory_bomb_can_not_send_the_killer_to_its_neighbours(pool: Pool) -> None:
    """A process can't lower its score for the kernel's choice."""
    if not has_cap(CAP_SYS_RESOURCE):
        pytest.skip("without CAP_SYS_RESOURCE even an engine can't set a least score")
    bomb = (
        "import ctypes\nctypes.CDLL(None).prctl(4, 1, 0, 0, 0)\n"
        "for score in (0, 500):\n"
        "  try: open('/proc/self/oom_score_adj', 'w').write(str(score)); print(score, flush=True)\n"
        "  except OSError: pass\n"
        "x = []\nwhile True: x.append(b'1' * 10**7)"
    )
    kept: list[str] = []

    async def keep() -> None:
        code = "x = b'1' * 60_000_000\nimport time; time.sleep(3); print('kept')"
        kept.append((await pool.run(code)).stdout)

    async with anyio.create_task_group() as group:
        group.start_soon(keep)
        await anyio.sleep(0.5)
        result = await pool.run(bomb)
    assert result.status is CallStatus.OOM
    assert result.stdout == ""
    assert kept == ["kept\n"]


BOMB_AND_KILL_ITSELF = """
import os, signal, time
for _ in range(6):
    if os.fork() == 0:
        hoard = []
        while True:
            try: hoard.append(b"1" * 5_000_000)
            except MemoryError: pass
def kills():
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            for line in open(path):
                if line.startswith("oom_kill "): return int(line.split()[1])
        except OSError: pass
    return 0
before, end = kills(), time.monotonic() + 10
while kills() == before and time.monotonic() < end: time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_program_can_not_make_its_own_end_look_like_ours(pool: Pool) -> None:
    """It fills the memory by a process of its own, and then kills itself beside another call."""
    kept: list[str] = []

    async def keep() -> None:
        kept.append((await pool.run("import time; time.sleep(6); print('kept')")).stdout)

    async with anyio.create_task_group() as group:
        group.start_soon(keep)
        await anyio.sleep(0.5)
        result = await pool.run(BOMB_AND_KILL_ITSELF)
    assert result.status in (CallStatus.OOM, CallStatus.KILLED), result
    assert kept == ["kept\n"]


async def test_idle_container_that_hangs_is_found(
    engine: aiodocker.Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentloop.sandbox.link.BEAT_S", 0.5)
    async with Pool(SETTINGS.model_copy(update={"preload": []})) as pool:
        name = f"agentloop-sandbox-{pool._queue.workers[0].link.worker_id}"
        await (await engine.containers.get(name)).pause()
        with anyio.fail_after(patient(60)):
            while not pool.stats()["lost"]:  # noqa: ASYNC110 - nor does the pool
                await anyio.sleep(0.02)
        assert (await pool.run("print(1)")).stdout == "1\n"


@pytest.mark.parametrize("bomb", [SMALL_BOMBS, SECRET_BOMBS], ids=["small", "secret"])
async def test_call_over_its_memory_ends_alone(pool: Pool, bomb: str) -> None:
    """However small and well hidden its processes are: no neighbour and no worker dies of it."""
    num_lost = pool.stats()["lost"]
    kept: list[str] = []

    async def keep() -> None:
        code = "x = b'1' * 300_000_000\nimport time; time.sleep(4); print('kept')"
        kept.append((await pool.run(code)).stdout)

    async with pool.session() as session, anyio.create_task_group() as group:
        await session.run("x = 41")
        group.start_soon(keep)
        group.start_soon(keep)
        result = await pool.run(bomb, timeout_s=60)
        assert (result.status, result.attempt) == (CallStatus.OOM, 1)
        assert (await session.run("x + 1")).result == "42"
    assert kept == ["kept\n", "kept\n"]
    assert pool.stats()["lost"] == num_lost


async def test_processes_that_sessions_leave_take_no_others_place(pool: Pool) -> None:
    leave = "import os, time\nfor _ in range(31):\n  if os.fork() == 0: time.sleep(600)"
    need = "import subprocess\nsubprocess.run(['/bin/echo', 'hi'], check=True)"
    async with AsyncExitStack() as stack:
        for _ in range(12):
            session = await stack.enter_async_context(pool.session())
            assert (await session.run(leave)).ok
        for _ in range(8):
            assert (await pool.run(need)).ok


async def test_killed_container_is_replaced_and_call_runs_again(engine: aiodocker.Docker) -> None:
    async with Pool(SETTINGS.model_copy(update={"preload": [], "workers": 1})) as pool:
        results = []
        code = f"{endless_before(time.time())}\nprint('done')"

        async def call() -> None:
            results.append(await pool.run(code, timeout_s=60))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            with anyio.fail_after(patient(15)):
                while pool.stats()["busy"] == 0:  # noqa: ASYNC110 - nor does the pool
                    await anyio.sleep(0.01)
            name = f"agentloop-sandbox-{pool._queue.workers[0].link.worker_id}"
            await (await engine.containers.get(name)).kill()
        assert (results[0].stdout, results[0].attempt) == ("done\n", 2)
        assert pool.stats()["workers"] == 1


async def test_paused_container_counts_as_lost(
    engine: aiodocker.Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentloop.sandbox.slots.GRACE_S", 0.5)
    async with Pool(SETTINGS.model_copy(update={"preload": []})) as pool:
        name = f"agentloop-sandbox-{pool._queue.workers[0].link.worker_id}"
        await (await engine.containers.get(name)).pause()
        monkeypatch.undo()  # what comes in its place has the usual time
        result = await pool.run("print(1)", timeout_s=3)
        assert (result.stdout, result.attempt) == ("1\n", 2)


async def test_hanging_environment_leaves_no_process(pool: Pool) -> None:
    await hang(pool, "600.1618")


@pytest.mark.gate
async def test_closing_leaves_no_container(engine: aiodocker.Docker) -> None:
    async with Pool(SETTINGS.model_copy(update={"preload": [], "workers": 2})) as pool:
        # Only its own: another test's pool may be replacing one at the same time.
        names = {f"/agentloop-sandbox-{each.link.worker_id}" for each in pool._queue.workers}
        assert len(names) == 2
        assert names <= {*await containers(engine)}
        await pool.run("1")
    assert names.isdisjoint(await containers(engine))


async def test_killing_the_supervisor_leaves_nothing(engine: aiodocker.Docker) -> None:
    program = (
        "import anyio, sandbox\n"
        "async def main():\n"
        "    settings = sandbox.PoolSettings(backend='docker', workers=2, preload=[])\n"
        "    async with sandbox.Pool(settings) as pool:\n"
        "        async with anyio.create_task_group() as group:\n"
        f"            group.start_soon(pool.run, {FOREVER!r}, '', 600)\n"
        "            print('up', flush=True)\n"
        "            await anyio.sleep(600)\n"
        "anyio.run(main)\n"
    )
    async with await anyio.open_process(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])},
    ) as process:
        assert process.stdout is not None
        with anyio.fail_after(patient(120)):
            assert (await process.stdout.receive()).startswith(b"up")
        assert len(await containers(engine, process.pid)) == 2
        process.send_signal(signal.SIGKILL)

    async def gone() -> bool:
        return not await containers(engine, process.pid)

    await wait_until(gone)


async def test_containers_of_dead_owners_are_removed_at_the_next_start(
    engine: aiodocker.Docker,
) -> None:
    """A container whose owner is dead, as a crash of the engine's own clean-up would leave it."""
    async with await anyio.open_process(["true"]) as dead:
        await dead.wait()
    labels = {
        LABEL: "left-over",
        f"{LABEL}.owner": f"{dead.pid}-1-{os.stat('/proc/self/ns/pid').st_ino}",
        f"{LABEL}.boot": (await anyio.Path("/proc/sys/kernel/random/boot_id").read_text()).strip(),
    }
    async with Pool(SETTINGS.model_copy(update={"preload": []})) as pool:
        image = pool._backends[0]._engines[0].image  # type: ignore[attr-defined]
    remaining = await engine.containers.create(
        {"Image": image, "Cmd": ["sleep", "600"], "Labels": labels}, name="agentloop-left-over"
    )
    await remaining.start()
    async with Pool(SETTINGS.model_copy(update={"preload": []})):
        actual = await engine.containers.list(all=True, filters={"label": [LABEL]})
        assert "left-over" not in json.dumps([c["Labels"] for c in actual])


async def test_name_lookups_take_no_memory_from_the_next_call() -> None:
    await check_memory_after_names(SETTINGS)


async def test_calls_share_the_processors_however_many_processes_they_have() -> None:
    async with Pool(SETTINGS.model_copy(update={"workers": 2, "preload": []})) as pool:
        await check_shares(pool)


async def test_session_that_reads_no_jobs_is_lost_by_its_program() -> None:
    async with Pool(SETTINGS.model_copy(update={"preload": []})) as pool:
        await check_unread_jobs(pool)


@pytest.mark.timeout(1800)  # programs that never end have two seconds each
@pytest.mark.parametrize("number", [40, pytest.param(1000, marks=pytest.mark.full)])
async def test_no_program_is_blamed_for_another_or_blames_us(
    engine: aiodocker.Docker, number: int
) -> None:
    several = SETTINGS.model_copy(update={"workers": 4, "preload": []})
    async with Pool(several, on_progress=print) as pool:
        actual = await attribute(pool, seed=number, number=number)
    assert actual.violations == []
    assert actual.num_right > 0


async def test_runtime_is_the_configured_one(engine: aiodocker.Docker) -> None:
    settings = SETTINGS.model_copy(update={"preload": [], "workers": 1, "runtime": "runc"})
    async with Pool(settings) as pool:
        name = f"agentloop-sandbox-{pool._queue.workers[0].link.worker_id}"
        container = await (await engine.containers.get(name)).show()
        assert container["HostConfig"]["Runtime"] == "runc"
        assert pool.stats()["layers"]["runtime"] == "runc"


async def test_runtime_that_the_engine_lacks_is_named(engine: aiodocker.Docker) -> None:
    settings = SETTINGS.model_copy(update={"runtime": "no-such-runtime"})
    with pytest.raises(SandboxUnavailable, match="no-such-runtime"):
        async with Pool(settings):
            pass


async def test_session_may_hold_more_than_its_next_cell(pool: Pool) -> None:
    async with pool.session() as session:
        assert (await session.run("x = b'1' * (200 << 20)")).ok
        assert (await session.run("1", memory_mib=16)).status in (CallStatus.OK, CallStatus.OOM)


OUTLIVING = """
import os, time
for _ in range(25):
    if os.fork() == 0:
        hoard = b"1" * (15 << 20)
        time.sleep(600)
"""


async def test_call_with_little_memory_follows_one_with_much(engine: aiodocker.Docker) -> None:
    async with Pool(SETTINGS.model_copy(update={"preload": [], "workers": 1})) as pool:
        for _ in range(10):
            async with anyio.create_task_group() as group:
                group.start_soon(pool.run, OUTLIVING)
                await anyio.lowlevel.checkpoint()
                assert (await pool.run("1", memory_mib=16)).ok
