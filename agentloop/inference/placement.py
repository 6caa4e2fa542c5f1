"""Pure: which server takes a request, by policies that can be compared by name.

`kv` weighs seconds, those of the request and those of the sequences beside it alike: a prefill
stops everybody's decoding, one more sequence makes everybody's steps longer, and tokens that are
pushed out of a cache are computed again. So a trajectory comes back to its own server unless that
is much busier; where its own has no room, it waits as long as that costs less than moving; and
siblings share a server, and the prompt, until it is busier than others by more than that saves.

The other policies are what gateways do: they see counts, not tokens, and send at once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pydantic

from agentloop.inference.kv_ledger import KVLedger, Place, Pool

__all__ = ["POLICIES", "Ask", "Candidate", "Costs", "Decision", "Placement"]

_TIE = 1.02  # costs within this factor are equal: the prediction is no better


class Costs(pydantic.BaseModel):
    """What work takes on a server, in seconds. Only their proportions matter; the defaults are
    near those of a 14B model on one GPU. `python -m bench.live_router check` measures a server's.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    prefill_s_per_token: float = pydantic.Field(
        1e-4, gt=0, description="Of a prompt's token that is not cached."
    )
    step_s: float = pydantic.Field(
        0.015, gt=0, description="Of a decoding step, whatever is in it."
    )
    step_s_per_sequence: float = pydantic.Field(
        5e-5, ge=0, description="What each sequence of the batch adds to a step."
    )
    step_s_per_token: float = pydantic.Field(
        5e-8, ge=0, description="What each token of their contexts adds."
    )


@dataclass(frozen=True, slots=True)
class Ask:
    """A turn that looks for a place.

    Attributes:
        key: its trajectory.
        group: the siblings that share the first `num_shared` tokens of the prompt; "" for none.
        num_tokens: the prompt's.
        budget: tokens that it may generate.
    """

    key: str
    num_tokens: int
    budget: int
    group: str = ""
    num_shared: int = 0


class Candidate(NamedTuple):
    """What was known of a place, in tokens, and what going there was expected to cost: seconds,
    summed over the request and the sequences that it delays.

    `room` is without what is kept for those that will soon be back. `wait_s` is until there is
    enough of it, `queue_s` the prefill of others before, `evict_s` that of what is pushed out.
    Where it does not fit, and is not at home, nothing else was reckoned: these are 0.
    """

    place: Place
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
    """Where a request goes (`place` is none: it waits), and why."""

    place: Place | None
    policy: str
    why: str
    seen: Sequence[tuple[Any, ...]] = field(repr=False)  # as `Candidate`; made where asked for

    @property
    def candidates(self) -> list[Candidate]:
        """What was considered."""
        return [Candidate(*one) for one in self.seen]

    def explain(self) -> str:
        """One line per candidate, the chosen one marked."""
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
    """Chooses by a policy's name; holds what policies remember between requests."""

    def __init__(
        self,
        ledger: KVLedger,
        policy: str = "kv",
        *,
        costs: Costs | None = None,
        patience_s: float = 10.0,
        seed: int = 0,
    ) -> None:
        """One that has waited for `patience_s` may push parked ones out. `seed` settles ties.

        Raises:
            ValueError: there is no such policy.
        """
        if policy not in POLICIES:
            raise ValueError(f"no policy {policy!r}: choose of {', '.join(POLICIES)}")
        self.policy = policy
        self.ledger = ledger
        self.patience_s = patience_s
        self.costs = costs or Costs()
        self.random = random.Random(seed)
        self.homes: dict[str, Place] = {}  # of keys or groups, where a policy pins them
        self.count = 0
        self._choose = POLICIES[policy]

    def choose(
        self, ask: Ask, places: Sequence[Place], *, now: float, waited_s: float = 0.0
    ) -> Decision:
        """Where `ask` goes of `places`, those that may take it; it has waited for `waited_s`."""
        if not places:
            return Decision(None, self.policy, "no server may take requests", ())
        pools = [self.ledger.pools[place] for place in places]
        return self._choose(self, ask, pools, now, waited_s)

    def forget(self, key: str) -> None:
        """A trajectory, or a group, is over."""
        self.homes.pop(key, None)

    def any_of(self, pools: Sequence[Pool]) -> Pool:
        """One of them, at random: the first one would take every idle start."""
        return pools[0] if len(pools) == 1 else self.random.choice(pools)


def _seen(ask: Ask, pool: Pool) -> Candidate:
    """What policies that only count still show of a place."""
    need = ask.num_tokens - pool.num_shared(ask.group)
    cached = min(ask.num_tokens, pool.num_cached(ask.key, ask.group))
    return Candidate(pool.place, need <= pool.room, pool.room, need, cached, pool.num_sequences)


def _decided(
    placement: Placement, ask: Ask, pool: Pool, seen: Sequence[Pool], why: str
) -> Decision:
    return Decision(pool.place, placement.policy, why, tuple(_seen(ask, one) for one in seen))


def _fewest(placement: Placement, pools: Sequence[Pool]) -> Pool:
    fewest = min(pool.num_sequences for pool in pools)
    return placement.any_of([pool for pool in pools if pool.num_sequences == fewest])


def _static(
    placement: Placement, ask: Ask, pools: Sequence[Pool], now: float, waited_s: float
) -> Decision:
    """Each group is assigned to a server when it starts, in equal shares, for good."""
    name = ask.group or ask.key
    home = next((pool for pool in pools if pool.place == placement.homes.get(name)), None)
    if home is None:
        home = pools[placement.count % len(pools)]
        placement.count += 1
        placement.homes[name] = home.place
        return _decided(placement, ask, home, [home], "its share of the servers, for good")
    return _decided(placement, ask, home, [home], "its group was assigned to it")


def _round_robin(
    placement: Placement, ask: Ask, pools: Sequence[Pool], now: float, waited_s: float
) -> Decision:
    pool = pools[placement.count % len(pools)]
    placement.count += 1
    return _decided(placement, ask, pool, [pool], "the next in turn")


def _least_requests(
    placement: Placement, ask: Ask, pools: Sequence[Pool], now: float, waited_s: float
) -> Decision:
    pool = _fewest(placement, pools)
    return _decided(placement, ask, pool, pools, f"it has the fewest, {pool.num_sequences}")


def _power_of_two(
    placement: Placement, ask: Ask, pools: Sequence[Pool], now: float, waited_s: float
) -> Decision:
    two = placement.random.sample(pools, min(2, len(pools)))
    pool = min(two, key=lambda one: one.num_sequences)
    return _decided(placement, ask, pool, two, "the one with fewer of two drawn at random")


def _sticky_least_loaded(
    placement: Placement, ask: Ask, pools: Sequence[Pool], now: float, waited_s: float
) -> Decision:
    home = next((pool for pool in pools if pool.place == placement.homes.get(ask.key)), None)
    if home is not None:
        return _decided(placement, ask, home, [home], "its last turn was there")
    pool = _fewest(placement, pools)
    placement.homes[ask.key] = pool.place
    return _decided(placement, ask, pool, pools, f"new: it has the fewest, {pool.num_sequences}")


def _kv(
    placement: Placement, ask: Ask, pools: Sequence[Pool], now: float, waited_s: float
) -> Decision:
    """One pass over all servers, in plain local arithmetic: it runs for every turn."""
    costs, group, num_tokens = placement.costs, ask.group, ask.num_tokens
    home = placement.ledger.home(ask.key)
    expected = min(ask.budget, placement.ledger.predictor.remaining(group))
    impatient = waited_s > placement.patience_s
    # Of this turn's decoding: a step's fixed part, what each sequence beside it and each of their
    # tokens add to its own steps, and what it adds to the steps of each of them.
    prefill = costs.prefill_s_per_token
    fixed_s = costs.step_s * expected
    token_s = costs.step_s_per_token * expected
    beside_s = 2 * costs.step_s_per_sequence * expected + token_s * num_tokens
    seen: list[tuple[Any, ...]] = []
    options: list[tuple[float, int]] = []  # cost, index in `seen`
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
            if own:  # it comes back: its growth was reckoned with when it first came
                need -= expected
                kept -= own
        room = pool.capacity - held - pool.num_reserved - kept
        fits = need <= room and batch < pool.max_sequences
        wait_s = evict_s = 0.0
        stall_s = prefill * (1 + batch)
        if not fits:
            if batch >= pool.max_sequences:
                seen.append((pool.place, False, room, need, cached, batch))
                continue
            if (impatient and need <= room + kept) or (not batch and need <= pool.capacity):
                fits, evict_s = True, stall_s * min(need - room, kept)
            elif pool is home:
                # Once it has waited for longer than was expected, so it will be again.
                wait_s = max(waited_s, (need - room) / max(1.0, pool.freed_per_s(now)))
            else:
                seen.append((pool.place, False, room, need, cached, batch))
                continue
        prefill_s = stall_s * (num_tokens - cached)
        queue_s = prefill * pool.num_prefill
        decode_s = fixed_s + beside_s * batch + token_s * held
        cost_s = wait_s + prefill_s + queue_s + decode_s + evict_s
        if cost_s <= limit_s:
            options.append((cost_s, len(seen)))
            limit_s = min(limit_s, cost_s * _TIE)
        place = pool.place
        seen.append(
            (place, fits, room, need, cached, batch, wait_s, prefill_s, queue_s, decode_s, evict_s)
        )
    best = [index for cost_s, index in options if cost_s <= limit_s]
    if not best:
        return Decision(None, "kv", "no server has room for it", seen)
    best = [index for index in best if seen[index][1]] or best
    own_place = home.place if home is not None else None
    index = next((one for one in best if seen[one][0] == own_place), None)
    if index is None:
        # The least work, then the least company.
        ranks = {one: (-seen[one][4], seen[one][5]) for one in best}
        first = min(ranks.values())
        index = placement.random.choice([one for one, rank in ranks.items() if rank == first])
    chosen = Candidate(*seen[index])
    if not chosen.fits:
        why = f"its own server will have room in {chosen.wait_s:.2f} s; moving costs more"
        return Decision(None, "kv", why, seen)
    if own_place is None:
        why = "it shares its group's prompt" if chosen.num_cached else "it costs the least there"
    elif chosen.place == own_place:
        why = "its own server has its context" if chosen.num_cached else "its own server, again"
    else:
        why = "it moves: to compute its context again costs less than to stay"
    return Decision(chosen.place, "kv", why, seen)


Policy = Callable[[Placement, Ask, Sequence[Pool], float, float], Decision]

POLICIES: dict[str, Policy] = {
    "static": _static,
    "round_robin": _round_robin,
    "least_requests": _least_requests,
    "power_of_two": _power_of_two,
    "sticky_least_loaded": _sticky_least_loaded,
    "kv": _kv,
}
