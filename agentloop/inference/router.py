"""Queues turns, sends each to a server, and moves it to another one if its stream breaks.

    generate() ──> waiting room ──placement──> a server's stream ──chunks──> the rollout
                       ▲   ▲                        │ breaks
                       │   └── the same turn, its prompt extended by the received tokens
                       └── new capacity: a turn ended, a server recovered, a report arrived

The decisions are pure and made elsewhere: the content of each KV cache (kv_ledger.py), the server
of a turn (placement.py), the order of waiting turns (wait_queue.py), the health of a server
(health.py), the number of groups in flight (group_gate.py). This module connects them to the
servers. Each server is asked once a second for its weight version and its load, which also serves
as the health probe.

A turn whose stream breaks continues on another server from its exact ids, so that its reader sees a
single stream.
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
from agentloop.inference.ranks import DataParallelRank
from agentloop.inference.scheduling.admission import Admission, AdmissionSettings, Forecast
from agentloop.inference.scheduling.group_gate import AdmittedGroup, GroupGate
from agentloop.inference.scheduling.health import Health, HealthSettings, ServerState
from agentloop.inference.scheduling.kv_ledger import KVLedger
from agentloop.inference.scheduling.kv_policy import Costs
from agentloop.inference.scheduling.length_predictor import LengthPredictor
from agentloop.inference.scheduling.placement import Decision, PlacementRequest
from agentloop.inference.scheduling.policies import make_policy
from agentloop.inference.scheduling.wait_queue import Waiting, WaitQueue
from agentloop.inference.sglang.client import ServerInfo, SGLangServer
from agentloop.inference.sglang.frames import Chunk, OnChunk
from agentloop.inference.sglang.sampling import Sampling
from agentloop.trajectory import TurnEnd, VersionSpan

__all__ = ["Generation", "Router", "RouterSettings", "ServerView"]

log = logging.getLogger(__name__)
explain_log = logging.getLogger("agentloop.explain")  # each placement, at INFO; off by default

_MAX_ORDERS = 100_000  # trajectories and groups whose position in the queue is remembered
_CLOSED = "the runtime is shutting down"


class RouterSettings(pydantic.BaseModel):
    """Settings of the router."""

    model_config = pydantic.ConfigDict(extra="forbid")

    policy: Literal[
        "kv", "static", "round_robin", "least_requests", "power_of_two", "sticky_least_loaded"
    ] = pydantic.Field(
        "kv",
        description="How the server of a turn is chosen. kv: the cheapest one whose KV cache has "
        "capacity; the others are for comparison and never wait.",
    )
    wait_timeout_s: float = pydantic.Field(
        600.0, gt=0, description="Time after which a request that waits for KV capacity fails."
    )
    patience_s: float = pydantic.Field(
        10.0, gt=0, description="Time after which a waiting request is no longer overtaken."
    )
    max_waiting: int = pydantic.Field(
        65_536, ge=1, description="Maximum number of waiting requests; further ones are refused."
    )
    max_moves: int = pydantic.Field(
        4, ge=0, description="How often a turn may move to another server after a failure."
    )
    reserve_tokens: int = pydantic.Field(
        256, ge=1, description="KV tokens reserved for a turn's growth before lengths are known."
    )
    probe_interval_s: float = pydantic.Field(
        1.0, gt=0, description="Time between two probes of a server's health and load."
    )
    stall_timeout_s: float = pydantic.Field(
        120.0, gt=0, description="Time without data after which a stream counts as broken."
    )
    costs: Costs = pydantic.Field(default_factory=lambda: Costs())
    health: HealthSettings = pydantic.Field(default_factory=HealthSettings)
    admission: AdmissionSettings = pydantic.Field(default_factory=AdmissionSettings)


@dataclass(frozen=True, slots=True)
class Generation:
    """A turn to be generated.

    `rid` is its unique name, `key` the name of its trajectory. Siblings have the same `group` and
    share the first `num_shared` ids of the prompt.
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
    """The router's knowledge of one server; sizes are tokens of its KV cache."""

    url: str
    state: ServerState
    num_running: int
    num_held_tokens: int
    num_reserved_tokens: int
    num_parked_tokens: int  # of rollouts that run a tool and will continue here
    capacity_tokens: int
    num_others_tokens: int = 0
    reason: str = ""
    weight_version: str | None = None  # None until it has reported one
    num_cached_tokens: int = 0  # of finished turns: reusable, and evicted when space is needed

    @property
    def healthy(self) -> bool:
        """True if the server accepts new trajectories."""
        return self.state.takes_new


@dataclass(slots=True)
class _Replica:
    """A server with its state."""

    server: SGLangServer
    info: ServerInfo
    health: Health
    weight_version: str | None = None  # None until it has reported one
    verified_version: str | None = None  # confirmed by `weights_loaded`
    num_loads: int = 0  # weight updates confirmed by `weights_loaded`
    num_retracted: Counter[DataParallelRank] = field(default_factory=Counter)

    @property
    def ranks(self) -> list[DataParallelRank]:
        """The server's data-parallel ranks, each of which has a KV cache of its own."""
        return [DataParallelRank(self.server.url, rank) for rank in range(self.info.dp_size)]

    @property
    def context_length(self) -> int:
        """Prompt and response tokens of the longest sequence that the server can hold."""
        return min(self.info.context_length, self.info.max_total_num_tokens - 1)


@dataclass(slots=True)
class _Request:
    """A turn, or the rest of one, that waits for a server."""

    generation: Generation
    ask: PlacementRequest
    placed: anyio.Event = field(default_factory=anyio.Event)
    replica: _Replica | None = None
    decision: Decision | None = None  # the latest one


OnPlaced = Callable[[str, Decision], None]
"""Called with the server's URL and the decision to send the turn there."""

OnMoved = Callable[[str, str], None]
"""Called with the server's URL and the reason why the turn leaves it."""


class Router:
    """Routes turns to servers; create it with `Router.open(...)`."""

    def __init__(self, settings: RouterSettings, *, longest: int) -> None:
        self._settings = settings
        self._ledger = KVLedger(LengthPredictor(prior=settings.reserve_tokens))
        self._policy = make_policy(
            settings.policy, self._ledger, costs=settings.costs, patience_s=settings.patience_s
        )
        self._queue: WaitQueue[_Request] = WaitQueue(patience_s=settings.patience_s)
        self._replicas: dict[str, _Replica] = {}
        self._gate = GroupGate(
            Admission(settings.admission, Forecast(longest=longest)), capacity=self._capacity
        )
        self._weights: str | None = None  # the version that servers must have; None: any
        self._verified = False  # require a confirmation besides the server's own report
        self._orders: OrderedDict[str, int] = OrderedDict()
        self._num_orders = 0
        self._closed = False
        self._tasks: TaskGroup

    @classmethod
    @asynccontextmanager
    async def open(
        cls, servers: Sequence[SGLangServer], settings: RouterSettings, *, longest: int = 8192
    ) -> AsyncIterator[Router]:
        """Query each server and keep watching them.

        `longest` is the maximum number of response tokens of a rollout, which admission relies on.

        Raises:
            ServerUnavailable, ServerRefused: A server cannot be used.
        """
        router = cls(settings, longest=longest)
        replicas = [await router._connect(server) for server in servers]
        async with anyio.create_task_group() as tasks:
            router._tasks = tasks
            for replica in replicas:
                router._register(replica)
            tasks.start_soon(router._watch_streams)
            try:
                yield router
            finally:
                router._close()
                tasks.cancel_scope.cancel()

    # --- servers --------------------------------------------------------------------------------

    async def add(self, server: SGLangServer) -> None:
        """Add a server.

        Raises:
            ValueError: It was already added.
            ServerUnavailable, ServerRefused: It cannot be used.
        """
        replica = await self._connect(server)
        if server.url in self._replicas:
            raise ValueError(f"{server.url} was already added")
        self._register(replica)
        self._place_waiting()
        self._gate.admit()

    def retire(self, url: str) -> None:
        """Stop sending turns to a server, and remove it when its running turns have ended.

        Raises:
            KeyError: There is no such server.
        """
        self._replicas[url.rstrip("/")].health.retire()
        self._place_waiting()  # requests that only it could serve must not wait any longer

    def exited(self, url: str, reason: str) -> None:
        """Record that the server's process ended; its turns move to other servers at once."""
        if replica := self._replicas.get(url):
            self._record_failure(replica, replica.health.exited, reason)
            replica.server.break_streams(reason)  # also if it is retired

    def restarting(self, url: str) -> None:
        """Record that the server is being restarted; it is back when it answers a probe."""
        if replica := self._replicas.get(url):
            replica.health.restarting()

    def is_dead(self, url: str) -> bool:
        """Return whether the server is dead or restarting and has not answered a probe since."""
        replica = self._replicas.get(url)
        return replica is not None and not replica.health.state.keeps_running

    def is_enabled(self, url: str) -> bool:
        """Return whether the server is known and not retired."""
        replica = self._replicas.get(url)
        return replica is not None and replica.health.state is not ServerState.RETIRED

    def give_up(self, url: str) -> bool:
        """Retire a server that will not come back; return whether any other one is left."""
        if url in self._replicas:
            self.retire(url)
        return any(self.is_enabled(other) for other in self._replicas)

    def require_weights(self, version: str | None, *, verified: bool = False) -> None:
        """Accept only servers with these weights from now on; the others are STALE until they
        report them.

        With `verified`, each server needs a new call of `weights_loaded`, even if it had these
        weights before. None accepts any weights.
        """
        self._weights, self._verified = version, verified
        for replica in self._replicas.values():
            replica.verified_version = None
            if not self._has_weights(replica, replica.weight_version):
                replica.health.weights_missed()
        self._place_waiting()

    def _has_weights(self, replica: _Replica, said: str | None) -> bool:
        """Return whether a server that reports the version `said` has the required weights."""
        if self._weights is None:
            return True
        return said == self._weights and (not self._verified or replica.verified_version == said)

    def weights_loaded(self, url: str, version: str) -> None:
        """Record that the server now has these weights.

        Its prefix cache counts as empty, because later turns will not find its entries, whether or
        not it was flushed.
        """
        replica = self._replicas.get(url)
        if replica is None:  # retired meanwhile
            return
        replica.weight_version = replica.verified_version = version
        replica.num_loads += 1
        for rank in replica.ranks:
            self._ledger.flush(rank)
        if version == self._weights:
            replica.health.weights_loaded()
        self._place_waiting()

    @property
    def servers(self) -> list[SGLangServer]:
        """Servers that can be given weights."""
        return [
            replica.server
            for replica in self._replicas.values()
            if replica.health.state.takes_weights
        ]

    async def _connect(self, server: SGLangServer) -> _Replica:
        replica = _Replica(server, await server.info(), Health(self._settings.health))
        if self._weights is not None:
            replica.health.weights_missed()  # its weights are unknown
        return replica

    def _register(self, replica: _Replica) -> None:
        self._replicas[replica.server.url] = replica
        for rank in replica.ranks:
            self._ledger.add(
                rank,
                replica.info.max_total_num_tokens,
                replica.info.max_running_requests or math.inf,
            )
        self._tasks.start_soon(self._watch, replica)

    def _capacity(self) -> int:
        """Return the KV tokens of all servers that accept requests."""
        return sum(
            replica.info.max_total_num_tokens * replica.info.dp_size
            for replica in self._replicas.values()
            if replica.health.state.takes_new
        )

    @property
    def context_length(self) -> int:
        """Prompt and response tokens that every server can hold.

        Raises:
            ServerUnavailable: All servers have been retired.
        """
        if not self._replicas:
            raise ServerUnavailable("there is no server: all have been retired")
        return min(replica.context_length for replica in self._replicas.values())

    @property
    def model_path(self) -> str:
        """The model that the servers report."""
        return next(iter(self._replicas.values())).info.model_path

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def view(self) -> list[ServerView]:
        views = []
        for url, replica in self._replicas.items():
            pools = [self._ledger.pools[rank] for rank in replica.ranks]
            views.append(
                ServerView(
                    url,
                    replica.health.state,
                    sum(pool.num_sequences for pool in pools),
                    sum(pool.num_live for pool in pools),
                    sum(pool.num_reserved for pool in pools),
                    sum(pool.num_kept for pool in pools),
                    sum(pool.capacity for pool in pools),
                    sum(pool.num_others for pool in pools),
                    replica.health.reason,
                    replica.weight_version,
                    sum(pool.num_parked - pool.num_kept for pool in pools),
                )
            )
        return views

    def waits(self) -> list[tuple[str, float, str]]:
        """Return the waiting turns and groups in order: name, seconds waited, and reason."""
        now = time.monotonic()
        turns = [
            (
                waiting.request.generation.key,
                now - waiting.since_s,
                waiting.request.decision.why if waiting.request.decision else "",
            )
            for waiting in self._queue
        ]
        return turns + self._gate.waits()

    # --- groups ---------------------------------------------------------------------------------

    async def wait_for_capacity(self, size: int) -> None:
        """Wait until another group of `size` rollouts may start; then ask for the next task."""
        if self._policy.may_wait:
            await self._gate.wait_for_capacity(size)

    @asynccontextmanager
    async def group(self, name: str, size: int, num_prompt: int) -> AsyncIterator[AdmittedGroup]:
        """Keep a group in flight within this context; entering it waits until the group may start.

        Args:
            num_prompt: Tokens of the prompt that the siblings share.

        Raises:
            ValueError: A group of that name is in flight.
        """
        if self._policy.may_wait:
            async with self._gate.group(name, size, num_prompt) as group:
                try:
                    yield group
                finally:
                    self.forget_group(name)
        else:  # like a gateway: every group starts at once
            try:
                yield AdmittedGroup(name, tuple(f"{name}.{index}" for index in range(size)))
            finally:
                self.forget_group(name)

    def forget_group(self, name: str) -> None:
        """Release the queue position and the assigned server of a group that has ended."""
        self._policy.forget(name)
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
        """Stream one turn, over as many servers as needed; the last chunk has `end` set.

        Args:
            vocab_size: Ids outside of it are refused here, because they would crash a server.
            on_chunk: Called as tokens arrive, in the event loop's callback; it must not block.
            on_placed: Called with the server and the decision before the first chunk of each
                server.
            on_moved: Called with each server that failed.

        Raises:
            RequestError: The request is invalid.
            ServerUnavailable: No server could serve it in time or within `max_moves`.
        """
        _check_ids(generation.ids, vocab_size)
        if len(generation.ids) >= self.context_length:
            raise PromptTooLong(
                f"the prompt has {len(generation.ids)} tokens, the servers' context length is "
                f"{self.context_length}, response included"
            )
        received: list[int] = []
        moves = 0
        num_own = len(generation.ids) - generation.num_shared
        while True:
            if ending := _missing_end(generation, received):
                on_chunk(ending)
                return
            rest = replace(
                generation,
                # Never reused, nor a prefix of another: SGLang aborts by prefix, and once more
                # after a stream has ended.
                rid=uuid.uuid4().hex,
                ids=generation.ids + received,
                max_new_tokens=generation.max_new_tokens - len(received),
            )
            replica, decision = await self._place(rest, first=moves > 0)
            rank = decision.rank
            assert rank is not None
            offset = len(received)
            # A server added after the turn began may have a smaller context.
            num_new = min(rest.max_new_tokens, replica.context_length - len(rest.ids))
            params = rest.sampling.to_sglang(max_new_tokens=num_new, stop_ids=rest.stop_ids)
            aborted: list[Chunk] = []
            whole = False

            def take(
                chunk: Chunk,
                rid: str = rest.rid,
                offset: int = offset,
                aborted: list[Chunk] = aborted,
                replica: _Replica = replica,
                rank: DataParallelRank = rank,
            ) -> None:
                self._ledger.grow(rid, len(chunk.ids))
                received.extend(chunk.ids)
                self._gate.reached(generation.key, num_own + len(received))
                if chunk.num_retractions:
                    replica.num_retracted[rank] += chunk.num_retractions
                if chunk.end is None:
                    on_chunk(chunk)
                elif chunk.end is not TurnEnd.ABORT:
                    on_chunk(_shift_versions(chunk, offset))
                else:  # the server's own abort: its tokens are valid, and the turn goes on
                    aborted.append(chunk)
                    on_chunk(replace(chunk, end=None, versions=()))

            try:
                on_placed(rank.server, decision)
                await replica.server.generate(
                    rest.ids,
                    params,
                    rid=rest.rid,
                    on_chunk=take,
                    rank=rank.index if replica.info.dp_size > 1 else None,
                    num_top_logprobs=rest.num_top_logprobs,
                )
                if not aborted:
                    whole = True
                    replica.health.request_succeeded()
                    return
                raise ServerUnavailable(f"{replica.server.url} aborted: {aborted[0].error}")
            except (ServerUnavailable, ServerRefused) as error:
                if isinstance(error, ServerRefused) and not _is_retryable(error):
                    raise RequestError(str(error)) from error
                if self._closed:  # our servers end with us: that is not a failure
                    raise ServerUnavailable(_CLOSED) from error
                # A failed weight update breaks the streams of a server; that is not its fault.
                if replica.health.state is not ServerState.STALE:
                    self._record_failure(replica, replica.health.request_failed, str(error))
                self._ledger.forget(generation.key)  # its cache there no longer attracts it
                on_moved(replica.server.url, str(error))
                moves += 1
                if moves > self._settings.max_moves:
                    raise ServerUnavailable(f"gave up after {moves} servers: {error}") from error
            finally:
                if whole:
                    self._ledger.park(rest.rid, time.monotonic())
                else:
                    self._ledger.release(rest.rid, time.monotonic())
                self._place_waiting()

    def forget(self, key: str, *, whole: bool = False) -> None:
        """Release the cache of a trajectory that ended; its length counts only if `whole`.

        `whole` means that it ended normally, so that others can be expected to end alike.
        """
        self._ledger.forget(key)
        self._gate.ended(key, whole=whole)
        self._policy.forget(key)
        self._orders.pop(key, None)

    async def _place(self, generation: Generation, *, first: bool) -> tuple[_Replica, Decision]:
        """Wait for a server; `first` goes ahead of waiting turns, because it has already begun."""
        if self._closed:
            raise ServerUnavailable(_CLOSED)
        if len(self._queue) >= self._settings.max_waiting:
            raise ServerUnavailable(f"{len(self._queue)} requests are already waiting")
        now = time.monotonic()
        num_tokens = len(generation.ids)
        order = -1 if first else self._order(generation)
        ask = PlacementRequest(
            generation.key,
            num_tokens,
            # A moved turn may be longer than the context of a server added since.
            max(1, min(generation.max_new_tokens, self.context_length - num_tokens)),
            generation.group,
            generation.num_shared,
        )
        request = _Request(generation, ask)
        expected = num_tokens + self._ledger.predictor.remaining(generation.group)
        self._queue.enter(Waiting(generation.rid, order, expected, now, request))
        self._place_waiting()
        try:
            with anyio.fail_after(self._settings.wait_timeout_s):
                await request.placed.wait()
        except BaseException as error:
            # It may have been placed at the same moment and so have kept others waiting.
            self._queue.leave(generation.rid)
            self._ledger.release(generation.rid, time.monotonic())
            self._place_waiting()
            if isinstance(error, TimeoutError):
                why = f": {request.decision.why}" if request.decision else ""
                raise ServerUnavailable(
                    "no server had free KV capacity within "
                    f"{self._settings.wait_timeout_s:g} s{why}"
                ) from error
            raise
        if request.replica is None and self._closed:
            raise ServerUnavailable(_CLOSED)
        if request.replica is None:
            raise ServerUnavailable(f"no remaining server can hold {num_tokens} tokens")
        assert request.decision is not None
        return request.replica, request.decision

    def _order(self, generation: Generation) -> int:
        """Return the position of the group, or of a trajectory without one, in the order of
        starts."""
        name = generation.group or generation.key
        order = self._orders.get(name)
        if order is None:
            order = self._orders[name] = self._num_orders
            self._num_orders += 1
            if len(self._orders) > _MAX_ORDERS:
                self._orders.popitem(last=False)
        return order

    def _place_waiting(self) -> None:
        """Place waiting turns that fit, in order."""
        if not len(self._queue):
            return
        now = time.monotonic()
        ranks = [
            rank
            for replica in self._replicas.values()
            if replica.health.state.takes_new
            for rank in replica.ranks
        ]
        longest = max(
            (
                replica.context_length
                for replica in self._replicas.values()
                if replica.health.state is not ServerState.RETIRED
            ),
            default=0,
        )
        self._queue.place(now, lambda waiting: self._try_to_place(waiting, ranks, longest, now))

    def _try_to_place(
        self, waiting: Waiting[_Request], ranks: list[DataParallelRank], longest: int, now: float
    ) -> bool:
        """Return whether the turn waits no longer.

        It is placed, or it will never be, because no context can hold it (`longest` is the largest)
        or the router is closed.
        """
        request = waiting.request
        generation, ask = request.generation, request.ask
        # It would wait in vain and block others.
        if self._closed or ask.num_tokens >= longest:
            request.placed.set()
            return True
        own = self._ledger.affinity(generation.key)
        if own is not None and own.rank not in ranks:  # it may return to a suspect server
            replica = self._replicas.get(own.rank.server)
            if replica is not None and replica.health.state.takes_own:
                ranks = [*ranks, own.rank]
        ranks = [
            rank for rank in ranks if ask.num_tokens < self._replicas[rank.server].context_length
        ]
        decision = self._policy.choose(ask, ranks, now=now, waited_s=now - waiting.since_s)
        request.decision = decision
        if decision.rank is None:
            return False
        self._ledger.reserve(
            generation.rid,
            decision.rank,
            ask.num_tokens,
            ask.budget,
            key=generation.key,
            group=generation.group,
            num_shared=generation.num_shared,
        )
        request.replica = self._replicas[decision.rank.server]
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
        """Fail all running and waiting turns at once."""
        self._closed = True
        for replica in self._replicas.values():
            replica.server.break_streams(_CLOSED)
        self._place_waiting()

    # --- watching -------------------------------------------------------------------------------

    def _record_failure(
        self, replica: _Replica, record: Callable[[str], ServerState], reason: str
    ) -> None:
        """Report a failure to a server's health; log a change of state and break streams if
        needed."""
        before = replica.health.state
        state = record(reason)
        if state is not before:
            log.warning("%s is %s: %s", replica.server.url, state, reason)
            if not state.keeps_running:
                replica.server.break_streams(reason)

    async def _watch(self, replica: _Replica) -> None:
        """Probe a server and fetch its load, until it is retired and idle."""
        while True:
            await anyio.sleep(self._settings.probe_interval_s)
            if replica.health.state is ServerState.RETIRED:
                if not any(self._ledger.pools[rank].num_sequences for rank in replica.ranks):
                    del self._replicas[replica.server.url]
                    for rank in replica.ranks:
                        self._ledger.remove(rank)
                    return
                continue
            try:
                await self._probe(replica)
            except ServerError:
                why = "it does not answer probes"
                self._record_failure(replica, replica.health.probe_failed, why)
                if not replica.health.state.keeps_running:
                    replica.server.break_streams(
                        why
                    )  # including streams that began after it was declared dead
                continue
            self._place_waiting()  # do not wait for the report, which may be slow or missing
            self._gate.admit()
            with contextlib.suppress(ServerError):  # the ledger works without reports for a while
                await self._take_reports(replica)
                self._place_waiting()

    async def _probe(self, replica: _Replica) -> None:
        """Check that the server would take a request, and update its state.

        Raises:
            ServerError: It would not.
        """
        before, num_loads = replica.health.state, replica.num_loads
        version = await replica.server.weight_version()
        info = replica.info if before.keeps_running else await replica.server.info()
        if replica.health.state is not before or replica.num_loads != num_loads:
            return  # its answer is outdated
        if not before.keeps_running:
            # It may be a new process with an empty cache.
            for rank in replica.ranks:
                self._ledger.remove(rank)
            replica.info = info
            replica.verified_version = None
            for rank in replica.ranks:
                self._ledger.add(
                    rank, info.max_total_num_tokens, info.max_running_requests or math.inf
                )
        elif replica.weight_version not in (None, version):  # new weights invalidate the cache
            for rank in replica.ranks:
                self._ledger.flush(rank)
        replica.weight_version = version
        has_weights = self._has_weights(replica, version)
        if replica.health.probe_succeeded(has_weights=has_weights) is not before:
            log.warning("%s is %s", replica.server.url, replica.health.state)

    async def _take_reports(self, replica: _Replica) -> None:
        """Fetch the server's load and update ledger and admission.

        Raises:
            ServerError: It did not report.
        """
        reports = await replica.server.loads()
        now = time.monotonic()
        ranks = replica.ranks
        num_retracted = 0
        for rank, report in zip(ranks, reports, strict=False):
            report = replace(report, num_retracted=replica.num_retracted[rank])
            num_retracted += self._ledger.report(rank, report, now)
        self._ledger.age(now)
        reported_s = max(self._ledger.reported_s(rank) for rank in ranks)
        self._gate.observe(now, num_retracted, reported_s)

    async def _watch_streams(self) -> None:
        """Break streams that are silent for too long; their turns move to other servers."""
        while True:
            await anyio.sleep(min(1.0, self._settings.stall_timeout_s / 4))
            for replica in self._replicas.values():
                replica.server.close_stalled()


def _is_retryable(error: ServerRefused) -> bool:
    """Return whether another server, or the same one later, may accept the request."""
    return error.status >= 500 or error.status in (408, 429)


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    if not ids:
        raise RequestError("ids: the prompt is empty")
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise RequestError(f"ids: {wrong} is outside of the vocabulary of {vocab_size}")


def _missing_end(generation: Generation, received: list[int]) -> Chunk | None:
    """Return the last chunk if the stream broke just before the frame that ends it."""
    if not received:
        return None
    if received[-1] in generation.stop_ids:
        return Chunk([], [], "", end=TurnEnd.STOP)
    if len(received) >= generation.max_new_tokens:
        return Chunk([], [], "", end=TurnEnd.LENGTH)
    return None


def _shift_versions(chunk: Chunk, offset: int) -> Chunk:
    """Return the chunk with `versions` counted from the turn's first token."""
    if not offset:
        return chunk
    spans = tuple(
        VersionSpan(span.version, span.start + offset, span.end + offset) for span in chunk.versions
    )
    return replace(chunk, versions=spans)
