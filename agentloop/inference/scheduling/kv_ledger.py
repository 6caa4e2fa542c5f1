"""Pure: accounting of the tokens in each server's KV cache.

    reserve ──> live ──grow──> live ──park──> parked ──reserve (next turn)──> live
                  └──release──> gone            └──(oldest first)──> evicted

A pool is one data-parallel rank of one server, which has a KV cache of its own. Its tokens are

- live: held by a sequence that is being generated; the prompt that the siblings of a group share
  is counted once;
- reserved: a live sequence will probably need them (`LengthPredictor`);
- parked: their trajectory runs a tool. They are still in the server's prefix cache, which evicts
  the least recently used ones when live sequences need space. So does this ledger, in that order;
- of others: in use according to the server, but unknown here.

Time is passed in as `now` [s], on any monotonic clock.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["DataParallelRank", "KVLedger", "KVPool", "LengthPredictor", "LoadReport"]

_MAX_GROUPS = 4096  # groups whose lengths are remembered; beyond it the oldest are forgotten
_FREED_TAU_S = 20.0  # time constant of the average rate at which capacity is freed


class DataParallelRank(NamedTuple):
    """A data-parallel rank of a server."""

    server: str
    rank: int = 0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The load that a rank reports (SGLang: an element of `loads` of GET /v1/loads).

    Attributes:
        num_used: Tokens of the KV cache held by running requests.
        num_retracted: Requests retracted from the batch so far, a counter.
    """

    num_used: int
    num_running: int
    num_waiting: int
    num_retracted: int = 0


class LengthPredictor:
    """Predicts the length of a turn from its siblings' turns or, if they are few, from recent ones.

    The prediction is a quantile of the remaining length among turns that got as far as this one, so
    that a long turn is not expected to end at once because most turns are short. The quantile need
    not be high: of many sequences that share a cache few are long at the same time, and parked
    tokens are a buffer. It was chosen with bench/router.py.
    """

    def __init__(
        self, *, quantile: float = 0.4, prior: int = 512, window: int = 2048, min_samples: int = 8
    ) -> None:
        """Create a predictor; `prior` is used if fewer than `min_samples` turns got that far."""
        self._quantile = quantile
        self._prior = prior
        self._min_samples = min_samples
        self._window = window
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._groups: OrderedDict[str, list[int]] = OrderedDict()

    def learn(self, group: str, num_tokens: int) -> None:
        """Record that a turn of `group` ended normally after `num_tokens`."""
        if len(self._recent) == self._window:
            del self._sorted[bisect_right(self._sorted, self._recent.popleft()) - 1]
        self._recent.append(num_tokens)
        insort(self._sorted, num_tokens)
        if group:
            lengths = self._groups.setdefault(group, [])
            if len(lengths) < self._window:
                insort(lengths, num_tokens)
            if len(self._groups) > _MAX_GROUPS:
                self._groups.popitem(last=False)

    def remaining(self, group: str, num_so_far: int = 0) -> int:
        """Return the expected number of tokens to come after `num_so_far`; at least 1."""
        for lengths in (self._groups.get(group, ()), self._sorted):
            first = bisect_right(lengths, num_so_far)
            num_longer = len(lengths) - first
            if num_longer >= self._min_samples:
                return lengths[first + int(self._quantile * (num_longer - 1))] - num_so_far
        return self._prior


@dataclass(slots=True)
class _Live:
    """A sequence that is being generated; `num_own` excludes its group's prompt."""

    pool: KVPool
    key: str
    group: str
    num_shared: int
    num_own: int
    num_reserved: int
    num_prefill: int  # prompt tokens that are not cached; 0 after the first token
    budget: int  # tokens it may still generate
    num_generated: int = 0


@dataclass(slots=True)
class _Parked:
    num_tokens: int
    wanted: bool  # its trajectory is expected to return soon
    since_s: float = 0.0


@dataclass(slots=True)
class KVPool:
    """Accounting of one KV cache, in tokens. Only the ledger writes to it."""

    place: DataParallelRank
    capacity: int
    max_sequences: float = math.inf  # maximum batch size
    num_live: int = 0
    num_reserved: int = 0
    num_parked: int = 0
    num_wanted: int = 0  # part of `num_parked` whose trajectories are expected to return
    num_prefill: int = 0  # prompt tokens that are still to be computed
    num_sequences: int = 0
    num_others: int = 0  # tokens in use besides ours, as reported
    num_strangers: int = 0  # requests besides ours, as reported
    num_retracted: int = 0
    _report: LoadReport | None = None
    _reported_s: float = -math.inf
    _excess: tuple[int, int] = (0, 0)  # tokens and requests besides ours in the last report
    _confirmed: tuple[int, int] = (0, 0)  # minimum of the excess in the last two reports
    _num_streamed: int = 0
    _num_streamed_then: int = 0
    _freed_per_s: float = 0.0
    _freed_s: float = 0.0
    _live: dict[str, _Live] = field(default_factory=dict)
    prompts: dict[str, list[int]] = field(default_factory=dict)  # group: [tokens, live siblings]
    _lru: OrderedDict[tuple[str, bool], _Parked] = field(default_factory=OrderedDict)

    @property
    def room(self) -> int:
        """Tokens that are neither live, reserved nor of others; parked tokens can be evicted."""
        return self.capacity - self.num_live - self.num_reserved - self.num_others

    def num_cached(self, key: str, group: str) -> int:
        """Return how many tokens of this trajectory's next prompt are cached here."""
        own = self._lru.get((key, False))
        prompt = self.prompts.get(group) if group else None
        return (own.num_tokens if own else 0) + (prompt[0] if prompt else 0)

    def num_kept_for(self, key: str) -> int:
        """Return the parked tokens that are kept for this trajectory's return."""
        own = self._lru.get((key, False))
        return own.num_tokens if own is not None and own.wanted else 0

    def num_shared(self, group: str) -> int:
        """Return the prompt tokens that a live sibling already holds."""
        prompt = self.prompts.get(group) if group else None
        return prompt[0] if prompt and prompt[1] else 0

    def freed_per_s(self, now: float) -> float:
        """Return the recent rate at which ended turns freed tokens."""
        return self._freed_per_s * math.exp(-max(0.0, now - self._freed_s) / _FREED_TAU_S)


class KVLedger:
    """Accounting of all KV caches; every sum is updated incrementally.

    A sequence is a turn with a unique name; `key` names its trajectory and `group` the siblings
    that share a prompt ("" for none).
    """

    def __init__(
        self,
        predictor: LengthPredictor | None = None,
        *,
        report_ttl_s: float = 10.0,
        away_s: float = 5.0,
    ) -> None:
        """Create a ledger.

        Args:
            report_ttl_s: Time over which a report's excess over our own accounting fades to 0.
            away_s: Time for which tokens are kept for a trajectory that runs a tool.
        """
        self.predictor = predictor or LengthPredictor()
        self.pools: dict[DataParallelRank, KVPool] = {}
        self._away_s = away_s
        self._report_ttl_s = report_ttl_s
        self._live: dict[str, _Live] = {}
        self._homes: dict[str, KVPool] = {}

    # --- servers --------------------------------------------------------------------------------

    def add(self, place: DataParallelRank, capacity: int, max_sequences: float = math.inf) -> None:
        """Add a pool with the `capacity` in tokens and the batch size that the server reports.

        Raises:
            ValueError: It was already added.
        """
        if place in self.pools:
            raise ValueError(f"{place} was already added")
        self.pools[place] = KVPool(place, capacity, max_sequences)

    def remove(self, place: DataParallelRank) -> None:
        """Remove the pool of a retired or dead server, with all that it held."""
        pool = self.pools.pop(place)
        for sequence in pool._live:
            del self._live[sequence]
        self._homes = {key: home for key, home in self._homes.items() if home is not pool}

    def flush(self, place: DataParallelRank) -> None:
        """Clear the prefix cache, as new weights do; live sequences are kept."""
        pool = self.pools[place]
        while pool._lru:
            self._evict_one(pool)

    # --- sequences ------------------------------------------------------------------------------

    def need(self, pool: KVPool, group: str, num_tokens: int, budget: int) -> int:
        """Return the tokens that a turn needs here: its prompt, minus the siblings' part, and its
        growth."""
        growth = min(budget, self.predictor.remaining(group))
        return num_tokens - pool.num_shared(group) + growth

    def fits(self, pool: KVPool, need: int) -> bool:
        """Return whether there is room; an idle pool accepts whatever its capacity can hold."""
        return need <= pool.room or (not pool.num_sequences and need <= pool.capacity)

    def reserve(
        self,
        sequence: str,
        place: DataParallelRank,
        num_tokens: int,
        budget: int,
        *,
        key: str = "",
        group: str = "",
        num_shared: int = 0,
    ) -> int:
        """Begin a turn with a prompt of `num_tokens`; return how many of them must be computed.

        The first `num_shared` tokens are those of its group's prompt; up to `budget` more may be
        generated.

        Raises:
            ValueError: The sequence already holds a reservation.
        """
        if sequence in self._live:
            raise ValueError(f"{sequence} already holds a reservation")
        pool = self.pools[place]
        num_prefill = max(1, num_tokens - pool.num_cached(key, group))
        own = pool._lru.pop((key, False), None) if key else None
        if own is not None:
            self._unpark(pool, own)
        if group and num_shared:
            prompt = pool.prompts.setdefault(group, [num_shared, 0])
            num_shared = min(prompt[0], num_tokens)
            if not prompt[1]:  # no live sibling
                pool.num_live += prompt[0]
                parked = pool._lru.pop((group, True), None)
                if parked is not None:
                    self._unpark(pool, parked)
            prompt[1] += 1
        else:
            group, num_shared = "", 0
        growth = min(budget, self.predictor.remaining(group))
        live = _Live(
            pool, key, group, num_shared, num_tokens - num_shared, growth, num_prefill, budget
        )
        self._live[sequence] = pool._live[sequence] = live
        if key:
            self._homes[key] = pool
        pool.num_sequences += 1
        pool.num_live += live.num_own
        pool.num_reserved += growth
        pool.num_prefill += num_prefill
        self._evict(pool)
        return num_prefill

    def grow(self, sequence: str, num_tokens: int) -> None:
        """Record streamed tokens, taken from the reserve; a used-up reserve is renewed."""
        live = self._live.get(sequence)
        if live is None or not num_tokens:  # None if its server was removed
            return
        pool = live.pool
        pool.num_prefill -= live.num_prefill
        live.num_prefill = 0
        live.num_own += num_tokens
        live.num_generated += num_tokens
        live.budget = max(0, live.budget - num_tokens)
        pool.num_live += num_tokens
        pool._num_streamed += num_tokens
        left = live.num_reserved - num_tokens
        if left <= 0:
            left = min(live.budget, self.predictor.remaining(live.group, live.num_generated))
        pool.num_reserved += left - live.num_reserved
        live.num_reserved = left
        if pool.num_live + pool.num_parked > pool.capacity:
            self._evict(pool)

    def park(self, sequence: str, now: float) -> None:
        """Record that a turn ended normally; its tokens stay in the prefix cache for a while."""
        live = self._live.get(sequence)
        if live is None:
            return
        self.predictor.learn(live.group, live.num_generated)
        pool = live.pool
        self._remove_live(sequence, live, now)
        wanted = self._homes.get(live.key) is pool
        if live.key:
            old = pool._lru.pop((live.key, False), None)
            if old is not None:  # replaced by the trajectory's later turn
                self._unpark(pool, old)
            pool._lru[live.key, False] = _Parked(live.num_own, wanted, now)
            pool.num_parked += live.num_own
            pool.num_wanted += live.num_own if wanted else 0
        if (live.group, True) in pool._lru:  # more recently used than the tokens that follow it
            pool._lru.move_to_end((live.group, True))
        self._evict(pool)

    def release(self, sequence: str, now: float) -> None:
        """Record that a turn was lost or cancelled; ignored if it is over."""
        live = self._live.get(sequence)
        if live is not None:
            self._remove_live(sequence, live, now)

    def forget(self, key: str) -> None:
        """Record that a trajectory ended, so that its parked tokens are no longer kept."""
        pool = self._homes.pop(key, None)
        if pool is None:
            return
        parked = pool._lru.get((key, False))
        if parked is not None and parked.wanted:
            parked.wanted = False
            pool.num_wanted -= parked.num_tokens

    def home(self, key: str) -> KVPool | None:
        """Return the pool of the trajectory's last turn."""
        return self._homes.get(key)

    # --- what servers say -----------------------------------------------------------------------

    def report(self, place: DataParallelRank, report: LoadReport, now: float) -> int:
        """Correct the accounting by a server's report; return the requests retracted since the last
        one.

        Only an excess counts: tokens in use that are not ours. It has to appear in two consecutive
        reports, since one may still include a turn that has just ended. Usage below ours means
        nothing, because our requests may be in the server's queue. A report equal to the last one
        although tokens were streamed since is outdated and does not renew its age.
        """
        pool = self.pools[place]
        last = pool._report
        if report == last and pool._num_streamed != pool._num_streamed_then:
            self._fade(pool, now)
            return 0
        tokens = max(0, min(report.num_used, pool.capacity) - pool.num_live)
        requests = max(0, report.num_running + report.num_waiting - pool.num_sequences)
        before, pool._excess = pool._excess, (tokens, requests)
        pool._confirmed = (min(tokens, before[0]), min(requests, before[1]))
        pool._report, pool._reported_s = report, now
        pool._num_streamed_then = pool._num_streamed
        self._fade(pool, now)
        self._evict(pool)
        num_new = report.num_retracted - (last.num_retracted if last else report.num_retracted)
        if num_new < 0:  # the server was restarted
            num_new = report.num_retracted
        pool.num_retracted += num_new
        return num_new

    def age(self, now: float) -> None:
        """Let old reports fade, and stop keeping tokens of trajectories that are away for long.

        Call it about once a second.
        """
        for pool in self.pools.values():
            self._fade(pool, now)
            for parked in pool._lru.values():
                if parked.wanted and now - parked.since_s > self._away_s:
                    parked.wanted = False
                    pool.num_wanted -= parked.num_tokens

    def reported_s(self, place: DataParallelRank) -> float:
        """Return when the last report with new content arrived."""
        return self.pools[place]._reported_s

    # --- within ---------------------------------------------------------------------------------

    def _remove_live(self, sequence: str, live: _Live, now: float) -> None:
        """Remove a live sequence; its group's prompt is parked with the last live sibling."""
        pool = live.pool
        del self._live[sequence], pool._live[sequence]
        pool.num_sequences -= 1
        pool.num_live -= live.num_own
        pool.num_reserved -= live.num_reserved
        pool.num_prefill -= live.num_prefill
        pool._freed_per_s = (
            pool.freed_per_s(now) + (live.num_own + live.num_reserved) / _FREED_TAU_S
        )
        pool._freed_s = now
        if live.group:
            prompt = pool.prompts[live.group]
            prompt[1] -= 1
            if not prompt[1]:
                pool.num_live -= prompt[0]
                pool.num_parked += prompt[0]
                pool._lru[live.group, True] = _Parked(prompt[0], False)

    def _unpark(self, pool: KVPool, parked: _Parked) -> None:
        pool.num_parked -= parked.num_tokens
        if parked.wanted:
            pool.num_wanted -= parked.num_tokens

    def _evict(self, pool: KVPool) -> None:
        """Evict the oldest parked tokens until the rest fits into the cache."""
        while pool._lru and pool.num_live + pool.num_parked + pool.num_others > pool.capacity:
            self._evict_one(pool)

    def _evict_one(self, pool: KVPool) -> None:
        (name, is_prompt), parked = pool._lru.popitem(last=False)
        self._unpark(pool, parked)
        if is_prompt:
            del pool.prompts[name]

    def _fade(self, pool: KVPool, now: float) -> None:
        """Weight the reported excess by the age of the report."""
        left = max(0.0, 1.0 - (now - pool._reported_s) / self._report_ttl_s)
        pool.num_others = math.ceil(pool._confirmed[0] * left)
        pool.num_strangers = math.ceil(pool._confirmed[1] * left)
