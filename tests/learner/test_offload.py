"""Offloaded training gives the same results.

On a CPU both memories are the same: this tests DeepSpeed's other code path, not the transfers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agentloop-rl[train]'")

from safetensors.torch import load_file

from agentloop.training.learner_client.settings import LearnerSettings
from tests.learner.plain import Plain
from tests.learner.ranks import Ranks, make_batch, started
from tests.learner.test_ranks import SETTINGS

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
KINDS = [(1, 1, "optimizer"), (2, 2, "optimizer"), (3, 2, "optimizer+parameters")]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"zero{kind[0]}x{kind[1]}-{kind[2]}")
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Ranks, Path]]:
    stage, num_ranks, offload = request.param
    folder = tmp_path_factory.mktemp("offload")
    settings = SETTINGS.model_copy(update={"zero_stage": stage, "offload": offload})
    with started(folder, settings, num_ranks) as ranks:
        yield ranks, folder


def test_four_steps_are_those_of_plain_pytorch(both: tuple[Ranks, Path]) -> None:
    """Each step has several micro-batches; the third and fourth are then repeated from a
    checkpoint."""
    ranks, folder = both
    reference, batch = Plain(SETTINGS), make_batch()
    before = {name: p.detach().clone() for name, p in reference.model.named_parameters()}
    batch = make_batch(old_logprobs=batch.logprobs)
    batch.save(folder / "batch")
    for step in range(4):
        if step == 2:
            assert ranks.ask("save", folder=folder / "two")["ok"]
        expected, result = reference.step(batch), ranks.ask("step", batch=folder / "batch")
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    first = ranks.ask("publish", folder=folder / "four", version="4")["sha256"]
    weights: dict[str, Any] = {}
    for shard in (folder / "four").glob("*.safetensors"):
        weights |= load_file(shard)
    current = dict(reference.model.named_parameters())
    moved = max((current[name] - before[name]).abs().max().item() for name in current)
    differ = max((current[name] - weights[name]).abs().max().item() for name in current)
    print(f"largest update {moved:.2e}, difference {differ:.2e}")
    assert moved > 2e-3
    assert differ < 1e-5
    assert ranks.ask("load", folder=folder / "two")["num_updates"] == 2
    for _ in range(2):
        ranks.ask("step", batch=folder / "batch")
    assert ranks.ask("publish", folder=folder / "again", version="4")["sha256"] == first


def test_offloading_weights_needs_partitioned_weights() -> None:
    with pytest.raises(pydantic.ValidationError, match=r"offload: .* needs zero_stage = 3"):
        LearnerSettings(offload="optimizer+parameters", zero_stage=2)
