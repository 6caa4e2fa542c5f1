"""Pure: the placement policy of the runtime, which minimises the seconds that a turn costs.

The seconds of the turn and those of the sequences next to it count alike: a prefill stops
everybody's decoding, another sequence makes everybody's steps longer, and evicted tokens have to be
computed again. So a trajectory returns to its own server unless that is much busier; if its own
server has no capacity, it waits as long as that costs less than moving; and siblings share a
server, and the prompt, until it is busier than others by more than that saves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentloop.inference.scheduling.kv_ledger import KVLedger
from agentloop.inference.scheduling.kv_pool import KVPool
from agentloop.inference.scheduling.placement import Decision, PlacementPolicy, PlacementRequest
from agentloop.inference.scheduling.wait_queue import STARVATION_THRESHOLD_S

__all__ = ["Costs", "KVPolicy"]

_TIE = 1.02  # costs within this factor count as equal: predictions are not more precise


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of a server's work in seconds, of which only the proportions matter.

    The defaults are near those of a 14B model on one GPU.

    Attributes:
        prefill_s_per_token: Prefill time per prompt token that is not cached.
        step_s: Time of a decoding step, apart from the parts below.
        step_s_per_sequence: Time that each sequence of the batch adds to a decoding step.
        step_s_per_token: Time that each token of the batch's contexts adds to a decoding step.
    """

    prefill_s_per_token: float = 1e-4
    step_s: float = 0.015
    step_s_per_sequence: float = 5e-5
    step_s_per_token: float = 5e-8


@dataclass(slots=True)
class _Option:
    """A pool that is the cheapest so far, or nearly so."""

    pool: KVPool
    cost_s: float
    wait_s: float
    fits: bool
    num_cached: int
    num_sequences: int


class KVPolicy(PlacementPolicy):
    """Chooses the cheapest rank whose KV cache has capacity; a turn waits if there is none."""

    name = "kv"

    def __init__(
        self,
        ledger: KVLedger,
        *,
        costs: Costs | None = None,
        starvation_threshold_s: float = STARVATION_THRESHOLD_S,
        seed: int = 0,
    ) -> None:
        """Create a policy; after a wait of `starvation_threshold_s` a turn may evict parked KV."""
        super().__init__(ledger, seed=seed)
        self._costs = costs or Costs()
        self._starvation_threshold_s = starvation_threshold_s

    def _choose(
        self, request: PlacementRequest, pools: Sequence[KVPool], now_s: float, waited_s: float
    ) -> Decision:
        affinity = self._ledger.affinity(request.key)
        options, fields = self._weigh(request, pools, affinity, now_s, waited_s)
        if not options:
            return Decision(None, self.name, "no server has free KV capacity for it", fields)
        chosen = self._best(options, affinity)
        if not chosen.fits:
            reason = (
                f"its own server will have capacity in {chosen.wait_s:.2f} s; moving costs more"
            )
            return Decision(None, self.name, reason, fields)
        return Decision(chosen.pool.rank, self.name, _reason(chosen, affinity), fields)

    def _weigh(
        self,
        request: PlacementRequest,
        pools: Sequence[KVPool],
        affinity: KVPool | None,
        now_s: float,
        waited_s: float,
    ) -> tuple[list[_Option], list[tuple[Any, ...]]]:
        """Return the cheapest options, equal within `_TIE`, and the fields of each candidate.

        It computes the cost of each pool in one pass, in plain local arithmetic: it runs for every
        turn.
        """
        costs, group, num_tokens = self._costs, request.group, request.num_tokens
        expected = min(request.budget, self._ledger.predictor.remaining(group))
        is_impatient = waited_s > self._starvation_threshold_s
        # The cost of this turn's decoding: the fixed part of its steps, the time that each other
        # sequence and each of their tokens add to them, and the time that it adds to others' steps.
        prefill = costs.prefill_s_per_token
        fixed_s = costs.step_s * expected
        token_s = costs.step_s_per_token * expected
        beside_s = 2 * costs.step_s_per_sequence * expected + token_s * num_tokens
        fields: list[tuple[Any, ...]] = []
        options: list[_Option] = []
        limit_s = math.inf
        for pool in pools:
            batch = pool.num_sequences + pool.num_strangers
            held = pool.num_live + pool.num_others
            kept = pool.num_kept
            need = num_tokens + expected
            cached = 0
            if pool is affinity or group in pool.prompts:
                cached = min(num_tokens - 1, pool.num_cached(request.key, group))
                need -= pool.num_shared(group)
                own_kept = pool.num_kept_for(request.key)
                if own_kept:  # it returns: its growth was accounted for when it first came
                    need -= expected
                    kept -= own_kept
            free = pool.capacity - held - pool.num_reserved - kept
            fits = need <= free and batch < pool.max_sequences
            wait_s = evict_s = 0.0
            stall_s = prefill * (1 + batch)
            if not fits:
                if batch >= pool.max_sequences:
                    fields.append((pool.rank, False, free, need, cached, batch))
                    continue
                if (is_impatient and need <= free + kept) or (not batch and need <= pool.capacity):
                    fits, evict_s = True, stall_s * min(need - free, kept)
                elif pool is affinity:
                    # If it has waited longer than expected, expect it to wait as long again.
                    wait_s = max(waited_s, (need - free) / max(1.0, pool.freed_per_s(now_s)))
                else:
                    fields.append((pool.rank, False, free, need, cached, batch))
                    continue
            prefill_s = stall_s * (num_tokens - cached)
            queue_s = prefill * pool.num_prefill
            decode_s = fixed_s + beside_s * batch + token_s * held
            cost_s = wait_s + prefill_s + queue_s + decode_s + evict_s
            if cost_s <= limit_s:
                options.append(_Option(pool, cost_s, wait_s, fits, cached, batch))
                limit_s = min(limit_s, cost_s * _TIE)
            fields.append((
                pool.rank, fits, free, need, cached, batch,
                wait_s, prefill_s, queue_s, decode_s, evict_s,
            ))  # fmt: skip
        return [option for option in options if option.cost_s <= limit_s], fields

    def _best(self, options: list[_Option], affinity: KVPool | None) -> _Option:
        """Return the best of equally cheap options: one that fits at once, then the trajectory's
        own server, then more cached tokens, then fewer sequences."""
        options = [option for option in options if option.fits] or options
        for option in options:
            if option.pool is affinity:
                return option
        ranks = [(-option.num_cached, option.num_sequences) for option in options]
        first = min(ranks)
        ties = [option for option, rank in zip(options, ranks, strict=True) if rank == first]
        return self._random.choice(ties)


def _reason(chosen: _Option, affinity: KVPool | None) -> str:
    if affinity is None:
        return "shares its group's prompt" if chosen.num_cached else "lowest cost"
    if chosen.pool is affinity:
        return "its own server caches its context" if chosen.num_cached else "its own server"
    return "moves: recomputing its context costs less than staying"
