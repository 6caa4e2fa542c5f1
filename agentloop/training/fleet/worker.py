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

from agentloop.errors import (
    AgentLoopError,
    DataError,
    RequestError,
    RewardError,
    ServerError,
    SettingsError,
    sole,
)
from agentloop.training.fleet.messages import (
    READERS,
    Announced,
    Redis,
    RedisLink,
    Result,
    Said,
    Ticket,
    Word,
    packed,
)
from agentloop.training.rollouts import RollsOut
from agentloop.training.weight_sync.disk import PublishedFolder
from agentloop.training.weight_sync.sync import Serving, SyncResult
from agentloop.training.weight_sync.transport import PublishedWeights
from agentloop.trajectory import StopReason

__all__ = ["Member", "heard"]

log = logging.getLogger(__name__)

_POLL_S = 0.2
_RETRY_S = 5.0  # pause after a failure to load weights or to do a ticket
_READ_MS = 1000
_CLOSE_S = 5.0
# Errors of the task or the reward, not of this machine: they would recur elsewhere.
_ANSWERS = (RequestError, RewardError, DataError)


async def heard(link: RedisLink, *, within_s: float, say: Callable[[str], None]) -> Word:
    """Wait for a trainer and return its state. Raises ServerError if there is none in time."""
    word = await _word(link)
    if word is None:
        say(f"Waiting for the trainer: there is no {link.trainer} in Redis yet")
        with anyio.move_on_after(within_s):
            while word is None:
                await anyio.sleep(_POLL_S)
                word = await _word(link)
    if word is None:
        raise ServerError(f"no trainer appeared at {link.trainer} within {within_s:g} s")
    return word


async def _word(link: RedisLink) -> Word | None:
    found = await link.do(lambda redis: redis.get(link.trainer))
    return None if found is None else Word.of_json(found)


class _Broken(Exception):
    """All rollouts of a group failed for reasons of infrastructure."""


@dataclass(slots=True)
class _Hand:
    """A ticket that this runtime has leased."""

    ticket: Ticket
    entry: bytes
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


class Member:
    """A runtime that takes part in a fleet: `run` does tickets until the run is over."""

    def __init__(
        self,
        link: RedisLink,
        word: Word,
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
            word: the trainer's state when this runtime joined.
            name: this runtime's name, unique in the fleet.
        """
        self._link = link
        self._word = word
        self._rollouts = rollouts
        self._serving = serving
        self._name = name
        self._give_up_s = give_up_s
        self._say = say
        self._hands: dict[str, _Hand] = {}
        self._said = Said(num_servers=num_servers)
        self._verified: set[str] = set()  # versions whose weights are confirmed
        self._handover: SyncResult | None = None
        self._keeping_up = anyio.CancelScope()
        self._changed = anyio.Event()
        self._cursor = b"0-0"

    async def run(self) -> None:
        """Do tickets until the run is over.

        Raises:
            ServerError: Redis or the trainer was unavailable for too long, or our weights are
                wrong.
            SettingsError: Redis rejected the login, or the run's settings have changed.
        """
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._beat)
                tasks.start_soon(self._have_weights)
                tasks.start_soon(self._take_tickets)
                await self._listen()
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise sole(group) from None
        finally:
            with anyio.move_on_after(_CLOSE_S, shield=True), suppress(AgentLoopError):
                await self._link.do(self._leave)

    # --- the trainer's state ----------------------------------------------------------------------

    async def _listen(self) -> None:
        """Follow the trainer's state until it says that the run is over."""
        heard_s = time.monotonic()
        while not self._word.over:
            await anyio.sleep(_POLL_S)
            word = await _word(self._link)
            if word is not None:
                heard_s = time.monotonic()
                self._hear(word)
            elif time.monotonic() - heard_s > self._give_up_s:
                raise ServerError(
                    f"the trainer was silent for {self._give_up_s:g} s (fleet.give_up_s)"
                )

    def _hear(self, word: Word) -> None:
        if word.recipe != self._word.recipe and not word.over:
            raise SettingsError("the run's settings have changed: restart this runtime")
        if word == self._word:
            return
        if word.life != self._word.life:
            self._say("The run is continued by another trainer process")
            self._verified.clear()
            for hand in self._hands.values():
                if hand.ticket.life != word.life:  # its trainer is gone
                    hand.scope.cancel()
        self._word = word
        if word.weights is not None and not self._has(word.weights):
            self._keeping_up.cancel()  # load the new weights instead
        self._compare()

    async def _have_weights(self) -> None:
        """Keep our servers at the weights that the trainer announces."""
        while True:
            weights = self._word.weights
            pause_s = _POLL_S
            if weights is not None and not self._has(weights):
                pause_s = 0 if await self._load(weights) else _RETRY_S
            elif weights is not None and self._handover is not None:
                if weights.checksum not in ("", self._said.checksum):
                    raise ServerError(
                        f"version {weights.version}: this runtime's weights differ from those of "
                        f"the others: checksum {self._said.checksum}, not {weights.checksum}"
                    )
                with anyio.CancelScope() as self._keeping_up:
                    await self._serving.sync_stale(self._handover, timeout_s=weights.timeout_s)
            await anyio.sleep(pause_s)

    def _has(self, weights: Announced) -> bool:
        return (self._said.life, self._said.number) == (self._word.life, weights.number)

    async def _load(self, weights: Announced) -> bool:
        life, folder = self._word.life, Path(weights.folder)
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
            self._handover = await self._serving.sync(published, timeout_s=weights.timeout_s)
        except ServerError as error:
            log.error("version %s: %s", weights.version, error)
            self._said = Said.model_validate({**dict(self._said), "error": str(error)})
        else:
            self._said = Said(
                life=life,
                number=weights.number,
                checksum=self._handover.checksum,
                num_servers=len(self._handover.loaded),
            )
        self._compare()
        return not self._said.error

    def _compare(self) -> None:
        """Compare our checksum with the trainer's, and record the version if they match."""
        weights = self._word.weights
        if weights is not None and self._is_right(weights):
            self._verified.add(weights.version)
        self._notify()

    def _is_right(self, weights: Announced) -> bool:
        return self._has(weights) and self._said.checksum == weights.checksum != ""

    def _is_ready(self) -> bool:
        """Return whether we have the announced weights and they are confirmed."""
        weights = self._word.weights
        return (
            weights is not None
            and self._is_right(weights)
            # Results of another trainer process have the same names and are about to be deleted.
            and all(hand.ticket.life == self._word.life for hand in self._hands.values())
        )

    def _is_ready_for(self, ticket: Ticket) -> bool:
        weights = self._word.weights
        return (
            self._is_ready()
            and ticket.life == self._word.life
            and weights is not None
            and int(weights.version) >= ticket.oldest
        )

    # --- tickets ----------------------------------------------------------------------------------

    async def _take_tickets(self) -> None:
        size = int(self._word.recipe["group_size"])
        async with anyio.create_task_group() as groups:
            while True:
                await self._until(self._is_ready)  # no deadline: `_listen` has one
                await self._rollouts.wait_for_capacity(size)
                hand = await self._link.do(self._next)
                if hand is None:
                    continue
                if hand.ticket.key in self._hands:  # lost by Redis and added again
                    self._hands[hand.ticket.key].entry = hand.entry
                else:
                    self._hands[hand.ticket.key] = hand
                    await groups.start(self._answer, hand)

    async def _next(self, redis: Redis) -> _Hand | None:
        """Take a dead runtime's ticket or a new one; return None if there was none for a second."""
        tickets, lease_ms = self._link.tickets, int(1000 * self._word.lease_s)
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
                return _Hand(Ticket.of_json(fields[b"ticket"]), entry)
        return None

    async def _answer(self, hand: _Hand, *, task_status: TaskStatus[None]) -> None:
        ticket = hand.ticket
        stands = anyio.Event()

        def on_queued() -> None:
            if not stands.is_set():
                stands.set()
                task_status.started()

        is_done = False
        try:
            with hand.scope:
                is_done = await self._roll_out(hand, on_queued)
        finally:
            del self._hands[ticket.key]
            if not is_done:
                with anyio.move_on_after(_CLOSE_S, shield=True), suppress(AgentLoopError):
                    await self._link.do(partial(self._let_go, hand))
            on_queued()
            self._notify()

    async def _roll_out(self, hand: _Hand, on_queued: Callable[[], None]) -> bool:
        """Do a ticket; return whether a result was delivered."""
        ticket = hand.ticket
        answer = partial(Result, key=ticket.key, runtime=self._name)
        if (tries := await self._link.do(partial(self._num_tries, hand))) > self._word.max_tries:
            message = (
                f"group {ticket.name}: {tries - 1} attempts failed (fleet.max_tries): runtimes or "
                "their servers died"
            )
            await self._bring(hand, answer(error="ServerError", message=message))
            return True
        with anyio.move_on_after(self._word.lease_s):
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
        await self._bring(hand, found)
        return True

    async def _are_verified(self, versions: set[str]) -> bool:
        """Wait for the trainer to confirm our weights of these versions; return whether it did.

        The trainer confirms new weights after it has compared them with those of other runtimes,
        within `timeout_s` of the weight sync.
        """
        weights = self._word.weights
        hand_over_s = 0.0 if weights is None else weights.timeout_s
        with anyio.move_on_after(hand_over_s + self._word.lease_s):
            await self._until(lambda: versions <= self._verified)
        return versions <= self._verified

    async def _put(self, result: Result, data: bytes) -> Result:
        """Store the rollouts in the trainer's folder or in Redis; return the completed result."""
        most = self._word.max_result_mib
        if len(data) > most << 20:
            message = (
                f"the rollouts of a group take {len(data) >> 20} MiB, more than "
                f"fleet.max_result_mib ({most}): raise it"
            )
            return Result(
                key=result.key, runtime=self._name, error="SettingsError", message=message
            )
        folder = Path(self._word.folder)
        name = f"{result.key}-{self._name}-{uuid.uuid4().hex[:8]}"
        if await anyio.Path(folder, self._word.life).exists():  # the folder is shared
            try:
                await anyio.to_thread.run_sync(_write, folder / name, data)
            except OSError as error:  # the trainer may have just removed it
                log.warning("%s: %s: sending the rollouts through Redis", folder / name, error)
            else:
                return result.model_copy(update={"rows": name})
        num = await self._link.put_pieces(name, data)
        return result.model_copy(update={"rows": name, "num_pieces": num})

    async def _bring(self, hand: _Hand, result: Result) -> None:
        """Deliver a result and acknowledge its ticket in one transaction."""
        fields: Any = {"result": result.to_json()}

        async def bring(redis: Redis) -> None:
            async with redis.pipeline(transaction=True) as pipe:
                pipe.xadd(self._link.groups, fields)
                pipe.xack(self._link.tickets, READERS, hand.entry)
                pipe.xdel(self._link.tickets, hand.entry)
                await pipe.execute()

        await self._link.do(bring)

    async def _num_tries(self, hand: _Hand, redis: Redis) -> int:
        found = await redis.xpending_range(
            self._link.tickets, READERS, min=hand.entry, max=hand.entry, count=1
        )
        return int(found[0]["times_delivered"]) if found else 1

    async def _let_go(self, hand: _Hand, redis: Redis) -> None:
        """Release a ticket as if its lease had expired."""
        await self._claim(redis, [hand.entry], idle=int(1000 * self._word.lease_s) + 1)

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
            changed = self._changed  # the status may change while it is being published
            await self._link.do(self._show)
            with anyio.move_on_after(self._word.lease_s / 4):
                await changed.wait()

    async def _show(self, redis: Redis) -> None:
        link, lease_ms = self._link, int(1000 * self._word.lease_s)
        async with redis.pipeline(transaction=True) as pipe:
            pipe.sadd(link.runtimes, self._name)
            pipe.set(link.name("runtime", self._name), self._said.to_json(), px=lease_ms)
            await pipe.execute()
        if self._hands:
            await self._claim(redis, [hand.entry for hand in self._hands.values()], idle=0)

    async def _leave(self, redis: Redis) -> None:
        async with redis.pipeline(transaction=True) as pipe:
            pipe.srem(self._link.runtimes, self._name)
            pipe.delete(self._link.name("runtime", self._name))
            await pipe.execute()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; it is checked whenever something has changed."""
        while not condition():
            await self._changed.wait()  # no deadline: every change has one, or ends this

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


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
