"""The sandbox in real containers: the table of attacks, losses, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiodocker
import anyio
import pytest

from sandbox import CallStatus, Pool, PoolSettings
from sandbox.container import LABEL
from sandbox.engine import connect
from sandbox.errors import SandboxUnavailable
from tests.sandbox.attacks import ATTACKS, Attack

pytestmark = [pytest.mark.anyio, pytest.mark.real, pytest.mark.timeout(60)]

SETTINGS = PoolSettings(backend="docker", workers=1)
FOREVER = "import time\nwhile True: time.sleep(1)"


@pytest.fixture(scope="session")
async def engine(anyio_backend: str) -> AsyncIterator[aiodocker.Docker]:
    try:
        async with connect() as docker:
            yield docker
    except SandboxUnavailable as error:
        if os.environ.get("CI"):
            pytest.fail(f"{error} Install: apt install docker.io iptables; dockerd &")
        pytest.skip(f"{error} Install: apt install docker.io iptables; dockerd &")


@pytest.fixture(scope="session")
async def pool(engine: aiodocker.Docker) -> AsyncIterator[Pool]:
    async with Pool(SETTINGS, on_progress=print) as pool:
        yield pool


async def containers(engine: aiodocker.Docker, owner: int | None = None) -> list[str]:
    """Names of our containers, running or not, that the process `owner` started."""
    prefix = f"/agentloop-sandbox-{owner or os.getpid()}-"
    found = await engine.containers.list(all=True, filters={"label": [LABEL]})
    return [c["Names"][0] for c in found if c["Names"][0].startswith(prefix)]


async def wait_until(happened: Callable[[], Any]) -> None:
    with anyio.fail_after(20):
        while not await happened():  # noqa: ASYNC110 - the engine sets no event
            await anyio.sleep(0.02)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_attack(pool: Pool, attack: Attack) -> None:
    replaced = pool.stats()["replaced"]
    result = await pool.run(attack.code, timeout_s=attack.timeout_s)
    assert result.status in attack.statuses, result
    assert attack.check(result), result
    assert result.attempt == 1
    assert result.run_s < attack.within_s + attack.timeout_s
    assert (await pool.run("print(6 * 7)")).stdout == "42\n"
    assert pool.stats()["replaced"] == replaced


async def test_the_walls_are_up(pool: Pool, engine: aiodocker.Docker) -> None:
    """What the Engine was told, and what the kernel says of it from inside."""
    (name,) = [n for n in await containers(engine) if pool._room.workers[0].link.worker_id in n]
    host = (await (await engine.containers.get(name[1:])).show())["HostConfig"]
    assert host["CapDrop"] == ["ALL"]
    assert host["ReadonlyRootfs"]
    assert host["NetworkMode"] == "none"
    assert host["IpcMode"] == "none"
    assert host["MemorySwap"] == host["Memory"] == 512 << 20
    assert 0 < host["PidsLimit"] < 512
    status = (await pool.run("print(open('/proc/self/status').read())")).stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Seccomp"] == "2"
    assert fields["NoNewPrivs"] == "1"
    assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == 0
    assert int(fields["Uid"].split()[0]) >= 1000
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


async def test_calls_beside_each_other_see_nothing(pool: Pool) -> None:
    """One call holds a secret in memory and on disk; the other looks for it."""
    found: list[str] = []
    keeper = "open('secret', 'w').write('s3cret')\nimport time; time.sleep(1.5)"
    seeker = (
        "import os\n"
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "  if int(pid) != os.getpid():\n"
        "    try: os.kill(int(pid), 0); print('signal', pid)\n"
        "    except OSError: pass\n"
        "for n in range(100):\n"
        "  for path in (f'/tmp/{n}/secret', f'/tmp/{n}'):\n"
        "    try: print(open(path).read())\n"
        "    except OSError: pass\n"
        "    try:\n"
        "      if path != os.getcwd(): print(os.listdir(path))\n"
        "    except OSError: pass\n"
    )

    async def seek() -> None:
        result = await pool.run(seeker)
        assert result.ok, result
        found.append(result.stdout)

    async with anyio.create_task_group() as group:
        group.start_soon(pool.run, keeper)
        for _ in range(3):
            group.start_soon(seek)
    assert found == ["", "", ""]


async def test_neighbours_do_not_notice_a_flood(pool: Pool) -> None:
    async def flood() -> None:
        for _ in range(10):
            result = await pool.run("import os\nwhile True: os.write(1, b'x' * 10**6)")
            assert result.status is CallStatus.OUTPUT_LIMIT

    async with anyio.create_task_group() as group:
        group.start_soon(flood)
        for n in range(20):
            result = await pool.run(f"print({n})", timeout_s=2)
            assert result.stdout == f"{n}\n"


async def test_a_killed_container_is_replaced_and_its_call_runs_again(
    engine: aiodocker.Docker,
) -> None:
    async with Pool(SETTINGS.model_copy(update={"preload": []})) as pool:
        results = []

        async def call() -> None:
            results.append(await pool.run("import time; time.sleep(1); print('done')"))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            with anyio.fail_after(10):
                while pool.stats()["busy"] == 0:  # noqa: ASYNC110 - nor does the pool
                    await anyio.sleep(0.01)
            name = f"agentloop-sandbox-{pool._room.workers[0].link.worker_id}"
            await (await engine.containers.get(name)).kill()
        assert (results[0].stdout, results[0].attempt) == ("done\n", 2)
        assert pool.stats()["workers"] == 1


async def test_a_paused_container_counts_as_lost(
    engine: aiodocker.Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox.pool.GRACE_S", 0.5)
    async with Pool(SETTINGS.model_copy(update={"preload": []})) as pool:
        name = f"agentloop-sandbox-{pool._room.workers[0].link.worker_id}"
        await (await engine.containers.get(name)).pause()
        result = await pool.run("print(1)", timeout_s=1)
        assert (result.stdout, result.attempt) == ("1\n", 2)


async def test_closing_leaves_no_container(engine: aiodocker.Docker) -> None:
    before = await containers(engine)
    async with Pool(SETTINGS.model_copy(update={"preload": [], "workers": 2})) as pool:
        assert len(await containers(engine)) == len(before) + 2
        await pool.run("1")
    assert await containers(engine) == before


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
        with anyio.fail_after(30):
            assert (await process.stdout.receive()).startswith(b"up")
        assert len(await containers(engine, process.pid)) == 2
        process.send_signal(signal.SIGKILL)

    async def gone() -> bool:
        return not await containers(engine, process.pid)

    await wait_until(gone)


async def test_what_the_engine_kept_is_reaped_at_the_next_start(engine: aiodocker.Docker) -> None:
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
    left = await engine.containers.create(
        {"Image": image, "Cmd": ["sleep", "600"], "Labels": labels}, name="agentloop-left-over"
    )
    await left.start()
    async with Pool(SETTINGS.model_copy(update={"preload": []})):
        found = await engine.containers.list(all=True, filters={"label": [LABEL]})
        assert "left-over" not in json.dumps([c["Labels"] for c in found])
