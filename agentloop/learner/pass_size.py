"""How many tokens a forward pass may hold.

    a step ──> of each rank: tokens of its largest pass, memory ──> tokens of the next step's passes

On a GPU fewer and larger passes are faster: each costs hundreds of launches, and adds the gradients
of all weights to their sums. The memory of a pass grows in proportion to its tokens, besides a part
that is the same for each, so that what a smaller pass took is never too low an estimate. The first
step's passes hold no more than the longest sample, which has to fit in any case.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentloop.learner.world import DeviceMemory, World
from agentloop.training.learner_client.settings import LearnerSettings

_MOST_TOKENS = 65_536
_SHARE = 0.8  # of the memory; allocations of other sizes leave some of the rest unused


def tokens_that_fit(ranks: Sequence[tuple[int, DeviceMemory]]) -> int:
    """Return how many tokens of a pass fit into the memory of every rank.

    Args:
        ranks: tokens of each rank's largest pass, and its memory. The largest tells what one takes.
    """
    num_tokens, memory = max(ranks, key=lambda rank: rank[0])
    taken = max(1, memory.peak - memory.lasting)
    room = min(memory.limit - memory.lasting for _, memory in ranks)
    return min(_MOST_TOKENS, int(_SHARE * room * num_tokens / taken))


class PassSize:
    """The number of tokens that a pass may hold, the same on all ranks.

    Attributes:
        largest: Tokens of this rank's largest pass in this step.
    """

    def __init__(self, settings: LearnerSettings, world: World) -> None:
        self.largest = 0
        self._measures = settings.micro_batch_tokens is None and world.memory() is not None
        self._tokens = 0 if self._measures else settings.max_sample_tokens

    def limit(self, lengths: Sequence[int]) -> int:
        """Return how many tokens a pass of samples of these lengths may hold."""
        return max(self._tokens, *lengths) if self._measures else self._tokens

    def measure(self, world: World) -> dict[str, float]:
        """End a step; return its metrics (collective)."""
        memory, num_tokens = world.memory(), self.largest
        self.largest = 0
        if memory is None:
            return {"pass_tokens": num_tokens}
        if self._measures:
            self._tokens = tokens_that_fit(world.gather((num_tokens, memory)))
        return {"pass_tokens": num_tokens, "peak_memory_gib": memory.peak / 2**30}
