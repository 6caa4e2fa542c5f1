"""`agentloop train` on a Ray cluster, of which processes and nodes are killed: for bench/kill.py.

Each node has a network, a file system for temporary files, shared memory, and process ids of its
own (Linux namespaces), so that losing it is like a machine's loss of power, or of its network.
What is lost comes back after a while, as a new node. Nobody intervenes: the command runs once.

Needs root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random

from bench.kill_checks import problems, tail
from bench.kill_real import (
    AGENTS,
    OVERRIDES,
    RECIPE,
    TASKS_PER_STEP,
    RealRun,
    descendants,
    losses_of,
    modules_of,
    of_infrastructure,
    of_the_learner,
    progress_of,
)

__all__ = ["CLUSTER_VICTIMS", "nodes_apart", "play_on_cluster"]

CLUSTER_VICTIMS = ("node", "rank", "server", "drain", "runtime", "cut", "host", "trainer")
_NUM_NODES = 3
_NUM_CPUS = 6  # of a node, as Ray counts them
_HEAD_PORT = 6379
_UP = "This command will now block forever"
_START_S = 600.0  # of a node, on a busy machine
_STILL_S = 900.0  # without output: then it hangs
_AWAY_S = (5.0, 40.0)  # how long a node stays away
_RETRY_S = 60.0  # before another try to start a node
_LEFT_S = 60.0
_POLL_S = 0.5
_MODULES = {
    "rank": "agentloop.learner",
    "server": "agentloop.inference.processes.keyed",
    "host": "agentloop.sandbox.serve",
}
_RAY = {
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "120",
    "RAY_worker_niceness": "0",
    "RAY_agent_register_timeout_ms": "300000",
}
_INSIDE = """
mount --bind "$1" "$2" && mount --bind "$1/hosts" /etc/hosts && mount -t tmpfs tmpfs /dev/shm &&
ip link set lo up && hostname "$3" && shift 3 || exit 9
"$@" & wait
"""


class Node:
    """A machine of the cluster."""

    def __init__(self, network: Network, folder: Path, number: int) -> None:
        self.name = f"node-{number}"
        self.number = number
        self._network, self._folder = network, folder
        self._process: subprocess.Popen[bytes] | None = None
        self._log = folder / f"{self.name}.log"
        network.connect(number)

    def start(self) -> None:
        """Start the node; it is up when `is_up` says so."""
        scratch = self._folder / self.name
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        address = self._network.address(self.number)
        (scratch / "hosts").write_text(f"127.0.0.1 localhost\n{address} {self.name}\n")
        shared = self._folder / "tmp"
        head = f"{self._network.address(1)}:{_HEAD_PORT}"
        options = [f"--address={head}"]
        if self.number == 1:
            options = ["--head", f"--port={_HEAD_PORT}", f"--temp-dir={shared}/ray"]
            # Less to start: a node that has not started after half a minute gives up.
            options += ["--include-dashboard=false", "--no-monitor"]
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options]
        ray += ["--disable-usage-stats", f"--node-ip-address={address}", "--num-gpus=0"]
        ray += [f"--num-cpus={_NUM_CPUS}", "--object-store-memory=80000000"]
        ray += ["--include-log-monitor=false"]
        inside = ["bash", "-c", _INSIDE, "bash", str(scratch), str(shared), self.name, *ray]
        apart = ["--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--uts"]
        self._network.set_link(self.number, up=True)
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    self._network.name(self.number),
                    "unshare",
                    *apart,
                    *inside,
                ],
                stdout=out,
                stderr=out,
                env=os.environ | _RAY | {"TMPDIR": str(shared)},
            )

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def is_up(self) -> bool:
        return self.is_running and _UP in self._log.read_text("utf-8", "replace")

    def ensure_up(self) -> None:
        """Wait until the node is up; start it until it is."""
        self.set_link(up=True)
        deadline = time.monotonic() + _START_S
        while not self.is_up():
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.name} does not start: {tail(self._log)}")
            if not self.is_running:
                self.start()
            time.sleep(_POLL_S)

    def pids(self) -> list[int]:
        """Return the node's processes, the first of which holds its namespaces."""
        return [*descendants(self._process.pid)] if self._process and self.is_running else []

    def enter(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs another on the node."""
        spaces = ["--mount", "--net", "--pid", "--uts"]
        return ["nsenter", f"--target={self.pids()[0]}", *spaces, *command]

    def set_link(self, *, up: bool) -> None:
        self._network.set_link(self.number, up=up)

    def lose(self) -> None:
        """End the node as a loss of power does: no peer gets a word of it."""
        self.set_link(up=False)
        self.stop()

    def stop(self) -> None:
        if self._process is not None:
            for pid in self.pids()[:1]:  # the first of its process ids: the kernel kills the others
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait(_LEFT_S)

    def drain(self) -> None:
        """Announce the node's end, as a cloud or SLURM does."""
        for pid in self.pids():
            if "ray.scripts.scripts" in modules_of(pid):
                os.kill(pid, signal.SIGTERM)


class Network:
    """A switch and its links, in network namespaces."""

    def __init__(self) -> None:
        self._prefix = f"al{os.getpid() % 10_000}"
        self._numbers: list[int] = []
        _ip("netns", "add", self._prefix)
        self._switch("link", "add", "switch", "type", "bridge")
        self._switch("link", "set", "switch", "up")

    def name(self, number: int) -> str:
        return f"{self._prefix}-{number}"

    def address(self, number: int) -> str:
        return f"10.77.0.{number}"

    def connect(self, number: int) -> None:
        name, port = self.name(number), f"port{number}"
        _ip("netns", "add", name)
        self._numbers.append(number)
        self._switch("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        self._switch("link", "set", port, "master", "switch")
        _ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "route", "add", "default", "dev", "eth0")
        self.set_link(number, up=True)

    def set_link(self, number: int, *, up: bool) -> None:
        self._switch("link", "set", f"port{number}", "up" if up else "down")

    def remove(self) -> None:
        for number in self._numbers:
            _ip("netns", "del", self.name(number))
        _ip("netns", "del", self._prefix)

    def _switch(self, *words: str) -> None:
        _ip("-n", self._prefix, *words)


@contextmanager
def nodes_apart() -> Iterator[list[Node]]:
    """Yield the nodes of a cluster, and remove them at the end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and remove the nodes
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="alk-", dir="/tmp"))  # short: sockets are in it
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        (folder / "tmp").mkdir()
        network = Network()
        stack.callback(network.remove)
        nodes = [Node(network, folder, number + 1) for number in range(_NUM_NODES)]
        for node in nodes:
            stack.callback(node.stop)
        yield nodes


def play_on_cluster(
    nodes: Sequence[Node],
    run: Path,
    seed: int,
    *,
    num_steps: int,
    max_staleness: int,
    victims: Sequence[str],
) -> RealRun:
    """Run to completion, with one or two of `victims` killed, which rotate with the seed."""
    draw, started = Random(seed), time.monotonic()
    played = RealRun(run)
    max_progress = num_steps * (TASKS_PER_STEP + 2)
    blows = [
        (
            victims[(seed + number) % len(victims)],
            1 + int(max_progress * (number + draw.random()) / 2),
        )
        for number in range(draw.randint(1, 2))
    ]
    has_runtimes = any(victim == "runtime" for victim, _ in blows) or draw.random() < 0.3
    overrides = [
        *OVERRIDES,
        *(f"loop.steps={num_steps}", f"loop.max_staleness={max_staleness}"),
        *("ranks.nodes=2", "ranks.nproc_per_node=1", "server.count=2", "server.device=cpu"),
        *("sandbox.backend=process", "sandbox.workers=2", "page=false"),
        f"cluster.runtimes={2 * has_runtimes}",
        *("cluster.sandbox_hosts=2", f"cluster.nodes={_NUM_NODES}", "cluster.wait_s=300"),
        *("server.start_timeout_s=900", "ranks.start_timeout_s=300"),
        *(AGENTS[seed % len(AGENTS)], f"run.folder={run.parent}", f"run.name={run.name}"),
    ]
    for node in nodes:
        node.ensure_up()
    _train(played, nodes, overrides, blows, draw)
    if not played.problems:
        played.problems += [*problems(run), *of_the_learner(run, losses_of(run))]
        played.problems += of_infrastructure(played)
    if not played.problems and not played.num_calls:
        played.problems.append("the sandbox has run no calls")
    played.seconds = time.monotonic() - started
    return played


def _train(
    played: RealRun,
    nodes: Sequence[Node],
    overrides: Sequence[str],
    blows: list[tuple[str, int]],
    draw: Random,
) -> None:
    run, home = played.run, nodes[0]
    log = run.with_name(f"{run.name}.log")
    command = [sys.executable, "-m", "agentloop", "train", str(RECIPE), *overrides]
    command.append(f"cluster.address={home._network.address(1)}:{_HEAD_PORT}")
    with log.open("wb") as out:
        trainer = subprocess.Popen(
            home.enter(command),
            stdout=out,
            stderr=out,
            env=os.environ | {"TMPDIR": str(home._folder / "tmp")},
        )
    signs = (log, run / "queue.sqlite-wal")
    heard, heard_s = list[int](), time.monotonic()
    away: dict[Node, float] = {}  # and until when
    while trainer.poll() is None and time.monotonic() - heard_s < _STILL_S:
        with suppress(FileNotFoundError):
            if heard != (heard := [sign.stat().st_mtime_ns for sign in signs if sign.exists()]):
                heard_s = time.monotonic()
        if blows and progress_of(run) >= blows[0][1]:
            victim, at = blows.pop(0)
            time.sleep(draw.random())
            if where := _kill(victim, trainer.pid, nodes, away, draw):
                played.fell.append(f"{victim} at effect {at}: {where}")
                print(f"     {played.fell[-1]}", flush=True)
        for node in nodes[1:]:
            if time.monotonic() < away.get(node, 0.0):
                continue
            if away.pop(node, None):
                node.set_link(up=True)
            if not node.is_running:
                node.start()
                away[node] = time.monotonic() + _RETRY_S  # if it fails on a busy machine
        time.sleep(_POLL_S)
    played.num_lives = log.read_text("utf-8", "replace").count("was killed by") + 1
    if trainer.poll() is None:
        played.problems.append(f"the run hung: {tail(log)}")
    elif trainer.returncode:
        played.problems.append(f"the run ended with exit status {trainer.returncode}: {tail(log)}")
    for node in nodes:
        node.set_link(up=True)
    if not played.problems:
        played.problems += _processes_left(nodes)


def _kill(
    victim: str, trainer: int, nodes: Sequence[Node], away: dict[Node, float], draw: Random
) -> str:
    """Kill the victim; return what was hit, if anything."""
    if victim in ("node", "cut", "drain"):
        here = [node for node in nodes[1:] if node not in away and node.is_up()]
        if not here:
            return ""
        node = draw.choice(here)
        what = sorted({_what(pid) for pid in node.pids()} - {""})
        away[node] = time.monotonic() + draw.uniform(*_AWAY_S)
        if victim == "cut":
            node.set_link(up=False)
        elif victim == "node":
            node.lose()
        else:
            node.drain()
        return f"{node.name} with {', '.join(what) or 'nothing'}"
    if victim == "trainer":
        pids = [pid for pid in descendants(trainer) if "agentloop" in modules_of(pid)][-1:]
    else:
        pids = [pid for node in nodes for pid in node.pids() if _what(pid) == victim]
    if not pids:
        return ""
    pid = draw.choice(pids)
    os.kill(pid, signal.SIGKILL)
    return f"process {pid}"


def _what(pid: int) -> str:
    """Return which part of a run a process is, if it is one."""
    with suppress(OSError):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::RolloutActor"):
            return "runtime"
    modules = modules_of(pid)
    return next((part for part, module in _MODULES.items() if module in modules), "")


def _processes_left(nodes: Sequence[Node]) -> Iterator[str]:
    deadline = time.monotonic() + _LEFT_S
    while left := {pid: _what(pid) for node in nodes for pid in node.pids() if _what(pid)}:
        if time.monotonic() > deadline:
            yield f"processes were left: {left}"
            return
        time.sleep(_POLL_S)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
