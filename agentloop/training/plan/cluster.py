"""A training run on a Ray cluster (`cluster.address`): its plan, and its processes.

    settings + nodes ──> placements ──> a table (--dry-run), or a PlacedRun
    PlacedRun ──> servers and sandbox hosts ──URLs, key and token──> the runtime, in this process
              ├─> or runtimes, each with servers and a sandbox of its own (`cluster.runtimes`)
              └─> ranks ──> the learner's client; before all this, ranks of the fine-tuning (`sft`)

The servers' key and the sandboxes' token are drawn for each run and never written to its folder.
"""

from __future__ import annotations

import math
import re
import secrets
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pydantic

from agentloop.aio import task_group
from agentloop.errors import ModelError, SettingsError
from agentloop.inference.processes.keep_alive import keep_alive
from agentloop.models import SMALL
from agentloop.runtime import Runtime, Settings
from agentloop.sandbox import PoolSettings
from agentloop.training.cluster.placed import (
    PlacedRun,
    PlacedServer,
    rank_launch,
    sandbox_launch,
    server_launch,
)
from agentloop.training.cluster.placement import (
    ClusterNode,
    Placement,
    PlacementError,
    ProcessKind,
    RunProcess,
    learner_processes,
    place,
    processes_of,
    shares,
)
from agentloop.training.cluster.ray_cluster import RayCluster, Spot
from agentloop.training.cluster.rollout_host import OpenedRollouts, OpenRollouts, RolloutActor
from agentloop.training.cluster.runtimes import RemoteRuntimes, StartActor
from agentloop.training.learner_client.client import learner_command
from agentloop.training.learner_client.launch import RanksSettings, starts
from agentloop.training.plan.resources import Machine, plan, this_machine
from agentloop.training.plan.settings import TrainSettings, fine_tuning, with_server_options

_SHAPE = re.compile(
    r"(?P<nodes>\d+)x(?P<cpus>\d+)(,(?P<gpus>\d+)(x(?P<gib>\d+))?)?(,(?P<ram>\d+))?"
)
_MOST = 1 << 60
_GIB = 1 << 30
_POLL_S = 1.0
_CALLS_PER_CPU = 4  # of the sandbox: most wait, such as for the next turn


def cluster_problems(s: TrainSettings) -> Iterator[str]:
    """Yield what contradicts the settings of the cluster.

    Raises:
        SettingsError: there is no cluster, but ranks on several machines.
    """
    if s.weights.local_folder is not None and not s.cluster.runtimes:
        yield "weights.local_folder: omit it without cluster.runtimes, of which each keeps a copy"
    if not s.cluster.address:
        if s.cluster.runtimes:
            yield "cluster.runtimes: they need a Ray cluster: set cluster.address"
        s.ranks.require_one_machine()
        return
    if s.servers:
        yield "servers: on a cluster, server.count of them are started: omit it"
    if s.cluster.runtimes > s.server.count:
        yield (
            f"cluster.runtimes: {s.cluster.runtimes} must be at most server.count "
            f"({s.server.count}): each runtime has servers of its own"
        )
    if s.sandbox.hosts and s.cluster.sandbox_hosts and not s.cluster.runtimes:
        yield "sandbox.hosts: set cluster.sandbox_hosts to 0 to use these"
    if s.weights.transport == "broadcast" and s.cluster.runtimes:
        yield (
            "weights.transport: set it to disk with cluster.runtimes: the learner can share a "
            "process group only with servers that the trainer itself can ask to join it"
        )
    if s.weights.transport == "broadcast" and s.cluster.colocated:
        yield (
            "weights.transport: set it to disk with cluster.colocated: members of a process group "
            "must not share a GPU"
        )


def on_hosts(pool: PoolSettings, urls: Sequence[str], token: str) -> PoolSettings:
    """Return the settings of a pool that runs all calls on these hosts, and none on its own node,
    which may have a host, too."""
    changes = {"backend": "auto", "engines": [], "hosts": [*urls]}
    return pool.model_copy(update={**changes, "hosts_token": pydantic.SecretStr(token)})


def nodes_from(shapes: Sequence[str]) -> list[ClusterNode]:
    """Return simulated nodes, such as `8x128,8x80,2048`: 8 nodes of 128 CPUs, 8 GPUs of 80 GiB and
    2,048 GiB of memory. All but nodes and CPUs may be left out.

    Raises:
        SettingsError: a shape is not of this form.
    """
    nodes: list[ClusterNode] = []
    for shape in shapes:
        match = _SHAPE.fullmatch(shape.replace(" ", ""))
        if match is None:
            raise SettingsError(
                f"--shape: {shape!r} is not of the form NODESxCPUS, NODESxCPUS,GPUS or "
                "NODESxCPUS,GPUSxGIB,GIB, such as 8x128,8x80,2048"
            )
        cpus, gpus, gib, ram = (int(match[key] or 0) for key in ("cpus", "gpus", "gib", "ram"))
        for _ in range(int(match["nodes"])):
            name = f"node-{len(nodes) + 1}"
            nodes.append(ClusterNode(name, cpus, gpus, ram * _GIB, gib * _GIB))
    return nodes


class ClusterPlan:
    """The placements of a run's processes on some nodes.

    Attributes:
        settings: The run's settings, with the device that the nodes have.
        machine: A node, as one machine for the estimates of a plan.
        sft_ranks: Settings of the ranks of the run's supervised fine-tuning, which comes before
            all but the trainer.
        sft_placements: The placements of the trainer and these ranks; empty without `sft`.
    """

    def __init__(self, settings: TrainSettings, nodes: Sequence[ClusterNode], home: str) -> None:
        """Place the processes. Blocks for some tenths of a second.

        Raises:
            PlacementError: some have no place.
        """
        server = settings.server
        if server.device == "auto":
            device = "cuda" if any(node.num_gpus for node in nodes) else "cpu"
            server = server.model_copy(update={"device": device})
        self.settings = with_server_options(settings.model_copy(update={"server": server}))
        server = self.settings.server
        self.machine = Machine(
            ram_bytes=min((node.memory_bytes or _MOST for node in nodes), default=_MOST),
            disk_free_bytes=this_machine(settings.run.folder).disk_free_bytes,
            num_gpus=sum(node.num_gpus for node in nodes),
            gpu_bytes=min((node.gpu_bytes for node in nodes if node.num_gpus), default=0),
        )
        server_bytes, rank_bytes = self._host_memory()
        processes = processes_of(
            settings.cluster,
            server,
            settings.ranks,
            num_sandbox_cpus=0
            if settings.sandbox.hosts
            else math.ceil(settings.sandbox.workers / _CALLS_PER_CPU),
            on_gpus=server.device == "cuda",
            server_bytes=server_bytes,
            rank_bytes=rank_bytes,
        )
        self.placements = place(processes, nodes, home=home, colocated=settings.cluster.colocated)
        self.sft_ranks, self.sft_placements = settings.ranks, list[Placement]()
        if (before := fine_tuning(settings)) is not None:
            self.sft_ranks = before.training.ranks
            ranks = learner_processes(
                self.sft_ranks, on_gpus=server.device == "cuda", rank_bytes=rank_bytes
            )
            self.sft_placements = place(ranks, nodes, home=home)

    def _host_memory(self) -> tuple[int, int]:
        """Return the host memory of a server and of a rank; 0 if it is unknown."""
        try:
            made = plan(self.settings, self.machine)
        except (SettingsError, ModelError):
            return 0, 0
        if not made.on_gpus:
            return made.server.weights + (made.server.kv_cache or 0), made.learner.total
        num_local = self.settings.ranks.nproc_per_node
        return 0, max(made.learner.loading // num_local, made.learner.offloaded)

    def rows(self) -> list[dict[str, Any]]:
        """Return the table: processes of one kind and node, their GPUs, CPUs, and command."""
        return [
            *self._rows(self.sft_placements[1:], self.sft_ranks, "sft "),
            *self._rows(self.placements, self.settings.ranks),
        ]

    def lines(self) -> Iterator[str]:
        """Return the table and the commands as text, one line each."""
        rows = self.rows()
        yield "placement"
        widths = [max(len(str(row[key])) for row in rows) for key in ("process", "node")]
        for row in rows:
            gpus = f", GPUs {_ranges(row['gpus'])}" if row["gpus"] else ""
            yield (
                f"  {row['process']:<{widths[0]}}  {row['node']:<{widths[1]}}  "
                f"{row['cpus']:g} CPUs{gpus}"
            )
        yield "commands   which Ray's actors run; ports, key and token are drawn at the start"
        for row in rows:
            if row["command"]:
                yield f"  {row['process']}: {row['command']}"

    def _rows(
        self, placements: Sequence[Placement], ranks: RanksSettings, before: str = ""
    ) -> Iterator[dict[str, object]]:
        for group in (list(group) for _, group in groupby(placements, key=_place)):
            names = [placement.process.name for placement in group]
            yield {
                "process": before + (names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"),
                "node": group[0].node,
                "cpus": sum(placement.process.num_cpus for placement in group),
                "gpus": sorted({gpu for placement in group for gpu in placement.gpus}),
                "command": self._command(group[0], ranks),
            }

    def _command(self, placement: Placement, ranks: RanksSettings) -> str:
        s, logs = self.settings, Path("logs")
        spot = Spot("127.0.0.1", tuple(map(str, placement.gpus)))
        name, kind = placement.process.name, placement.process.kind
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(spot.gpus)} if spot.gpus else {}
        if kind is ProcessKind.SERVER:
            launch = server_launch(str(s.model or SMALL), s.server, name, logs / "x", "KEY", spot)
        elif kind is ProcessKind.SANDBOX:
            launch = sandbox_launch("{}", 1, name, logs / "x", "TOKEN", spot)
            variables["SANDBOX_HOST"] = spot.address
        elif kind is ProcessKind.RANK:
            all_starts = starts(
                ranks, learner_command(Path("learner.json")), socket_path=Path("socket"), port=1
            )
            start = next(start for start in all_starts if start.name == name)
            launch = rank_launch(start, logs / "x", spot)
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
            variables |= {name: launch.environment[name] for name in names}
        else:
            return ""
        words = [
            *(f"{name}={value}" for name, value in variables.items()),
            *("python", *launch.command[1:]),
        ]
        return shlex.join(word.replace(spot.address, placement.node) for word in words)


async def plan_on_cluster(
    settings: TrainSettings, shapes: Sequence[str]
) -> tuple[ClusterPlan | None, str]:
    """Place a run on simulated nodes, or on the cluster at `cluster.address` if there are none.

    Returns:
        The plan, or None and why there is none.
    """
    try:
        if shapes:
            nodes = nodes_from(shapes)
            home = nodes[0].name if nodes else ""
        else:
            async with RayCluster.join(settings.cluster) as cluster:
                nodes, home = await cluster.nodes(), cluster.home
        return await anyio.to_thread.run_sync(ClusterPlan, settings, nodes, home), ""
    except SettingsError as error:
        return None, str(error)


class OnCluster:
    """The processes of a run on a cluster, for the parts of the run that use them.

    Attributes:
        settings: The run's settings, with the device of the nodes and absolute paths.
    """

    def __init__(
        self, settings: TrainSettings, run: PlacedRun, fine_tuning: PlacedRun, log_dir: Path
    ) -> None:
        address = run.home_address  # rank 0 is on this node
        ranks = settings.ranks.model_copy(update={"address": address})
        weights = settings.weights.model_copy(
            update={"address": settings.weights.address or address}
        )
        self.settings = settings.model_copy(update={"ranks": ranks, "weights": weights})
        self.spawn_rank = run.spawn_rank
        self.spawn_sft_rank = fine_tuning.spawn_rank
        self._run = run
        self._log_dir = log_dir
        self._servers: list[PlacedServer] = []
        self._hosts: list[PlacedServer] = []
        self._runtimes: RemoteRuntimes | None = None

    @property
    def servers_first(self) -> bool:
        """Return whether servers have to start before the ranks, with which they share GPUs."""
        return self.settings.cluster.colocated and self.settings.server.device == "cuda"

    @asynccontextmanager
    async def start_services(
        self, settings: Settings, *, say: Callable[[str], None]
    ) -> AsyncIterator[Settings]:
        """Start servers and sandbox hosts; yield the settings of a runtime that uses them.

        Raises:
            ServerStartError: one cannot be started.
        """
        key, token = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        pool = settings.sandbox.model_dump_json(exclude={"hosts", "hosts_token"})
        makes = {}
        for placement in self._run.placements:
            name = placement.process.name
            log_path = self._log_dir / f"{name.replace(' ', '-')}.log"
            if placement.process.kind is ProcessKind.SERVER:
                model, server = str(settings.model or SMALL), self.settings.server
                makes[name] = partial(server_launch, model, server, name, log_path, key)
            elif placement.process.kind is ProcessKind.SANDBOX:
                timeout_s = settings.server.start_timeout_s
                makes[name] = partial(sandbox_launch, pool, timeout_s, name, log_path, token)
        async with self._run.servers(makes, say=say) as started:
            self._servers = [server for server in started if server.model_path]
            self._hosts = [server for server in started if not server.model_path]
            update: dict[str, object] = {
                "servers": [server.url for server in self._servers],
                "servers_key": pydantic.SecretStr(key),
            }
            if self._hosts:
                urls = [server.url for server in self._hosts]
                update["sandbox"] = on_hosts(settings.sandbox, urls, token)
            yield settings.model_copy(update=update)

    @asynccontextmanager
    async def runtimes(
        self,
        settings: Settings,
        open_rollouts: Callable[[Settings], AbstractAsyncContextManager[OpenedRollouts]],
        group_size: int,
        say: Callable[[str], None],
    ) -> AsyncIterator[RemoteRuntimes]:
        """Start the runtimes of `cluster.runtimes`, and restart those that are lost.

        Args:
            settings: those of all runtimes, which share the servers.
            open_rollouts: opens a runtime with its settings on its node.

        Raises:
            ServerError: one cannot be started the first time, or the last one was given up.
        """
        runtimes = RemoteRuntimes(
            group_size=group_size, max_restarts=settings.server.max_restarts, say=say
        )
        starts: dict[str, StartActor] = {}
        opens: dict[str, OpenRollouts] = {}
        counts = shares(settings.server.count, self.settings.cluster.runtimes)
        for number, count in enumerate(counts):
            name = f"runtime {number + 1}"
            server = settings.server.model_copy(update={"count": count, "port": 0})
            log_dir = self._log_dir / name.replace(" ", "-")
            runtime_settings = settings.model_copy(update={"server": server, "log_dir": log_dir})
            starts[name] = partial(self._run.start_actor, name, RolloutActor)
            opens[name] = partial(open_rollouts, runtime_settings)
        self._runtimes = runtimes
        async with runtimes.running(starts, opens):
            yield runtimes

    @asynccontextmanager
    async def leaving_nodes(
        self, move_learner: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[None]:
        """While the block runs, let all processes leave nodes that are about to be taken away.

        Args:
            move_learner: writes a checkpoint and restarts the ranks.
        """

        async def leave(processes: Sequence[RunProcess]) -> None:
            names = {process.name for process in processes}
            if processes[0].kind is ProcessKind.RANK:
                await move_learner()
            for name in names:
                if self._runtimes is not None:
                    self._runtimes.leave(name)
            for server in (*self._servers, *self._hosts):
                if server.name in names:
                    await server.stop()  # it is restarted as if it had died

        async with task_group(only_first=True) as tasks:
            tasks.start_soon(self._run.leave_draining, leave)
            yield
            tasks.cancel_scope.cancel()

    @asynccontextmanager
    async def kept_alive(self, runtime: Runtime) -> AsyncIterator[None]:
        """Restart servers and hosts that die while the block runs.

        Raises:
            ServerError: the last server, or the last host, was given up.
        """

        async def server_moved(old: str, new: str) -> None:
            await runtime.add_server(new)
            runtime.retire_server(old)

        async def host_moved(old: str, new: str) -> None:
            runtime.pool.move_host(old, new)

        for server in self._servers:
            server.moved = server_moved
        for host in self._hosts:
            host.moved = host_moved
        settings, replicas = self.settings.server, runtime.router.replicas
        async with task_group(only_first=True) as tasks:
            tasks.start_soon(keep_alive, self._servers, settings, replicas)
            tasks.start_soon(keep_alive, self._hosts, settings, _Hosts(len(self._hosts)))
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()


async def plan_when_placed(
    settings: TrainSettings, cluster: RayCluster, say: Callable[[str], None]
) -> ClusterPlan:
    """Return a plan as soon as the cluster has place for all processes.

    Raises:
        SettingsError: it has not within `cluster.wait_s`.
    """
    problem = ""
    nodes = await cluster.nodes()
    deadline = anyio.current_time() + settings.cluster.wait_s
    while True:
        try:
            return await anyio.to_thread.run_sync(ClusterPlan, settings, nodes, cluster.home)
        except PlacementError as error:
            if anyio.current_time() > deadline:
                raise
            if str(error) != problem:
                problem = str(error)
                say(f"{problem}. Waiting for more (cluster.wait_s: {settings.cluster.wait_s:g} s)")
        await anyio.sleep(_POLL_S)
        nodes = await cluster.usable()


class _Hosts:
    """The sandbox hosts for keep_alive.py. The pool notices by itself which of them are well."""

    def __init__(self, count: int) -> None:
        self._num_left = count

    def mark_exited(self, url: str, reason: str) -> None: ...

    def mark_restarting(self, url: str) -> None: ...

    def starting(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def is_dead(self, url: str) -> bool:
        return False

    def is_enabled(self, url: str) -> bool:
        return True

    def give_up(self, url: str) -> bool:
        self._num_left -= 1
        return self._num_left > 0


@asynccontextmanager
async def on_cluster(
    settings: TrainSettings, *, log_dir: Path, say: Callable[[str], None]
) -> AsyncIterator[OnCluster | None]:
    """Join the cluster and place the run; yield None if it is to run on this machine.

    `log_dir` is absolute, and the same folder on all nodes.

    Raises:
        SettingsError: there is no such cluster, or some processes have no place on it, also not
            on nodes that have joined within `cluster.wait_s`.
    """
    if not settings.cluster.address:
        yield None
        return
    async with RayCluster.join(settings.cluster) as cluster:
        say(f"Joined the Ray cluster at {settings.cluster.address}")
        made = await plan_when_placed(settings, cluster, say)
        for row in made.rows():
            say(f"{row['process']}: on {row['node']}")
        run, fine_tuning = (
            PlacedRun(cluster, settings.cluster, placements)
            for placements in (made.placements, made.sft_placements)
        )
        yield OnCluster(made.settings, run, fine_tuning, log_dir)


def _place(placement: Placement) -> tuple[str, ...]:
    alone = placement.process.kind is not ProcessKind.RANK
    return (placement.process.kind, placement.node, placement.process.name if alone else "")


def _ranges(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 1 and list(numbers) == list(range(first, last + 1)):
        return f"{first}-{last}"
    return ",".join(map(str, numbers))
