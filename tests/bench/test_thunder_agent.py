"""ThunderAgent's policy, beside the runtime's."""

from __future__ import annotations

from collections.abc import Sequence

from agentloop.inference.ranks import DataParallelRank
from agentloop.inference.scheduling.kv_ledger import KVLedger
from agentloop.inference.scheduling.placement import PlacementRequest
from bench.thunder_agent import ThunderAgent

RANKS = [DataParallelRank(name) for name in "ab"]


def ledger(ranks: Sequence[DataParallelRank] = RANKS) -> KVLedger:
    made = KVLedger()
    for rank in ranks:
        made.add(rank, 10_000)
    return made


def choose(policy: ThunderAgent, key: str, num_tokens: int) -> DataParallelRank | None:
    return policy.choose(PlacementRequest(key, num_tokens, 1000))


def test_programs_start_where_most_capacity_is_left() -> None:
    policy = ThunderAgent(ledger())
    first, second = choose(policy, "p", 7000), choose(policy, "q", 6000)
    assert {first, second} == set(RANKS)
    assert choose(policy, "r", 3800) == second
    assert choose(policy, "s", 3000) is None
    assert choose(policy, "p", 9900) == first  # an active program always goes on


def test_small_programs_that_run_a_tool_pause_first() -> None:
    policy = ThunderAgent(ledger(RANKS[:1]))
    for key, num_tokens in (("generates", 1000), ("small", 2000), ("large", 3000)):
        choose(policy, key, num_tokens)
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
