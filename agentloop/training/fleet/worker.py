"""A runtime's end of a fleet: it takes tickets while it has capacity, and delivers the results.

    the trainer's state ──> load weights into our servers ──> may take tickets
                                                            │ one, when there is capacity for it
    a ticket ──lease, renewed──> rolled out, scored, selected ──result──> acknowledged

When the lease of a ticket expires, another runtime takes it. So a runtime may die at any moment;
one that leaves in order releases its tickets at once.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus

from agentloop.aio import Signal, task_group
from agentloop.errors import (
    AgentLoopError,
    DataError,
    RequestError,
    RewardError,
    ServerError,
)
from agentloop.training.fleet.messages import (
    FleetError,
    Result,
    Ticket,
    TrainerState,
    WeightsAnnouncement,
    WorkerStatus,
    packed,
)
from agentloop.training.fleet.redis_link import READERS, Redis, RedisLink
from agentloop.training.rollouts import RollsOut
from agentloop.training.weight_sync.disk import PublishedFolder
from agentloop.training.weight_sync.sync import Serving, SyncResult
from agentloop.training.weight_sync.transport import PublishedWeights
from agentloop.trajectory import StopReason

__all__ = ["Member", "wait_for_trainer"]

log = logging.getLogger(__name__)

_POLL_S = 0.2
_RETRY_S = 5.0  # pause after a failure to load weights or to do a ticket
_READ_MS = 1000
_CLOSE_S = 5.0
# Errors of the task or the reward, not of this machine: they would recur elsewhere.
_ANSWERS = (RequestError, RewardError, DataError)


async def wait_for_trainer(
    link: RedisLink, *, within_s: float, say: Callable[[str], None]
) -> TrainerState:
    """Wait for a trainer and return its state.

    Raises:
        ServerError: there is none in time.
        VersionError: it has another version of this package.
    """
    state = await _read_state(link)
    if state is None:
        say(f"Waiting for the trainer: there is no {link.trainer} in Redis yet")
        with anyio.move_on_after(within_s):
            while state is None:
                await anyio.sleep(_POLL_S)
                state = await _read_state(link)
    if state is None:
        raise ServerError(f"no trainer appeared at {link.trainer} within {within_s:g} s")
    return state


async def _read_state(link: RedisLink) -> TrainerState | None:
    found = await link.do(lambda redis: redis.get(link.trainer))
    return None if found is None else TrainerState.from_json(found)


class _Broken(Exception):
    """All rollouts of a group failed for reasons of infrastructure."""


@dataclass(slots=True)
class _LeasedTicket:
    """A ticket that this runtime has leased."""

    ticket: Ticket
    entry: bytes
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


class Member:
    """A runtime that takes part in a fleet: `run` does tickets until the run is over."""

    def __init__(
        self,
        link: RedisLink,
        state: TrainerState,
        rollouts: RollsOut,
        serving: Serving,
        *,
        name: str,
        num_servers: int,
        give_up_s: float,
        say: Callable[[str], None],
    ) -> None:
        """
        Args:
            state: the trainer's state when this runtime joined.
            name: this runtime's name, unique in the fleet.
        """
        self._link = link
        self._state = state
        self._rollouts = rollouts
        self._serving = serving
        self._name = name
        self._give_up_s = give_up_s
        self._say = say
        self._leased: dict[str, _LeasedTicket] = {}
        self._status = WorkerStatus(num_servers=num_servers)
        self._verified: set[str] = set()  # versions whose weights are confirmed
        self._synced: SyncResult | None = None
        self._keeping_up = anyio.CancelScope()
        self._changed = Signal()
        self._cursor = b"0-0"

    async def run(self) -> None:
        """Do tickets until the run is over.

        Raises:
            ServerError: Redis or the trainer was unavailable for too long, or our weights are
                wrong.
            SettingsError: Redis rejected the login.
            FleetError: the run's settings have changed, or the trainer has another version of this
                package.
        """
        try:
            async with task_group() as tasks:
                tasks.start_soon(self._beat)
                tasks.start_soon(self._have_weights)
                tasks.start_soon(self._take_tickets)
                await self._listen()
                tasks.cancel_scope.cancel()
        finally:
            with anyio.move_on_after(_CLOSE_S, shield=True), suppress(AgentLoopError):
                await self._link.do(self._leave)

    # --- the trainer's state ----------------------------------------------------------------------

    async def _listen(self) -> None:
        """Follow the trainer's state until it says that the run is over."""
        heard_s = time.monotonic()
        while not self._state.over:
            await anyio.sleep(_POLL_S)
            state = await _read_state(self._link)
            if state is not None:
                heard_s = time.monotonic()
                self._follow(state)
            elif time.monotonic() - heard_s > self._give_up_s:
                raise ServerError(
                    f"the trainer was silent for {self._give_up_s:g} s (fleet.give_up_s)"
                )

    def _follow(self, state: TrainerState) -> None:
        if state.recipe != self._state.recipe and not state.over:
            raise FleetError("the run's settings have changed: restart this runtime")
        if state == self._state:
            return
        if state.incarnation != self._state.incarnation:
            self._say("The run is continued by another trainer process")
            self._verified.clear()
            for lease in self._leased.values():
                if lease.ticket.incarnation != state.incarnation:  # its trainer is gone
                    lease.scope.cancel()
        self._state = state
        if state.weights is not None and not self._has(state.weights):
            self._keeping_up.cancel()  # load the new weights instead
        self._compare()

    async def _have_weights(self) -> None:
        """Keep our servers at the weights that the trainer announces."""
        while True:
            weights = self._state.weights
            pause_s = _POLL_S
            if weights is not None and not self._has(weights):
                pause_s = 0 if await self._load(weights) else _RETRY_S
            elif weights is not None and self._synced is not None:
                if weights.checksum not in ("", self._status.checksum):
                    raise ServerError(
                        f"version {weights.version}: this runtime's weights differ from those of "
                        f"the others: checksum {self._status.checksum}, not {weights.checksum}"
                    )
                with anyio.CancelScope() as self._keeping_up:
                    await self._serving.sync_stale(self._synced, timeout_s=weights.timeout_s)
            await anyio.sleep(pause_s)

    def _has(self, weights: WeightsAnnouncement) -> bool:
        return (self._status.incarnation, self._status.number) == (
            self._state.incarnation,
            weights.number,
        )

    async def _load(self, weights: WeightsAnnouncement) -> bool:
        incarnation, folder = self._state.incarnation, Path(weights.folder)
        published: PublishedWeights = PublishedFolder(weights.version, folder, weights.pause)
        self._verified.discard(
            weights.version
        )  # the same version may come again with other weights
        try:
            if not await anyio.Path(folder).is_dir():
                raise ServerError(
                    f"{folder} does not exist here: weights.folder, or run.folder, must be on a "
                    "file system that all machines mount at the same path"
                )
            self._synced = await self._serving.sync(published, timeout_s=weights.timeout_s)
        except ServerError as error:
            log.error("version %s: %s", weights.version, error)
            self._status = WorkerStatus.model_validate({**dict(self._status), "error": str(error)})
        else:
            self._status = WorkerStatus(
                incarnation=incarnation,
                number=weights.number,
                checksum=self._synced.checksum,
                num_servers=len(self._synced.loaded),
            )
        self._compare()
        return not self._status.error

    def _compare(self) -> None:
        """Compare our checksum with the trainer's, and record the version if they match."""
        weights = self._state.weights
        if weights is not None and self._is_right(weights):
            self._verified.add(weights.version)
        self._changed.notify()

    def _is_right(self, weights: WeightsAnnouncement) -> bool:
        return self._has(weights) and self._status.checksum == weights.checksum != ""

    def _is_ready(self) -> bool:
        """Return whether we have the announced weights and they are confirmed."""
        weights = self._state.weights
        return (
            weights is not None
            and self._is_right(weights)
            # Results of another trainer process have the same names and are about to be deleted.
            and all(
                lease.ticket.incarnation == self._state.incarnation
                for lease in self._leased.values()
            )
        )

    def _is_ready_for(self, ticket: Ticket) -> bool:
        weights = self._state.weights
        return (
            self._is_ready()
            and ticket.incarnation == self._state.incarnation
            and weights is not None
            and int(weights.version) >= ticket.oldest
        )

    # --- tickets ----------------------------------------------------------------------------------

    async def _take_tickets(self) -> None:
        size = self._state.recipe.group_size
        async with anyio.create_task_group() as groups:
            while True:
                await self._until(self._is_ready)  # no deadline: `_listen` has one
                await self._rollouts.wait_for_capacity(size)
                lease = await self._link.do(self._next)
                if lease is None:
                    continue
                if lease.ticket.key in self._leased:  # lost by Redis and added again
                    self._leased[lease.ticket.key].entry = lease.entry
                else:
                    self._leased[lease.ticket.key] = lease
                    await groups.start(self._answer, lease)

    async def _next(self, redis: Redis) -> _LeasedTicket | None:
        """Take a dead runtime's ticket or a new one; return None if there was none for a second."""
        tickets, lease_ms = self._link.tickets, int(1000 * self._state.lease_s)
        self._cursor, entries, *_ = await redis.xautoclaim(
            tickets, READERS, self._name, lease_ms, start_id=self._cursor, count=1
        )
        if not entries:
            found = await redis.xreadgroup(
                READERS, self._name, {tickets: ">"}, count=1, block=_READ_MS
            )
            entries = found[0][1] if found else []
        for entry, fields in entries:
            if fields:  # otherwise the ticket was deleted
                return _LeasedTicket(Ticket.from_json(fields[b"ticket"]), entry)
        return None

    async def _answer(self, lease: _LeasedTicket, *, task_status: TaskStatus[None]) -> None:
        ticket = lease.ticket
        stands = anyio.Event()

        def on_queued() -> None:
            if not stands.is_set():
                stands.set()
                task_status.started()

        is_done = False
        try:
            with lease.scope:
                is_done = await self._roll_out(lease, on_queued)
        finally:
            del self._leased[ticket.key]
            if not is_done:
                with anyio.move_on_after(_CLOSE_S, shield=True), suppress(AgentLoopError):
                    await self._link.do(partial(self._release, lease))
            on_queued()
            self._changed.notify()

    async def _roll_out(self, lease: _LeasedTicket, on_queued: Callable[[], None]) -> bool:
        """Do a ticket; return whether a result was delivered."""
        ticket = lease.ticket
        answer = partial(Result, key=ticket.key, runtime=self._name)
        if (tries := await self._link.do(partial(self._num_tries, lease))) > self._state.max_tries:
            message = (
                f"group {ticket.name}: {tries - 1} attempts failed (fleet.max_tries): runtimes or "
                "their servers died"
            )
            await self._deliver(lease, answer(error="ServerError", message=message))
            return True
        with anyio.move_on_after(self._state.lease_s):
            await self._until(lambda: self._is_ready_for(ticket))
        if not self._is_ready_for(ticket):
            return False  # leave it to a runtime with newer weights
        try:
            rolled = await self._rollouts.group(
                ticket.task,
                ticket.name,
                size=ticket.size,
                budget=ticket.budget,
                oldest=ticket.oldest,
                purpose=ticket.purpose,
                on_queued=on_queued,
            )
            rows = rolled.rows()
            if all(_is_broken(row) for row in rows):
                raise _Broken("all of its rollouts failed for reasons of infrastructure")
        except _ANSWERS as error:
            found = answer(error=type(error).__name__, message=str(error))
        except (ServerError, _Broken) as error:
            log.error("group %s goes to another runtime: %s", ticket.name, error)
            await anyio.sleep(_RETRY_S)
            return False
        else:
            if not await self._are_verified(versions := _versions_of(rows)):
                log.error(
                    "group %s goes to another runtime: the trainer never confirmed the weights "
                    "that sampled it here (versions %s)",
                    ticket.name,
                    ", ".join(sorted(versions - self._verified)),
                )
                return False
            data = await anyio.to_thread.run_sync(packed, rows)
            found = answer(has_signal=rolled.has_signal, figures=rolled.figures)
            found = await self._put(found, data)
        await self._deliver(lease, found)
        return True

    async def _are_verified(self, versions: set[str]) -> bool:
        """Wait for the trainer to confirm our weights of these versions; return whether it did.

        The trainer confirms new weights after it has compared them with those of other runtimes,
        within `timeout_s` of the weight sync.
        """
        weights = self._state.weights
        sync_s = 0.0 if weights is None else weights.timeout_s
        with anyio.move_on_after(sync_s + self._state.lease_s):
            await self._until(lambda: versions <= self._verified)
        return versions <= self._verified

    async def _put(self, result: Result, data: bytes) -> Result:
        """Store the rollouts in the trainer's folder or in Redis; return the completed result."""
        most = self._state.max_result_mib
        if len(data) > most << 20:
            message = (
                f"the rollouts of a group take {len(data) >> 20} MiB, more than "
                f"fleet.max_result_mib ({most}): raise it"
            )
            return Result(
                key=result.key, runtime=self._name, error="SettingsError", message=message
            )
        folder = Path(self._state.folder)
        name = f"{result.key}-{self._name}-{uuid.uuid4().hex[:8]}"
        if await anyio.Path(folder, self._state.incarnation).exists():  # the folder is shared
            try:
                await anyio.to_thread.run_sync(_write, folder / name, data)
            except OSError as error:  # the trainer may have just removed it
                log.warning("%s: %s: sending the rollouts through Redis", folder / name, error)
            else:
                return result.model_copy(update={"rows": name})
        num = await self._link.put_pieces(name, data)
        return result.model_copy(update={"rows": name, "num_pieces": num})

    async def _deliver(self, lease: _LeasedTicket, result: Result) -> None:
        """Deliver a result and acknowledge its ticket in one transaction."""
        fields: Any = {"result": result.to_json()}

        async def deliver(redis: Redis) -> None:
            async with redis.pipeline(transaction=True) as pipe:
                pipe.xadd(self._link.groups, fields)
                pipe.xack(self._link.tickets, READERS, lease.entry)
                pipe.xdel(self._link.tickets, lease.entry)
                await pipe.execute()

        await self._link.do(deliver)

    async def _num_tries(self, lease: _LeasedTicket, redis: Redis) -> int:
        found = await redis.xpending_range(
            self._link.tickets, READERS, min=lease.entry, max=lease.entry, count=1
        )
        return int(found[0]["times_delivered"]) if found else 1

    async def _release(self, lease: _LeasedTicket, redis: Redis) -> None:
        """Release a ticket as if its lease had expired."""
        await self._claim(redis, [lease.entry], idle=int(1000 * self._state.lease_s) + 1)

    async def _claim(self, redis: Redis, entries: list[bytes], *, idle: int) -> None:
        """Set the idle time, in milliseconds, of those tickets that are still leased to us."""
        tickets = self._link.tickets
        ours = {
            one["message_id"]
            for entry in entries
            for one in await redis.xpending_range(
                tickets, READERS, min=entry, max=entry, count=1, consumername=self._name
            )
        }
        if ours:
            await redis.xclaim(
                tickets, READERS, self._name, 0, [*ours], idle=idle, justid=True
            )  # JUSTID leaves the number of deliveries unchanged

    # --- heartbeat --------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            shown = self._status, self._state  # they may change while this is being published
            await self._link.do(self._show)
            with anyio.move_on_after(self._state.lease_s / 4):
                while shown == (self._status, self._state):
                    await self._changed.wait()

    async def _show(self, redis: Redis) -> None:
        link, lease_ms = self._link, int(1000 * self._state.lease_s)
        async with redis.pipeline(transaction=True) as pipe:
            pipe.sadd(link.runtimes, self._name)
            pipe.set(link.name("runtime", self._name), self._status.to_json(), px=lease_ms)
            await pipe.execute()
        if self._leased:
            await self._claim(redis, [lease.entry for lease in self._leased.values()], idle=0)

    async def _leave(self, redis: Redis) -> None:
        async with redis.pipeline(transaction=True) as pipe:
            pipe.srem(self._link.runtimes, self._name)
            pipe.delete(self._link.name("runtime", self._name))
            await pipe.execute()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; it is checked whenever something has changed."""
        while not condition():
            await self._changed.wait()  # no deadline: every change has one, or ends this


def _is_broken(row: Mapping[str, Any]) -> bool:
    return bool(row["trajectory"]["stop_reason"] == StopReason.INFRASTRUCTURE)


def _versions_of(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the versions of the weights that sampled the rollouts with a reward."""
    return {
        span["version"]
        for row in rows
        if row["reward"] is not None
        for turn in row["trajectory"]["turns"]
        for span in turn["versions"]
    }


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
