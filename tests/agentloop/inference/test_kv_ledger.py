"""Every sum agrees with a recount, whatever comes in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentloop.inference.kv_ledger import KVLedger

SERVERS = st.sampled_from(["a", "b", "c"])
TOKENS = st.integers(0, 50)


class Ledger(RuleBasedStateMachine):
    """The ledger beside a plain list of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = KVLedger()
        self.capacity: dict[str, int] = {}
        self.held: dict[str, tuple[str, int, int]] = {}  # server, tokens, reserve
        self.count = 0

    @rule(server=SERVERS, capacity=st.integers(1, 200))
    def add_server(self, server: str, capacity: int) -> None:
        if server not in self.capacity:
            self.ledger.add_server(server, capacity)
            self.capacity[server] = capacity

    @precondition(lambda self: self.capacity)
    @rule(data=st.data())
    def remove_server(self, data: st.DataObject) -> None:
        server = data.draw(st.sampled_from(sorted(self.capacity)))
        self.ledger.remove_server(server)
        del self.capacity[server]
        self.held = {key: held for key, held in self.held.items() if held[0] != server}

    @precondition(lambda self: self.capacity)
    @rule(data=st.data(), tokens=TOKENS, reserve=TOKENS)
    def reserve(self, data: st.DataObject, tokens: int, reserve: int) -> None:
        server = data.draw(st.sampled_from(sorted(self.capacity)))
        if self.ledger.fits(server, tokens, reserve):
            others = any(held[0] == server for held in self.held.values())
            room = self.ledger.room(server)
            assert tokens + reserve <= room if others else tokens < self.capacity[server]
            self.count += 1
            self.ledger.reserve(f"s{self.count}", server, tokens, reserve)
            self.held[f"s{self.count}"] = (server, tokens, reserve)

    @rule(number=st.integers(0, 20), tokens=TOKENS)
    def grow(self, number: int, tokens: int) -> None:
        key = f"s{number}"
        self.ledger.grow(key, tokens)
        if key in self.held:
            server, held, reserve = self.held[key]
            self.held[key] = (server, held + tokens, max(0, reserve - tokens))

    @rule(number=st.integers(0, 20))
    def release(self, number: int) -> None:
        self.ledger.release(f"s{number}")
        self.held.pop(f"s{number}", None)

    @invariant()
    def sums_agree_with_a_recount(self) -> None:
        for server, capacity in self.capacity.items():
            mine = [held for held in self.held.values() if held[0] == server]
            tokens = sum(held[1] for held in mine)
            assert self.ledger.num_sequences(server) == len(mine)
            assert self.ledger.num_held(server) == tokens
            assert self.ledger.room(server) == capacity - tokens - sum(held[2] for held in mine)


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_an_idle_server_takes_what_it_can_hold_at_all() -> None:
    ledger = KVLedger()
    ledger.add_server("a", 100)
    assert ledger.fits("a", 99, 1000)
    assert not ledger.fits("a", 100, 0)
    ledger.reserve("s", "a", 10, 0)
    assert ledger.fits("a", 50, 40)
    assert not ledger.fits("a", 50, 41)


def test_nobody_holds_twice() -> None:
    ledger = KVLedger()
    ledger.add_server("a", 100)
    ledger.reserve("s", "a", 10, 0)
    with pytest.raises(ValueError, match="s holds already"):
        ledger.reserve("s", "a", 10, 0)
    assert ledger.num_held("a") == 10
