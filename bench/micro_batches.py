"""How the variants of the plain loop put samples into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from agentloop.learner.batch import plan

PACKED = ("packed", "compiled", "chunked", "shared", "masked")


def arrange(
    lengths: Sequence[int], budget: int, variant: str, shared: Sequence[int] = ()
) -> list[list[int]]:
    """Return the indices of samples by micro-batch of at most `budget` tokens.

    If `variant` pads, padding counts. A sample longer than the budget is alone. `shared` is as in
    `plan`.
    """
    if variant in PACKED:
        return plan(lengths, budget, 1, shared)[0]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i] if variant == "sorted" else i)
    batches: list[list[int]] = []
    for index in order:
        grown = [*batches[-1], index] if batches else []
        if grown and max(lengths[i] for i in grown) * len(grown) <= budget:
            batches[-1] = grown
        else:
            batches.append([index])
    return batches


def waste(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """Return the fraction of padding if each batch is as wide as its longest sample."""
    cells = sum(max(lengths[i] for i in batch) * len(batch) for batch in batches)
    return 1 - sum(lengths[i] for batch in batches for i in batch) / cells
