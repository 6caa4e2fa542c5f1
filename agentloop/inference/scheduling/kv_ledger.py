"""Pure: accounting of all KV caches, by sequence and trajectory.

    KVLedger ──sequence──> KVPool, one per data-parallel rank of each server (kv_pool.py)
        └──trajectory──> the pool of its last turn, its affinity

Time is passed in as `now_s`, on any monotonic clock.
"""

from __future__ import annotations

import math

from agentloop.inference.ranks import DataParallelRank, LoadReport
from agentloop.inference.scheduling.kv_pool import KVPool, LiveSequence
from agentloop.inference.scheduling.length_predictor import LengthPredictor


class KVLedger:
    """Accounting of all KV caches.

    A sequence is a turn with a unique name; `key` names its trajectory and `group` the siblings
    that share a prompt ("" for none).
    """

    def __init__(self, predictor: LengthPredictor | None = None) -> None:
        self.predictor = predictor or LengthPredictor()
        self.pools: dict[DataParallelRank, KVPool] = {}
        self._live: dict[str, LiveSequence] = {}
        self._affinity: dict[str, KVPool] = {}  # by trajectory

    # --- servers --------------------------------------------------------------------------------

    def add(
        self,
        rank: DataParallelRank,
        capacity: int,
        max_sequences: float = math.inf,
        host_capacity: int = 0,
    ) -> None:
        """Add a pool with the capacities in tokens and the batch size that the server reports.

        Raises:
            ValueError: It was already added.
        """
        if rank in self.pools:
            raise ValueError(f"{rank} was already added")
        self.pools[rank] = KVPool(rank, capacity, max_sequences, host_capacity, self.predictor)

    def remove(self, rank: DataParallelRank) -> None:
        """Remove the pool of a retired or dead server, with all that it held."""
        removed = self.pools.pop(rank)
        self._live = {
            sequence: live for sequence, live in self._live.items() if live.pool is not removed
        }
        self._affinity = {key: pool for key, pool in self._affinity.items() if pool is not removed}

    # --- sequences ------------------------------------------------------------------------------

    def reserve(
        self,
        sequence: str,
        rank: DataParallelRank,
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
        pool = self.pools[rank]
        live = pool.reserve(num_tokens, budget, key=key, group=group, num_shared=num_shared)
        self._live[sequence] = live
        if key:
            self._affinity[key] = pool
        return live.num_prefill

    def grow(self, sequence: str, num_tokens: int) -> None:
        """Record streamed tokens, taken from the reserve; a used-up reserve is renewed."""
        live = self._live.get(sequence)
        if live is not None and num_tokens:  # None if its server was removed
            live.pool.grow(live, num_tokens)

    def park(self, sequence: str, now_s: float) -> None:
        """Record that a turn ended normally; its tokens stay in the prefix cache for a while."""
        live = self._live.pop(sequence, None)
        if live is None:
            return
        self.predictor.learn(live.group, live.num_generated)
        live.pool.end(live, now_s)
        live.pool.park(live, now_s, is_kept=self._affinity.get(live.key) is live.pool)

    def release(self, sequence: str, now_s: float) -> None:
        """Record that a turn was lost or cancelled; ignored if it is over."""
        live = self._live.pop(sequence, None)
        if live is not None:
            live.pool.end(live, now_s)

    def forget(self, key: str) -> None:
        """Record that a trajectory ended, so that its parked tokens are no longer kept."""
        pool = self._affinity.pop(key, None)
        if pool is not None:
            pool.stop_keeping(key)

    def affinity(self, key: str) -> KVPool | None:
        """Return the pool of the trajectory's last turn, which may cache its context."""
        return self._affinity.get(key)

    def keeps(self, key: str) -> bool:
        """Return whether the tokens of the trajectory's last turn are kept for its next one."""
        pool = self._affinity.get(key)
        return pool is not None and pool.num_kept_for(key) > 0

    # --- reports --------------------------------------------------------------------------------

    def report(self, rank: DataParallelRank, report: LoadReport, now_s: float) -> int:
        """Correct the accounting by a server's report; return the requests retracted since the last
        one.

        Only an excess counts: tokens in use that are not ours. It has to appear in two consecutive
        reports, since one may still include a turn that has just ended. Usage below ours means
        nothing, because our requests may be in the server's queue. A report equal to the last one
        although tokens were streamed since is outdated and does not renew its age.
        """
        return self.pools[rank].report(report, now_s)

    def age(self, now_s: float) -> None:
        """Let old reports fade, and stop keeping tokens of trajectories that are away for long.

        Call it about once a second.
        """
        for pool in self.pools.values():
            pool.age(now_s)
