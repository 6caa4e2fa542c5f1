"""Pure: policies of systems that know which turns belong to one program, for comparison.

A program is what agentloop calls a rollout. Written from their papers and code of mid 2026; what is
simplified stands at each class. The hierarchical cache of SGLang is an option of the model of a
server (`bench.server_model`), for any policy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from agentloop.inference.ranks import DataParallelRank
from agentloop.inference.scheduling.kv_ledger import KVLedger
from agentloop.inference.scheduling.kv_pool import KVPool
from agentloop.inference.scheduling.placement import Decision, PlacementRequest
from bench.gateway_policies import GatewayPolicy, StickyLeastLoaded

__all__ = ["PROGRAM_POLICIES", "Aimd", "Continuum", "ThunderAgent"]

_BUFFER = 100  # tokens for each active program


@dataclass(slots=True)
class _Program:
    rank: DataParallelRank
    num_tokens: int
    is_acting: bool = False
    is_marked: bool = False


class ThunderAgent(GatewayPolicy):
    """ThunderAgent (arXiv 2602.13692; scheduler/router.py): admits and pauses whole programs.

    A program starts on the server with the most capacity left and stays there. Every 5 s, a server
    whose programs hold more than its capacity pauses the smallest, those that run a tool first (one
    that generates pauses when its turn ends), and programs that wait are resumed, paused ones
    before new ones, the smallest first, wherever there is room.

    Simplified: it knows the tokens exactly. As in its code, siblings do not share their prompt in
    its accounts, and a program that runs a tool counts in full.
    """

    name = "thunder_agent"
    period_s = 5.0

    def __init__(self, ledger: KVLedger, *, seed: int = 0) -> None:
        super().__init__(ledger, seed=seed)
        self._programs: dict[str, _Program] = {}
        self._num_used: dict[DataParallelRank, int] = defaultdict(int)

    def is_active(self, key: str) -> bool:
        return key in self._programs

    def _choose(
        self, request: PlacementRequest, pools: Sequence[KVPool], now_s: float, waited_s: float
    ) -> Decision:
        program = self._programs.get(request.key)
        if program is None:
            pool = max(pools, key=lambda pool: pool.capacity - self._num_used[pool.rank])
            if pool.capacity - self._num_used[pool.rank] < request.num_tokens + _BUFFER:
                return Decision(None, self.name, "no server has capacity for it", ())
            program = self._programs[request.key] = _Program(pool.rank, 0)
            self._num_used[pool.rank] += _BUFFER
        self.grow(request.key, request.num_tokens - program.num_tokens)
        program.is_acting = False
        pool = self._ledger.pools[program.rank]
        return self._decide(request, pool, [pool], "its program is active there")

    def grow(self, key: str, num_tokens: int) -> None:
        program = self._programs[key]
        program.num_tokens += num_tokens
        self._num_used[program.rank] += num_tokens

    def end_turn(self, key: str) -> None:
        self._programs[key].is_acting = True
        if self._programs[key].is_marked:
            self.forget(key)

    def pause_excess(self) -> None:
        """Pause programs, or mark them, on each server whose programs exceed its capacity."""
        excess = {
            rank: num_used - self._ledger.pools[rank].capacity
            for rank, num_used in self._num_used.items()
        }
        for program in self._programs.values():
            excess[program.rank] -= program.num_tokens + _BUFFER if program.is_marked else 0
        candidates = sorted(
            (not program.is_acting, program.num_tokens, key)
            for key, program in self._programs.items()
            if not program.is_marked and excess[program.rank] > 0
        )
        for generates, num_tokens, key in candidates:
            program = self._programs[key]
            if excess[program.rank] > 0:
                excess[program.rank] -= num_tokens + _BUFFER
                program.is_marked = True
                if not generates:
                    self.forget(key)

    def forget(self, name: str) -> None:
        if program := self._programs.pop(name, None):
            self._num_used[program.rank] -= program.num_tokens + _BUFFER


class Continuum(StickyLeastLoaded):
    """Continuum (arXiv 2511.02230): the context of a program that runs a tool is pinned for a time.

    The time to live t maximises P(tool takes at most t) * (prefill saved + mean wait of a turn) - t
    over the tool times seen so far. Servers take requests in the order of their programs' arrivals
    (`ServerParams.is_program_fcfs`).

    Simplified: the paper has one server, so programs are spread evenly and stay; all tools are one
    kind; the wait is not weighted by the program's number of turns.
    """

    name = "continuum"

    def __init__(self, ledger: KVLedger, *, seed: int = 0) -> None:
        super().__init__(ledger, seed=seed)
        self._durations: deque[float] = deque(maxlen=256)
        self._waits: deque[float] = deque(maxlen=256)

    def observe(self, tool_s: float, wait_s: float) -> None:
        self._durations.append(tool_s)
        self._waits.append(wait_s)

    def time_to_live_s(self, prefill_s: float) -> float:
        if not self._durations:
            return 1.0
        benefit_s = prefill_s + sum(self._waits) / len(self._waits)
        durations = sorted(self._durations)
        return max(
            (0.0, *durations),
            key=lambda ttl_s: bisect_right(durations, ttl_s) / len(durations) * benefit_s - ttl_s,
        )


class Aimd(StickyLeastLoaded):
    """prime-rl's cap on the rollouts in flight (orchestrator/concurrency.py), additive to sticky
    placement.

    Each second: the cap is cut by a quarter if servers retract requests or the KV in use exceeds
    0.9; it grows by up to a quarter, less the nearer to 0.8, if the use has settled (rose by less
    than 0.01) and the cap is used.

    Simplified: its thresholds are settings, these are near its defaults; it may look at the servers
    without a delay.
    """

    name = "aimd"

    def __init__(self, ledger: KVLedger, *, seed: int = 0) -> None:
        super().__init__(ledger, seed=seed)
        self.cap = 32 * len(ledger.pools)
        self._usage: float | None = None

    def observe(self, usage: float, num_in_flight: int, num_retracted: int) -> None:
        last = usage if self._usage is None else self._usage
        self._usage = (usage + last) / 2
        if self._usage >= 0.9 or num_retracted:
            self.cap = max(32, int(0.75 * min(self.cap, num_in_flight)))
        elif self._usage < 0.8 and self._usage - last <= 0.01 and num_in_flight >= 0.9 * self.cap:
            self.cap = max(self.cap + 1, int(self.cap * (1 + 0.25 * (0.8 - self._usage) / 0.8)))


PROGRAM_POLICIES = {policy.name: policy for policy in (ThunderAgent, Continuum, Aimd)}
