"""Pure: ThunderAgent's policy, which knows which turns belong to one program, for comparison.

A program is what agentloop calls a rollout. Written from its paper and code of mid 2026.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from agentloop.inference.ranks import DataParallelRank
from agentloop.inference.scheduling.kv_ledger import KVLedger
from agentloop.inference.scheduling.placement import PlacementRequest

_BUFFER = 100  # tokens for each active program


@dataclass(slots=True)
class _Program:
    rank: DataParallelRank
    num_tokens: int
    is_acting: bool = False
    is_marked: bool = False


class ThunderAgent:
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

    def __init__(self, ledger: KVLedger) -> None:
        self._ledger = ledger
        self._programs: dict[str, _Program] = {}
        self._num_used: dict[DataParallelRank, int] = defaultdict(int)

    def is_active(self, key: str) -> bool:
        return key in self._programs

    def choose(self, request: PlacementRequest) -> DataParallelRank | None:
        """Return the rank of an active program, or of one that begins; None: it waits."""
        program = self._programs.get(request.key)
        if program is None:
            pools = self._ledger.pools.values()
            pool = max(pools, key=lambda pool: pool.capacity - self._num_used[pool.rank])
            if pool.capacity - self._num_used[pool.rank] < request.num_tokens + _BUFFER:
                return None
            program = self._programs[request.key] = _Program(pool.rank, 0)
            self._num_used[pool.rank] += _BUFFER
        self.grow(request.key, request.num_tokens - program.num_tokens)
        program.is_acting = False
        return program.rank

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
