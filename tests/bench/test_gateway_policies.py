"""The placement policies of gateways, beside the runtime's."""

from __future__ import annotations

from collections import Counter

import pytest

from agentloop.inference.ranks import DataParallelRank
from agentloop.inference.scheduling.kv_ledger import KVLedger
from agentloop.inference.scheduling.length_predictor import LengthPredictor
from agentloop.inference.scheduling.placement import PlacementRequest
from bench.gateway_policies import POLICIES, StickyLeastLoaded, make_policy

RANKS = [DataParallelRank(name) for name in "abcd"]


def ledger() -> KVLedger:
    made = KVLedger(LengthPredictor(prior=100))
    for rank in RANKS:
        made.add(rank, 10_000)
    return made


def hold(books: KVLedger, rank: DataParallelRank, name: str) -> None:
    books.reserve(name, rank, 100, 0, key=f"k{name}", group="", num_shared=0)
    books.grow(name, 1)  # its prefill is over


def ask(key: str = "new", *, group: str = "", num_shared: int = 0) -> PlacementRequest:
    return PlacementRequest(key, 500, 1000, group, num_shared)


@pytest.mark.parametrize("policy", POLICIES)
def test_same_seed_decides_the_same(policy: str) -> None:
    def decisions(seed: int) -> list[DataParallelRank | None]:
        books = ledger()
        placement = make_policy(policy, books, seed=seed)
        chosen = []
        for number in range(60):
            key = f"k{number % 20}"
            request = ask(key, group=f"g{number % 5}", num_shared=200)
            rank = placement.choose(request, RANKS, now_s=float(number)).rank
            chosen.append(rank)
            if rank is not None:
                books.reserve(f"s{number}", rank, 500, 50, key=key)
                books.park(f"s{number}", float(number))
        return chosen

    assert decisions(3) == decisions(3)
    assert len(set(decisions(3))) == len(RANKS)  # no server is left out


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "round_robin"])
def test_ties_do_not_always_go_to_the_first(policy: str) -> None:
    placement = make_policy(policy, ledger())
    counts = Counter(
        placement.choose(ask(f"k{number}"), RANKS, now_s=0.0).rank for number in range(400)
    )
    assert set(counts) == set(RANKS)
    assert max(counts.values()) < 160


@pytest.mark.parametrize("policy", POLICIES)
def test_only_ranks_that_are_offered_are_chosen(policy: str) -> None:
    books = ledger()
    placement = make_policy(policy, books)
    for number in range(8):
        placement.choose(ask(f"k{number}"), RANKS, now_s=0.0)
    for number in range(8):
        decision = placement.choose(ask(f"k{number}"), RANKS[2:3], now_s=0.0)
        assert decision.rank == RANKS[2]
    assert placement.choose(ask(), [], now_s=0.0).rank is None


def test_static_keeps_a_group_together_in_equal_shares() -> None:
    placement = make_policy("static", ledger())
    affinity = {
        group: {
            placement.choose(ask(f"k{group}.{member}", group=f"g{group}"), RANKS, now_s=0.0).rank
            for member in range(4)
        }
        for group in range(8)
    }
    assert all(len(ranks) == 1 for ranks in affinity.values())
    assert set(Counter(next(iter(ranks)) for ranks in affinity.values()).values()) == {2}


def test_counting_policies_see_counts() -> None:
    books = ledger()
    for number, rank in enumerate(RANKS[:3]):
        hold(books, rank, f"s{number}")
    for policy in ("least_requests", "sticky_least_loaded"):
        assert make_policy(policy, books).choose(ask(), RANKS, now_s=0.0).rank == RANKS[3]
    two = make_policy("power_of_two", books).choose(ask(), RANKS[2:], now_s=0.0)
    assert two.rank == RANKS[3]
    sticky = make_policy("sticky_least_loaded", books)
    assert isinstance(sticky, StickyLeastLoaded)
    sticky.choose(ask(), RANKS, now_s=0.0)
    for number in range(9):
        hold(books, RANKS[3], f"t{number}")
    assert sticky.choose(ask(), RANKS, now_s=0.0).rank == RANKS[3]
    sticky.forget("new")
    assert sticky.choose(ask(), RANKS, now_s=0.0).rank != RANKS[3]
