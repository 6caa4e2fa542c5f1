"""The trainer's end of a fleet: it delegates rollouts to runtimes on other machines.

    Fleet.group ──ticket──> Redis ──> one of the runtimes (worker.py) ──result──> Fleet.group
    Fleet.sync ──trainer state──> all runtimes: "load this version from this folder"

Only this end is durable, through the run's journal. A ticket that Redis has lost is added again as
long as its group is pending; a result without a pending group, such as a duplicate, is dropped.
"""

from __future__ import annotations

import logging
import shutil
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from agentloop import errors
from agentloop.agent.rollout import Budget
from agentloop.aio import task_group
from agentloop.environments.tasks.sources import Task
from agentloop.errors import AgentLoopError, RunFolderError, ServerError, SettingsError
from agentloop.training.fleet.messages import (
    FleetError,
    Recipe,
    Result,
    Ticket,
    TrainerState,
    VersionError,
    WeightsAnnouncement,
    WorkerStatus,
    incarnation_in,
    unpacked,
)
from agentloop.training.fleet.redis_link import READERS, Redis, RedisLink
from agentloop.training.fleet.settings import FleetSettings
from agentloop.training.rollouts import Purpose, RolledOut
from agentloop.training.weight_sync.sync import SyncResult
from agentloop.training.weight_sync.transport import PublishedWeights

__all__ = ["Fleet"]

log = logging.getLogger(__name__)

_BEAT_S = 1.0
_POLL_S = 0.1
_CLOSE_S = 5.0
_AHEAD = 4  # queued tickets per runtime: enough that none is idle, few enough to stay fresh
_NUM_READ = 16
_APPEARS_S = 5.0  # time for another machine's file to appear on a network file system


@dataclass(slots=True)
class _PendingGroup:
    """A pending group and its result."""

    name: str
    ticket: bytes
    added: bool = False
    num_unreadable: int = 0  # results that could not be read
    done: anyio.Event = field(default_factory=anyio.Event)
    error: AgentLoopError | None = None
    group: _RemoteGroup | None = None


@dataclass(frozen=True, slots=True)
class _RemoteGroup:
    """A group that was rolled out by a remote runtime."""

    figures: Mapping[str, Any]
    has_signal: bool
    all_rows: Sequence[Mapping[str, Any]]

    def rows(self) -> Sequence[Mapping[str, Any]]:
        return self.all_rows


class Fleet:
    """Delegates rollouts (`RollsOut`) and weight syncs (`Serving`) to remote runtimes.

    Use `Fleet.open(...)`.
    """

    def __init__(
        self,
        link: RedisLink,
        settings: FleetSettings,
        state: TrainerState,
        say: Callable[[str], None],
        start: str,
    ) -> None:
        self._link = link
        self._settings = settings
        self._state = state
        self._say = say
        self._start = start
        self._waiting: dict[str, _PendingGroup] = {}
        self._runtimes: dict[str, WorkerStatus] = {}
        self._refused: set[str] = set()  # names of runtimes with another version
        self._num_asking = 0  # callers that wait for any runtime
        self._alone_since: float | None = None  # set while a runtime is needed and there is none
        self._num_announced = 0

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: FleetSettings,
        *,
        run: str,
        recipe: Recipe,
        folder: Path,
        say: Callable[[str], None],
    ) -> AsyncIterator[Fleet]:
        """Announce this trainer and exchange tickets and results while the context is open.

        Args:
            run: the name under which runtimes look for the trainer.
            recipe: settings that runtimes take from the trainer.
            folder: a folder for results; runtimes that share this file system write them there.
            say: called with a line of text when a runtime joins or leaves.

        Raises:
            ServerError: Redis or all runtimes were unavailable for too long, or a group failed too
                often.
            SettingsError: Redis rejected the login.
            FleetError: another trainer has taken over the run.
        """
        incarnation = uuid.uuid4().hex[:12]
        state = TrainerState(
            incarnation=incarnation,
            recipe=recipe,
            lease_s=settings.lease_s,
            max_tries=settings.max_tries,
            max_result_mib=settings.max_result_mib,
            folder=str(folder),
        )
        start = f"agentloop rollouts --redis {settings.redis} --run {run}"
        await anyio.to_thread.run_sync(_make, folder, incarnation)
        try:
            async with RedisLink.open(settings, run) as link:
                fleet = cls(link, settings, state, say, start)
                # Tickets and results of an earlier trainer process.
                await link.do(lambda redis: redis.delete(link.tickets, link.groups))
                await fleet._publish_state(takes_over=True)
                async with task_group() as tasks:
                    tasks.start_soon(fleet._beat)
                    tasks.start_soon(fleet._receive)
                    yield fleet
                    tasks.cancel_scope.cancel()
                # Not after an error: runtimes then wait for the run to be resumed.
                with anyio.move_on_after(_CLOSE_S, shield=True), suppress(AgentLoopError):
                    await fleet._end()
        finally:
            await anyio.to_thread.run_sync(partial(shutil.rmtree, folder, ignore_errors=True))

    # --- rollouts ---------------------------------------------------------------------------------

    async def wait_for_capacity(self, size: int) -> None:
        """Implement `RollsOut`: wait until only few tickets have not been taken by a runtime."""
        tickets = self._link.tickets

        async def num_left(redis: Redis) -> int:
            taken = await redis.xpending(tickets, READERS)
            return int(await redis.xlen(tickets)) - int(taken["pending"])

        with self._asking():
            while True:
                num = len(self._runtimes)
                if num and await self._link.do(num_left) < _AHEAD * num:
                    return
                await anyio.sleep(_POLL_S)

    async def group(
        self,
        task: Task,
        name: str,
        *,
        size: int,
        budget: Budget,
        oldest: int,
        purpose: Purpose = Purpose.TRAIN,
        on_queued: Callable[[], None] = lambda: None,
    ) -> RolledOut:
        """Implement `RollsOut`.

        Raises:
            ServerError: the group was given up: too often its runtime died or its result could not
                be read.
        """
        ticket = Ticket(
            incarnation=self._state.incarnation,
            name=name,
            task=task,
            size=size,
            budget=budget,
            oldest=oldest,
            purpose=purpose,
        )
        if ticket.key in self._waiting:
            raise ValueError(f"a group {name!r} is in flight already")
        waiting = self._waiting[ticket.key] = _PendingGroup(name, ticket.to_json())
        try:
            with self._asking():
                await self._add(waiting)
                on_queued()
                await waiting.done.wait()  # no deadline: without runtimes `_beat` ends it
        finally:
            del self._waiting[ticket.key]  # the next `_audit` deletes its ticket
        if waiting.error is not None:
            raise waiting.error
        assert waiting.group is not None
        return waiting.group

    async def _add(self, waiting: _PendingGroup) -> None:
        fields: Any = {"ticket": waiting.ticket}
        await self._link.do(lambda redis: redis.xadd(self._link.tickets, fields))
        waiting.added = True

    async def _audit(self) -> None:
        """Compare tickets in Redis with pending groups: add lost ones, delete stale ones."""
        expected = {key for key, waiting in self._waiting.items() if waiting.added}
        tickets, groups = self._link.tickets, self._link.groups

        async def both(redis: Redis) -> Any:
            async with redis.pipeline(transaction=True) as pipe:  # a consistent snapshot
                pipe.xrange(tickets)
                pipe.xrange(groups)
                return await pipe.execute()

        asked, done = await self._link.do(both)
        there: set[str] = set()
        too_many = []
        for entry, fields in asked:
            key = Ticket.from_json(fields[b"ticket"]).key
            if key in there or key not in self._waiting:
                too_many.append(entry)
            there.add(key)
        if too_many:
            await self._link.do(partial(_forget_tickets, tickets, too_many))
        there |= {Result.from_json(fields[b"result"]).key for _, fields in done}
        lost = [key for key in self._waiting if key in expected - there]
        if lost:
            log.warning("Redis has lost %d tickets: adding them again", len(lost))
        for key in lost:
            await self._add(self._waiting[key])

    async def _receive(self) -> None:
        """Process each result once: handled entries are deleted, so all that are read are new."""
        groups: Any = {self._link.groups: "0"}
        while True:
            found = await self._link.do(
                lambda redis: redis.xread(groups, count=_NUM_READ, block=int(1000 * _BEAT_S))
            )
            for _, entries in found or []:
                for entry, fields in entries:
                    await self._take(entry, Result.from_json(fields[b"result"]))

    async def _take(self, entry: bytes, result: Result) -> None:
        waiting = self._waiting.get(result.key)
        if waiting is not None:
            await self._answer(waiting, result)
        names = self._link.piece_names(result.rows, result.num_pieces)

        async def forget(redis: Redis) -> None:
            async with redis.pipeline(transaction=True) as pipe:
                pipe.xdel(self._link.groups, entry)
                if names:
                    pipe.unlink(*names)
                await pipe.execute()

        await self._link.do(forget)
        if file := self._file(result):
            with suppress(OSError):
                await anyio.Path(file).unlink(missing_ok=True)
        still = self._waiting.get(result.key)
        if still is not None and not still.added and not still.done.is_set():
            await self._add(still)

    async def _answer(self, waiting: _PendingGroup, result: Result) -> None:
        """Complete a pending group; if its result cannot be read, have its ticket added again."""
        if result.error:
            kind = getattr(errors, result.error, None)
            known = isinstance(kind, type) and issubclass(kind, AgentLoopError)
            waiting.error = kind(result.message) if known and kind else ServerError(result.message)
        else:
            try:
                rows = await self._rows_of(result)
            except (OSError, ValueError) as error:
                log.warning("a result of runtime %s cannot be read: %s", result.runtime, error)
                waiting.num_unreadable += 1
                waiting.added = False  # its ticket was deleted with the result
                if waiting.num_unreadable < self._settings.max_tries:
                    return
                waiting.error = ServerError(
                    f"group {waiting.name}: its rollouts could not be read "
                    f"{waiting.num_unreadable} times (fleet.max_tries), last those of runtime "
                    f"{result.runtime}: {error}"
                )
            else:
                waiting.group = _RemoteGroup(result.figures, result.has_signal, rows)
        waiting.done.set()

    async def _rows_of(self, result: Result) -> list[dict[str, Any]]:
        if file := self._file(result):
            with anyio.move_on_after(_APPEARS_S):
                while not await anyio.Path(file).exists():  # noqa: ASYNC110
                    await anyio.sleep(_POLL_S)
            data = await anyio.Path(file).read_bytes()
        else:
            data = await self._link.get_pieces(result.rows, result.num_pieces)
        return await anyio.to_thread.run_sync(unpacked, data)

    def _file(self, result: Result) -> Path | None:
        """Return the path of a result's file, which is always inside our folder."""
        is_file = result.rows and not result.num_pieces
        return Path(self._state.folder) / Path(result.rows).name if is_file else None

    # --- weights ----------------------------------------------------------------------------------

    async def sync(self, published: PublishedWeights, *, timeout_s: float) -> SyncResult:
        """Implement `Serving`.

        Return when all runtimes have the weights, or after `timeout_s` with those that do. A late
        runtime takes no tickets until it has them, too. Without any runtime, wait for one.
        """
        if published.folder is None:
            raise SettingsError(
                "weights.transport: a fleet loads weights from a folder: set it to disk"
            )
        begun = time.monotonic()
        first_seen: float | None = None
        self._num_announced += 1
        announced = WeightsAnnouncement(
            number=self._num_announced,
            version=published.version,
            folder=str(published.folder),
            timeout_s=timeout_s,
            pause=published.pause,
        )
        await self._announce(announced)
        with self._asking():
            while True:
                await anyio.sleep(_POLL_S)
                await self._look()
                now = time.monotonic()
                first_seen = (first_seen or now) if self._runtimes else None
                is_late = first_seen is not None and now - first_seen > timeout_s
                have = self._have(announced)
                checksum = _most_common(have, len(self._runtimes), is_late, announced.version)
                if checksum and not announced.checksum:
                    announced = announced.model_copy(update={"checksum": checksum})
                    await self._announce(announced)
                if announced.checksum and (is_late or len(have) == len(self._runtimes)):
                    break
                if is_late and not have:
                    raise ServerError(
                        f"no runtime could load version {published.version}: {self._why_not(have)}"
                    )
        loaded = [name for name in have if have[name] == announced.checksum]
        others = {name: f"its weights differ: {have[name]}" for name in have.keys() - set(loaded)}
        failed = self._why_not(have) | others
        for name, why in failed.items():
            log.error("runtime %s does not have version %s: %s", name, published.version, why)
        seconds = time.monotonic() - begun
        return SyncResult(published, loaded, failed, seconds, announced.checksum)

    async def sync_stale(self, handover: SyncResult, *, timeout_s: float) -> bool:
        """Implement `Serving`. Runtimes retry by themselves, so there is nothing to do."""
        return True

    async def _announce(self, weights: WeightsAnnouncement) -> None:
        self._state = self._state.model_copy(update={"weights": weights})
        await self._publish_state()

    def _have(self, announced: WeightsAnnouncement) -> dict[str, str]:
        """Return the checksums of the runtimes that have these weights, by name."""
        incarnation = self._state.incarnation
        return {
            name: said.checksum
            for name, said in self._runtimes.items()
            if said.incarnation == incarnation and said.number == announced.number
        }

    def _why_not(self, have: Mapping[str, str]) -> dict[str, str]:
        return {
            name: said.error or "not in time"
            for name, said in self._runtimes.items()
            if name not in have
        }

    # --- runtimes ---------------------------------------------------------------------------------

    async def _beat(self) -> None:
        every_s = min(_BEAT_S, self._settings.lease_s / 4)
        audited = time.monotonic()
        while True:
            await self._publish_state()
            await self._look()
            self._check_for_runtimes()
            if time.monotonic() - audited > self._settings.lease_s / 3:
                await self._audit()
                audited = time.monotonic()
            await anyio.sleep(every_s)

    async def _publish_state(self, *, takes_over: bool = False) -> None:
        link, incarnation = self._link, self._state.incarnation
        heard = await link.do(lambda redis: redis.get(link.trainer))
        before = None if heard is None else incarnation_in(heard)
        if before not in (None, incarnation) and not takes_over:
            raise FleetError(
                f"fleet.run: another trainer has taken over {link.trainer} at "
                f"{self._settings.redis}: stop one of them or set another fleet.run"
            )
        lease_ms = int(1000 * self._settings.lease_s)
        await link.do(lambda redis: redis.set(link.trainer, self._state.to_json(), px=lease_ms))

    async def _look(self) -> None:
        """Read which runtimes are alive, and their status."""
        link = self._link

        async def look(redis: Redis) -> dict[str, bytes]:
            names = sorted(name.decode() for name in await redis.smembers(link.runtimes))
            if not names:
                return {}
            told = await redis.mget([link.name("runtime", name) for name in names])
            if gone := [name for name, one in zip(names, told, strict=True) if one is None]:
                await redis.srem(link.runtimes, *gone)
            return {name: one for name, one in zip(names, told, strict=True) if one is not None}

        found: dict[str, WorkerStatus] = {}
        for name, told in (await link.do(look)).items():
            try:
                found[name] = WorkerStatus.from_json(told)
            except VersionError as error:
                self._refuse(name, error)
        for name in sorted(found.keys() - self._runtimes.keys()):
            self._say(f"Runtime {name} has joined: {found[name].num_servers} servers")
        for name in sorted(self._runtimes.keys() - found.keys()):
            self._say(f"Runtime {name} has left: its groups go to other runtimes")
        self._runtimes = found

    def _refuse(self, name: str, error: VersionError) -> None:
        """Report once that a runtime is not used. It ends by itself, for the same reason."""
        if name not in self._refused:
            self._refused.add(name)
            self._say(
                f"Runtime {name} is refused: it has agentloop {error.theirs}, the trainer "
                f"{error.ours}. Install the same version on all machines"
            )

    def _check_for_runtimes(self) -> None:
        """Raise ServerError if a runtime is needed and there has been none for too long."""
        if self._runtimes or not self._num_asking:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = time.monotonic()
            self._say(f"Waiting for a runtime. Start one with: {self._start}")
        elif time.monotonic() - self._alone_since > self._settings.give_up_s:
            raise ServerError(
                f"there was no runtime for {self._settings.give_up_s:g} s (fleet.give_up_s) while "
                f"{len(self._waiting)} groups were pending. Start one with: {self._start}"
            )

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Count a caller that waits for a runtime."""
        self._num_asking += 1
        try:
            yield
        finally:
            self._num_asking -= 1

    async def _end(self) -> None:
        """Announce that the run is over, so that runtimes end."""
        link = self._link
        self._state = self._state.model_copy(update={"over": True, "weights": None})
        await self._publish_state()
        lease_ms = int(1000 * self._settings.lease_s)
        for name in (link.tickets, link.groups):  # runtimes may still read them
            await link.do(partial(_expire, name, lease_ms))


def _make(folder: Path, incarnation: str) -> None:
    """Create the folder for results, with a file by which runtimes recognize a shared folder.

    Raises:
        RunFolderError: it cannot be created.
    """
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / incarnation).touch()
    except OSError as error:
        raise RunFolderError(f"run.folder: {folder}: {error.strerror or error}") from error


async def _expire(name: str, after_ms: int, redis: Redis) -> None:
    await redis.pexpire(name, after_ms)


async def _forget_tickets(tickets: str, entries: Sequence[bytes], redis: Redis) -> None:
    async with redis.pipeline(transaction=True) as pipe:
        pipe.xack(tickets, READERS, *entries)
        pipe.xdel(tickets, *entries)
        await pipe.execute()


def _most_common(have: Mapping[str, str], num: int, is_late: bool, version: str) -> str:
    """Return the checksum that most of `num` runtimes have, or "" while that may still change.

    Raises:
        ServerError: there is a tie, so the right weights are unknown.
    """
    (first, num_first), *others = Counter(have.values()).most_common(2) or [("", 0)]
    if 2 * num_first > num:
        return first
    if not is_late and len(have) < num:
        return ""
    if others and others[0][1] == num_first:
        raise ServerError(f"the runtimes disagree about the weights {version}: {dict(have)}")
    return first
