"""Placement policies by name."""

from __future__ import annotations

from agentloop.inference.scheduling.gateway_policies import GATEWAY_POLICIES
from agentloop.inference.scheduling.kv_ledger import KVLedger
from agentloop.inference.scheduling.kv_policy import Costs, KVPolicy
from agentloop.inference.scheduling.placement import PlacementPolicy

__all__ = ["POLICIES", "make_policy"]

POLICIES = (*GATEWAY_POLICIES, KVPolicy.name)


def make_policy(
    name: str,
    ledger: KVLedger,
    *,
    costs: Costs | None = None,
    starvation_threshold_s: float = 10.0,
    seed: int = 0,
) -> PlacementPolicy:
    """Create a policy; `costs` and `starvation_threshold_s` are those of `kv`, `seed` breaks ties.

    Raises:
        ValueError: There is no such policy.
    """
    if name == KVPolicy.name:
        return KVPolicy(
            ledger, costs=costs, starvation_threshold_s=starvation_threshold_s, seed=seed
        )
    if name in GATEWAY_POLICIES:
        return GATEWAY_POLICIES[name](ledger, seed=seed)
    raise ValueError(f"no policy {name!r}: choose one of {', '.join(POLICIES)}")
