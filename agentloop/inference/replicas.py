"""The servers that turns can be sent to: their health, their weights and their load.

    add ──> probed once a second ──> HEALTHY, SUSPECT, DEAD, ... (scheduling/health.py)
                 │     └──load──> KVLedger, on_report
                 └──capacity may have increased──> on_capacity
    retire ──> no new turns ──the last one has ended──> removed

A probe asks for the weight version and, if the server is well, for its load. Three parties report
to this registry: the router, how its requests went (`Replica`); whoever runs the processes, that
one ended or is being restarted; and the weight sync, which weights a server has.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import anyio
from anyio.abc import TaskGroup

from agentloop.aio import Signal
from agentloop.errors import ServerError, ServerUnavailable
from agentloop.inference.ranks import DataParallelRank
from agentloop.inference.scheduling.health import Health, ServerState
from agentloop.inference.scheduling.kv_ledger import KVLedger
from agentloop.inference.sglang.client import ServerInfo, SGLangServer

log = logging.getLogger(__name__)

OnReport = Callable[[float, int, float], object]
"""Called after a server reported its load: with the time, the number of requests that it retracted
since its last report, and the time of the last report with new content."""


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


@dataclass(slots=True, eq=False)
class Replica:
    """A server with its state."""

    server: SGLangServer
    info: ServerInfo
    health: Health
    weight_version: str | None = None  # None until it has reported one
    verified_version: str | None = None  # confirmed by `weights_loaded`
    num_loads: int = 0  # weight updates confirmed by `weights_loaded`
    has_exited: bool = False  # its process, and no other has been started
    num_retracted: Counter[DataParallelRank] = field(default_factory=Counter)

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def state(self) -> ServerState:
        return self.health.state

    @property
    def ranks(self) -> list[DataParallelRank]:
        """The server's data-parallel ranks, each of which has a KV cache of its own."""
        return [DataParallelRank(self.url, number) for number in range(self.info.dp_size)]

    @property
    def context_length(self) -> int:
        """Prompt and response tokens of the longest sequence that the server can hold."""
        return min(self.info.context_length, self.info.max_total_num_tokens - 1)

    def request_failed(self, reason: str) -> None:
        """Record that a stream broke or could not begin, but not that the request was invalid."""
        # A failed weight update breaks the streams of a server; that is not its fault.
        if self.state is not ServerState.STALE:
            self._fail(self.health.request_failed, reason)

    def probe_failed(self) -> None:
        """Record that a probe was not answered; break all streams of a dead server."""
        reason = "it does not answer probes"
        self._fail(self.health.probe_failed, reason)
        if not self.state.keeps_running:  # including streams that began after it was declared dead
            self.server.break_streams(reason)

    def mark_exited(self, reason: str) -> None:
        """Record that the server's process ended; break its streams, also if it is retired."""
        self.has_exited = True
        self.server.process_ended()
        self._fail(self.health.mark_exited, reason)
        self.server.break_streams(reason)

    def _fail(self, record: Callable[[str], ServerState], reason: str) -> None:
        """Report a failure to the health; log a change of state and break streams if needed."""
        before = self.state
        state = record(reason)
        if state is not before:
            log.warning("%s is %s: %s", self.url, state, reason)
            if not state.keeps_running:
                self.server.break_streams(reason)


class Replicas:
    """A registry of servers; it watches them within `watching`."""

    def __init__(
        self,
        ledger: KVLedger,
        *,
        probe_interval_s: float,
        stall_timeout_s: float,
        on_capacity: Callable[[], None],
        on_report: OnReport,
    ) -> None:
        """Create an empty registry, whose servers' KV caches are added to `ledger`.

        Args:
            stall_timeout_s: Time without data after which a stream is broken.
            on_capacity: Called when the servers may take more turns, or when waiting turns may have
                become impossible.
        """
        self._ledger = ledger
        self._probe_interval_s = probe_interval_s
        self._stall_timeout_s = stall_timeout_s
        self._on_capacity = on_capacity
        self._on_report = on_report
        self._replicas: dict[str, Replica] = {}
        self._weights: str | None = None  # the version that servers must have; None: any
        self._must_verify = False  # require a confirmation besides the server's own report
        self._num_starting = 0  # processes of servers
        self._no_starts = False
        self._starts_changed = Signal()
        self._tasks: TaskGroup

    @asynccontextmanager
    async def watching(self, servers: Sequence[SGLangServer]) -> AsyncIterator[None]:
        """Query each server, add it, and keep watching all within this context.

        Raises:
            ServerUnavailable, ServerRefused: A server cannot be used.
        """
        replicas = [await self._connect(server) for server in servers]
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            for replica in replicas:
                self._register(replica)
            tasks.start_soon(self._watch_streams)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()

    # --- which there are ------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __getitem__(self, url: str) -> Replica:
        return self._replicas[url]

    def get(self, url: str) -> Replica | None:
        """Return the server with this URL, unless it has been removed."""
        return self._replicas.get(url)

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
        self._on_capacity()

    def retire(self, url: str) -> None:
        """Stop sending turns to a server, and remove it when its running turns have ended.

        Raises:
            KeyError: There is no such server.
        """
        self._replicas[url.rstrip("/")].health.retire()
        self._on_capacity()  # requests that only it could serve must not wait any longer

    async def _connect(self, server: SGLangServer) -> Replica:
        replica = Replica(server, await server.info(), Health())
        if self._weights is not None:
            replica.health.weights_missed()  # its weights are unknown
        return replica

    def _register(self, replica: Replica) -> None:
        self._replicas[replica.url] = replica
        self._add_pools(replica)
        self._tasks.start_soon(self._watch, replica)

    def _add_pools(self, replica: Replica) -> None:
        info = replica.info
        for rank in replica.ranks:
            self._ledger.add(
                rank,
                info.max_total_num_tokens,
                info.max_running_requests or math.inf,
                info.num_host_tokens,
            )

    def _remove_pools(self, replica: Replica) -> None:
        for rank in replica.ranks:
            self._ledger.remove(rank)

    def _flush_pools(self, replica: Replica) -> None:
        for rank in replica.ranks:
            self._ledger.pools[rank].flush()

    # --- what they can hold ---------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """KV tokens that the servers that accept requests hold, in their hosts' memory too."""
        return sum(
            (replica.info.max_total_num_tokens + replica.info.num_host_tokens)
            * replica.info.dp_size
            for replica in self
            if replica.state.takes_new
        )

    @property
    def context_length(self) -> int:
        """Prompt and response tokens that every server can hold.

        Raises:
            ServerUnavailable: All servers have been retired.
        """
        if not self._replicas:
            raise ServerUnavailable("there is no server: all have been retired")
        return min(replica.context_length for replica in self)

    @property
    def longest_context(self) -> int:
        """Prompt and response tokens that some server can hold; 0 if all are retired."""
        return max(
            (
                replica.context_length
                for replica in self
                if replica.state is not ServerState.RETIRED
            ),
            default=0,
        )

    @property
    def accepting_ranks(self) -> list[DataParallelRank]:
        """The ranks to which new trajectories may be sent."""
        return [rank for replica in self if replica.state.takes_new for rank in replica.ranks]

    @property
    def model_path(self) -> str:
        """The model that the servers report."""
        return next(iter(self)).info.model_path

    def view(self) -> list[ServerView]:
        """Return the state of every server."""
        return [self._view(replica) for replica in self]

    def _view(self, replica: Replica) -> ServerView:
        pools = [self._ledger.pools[rank] for rank in replica.ranks]
        return ServerView(
            url=replica.url,
            state=replica.state,
            num_running=sum(pool.num_sequences for pool in pools),
            num_held_tokens=sum(pool.num_live for pool in pools),
            num_reserved_tokens=sum(pool.num_reserved for pool in pools),
            num_parked_tokens=sum(pool.num_kept for pool in pools),
            capacity_tokens=sum(pool.capacity for pool in pools),
            num_others_tokens=sum(pool.num_others for pool in pools),
            reason=replica.health.reason,
            weight_version=replica.weight_version,
            num_cached_tokens=sum(pool.num_parked - pool.num_kept for pool in pools),
        )

    # --- their processes ------------------------------------------------------------------------

    def mark_exited(self, url: str, reason: str) -> None:
        """Record that the server's process ended; its turns move to other servers at once."""
        if replica := self._replicas.get(url):
            replica.mark_exited(reason)

    def mark_restarting(self, url: str) -> None:
        """Record that the server is being restarted; it is back when it answers a probe."""
        if replica := self._replicas.get(url):
            replica.has_exited = False
            replica.health.restarting()

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Wait until servers may start; whoever wants their memory waits for the block."""
        while self._no_starts:
            await self._starts_changed.wait()  # no deadline: a step of the learner has one
        self._num_starting += 1
        try:
            yield
        finally:
            self._num_starting -= 1
            self._starts_changed.notify()

    @asynccontextmanager
    async def no_starts(self) -> AsyncIterator[None]:
        """Wait until no server is starting; none starts while the block is open."""
        self._no_starts = True
        try:
            while self._num_starting:
                await self._starts_changed.wait()  # no deadline: a start has one
            yield
        finally:
            self._no_starts = False
            self._starts_changed.notify()

    def memory_released(self, url: str) -> None:
        """Record that a server serves nothing until it has loaded weights."""
        if replica := self._replicas.get(url):
            replica.verified_version = None
            replica.health.weights_missed("its memory is lent to the learner")

    def is_dead(self, url: str) -> bool:
        """Return whether the server is dead or restarting and has not answered a probe since."""
        replica = self._replicas.get(url)
        return replica is not None and not replica.state.keeps_running

    def is_enabled(self, url: str) -> bool:
        """Return whether the server is known and not retired."""
        replica = self._replicas.get(url)
        return replica is not None and replica.state is not ServerState.RETIRED

    def give_up(self, url: str) -> bool:
        """Retire a server that will not come back; return whether any other one is left."""
        if url in self._replicas:
            self.retire(url)
        return any(self.is_enabled(other) for other in self._replicas)

    def break_streams(self, reason: str) -> None:
        """Break the streams of all servers."""
        for replica in self:
            replica.server.break_streams(reason)

    # --- their weights --------------------------------------------------------------------------

    @property
    def servers(self) -> list[SGLangServer]:
        """Servers that can be given weights."""
        return [replica.server for replica in self if replica.state.takes_weights]

    def require_weights(self, version: str | None, *, verified: bool = False) -> None:
        """Accept only servers with these weights from now on; the others are STALE until they
        report them.

        With `verified`, each server needs a new call of `weights_loaded`, even if it had these
        weights before. None accepts any weights.
        """
        self._weights, self._must_verify = version, verified
        for replica in self:
            replica.verified_version = None
            if not self._has_weights(replica, replica.weight_version):
                replica.health.weights_missed()
        self._on_capacity()

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
        self._flush_pools(replica)
        if version == self._weights:
            replica.health.weights_loaded()
        self._on_capacity()

    def _has_weights(self, replica: Replica, reported: str | None) -> bool:
        """Return whether a server that reports this version has the required weights."""
        if replica.server.has_released:
            return False
        if self._weights is None:
            return True
        if reported != self._weights:
            return False
        return not self._must_verify or replica.verified_version == reported

    # --- watching -------------------------------------------------------------------------------

    async def _watch(self, replica: Replica) -> None:
        """Probe a server and fetch its load, until it is retired and idle."""
        while True:
            await anyio.sleep(self._probe_interval_s)
            if replica.state is ServerState.RETIRED:
                if not any(self._ledger.pools[rank].num_sequences for rank in replica.ranks):
                    del self._replicas[replica.url]
                    self._remove_pools(replica)
                    return
                continue
            try:
                await self._probe(replica)
            except ServerError:
                replica.probe_failed()
                continue
            self._on_capacity()  # do not wait for the report, which may be slow or missing
            with contextlib.suppress(ServerError):  # the ledger works without reports for a while
                await self._fetch_load(replica)
                self._on_capacity()

    async def _probe(self, replica: Replica) -> None:
        """Check that the server would take a request, and update its state.

        Raises:
            ServerError: It would not.
        """
        before, num_loads = replica.state, replica.num_loads
        version = await replica.server.weight_version()
        info = replica.info if before.keeps_running else await replica.server.info()
        if replica.state is not before or replica.num_loads != num_loads:
            return  # its answer is outdated
        if not before.keeps_running:
            # It may be a new process with an empty cache.
            self._remove_pools(replica)
            replica.info = info
            replica.verified_version = None
            self._add_pools(replica)
        elif replica.weight_version not in (None, version):  # new weights invalidate the cache
            self._flush_pools(replica)
        replica.weight_version = version
        has_weights = self._has_weights(replica, version)
        if replica.health.probe_succeeded(has_weights=has_weights) is not before:
            log.warning("%s is %s", replica.url, replica.state)

    async def _fetch_load(self, replica: Replica) -> None:
        """Fetch the server's load and correct the ledger by it.

        Raises:
            ServerError: It did not report.
        """
        reports = await replica.server.loads()
        now_s = time.monotonic()
        ranks = replica.ranks
        num_retracted = 0
        for rank, report in zip(ranks, reports, strict=False):
            report = replace(report, num_retracted=replica.num_retracted[rank])
            num_retracted += self._ledger.report(rank, report, now_s)
        self._ledger.age(now_s)
        reported_s = max(self._ledger.pools[rank].reported_s for rank in ranks)
        self._on_report(now_s, num_retracted, reported_s)

    async def _watch_streams(self) -> None:
        """Break streams that are silent for too long; their turns move to other servers."""
        while True:
            await anyio.sleep(min(1.0, self._stall_timeout_s / 4))
            for replica in self:
                replica.server.close_stalled()
