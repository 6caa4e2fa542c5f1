"""Runtimes on a cluster with fake rollouts, whose actors are in a test's process."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc

from agentloop.aio import task_group
from agentloop.errors import ServerError
from agentloop.rollouts.metrics import GroupFigures
from agentloop.rollouts.record import ConversationRow
from agentloop.rollouts.request import GroupRequest, WaitForCapacity
from agentloop.training.cluster.ray_cluster import ActorLost
from agentloop.training.cluster.rollout_host import RolloutHost
from agentloop.training.cluster.runtimes import RemoteRuntimes
from agentloop.training.rollouts import RolledOut, RollsOut
from agentloop.training.weight_sync.disk import PublishedFolder
from agentloop.training.weight_sync.sync import Serving, SyncResult
from agentloop.training.weight_sync.transport import PublishedWeights
from agentloop.trajectory import Trajectory, Turn, VersionSpan


class Player:
    """Fakes rollouts and weight syncs of one runtime, and its actors, one after the other."""

    def __init__(self, name: str, rollouts: RollsOut | None = None) -> None:
        self.name = name
        self.actors: list[LocalActor] = []
        self.asked: list[str] = []
        self.dropped: list[str] = []
        self.versions: list[str] = []
        self.folders: list[Path] = []  # of the weights that it was to load
        self.num_stale = 0  # times that it was asked for servers without the weights
        self.checksum = "sum"
        self.sampled: str | None = None  # the version that it says it samples with
        self.error: Exception | None = None
        self.fails: ServerError | None = None  # to load weights
        self.opens: Exception | None = None  # instead of a runtime
        self.gate: anyio.Event | None = None  # groups wait for it
        self.capacity: anyio.Event | None = None
        self.died = anyio.Event()  # the last server
        self._rollouts = rollouts

    @asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[RollsOut, WaitForCapacity, Serving]]:
        """Open a runtime with these fakes (`OpenRollouts`)."""
        if self.opens is not None:
            raise self.opens
        async with anyio.create_task_group() as tasks:

            async def die() -> None:
                await self.died.wait()
                self.died = anyio.Event()
                raise ServerError("no server is left")

            tasks.start_soon(die)
            yield self._rollouts or self, self.wait_for_capacity, self
            tasks.cancel_scope.cancel()

    async def wait_for_capacity(self, size: int) -> None:
        if self.capacity is not None:
            await self.capacity.wait()

    async def run(self, request: GroupRequest) -> RolledOut:
        name = request.name
        self.asked.append(name)
        request.queued.set()
        try:
            if self.gate is not None:
                await self.gate.wait()
        except anyio.get_cancelled_exc_class():
            self.dropped.append(name)
            raise
        if self.error is not None:
            raise self.error
        version = self.sampled or self.versions[-1]
        turn = Turn([1], [0.0], [VersionSpan(version, 0, 1)])
        rows = [
            ConversationRow(
                task=request.task.id,
                rollout=index,
                reward=1.0,
                parts={"max_turns": request.budget.max_turns},
                reason=self.name,
                trajectory=Trajectory(f"{name}.{index}", [1], [turn]),
            )
            for index in range(request.size)
        ]
        return RolledOut.of(GroupFigures(has_signal=True), rows)

    async def sync(self, published: PublishedWeights, *, timeout_s: float) -> SyncResult:
        if self.fails is not None:
            raise self.fails
        self.versions.append(published.version)
        assert isinstance(published, PublishedFolder)
        self.folders.append(published.folder)
        return SyncResult(published, ["http://server"], {}, 0.0, self.checksum, num_verified=1)

    async def sync_stale(self, result: SyncResult, *, timeout_s: float) -> bool:
        self.num_stale += 1
        return True


class LocalActor:
    """A `RolloutHost` in this process. Its calls outlive their callers, as Ray's do."""

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self.host = RolloutHost()
        self.is_killed = False
        self._tasks = tasks
        self._scopes: list[anyio.CancelScope] = []

    async def call(self, method: str, *arguments: Any) -> Any:
        actual: list[Any] = []
        done = anyio.Event()

        async def run() -> None:
            try:
                with anyio.CancelScope() as scope:
                    self._scopes.append(scope)
                    actual.append(await getattr(self.host, method)(*arguments))
            finally:
                done.set()

        if method != "run":  # whose argument is a closure here
            arguments = pickle.loads(pickle.dumps(arguments))
        if not self.is_killed:
            self._tasks.start_soon(run)
            await done.wait()
        if not actual:
            raise ActorLost("it was killed")
        return pickle.loads(pickle.dumps(actual[0]))

    def kill(self) -> None:
        self.is_killed = True
        for scope in self._scopes:
            scope.cancel()


@asynccontextmanager
async def playing(
    *players: Player, max_restarts: int = 3, log: list[str] | None = None
) -> AsyncIterator[RemoteRuntimes]:
    """Run a runtime for each player while the block is open."""
    log = [] if log is None else log
    runtimes = RemoteRuntimes(group_size=2, max_restarts=max_restarts, say=log.append)

    def starting(player: Player) -> Callable[[], Any]:
        async def start() -> LocalActor:
            player.actors.append(LocalActor(actors))
            return player.actors[-1]

        return start

    async with task_group(only_first=True) as actors:
        starts = {player.name: starting(player) for player in players}
        async with runtimes.running(starts, {player.name: player.open for player in players}):
            yield runtimes
        actors.cancel_scope.cancel()
