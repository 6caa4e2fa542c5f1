"""Runs on a real Ray cluster of two nodes, of which one is lost while the run trains."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import anyio.abc
import httpx
import pytest
from anyio.streams.text import TextReceiveStream

from agentloop.training.learner_client.launch import free_port
from tests.integration.conftest import need
from tests.integration.test_train import CUT_SHORT, RECIPE
from tests.patience import patient
from tests.support import eventually

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("sglang_installed"),
]

RAY = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats")
QUICKLY = {
    # Workers are started when they are needed, and no neighbour's memory has any of them killed.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_health_check_period_ms": "1000",
}
TRIES = 10  # a node that a busy machine has not started after half a minute gives up
UP = "This command will now block forever"  # the address is there, too
AGENT = ("dashboard-agent-listen-port",)
HEAD = ("port", "ray-client-server-port")
STEPS = 3


@asynccontextmanager
async def node(log: Path, *options: str) -> AsyncIterator[tuple[subprocess.Popen[bytes], str]]:
    """A node, until the block is left; and the address that others join."""
    sizes = ["--num-gpus=0", "--object-store-memory=80000000"]
    for _ in range(TRIES):
        ports = [f"--{name}={free_port()}" for name in ("metrics-export-port", *AGENT)]
        ports += [f"--{name}={free_port()}" for name in HEAD if "--head" in options]
        process = started([*RAY, *options, *sizes, *ports], log)
        try:
            await eventually(partial(is_decided, process, log), within_s=300)
            if UP in read(log):
                yield process, "".join(re.findall(r"--address='(.+?)'", read(log))[:1])
                return
        finally:
            process.terminate()
            process.wait(patient(60))
    pytest.fail(f"Ray does not start:\n{read(log)}")


def started(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | QUICKLY)


def is_decided(process: subprocess.Popen[bytes], log: Path) -> bool:
    return process.poll() is not None or UP in read(log)


def read(path: Path) -> str:
    return path.read_text()


def children_of(pid: int) -> list[int]:
    return [int(first) for first in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def raylet_of(starter: subprocess.Popen[bytes]) -> int:
    """The process of a node without which it is lost."""
    children = children_of(starter.pid)
    (result,) = (pid for pid in children if Path(f"/proc/{pid}/comm").read_text() == "raylet\n")
    return result


def actors_of(starter: subprocess.Popen[bytes], kind: str) -> list[int]:
    """The processes of a node's actors of a class."""
    return [
        pid
        for pid in children_of(raylet_of(starter))
        if f"ray::{kind}" in Path(f"/proc/{pid}/cmdline").read_text()
    ]


def commands() -> list[str]:
    result = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            result.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return result


async def refuses_strangers(url: str, path: str) -> bool:
    async with httpx.AsyncClient(trust_env=False, timeout=patient(30)) as client:
        return (await client.get(url + path)).status_code == 401


class Output:
    """The lines that a command prints, read as far as a test has waited for them."""

    def __init__(self, stream: anyio.abc.ByteReceiveStream) -> None:
        self._stream = TextReceiveStream(stream)
        self._text = ""

    async def line(self, start: str) -> str:
        """The first line with this beginning."""
        while not (result := self.lines(start)):
            self._text += await self._stream.receive()
        return result[0]

    async def rest(self) -> str:
        async for text in self._stream:
            self._text += text
        return self._text

    def lines(self, start: str) -> Sequence[str]:
        complete = self._text.rpartition("\n")[0].splitlines()
        return [line for line in complete if line.startswith(start)]


@asynccontextmanager
async def two_nodes(
    tmp_path: Path, *, num_cpus: int = 4
) -> AsyncIterator[tuple[str, subprocess.Popen[bytes]]]:
    """A cluster of this machine: its address, and the process of the node without the trainer."""
    async with (
        one_node(tmp_path, num_cpus=num_cpus) as (_, address),
        node(tmp_path / "other.log", f"--address={address}", f"--num-cpus={num_cpus}") as (
            second,
            _,
        ),
    ):
        yield address, second


@asynccontextmanager
async def one_node(
    tmp_path: Path, *, num_cpus: int
) -> AsyncIterator[tuple[subprocess.Popen[bytes], str]]:
    """The first node of a cluster: its process, and the cluster's address."""
    if importlib.util.find_spec("ray") is None:
        need("Ray: pip install 'ray[default]'")
    # A short path, because there are sockets in it.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        head = ("--head", f"--temp-dir={folder}", "--include-dashboard=false")
        async with node(tmp_path / "head.log", *head, f"--num-cpus={num_cpus}") as result:
            yield result


def command(tmp_path: Path, address: str, *more: str) -> list[str]:
    overrides = [
        *(f"cluster.address={address}", "cluster.nodes=2", "ranks.nproc_per_node=1"),
        *(f"loop.steps={STEPS}", "loop.prompts_per_step=3", "loop.group_size=6"),
        *("loop.evaluate_every=0", "tasks.held_out=2", "loop.evaluate_tasks=2", "page=false"),
        *("roc.down_sample_to_n=4", "roc.reject_equal_reward=false"),
        *("sampling.temperature=2.5", "reward.function=tests.integration.test_train:coin"),
        *("sandbox.backend=process", "sandbox.workers=1", f"run.folder={tmp_path}"),
        *("run.name=run", "server.device=cpu"),
        # A busy machine must not fail the test.
        *("server.start_timeout_s=900", "ranks.start_timeout_s=900", "cluster.wait_s=600"),
    ]
    return [sys.executable, "-m", "agentloop", "train", str(RECIPE), *overrides, *more]


def check(tmp_path: Path, text: str) -> None:
    """Check that each step was trained on its groups once, and that nothing is left."""
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [first for first in map(json.loads, lines) if "reward" in first]
    assert [first["step"] for first in steps] == [1, 2, 3]
    assert all(first["num_learned"] == 12 for first in steps), text
    assert [first["version"] for first in steps] == [0, 1, 2]  # the weights that they began with
    ours = [first for first in commands() if "processes.keyed" in first or str(tmp_path) in first]
    assert not ours


async def test_run_survives_the_loss_of_a_server_and_sandbox_node(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as (address, second):
        run = command(tmp_path, address)
        async with await anyio.open_process(run, stderr=subprocess.STDOUT) as train:
            assert train.stdout is not None
            output = Output(train.stdout)
            server = (await output.line("server 1: ready at ")).split()[4]
            sandbox = (await output.line("sandbox 1: ready at ")).split()[4]
            assert await refuses_strangers(server, "/server_info")
            assert await refuses_strangers(sandbox, "/v1/stats")
            await output.line(f"step 1/{STEPS}")
            os.kill(raylet_of(second), signal.SIGKILL)
            text = await output.rest()
            assert await train.wait() == 0, text
    check(tmp_path, text)


async def test_run_survives_the_loss_of_its_runtime_and_node(tmp_path: Path) -> None:
    # Room for the runtime beside the trainer.
    async with two_nodes(tmp_path, num_cpus=6) as (address, second):
        copies = tmp_path / "copies"
        run = command(tmp_path, address, "cluster.runtimes=1", f"weights.local_folder={copies}")
        async with await anyio.open_process(run, stderr=subprocess.STDOUT) as train:
            assert train.stdout is not None
            output = Output(train.stdout)
            await output.line("runtime 1: ready")
            await output.line(f"step 1/{STEPS}")
            (runtime,) = actors_of(second, "RolloutActor")
            os.kill(runtime, signal.SIGKILL)
            await output.line(f"step 2/{STEPS}")
            os.kill(raylet_of(second), signal.SIGKILL)
            text = await output.rest()
            assert await train.wait() == 0, text
            assert len(output.lines("runtime 1 is lost")) == 2, text
    check(tmp_path, text)
    log = read(tmp_path / "run" / "logs" / "runtime-1" / "runtime.log")
    ports = re.findall(r"ready at http://127\.0\.0\.1:(\d+)", log)
    assert len(ports) == 3  # of a server in each of the runtime's lives
    remaining = [
        first for first in commands() if any(f" --port {port} " in first for port in ports)
    ]
    assert not remaining
    assert not list(copies.iterdir())


async def test_run_with_fine_tuning_runs_on_a_cluster(tmp_path: Path) -> None:
    """laptop.toml, cut short."""
    async with one_node(tmp_path, num_cpus=5) as (_, address):
        overrides = [*CUT_SHORT, f"cluster.address={address}", "page=false", "server.device=cpu"]
        overrides += ["sandbox.backend=process", "sandbox.workers=1", "ranks.start_timeout_s=900"]
        overrides += ["server.start_timeout_s=900", f"run.folder={tmp_path}", "run.name=run"]
        run = [sys.executable, "-m", "agentloop", "train", str(RECIPE.with_name("laptop.toml"))]
        done = await anyio.run_process([*run, *overrides], stderr=subprocess.STDOUT, check=False)
    text = done.stdout.decode()
    assert done.returncode == 0, text
    assert "sft rank 0: on " in text
    assert (tmp_path / "run" / "sft" / "model" / "model.safetensors").exists()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert {0, 1, 2} <= {json.loads(line)["step"] for line in lines}


async def test_groups_come_back_from_runtimes_of_which_one_is_killed(tmp_path: Path) -> None:
    """With fake rollouts, so that this takes seconds."""
    async with one_node(tmp_path, num_cpus=2) as (head, address):
        command = ["-m", "tests.integration.runtimes_on_ray", address, str(raylet_of(head))]
        done = await anyio.run_process([sys.executable, *command], stderr=subprocess.STDOUT)
    lines = done.stdout.decode().splitlines()
    stated = json.loads(lines[-1])
    assert stated["rows"] == sorted([str(n), f"task-{n}"] for n in range(40) for _ in range(2))
    assert stated["both"] == ["runtime 1", "runtime 2"]
    assert stated["loaded"] == ["runtime 1 http://server", "runtime 2 http://server"]
    assert len([line for line in lines if "is lost, and its groups go to others" in line]) == 1
