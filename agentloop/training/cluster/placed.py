"""The processes of a run on a cluster: each has a placement, and gets another if its node is lost.
A node that is about to be taken away (it drains) is left before, if others have place.

    PlacedRun ──servers──> PlacedServer ──keep_alive.py──> started again, here or elsewhere
        └──spawn_rank──> a rank, for the learner's client, which restarts all of them together

A server that starts again on its node keeps its URL. Elsewhere it gets another, of which `moved` is
told. Not covered: the trainer; when its node is lost, the run is resumed by hand.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import anyio.abc

from agentloop.aio import task_group
from agentloop.child_environment import for_our_python
from agentloop.errors import ServerError, ServerStartError
from agentloop.inference.processes.supervise import (
    Launch,
    ServerProcess,
    ServerSettings,
    all_ready,
    plan,
    stop_all,
)
from agentloop.training.cluster.placement import (
    ClusterNode,
    Placement,
    PlacementError,
    ProcessKind,
    RunProcess,
    place,
)
from agentloop.training.cluster.ray_cluster import (
    MakeLaunch,
    RayCluster,
    RemoteActor,
    RemoteProcess,
    Spot,
)
from agentloop.training.cluster.settings import ClusterSettings
from agentloop.training.learner_client.client import LearnerLost
from agentloop.training.learner_client.launch import Start, free_port

_POLL_S = 1.0
_SANDBOX_STOP_S = 15.0

Moved = Callable[[str, str], Awaitable[None]]
"""Called with the old and the new URL of a server, when the new one is ready."""


class PlacedRun:
    """The placements of a run, and the processes that are started at them."""

    def __init__(
        self, cluster: RayCluster, settings: ClusterSettings, placements: Sequence[Placement]
    ) -> None:
        self.cluster = cluster
        self._settings = settings
        self._placements = {placement.process.name: placement for placement in placements}

    @property
    def placements(self) -> list[Placement]:
        return list(self._placements.values())

    @property
    def home_address(self) -> str:
        """Address at which other nodes reach this one."""
        return self.cluster.address_of(self.cluster.home)

    @asynccontextmanager
    async def servers(
        self, makes: Mapping[str, MakeLaunch], *, say: Callable[[str], None]
    ) -> AsyncIterator[list[PlacedServer]]:
        """Start servers by their names, concurrently; yield them when all are ready.

        Raises:
            ServerStartError: one cannot be started, died, or took too long.
        """
        servers: dict[str, PlacedServer] = {}

        async def start(name: str, make: MakeLaunch) -> None:
            servers[name] = PlacedServer(self, name, make, *await self.start(name, make))

        try:
            async with task_group(only_first=True) as tasks:
                for name, make in makes.items():
                    tasks.start_soon(start, name, make)
            ordered = [servers[name] for name in makes]
            await all_ready(ordered, say)
            yield ordered
        finally:
            await stop_all(list(servers.values()))

    async def spawn_rank(self, start: Start, log_path: Path) -> anyio.abc.Process:
        """Start a rank of the learner (`learner_client.client.Spawn`).

        Raises:
            LearnerLost: there is no place for it at the moment, or it cannot be started.
        """
        try:
            make = partial(rank_launch, start, log_path)
            _, process = await self.start(start.name, make)
        except ServerStartError as error:
            raise LearnerLost(str(error)) from error
        return process

    async def start(
        self, name: str, make: MakeLaunch, *, before: tuple[str, int] = ("", 0)
    ) -> tuple[Launch, RemoteProcess]:
        """Start a process at its placement, or at another if the placement's node is lost.

        Args:
            before: node and port that it had; it gets this port if it is to start there again.

        Raises:
            ServerStartError: it cannot be started, or there is no place within `cluster.wait_s`.
        """
        placement = await self._placement(name)
        port = before[1] if before[0] == placement.node else 0
        shares = placement.process.kind is ProcessKind.RANK and any(
            server.node == placement.node and set(placement.gpus) & set(server.gpus)
            for server in self.placements
            if server.process.kind in (ProcessKind.SERVER, ProcessKind.RUNTIME)
        )
        return await self.cluster.start(placement, make, port=port, shares_gpus=shares)

    async def start_actor(self, name: str, made: type) -> RemoteActor:
        """Start an actor at its placement, or at another if the placement's node is lost.

        Raises:
            ServerStartError: it cannot be started, or there is no place within `cluster.wait_s`.
        """
        return await self.cluster.start_actor(await self._placement(name), made)

    def node_of(self, name: str) -> str:
        return self._placements[name].node

    async def leave_draining(
        self, leave: Callable[[list[RunProcess]], Coroutine[object, object, None]]
    ) -> None:
        """Give the processes of nodes that drain other placements, as soon as there is place for
        them, until cancelled.

        Args:
            leave: called with those that have to leave their node together.
        """
        async with task_group() as tasks:
            while True:
                nodes = await self.cluster.usable()
                leaving = [
                    placement.process
                    for placement in self.placements
                    if placement.node in self.cluster.draining
                ]
                for _, group in groupby(leaving, lambda process: process.block or process.name):
                    block = list(group)
                    with suppress(PlacementError):  # there may be place later
                        self._place_again(block, nodes)
                        tasks.start_soon(leave, block)
                await anyio.sleep(_POLL_S)

    async def _placement(self, name: str) -> Placement:
        """Return the placement of a process; if its node is lost, find another one first."""
        deadline = anyio.current_time() + self._settings.wait_s
        while True:
            nodes = await self.cluster.usable()
            placement = self._placements[name]
            if placement.node in {node.name for node in nodes}:
                return placement
            try:
                self._place_again([placement.process], nodes)
            except PlacementError as error:
                if anyio.current_time() > deadline:
                    raise ServerStartError(
                        f"{error} ({self._settings.wait_s:g} s after {placement.node} was lost)"
                    ) from error
                await anyio.sleep(_POLL_S)

    def _place_again(self, processes: Sequence[RunProcess], nodes: Sequence[ClusterNode]) -> None:
        """Find other placements on these nodes, all or none. Raises PlacementError."""
        names, moving = {node.name for node in nodes}, {process.name for process in processes}
        placements = place(
            processes,
            nodes,
            home=self.cluster.home,
            colocated=self._settings.colocated,
            kept=[
                placement
                for name, placement in self._placements.items()
                if placement.node in names and name not in moving
            ],
        )
        self._placements |= {placement.process.name: placement for placement in placements}


class PlacedServer(ServerProcess):
    """A server or a sandbox host at its placement.

    Attributes:
        name: name of its process.
        moved: told of another URL after a restart; None: nobody is.
    """

    def __init__(
        self,
        run: PlacedRun,
        name: str,
        make: MakeLaunch,
        launch: Launch,
        process: RemoteProcess,
    ) -> None:
        super().__init__(launch, process)
        self._run = run
        self.name = name
        self._make = make
        self._node = run.node_of(name)
        self._url = launch.url  # the one that its users know
        self.moved: Moved | None = None

    @property
    def url(self) -> str:
        return self._url

    async def restart(self, on_progress: Callable[[str], None]) -> None:
        """Restart it on its node, or elsewhere if the node is lost.

        Raises:
            ServerStartError: as in `ServerProcess.restart`, or it cannot be used.
        """
        await self._guardian.aclose()
        self._set_log_aside()
        self._pid = None
        before = self._node, urlsplit(self.launch.url).port or 0
        self.launch, self._guardian = await self._run.start(self.name, self._make, before=before)
        self._node = self._run.node_of(self.name)
        await self.ready(on_progress)
        new = self.launch.url
        if new != self._url and self.moved is not None:
            try:
                await self.moved(self._url, new)
            except ServerError as error:
                raise ServerStartError(f"{self.name} at {new}: {error}") from error
        self._url = new


def server_launch(
    model: str, settings: ServerSettings, name: str, log_path: Path, key: str, spot: Spot
) -> Launch:
    """Return the start of an SGLang server at a spot. `settings.device` is not auto."""
    settings = settings.model_copy(update={"count": 1, "port": spot.port})
    (launch,) = plan(model, settings, log_dir=log_path.parent, host=spot.address, key=key)
    return replace(launch, name=name, log_path=log_path)


def sandbox_launch(
    pool: str, start_timeout_s: float, name: str, log_path: Path, token: str, spot: Spot
) -> Launch:
    """Return the start of a sandbox host at a spot. `pool` is its pool's settings as JSON."""
    port = spot.port or free_port()
    environment = {
        "SANDBOX_HOST": spot.address,
        "SANDBOX_PORT": str(port),
        "SANDBOX_TOKEN": token,
        "SANDBOX_POOL": pool,
    }
    return Launch(
        name=name,
        command=(sys.executable, "-m", "agentloop.sandbox.serve"),
        environment={**for_our_python(), **environment},
        url=f"http://{spot.address}:{port}",
        model_path="",
        log_path=log_path,
        start_timeout_s=start_timeout_s,
        stop_timeout_s=_SANDBOX_STOP_S,
        ready_path="/healthz",
    )


def rank_launch(start: Start, log_path: Path, spot: Spot) -> Launch:
    """Return the start of a rank at a spot; on GPUs it sees only its own."""
    local = {"LOCAL_RANK": "0"} if spot.gpus else {}
    return Launch(
        name=start.name,
        command=(sys.executable, *start.command[1:]),
        environment={**for_our_python(), **start.environment, **local},
        url="",
        model_path="",
        log_path=log_path,
        start_timeout_s=0,
        stop_timeout_s=0,
    )
