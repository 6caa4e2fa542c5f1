"""The waiting room in front of the servers, and who goes where.

    generate() ──> waiting room ──place──> a server's stream ──chunks──> the rollout
                       ▲                        │ breaks
                       └── the same turn, its prompt longer by what was received ──┘

A request waits here, first in, first out, until a server has room for it in its KV cache; who
unblocks it is the end of another request (`_admit`) or a server that is well again (`_probe`).
A stream that breaks goes on elsewhere from its exact ids, so that its reader sees one stream.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import anyio
import pydantic

from agentloop.errors import PromptTooLong, RequestError, ServerRefused, ServerUnavailable
from agentloop.inference.kv_ledger import KVLedger, LengthPredictor, Place
from agentloop.inference.sglang import Chunk, OnChunk, Sampling, ServerInfo, SGLangServer
from agentloop.trajectory import TurnEnd, VersionSpan

__all__ = ["Generation", "Router", "RouterSettings", "ServerView"]

log = logging.getLogger(__name__)

_MAX_STICKY = 100_000  # trajectories remembered; the oldest are forgotten


class RouterSettings(pydantic.BaseModel):
    """How requests meet servers."""

    model_config = pydantic.ConfigDict(extra="forbid")

    wait_timeout_s: float = pydantic.Field(
        600.0, gt=0, description="A request that waited this long for room fails."
    )
    max_waiting: int = pydantic.Field(
        65_536, ge=1, description="Requests in the waiting room; one more is refused."
    )
    max_moves: int = pydantic.Field(
        4, ge=0, description="How often a turn may go on elsewhere after a server failed."
    )
    reserve_tokens: int = pydantic.Field(
        256, ge=0, description="KV room kept for the growth of each request."
    )
    probe_interval_s: float = pydantic.Field(
        1.0, gt=0, description="How often a server that failed is asked whether it is well."
    )
    stall_timeout_s: float = pydantic.Field(
        120.0, gt=0, description="A stream that is silent for this long is broken."
    )


@dataclass(frozen=True, slots=True)
class Generation:
    """What a turn asks for. `rid` is its name, unique; `key` is that of its trajectory."""

    rid: str
    key: str
    ids: list[int]
    sampling: Sampling
    max_new_tokens: int
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServerView:
    """What the router knows of one server."""

    url: str
    healthy: bool
    num_running: int
    num_held_tokens: int
    capacity_tokens: int


@dataclass(slots=True)
class _Seat:
    server: SGLangServer
    info: ServerInfo
    healthy: bool = True


@dataclass(slots=True)
class _Waiter:
    num_tokens: int
    num_reserved: int
    generation: Generation
    placed: anyio.Event = field(default_factory=anyio.Event)
    seat: _Seat | None = None


OnMoved = Callable[[str, str], None]
"""Told when a stream broke: the server's url and the reason."""


class Router:
    """Use `Router.open(...)`; see the module's docstring."""

    def __init__(
        self, servers: Sequence[tuple[SGLangServer, ServerInfo]], settings: RouterSettings
    ) -> None:
        self._settings = settings
        self._ledger = KVLedger(LengthPredictor(prior=settings.reserve_tokens))
        self._seats: dict[str, _Seat] = {}
        self._waiting: OrderedDict[str, _Waiter] = OrderedDict()
        self._sticky: OrderedDict[str, str] = OrderedDict()
        self._ill = anyio.Event()
        for server, info in servers:
            self._seats[server.url] = _Seat(server, info)
            self._ledger.add(Place(server.url), info.max_total_num_tokens)
        #: Prompt and response tokens that every server can hold.
        self.context_length = min(
            min(info.context_length, info.max_total_num_tokens - 1) for _, info in servers
        )

    @classmethod
    @asynccontextmanager
    async def open(
        cls, servers: Sequence[SGLangServer], settings: RouterSettings
    ) -> AsyncIterator[Router]:
        """Ask each server what it is and keep watch over those that fail.

        Raises:
            ServerUnavailable, ServerRefused: one cannot be used.
        """
        router = cls([(server, await server.info()) for server in servers], settings)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(router._probe)
            tasks.start_soon(router._watch_streams)
            try:
                yield router
            finally:
                tasks.cancel_scope.cancel()

    @property
    def model_path(self) -> str:
        """What the servers say they have loaded."""
        return next(iter(self._seats.values())).info.model_path

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def view(self) -> list[ServerView]:
        return [
            ServerView(
                url,
                seat.healthy,
                self._ledger.pools[Place(url)].num_sequences,
                self._ledger.pools[Place(url)].num_live,
                seat.info.max_total_num_tokens,
            )
            for url, seat in self._seats.items()
        ]

    async def generate(
        self,
        generation: Generation,
        *,
        vocab_size: int,
        on_chunk: OnChunk,
        on_placed: OnMoved,
        on_moved: OnMoved,
    ) -> None:
        """Stream one turn, over as many servers as it takes; ends with a chunk that has `end` set.

        Args:
            on_chunk: called as tokens arrive, in the event loop's callback: must not block.
            vocab_size: an id outside of it would kill a server, so it is refused here.
            on_placed: told which server takes the turn, before its first chunk.
            on_moved: told of each server that failed meanwhile.

        Raises:
            RequestError: the request itself is at fault.
            ServerUnavailable: no server could serve it in time or in `max_moves`.
        """
        _check_ids(generation.ids, vocab_size)
        if len(generation.ids) >= self.context_length:
            raise PromptTooLong(
                f"the prompt has {len(generation.ids)} tokens; the servers hold "
                f"{self.context_length}, with the response"
            )
        received: list[int] = []
        moves = 0
        while True:
            if ending := _ended_unseen(generation, received):
                on_chunk(ending)
                return
            rest = replace(
                generation,
                # Never used twice, nor the beginning of another: SGLang aborts by prefix, and
                # once more when a stream has ended.
                rid=uuid.uuid4().hex,
                ids=generation.ids + received,
                max_new_tokens=generation.max_new_tokens - len(received),
            )
            seat = await self._place(rest, first=moves > 0)
            on_placed(seat.server.url, "")
            offset = len(received)
            params = rest.sampling.to_sglang(
                max_new_tokens=rest.max_new_tokens, stop_ids=rest.stop_ids
            )
            aborted: list[Chunk] = []

            def take(
                chunk: Chunk,
                rid: str = rest.rid,
                offset: int = offset,
                aborted: list[Chunk] = aborted,
            ) -> None:
                self._ledger.grow(rid, len(chunk.ids))
                received.extend(chunk.ids)
                if chunk.end is None:
                    on_chunk(chunk)
                elif chunk.end is not TurnEnd.ABORT:
                    on_chunk(_shifted(chunk, offset))
                else:  # not by us: what it carried is good, and the turn goes on
                    aborted.append(chunk)
                    on_chunk(replace(chunk, end=None, versions=()))

            try:
                await seat.server.generate(rest.ids, params, rid=rest.rid, on_chunk=take)
                if not aborted:
                    return
                raise ServerUnavailable(f"{seat.server.url} aborted: {aborted[0].error}")
            except (ServerUnavailable, ServerRefused) as error:
                if isinstance(error, ServerRefused) and not _worth_moving(error):
                    raise RequestError(str(error)) from error
                self._mark_ill(seat, str(error))
                on_moved(seat.server.url, str(error))
                moves += 1
                if moves > self._settings.max_moves:
                    raise ServerUnavailable(f"gave up after {moves} servers: {error}") from error
            finally:
                self._ledger.release(rest.rid, time.monotonic())
                self._admit()

    def forget(self, key: str) -> None:
        """A trajectory ended: its place in a server's cache is of no more use."""
        self._sticky.pop(key, None)

    async def _place(self, generation: Generation, *, first: bool) -> _Seat:
        """Wait for room; `first` goes before those who wait already: it has begun."""
        if len(self._waiting) >= self._settings.max_waiting:
            raise ServerUnavailable(f"{len(self._waiting)} requests wait already")
        num_reserved = min(generation.max_new_tokens, self._settings.reserve_tokens)
        waiter = _Waiter(len(generation.ids), num_reserved, generation)
        self._waiting[generation.rid] = waiter
        if first:
            self._waiting.move_to_end(generation.rid, last=False)
        self._admit()
        try:
            with anyio.fail_after(self._settings.wait_timeout_s):
                await waiter.placed.wait()
        except BaseException as error:
            # It may have been given a seat in the same moment, and have kept others waiting.
            self._waiting.pop(generation.rid, None)
            self._ledger.release(generation.rid, time.monotonic())
            self._admit()
            if isinstance(error, TimeoutError):
                raise ServerUnavailable(
                    f"no server had room within {self._settings.wait_timeout_s:g} s"
                ) from error
            raise
        assert waiter.seat is not None
        return waiter.seat

    def _admit(self) -> None:
        """Place those who wait, oldest first, until one fits nowhere: nobody overtakes it."""
        while self._waiting:
            waiter = next(iter(self._waiting.values()))
            seat = self._choose(waiter)
            if seat is None:
                return
            generation = waiter.generation
            del self._waiting[generation.rid]
            url = seat.server.url
            self._ledger.reserve(generation.rid, Place(url), waiter.num_tokens, waiter.num_reserved)
            self._sticky[generation.key] = url
            if len(self._sticky) > _MAX_STICKY:
                self._sticky.popitem(last=False)
            waiter.seat = seat
            waiter.placed.set()

    def _choose(self, waiter: _Waiter) -> _Seat | None:
        """The trajectory's own server while it has room, else the one with the most room."""
        fitting = [
            url
            for url, seat in self._seats.items()
            if seat.healthy
            and self._ledger.fits(
                self._ledger.pools[Place(url)], waiter.num_tokens + waiter.num_reserved
            )
        ]
        if not fitting:
            return None
        own = self._sticky.get(waiter.generation.key)
        if own in fitting:
            return self._seats[own]
        return self._seats[max(fitting, key=lambda url: self._ledger.pools[Place(url)].room)]

    def _mark_ill(self, seat: _Seat, reason: str) -> None:
        if seat.healthy:
            seat.healthy = False
            log.warning("%s failed: %s", seat.server.url, reason)
        self._ill.set()

    async def _probe(self) -> None:
        """Ask the servers that failed until they answer; sleeps while none has."""
        while True:
            await self._ill.wait()  # no deadline: there is nothing to do until one fails
            await anyio.sleep(self._settings.probe_interval_s)
            for seat in self._seats.values():
                if not seat.healthy and await seat.server.is_ready():
                    seat.healthy = True
                    log.info("%s is well again", seat.server.url)
            if all(seat.healthy for seat in self._seats.values()):
                self._ill = anyio.Event()
            self._admit()

    async def _watch_streams(self) -> None:
        """Break the streams that are silent for too long; their turns go on elsewhere."""
        while True:
            await anyio.sleep(min(1.0, self._settings.stall_timeout_s / 4))
            for seat in self._seats.values():
                seat.server.close_stalled()


def _worth_moving(error: ServerRefused) -> bool:
    """Whether another server, or a later time, may answer what this one refused."""
    return error.status >= 500 or error.status in (408, 429)


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    if not ids:
        raise RequestError("ids: empty")
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise RequestError(f"ids: {wrong} is outside of the vocabulary of {vocab_size}")


def _ended_unseen(generation: Generation, received: list[int]) -> Chunk | None:
    """The stream broke between its last token and the frame that says so."""
    if not received:
        return None
    if received[-1] in generation.stop_ids:
        return Chunk([], [], "", end=TurnEnd.STOP)
    if len(received) >= generation.max_new_tokens:
        return Chunk([], [], "", end=TurnEnd.LENGTH)
    return None


def _shifted(chunk: Chunk, offset: int) -> Chunk:
    """`versions` counted from the turn's first token, not from where it went on."""
    if not offset:
        return chunk
    spans = tuple(
        VersionSpan(span.version, span.start + offset, span.end + offset) for span in chunk.versions
    )
    return replace(chunk, versions=spans)
