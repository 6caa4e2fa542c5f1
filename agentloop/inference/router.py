"""Runs turns: queues each, sends it to a server, and moves it to another one if its stream breaks.

    generate() ──> wait queue ──placement──> a server's stream ──chunks──> the rollout
                       ▲   ▲                        │ breaks
                       │   └── the same turn, its prompt extended by the received tokens
                       └── new capacity: a turn ended, a server recovered, a report arrived

The decisions are pure and made in scheduling/: the content of each KV cache (kv_ledger.py), the
server of a turn (placement.py), the order of waiting turns (wait_queue.py), the number of groups in
flight (group_gate.py). The servers, their health and their weights are kept in replicas.py.

A turn whose stream breaks continues on another server from its exact ids, so that its reader sees a
single stream.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pydantic

from agentloop.errors import (
    PromptTooLong,
    RequestError,
    ServerError,
    ServerRefused,
    ServerUnavailable,
)
from agentloop.inference.ranks import DataParallelRank
from agentloop.inference.replicas import Replica, Replicas, ServerView
from agentloop.inference.scheduling.admission import Admission, AdmissionLimits, Forecast
from agentloop.inference.scheduling.group_gate import AdmittedGroup, GroupGate
from agentloop.inference.scheduling.kv_ledger import KVLedger
from agentloop.inference.scheduling.kv_policy import KVPolicy
from agentloop.inference.scheduling.length_predictor import LengthPredictor
from agentloop.inference.scheduling.placement import Decision, PlacementRequest
from agentloop.inference.scheduling.wait_queue import Stage, Waiting, WaitQueue
from agentloop.inference.sglang.client import SGLangServer
from agentloop.inference.sglang.frames import OnChunk
from agentloop.inference.turns import Generation, OngoingTurn, TurnStream
from agentloop.trajectory import rollout_of

explain_log = logging.getLogger("agentloop.explain")  # each placement, at INFO; off by default

_MAX_ORDERS = 100_000  # trajectories and groups whose position in the queue is remembered
_MAX_WAITING = 65_536  # requests; further ones are refused
_RESERVE_TOKENS = 256  # of KV cache for a turn, until enough turns have ended to predict its length
_CLOSED = "the runtime is shutting down"


class RouterSettings(pydantic.BaseModel):
    """Settings of the router."""

    model_config = pydantic.ConfigDict(extra="forbid")

    wait_timeout_s: float = pydantic.Field(
        600.0, gt=0, description="Time that a turn may wait for KV capacity before it fails."
    )
    max_migrations: int = pydantic.Field(
        4,
        ge=0,
        description="Number of times that a turn may move to another server after a failure; one "
        "more failure ends its rollout, without a reward.",
    )
    probe_interval_s: float = pydantic.Field(
        1.0, gt=0, description="Interval between probes of a server's health and load."
    )
    stall_timeout_s: float = pydantic.Field(
        120.0,
        gt=0,
        description="Time without data after which a token stream counts as broken; its turn then "
        "moves to another server.",
    )


OnPlaced = Callable[[str, Decision], None]
"""Called with the server's URL and the decision to send the turn there."""

OnMoved = Callable[[str, str], None]
"""Called with the server's URL and the reason why the turn leaves it."""


@dataclass(slots=True)
class _Request:
    """A turn, or the rest of one, that waits for a server."""

    generation: Generation
    placement: PlacementRequest
    settled: anyio.Event = field(default_factory=anyio.Event)  # placed, or it will never be
    replica: Replica | None = None
    decision: Decision | None = None  # the latest one


class Router:
    """Routes turns to servers; create it with `Router.open(...)`.

    Attributes:
        replicas: The servers, for those who run their processes or load their weights.
    """

    def __init__(self, settings: RouterSettings, *, longest: int, reserve_tokens: int) -> None:
        self._settings = settings
        self._ledger = KVLedger(LengthPredictor(prior=reserve_tokens))
        self._policy = KVPolicy(self._ledger)
        self._queue: WaitQueue[_Request] = WaitQueue()
        self.gate = GroupGate(
            Admission(AdmissionLimits(), Forecast(longest=longest)),
            capacity=lambda: self.replicas.capacity,
        )
        self.replicas = Replicas(
            self._ledger,
            probe_interval_s=settings.probe_interval_s,
            stall_timeout_s=settings.stall_timeout_s,
            on_capacity=self._use_capacity,
            on_report=self.gate.observe,
        )
        self._orders: OrderedDict[str, int] = OrderedDict()
        self._groups: dict[str, str] = {}  # of the rollouts in flight
        self._num_orders = 0
        self._closed = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        servers: Sequence[SGLangServer],
        settings: RouterSettings,
        *,
        longest: int = 8192,
        reserve_tokens: int = _RESERVE_TOKENS,
    ) -> AsyncIterator[Router]:
        """Query each server and keep watching them.

        Args:
            longest: Maximum number of response tokens of a rollout, which admission relies on.
            reserve_tokens: Tokens of KV cache for a turn until turns have ended; only tests set it.

        Raises:
            ServerUnavailable, ServerRefused: A server cannot be used.
        """
        router = cls(settings, longest=longest, reserve_tokens=reserve_tokens)
        async with router.replicas.watching(servers):
            try:
                yield router
            finally:
                router._close()

    # --- servers --------------------------------------------------------------------------------

    @property
    def context_length(self) -> int:
        """Prompt and response tokens that every server can hold.

        Raises:
            ServerUnavailable: All servers have been retired.
        """
        return self.replicas.context_length

    def view(self) -> list[ServerView]:
        """Return the state of every server."""
        return self.replicas.view()

    # --- waiting --------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def waits(self) -> list[tuple[str, float, str]]:
        """Return the waiting turns and groups in order: name, seconds waited, and reason."""
        now_s = time.monotonic()
        turns = [
            (
                waiting.request.generation.key,
                now_s - waiting.since_s,
                waiting.request.decision.why if waiting.request.decision else "",
            )
            for waiting in self._queue
        ]
        return turns + self.gate.waits()

    # --- groups ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def group(
        self, name: str, size: int, num_prompt: int, *, is_single: bool = True
    ) -> AsyncIterator[AdmittedGroup]:
        """Keep a group in flight within this context; entering it waits until the group may start.

        All conversations of its rollouts have the place of the group in the order of starts.

        Args:
            num_prompt: Tokens of the prompt that the siblings share.
            is_single: Whether each rollout is one conversation and ends with it.

        Raises:
            ValueError: A group of that name is in flight.
        """
        async with self.gate.group(name, size, num_prompt, is_single=is_single) as group:
            self._groups.update(dict.fromkeys(group.keys, group.name))
            try:
                yield group
            finally:
                for key in group.keys:
                    del self._groups[key]
                self.forget_group(group.name)

    def forget_group(self, name: str) -> None:
        """Release the queue position of a group that has ended."""
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
            ServerUnavailable: No server could serve it in time or within `max_migrations`.
        """
        self._check(generation, vocab_size)
        turn = OngoingTurn(generation, on_chunk)
        num_migrations = 0
        failure: ServerError | None = None
        while True:
            if ending := turn.missing_end():
                on_chunk(ending)
                return
            if turn.received and not generation.is_movable:
                # The turn cannot begin again either, because its reader has the text.
                raise ServerUnavailable(
                    f"a turn with {', '.join(generation.parameters)} cannot go on elsewhere: "
                    f"{failure}"
                ) from failure
            remaining = turn.remaining()
            replica, decision = await self._place(remaining, goes_first=num_migrations > 0)
            failure = await self._stream(turn, remaining, replica, decision, on_placed)
            if failure is None:
                return
            on_moved(replica.url, str(failure))
            num_migrations += 1
            if num_migrations > self._settings.max_migrations:
                raise ServerUnavailable(
                    f"gave up after {num_migrations} servers: {failure}"
                ) from failure

    def forget(self, key: str, *, is_complete: bool = False) -> None:
        """Release the cache of a trajectory that ended; its length counts only if `is_complete`.

        `is_complete` means that it ended normally, so that others can be expected to end alike.
        """
        self._ledger.forget(key)
        self.gate.end_conversation(key, is_complete=is_complete)
        self._orders.pop(key, None)

    def _check(self, generation: Generation, vocab_size: int) -> None:
        """Refuse what no server could serve.

        Raises:
            RequestError: The request is invalid.
        """
        if not generation.ids:
            raise RequestError("ids: the prompt is empty")
        _check_ids("ids", generation.ids, vocab_size)
        _check_ids("stop_token_ids", generation.stop_ids, vocab_size)
        if isinstance(biases := generation.parameters.get("logit_bias"), Mapping):
            _check_ids("logit_bias", [*map(int, biases)], vocab_size)
        if len(generation.ids) >= self.context_length:
            raise PromptTooLong(
                f"the prompt has {len(generation.ids)} tokens, the servers' context length is "
                f"{self.context_length}, response included"
            )

    async def _stream(
        self,
        turn: OngoingTurn,
        remaining: Generation,
        replica: Replica,
        decision: Decision,
        on_placed: OnPlaced,
    ) -> ServerError | None:
        """Generate the rest of a turn on a server, and free what was reserved for it there.

        Returns:
            The failure after which the turn goes on elsewhere; None if it has ended.

        Raises:
            RequestError: The request is invalid.
            ServerUnavailable: The router is closed.
        """
        rank = decision.rank
        assert rank is not None
        ended = False
        try:
            on_placed(replica.url, decision)
            await TurnStream(turn, remaining, replica, rank, self._ledger, self.gate).run()
            ended = True
            replica.health.request_succeeded()
            return None
        except (ServerUnavailable, ServerRefused) as error:
            if isinstance(error, ServerRefused) and not _is_retryable(error):
                raise RequestError(str(error)) from error
            if self._closed:  # our servers end with us: that is not a failure
                raise ServerUnavailable(_CLOSED) from error
            replica.request_failed(str(error))
            self._ledger.forget(remaining.key)  # its cache there no longer attracts it
            return error
        finally:
            if ended:
                self._ledger.park(remaining.rid, time.monotonic())
            else:
                self._ledger.release(remaining.rid, time.monotonic())
            self._place_waiting()

    # --- placement ------------------------------------------------------------------------------

    async def _place(self, generation: Generation, *, goes_first: bool) -> tuple[Replica, Decision]:
        """Wait for a server; a turn that has already begun goes ahead of the others.

        Raises:
            ServerUnavailable: There is none in time, or none that can hold the turn.
        """
        if self._closed:
            raise ServerUnavailable(_CLOSED)
        if len(self._queue) >= _MAX_WAITING:
            raise ServerUnavailable(f"{len(self._queue)} requests are already waiting")
        request = self._enqueue(generation, goes_first=goes_first)
        self._place_waiting()
        try:
            with anyio.fail_after(self._settings.wait_timeout_s):
                await request.settled.wait()
        except BaseException as error:
            # It may have been placed at the same moment and so have kept others waiting.
            self._queue.leave(generation.rid)
            self._ledger.release(generation.rid, time.monotonic())
            self._place_waiting()
            if isinstance(error, TimeoutError):
                reason = f": {request.decision.why}" if request.decision else ""
                raise ServerUnavailable(
                    "no server had free KV capacity within "
                    f"{self._settings.wait_timeout_s:g} s{reason}"
                ) from error
            raise
        if request.replica is None:
            reason = f"no remaining server can hold {len(generation.ids)} tokens"
            raise ServerUnavailable(_CLOSED if self._closed else reason)
        assert request.decision is not None
        return request.replica, request.decision

    def _enqueue(self, generation: Generation, *, goes_first: bool) -> _Request:
        num_tokens = len(generation.ids)
        # A moved turn may be longer than the context of a server added since.
        budget = max(1, min(generation.max_new_tokens, self.context_length - num_tokens))
        placement = PlacementRequest(
            generation.key, num_tokens, budget, generation.group, generation.num_shared
        )
        request = _Request(generation, placement)
        stage = Stage.NEW
        if goes_first:
            stage = Stage.MOVED
        elif self._ledger.affinity(generation.key) is not None:
            stage = Stage.CACHED if self._ledger.keeps(generation.key) else Stage.PAUSED
        order = self._order(generation)
        expected = num_tokens + self._ledger.predictor.remaining(generation.group)
        now_s = time.monotonic()
        self._queue.enter(Waiting(generation.rid, order, expected, now_s, request, stage))
        return request

    def _order(self, generation: Generation) -> int:
        """Return the position of the group, or of a trajectory without one, in the order of
        starts."""
        group = generation.group or self._groups.get(rollout_of(generation.key), "")
        name = group or generation.key
        order = self._orders.get(name)
        if order is None:
            order = self._orders[name] = self._num_orders
            self._num_orders += 1
            if len(self._orders) > _MAX_ORDERS:
                self._orders.popitem(last=False)
        return order

    def _use_capacity(self) -> None:
        """Place waiting turns and admit waiting groups that fit now."""
        self._queue.pause(lambda request: self._ledger.keeps(request.placement.key))
        self._place_waiting()
        self.gate.admit()

    def _place_waiting(self) -> None:
        """Place waiting turns that fit, in order."""
        if not len(self._queue):
            return
        now_s = time.monotonic()
        ranks = self.replicas.accepting_ranks
        longest = self.replicas.longest_context
        self._queue.place(now_s, lambda waiting: self._try_to_place(waiting, ranks, longest, now_s))

    def _try_to_place(
        self, waiting: Waiting[_Request], ranks: list[DataParallelRank], longest: int, now_s: float
    ) -> bool:
        """Return whether the turn waits no longer.

        It is placed, or it will never be, because no context can hold it (`longest` is the largest)
        or the router is closed.
        """
        request = waiting.request
        # It would wait in vain and block others.
        if self._closed or request.placement.num_tokens >= longest:
            request.settled.set()
            return True
        candidates = self._candidates(request.placement, ranks)
        waited_s = now_s - waiting.since_s
        decision = self._policy.choose(
            request.placement, candidates, now_s=now_s, waited_s=waited_s
        )
        request.decision = decision
        if decision.rank is None:
            return False
        self._send(request, decision.rank)
        if explain_log.isEnabledFor(logging.INFO):
            explain_log.info(
                "%s (%d tokens, waited %.2f s) %s",
                request.placement.key,
                request.placement.num_tokens,
                waited_s,
                decision.explain(),
            )
        return True

    def _candidates(
        self, placement: PlacementRequest, ranks: list[DataParallelRank]
    ) -> list[DataParallelRank]:
        """Return those of `ranks` whose context can hold the turn, and its own although suspect."""
        affinity = self._ledger.affinity(placement.key)
        if affinity is not None and affinity.rank not in ranks:
            replica = self.replicas.get(affinity.rank.server)
            if replica is not None and replica.state.takes_own:
                ranks = [*ranks, affinity.rank]
        return [
            rank
            for rank in ranks
            if placement.num_tokens < self.replicas[rank.server].context_length
        ]

    def _send(self, request: _Request, rank: DataParallelRank) -> None:
        """Reserve capacity, and let the turn begin."""
        generation, placement = request.generation, request.placement
        self._ledger.reserve(
            generation.rid,
            rank,
            placement.num_tokens,
            placement.budget,
            key=placement.key,
            group=placement.group,
            num_shared=placement.num_shared,
        )
        request.replica = self.replicas[rank.server]
        request.settled.set()

    def _close(self) -> None:
        """Fail all running and waiting turns at once."""
        self._closed = True
        self.replicas.break_streams(_CLOSED)
        self._place_waiting()


def _is_retryable(error: ServerRefused) -> bool:
    """Return whether another server, or the same one later, may accept the request."""
    return error.status >= 500 or error.status in (408, 429)


def _check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise RequestError(f"{field}: {wrong} is outside of the vocabulary of {vocab_size}")
