"""The trainer's end of runtimes on the cluster (`cluster.runtimes`): groups out, results in.

    running ──start──> an actor with a runtime (rollout_host.py) ──lost──> another, or given up
    _offer    waits until a runtime has the newest weights and capacity for a group: then it is free
    run       takes a free runtime, and waits for its result; if there is none, takes another
    sync      has all runtimes load weights, and compares what they have loaded

Ray moves the messages, and tells when a runtime or its node is lost: each call has a result, or
fails with `ActorLost`. What is lost is in no journal but the trainer's, which asks again; a runtime
that the trainer leaves, however it ends, ends too.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus

from agentloop import errors
from agentloop.aio import Signal, task_group
from agentloop.errors import AgentLoopError, ServerError, ServerStartError
from agentloop.inference.processes.restarts import Restarts
from agentloop.rollouts.request import GroupRequest
from agentloop.training.cluster.ray_cluster import ActorLost
from agentloop.training.cluster.rollout_host import (
    GroupResult,
    OpenRollouts,
    RuntimeSync,
)
from agentloop.training.rollouts import RolledOut
from agentloop.training.run.status import count_of
from agentloop.training.weight_sync.sync import SyncResult
from agentloop.training.weight_sync.transport import PublishedWeights
from agentloop.training.weight_sync.verify import most_common

log = logging.getLogger(__name__)

_NUM_TRIES = 5  # of a group, before the run fails
_RETRY_S = 5.0  # pause after a runtime has failed at a group
_ANSWER_S = 30.0
_DROP_S = 1.0
_CLOSE_S = 60.0


class Actor(Protocol):
    """An actor with a runtime: `ray_cluster.RemoteActor` of a `RolloutActor`."""

    async def call(self, method: str, *arguments: object) -> object:
        """Call a method. Raises ActorLost."""
        ...

    def kill(self) -> None: ...


StartActor = Callable[[], Awaitable[Actor]]


@dataclass(slots=True, eq=False)
class _Member:
    """A runtime that is ready.

    Attributes:
        number, synced: the last weight sync that it has taken part in, and its result.
        is_right: whether it has the weights of that sync.
        verified: versions of which its weights are known to be right.
        is_free: whether it has capacity for a group that it was not given.
        is_leaving: whether it is to be restarted when its groups have ended.
    """

    name: str
    actor: Actor
    number: int = 0
    synced: RuntimeSync = field(default_factory=RuntimeSync)
    is_right: bool = False
    verified: set[str] = field(default_factory=set)
    num_open: int = 0
    is_free: bool = False
    is_gone: bool = False
    is_leaving: bool = False
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    async def do(self, method: str, *arguments: object) -> object:
        return await self.actor.call("do", method, *arguments)


class RemoteRuntimes:
    """Rolls out groups (`RollsOut`) and serves weights (`Serving`) by runtimes on nodes."""

    def __init__(self, *, group_size: int, max_restarts: int, say: Callable[[str], None]) -> None:
        """
        Args:
            group_size: number of rollouts for which a runtime has to have capacity.
            max_restarts: number of restarts of a runtime within ten minutes; then it is given up.
            say: called with a line of text when a runtime is ready or lost.
        """
        self._group_size = group_size
        self._max_restarts = max_restarts
        self._say = say
        self._members: dict[str, _Member] = {}
        self._num_left = 0  # runtimes that are not given up
        self._changed = Signal()
        self._number = 0  # counts the weight syncs
        self._version = ""
        self._checksum: str | None = None  # None: the right one is not known yet
        self._timeout_s = 0.0

    def describe(self) -> str:
        """Return a line for each runtime that is ready."""
        return "\n".join(
            f"{member.name}: {count_of(member.num_open, 'group')} running, "
            f"{'' if self._is_current(member) else 'not '}on the newest weights"
            for member in self._members.values()
        )

    # --- runtimes ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(
        self, starts: Mapping[str, StartActor], opens: Mapping[str, OpenRollouts]
    ) -> AsyncIterator[None]:
        """Start runtimes by their names, and restart those that are lost, until the block is left.

        Raises:
            ServerError: one of them could not be started the first time, or the last one was given
                up.
            ActorLost: one was lost while it started the first time.
        """
        self._num_left = len(starts)
        async with task_group(only_first=True) as tasks:
            async with anyio.create_task_group() as starting:
                for name, start in starts.items():
                    starting.start_soon(tasks.start, partial(self._keep, name, start, opens[name]))
            yield
            tasks.cancel_scope.cancel()

    def leave(self, name: str) -> None:
        """Restart a runtime, on another node, when the groups that it has are complete."""
        if (member := self._members.get(name)) is not None:
            member.is_leaving, member.is_free = True, False
            member.scope.cancel()

    async def _keep(
        self,
        name: str,
        start: StartActor,
        open_rollouts: OpenRollouts,
        *,
        task_status: TaskStatus[None],
    ) -> None:
        restarts = Restarts(self._max_restarts)
        was_ready = False

        def on_ready() -> None:
            nonlocal was_ready
            if not was_ready:
                was_ready = True
                task_status.started()

        while True:
            try:
                await self._use(name, await start(), open_rollouts, on_ready)
                self._say(f"{name} has left its node; starting it on another")
                continue
            except (ActorLost, ServerError) as error:
                if not was_ready:
                    raise
                reason = str(error)
            delay_s = restarts.record_death(time.monotonic())
            if delay_s is None:
                self._num_left -= 1
                if not self._num_left:
                    raise ServerError(f"no runtime is left: {name}: {reason}")
                self._say(f"{name} is given up: {reason}")
                return
            self._say(f"{name} is lost, and its groups go to others; restarting it: {reason}")
            await anyio.sleep(delay_s)

    async def _use(
        self, name: str, actor: Actor, open_rollouts: OpenRollouts, on_ready: Callable[[], None]
    ) -> None:
        """Open a runtime in an actor, and let it roll out groups until it is to leave, or lost.

        Raises:
            ActorLost: the actor or its node is lost.
            ServerError: the runtime could not start, or failed.
        """

        async def run() -> None:
            reason = await actor.call("run", open_rollouts)
            raise ServerStartError(f"{name}: {reason or 'it has ended'}")

        started_s = time.monotonic()
        try:
            async with task_group(only_first=True) as tasks:
                tasks.start_soon(run)
                await actor.call("ready")  # its servers and its sandbox have deadlines
                self._say(f"{name}: ready after {time.monotonic() - started_s:.1f} s")
                on_ready()
                await self._offer(name, actor)
                tasks.cancel_scope.cancel()
        finally:
            with anyio.move_on_after(_CLOSE_S, shield=True), suppress(ActorLost):
                await actor.call("close")
            actor.kill()

    async def _offer(self, name: str, actor: Actor) -> None:
        """Let a runtime take groups while it has capacity for them and the newest weights.

        Return when it is to leave, and has no group any more.

        Raises:
            ActorLost: it is lost.
            ServerError: it has wrong weights.
        """
        member = self._members[name] = _Member(name, actor)
        self._changed.notify()
        try:
            with member.scope:
                while True:
                    await self._until(lambda: not member.is_free and self._is_current(member))
                    await member.do("wait_for_capacity", self._group_size)
                    member.is_free = True
                    self._changed.notify()
            if member.is_leaving:
                await self._until(lambda: not member.num_open)
                return
            raise ServerError(
                f"version {self._version}: its weights differ from those of the other runtimes: "
                f"checksum {member.synced.checksum}, not {self._checksum}"
            )
        finally:
            member.is_gone = True
            del self._members[name]
            self._changed.notify()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; it is checked whenever something has changed."""
        while not condition():
            await self._changed.wait()  # no deadline: without runtimes `_keep` ends the run

    # --- rollouts ---------------------------------------------------------------------------------

    async def wait_for_capacity(self, size: int) -> None:
        """Wait until a runtime is free."""
        await self._until(lambda: bool(self._free()))

    async def run(self, request: GroupRequest) -> RolledOut:
        """Implement `RollsOut`.

        Raises:
            ServerError: the group was given up, because too many runtimes were lost or failed.
        """
        reason = ""
        failed: set[str] = set()
        for _ in range(_NUM_TRIES):
            await self._until(lambda: bool(self._free(failed)))
            member = min(self._free(failed), key=lambda member: member.num_open)
            member.is_free = False
            self._changed.notify()
            request.queued.set()
            try:
                result = await self._ask(member, request)
                group = await self._unpack(member, result)
            except ActorLost as error:
                reason = f"{member.name} was lost: {error}"
            except ServerError as error:
                reason = f"{member.name}: {error}"
                failed.add(member.name)
                log.error("group %s goes to another runtime: %s", request.name, reason)
                await anyio.sleep(_RETRY_S)
            else:
                return group
        raise ServerError(
            f"group {request.name}: gave up after {_NUM_TRIES} attempts, the last by {reason}"
        )

    def _free(self, failed: Set[str] = frozenset()) -> list[_Member]:
        """Return the free runtimes: of those that have not failed, if there are any."""
        current = [member for member in self._members.values() if self._is_current(member)]
        others = [member for member in current if member.name not in failed]
        return [member for member in others or current if member.is_free]

    async def _ask(self, member: _Member, request: GroupRequest) -> GroupResult:
        member.num_open += 1
        try:
            # no deadline: each rollout has one
            result = await member.do("run", request)
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(_DROP_S, shield=True), suppress(ActorLost):
                await member.do("drop", request.name)
            raise
        finally:
            member.num_open -= 1
            self._changed.notify()
        assert isinstance(result, GroupResult)
        return result

    async def _unpack(self, member: _Member, result: GroupResult) -> RolledOut:
        """Return the group of a result, or raise the error that it has.

        Raises:
            ServerError: the runtime failed, or nobody knows whether it had the right weights.
        """
        if result.error:
            kind = getattr(errors, result.error, None)
            is_ours = isinstance(kind, type) and issubclass(kind, AgentLoopError)
            raise (kind if is_ours and kind else ServerError)(result.message)
        with anyio.move_on_after(self._sync_s()):
            await self._until(lambda: result.versions <= member.verified or member.is_gone)
        if not result.versions <= member.verified:
            unknown = ", ".join(sorted(result.versions - member.verified))
            raise ServerError(f"its weights of version {unknown} were never confirmed")
        lines = await anyio.to_thread.run_sync(zlib.decompress, result.lines)
        return RolledOut(result.figures, lines, result.versions)

    # --- weights ----------------------------------------------------------------------------------

    async def sync(self, published: PublishedWeights, *, timeout_s: float) -> SyncResult:
        """Implement `Serving`.

        Return when each runtime has the weights, or has failed. One that failed takes no groups
        until it has them, too.
        """
        started_s = time.monotonic()
        self._number += 1
        self._version, self._checksum = published.version, None
        self._timeout_s = timeout_s
        for member in self._members.values():  # a version may come again, with other weights
            member.verified.discard(published.version)
        await self._until(lambda: bool(self._members))
        members = list(self._members.values())
        async with anyio.create_task_group() as tasks:
            for member in members:
                tasks.start_soon(self._load, member, published)
        self._judge(members)
        right = [member for member in members if self._is_current(member)]
        loaded = [f"{member.name} {url}" for member in right for url in member.synced.loaded]
        failed = {
            f"{member.name} {url}": error
            for member in right
            for url, error in member.synced.failed.items()
        }
        failed |= {
            member.name: member.synced.error or f"its weights differ: {member.synced.checksum}"
            for member in members
            if member not in right
        }
        for name, error in failed.items():
            log.error("%s does not have version %s: %s", name, published.version, error)
        return SyncResult(
            published,
            loaded,
            failed,
            time.monotonic() - started_s,
            self._checksum or "",
            num_verified=sum(member.synced.num_verified for member in right),
        )

    async def sync_stale(self, result: SyncResult, *, timeout_s: float) -> bool:
        """Implement `Serving`: also for runtimes that were restarted."""
        done: list[bool] = []

        async def sync(member: _Member) -> None:
            if not self._is_current(member):
                await self._load(member, result.published)
                self._judge([member])
                done.append(self._is_current(member) or member.is_gone)
                return
            try:
                with anyio.fail_after(self._sync_s()):
                    done.append(bool(await member.do("sync_stale", timeout_s)))
            except ActorLost:  # it is restarted
                done.append(True)
            except TimeoutError:
                done.append(False)

        async with anyio.create_task_group() as tasks:
            for member in list(self._members.values()):
                tasks.start_soon(sync, member)
        return all(done)

    async def _load(self, member: _Member, published: PublishedWeights) -> None:
        """Load weights into the servers of a runtime."""
        number = self._number
        synced: object = RuntimeSync(error="it did not answer in time")
        with anyio.move_on_after(self._sync_s()):
            try:
                synced = await member.do("sync", published, self._timeout_s)
            except ActorLost as error:
                synced = RuntimeSync(error=str(error))
        assert isinstance(synced, RuntimeSync)
        member.number, member.synced, member.is_right = number, synced, False

    def _judge(self, members: Sequence[_Member]) -> None:
        """Decide which of these runtimes have the right weights; end those with others.

        Raises:
            ServerError: none has loaded them, or it is unknown which are right.
        """
        checksums = {
            member: member.synced.checksum for member in members if not member.synced.error
        }
        if self._checksum is None:
            self._checksum = most_common(checksums.values())
        if self._checksum is None:
            reasons = {
                member.name: member.synced.error or member.synced.checksum for member in members
            }
            problem = "the runtimes disagree about" if checksums else "no runtime could load"
            raise ServerError(f"{problem} version {self._version} of the weights: {reasons}")
        for member, checksum in checksums.items():
            if checksum == self._checksum:
                member.is_right = True
                member.verified.add(self._version)
            else:
                member.scope.cancel()
        self._changed.notify()

    def _is_current(self, member: _Member) -> bool:
        return member.is_right and member.number == self._number

    def _sync_s(self) -> float:
        """Return how long a runtime may take for a weight sync: it may first wait for servers."""
        return 2 * self._timeout_s + _ANSWER_S
