"""Pure: the terms of choosing the server of a turn.

    PlacementRequest ──> KVPolicy.choose ──> Decision: a rank, or wait

`kv_policy.py` is the policy of the runtime; bench/router.py compares others with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agentloop.inference.ranks import DataParallelRank


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A turn that waits for a server.

    Attributes:
        key: Name of its trajectory.
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

    Costs are seconds, summed over the request and the sequences that it delays. `num_free` excludes
    tokens kept for trajectories that will return soon. `wait_s` is the time until there is enough
    capacity, `queue_s` the prefill of earlier requests, `evict_s` the recomputation of evicted
    tokens. For a rank that has no capacity and is not the trajectory's own, costs are not computed
    and stay 0.
    """

    rank: DataParallelRank
    fits: bool
    num_free: int
    need: int
    num_cached: int
    num_sequences: int
    wait_s: float = 0.0
    prefill_s: float = 0.0
    queue_s: float = 0.0
    decode_s: float = 0.0
    evict_s: float = 0.0

    @property
    def is_possible(self) -> bool:
        """True if the turn fits, or would by waiting for it."""
        return self.fits or self.wait_s > 0

    @property
    def cost_s(self) -> float:
        return self.wait_s + self.prefill_s + self.queue_s + self.decode_s + self.evict_s

    def explain(self) -> str:
        """Return the costs and the state in one line."""
        if self.is_possible:
            costs = (
                f"{self.cost_s:.3f} s: wait {self.wait_s:.3f}, prefill {self.prefill_s:.3f}, "
                f"queue {self.queue_s:.3f}, decode {self.decode_s:.3f}, evict {self.evict_s:.3f}"
            )
        else:
            costs = "does not fit"
        return (
            f"{self.rank.server}#{self.rank.number} {costs}; needs {self.need} of {self.num_free} "
            f"tokens, {self.num_cached} cached, {self.num_sequences} sequences"
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen rank and the reason; with `rank` None, the request waits.

    `candidates` are the ranks that were considered.
    """

    rank: DataParallelRank | None
    policy: str
    why: str
    candidates: Sequence[Candidate] = field(repr=False)

    def explain(self) -> str:
        """Return one line per candidate, with the chosen one marked."""
        lines = [f"{self.policy}: {self.why}"]
        for candidate in self.candidates:
            mark = "->" if candidate.rank == self.rank else "  "
            lines.append(f"{mark} {candidate.explain()}")
        return "\n".join(lines)
