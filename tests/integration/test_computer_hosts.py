"""Computers on two sandbox hosts: where they are, what they can, and what is left of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import anyio
import httpx
import pytest

import agentloop
from agentloop.environments.adapters import harbor
from agentloop.sandbox import (
    CallStatus,
    Computer,
    ComputerLimits,
    ComputerLost,
    Overloaded,
    Pool,
    PoolSettings,
    ProgramUnsupported,
    SandboxUnavailable,
)
from agentloop.sandbox.container import LABEL
from agentloop.sandbox.image.build import image_tag
from agentloop.sandbox.owner import reap_dirs
from agentloop.trajectory import StopReason
from tests.integration.test_harbor import FILES
from tests.integration.test_sandbox_serve import command
from tests.patience import patient

pytestmark = [pytest.mark.anyio, pytest.mark.real, pytest.mark.timeout(300)]

HOST = ("pool.backend=docker", "pool.preload=[]", "pool.max_sessions=3", "pool.max_wait_s=1")
LONG_S = patient(20)


class Hosts:
    """Two hosts, by the numbers of their processes."""

    def __init__(self, stack: ExitStack) -> None:
        started = [stack.enter_context(command(*HOST)) for _ in range(2)]
        self.urls = {process.pid: url for process, url in started}
        self.processes = {process.pid: process for process, _ in started}
        stack.callback(reap_dirs)  # of one that was killed
        for process in self.processes.values():
            stack.callback(process.wait, LONG_S)
            stack.callback(process.terminate)
        self.settings = PoolSettings(hosts=list(self.urls.values()))

    def num_computers(self, pid: int) -> int:
        stats = httpx.get(self.urls[pid] + "/v1/stats", trust_env=False, timeout=LONG_S).json()
        return int(stats["computers"])


@pytest.fixture
def two(docker_engine: None) -> Iterator[Hosts]:
    """Hosts that a test may end."""
    with ExitStack() as stack:
        yield Hosts(stack)


@pytest.fixture(scope="module")
def hosts(docker_engine: None) -> Iterator[Hosts]:
    with ExitStack() as stack:
        yield Hosts(stack)


@pytest.fixture
async def pool(hosts: Hosts) -> AsyncIterator[Pool]:
    async with Pool(hosts.settings) as pool:
        yield pool


def host_of(box: Computer) -> int:
    return int(box.container_name.split("-")[2])


def containers() -> list[str]:
    names = ["docker", "ps", "-a", "--filter", f"label={LABEL}", "--format", "{{.Names}}"]
    return subprocess.run(names, capture_output=True, text=True, check=True).stdout.split()


async def until(happened: Callable[[], bool]) -> None:
    with anyio.fail_after(patient(60)):
        while not await anyio.to_thread.run_sync(happened):  # noqa: ASYNC110 -- nobody tells
            await anyio.sleep(0.1)


async def output(box: Computer, command: str) -> str:
    result = await box.run(command, timeout_s=LONG_S)
    assert result.ok, result
    return result.stdout


async def test_computers_are_spread_and_counted_until_hosts_are_full(
    pool: Pool, hosts: Hosts
) -> None:
    async with pool.computer() as one:
        near = host_of(one)
        async with one.fork(), one.fork() as last:
            assert host_of(last) == near
            assert hosts.num_computers(near) == 3
            async with pool.computer() as two:  # where there is room
                assert host_of(two) != near
                async with two.fork(), two.fork():
                    with pytest.raises(Overloaded, match=r"the host http.*max_sessions"):
                        async with pool.computer():
                            pass
    await until(lambda: not any(map(hosts.num_computers, hosts.urls)))


async def test_commands_files_copies_and_ports_work_on_a_host(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("hello")
    large = bytes(range(256)) * 12_000
    files: dict[str, bytes | Path] = {"/app": tmp_path, "/app/large": large}
    async with pool.computer(files=files) as box, pool.computer():
        assert await output(box, "cd /app; X=5; ls") == "index.html\nlarge\n"
        assert await output(box, "echo $PWD $X") == "/app 5\n"
        assert (await box.execute(["wc", "-c"], stdin=large)).stdout == f"{len(large)}\n"
        assert await box.read("/app/large") == large
        flood = await box.run("yes", timeout_s=LONG_S, max_output_bytes=4 << 20)
        assert flood.status is CallStatus.OUTPUT_LIMIT
        with pytest.raises(FileNotFoundError):
            await box.read("/none")
        snapshot = await box.snapshot()
        async with box.fork() as sibling, pool.computer(snapshot=snapshot) as later:
            await box.remove("/app/large")
            assert await sibling.read("/app/large") == large
            assert await later.read("/app/large") == large
            assert host_of(later) != host_of(sibling)
        await box.restore(snapshot)
        await box.run("(cd /app; exec python3 -m http.server 80 >/dev/null 2>&1) &")
        async with box.port(80) as address, httpx.AsyncClient(trust_env=False) as http:

            async def answer() -> bytes:
                try:
                    return (await http.get(f"http://{address}/large", timeout=LONG_S)).content
                except httpx.TransportError:  # nothing listens yet
                    return b""

            with anyio.fail_after(LONG_S):
                while not (body := await answer()):  # noqa: ASYNC110 -- nobody tells
                    await anyio.sleep(0.05)
            assert body == large


async def test_ends_by_a_computers_own_programs_are_no_losses(pool: Pool) -> None:
    async with pool.computer(limits=ComputerLimits(disk_mib=64)) as box:
        result = await box.run("head -c 200M /dev/zero > /file; sleep 1000", timeout_s=1000)
        assert result.status is CallStatus.KILLED
        assert "disk_mib" in result.stderr
        with pytest.raises(OSError, match="disk_mib"):
            await box.read("/file")


async def test_images_are_built_on_the_host(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {image_tag()}\nCOPY . /made\nENV A=b\n")
    (tmp_path / "large").write_bytes(large := bytes(range(256)) * 4000)
    async with pool.computer(await pool.build_image(tmp_path)) as box:
        assert await output(box, "echo $A") == "b\n"
        assert await box.read("/made/large") == large
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY none /\n")
    with pytest.raises(SandboxUnavailable, match=r"the host http[^\n]*\n.*none"):
        await pool.build_image(tmp_path)


async def test_what_a_host_cannot_do_is_named(pool: Pool, hosts: Hosts) -> None:
    with pytest.raises(ProgramUnsupported, match=r"the host http.*no-such-image"):
        async with pool.computer("no-such-image"):
            pass
    with pytest.raises(SandboxUnavailable, match="network: host is not lent"):
        async with pool.computer(network="host"):
            pass
    with pytest.raises(ProgramUnsupported, match="Docker Engine"):
        await pool.warm_computers(1)
    with command("pool.backend=process", "pool.preload=[]") as (_, url):
        async with Pool(PoolSettings(hosts=[url])) as other:
            with pytest.raises(ProgramUnsupported, match=f"{url}: computers and programs have"):
                async with other.computer():
                    pass


async def test_lost_host_is_infrastructure_and_others_go_on(two: Hosts) -> None:
    async with Pool(two.settings) as pool, pool.computer() as box:
        lost = two.processes[host_of(box)]

        async def run(box: Computer) -> None:
            with pytest.raises(ComputerLost, match="the connection to the host"):
                await box.run("echo; sleep 1000", timeout_s=1000, on_output=lambda *_: lost.kill())

        async with box.fork() as sibling, anyio.create_task_group() as group:
            group.start_soon(run, box)
            with pytest.raises(ComputerLost):
                await sibling.run("sleep 1000", timeout_s=1000)
        with pytest.raises(ComputerLost):
            await box.read("/etc/passwd")
        for _ in range(2):
            async with pool.computer() as other:
                assert host_of(other) != lost.pid
                assert await output(other, "echo fine") == "fine\n"
        await until(lambda: not any(f"-computer-{lost.pid}-" in name for name in containers()))


CLIENT = """
import anyio, sys
from agentloop.sandbox import Pool, PoolSettings
async def main():
    async with Pool(PoolSettings(hosts=sys.argv[1:])) as pool, pool.computer() as box:
        async with box.fork() as sibling:
            print(f"{box.container_name} {sibling.container_name}", flush=True)
            await sibling.run("trap '' INT TERM; sleep 1000", timeout_s=1000)
anyio.run(main)
"""


async def test_nothing_is_left_of_a_client_that_is_killed(hosts: Hosts) -> None:
    url = next(iter(hosts.urls.values()))
    client = [sys.executable, "-c", CLIENT, url]
    async with await anyio.open_process(client, stderr=None) as process:
        try:
            assert process.stdout is not None
            with anyio.fail_after(patient(60)):
                names = set((await process.stdout.receive()).decode().split())
            assert names <= set(containers())
            assert len(names) == 2
        finally:
            process.kill()
    await until(lambda: names.isdisjoint(containers()))
    await until(lambda: not any(map(hosts.num_computers, hosts.urls)))


@pytest.mark.gate
async def test_harbor_rollout_on_a_killed_host_has_no_reward(two: Hosts, tmp_path: Path) -> None:
    for name, text in FILES.items():
        path = tmp_path / "hello" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (row,) = harbor.rows(folder=str(tmp_path))
    environment = harbor.task.with_arguments({"folder": str(tmp_path)})
    used: list[int] = []

    def script(past: object) -> agentloop.Message | str:
        if len(used) > 1:
            return "Done."
        alive = [pid for pid, process in two.processes.items() if process.poll() is None]
        used.append(next(pid for pid in alive if two.num_computers(pid)))
        if len(used) == 1:
            two.processes[used[0]].kill()
        return agentloop.call("bash", command="echo hello $NAME > hello.txt")

    async with Pool(two.settings) as pool:
        lost = await agentloop.play(environment, row, script, pool=pool)
        again = await agentloop.play(environment, row, script, pool=pool)
    assert lost.reward.value is None
    assert "the computer was lost: the connection to the host" in lost.reward.reason
    (trajectory,) = lost.record.trajectories
    assert trajectory.stop_reason is StopReason.INFRASTRUCTURE
    assert again.reward.value == 1
    assert used[1] != used[0]
