"""A runtime's end of a fleet: it takes tickets while there is room, and brings what came of them.

    the trainer's word ──> weights into our servers ──> may take tickets
                                                            │ one, once there is room for a group
    a ticket ──lease, renewed──> rolled out, scored, chosen ──result──> acknowledged

A ticket that was taken and whose lease runs out is another's. So a runtime may die at any moment,
and whoever leaves in peace lets go of what it has, at once.
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
from agentloop.training.fleet_link import (
    READERS,
    Announced,
    Link,
    Redis,
    Result,
    Said,
    Ticket,
    Word,
    packed,
)
from agentloop.training.handover import Handover, InFolder, Published, Serving
from agentloop.training.rollouts import RollsOut
from agentloop.trajectory import StopReason

__all__ = ["Member", "heard"]

log = logging.getLogger(__name__)

_POLL_S = 0.2
_RETRY_S = 5.0  # of weights that could not be loaded, and of a ticket that broke
_READ_MS = 1000
_CLOSE_S = 5.0
# Of the task or of the reward, not of this machine: it would be the same elsewhere.
_ANSWERS = (RequestError, RewardError, DataError)


async def heard(link: Link, *, within_s: float, say: Callable[[str], None]) -> Word:
    """What the trainer says, as soon as there is one. Raises ServerError: there is none."""
    word = await _word(link)
    if word is None:
        say(f"Waiting for the trainer: nothing is at {link.trainer} yet")
        with anyio.move_on_after(within_s):
            while word is None:
                await anyio.sleep(_POLL_S)
                word = await _word(link)
    if word is None:
        raise ServerError(f"no trainer was heard of within {within_s:g} s: {link.trainer}")
    return word


async def _word(link: Link) -> Word | None:
    found = await link.do(lambda redis: redis.get(link.trainer))
    return None if found is None else Word.of_json(found)


class _Broken(Exception):
    """Nothing but infrastructure came of a group."""


@dataclass(slots=True)
class _Hand:
    """A ticket that we have."""

    ticket: Ticket
    entry: bytes
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


class Member:
    """What is needed for `run`."""

    def __init__(
        self,
        link: Link,
        word: Word,
        rollouts: RollsOut,
        serving: Serving,
        *,
        name: str,
        num_servers: int,
        give_up_s: float,
        say: Callable[[str], None],
    ) -> None:
        """`word` is what was heard first; `name` is ours, in the whole fleet."""
        self._link = link
        self._word = word
        self._rollouts = rollouts
        self._serving = serving
        self._name = name
        self._give_up_s = give_up_s
        self._say = say
        self._hands: dict[str, _Hand] = {}
        self._said = Said(num_servers=num_servers)
        self._verified: set[str] = set()  # versions whose weights here are known to be right
        self._handover: Handover | None = None
        self._keeping_up = anyio.CancelScope()
        self._changed = anyio.Event()
        self._cursor = b"0-0"

    async def run(self) -> None:
        """Until the run is over.

        Raises:
            ServerError: Redis or the trainer was gone for too long, or our weights are wrong.
            SettingsError: Redis does not let us in, or the run has other settings now.
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

    # --- the trainer's word -----------------------------------------------------------------------

    async def _listen(self) -> None:
        """Until the trainer says that the run is over."""
        heard_s = time.monotonic()
        while not self._word.over:
            await anyio.sleep(_POLL_S)
            word = await _word(self._link)
            if word is not None:
                heard_s = time.monotonic()
                self._hear(word)
            elif time.monotonic() - heard_s > self._give_up_s:
                raise ServerError(
                    f"the trainer was not heard of for {self._give_up_s:g} s (fleet.give_up_s)"
                )

    def _hear(self, word: Word) -> None:
        if word.recipe != self._word.recipe and not word.over:
            raise SettingsError("the run has other settings now: start this runtime again")
        if word == self._word:
            return
        if word.life != self._word.life:
            self._say("Another trainer goes on with the run")
            self._verified.clear()
            for hand in self._hands.values():
                if hand.ticket.life != word.life:  # nobody waits for it
                    hand.scope.cancel()
        self._word = word
        if word.weights is not None and not self._has(word.weights):
            self._keeping_up.cancel()  # what takes long is given the new ones instead
        self._compare()

    async def _have_weights(self) -> None:
        """See to it that our servers have what the trainer says."""
        while True:
            weights = self._word.weights
            pause_s = _POLL_S
            if weights is not None and not self._has(weights):
                pause_s = 0 if await self._load(weights) else _RETRY_S
            elif weights is not None and self._handover is not None:
                if weights.checksum not in ("", self._said.checksum):
                    raise ServerError(
                        f"version {weights.version}: our weights are not those of the other "
                        f"runtimes: {self._said.checksum}, not {weights.checksum}"
                    )
                with anyio.CancelScope() as self._keeping_up:
                    await self._serving.keep_up(self._handover, timeout_s=weights.timeout_s)
            await anyio.sleep(pause_s)

    def _has(self, weights: Announced) -> bool:
        return (self._said.life, self._said.number) == (self._word.life, weights.number)

    async def _load(self, weights: Announced) -> bool:
        life, folder = self._word.life, Path(weights.folder)
        published: Published = InFolder(weights.version, folder, weights.pause)
        self._verified.discard(weights.version)  # it may come twice, and be another one then
        try:
            if not await anyio.Path(folder).is_dir():
                raise ServerError(
                    f"{folder} is not here: weights.folder, or run.folder, must be on a file "
                    "system that every machine has at the same place"
                )
            self._handover = await self._serving.hand_over(published, timeout_s=weights.timeout_s)
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
        """Compare our weights with what the trainer says of them, and remember a version that is
        right."""
        weights = self._word.weights
        if weights is not None and self._is_right(weights):
            self._verified.add(weights.version)
        self._tell_all()

    def _is_right(self, weights: Announced) -> bool:
        return self._has(weights) and self._said.checksum == weights.checksum != ""

    def _is_ready(self) -> bool:
        """Whether our weights are those that are asked for, and known to be right."""
        weights = self._word.weights
        return (
            weights is not None
            and self._is_right(weights)
            # Those of another life have the same names, and are about to be gone.
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
                await self._rollouts.has_room(size)
                hand = await self._link.do(self._next)
                if hand is None:
                    continue
                if hand.ticket.key in self._hands:  # Redis had lost it: it came anew
                    self._hands[hand.ticket.key].entry = hand.entry
                else:
                    self._hands[hand.ticket.key] = hand
                    await groups.start(self._answer, hand)

    async def _next(self, redis: Redis) -> _Hand | None:
        """A ticket of a runtime that is dead, or a new one; None: there was none for a second."""
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
            if fields:  # else it was deleted
                return _Hand(Ticket.of_json(fields[b"ticket"]), entry)
        return None

    async def _answer(self, hand: _Hand, *, task_status: TaskStatus[None]) -> None:
        ticket = hand.ticket
        stands = anyio.Event()

        def at_gate() -> None:
            if not stands.is_set():
                stands.set()
                task_status.started()

        is_done = False
        try:
            with hand.scope:
                is_done = await self._roll_out(hand, at_gate)
        finally:
            del self._hands[ticket.key]
            if not is_done:
                with anyio.move_on_after(_CLOSE_S, shield=True), suppress(AgentLoopError):
                    await self._link.do(partial(self._let_go, hand))
            at_gate()
            self._tell_all()

    async def _roll_out(self, hand: _Hand, at_gate: Callable[[], None]) -> bool:
        """Whether an answer was given."""
        ticket = hand.ticket
        answer = partial(Result, key=ticket.key, runtime=self._name)
        if (tries := await self._link.do(partial(self._num_tries, hand))) > self._word.max_tries:
            message = (
                f"group {ticket.name}: {tries - 1} tries came to nothing (fleet.max_tries): its "
                "runtimes died, or their servers did"
            )
            await self._bring(hand, answer(error="ServerError", message=message))
            return True
        with anyio.move_on_after(self._word.lease_s):
            await self._until(lambda: self._is_ready_for(ticket))
        if not self._is_ready_for(ticket):
            return False  # another has newer weights
        try:
            rolled = await self._rollouts.group(
                ticket.task,
                ticket.name,
                size=ticket.size,
                budget=ticket.budget,
                oldest=ticket.oldest,
                at_gate=at_gate,
            )
            rows = rolled.rows()
            if all(_is_broken(row) for row in rows):
                raise _Broken("nothing but infrastructure came of it")
        except _ANSWERS as error:
            found = answer(error=type(error).__name__, message=str(error))
        except (ServerError, _Broken) as error:
            log.error("group %s goes to others: %s", ticket.name, error)
            await anyio.sleep(_RETRY_S)
            return False
        else:
            if not await self._are_verified(versions := _versions_of(rows)):
                log.error(
                    "group %s goes to another runtime: our weights that sampled it were never "
                    "confirmed by the trainer (versions %s)",
                    ticket.name,
                    ", ".join(sorted(versions - self._verified)),
                )
                return False
            data = await anyio.to_thread.run_sync(packed, rows)
            found = answer(teaches=rolled.teaches, figures=rolled.figures)
            found = await self._put(found, data)
        await self._bring(hand, found)
        return True

    async def _are_verified(self, versions: set[str]) -> bool:
        """Wait until our weights of these versions are known to be right; return whether they are.

        New weights are known to be right once the trainer has compared them with those of the other
        runtimes. It ends a hand-over within `timeout_s`."""
        weights = self._word.weights
        hand_over_s = 0.0 if weights is None else weights.timeout_s
        with anyio.move_on_after(hand_over_s + self._word.lease_s):
            await self._until(lambda: versions <= self._verified)
        return versions <= self._verified

    async def _put(self, result: Result, data: bytes) -> Result:
        """Its rollouts where the trainer finds them."""
        most = self._word.max_result_mib
        if len(data) > most << 20:
            message = (
                f"the rollouts of a group take {len(data) >> 20} MiB, which is more than "
                f"fleet.max_result_mib ({most})"
            )
            return Result(
                key=result.key, runtime=self._name, error="SettingsError", message=message
            )
        folder = Path(self._word.folder)
        name = f"{result.key}-{self._name}-{uuid.uuid4().hex[:8]}"
        if await anyio.Path(folder, self._word.life).exists():  # we see the same folder
            try:
                await anyio.to_thread.run_sync(_write, folder / name, data)
            except OSError as error:  # it may have gone with its trainer, in this moment
                log.warning("%s: %s: the rollouts go through Redis", folder / name, error)
            else:
                return result.model_copy(update={"rows": name})
        num = await self._link.put_pieces(name, data)
        return result.model_copy(update={"rows": name, "num_pieces": num})

    async def _bring(self, hand: _Hand, result: Result) -> None:
        """The result, and the ticket is done: both or none."""
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
        """As if its lease had run out."""
        await self._claim(redis, [hand.entry], idle=int(1000 * self._word.lease_s) + 1)

    async def _claim(self, redis: Redis, entries: list[bytes], *, idle: int) -> None:
        """Those of these that are ours still: when they were heard of last, in milliseconds."""
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
            )  # which leaves the number of tries as it is

    # --- that we live -----------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            changed = self._changed  # it may change while it is shown
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
        """Wait; conditions are asked again whenever something has changed."""
        while not condition():
            await self._changed.wait()  # no deadline: what changes has one, or ends it

    def _tell_all(self) -> None:
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
    """Whole, or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
