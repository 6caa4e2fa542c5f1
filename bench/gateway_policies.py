"""Pure: the placement policies of gateways, for comparison with the runtime's (`kv_policy.py`).

They count requests, not tokens, and never wait: a turn is sent at once, and queues on its server.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from agentloop.inference.ranks import DataParallelRank
from agentloop.inference.scheduling.kv_ledger import KVLedger
from agentloop.inference.scheduling.kv_policy import Costs, KVPolicy
from agentloop.inference.scheduling.kv_pool import KVPool
from agentloop.inference.scheduling.placement import (
    Candidate,
    Decision,
    PlacementRequest,
)

__all__ = ["GATEWAY_POLICIES", "POLICIES", "GatewayPolicy", "make_policy"]


class GatewayPolicy(ABC):
    """Shared parts: the decision, and the choice of the least busy rank."""

    name: ClassVar[str]

    def __init__(self, ledger: KVLedger, *, seed: int = 0) -> None:
        """Create a policy; `seed` breaks ties."""
        self._ledger = ledger
        self._random = random.Random(seed)

    def choose(
        self,
        request: PlacementRequest,
        ranks: Sequence[DataParallelRank],
        *,
        now_s: float,
        waited_s: float = 0.0,
    ) -> Decision:
        """Choose one of `ranks`."""
        if not ranks:
            return Decision(None, self.name, "no server accepts requests", ())
        return self._choose(request, [self._ledger.pools[rank] for rank in ranks])

    @abstractmethod
    def _choose(self, request: PlacementRequest, pools: Sequence[KVPool]) -> Decision:
        """Choose one of `pools`, of which there is at least one."""

    def forget(self, name: str) -> None:  # noqa: B027  # most policies remember nothing
        """Forget a trajectory, or a group, that has ended."""

    def _decide(
        self, request: PlacementRequest, chosen: KVPool, considered: Sequence[KVPool], reason: str
    ) -> Decision:
        candidates = [_candidate(request, pool) for pool in considered]
        return Decision(chosen.rank, self.name, reason, candidates)

    def _least_busy(self, pools: Sequence[KVPool]) -> KVPool:
        """Return a random one of those with the fewest requests: otherwise every start on idle
        servers would go to the first."""
        fewest = min(pool.num_sequences for pool in pools)
        ties = [pool for pool in pools if pool.num_sequences == fewest]
        return ties[0] if len(ties) == 1 else self._random.choice(ties)


class _StickyPolicy(GatewayPolicy):
    """Remembers a rank by name, until `forget`."""

    def __init__(self, ledger: KVLedger, *, seed: int = 0) -> None:
        super().__init__(ledger, seed=seed)
        self._affinity: dict[str, DataParallelRank] = {}

    def _recall(self, name: str, pools: Sequence[KVPool]) -> KVPool | None:
        rank = self._affinity.get(name)
        return next((pool for pool in pools if pool.rank == rank), None)

    def forget(self, name: str) -> None:
        self._affinity.pop(name, None)


class _Static(_StickyPolicy):
    """Assigns each group to a server when it starts, permanently and in equal shares."""

    name = "static"

    def __init__(self, ledger: KVLedger, *, seed: int = 0) -> None:
        super().__init__(ledger, seed=seed)
        self._num_assigned = 0

    def _choose(self, request: PlacementRequest, pools: Sequence[KVPool]) -> Decision:
        name, reason = request.group or request.key, "its group is assigned to this server"
        pool = self._recall(name, pools)
        if pool is None:
            pool, reason = (
                pools[self._num_assigned % len(pools)],
                "assigned permanently, in equal shares",
            )
            self._num_assigned += 1
            self._affinity[name] = pool.rank
        return self._decide(request, pool, [pool], reason)


class _RoundRobin(GatewayPolicy):
    name = "round_robin"

    def __init__(self, ledger: KVLedger, *, seed: int = 0) -> None:
        super().__init__(ledger, seed=seed)
        self._num_chosen = 0

    def _choose(self, request: PlacementRequest, pools: Sequence[KVPool]) -> Decision:
        pool = pools[self._num_chosen % len(pools)]
        self._num_chosen += 1
        return self._decide(request, pool, [pool], "next in rotation")


class _LeastRequests(GatewayPolicy):
    name = "least_requests"

    def _choose(self, request: PlacementRequest, pools: Sequence[KVPool]) -> Decision:
        pool = self._least_busy(pools)
        return self._decide(request, pool, pools, f"fewest requests ({pool.num_sequences})")


class _PowerOfTwo(GatewayPolicy):
    name = "power_of_two"

    def _choose(self, request: PlacementRequest, pools: Sequence[KVPool]) -> Decision:
        drawn = self._random.sample(pools, min(2, len(pools)))
        pool = min(drawn, key=lambda pool: pool.num_sequences)
        reason = "fewer requests of two servers drawn at random"
        return self._decide(request, pool, drawn, reason)


class StickyLeastLoaded(_StickyPolicy):
    """Sends a trajectory's first turn to the least busy server, and the others after it."""

    name = "sticky_least_loaded"

    def _choose(self, request: PlacementRequest, pools: Sequence[KVPool]) -> Decision:
        pool = self._recall(request.key, pools)
        if pool is not None:
            return self._decide(request, pool, [pool], "its last turn was on this server")
        pool = self._least_busy(pools)
        self._affinity[request.key] = pool.rank
        return self._decide(request, pool, pools, f"new; fewest requests ({pool.num_sequences})")


def _candidate(request: PlacementRequest, pool: KVPool) -> Candidate:
    """Return a candidate without costs."""
    need = request.num_tokens - pool.num_shared(request.group)
    num_cached = min(request.num_tokens, pool.num_cached(request.key, request.group))
    num_free = pool.num_free
    return Candidate(pool.rank, need <= num_free, num_free, need, num_cached, pool.num_sequences)


GATEWAY_POLICIES: dict[str, type[GatewayPolicy]] = {
    policy.name: policy
    for policy in (_Static, _RoundRobin, _LeastRequests, _PowerOfTwo, StickyLeastLoaded)
}
POLICIES = (*GATEWAY_POLICIES, KVPolicy.name)


def make_policy(
    name: str,
    ledger: KVLedger,
    *,
    costs: Costs | None = None,
    starvation_threshold_s: float = 10.0,
    seed: int = 0,
) -> GatewayPolicy | KVPolicy:
    """Create one of `POLICIES`; `costs` and `starvation_threshold_s` are those of `kv`, `seed`
    breaks ties."""
    if name == KVPolicy.name:
        return KVPolicy(
            ledger, costs=costs, starvation_threshold_s=starvation_threshold_s, seed=seed
        )
    return GATEWAY_POLICIES[name](ledger, seed=seed)
