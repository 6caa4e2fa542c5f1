"""A runtime on a node of the cluster: a Ray actor that rolls out groups for the trainer.

    run ──opens──> rollouts and servers, as in the trainer's process without `cluster.runtimes`
    sync, sync_stale ──> its servers have the weights of a version
    wait_for_capacity, run ──> GroupResult, for the trainer's end (runtimes.py)

The methods run concurrently, on one event loop. They return errors as data, since not every
exception survives the way to another process.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import TypeVar

import anyio
from anyio.from_thread import start_blocking_portal

from agentloop import distribution
from agentloop.aio import collect_garbage_rarely, exempt_from_collection, in_run_thread
from agentloop.errors import AgentLoopError, ServerError, leaves
from agentloop.rollouts.metrics import GroupFigures
from agentloop.rollouts.request import GroupRequest, WaitForCapacity
from agentloop.training.cluster.ray_cluster import gpu_ids
from agentloop.training.rollouts import RollsOut
from agentloop.training.weight_sync.disk import PublishedFolder
from agentloop.training.weight_sync.local_copy import LocalCopy
from agentloop.training.weight_sync.sync import Serving, SyncResult
from agentloop.training.weight_sync.transport import PublishedWeights

T = TypeVar("T")

_POLL_S = 0.1
_LEVEL = 1  # of compression: the fastest

OpenedRollouts = tuple[RollsOut, WaitForCapacity, Serving]
"""What a runtime rolls out with, what waits until it may, and what serves the weights."""

OpenRollouts = Callable[[], AbstractAsyncContextManager[OpenedRollouts]]
"""Opens a runtime on its node; pickled, so made of importable functions."""


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The rollouts of a group, or the name of an `error` of agentloop/errors.py with its `message`.

    Attributes:
        lines: `RolledOut.lines`, compressed.
        versions: versions of the weights that sampled the rollouts with a reward.
    """

    lines: bytes = b""
    figures: GroupFigures = field(default_factory=GroupFigures)
    versions: frozenset[str] = frozenset()
    error: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class RuntimeSync:
    """The result of a weight sync in one runtime: parts of a `SyncResult`, or its `error`."""

    loaded: Sequence[str] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    checksum: str = ""
    num_verified: int = 0
    error: str = ""


class RolloutActor:
    """A Ray actor that holds a `RolloutHost`, on an event loop that anyio has begun.

    On Ray's own loop, what is called outside of a task, such as for the data of a stream, cannot
    use anyio.
    """

    def __init__(self) -> None:
        self._host = RolloutHost()
        self._running = start_blocking_portal(backend_options={"use_uvloop": True})
        self._portal = self._running.__enter__()  # until Ray ends this process

    async def about(self) -> tuple[str, tuple[str, ...]]:
        """Return the version of agentloop on this node, and the ids of this actor's GPUs."""
        return distribution.version(), gpu_ids()

    async def run(self, open_rollouts: OpenRollouts) -> str:
        return await self._on_loop(self._host.run, open_rollouts)

    async def ready(self) -> None:
        await self._on_loop(self._host.ready)

    async def do(self, method: str, *arguments: object) -> object:
        return await self._on_loop(self._host.do, method, *arguments)

    async def close(self) -> None:
        await self._on_loop(self._host.close)

    async def _on_loop(self, method: Callable[..., Awaitable[T]], *arguments: object) -> T:
        return await asyncio.wrap_future(self._portal.start_task_soon(method, *arguments))


class RolloutHost:
    """A runtime that is open, and the calls that use it."""

    def __init__(self) -> None:  # not on an event loop
        self._worker: RolloutWorker | None = None
        self._calls: set[anyio.CancelScope] = set()
        self._is_over = False

    async def run(self, open_rollouts: OpenRollouts) -> str:
        """Open a runtime and keep it open until `close`; return the error that ended it, if any."""
        try:
            async with open_rollouts() as (rollouts, wait_for_capacity, serving):
                collect_garbage_rarely()
                exempt_from_collection()
                self._worker = RolloutWorker(rollouts, wait_for_capacity, serving)
                try:
                    with self._worker.resources:
                        await self._worker.closing.wait()  # no deadline: as long as the run
                finally:  # before the runtime closes, which they use
                    self._worker = None
                    for scope in self._calls:
                        scope.cancel()
        except (AgentLoopError, ExceptionGroup) as error:
            first = next(leaves(error))
            if not isinstance(first, AgentLoopError):
                raise
            return str(first) or type(first).__name__
        finally:
            self._is_over = True
        return ""

    async def ready(self) -> None:
        """Wait until the runtime can be used."""
        while self._worker is None:  # noqa: ASYNC110  # `run` may not have begun
            await anyio.sleep(_POLL_S)

    async def do(self, method: str, *arguments: object) -> object:
        """Call a method of the runtime's `RolloutWorker`."""
        with anyio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                if self._worker is not None:
                    return await getattr(self._worker, method)(*arguments)
            finally:
                self._calls.discard(scope)
        # no deadline: the runtime is over, so the trainer ends this actor
        await anyio.sleep_forever()
        raise AssertionError

    async def close(self) -> None:
        """Close the runtime and wait until its servers are gone."""
        if self._worker is not None:
            self._worker.closing.set()
            while not self._is_over:  # noqa: ASYNC110  # the trainer has a deadline
                await anyio.sleep(_POLL_S)


class RolloutWorker:
    """Does for the trainer what it asks of a runtime.

    Attributes:
        closing: set when the runtime is to close.
        resources: what is to be closed with it.
    """

    def __init__(
        self, rollouts: RollsOut, wait_for_capacity: WaitForCapacity, serving: Serving
    ) -> None:
        self._rollouts = rollouts
        self._wait_for_capacity = wait_for_capacity
        self._serving = serving
        self.closing = anyio.Event()
        self.resources = ExitStack()
        self._open: dict[str, anyio.CancelScope] = {}  # groups, by their names
        self._arriving: list[anyio.Event] = []  # `queued` of the groups that came last
        self._lock = anyio.Lock()
        self._synced: SyncResult | None = None
        self._copy: LocalCopy | None = None
        self._syncing_stale = anyio.CancelScope()

    # --- groups -----------------------------------------------------------------------------------

    async def wait_for_capacity(self, size: int) -> None:
        """Wait for the capacity to start a group of `size` rollouts, besides those that came."""
        while self._arriving:
            await self._arriving[0].wait()  # no deadline: encoding a prompt ends by itself
            del self._arriving[0]
        await self._wait_for_capacity(size)

    async def run(self, request: GroupRequest) -> GroupResult:
        """Roll out and score a group."""
        self._arriving.append(request.queued)
        scope = self._open[request.name] = anyio.CancelScope()
        try:
            with scope:
                rolled = await self._rollouts.run(request)
                lines = await in_run_thread(zlib.compress, rolled.lines, _LEVEL)
                return GroupResult(lines, rolled.figures, rolled.versions)
        except AgentLoopError as error:
            kind = "ServerError" if isinstance(error, ServerError) else type(error).__name__
            return GroupResult(error=kind, message=str(error))
        finally:
            request.queued.set()
            if self._open.get(request.name) is scope:
                del self._open[request.name]
        return GroupResult(error="ServerError", message="the group was dropped")

    async def drop(self, name: str) -> None:
        """Stop a group that the trainer no longer needs."""
        if name in self._open:
            self._open[name].cancel()

    # --- weights ----------------------------------------------------------------------------------

    async def sync(self, published: PublishedWeights, timeout_s: float) -> RuntimeSync:
        """Sync published weights to the runtime's servers."""
        self._syncing_stale.cancel()  # load the new weights instead
        async with self._lock:  # no deadline: loading has one, `timeout_s`
            self._synced = None
            folder = published.folder
            try:
                if folder is None or not await anyio.Path(folder).is_dir():
                    raise ServerError(
                        f"{folder} does not exist here: weights.folder, or run.folder, must be on "
                        "a file system that all nodes mount at the same path"
                    )
                if isinstance(published, PublishedFolder) and published.local_folder is not None:
                    if self._copy is None:
                        copy = LocalCopy.within(published.local_folder)
                        self._copy = self.resources.enter_context(copy)
                    local = await in_run_thread(self._copy.update, published.folder)
                    published = replace(published, folder=local)
                synced = await self._serving.sync(published, timeout_s=timeout_s)
            except ServerError as error:
                return RuntimeSync(error=str(error))
            self._synced = synced
            return RuntimeSync(synced.loaded, synced.failed, synced.checksum, synced.num_verified)

    async def sync_stale(self, timeout_s: float) -> bool:
        """Sync the last weights to servers that lack them; return whether all have them now."""
        async with self._lock:  # no deadline: loading has one, `timeout_s`
            if self._synced is not None:
                with anyio.CancelScope() as self._syncing_stale:
                    return await self._serving.sync_stale(self._synced, timeout_s=timeout_s)
        return False
