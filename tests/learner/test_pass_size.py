"""How many tokens a pass holds where the memory of an accelerator decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agentloop-rl[train]'")

from agentloop.learner.pass_size import tokens_that_fit
from agentloop.learner.world import DeviceMemory, World
from tests.learner.ranks import SIZES, make_batch, started
from tests.learner.test_ranks import SETTINGS


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([(1000, DeviceMemory(lasting=5, peak=105, limit=1005))], 8000),
        ([(1000, DeviceMemory(lasting=5, peak=105, limit=55))], 400),
        ([(1000, DeviceMemory(5, 105, 1005)), (2, DeviceMemory(0, 90, 500))], 4000),
        ([(1000, DeviceMemory(lasting=5, peak=6, limit=1 << 40))], 65_536),
        ([(1000, DeviceMemory(lasting=5, peak=5, limit=15))], 8000),
    ],
    ids=["grows", "shrinks", "largest pass, least room", "most", "nothing taken"],
)
def test_tokens_fit_into_four_fifths_of_the_room(
    ranks: list[tuple[int, DeviceMemory]], expected: int
) -> None:
    assert tokens_that_fit(ranks) == expected


def with_a_memory(_folder: Path) -> None:
    """Let a rank have an accelerator's memory, of which the second rank's is smaller."""
    World.memory = lambda world: DeviceMemory(  # type: ignore[method-assign, assignment]
        lasting=50, peak=150, limit=1050 if world.first else 450
    )


def steps(folder: Path, num_ranks: int, **more: Any) -> list[dict[str, Any]]:
    settings = SETTINGS.model_copy(update=more)
    with started(folder, settings, num_ranks, before=with_a_memory) as ranks:
        make_batch().save(folder / "batch")
        return [ranks.ask("step", batch=folder / "batch") for _ in range(2)]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.real
@pytest.mark.timeout(300)
def test_passes_grow_to_what_every_ranks_memory_holds(tmp_path: Path, num_ranks: int) -> None:
    small, large = steps(tmp_path / "measured", num_ranks, micro_batch_tokens=None)
    assert small["pass_tokens"] == max(SIZES), "the first passes hold the longest sample"
    assert large["pass_tokens"] >= sum(SIZES) // num_ranks
    fixed = steps(tmp_path / "fixed", num_ranks)
    assert [step["pass_tokens"] <= 57 for step in fixed] == [True, True]
    for measured, expected in zip((small, large), fixed, strict=True):
        for name in ("loss", "grad_norm", "entropy"):
            assert measured[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6)
