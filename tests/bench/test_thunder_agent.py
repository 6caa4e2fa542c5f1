"""The policies of systems that know programs, beside the runtime's."""

from __future__ import annotations

from agentloop.inference.ranks import DataParallelRank
from agentloop.inference.scheduling.kv_ledger import KVLedger
from agentloop.inference.scheduling.placement import PlacementRequest
from bench.program_policies import Aimd, Continuum, ThunderAgent

RANKS = [DataParallelRank(name) for name in "ab"]


def ledger() -> KVLedger:
    made = KVLedger()
    for rank in RANKS:
        made.add(rank, 10_000)
    return made


def choose(policy: ThunderAgent, key: str, num_tokens: int) -> DataParallelRank | None:
    return policy.choose(PlacementRequest(key, num_tokens, 1000), RANKS, now_s=0.0).rank


def test_thunder_agent_starts_programs_where_most_capacity_is_left_and_makes_others_wait() -> None:
    policy = ThunderAgent(ledger())
    first, second = choose(policy, "p", 7000), choose(policy, "q", 6000)
    assert {first, second} == set(RANKS)
    assert choose(policy, "r", 3800) == second
    assert choose(policy, "s", 3000) is None
    assert choose(policy, "p", 9900) == first  # an active program always goes on


def test_thunder_agent_pauses_small_programs_that_run_a_tool_before_those_that_generate() -> None:
    policy = ThunderAgent(ledger())
    for key, num_tokens in (("generates", 1000), ("small", 2000), ("large", 3000)):
        policy.choose(PlacementRequest(key, num_tokens, 1000), RANKS[:1], now_s=0.0)
    policy.end_turn("small")
    policy.end_turn("large")
    policy.pause_excess()
    assert policy.is_active("small")  # there is no excess yet

    policy.grow("generates", 5000)
    policy.pause_excess()
    active = [key for key in ("generates", "small", "large") if policy.is_active(key)]
    assert active == ["generates", "large"]

    policy.grow("large", 9000)
    policy.pause_excess()
    assert not policy.is_active("large")
    policy.grow("generates", 5000)
    policy.pause_excess()
    assert policy.is_active("generates")  # it generates: it pauses when its turn ends
    policy.end_turn("generates")
    assert not policy.is_active("generates")
    assert choose(policy, "new", 9900) is not None


def test_continuum_pins_longer_if_turns_wait_longer() -> None:
    policy = Continuum(ledger())
    for tool_s in (0.1, 0.1, 0.1, 8.0):
        policy.observe(tool_s, wait_s=0.5)
    assert policy.time_to_live_s(0.1) == 0.1
    for _ in range(256):
        policy.observe(0.1, wait_s=100.0)
    policy.observe(8.0, wait_s=10_000.0)
    assert policy.time_to_live_s(0.1) == 0.1  # one in 257 is not worth it
    for _ in range(20):
        policy.observe(8.0, wait_s=10_000.0)
    assert policy.time_to_live_s(0.1) == 8.0


def test_aimd_grows_while_the_usage_is_low_and_settled_and_cuts_above_the_mark() -> None:
    policy = Aimd(ledger())
    assert policy.cap == 64
    policy.observe(0.4, 64, 0)
    assert policy.cap == 72
    policy.observe(0.7, 72, 0)  # it has risen: what was admitted still grows
    assert policy.cap == 72
    policy.observe(0.4, 20, 0)  # the cap is not used
    assert policy.cap == 72
    policy.observe(0.4, 72, 1)
    assert policy.cap == 54
    for _ in range(6):
        policy.observe(0.99, 54, 0)
    assert policy.cap == 32
