"""Pure: choosing the server of a request, by policies that can be compared by name.

`kv` minimises seconds, counting those of the request and those of the sequences next to it alike: a
prefill stops everybody's decoding, another sequence makes everybody's steps longer, and evicted
tokens have to be computed again. So a trajectory returns to its own server unless that is much
busier; if its own server has no capacity, it waits as long as that costs less than moving; and
siblings share a server, and the prompt, until it is busier than others by more than that saves.

The other policies are those of gateways: they count requests, not tokens, and never wait.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pydantic

from agentloop.inference.scheduling.kv_ledger import DataParallelRank, KVLedger, KVPool

__all__ = ["POLICIES", "Candidate", "Costs", "Decision", "Placement", "PlacementRequest"]

_TIE = 1.02  # costs within this factor count as equal: predictions are not more precise


class Costs(pydantic.BaseModel):
    """Costs of a server's work in seconds, of which only the proportions matter.

    The defaults are near those of a 14B model on one GPU. `python -m bench.live_router check`
    measures those of a server.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    prefill_s_per_token: float = pydantic.Field(
        1e-4, gt=0, description="Prefill time per prompt token that is not cached."
    )
    step_s: float = pydantic.Field(
        0.015, gt=0, description="Fixed part of the time of a decoding step."
    )
    step_s_per_sequence: float = pydantic.Field(
        5e-5, ge=0, description="Time that each sequence of the batch adds to a step."
    )
    step_s_per_token: float = pydantic.Field(
        5e-8, ge=0, description="Time that each token of their contexts adds to a step."
    )


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A turn that waits for a server.

    Attributes:
        key: Its trajectory.
        group: The siblings that share the first `num_shared` tokens of the prompt; "" for none.
        num_tokens: Length of the prompt.
        budget: Tokens that it may generate.
    """

    key: str
    num_tokens: int
    budget: int
    group: str = ""
    num_shared: int = 0


class Candidate(NamedTuple):
    """A rank's state in tokens, and the expected cost of sending the turn there.

    Costs are seconds, summed over the request and the sequences that it delays. `room` excludes
    tokens kept for trajectories that will return soon. `wait_s` is the time until there is enough
    room, `queue_s` the prefill of earlier requests, `evict_s` the recomputation of evicted tokens.
    For a rank that has no room and is not the trajectory's own, costs are not computed and stay 0.
    """

    place: DataParallelRank
    fits: bool
    room: int
    need: int
    num_cached: int
    num_sequences: int
    wait_s: float = 0.0
    prefill_s: float = 0.0
    queue_s: float = 0.0
    decode_s: float = 0.0
    evict_s: float = 0.0

    @property
    def cost_s(self) -> float:
        return self.wait_s + self.prefill_s + self.queue_s + self.decode_s + self.evict_s


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen rank and the reason; with `place` None, the request waits."""

    place: DataParallelRank | None
    policy: str
    why: str
    seen: Sequence[tuple[Any, ...]] = field(repr=False)  # fields of `Candidate`, built on demand

    @property
    def candidates(self) -> list[Candidate]:
        """The ranks that were considered."""
        return [Candidate(*one) for one in self.seen]

    def explain(self) -> str:
        """Return one line per candidate, with the chosen one marked."""
        lines = [f"{self.policy}: {self.why}"]
        for one in self.candidates:
            mark = "->" if one.place == self.place else "  "
            if one.fits or one.cost_s:
                costs = (
                    f"{one.cost_s:.3f} s: wait {one.wait_s:.3f}, prefill {one.prefill_s:.3f}, "
                    f"queue {one.queue_s:.3f}, decode {one.decode_s:.3f}, evict {one.evict_s:.3f}"
                )
            else:
                costs = "does not fit"
            lines.append(
                f"{mark} {one.place.server}#{one.place.rank} {costs}; needs {one.need} of "
                f"{one.room} tokens, {one.num_cached} cached, {one.num_sequences} sequences"
            )
        return "\n".join(lines)


class Placement:
    """Chooses by a named policy and holds the policies' state between requests."""

    def __init__(
        self,
        ledger: KVLedger,
        policy: str = "kv",
        *,
        costs: Costs | None = None,
        patience_s: float = 10.0,
        seed: int = 0,
    ) -> None:
        """`patience_s` is the wait after which a request may evict parked tokens; `seed` breaks
        ties.

        Raises:
            ValueError: There is no such policy.
        """
        if policy not in POLICIES:
            raise ValueError(f"no policy {policy!r}: choose one of {', '.join(POLICIES)}")
        self.policy = policy
        self.ledger = ledger
        self.patience_s = patience_s
        self.costs = costs or Costs()
        self.random = random.Random(seed)
        self.homes: dict[str, DataParallelRank] = {}  # by key or group, for policies that pin them
        self.count = 0
        self._choose = POLICIES[policy]

    def choose(
        self,
        ask: PlacementRequest,
        places: Sequence[DataParallelRank],
        *,
        now: float,
        waited_s: float = 0.0,
    ) -> Decision:
        """Choose one of `places`, the ranks that accept `ask`, which has waited for `waited_s`."""
        if not places:
            return Decision(None, self.policy, "no server accepts requests", ())
        pools = [self.ledger.pools[place] for place in places]
        return self._choose(self, ask, pools, now, waited_s)

    def forget(self, key: str) -> None:
        """Forget a trajectory, or a group, that has ended."""
        self.homes.pop(key, None)

    def any_of(self, pools: Sequence[KVPool]) -> KVPool:
        """Return a random one: otherwise every idle start would go to the first."""
        return pools[0] if len(pools) == 1 else self.random.choice(pools)


def _candidate(ask: PlacementRequest, pool: KVPool) -> Candidate:
    """Return a candidate without costs, for policies that only count."""
    need = ask.num_tokens - pool.num_shared(ask.group)
    cached = min(ask.num_tokens, pool.num_cached(ask.key, ask.group))
    return Candidate(pool.place, need <= pool.room, pool.room, need, cached, pool.num_sequences)


def _decide(
    placement: Placement,
    ask: PlacementRequest,
    pool: KVPool,
    considered: Sequence[KVPool],
    why: str,
) -> Decision:
    candidates = tuple(_candidate(ask, other) for other in considered)
    return Decision(pool.place, placement.policy, why, candidates)


def _fewest(placement: Placement, pools: Sequence[KVPool]) -> KVPool:
    fewest = min(pool.num_sequences for pool in pools)
    return placement.any_of([pool for pool in pools if pool.num_sequences == fewest])


def _static(
    placement: Placement,
    ask: PlacementRequest,
    pools: Sequence[KVPool],
    now: float,
    waited_s: float,
) -> Decision:
    """Assign each group to a server when it starts, permanently and in equal shares."""
    name = ask.group or ask.key
    home = next((pool for pool in pools if pool.place == placement.homes.get(name)), None)
    if home is None:
        home = pools[placement.count % len(pools)]
        placement.count += 1
        placement.homes[name] = home.place
        return _decide(placement, ask, home, [home], "assigned permanently, in equal shares")
    return _decide(placement, ask, home, [home], "its group is assigned to this server")


def _round_robin(
    placement: Placement,
    ask: PlacementRequest,
    pools: Sequence[KVPool],
    now: float,
    waited_s: float,
) -> Decision:
    pool = pools[placement.count % len(pools)]
    placement.count += 1
    return _decide(placement, ask, pool, [pool], "next in rotation")


def _least_requests(
    placement: Placement,
    ask: PlacementRequest,
    pools: Sequence[KVPool],
    now: float,
    waited_s: float,
) -> Decision:
    pool = _fewest(placement, pools)
    return _decide(placement, ask, pool, pools, f"fewest requests ({pool.num_sequences})")


def _power_of_two(
    placement: Placement,
    ask: PlacementRequest,
    pools: Sequence[KVPool],
    now: float,
    waited_s: float,
) -> Decision:
    two = placement.random.sample(pools, min(2, len(pools)))
    pool = min(two, key=lambda one: one.num_sequences)
    return _decide(placement, ask, pool, two, "fewer requests of two servers drawn at random")


def _sticky_least_loaded(
    placement: Placement,
    ask: PlacementRequest,
    pools: Sequence[KVPool],
    now: float,
    waited_s: float,
) -> Decision:
    home = next((pool for pool in pools if pool.place == placement.homes.get(ask.key)), None)
    if home is not None:
        return _decide(placement, ask, home, [home], "its last turn was on this server")
    pool = _fewest(placement, pools)
    placement.homes[ask.key] = pool.place
    return _decide(placement, ask, pool, pools, f"new; fewest requests ({pool.num_sequences})")


def _kv(
    placement: Placement,
    ask: PlacementRequest,
    pools: Sequence[KVPool],
    now: float,
    waited_s: float,
) -> Decision:
    """Compute the cost of each server in one pass, in plain local arithmetic: it runs for every
    turn."""
    costs, group, num_tokens = placement.costs, ask.group, ask.num_tokens
    home = placement.ledger.home(ask.key)
    expected = min(ask.budget, placement.ledger.predictor.remaining(group))
    impatient = waited_s > placement.patience_s
    # The cost of this turn's decoding: the fixed part of its steps, the time that each other
    # sequence and each of their tokens add to them, and the time that it adds to others' steps.
    prefill = costs.prefill_s_per_token
    fixed_s = costs.step_s * expected
    token_s = costs.step_s_per_token * expected
    beside_s = 2 * costs.step_s_per_sequence * expected + token_s * num_tokens
    candidates: list[tuple[Any, ...]] = []
    options: list[tuple[float, int]] = []  # cost, index in `candidates`
    limit_s = math.inf
    for pool in pools:
        batch = pool.num_sequences + pool.num_strangers
        held = pool.num_live + pool.num_others
        kept = pool.num_wanted
        need = num_tokens + expected
        cached = 0
        if pool is home or group in pool.prompts:
            cached = min(num_tokens - 1, pool.num_cached(ask.key, group))
            need -= pool.num_shared(group)
            own = pool.num_kept_for(ask.key)
            if own:  # it returns: its growth was accounted for when it first came
                need -= expected
                kept -= own
        room = pool.capacity - held - pool.num_reserved - kept
        fits = need <= room and batch < pool.max_sequences
        wait_s = evict_s = 0.0
        stall_s = prefill * (1 + batch)
        if not fits:
            if batch >= pool.max_sequences:
                candidates.append((pool.place, False, room, need, cached, batch))
                continue
            if (impatient and need <= room + kept) or (not batch and need <= pool.capacity):
                fits, evict_s = True, stall_s * min(need - room, kept)
            elif pool is home:
                # If it has waited longer than expected, expect it to wait as long again.
                wait_s = max(waited_s, (need - room) / max(1.0, pool.freed_per_s(now)))
            else:
                candidates.append((pool.place, False, room, need, cached, batch))
                continue
        prefill_s = stall_s * (num_tokens - cached)
        queue_s = prefill * pool.num_prefill
        decode_s = fixed_s + beside_s * batch + token_s * held
        cost_s = wait_s + prefill_s + queue_s + decode_s + evict_s
        if cost_s <= limit_s:
            options.append((cost_s, len(candidates)))
            limit_s = min(limit_s, cost_s * _TIE)
        place = pool.place
        candidates.append(
            (place, fits, room, need, cached, batch, wait_s, prefill_s, queue_s, decode_s, evict_s)
        )
    best = [index for cost_s, index in options if cost_s <= limit_s]
    if not best:
        return Decision(None, "kv", "no server has free KV capacity for it", candidates)
    best = [index for index in best if candidates[index][1]] or best
    own_place = home.place if home is not None else None
    index = next((i for i in best if candidates[i][0] == own_place), None)
    if index is None:
        # Prefer more cached tokens, then fewer sequences.
        ranks = {i: (-candidates[i][4], candidates[i][5]) for i in best}
        first = min(ranks.values())
        index = placement.random.choice([i for i, rank in ranks.items() if rank == first])
    chosen = Candidate(*candidates[index])
    if not chosen.fits:
        why = f"its own server will have capacity in {chosen.wait_s:.2f} s; moving costs more"
        return Decision(None, "kv", why, candidates)
    if own_place is None:
        why = "shares its group's prompt" if chosen.num_cached else "lowest cost"
    elif chosen.place == own_place:
        why = "its own server caches its context" if chosen.num_cached else "its own server"
    else:
        why = "moves: recomputing its context costs less than staying"
    return Decision(chosen.place, "kv", why, candidates)


Policy = Callable[[Placement, PlacementRequest, Sequence[KVPool], float, float], Decision]

POLICIES: dict[str, Policy] = {
    "static": _static,
    "round_robin": _round_robin,
    "least_requests": _least_requests,
    "power_of_two": _power_of_two,
    "sticky_least_loaded": _sticky_least_loaded,
    "kv": _kv,
}
