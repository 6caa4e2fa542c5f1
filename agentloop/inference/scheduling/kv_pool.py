"""Pure: accounting of the tokens in one KV cache, that of a data-parallel rank.

    reserve ──> live ──grow──> live ──park──> parked ──reserve (next turn)──> live
                  └──end──> gone                └──(oldest first)──> evicted

Its tokens are

- live: held by a sequence that is being generated; the prompt that the siblings of a group share
  is counted once;
- reserved: a live sequence will probably need them (`LengthPredictor`);
- parked: they belong to no live sequence, but are still in the server's prefix cache, which evicts
  the least recently used ones when live sequences need space. So does this pool, in that order.
  Those of a trajectory that runs a tool are kept: it is expected to return soon;
- of others: in use according to the server, but unknown here.

A server with SGLang's hierarchical cache also writes what was parked to the host's memory, and
loads from there what it has evicted: that costs less than computing it again.

Every sum is updated incrementally. Time is passed in as `now_s`, on any monotonic clock.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from agentloop.inference.ranks import DataParallelRank, LoadReport
from agentloop.inference.scheduling.length_predictor import LengthPredictor

_FREED_TAU_S = 20.0  # time constant of the average rate at which capacity is freed
_REPORT_TTL_S = 10.0  # time over which a report's excess over our own accounting fades to 0
_AWAY_S = 5.0  # time for which tokens are kept for a trajectory that runs a tool


@dataclass(slots=True)
class LiveSequence:
    """A sequence that is being generated; `num_own` excludes its group's prompt."""

    pool: KVPool
    key: str
    group: str
    num_own: int
    num_reserved: int
    num_prefill: int  # prompt tokens that are not cached; 0 after the first token
    budget: int  # tokens it may still generate
    num_generated: int = 0


@dataclass(slots=True)
class ParkedTokens:
    """Tokens in the prefix cache that belong to no live sequence."""

    num_tokens: int
    is_kept: bool  # their trajectory is expected to return soon
    since_s: float = 0.0


@dataclass(slots=True)
class SharedPrompt:
    """The prompt of a group, which is in the cache once."""

    num_tokens: int
    num_live_siblings: int = 0


@dataclass(slots=True)
class KVPool:
    """Accounting of one KV cache, in tokens."""

    rank: DataParallelRank
    capacity: int
    max_sequences: float = math.inf  # maximum batch size
    host_capacity: int = 0  # tokens that the host's memory caches
    predictor: LengthPredictor = field(default_factory=LengthPredictor)
    num_live: int = field(default=0, init=False)
    num_reserved: int = field(default=0, init=False)
    num_parked: int = field(default=0, init=False)
    num_kept: int = field(default=0, init=False)  # part of `num_parked`
    num_prefill: int = field(default=0, init=False)  # prompt tokens that are still to be computed
    num_sequences: int = field(default=0, init=False)
    num_others: int = field(default=0, init=False)  # tokens in use besides ours, as reported
    num_strangers: int = field(default=0, init=False)  # requests besides ours, as reported
    num_retracted: int = field(default=0, init=False)
    reported_s: float = field(default=-math.inf, init=False)  # the last report with new content
    prompts: dict[str, SharedPrompt] = field(default_factory=dict, init=False)  # by group
    _report: LoadReport | None = field(default=None, init=False)
    _excess: tuple[int, int] = field(default=(0, 0), init=False)  # in the last report
    _confirmed: tuple[int, int] = field(default=(0, 0), init=False)  # minimum of the last two
    _num_streamed: int = field(default=0, init=False)
    _num_streamed_at_report: int = field(default=0, init=False)
    _freed_per_s: float = field(default=0.0, init=False)
    _freed_s: float = field(default=0.0, init=False)
    # By trajectory (False) or group (True), the least recently used first.
    _parked: OrderedDict[tuple[str, bool], ParkedTokens] = field(
        default_factory=OrderedDict, init=False
    )
    _host: OrderedDict[tuple[str, bool], int] = field(default_factory=OrderedDict, init=False)
    _num_host: int = field(default=0, init=False)

    # --- questions ------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Tokens that are neither live, reserved nor of others; parked tokens can be evicted."""
        return self.capacity - self.num_live - self.num_reserved - self.num_others

    def num_cached(self, key: str, group: str) -> int:
        """Return how many tokens of this trajectory's next prompt are cached here."""
        parked = self._parked.get((key, False))
        prompt = self.prompts.get(group) if group else None
        return (parked.num_tokens if parked else 0) + (prompt.num_tokens if prompt else 0)

    def num_on_host(self, key: str, group: str) -> int:
        """Return how many more tokens of this trajectory's next prompt the host's memory has."""
        if not self._num_host:
            return 0
        parked = self._parked.get((key, False))
        own = self._host.get((key, False), 0) - (parked.num_tokens if parked else 0)
        return max(0, own) + (0 if group in self.prompts else self._host.get((group, True), 0))

    def num_kept_for(self, key: str) -> int:
        """Return the parked tokens that are kept for this trajectory's return."""
        parked = self._parked.get((key, False))
        return parked.num_tokens if parked is not None and parked.is_kept else 0

    def num_shared(self, group: str) -> int:
        """Return the prompt tokens that a live sibling already holds."""
        prompt = self.prompts.get(group) if group else None
        return prompt.num_tokens if prompt and prompt.num_live_siblings else 0

    def freed_per_s(self, now_s: float) -> float:
        """Return the recent rate at which ended turns freed tokens."""
        return self._freed_per_s * math.exp(-max(0.0, now_s - self._freed_s) / _FREED_TAU_S)

    # --- sequences ------------------------------------------------------------------------------

    def reserve(
        self, num_tokens: int, budget: int, *, key: str, group: str, num_shared: int
    ) -> LiveSequence:
        """Begin a turn with a prompt of `num_tokens`; see `KVLedger.reserve`."""
        num_cached = self.num_cached(key, group) + self.num_on_host(key, group)
        num_prefill = max(1, num_tokens - num_cached)
        parked = self._parked.pop((key, False), None) if key else None
        if parked is not None:
            self._unpark(parked)
        if group and num_shared:
            num_own = num_tokens - min(self._share_prompt(group, num_shared), num_tokens)
        else:
            group, num_own = "", num_tokens
        growth = min(budget, self.predictor.remaining(group))
        self.num_sequences += 1
        self.num_live += num_own
        self.num_reserved += growth
        self.num_prefill += num_prefill
        self._evict_excess()
        return LiveSequence(self, key, group, num_own, growth, num_prefill, budget)

    def grow(self, live: LiveSequence, num_tokens: int) -> None:
        """Record streamed tokens, taken from the reserve; a used-up reserve is renewed."""
        self.num_prefill -= live.num_prefill
        live.num_prefill = 0
        live.num_own += num_tokens
        live.num_generated += num_tokens
        live.budget = max(0, live.budget - num_tokens)
        self.num_live += num_tokens
        self._num_streamed += num_tokens
        num_reserved = live.num_reserved - num_tokens
        if num_reserved <= 0:
            num_reserved = min(
                live.budget, self.predictor.remaining(live.group, live.num_generated)
            )
        self.num_reserved += num_reserved - live.num_reserved
        live.num_reserved = num_reserved
        if self.num_live + self.num_parked > self.capacity:
            self._evict_excess()

    def end(self, live: LiveSequence, now_s: float) -> None:
        """Remove a live sequence; its group's prompt is parked with the last live sibling."""
        self.num_sequences -= 1
        self.num_live -= live.num_own
        self.num_reserved -= live.num_reserved
        self.num_prefill -= live.num_prefill
        num_freed = live.num_own + live.num_reserved
        self._freed_per_s = self.freed_per_s(now_s) + num_freed / _FREED_TAU_S
        self._freed_s = now_s
        if live.group:
            prompt = self.prompts[live.group]
            prompt.num_live_siblings -= 1
            if not prompt.num_live_siblings:
                self.num_live -= prompt.num_tokens
                self._park((live.group, True), ParkedTokens(prompt.num_tokens, is_kept=False))

    def park(self, live: LiveSequence, now_s: float, *, is_kept: bool) -> None:
        """Put the tokens of a sequence that has ended into the prefix cache."""
        if live.key:
            old = self._parked.pop((live.key, False), None)
            if old is not None:  # replaced by the trajectory's later turn
                self._unpark(old)
            self._park((live.key, False), ParkedTokens(live.num_own, is_kept, now_s))
            self._write_to_host((live.key, False), live.num_own)
        if live.group:
            self._write_to_host((live.group, True), self.prompts[live.group].num_tokens)
        if (live.group, True) in self._parked:  # more recently used than the tokens after it
            self._parked.move_to_end((live.group, True))
        self._evict_excess()

    def stop_keeping(self, key: str) -> None:
        """Treat the parked tokens of a trajectory like all others: it will not return."""
        parked = self._parked.get((key, False))
        if parked is not None:
            self._unkeep(parked)

    def flush(self) -> None:
        """Clear the prefix cache; live sequences stay."""
        while self._parked:
            self._evict_oldest()
        self._host.clear()
        self._num_host = 0

    # --- reports and time -----------------------------------------------------------------------

    def report(self, report: LoadReport, now_s: float) -> int:
        """Correct the accounting by the server's report; see `KVLedger.report`."""
        last = self._report
        if report == last and self._num_streamed != self._num_streamed_at_report:
            self._fade(now_s)
            return 0
        tokens = max(0, min(report.num_used, self.capacity) - self.num_live)
        requests = max(0, report.num_running + report.num_waiting - self.num_sequences)
        before, self._excess = self._excess, (tokens, requests)
        self._confirmed = (min(tokens, before[0]), min(requests, before[1]))
        self._report, self.reported_s = report, now_s
        self._num_streamed_at_report = self._num_streamed
        self._fade(now_s)
        self._evict_excess()
        num_new = report.num_retracted - (last.num_retracted if last else report.num_retracted)
        if num_new < 0:  # the server was restarted
            num_new = report.num_retracted
        self.num_retracted += num_new
        return num_new

    def age(self, now_s: float) -> None:
        """Let an old report fade, and keep no tokens that were parked a while ago."""
        self._fade(now_s)
        for parked in self._parked.values():
            if now_s - parked.since_s > _AWAY_S:
                self._unkeep(parked)

    # --- within ---------------------------------------------------------------------------------

    def _share_prompt(self, group: str, num_tokens: int) -> int:
        """Add a live sibling to the group's prompt; return the prompt's length."""
        prompt = self.prompts.setdefault(group, SharedPrompt(num_tokens))
        if not prompt.num_live_siblings:
            self.num_live += prompt.num_tokens
            parked = self._parked.pop((group, True), None)
            if parked is not None:
                self._unpark(parked)
        prompt.num_live_siblings += 1
        return prompt.num_tokens

    def _park(self, name: tuple[str, bool], parked: ParkedTokens) -> None:
        self._parked[name] = parked
        self.num_parked += parked.num_tokens
        self.num_kept += parked.num_tokens if parked.is_kept else 0

    def _write_to_host(self, name: tuple[str, bool], num_tokens: int) -> None:
        self._num_host += num_tokens - self._host.pop(name, 0)
        self._host[name] = num_tokens
        while self._num_host > self.host_capacity:  # it forgets the least recently used
            self._num_host -= self._host.popitem(last=False)[1]

    def _unpark(self, parked: ParkedTokens) -> None:
        self.num_parked -= parked.num_tokens
        self._unkeep(parked)

    def _unkeep(self, parked: ParkedTokens) -> None:
        if parked.is_kept:
            parked.is_kept = False
            self.num_kept -= parked.num_tokens

    def _evict_excess(self) -> None:
        """Evict the oldest parked tokens until the rest fits into the cache."""
        while self._parked and self.num_live + self.num_parked + self.num_others > self.capacity:
            self._evict_oldest()

    def _evict_oldest(self) -> None:
        (name, is_prompt), parked = self._parked.popitem(last=False)
        self._unpark(parked)
        if is_prompt:
            del self.prompts[name]

    def _fade(self, now_s: float) -> None:
        """Weight the confirmed excess by the age of the report."""
        weight = max(0.0, 1.0 - (now_s - self.reported_s) / _REPORT_TTL_S)
        self.num_others = math.ceil(self._confirmed[0] * weight)
        self.num_strangers = math.ceil(self._confirmed[1] * weight)
