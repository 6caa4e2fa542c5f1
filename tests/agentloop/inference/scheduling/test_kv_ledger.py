"""The ledger's sums agree with a recount after any sequence of operations."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentloop.inference.ranks import DataParallelRank, LoadReport
from agentloop.inference.scheduling.kv_ledger import KVLedger
from agentloop.inference.scheduling.length_predictor import LengthPredictor

A, B = DataParallelRank("a"), DataParallelRank("a", 1)
RANKS = st.sampled_from([A, B, DataParallelRank("b")])
KEYS = st.sampled_from(["", "k1", "k2", "k3", "k4"])
GROUPS = {"": "", "k1": "g", "k2": "g", "k3": "g", "k4": "h"}
PROMPTS = {"": 0, "g": 10, "h": 7}


class Ledger(RuleBasedStateMachine):
    """Compares the ledger with plain records of live sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ledger = KVLedger(LengthPredictor(prior=8, min_samples=2))
        self.live: dict[str, tuple[DataParallelRank, str, int]] = {}  # rank, key, tokens
        self.streamed: dict[DataParallelRank, int] = {}
        self.count = 0

    @rule(rank=RANKS, capacity=st.integers(20, 200), host=st.sampled_from([0, 50, 1000]))
    def add(self, rank: DataParallelRank, capacity: int, host: int) -> None:
        if rank not in self.ledger.pools:
            self.ledger.add(rank, capacity, host_capacity=host)

    @precondition(lambda self: self.ledger.pools)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(sorted(self.ledger.pools)))
        self.ledger.remove(rank)
        self.live = {name: sequence for name, sequence in self.live.items() if sequence[0] != rank}

    @precondition(lambda self: self.ledger.pools)
    @rule(data=st.data(), key=KEYS, more=st.integers(1, 60), budget=st.integers(0, 50))
    def reserve(self, data: st.DataObject, key: str, more: int, budget: int) -> None:
        pool = self.ledger.pools[data.draw(st.sampled_from(sorted(self.ledger.pools)))]
        group = GROUPS[key]
        tokens = PROMPTS[group] + more
        growth = min(budget, self.ledger.predictor.remaining(group))
        need = tokens - pool.num_shared(group) + growth
        idle, before = not pool.num_sequences, pool.num_free
        if need > (pool.capacity if idle else before):
            return
        self.count += 1
        cached = pool.num_cached(key, group) + pool.num_on_host(key, group)
        cached = min(cached, tokens - 1)
        computed = self.ledger.reserve(
            f"s{self.count}",
            pool.rank,
            tokens,
            budget,
            key=key,
            group=group,
            num_shared=PROMPTS[group],
        )
        assert computed == tokens - cached
        assert pool.num_free == before - need
        assert idle or pool.num_free >= 0  # never over capacity, except in an idle pool
        self.live[f"s{self.count}"] = (pool.rank, key, tokens)

    @rule(number=st.integers(0, 15), tokens=st.integers(0, 30))
    def grow(self, number: int, tokens: int) -> None:
        name = f"s{number}"
        self.ledger.grow(name, tokens)
        if name in self.live:
            rank, key, held = self.live[name]
            self.live[name] = (rank, key, held + tokens)

    @rule(number=st.integers(0, 15), parks=st.booleans(), again=st.booleans())
    def end(self, number: int, parks: bool, again: bool) -> None:
        self.now += 1.0
        name = f"s{number}"
        for _ in range(1 + again):  # the second time it changes nothing
            if parks:
                self.ledger.park(name, self.now)
            else:
                self.ledger.release(name, self.now)
        self.live.pop(name, None)

    @rule(key=KEYS)
    def forget(self, key: str) -> None:
        self.ledger.forget(key)

    @precondition(lambda self: self.ledger.pools)
    @rule(data=st.data())
    def flush(self, data: st.DataObject) -> None:
        pool = self.ledger.pools[data.draw(st.sampled_from(sorted(self.ledger.pools)))]
        pool.flush()
        assert pool.num_parked == pool.num_kept == pool.num_on_host("k1", "g") == 0

    @precondition(lambda self: self.ledger.pools)
    @rule(
        data=st.data(),
        used=st.integers(0, 400),
        running=st.integers(0, 5),
        retracted=st.integers(0, 3),
    )
    def report(self, data: st.DataObject, used: int, running: int, retracted: int) -> None:
        rank = data.draw(st.sampled_from(sorted(self.ledger.pools)))
        assert self.ledger.report(rank, LoadReport(used, running, 1, retracted), self.now) >= 0

    @rule(seconds=st.floats(0.1, 8.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.age(self.now)

    @invariant()
    def sums_agree_with_a_recount(self) -> None:
        for rank, pool in self.ledger.pools.items():
            mine = [(key, tokens) for at, key, tokens in self.live.values() if at == rank]
            groups = [GROUPS[key] for key, _ in mine]
            shared = {group for group in groups if group}
            saved = sum(PROMPTS[group] * (groups.count(group) - 1) for group in shared)
            assert pool.num_sequences == len(mine)
            assert pool.num_live == sum(tokens for _, tokens in mine) - saved
            if not mine:
                assert pool.num_reserved == pool.num_prefill == 0
            assert 0 <= pool.num_kept <= pool.num_parked
            assert pool.num_parked == sum(parked.num_tokens for parked in pool._parked.values())
            assert pool.num_kept == sum(p.num_tokens for p in pool._parked.values() if p.is_kept)
            assert pool._num_host == sum(pool._host.values()) <= pool.host_capacity
            assert min(pool.num_reserved, pool.num_prefill) >= 0
            assert 0 <= pool.num_others <= pool.capacity
            assert pool.num_strangers >= 0
            held = pool.num_live + pool.num_others
            assert not pool.num_parked or held + pool.num_parked <= pool.capacity
            prompts = {name for name, is_prompt in pool._parked if is_prompt}
            assert prompts | shared == set(pool.prompts)


TestLedger = pytest.mark.timeout(60)(Ledger.TestCase)
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def ledger(capacity: int = 100) -> KVLedger:
    made = KVLedger(LengthPredictor(prior=10))
    made.add(A, capacity)
    return made


def test_sequence_cannot_hold_two_reservations() -> None:
    made = ledger()
    made.reserve("s", A, 10, 0)
    with pytest.raises(ValueError, match="s already holds"):
        made.reserve("s", A, 10, 0)
    with pytest.raises(ValueError, match="was already added"):
        made.add(A, 100)
    assert made.pools[A].num_live == 10


def test_host_brings_back_what_the_device_evicted() -> None:
    made = KVLedger(LengthPredictor(prior=10))
    made.add(A, 100, host_capacity=150)
    pool = made.pools[A]
    made.reserve("s1", A, 60, 0, key="k1", group="g", num_shared=20)
    made.park("s1", 0.0)
    assert (pool.num_cached("k1", "g"), pool.num_on_host("k1", "g"), made.keeps("k1")) == (
        60,
        0,
        True,
    )
    made.reserve("s2", A, 90, 0, key="k2")  # it evicts both
    assert (pool.num_cached("k1", "g"), pool.num_on_host("k1", "g"), made.keeps("k1")) == (
        0,
        60,
        False,
    )
    made.park("s2", 1.0)
    made.reserve("s3", A, 80, 0, key="k3")
    made.park("s3", 2.0)  # the host forgets the least recently used
    assert [pool.num_on_host(key, "g") for key in ("k1", "k2", "k3")] == [0, 0, 0]
    assert made.reserve("s4", A, 95, 0, key="k3") == 15


def test_prompt_of_a_group_is_held_and_computed_once() -> None:
    made = ledger(1000)
    pool = made.pools[A]
    assert made.reserve("s1", A, 100, 0, key="k1", group="g", num_shared=100) == 100
    assert made.reserve("s2", A, 100, 0, key="k2", group="g", num_shared=100) == 1
    assert pool.num_live == 100
    made.release("s1", 0.0)
    assert pool.num_live == 100
    made.release("s2", 0.0)
    assert (pool.num_live, pool.num_parked) == (0, 100)
    assert pool.num_cached("k3", "g") == 100


def test_returning_trajectory_computes_only_new_tokens() -> None:
    made = ledger(1000)
    made.reserve("s1", A, 50, 20, key="k")
    made.grow("s1", 20)
    made.park("s1", 1.0)
    assert made.affinity("k") is made.pools[A]
    assert made.pools[A].num_kept == 70
    assert made.reserve("s2", A, 75, 0, key="k") == 5
    assert made.pools[A].num_parked == 0


def test_oldest_parked_go_first_when_the_live_need_capacity() -> None:
    made = ledger(100)
    for number in range(3):
        made.reserve(f"s{number}", A, 30, 0, key=f"k{number}")
        made.park(f"s{number}", float(number))
    made.reserve("s3", A, 15, 20)
    assert [made.pools[A].num_cached(f"k{number}", "") for number in range(3)] == [0, 30, 30]
    made.grow("s3", 30)  # the reserve is not a limit
    assert [made.pools[A].num_cached(f"k{number}", "") for number in range(3)] == [0, 0, 30]


def test_reserve_is_used_up_and_renewed_within_the_budget() -> None:
    made = ledger(1000)
    made.reserve("s", A, 50, 25)
    pool = made.pools[A]
    assert pool.num_reserved == 10
    made.grow("s", 4)
    assert pool.num_reserved == 6
    made.grow("s", 6)
    assert pool.num_reserved == 10
    made.grow("s", 12)
    assert pool.num_reserved == 3  # the rest of the budget
    made.grow("s", 3)
    assert (pool.num_live, pool.num_reserved) == (75, 0)


def test_trajectory_that_is_away_too_long_loses_its_tokens() -> None:
    made = ledger(100)
    made.reserve("s", A, 30, 0, key="k")
    made.park("s", 0.0)
    made.age(5.0)
    assert made.pools[A].num_kept == 30
    made.age(5.1)
    assert (made.pools[A].num_kept, made.pools[A].num_cached("k", "")) == (0, 30)


def test_excess_is_believed_when_two_reports_agree_and_fades() -> None:
    made = ledger(1000)
    pool = made.pools[A]
    made.reserve("s", A, 100, 0)
    made.report(A, LoadReport(400, 3, 1), 0.0)
    assert (pool.num_others, pool.num_strangers) == (0, 0)
    made.report(A, LoadReport(350, 2, 1), 1.0)
    assert (pool.num_others, pool.num_strangers) == (250, 2)
    assert pool.num_free == 650
    made.age(6.0)
    assert pool.num_others == 125
    made.age(11.0)
    assert (pool.num_others, pool.num_strangers, pool.num_free) == (0, 0, 900)


def test_report_below_our_accounting_changes_nothing() -> None:
    made = ledger(1000)
    made.reserve("s", A, 500, 100)
    for second in range(3):
        made.report(A, LoadReport(second, 0, 0), float(second))
    assert made.pools[A].num_free == 490


def test_report_that_never_changes_fades() -> None:
    made = ledger(1000)
    made.reserve("s", A, 100, 500)
    frozen = LoadReport(300, 1, 0, 5)
    made.report(A, LoadReport(310, 1, 0, 5), 0.0)
    made.report(A, frozen, 1.0)
    assert made.pools[A].num_others == 200
    for second in range(2, 12):  # tokens are streamed, but the report does not change
        made.grow("s", 5)
        assert made.report(A, frozen, float(second)) == 0
    assert made.pools[A].reported_s == 1.0
    assert made.pools[A].num_others == 0


def test_retractions_are_counted_from_the_first_report_on() -> None:
    made = ledger()
    assert made.report(A, LoadReport(0, 0, 0, 7), 0.0) == 0
    assert made.report(A, LoadReport(0, 0, 0, 9), 1.0) == 2
    assert made.report(A, LoadReport(0, 0, 0, 1), 2.0) == 1  # the server was restarted


def test_pool_that_is_removed_takes_its_sequences_along() -> None:
    made = ledger()
    made.add(B, 100)
    made.reserve("s1", A, 10, 0, key="k1")
    made.reserve("s2", B, 10, 0, key="k2")
    made.remove(A)
    made.grow("s1", 5)
    made.park("s1", 1.0)
    assert made.affinity("k1") is None
    assert made.affinity("k2") is made.pools[B]
    made.reserve("s1", B, 10, 0, key="k1")
    assert made.pools[B].num_live == 20


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(0, 500))
def test_prediction_is_a_remaining_length_that_was_observed(lengths: list[int], far: int) -> None:
    predictor = LengthPredictor(quantile=0.5, prior=77, window=40, min_samples=4)
    for length in lengths:
        predictor.learn("g", length)
    predicted = predictor.remaining("g", far)
    longer = sorted(length for length in lengths if length > far)
    assert predicted == 77 or far + predicted in longer
    assert predicted >= 1
    if len(longer) >= 4:
        assert far + predicted == longer[(len(longer) - 1) // 2]


def test_siblings_take_precedence_and_old_lengths_are_forgotten() -> None:
    predictor = LengthPredictor(quantile=0.5, prior=5, window=8, min_samples=4)
    assert predictor.remaining("g") == 5
    for _ in range(8):
        predictor.learn("other", 100)
    assert predictor.remaining("g") == 100
    for _ in range(4):
        predictor.learn("g", 900)
    assert predictor.remaining("g") == 900
    assert predictor.remaining("g", 850) == 50
    for _ in range(8):
        predictor.learn("third", 300)
    assert predictor.remaining("new") == 300
