"""Pure: the placement policy of the runtime, which minimises the seconds that a turn costs.

The seconds of the turn and those of the sequences next to it count alike: a prefill stops
everybody's decoding, another sequence makes everybody's steps longer, and evicted tokens have to be
computed again. So a trajectory returns to its own server unless that is much busier; if its own
server has no capacity, it waits as long as that costs less than moving; and siblings share a
server, and the prompt, until it is busier than others by more than that saves.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from agentloop.inference.ranks import DataParallelRank
from agentloop.inference.scheduling.kv_ledger import KVLedger
from agentloop.inference.scheduling.kv_pool import KVPool
from agentloop.inference.scheduling.placement import Candidate, Decision, PlacementRequest
from agentloop.inference.scheduling.wait_queue import STARVATION_THRESHOLD_S

_TIE = 1.02  # costs within this factor count as equal: predictions are not more precise


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of a server's work in seconds, of which only the proportions matter.

    The defaults are near those of a 14B model on one GPU.

    Attributes:
        prefill_s_per_token: Prefill time per prompt token that is not cached.
        load_s_per_token: Time to bring back a token that only the host's memory caches.
        step_s: Time of a decoding step, apart from the parts below.
        step_s_per_sequence: Time that each sequence of the batch adds to a decoding step.
        step_s_per_token: Time that each token of the batch's contexts adds to a decoding step.
    """

    prefill_s_per_token: float = 1e-4
    load_s_per_token: float = 5e-6
    step_s: float = 0.015
    step_s_per_sequence: float = 5e-5
    step_s_per_token: float = 5e-8


class KVPolicy:
    """Chooses the cheapest rank whose KV cache has capacity; a turn waits if there is none."""

    name = "kv"

    def __init__(
        self,
        ledger: KVLedger,
        *,
        costs: Costs | None = None,
        seed: int = 0,
    ) -> None:
        """Create a policy; `seed` breaks ties."""
        self._ledger = ledger
        self._random = random.Random(seed)
        self._costs = costs or Costs()

    def choose(
        self,
        request: PlacementRequest,
        ranks: Sequence[DataParallelRank],
        *,
        now_s: float,
        waited_s: float = 0.0,
    ) -> Decision:
        """Choose one of `ranks`, which accept `request`; it has waited for `waited_s`."""
        if not ranks:
            return Decision(None, self.name, "no server accepts requests", ())
        pools = [self._ledger.pools[rank] for rank in ranks]
        affinity = self._ledger.affinity(request.key)
        expected = min(request.budget, self._ledger.predictor.remaining(request.group))
        candidates = [
            self._candidate(request, expected, pool, affinity, now_s, waited_s) for pool in pools
        ]
        own = None if affinity is None else affinity.rank
        possible = [candidate for candidate in candidates if candidate.is_possible]
        if not possible:
            reason = "no server has free KV capacity for it"
            return Decision(None, self.name, reason, candidates)
        chosen = self._best(possible, own)
        if not chosen.fits:
            reason = (
                f"its own server will have capacity in {chosen.wait_s:.2f} s; moving costs more"
            )
            return Decision(None, self.name, reason, candidates)
        return Decision(chosen.rank, self.name, _reason(chosen, own), candidates)

    def _candidate(
        self,
        request: PlacementRequest,
        expected: int,
        pool: KVPool,
        affinity: KVPool | None,
        now_s: float,
        waited_s: float,
    ) -> Candidate:
        """Return what the turn would cost at a pool, if `expected` tokens are sampled.

        It runs for every turn and server, so it is plain local arithmetic.
        """
        costs, group, num_tokens = self._costs, request.group, request.num_tokens
        batch = pool.num_sequences + pool.num_strangers
        held = pool.num_live + pool.num_others
        kept = pool.num_kept
        need = num_tokens + expected
        cached = on_host = 0
        if pool is affinity or group in pool.prompts or pool.host_capacity:
            cached = min(num_tokens - 1, pool.num_cached(request.key, group))
            on_host = min(num_tokens - 1 - cached, pool.num_on_host(request.key, group))
            need -= pool.num_shared(group)
            own_kept = pool.num_kept_for(request.key)
            if own_kept:  # it returns: its growth was accounted for when it first came
                need -= expected
                kept -= own_kept
        free = pool.capacity - held - pool.num_reserved - kept
        has_room = batch < pool.max_sequences
        fits = has_room and need <= free
        prefill_s, load_s = costs.prefill_s_per_token, costs.load_s_per_token
        wait_s = evict_s = 0.0
        if not fits:
            # Its host would bring back what it evicts; otherwise a long wait justifies that.
            evicts_kept = pool.host_capacity > 0 or waited_s > STARVATION_THRESHOLD_S
            may_evict = (evicts_kept and need <= free + kept) or (
                not batch and need <= pool.capacity
            )
            if has_room and may_evict:
                again_s = load_s if pool.host_capacity else prefill_s
                fits, evict_s = True, again_s * (1 + batch) * min(need - free, kept)
            elif has_room and pool is affinity:
                # It grows while nothing is freed, until moving costs less.
                wait_s = (need - free) / max(1.0, pool.freed_per_s(now_s))
            else:
                return Candidate(pool.rank, False, free, need, cached, batch)
        # Of each of its steps: the fixed part, the time that each other sequence and each of their
        # tokens add to it, and the time that it adds to the steps of the others.
        token_s = costs.step_s_per_token * expected
        beside_s = 2 * costs.step_s_per_sequence * expected + token_s * num_tokens
        return Candidate(
            pool.rank,
            fits,
            free,
            need,
            cached + on_host,
            batch,
            wait_s,
            prefill_s=(1 + batch)
            * (prefill_s * (num_tokens - cached - on_host) + load_s * on_host),
            queue_s=prefill_s * pool.num_prefill,
            decode_s=costs.step_s * expected + beside_s * batch + token_s * held,
            evict_s=evict_s,
        )

    def _best(self, possible: Sequence[Candidate], own: DataParallelRank | None) -> Candidate:
        """Return the best of the cheapest: one that fits at once, then the trajectory's own
        server, then more cached tokens, then fewer sequences."""
        limit_s = _TIE * min(candidate.cost_s for candidate in possible)
        cheapest = [candidate for candidate in possible if candidate.cost_s <= limit_s]
        cheapest = [candidate for candidate in cheapest if candidate.fits] or cheapest
        for candidate in cheapest:
            if candidate.rank == own:
                return candidate
        ranks = [(-candidate.num_cached, candidate.num_sequences) for candidate in cheapest]
        first = min(ranks)
        return self._random.choice(
            [candidate for candidate, rank in zip(cheapest, ranks, strict=True) if rank == first]
        )


def _reason(chosen: Candidate, own: DataParallelRank | None) -> str:
    if own is None:
        return "shares its group's prompt" if chosen.num_cached else "lowest cost"
    if chosen.rank == own:
        return "its own server caches its context" if chosen.num_cached else "its own server"
    return "moves: recomputing its context costs less than staying"
