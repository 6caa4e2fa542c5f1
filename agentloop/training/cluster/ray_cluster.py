"""Processes and runtimes on the nodes of a Ray cluster.

    RayCluster ──one actor per process, where it is placed──> ProcessHost
        │  asks it to start, end; is told the exit status       └──stdin──> guardian ──> process
        │  the end of an actor or of its node counts as the end of its process
        └──start_actor──> RemoteActor: calls that have a result, or fail with `ActorLost`

Ray reserves the resources, reaches the nodes, and notices when a node is lost. What is restarted,
and when, is decided where it is on one machine: keep_alive.py and recovery/resume.py. When this
process ends, however it ends, Ray ends its actors, and each guardian what it guards.

Ray is imported only when a cluster is used. Every node needs the same agentloop and Ray, and the
model and the run's folder at the same paths.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.abc
import anyio.to_thread

from agentloop.distribution import require, version
from agentloop.errors import AgentLoopError, ServerStartError, SettingsError
from agentloop.inference.processes.keyed import KEY_VARIABLE
from agentloop.inference.processes.supervise import Launch, start_guarded
from agentloop.training.cluster.placement import ClusterNode, Placement
from agentloop.training.cluster.settings import ClusterSettings

if TYPE_CHECKING:
    from ray.actor import ActorHandle

T = TypeVar("T")

_POLL_S = 0.5
_STOP_S = 30.0
_KILLED = 128 + 9
_MOST_CALLS = 10_000  # of an actor at the same time; by default, Ray lets the others wait


class ActorLost(AgentLoopError):
    """An actor or its node is lost; its unfinished calls may or may not have had an effect."""


@dataclass(frozen=True, slots=True)
class Spot:
    """The place where a process starts: address, GPU ids there, and port (0: any)."""

    address: str
    gpus: tuple[str, ...] = ()
    port: int = 0


MakeLaunch = Callable[[Spot], Launch]
"""Says on the node what to start there; pickled, so made of importable functions."""


class ProcessHost:
    """A Ray actor that owns one process. Its methods run on the process's node."""

    def __init__(self) -> None:
        self._process: anyio.abc.Process | None = None

    async def start(self, make: MakeLaunch, spot: Spot, reserves: bool) -> tuple[Launch, str, Spot]:
        """Start a process; return what was started, the process id, and where.

        Args:
            reserves: the GPUs are those that Ray has reserved for this actor.
        """
        if reserves:
            spot = replace(spot, gpus=gpu_ids())
        launch = make(spot)
        environment = {**launch.environment, "CUDA_VISIBLE_DEVICES": ",".join(spot.gpus)}
        self._process = await start_guarded(
            launch.command, environment, launch.log_path, stop_timeout_s=launch.stop_timeout_s
        )
        assert self._process.stdout is not None
        pid = ""
        with suppress(anyio.EndOfStream), anyio.move_on_after(_STOP_S):
            pid = (await self._process.stdout.receive()).decode().strip()
        kept = {
            name: launch.environment[name] for name in launch.environment if name == KEY_VARIABLE
        }
        return replace(launch, environment=kept), pid, spot

    async def wait(self) -> int:
        """Wait for the end of the process; return its exit status."""
        assert self._process is not None
        return await self._process.wait()  # no deadline: as long as the process lives

    async def end(self) -> None:
        """Ask the guardian to end the process."""
        if self._process is not None and self._process.stdin is not None:
            await self._process.stdin.aclose()


class RayCluster:
    """The cluster that this process has joined as a driver.

    Attributes:
        home: name of this machine's node.
        draining: names of the other nodes that are about to be taken away, as `usable` last saw it.
    """

    def __init__(self, settings: ClusterSettings, ray: ModuleType) -> None:
        self._settings = settings
        self._ray = ray
        self._ids: dict[str, str] = {}  # Ray's ids of the nodes, by name
        self._addresses: dict[str, str] = {}
        self._gpus: dict[tuple[str, int], str] = {}  # real ids, by node and number in a placement
        self.home = ""
        self.draining: frozenset[str] = frozenset()

    @classmethod
    @asynccontextmanager
    async def join(cls, settings: ClusterSettings) -> AsyncIterator[RayCluster]:
        """Join the cluster, and leave it at the end, which ends all processes on it.

        Raises:
            SettingsError: Ray is not installed, or there is no such cluster.
        """
        cluster = cls(settings, _ray())
        await _blocking(cluster._join)
        try:
            yield cluster
        finally:
            with anyio.move_on_after(_STOP_S, shield=True):
                await _blocking(cluster._ray.shutdown)

    def _join(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            self._ray.init(
                address=self._settings.address,
                log_to_driver=False,
                configure_logging=False,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise SettingsError(
                f"cluster.address: cannot join the Ray cluster at {self._settings.address} from "
                f"this machine: {reason}. Start Ray here: `ray start --head`, or `ray start "
                "--address=HOST:PORT` to add this machine to a cluster"
            ) from error

    async def nodes(self) -> list[ClusterNode]:
        """Wait for `cluster.nodes` nodes; return those that are alive, this machine's first.

        Raises:
            SettingsError: there are fewer after `cluster.wait_s`.
        """
        nodes: list[ClusterNode] = []
        with anyio.move_on_after(self._settings.wait_s):
            # Ray tells nobody of a new node.
            while len(nodes := await self.usable()) < self._settings.nodes:  # noqa: ASYNC110
                await anyio.sleep(_POLL_S)
        if len(nodes) < self._settings.nodes:
            raise SettingsError(
                f"cluster.nodes: {self._settings.nodes}, but after cluster.wait_s "
                f"({self._settings.wait_s:g} s) the cluster has {len(nodes)}"
            )
        return nodes

    async def usable(self) -> list[ClusterNode]:
        """Return the nodes for new processes, this machine's first: those alive, unless they drain.

        Ray lets a node drain when it gets SIGTERM (`ray start --block`), and when its autoscaler or
        `ray drain-node` says so.
        """
        return await _blocking(self._usable)

    def address_of(self, node: str) -> str:
        """Return the address at which other nodes reach a node."""
        return self._addresses[node]

    def _usable(self) -> list[ClusterNode]:
        mine = self._ray.get_runtime_context().get_node_id()
        alive = [view for view in self._ray.nodes() if view["Alive"]]
        alive.sort(key=lambda view: (view["NodeID"] != mine, view["NodeID"]))
        addresses = [view["NodeManagerAddress"] for view in alive]
        drain = self._ray._private.state.state.get_draining_nodes()  # as Ray Train does
        nodes, draining = [], set[str]()
        for view, address in zip(alive, addresses, strict=True):
            # Several nodes of a test may share an address.
            name = address if addresses.count(address) == 1 else f"{address}/{view['NodeID'][:6]}"
            self._ids[name], self._addresses[name] = view["NodeID"], address
            if view["NodeID"] in drain and view["NodeID"] != mine:
                draining.add(name)
                continue
            has = view["Resources"]
            nodes.append(
                ClusterNode(
                    name, has.get("CPU", 0), int(has.get("GPU", 0)), int(has.get("memory", 0))
                )
            )
        self.home, self.draining = nodes[0].name, frozenset(draining)
        return nodes

    async def start(
        self, placement: Placement, make: MakeLaunch, *, port: int = 0, shares_gpus: bool = False
    ) -> tuple[Launch, RemoteProcess]:
        """Start a process at its placement.

        Args:
            shares_gpus: other processes have reserved its GPUs, which it uses, too.

        Raises:
            ServerStartError: the node is lost or cannot start it, or the resources were not free
                within `cluster.wait_s`.
        """
        gpus = await self._reserved(placement) if shares_gpus else ()
        spot = Spot(self.address_of(placement.node), gpus, port)
        reserves = bool(placement.gpus) and not shares_gpus
        host = await _blocking(
            partial(self._make_actor, ProcessHost, placement, len(placement.gpus) * reserves)
        )
        with self._starting(placement, host):
            launch, pid, spot = await host.start.remote(make, spot, reserves)
        self._note_gpus(placement, spot.gpus)
        return launch, RemoteProcess(self._ray, host, pid)

    async def _reserved(self, placement: Placement) -> tuple[str, ...]:
        """Wait for others to reserve the GPUs of a placement, and return their ids.

        Raises:
            ServerStartError: they were not reserved within `cluster.wait_s`.
        """
        keys = [(placement.node, gpu) for gpu in placement.gpus]
        with anyio.move_on_after(self._settings.wait_s):
            while not self._gpus.keys() >= set(keys):  # noqa: ASYNC110  # nobody tells
                await anyio.sleep(_POLL_S)
            return tuple(self._gpus[key] for key in keys)
        raise ServerStartError(
            f"{placement.process.name}: the server with which it shares GPUs of {placement.node} "
            f"was not started within {self._settings.wait_s:g} s (cluster.wait_s)"
        )

    def _note_gpus(self, placement: Placement, ids: Sequence[str]) -> None:
        numbers = zip(placement.gpus, ids, strict=False)
        self._gpus |= {(placement.node, gpu): gpu_id for gpu, gpu_id in numbers}

    async def start_actor(self, placement: Placement, made: type) -> RemoteActor:
        """Start an actor at its placement.

        Args:
            made: the actor's class, whose method `about` returns the node's version of agentloop,
                and the ids of the actor's GPUs (`gpu_ids`).

        Raises:
            ServerStartError: the node is lost, or the resources were not free within
                `cluster.wait_s`.
            SettingsError: the node has another version of agentloop.
        """
        actor = await _blocking(partial(self._make_actor, made, placement, len(placement.gpus)))
        with self._starting(placement, actor):
            theirs, gpus = await actor.about.remote()
            if theirs != version():
                raise SettingsError(
                    f"{placement.node} has agentloop {theirs} and this machine {version()}: "
                    "install the same version on all nodes"
                )
        self._note_gpus(placement, gpus)
        return RemoteActor(self._ray, actor)

    @contextmanager
    def _starting(self, placement: Placement, actor: ActorHandle) -> Iterator[None]:
        """Give an actor time to start; if it does not, kill it. Raises ServerStartError."""
        ray, started = self._ray, False
        try:
            with anyio.fail_after(self._settings.wait_s):
                yield
            started = True
        except (TimeoutError, ray.exceptions.RayError) as error:
            reason = str(error).strip().rpartition("\n")[2]
            if isinstance(error, TimeoutError):
                needs = f"{placement.process.num_cpus:g} CPUs and {len(placement.gpus)} GPUs"
                reason = (
                    f"{needs} were not free within {self._settings.wait_s:g} s (cluster.wait_s)"
                )
            raise ServerStartError(
                f"{placement.process.name} cannot be started on {placement.node}: {reason}"
            ) from error
        finally:
            if not started:
                ray.kill(actor)

    def _make_actor(self, made: type, placement: Placement, num_gpus: int) -> ActorHandle:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where = NodeAffinitySchedulingStrategy(self._ids[placement.node], soft=False)
        # Otherwise Ray kills an actor's children before a guardian has removed what it guards.
        environment = {"RAY_kill_child_processes_on_worker_exit": "0"}
        return (
            self._ray.remote(made)
            .options(
                name=None,
                num_cpus=placement.process.num_cpus,
                num_gpus=num_gpus,
                max_concurrency=_MOST_CALLS,
                scheduling_strategy=where,
                runtime_env={"env_vars": environment},
            )
            .remote()
        )


class RemoteActor:
    """An actor on a node of the cluster."""

    def __init__(self, ray: ModuleType, actor: ActorHandle) -> None:
        self._ray = ray
        self._actor = actor

    async def call(self, method: str, *arguments: object) -> object:
        """Call a method and return its result.

        Raises:
            ActorLost: the actor or its node is lost.
        """
        try:
            result: object = await getattr(self._actor, method).remote(*arguments)
        except self._ray.exceptions.RayTaskError:  # an error of the method
            raise
        except self._ray.exceptions.RayError as error:
            raise ActorLost(str(error).strip().partition("\n")[0]) from error
        return result

    def kill(self) -> None:
        """End the actor at once."""
        self._ray.kill(self._actor)


class RemoteProcess(anyio.abc.Process):
    """A process on a node, with the interface of a guardian on this machine.

    Closing its stdin ends it. Its one line on stdout is its process id on its node.
    """

    def __init__(self, ray: ModuleType, host: ActorHandle, pid: str) -> None:
        self._ray = ray
        self._host = host
        self._pid = pid
        self._status: int | None = None
        self._over = anyio.Event()
        self._loop = asyncio.get_running_loop()
        host.wait.remote().future().add_done_callback(self._on_end)

    def _on_end(self, future: Future[int]) -> None:  # in a thread of Ray's
        status = _KILLED if future.cancelled() or future.exception() else future.result()
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._record_end, status)

    def _record_end(self, status: int) -> None:
        self._status = status
        self._over.set()

    async def wait(self) -> int:
        """Wait until it has ended, or its node is lost; return its exit status."""
        await self._over.wait()  # no deadline: as long as the process lives
        return _KILLED if self._status is None else self._status

    async def aclose(self) -> None:
        """End the actor, and with it what is left of the process."""
        self.kill()

    def kill(self) -> None:
        self._ray.kill(self._host)

    def terminate(self) -> None:
        self._host.end.remote()

    def send_signal(self, signal: int) -> None:
        raise NotImplementedError("a process on another node gets no signals")

    @property
    def pid(self) -> int:
        return int(self._pid)

    @property
    def returncode(self) -> int | None:
        return self._status

    @property
    def stdin(self) -> anyio.abc.ByteSendStream | None:
        return _Stdin(self)

    @property
    def stdout(self) -> anyio.abc.ByteReceiveStream | None:
        return _Stdout(self._pid)

    @property
    def stderr(self) -> anyio.abc.ByteReceiveStream | None:
        return None


class _Stdin(anyio.abc.ByteSendStream):
    def __init__(self, process: RemoteProcess) -> None:
        self._process = process

    async def send(self, item: bytes) -> None:
        raise anyio.BrokenResourceError

    async def aclose(self) -> None:
        self._process.terminate()


class _Stdout(anyio.abc.ByteReceiveStream):
    def __init__(self, text: str) -> None:
        self._left = text.encode()

    async def receive(self, max_bytes: int = 65_536) -> bytes:
        if not self._left:
            raise anyio.EndOfStream
        text, self._left = self._left, b""
        return text

    async def aclose(self) -> None:
        pass


def gpu_ids() -> tuple[str, ...]:
    """Return the ids of the GPUs that Ray has reserved for the actor that calls this."""
    import ray

    return tuple(map(str, ray.get_runtime_context().get_accelerator_ids().get("GPU", [])))


def require_ray() -> None:
    """Check that Ray is installed, without importing it. Raises SettingsError."""
    require("ray", {"ray": "places a run on a cluster, for cluster.address"})


def _ray() -> ModuleType:
    require_ray()
    return import_module("ray")


async def _blocking(call: Callable[[], T]) -> T:
    return await anyio.to_thread.run_sync(call, abandon_on_cancel=True)
