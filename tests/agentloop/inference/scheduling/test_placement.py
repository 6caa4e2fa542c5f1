"""Choices of the policy, and their explanations."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.inference.ranks import DataParallelRank, LoadReport
from agentloop.inference.scheduling.kv_ledger import KVLedger
from agentloop.inference.scheduling.kv_policy import Costs, KVPolicy
from agentloop.inference.scheduling.length_predictor import LengthPredictor
from agentloop.inference.scheduling.placement import Decision, PlacementRequest

RANKS = [DataParallelRank(name) for name in "abcd"]


def ledger(capacity: int = 10_000) -> KVLedger:
    made = KVLedger(LengthPredictor(prior=100))
    for rank in RANKS:
        made.add(rank, capacity)
    return made


def place(
    books: KVLedger,
    rank: DataParallelRank,
    name: str,
    tokens: int,
    *,
    group: str = "",
    shared: int = 0,
) -> None:
    books.reserve(name, rank, tokens, 0, key=f"k{name}", group=group, num_shared=shared)
    books.grow(name, 1)  # its prefill is over


def ask(key: str = "new", tokens: int = 500, **options: object) -> PlacementRequest:
    return PlacementRequest(key, tokens, 1000, **options)  # type: ignore[arg-type]


def choose(
    books: KVLedger, request: PlacementRequest, *, waited_s: float = 0.0, seed: int = 0
) -> Decision:
    return KVPolicy(books, seed=seed).choose(request, RANKS, now_s=0.0, waited_s=waited_s)


def test_kv_goes_where_it_fits() -> None:
    books = ledger(1000)
    for rank in RANKS[:3]:
        place(books, rank, rank.server, 700)
    for number in range(3):
        place(books, RANKS[3], f"s{number}", 10)
    assert choose(books, ask(tokens=400)).rank == RANKS[3]
    decision = choose(books, ask(tokens=900))
    assert (decision.rank, decision.why) == (None, "no server has free KV capacity for it")


def test_kv_prefers_the_less_busy_server() -> None:
    books = ledger()
    for number, rank in enumerate(RANKS[:3] * 3):
        place(books, rank, f"s{number}", 1000)
    decision = choose(books, ask())
    assert decision.rank == RANKS[3]
    assert decision.why == "lowest cost"


def test_kv_returns_to_its_context_while_that_is_cheaper() -> None:
    books = ledger(100_000)
    place(books, RANKS[1], "s", 5000)
    books.park("s", 0.0)
    for number in range(8):
        place(books, RANKS[1], f"t{number}", 100)
    decision = choose(books, ask("ks", 5050))
    assert decision.rank == RANKS[1]
    assert decision.why == "its own server caches its context"
    for number in range(80):
        place(books, RANKS[1], f"u{number}", 500)
    decision = choose(books, ask("ks", 5050))
    assert decision.rank != RANKS[1]
    assert decision.why.startswith("moves: ")


def test_kv_waits_for_its_server_while_moving_costs_more() -> None:
    books = ledger(6000)
    for rank in RANKS[1:]:
        for number in range(100):  # a prefill stops all of them
            place(books, rank, f"{rank.server}{number}", 5)
    place(books, RANKS[0], "s", 2000)
    books.park("s", 0.0)
    place(books, RANKS[0], "big", 5800)
    books.release("big", 0.0)
    place(books, RANKS[0], "bigger", 5900)
    decision = choose(books, ask("ks", 2100))
    assert decision.rank is None
    assert "will have capacity in" in decision.why
    decision = KVPolicy(books).choose(ask("ks", 2100), RANKS, now_s=200.0)
    assert decision.rank in RANKS[1:]  # nothing has become free since


def test_kv_returns_to_the_host_that_has_its_context() -> None:
    books = KVLedger(LengthPredictor(prior=100))
    for rank in RANKS:
        books.add(rank, 10_000, host_capacity=20_000)
    place(books, RANKS[2], "s", 6000)
    books.park("s", 0.0)
    place(books, RANKS[2], "big", 9000)
    books.park("big", 0.0)
    books.age(60.0)
    assert choose(books, ask("ks", 6100)).rank == RANKS[2]
    books.pools[RANKS[2]].flush()
    assert choose(books, ask("ks", 6100)).rank == RANKS[2]  # as good as others, and its own
    place(books, RANKS[2], "other", 500)
    assert choose(books, ask("ks", 6100)).rank != RANKS[2]


def test_host_lets_kept_tokens_be_evicted_at_once() -> None:
    for host_capacity, rank in ((0, None), (5000, RANKS[0])):
        books = KVLedger(LengthPredictor(prior=100))
        books.add(RANKS[0], 1000, host_capacity=host_capacity)
        place(books, RANKS[0], "kept", 700)
        place(books, RANKS[0], "live", 100)
        books.park("kept", 0.0)
        decision = KVPolicy(books).choose(ask(tokens=500), RANKS[:1], now_s=0.0)
        assert decision.rank == rank


def test_kv_lets_siblings_share_until_others_are_much_less_busy() -> None:
    books = ledger(1_000_000)
    for number in range(3):
        place(books, RANKS[2], f"s{number}", 2010, group="g", shared=2000)
    sibling = ask(tokens=2000, group="g", num_shared=2000)
    decision = choose(books, sibling)
    assert decision.rank == RANKS[2]
    assert decision.why == "shares its group's prompt"
    for number in range(300):
        place(books, RANKS[2], f"t{number}", 1000)
    assert choose(books, sibling).rank != RANKS[2]


def test_returning_trajectories_have_priority_unless_a_request_waited_long() -> None:
    books = ledger(1000)
    for rank in RANKS:
        place(books, rank, rank.server, 700)
        books.park(rank.server, 0.0)
        place(books, rank, f"{rank.server}2", 50)
    assert choose(books, ask()).rank is None
    assert choose(books, ask(), waited_s=10.1).rank is not None
    assert choose(books, ask("ka", 750)).rank == RANKS[0]  # it is its own


def test_kv_counts_requests_of_others_as_reported() -> None:
    books = ledger()
    for rank in RANKS[:3]:
        for second in range(2):
            books.report(rank, LoadReport(9000, 40, 0), float(second))
    assert {choose(books, ask(), seed=seed).rank for seed in range(9)} == {RANKS[3]}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3000)), max_size=30), st.integers())
def test_kv_never_admits_what_does_not_fit(held: list[tuple[int, int]], seed: int) -> None:
    books = ledger()
    for number, (index, tokens) in enumerate(held):
        pool = books.pools[RANKS[index]]
        if tokens <= pool.num_free:
            place(books, pool.rank, f"s{number}", tokens)
            if number % 3 == 0:
                books.park(f"s{number}", 0.0)
    growth = books.predictor.remaining("")  # learned from the turns that have been parked
    decision = choose(books, ask(tokens=2000), seed=seed)
    for candidate in decision.candidates:
        pool = books.pools[candidate.rank]
        if candidate.rank == decision.rank and pool.num_sequences:
            assert pool.num_free - pool.num_kept >= 2000 + growth
    if decision.rank is None:
        assert all(not candidate.fits for candidate in decision.candidates)


def test_decision_explains_its_candidates() -> None:
    books = ledger()
    place(books, RANKS[0], "s", 1000)
    books.park("s", 0.0)
    decision = choose(books, ask("ks", 1200))
    assert [candidate.rank for candidate in decision.candidates] == RANKS
    cached = decision.candidates[0]
    assert (cached.num_cached, cached.need, cached.fits) == (1001, 1200, True)
    assert cached.prefill_s == pytest.approx(199 * Costs().prefill_s_per_token)
    assert cached.cost_s == min(candidate.cost_s for candidate in decision.candidates)
    lines = decision.explain().splitlines()
    assert lines[0] == "kv: its own server caches its context"
    assert [line[:4] for line in lines[1:]] == ["-> a", "   b", "   c", "   d"]
    assert "prefill 0.020" in lines[1]


def test_rank_without_capacity_is_shown_as_such() -> None:
    books = ledger(1000)
    for rank in RANKS[:3]:
        place(books, rank, rank.server, 700)
    decision = choose(books, ask(tokens=400))
    assert [candidate.fits for candidate in decision.candidates] == [False] * 3 + [True]
    lines = decision.explain().splitlines()
    assert lines[1].startswith("   a#0 does not fit; needs 500 of 299 tokens")
    assert "decode" in lines[4]


def test_costs_only_need_to_be_right_in_proportion() -> None:
    books = ledger(100_000)
    for number in range(12):
        place(books, RANKS[number % 3], f"s{number}", 1000 + 500 * number)
        if number % 2:
            books.park(f"s{number}", 0.0)
    slow = Costs(**{name: 10 * cost for name, cost in dataclasses.asdict(Costs()).items()})
    for number in range(1, 12, 2):
        request = ask(f"ks{number}", 1000 + 500 * number + 200)
        fast_choice = KVPolicy(books).choose(request, RANKS, now_s=0.0)
        slow_choice = KVPolicy(books, costs=slow).choose(request, RANKS, now_s=0.0)
        assert fast_choice.rank == slow_choice.rank


def test_full_batch_accepts_no_request() -> None:
    """SGLang's max_running_requests applies whatever capacity is free."""
    ledger = KVLedger()
    for name in ("full", "free"):
        ledger.add(DataParallelRank(name), 100_000, 2)
    for number in range(2):
        ledger.reserve(f"r{number}", DataParallelRank("full"), 10, 10)
    placement = KVPolicy(ledger)
    decision = placement.choose(
        PlacementRequest("k", 10, 10),
        [DataParallelRank("full"), DataParallelRank("free")],
        now_s=0.0,
    )
    assert decision.rank == DataParallelRank("free")
    decision = placement.choose(
        PlacementRequest("k", 10, 10), [DataParallelRank("full")], now_s=0.0, waited_s=1000.0
    )
    assert decision.rank is None
