"""The waiting room in front of the servers, and who goes where.

    generate() ──> waiting room ──placement──> a server's stream ──chunks──> the rollout
                       ▲   ▲                        │ breaks
                       │   └── the same turn, its prompt longer by what was received
                       └── room: a turn ended, a server answers again, a report came

The decisions are pure and elsewhere: what each KV cache holds (kv_ledger.py), which server takes a
turn (placement.py), who is next (waiting_room.py), how well a server is (health.py), how many
groups are in flight (group_gate.py). Here they meet the servers: each is asked once a second which
weights it has and what it holds, which tells that it lives, too.

A stream that breaks goes on elsewhere from its exact ids, so that its reader sees one stream.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import anyio
import pydantic
from anyio.abc import TaskGroup

from agentloop.errors import (
    PromptTooLong,
    RequestError,
    ServerError,
    ServerRefused,
    ServerUnavailable,
)
from agentloop.inference.admission import Admission, AdmissionSettings, Forecast
from agentloop.inference.group_gate import Group, GroupGate
from agentloop.inference.health import Health, HealthSettings, ServerState
from agentloop.inference.kv_ledger import KVLedger, LengthPredictor, Place
from agentloop.inference.placement import Ask, Costs, Decision, Placement
from agentloop.inference.sglang import Chunk, OnChunk, Sampling, ServerInfo, SGLangServer
from agentloop.inference.waiting_room import Waiting, WaitingRoom
from agentloop.trajectory import TurnEnd, VersionSpan

__all__ = ["Generation", "Router", "RouterSettings", "ServerView"]

log = logging.getLogger(__name__)
explain_log = logging.getLogger("agentloop.explain")  # each placement, at INFO; off by default

_MAX_ORDERS = 100_000  # trajectories and groups whose place in line is remembered
_CLOSED = "the runtime is shutting down"


class RouterSettings(pydantic.BaseModel):
    """How requests meet servers."""

    model_config = pydantic.ConfigDict(extra="forbid")

    policy: Literal[
        "kv", "static", "round_robin", "least_requests", "power_of_two", "sticky_least_loaded"
    ] = pydantic.Field(
        "kv",
        description="Which server takes a turn. kv: where its KV fits and the work is least; the "
        "others are for comparison, and send at once.",
    )
    wait_timeout_s: float = pydantic.Field(
        600.0, gt=0, description="A request that waited this long for room fails."
    )
    patience_s: float = pydantic.Field(
        10.0, gt=0, description="Nobody overtakes a request that has waited this long for room."
    )
    max_waiting: int = pydantic.Field(
        65_536, ge=1, description="Requests in the waiting room; one more is refused."
    )
    max_moves: int = pydantic.Field(
        4, ge=0, description="How often a turn may go on elsewhere after a server failed."
    )
    reserve_tokens: int = pydantic.Field(
        256, ge=1, description="KV room kept for a turn's growth, before lengths are known."
    )
    probe_interval_s: float = pydantic.Field(
        1.0, gt=0, description="How often a server is asked how it is and what it holds."
    )
    stall_timeout_s: float = pydantic.Field(
        120.0, gt=0, description="A stream that is silent for this long is broken."
    )
    costs: Costs = pydantic.Field(default_factory=lambda: Costs())
    health: HealthSettings = pydantic.Field(default_factory=HealthSettings)
    admission: AdmissionSettings = pydantic.Field(default_factory=AdmissionSettings)


@dataclass(frozen=True, slots=True)
class Generation:
    """What a turn asks for. `rid` is its name, unique; `key` is that of its trajectory.

    Siblings have the same `group` and the first `num_shared` ids of the prompt in common.
    """

    rid: str
    key: str
    ids: list[int]
    sampling: Sampling
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    group: str = ""
    num_shared: int = 0
    num_top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class ServerView:
    """What the router knows of one server; tokens of its KV cache."""

    url: str
    state: ServerState
    num_running: int
    num_held_tokens: int
    num_reserved_tokens: int
    num_parked_tokens: int  # of rollouts at a tool, which will come back for them
    capacity_tokens: int
    num_others_tokens: int = 0
    reason: str = ""
    weight_version: str | None = None  # until it has said so
    num_cached_tokens: int = 0  # of turns that are over: reusable, and given up when there is need

    @property
    def healthy(self) -> bool:
        """Whether it takes what comes."""
        return self.state.takes_new


@dataclass(slots=True)
class _Seat:
    server: SGLangServer
    info: ServerInfo
    health: Health
    weight_version: str | None = None  # until it has said so
    verified_version: str | None = None  # what somebody has seen to that it has
    num_loads: int = 0  # of weights, that the router was told of
    num_retracted: Counter[Place] = field(default_factory=Counter)

    @property
    def places(self) -> list[Place]:
        """One for each data-parallel rank: each has a KV cache of its own."""
        return [Place(self.server.url, rank) for rank in range(self.info.dp_size)]

    @property
    def context_length(self) -> int:
        """Prompt and response tokens of the longest sequence that it can hold."""
        return min(self.info.context_length, self.info.max_total_num_tokens - 1)


@dataclass(slots=True)
class _Request:
    """A turn, or the rest of one, that looks for a place."""

    generation: Generation
    ask: Ask
    placed: anyio.Event = field(default_factory=anyio.Event)
    seat: _Seat | None = None
    decision: Decision | None = None  # the last one


OnPlaced = Callable[[str, Decision], None]
"""Told of the server's url, and of the decision that sends the turn there."""

OnMoved = Callable[[str, str], None]
"""Told of the server's url, and why the turn leaves it."""


class Router:
    """Use `Router.open(...)`; see the module's docstring."""

    def __init__(self, settings: RouterSettings, *, longest: int) -> None:
        self._settings = settings
        self._ledger = KVLedger(LengthPredictor(prior=settings.reserve_tokens))
        self._placement = Placement(
            self._ledger, settings.policy, costs=settings.costs, patience_s=settings.patience_s
        )
        self._room: WaitingRoom[_Request] = WaitingRoom(patience_s=settings.patience_s)
        self._seats: dict[str, _Seat] = {}
        self._gate = GroupGate(
            Admission(settings.admission, Forecast(longest=longest)), capacity=self._capacity
        )
        self._weights: str | None = None  # the version that servers must have; none: any
        self._verified = False  # whether their own word for it is not enough
        self._orders: OrderedDict[str, int] = OrderedDict()
        self._num_orders = 0
        self._closed = False
        self._tasks: TaskGroup

    @classmethod
    @asynccontextmanager
    async def open(
        cls, servers: Sequence[SGLangServer], settings: RouterSettings, *, longest: int = 8192
    ) -> AsyncIterator[Router]:
        """Ask each server what it is and keep watch over them.

        `longest` is what a rollout's response may have, in tokens; groups are admitted by it.

        Raises:
            ServerUnavailable, ServerRefused: one cannot be used.
        """
        router = cls(settings, longest=longest)
        seats = [await router._seat(server) for server in servers]
        async with anyio.create_task_group() as tasks:
            router._tasks = tasks
            for seat in seats:
                router._take_in(seat)
            tasks.start_soon(router._watch_streams)
            try:
                yield router
            finally:
                router._close()
                tasks.cancel_scope.cancel()

    # --- servers --------------------------------------------------------------------------------

    async def add(self, server: SGLangServer) -> None:
        """One more server, from now on.

        Raises:
            ValueError: it is there already.
            ServerUnavailable, ServerRefused: it cannot be used.
        """
        seat = await self._seat(server)
        if server.url in self._seats:
            raise ValueError(f"{server.url} is there already")
        self._take_in(seat)
        self._admit()
        self._gate.admit()

    def retire(self, url: str) -> None:
        """It takes nothing new; what runs there ends, and then it is forgotten.

        Raises:
            KeyError: there is no such server.
        """
        self._seats[url.rstrip("/")].health.retire()
        self._admit()  # who waits for it alone need not wait any longer

    def exited(self, url: str, reason: str) -> None:
        """The server's process ended, somebody saw: its turns go on elsewhere at once."""
        if seat := self._seats.get(url):
            self._note(seat, seat.health.exited, reason)
            seat.server.break_streams(reason)  # of a retired one, too

    def restarting(self, url: str) -> None:
        """Somebody starts it again; it is back when it answers."""
        if seat := self._seats.get(url):
            seat.health.restarting()

    def is_dead(self, url: str) -> bool:
        """Whether nothing at `url` answers, or what it answers is worth nothing; also of one that
        is started again and has not answered yet."""
        seat = self._seats.get(url)
        return seat is not None and not seat.health.state.keeps_running

    def is_wanted(self, url: str) -> bool:
        """Whether turns go there, when it is well."""
        seat = self._seats.get(url)
        return seat is not None and seat.health.state is not ServerState.RETIRED

    def give_up(self, url: str) -> bool:
        """It won't come back: as if it had been retired. Whether any other server is left."""
        if url in self._seats:
            self.retire(url)
        return any(self.is_wanted(other) for other in self._seats)

    def require_weights(self, version: str | None, *, verified: bool = False) -> None:
        """From now on only servers with these weights take turns; the others are STALE until they
        say that they have them, or with `verified` until `weights_loaded` says so, anew also of
        those that have had them. None: any weights will do."""
        self._weights, self._verified = version, verified
        for seat in self._seats.values():
            seat.verified_version = None
            if not self._has_weights(seat, seat.weight_version):
                seat.health.weights_missed()
        self._admit()

    def _has_weights(self, seat: _Seat, said: str | None) -> bool:
        """Whether a server that says that it has `said` has what is required."""
        if self._weights is None:
            return True
        return said == self._weights and (not self._verified or seat.verified_version == said)

    def weights_loaded(self, url: str, version: str) -> None:
        """Somebody has seen to it that the server has them now; nothing that its cache holds will
        be found by the turns to come, whether it was emptied or not."""
        seat = self._seats.get(url)
        if seat is None:  # it was retired meanwhile
            return
        seat.weight_version = seat.verified_version = version
        seat.num_loads += 1
        for place in seat.places:
            self._ledger.flush(place)
        if version == self._weights:
            seat.health.weights_loaded()
        self._admit()

    @property
    def servers(self) -> list[SGLangServer]:
        """Those that can be given weights."""
        return [seat.server for seat in self._seats.values() if seat.health.state.takes_weights]

    async def _seat(self, server: SGLangServer) -> _Seat:
        seat = _Seat(server, await server.info(), Health(self._settings.health))
        if self._weights is not None:
            seat.health.weights_missed()  # for all that is known
        return seat

    def _take_in(self, seat: _Seat) -> None:
        self._seats[seat.server.url] = seat
        for place in seat.places:
            self._ledger.add(
                place, seat.info.max_total_num_tokens, seat.info.max_running_requests or math.inf
            )
        self._tasks.start_soon(self._watch, seat)

    def _capacity(self) -> int:
        """Tokens of KV, of all servers that take requests."""
        return sum(
            seat.info.max_total_num_tokens * seat.info.dp_size
            for seat in self._seats.values()
            if seat.health.state.takes_new
        )

    @property
    def context_length(self) -> int:
        """Prompt and response tokens that every server can hold.

        Raises:
            ServerUnavailable: all have been retired.
        """
        if not self._seats:
            raise ServerUnavailable("there is no server: all have been retired")
        return min(seat.context_length for seat in self._seats.values())

    @property
    def model_path(self) -> str:
        """What the servers say they have loaded."""
        return next(iter(self._seats.values())).info.model_path

    @property
    def num_waiting(self) -> int:
        return len(self._room)

    def view(self) -> list[ServerView]:
        views = []
        for url, seat in self._seats.items():
            pools = [self._ledger.pools[place] for place in seat.places]
            views.append(
                ServerView(
                    url,
                    seat.health.state,
                    sum(pool.num_sequences for pool in pools),
                    sum(pool.num_live for pool in pools),
                    sum(pool.num_reserved for pool in pools),
                    sum(pool.num_wanted for pool in pools),
                    sum(pool.capacity for pool in pools),
                    sum(pool.num_others for pool in pools),
                    seat.health.reason,
                    seat.weight_version,
                    sum(pool.num_parked - pool.num_wanted for pool in pools),
                )
            )
        return views

    def waits(self) -> list[tuple[str, float, str]]:
        """Who waits for room: the trajectory or the group, for how long [s], and why; in order."""
        now = time.monotonic()
        turns = [
            (
                waiting.request.generation.key,
                now - waiting.since_s,
                waiting.request.decision.why if waiting.request.decision else "",
            )
            for waiting in self._room
        ]
        return turns + self._gate.waits()

    # --- groups ---------------------------------------------------------------------------------

    async def has_room(self, size: int) -> None:
        """Wait until one more group of `size` rollouts may start: then ask for the next task."""
        if self._settings.policy == "kv":
            await self._gate.has_room(size)

    @asynccontextmanager
    async def group(self, name: str, size: int, num_prompt: int) -> AsyncIterator[Group]:
        """A group of rollouts is in flight within this context; entering waits for its turn.

        Args:
            num_prompt: tokens of the prompt that all of them share.

        Raises:
            ValueError: a group of that name is in flight.
        """
        if self._settings.policy == "kv":
            async with self._gate.group(name, size, num_prompt) as group:
                try:
                    yield group
                finally:
                    self.forget_group(name)
        else:  # as gateways do: it starts whatever is asked
            try:
                yield Group(name, tuple(f"{name}.{index}" for index in range(size)))
            finally:
                self.forget_group(name)

    def forget_group(self, name: str) -> None:
        """All of a group have ended: its place in line and its home are free."""
        self._placement.forget(name)
        self._orders.pop(name, None)

    # --- turns ----------------------------------------------------------------------------------

    async def generate(
        self,
        generation: Generation,
        *,
        vocab_size: int,
        on_chunk: OnChunk,
        on_placed: OnPlaced,
        on_moved: OnMoved,
    ) -> None:
        """Stream one turn, over as many servers as it takes; ends with a chunk that has `end` set.

        Args:
            on_chunk: called as tokens arrive, in the event loop's callback: must not block.
            vocab_size: an id outside of it would kill a server, so it is refused here.
            on_placed: told which server takes the turn, and why, before its first chunk.
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
        num_own = len(generation.ids) - generation.num_shared
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
            seat, decision = await self._place(rest, first=moves > 0)
            place = decision.place
            assert place is not None
            offset = len(received)
            # A server that joined after the turn began may hold less than was asked for.
            num_new = min(rest.max_new_tokens, seat.context_length - len(rest.ids))
            params = rest.sampling.to_sglang(max_new_tokens=num_new, stop_ids=rest.stop_ids)
            aborted: list[Chunk] = []
            whole = False

            def take(
                chunk: Chunk,
                rid: str = rest.rid,
                offset: int = offset,
                aborted: list[Chunk] = aborted,
                seat: _Seat = seat,
                place: Place = place,
            ) -> None:
                self._ledger.grow(rid, len(chunk.ids))
                received.extend(chunk.ids)
                self._gate.reached(generation.key, num_own + len(received))
                if chunk.num_retractions:
                    seat.num_retracted[place] += chunk.num_retractions
                if chunk.end is None:
                    on_chunk(chunk)
                elif chunk.end is not TurnEnd.ABORT:
                    on_chunk(_shifted(chunk, offset))
                else:  # not by us: what it carried is good, and the turn goes on
                    aborted.append(chunk)
                    on_chunk(replace(chunk, end=None, versions=()))

            try:
                on_placed(place.server, decision)
                await seat.server.generate(
                    rest.ids,
                    params,
                    rid=rest.rid,
                    on_chunk=take,
                    rank=place.rank if seat.info.dp_size > 1 else None,
                    num_top_logprobs=rest.num_top_logprobs,
                )
                if not aborted:
                    whole = True
                    seat.health.request_succeeded()
                    return
                raise ServerUnavailable(f"{seat.server.url} aborted: {aborted[0].error}")
            except (ServerUnavailable, ServerRefused) as error:
                if isinstance(error, ServerRefused) and not _worth_moving(error):
                    raise RequestError(str(error)) from error
                if self._closed:  # our servers end with us: that is no fault of theirs
                    raise ServerUnavailable(_CLOSED) from error
                # One that is given weights loses what runs there, where they do not come whole.
                if seat.health.state is not ServerState.STALE:
                    self._note(seat, seat.health.request_failed, str(error))
                self._ledger.forget(generation.key)  # what it had there draws it back no more
                on_moved(seat.server.url, str(error))
                moves += 1
                if moves > self._settings.max_moves:
                    raise ServerUnavailable(f"gave up after {moves} servers: {error}") from error
            finally:
                if whole:
                    self._ledger.park(rest.rid, time.monotonic())
                else:
                    self._ledger.release(rest.rid, time.monotonic())
                self._admit()

    def forget(self, key: str, *, whole: bool = False) -> None:
        """A trajectory ended: what it has in a server's cache is of no more use. `whole` says that
        it ended by itself, so that others may be expected to end alike."""
        self._ledger.forget(key)
        self._gate.ended(key, whole=whole)
        self._placement.forget(key)
        self._orders.pop(key, None)

    async def _place(self, generation: Generation, *, first: bool) -> tuple[_Seat, Decision]:
        """Wait for room; `first` goes before those who wait already: it has begun."""
        if self._closed:
            raise ServerUnavailable(_CLOSED)
        if len(self._room) >= self._settings.max_waiting:
            raise ServerUnavailable(f"{len(self._room)} requests wait already")
        now = time.monotonic()
        num_tokens = len(generation.ids)
        order = -1 if first else self._order(generation)
        ask = Ask(
            generation.key,
            num_tokens,
            # What moved may have come further than a server that is new here could hold.
            max(1, min(generation.max_new_tokens, self.context_length - num_tokens)),
            generation.group,
            generation.num_shared,
        )
        request = _Request(generation, ask)
        expected = num_tokens + self._ledger.predictor.remaining(generation.group)
        self._room.enter(Waiting(generation.rid, order, expected, now, request))
        self._admit()
        try:
            with anyio.fail_after(self._settings.wait_timeout_s):
                await request.placed.wait()
        except BaseException as error:
            # It may have been given a seat in the same moment, and have kept others waiting.
            self._room.leave(generation.rid)
            self._ledger.release(generation.rid, time.monotonic())
            self._admit()
            if isinstance(error, TimeoutError):
                why = f": {request.decision.why}" if request.decision else ""
                raise ServerUnavailable(
                    f"no server had room within {self._settings.wait_timeout_s:g} s{why}"
                ) from error
            raise
        if request.seat is None and self._closed:
            raise ServerUnavailable(_CLOSED)
        if request.seat is None:
            raise ServerUnavailable(f"no server that is left can hold {num_tokens} tokens")
        assert request.decision is not None
        return request.seat, request.decision

    def _order(self, generation: Generation) -> int:
        """The group's number, or that of a trajectory without one, in the order of their start."""
        name = generation.group or generation.key
        order = self._orders.get(name)
        if order is None:
            order = self._orders[name] = self._num_orders
            self._num_orders += 1
            if len(self._orders) > _MAX_ORDERS:
                self._orders.popitem(last=False)
        return order

    def _admit(self) -> None:
        """Place those who wait and fit, in order."""
        if not len(self._room):
            return
        now = time.monotonic()
        places = [
            place
            for seat in self._seats.values()
            if seat.health.state.takes_new
            for place in seat.places
        ]
        longest = max(
            (
                seat.context_length
                for seat in self._seats.values()
                if seat.health.state is not ServerState.RETIRED
            ),
            default=0,
        )
        self._room.place(now, lambda waiting: self._try(waiting, places, longest, now))

    def _try(
        self, waiting: Waiting[_Request], places: list[Place], longest: int, now: float
    ) -> bool:
        """Return whether it waits no longer: it has a seat, or is told that there will be none,
        since no server's context holds it (`longest` is the largest), or this is the end."""
        request = waiting.request
        generation, ask = request.generation, request.ask
        # It would wait in vain, and others behind it.
        if self._closed or ask.num_tokens >= longest:
            request.placed.set()
            return True
        home = self._ledger.home(generation.key)
        if home is not None and home.place not in places:  # it may come back to a suspect one
            seat = self._seats.get(home.place.server)
            if seat is not None and seat.health.state.takes_own:
                places = [*places, home.place]
        places = [
            place for place in places if ask.num_tokens < self._seats[place.server].context_length
        ]
        decision = self._placement.choose(ask, places, now=now, waited_s=now - waiting.since_s)
        request.decision = decision
        if decision.place is None:
            return False
        self._ledger.reserve(
            generation.rid,
            decision.place,
            ask.num_tokens,
            ask.budget,
            key=generation.key,
            group=generation.group,
            num_shared=generation.num_shared,
        )
        request.seat = self._seats[decision.place.server]
        request.placed.set()
        if explain_log.isEnabledFor(logging.INFO):
            waited_s = now - waiting.since_s
            explain_log.info(
                "%s (%d tokens, waited %.2f s) %s",
                generation.key,
                ask.num_tokens,
                waited_s,
                decision.explain(),
            )
        return True

    def _close(self) -> None:
        """Whose turns still run or wait is told so at once."""
        self._closed = True
        for seat in self._seats.values():
            seat.server.break_streams(_CLOSED)
        self._admit()

    # --- watching -------------------------------------------------------------------------------

    def _note(self, seat: _Seat, tell: Callable[[str], ServerState], reason: str) -> None:
        """Tell a server's health of a failure, and people when that changes what it may do."""
        before = seat.health.state
        state = tell(reason)
        if state is not before:
            log.warning("%s is %s: %s", seat.server.url, state, reason)
            if not state.keeps_running:
                seat.server.break_streams(reason)

    async def _watch(self, seat: _Seat) -> None:
        """Ask a server how it is and what it holds, until it is retired and empty."""
        while True:
            await anyio.sleep(self._settings.probe_interval_s)
            if seat.health.state is ServerState.RETIRED:
                if not any(self._ledger.pools[place].num_sequences for place in seat.places):
                    del self._seats[seat.server.url]
                    for place in seat.places:
                        self._ledger.remove(place)
                    return
                continue
            try:
                await self._probe(seat)
            except ServerError:
                why = "it does not answer"
                self._note(seat, seat.health.probe_failed, why)
                if not seat.health.state.keeps_running:
                    seat.server.break_streams(why)  # what was placed before, and began after
                continue
            self._admit()  # reports may take long, or there are none
            self._gate.admit()
            with contextlib.suppress(ServerError):  # the ledger does without for a while
                await self._take_reports(seat)
                self._admit()

    async def _probe(self, seat: _Seat) -> None:
        """Raises ServerError: it would not take a request."""
        before, num_loads = seat.health.state, seat.num_loads
        version = await seat.server.weight_version()
        info = seat.info if before.keeps_running else await seat.server.info()
        if seat.health.state is not before or seat.num_loads != num_loads:
            return  # what it said is of the time before
        if not before.keeps_running:
            # Back from the dead: a new process, for all that is known, with an empty cache.
            for place in seat.places:
                self._ledger.remove(place)
            seat.info = info
            seat.verified_version = None
            for place in seat.places:
                self._ledger.add(
                    place, info.max_total_num_tokens, info.max_running_requests or math.inf
                )
        elif seat.weight_version not in (None, version):  # the cache is of no more use
            for place in seat.places:
                self._ledger.flush(place)
        seat.weight_version = version
        has_weights = self._has_weights(seat, version)
        if seat.health.probe_succeeded(has_weights=has_weights) is not before:
            log.warning("%s is %s", seat.server.url, seat.health.state)

    async def _take_reports(self, seat: _Seat) -> None:
        """Raises ServerError: it did not say."""
        reports = await seat.server.loads()
        now = time.monotonic()
        places = seat.places
        num_retracted = 0
        for place, report in zip(places, reports, strict=False):
            report = replace(report, num_retracted=seat.num_retracted[place])
            num_retracted += self._ledger.report(place, report, now)
        self._ledger.age(now)
        reported_s = max(self._ledger.reported_s(place) for place in places)
        self._gate.observe(now, num_retracted, reported_s)

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
