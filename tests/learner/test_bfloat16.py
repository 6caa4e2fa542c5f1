"""Real ranks that compute in bfloat16: values that must not be rounded to it are not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agentloop-rl[train]'")

from agentloop.learner.batch import Batch
from agentloop.models.differences import DIFFERENCE, apply_difference
from tests.learner.ranks import Ranks, make_batch, started
from tests.learner.test_ranks import SETTINGS

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

SIZES = (24, 24, 24, 24)
TINY = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128}
KINDS = [
    (1, 1, "none"),
    (1, 2, "none"),
    (1, 1, "optimizer"),
    (2, 2, "none"),
    (2, 2, "optimizer"),
    (3, 2, "none"),
]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"zero{kind[0]}x{kind[1]}-{kind[2]}")
def kind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Ranks, Path]]:
    stage, num_ranks, offload = request.param
    folder = tmp_path_factory.mktemp("bfloat16")
    more = {"zero_stage": stage, "offload": offload, "dtype": "bfloat16"}
    more |= {"micro_batch_tokens": SIZES[0], "init": "random", "config": TINY}
    with started(folder, SETTINGS.model_copy(update=more), num_ranks) as ranks:
        assert ranks.ask("save", folder=folder / "begin" / "0")["ok"]
        make_batch(1, SIZES).save(folder / "one")
        make_batch(2, SIZES).save(folder / "two")
        yield ranks, folder


def from_the_beginning(kind: tuple[Ranks, Path]) -> tuple[Ranks, Path]:
    ranks, folder = kind
    assert ranks.ask("load", folder=folder / "begin" / "0")["num_updates"] == 0
    return kind


def repeated(batch: Batch, times: int) -> Batch:
    arrays = {
        name: np.tile(getattr(batch, name), times)
        for name in ("ids", "mask", "logprobs", "advantages", "weights", "lengths")
    }
    offsets = np.repeat(np.arange(times, dtype=np.int32), len(batch.groups)) * len(batch.groups)
    return Batch(**arrays, groups=np.tile(batch.groups, times) + offsets)


def test_gradients_of_many_micro_batches_add_up(kind: tuple[Ranks, Path]) -> None:
    """Repeating a whole batch many times changes neither its mean loss nor its gradient.

    It would if small addends were rounded away when added to a large sum.
    """
    ranks, folder = from_the_beginning(kind)
    once = ranks.ask("step", batch=folder / "one")
    from_the_beginning(kind)
    repeated(make_batch(1, SIZES), 128).save(folder / "often")
    often = ranks.ask("step", batch=folder / "often")
    assert often["loss"] == pytest.approx(once["loss"], rel=1e-3)
    assert often["grad_norm"] == pytest.approx(once["grad_norm"], rel=5e-3)


def test_training_goes_on_from_a_checkpoint_bit_by_bit(kind: tuple[Ranks, Path]) -> None:
    ranks, folder = from_the_beginning(kind)
    assert ranks.ask("step", batch=folder / "one")["num_updates"] == 1
    assert ranks.ask("save", folder=folder / "save" / "a")["ok"]
    first = ranks.ask("step", batch=folder / "two")
    weights = ranks.ask("publish", folder=folder / "first", version="2")["sha256"]
    assert ranks.ask("load", folder=folder / "save" / "a")["num_updates"] == 1
    again = ranks.ask("step", batch=folder / "two")
    assert (again["loss"], again["grad_norm"]) == (first["loss"], first["grad_norm"])
    assert ranks.ask("publish", folder=folder / "again", version="2")["sha256"] == weights


def test_step_without_a_finite_gradient_is_skipped(kind: tuple[Ranks, Path]) -> None:
    """The next step is as if the skipped one had not happened."""
    ranks, folder = from_the_beginning(kind)
    expected = ranks.ask("step", batch=folder / "one")
    weights = ranks.ask("publish", folder=folder / "moved", version="1")["sha256"]
    from_the_beginning(kind)
    make_batch(1, SIZES, advantages=np.asarray([3e38, 1, -1, 1], np.float32)).save(folder / "bad")
    skipped = ranks.ask("step", batch=folder / "bad")
    assert (skipped["ok"], skipped["skipped"], skipped["num_updates"]) == (True, 1, 0)
    result = ranks.ask("step", batch=folder / "one")
    assert (result["loss"], result["grad_norm"]) == (expected["loss"], expected["grad_norm"])
    assert ranks.ask("publish", folder=folder / "same", version="1")["sha256"] == weights


def test_resetting_the_optimizer_clears_its_moments(kind: tuple[Ranks, Path]) -> None:
    """Without the moments of earlier steps, the next step is as large as the first one."""
    ranks, folder = from_the_beginning(kind)
    ranks.ask("step", batch=folder / "one")
    assert ranks.ask("save", folder=folder / "save" / "one")["ok"]
    ranks.ask("step", batch=folder / "two")
    kept = ranks.ask("publish", folder=folder / "kept", version="2")["sha256"]
    ranks.ask("load", folder=folder / "save" / "one")
    assert ranks.ask("reset_optimizer")["ok"]
    ranks.ask("step", batch=folder / "two")
    anew = ranks.ask("publish", folder=folder / "anew", version="2")["sha256"]
    assert anew != kept


def test_published_differences_give_the_new_weights(kind: tuple[Ranks, Path]) -> None:
    ranks, folder = from_the_beginning(kind)
    before = ranks.ask("publish", folder=folder / "before", version="0")["sha256"]
    ranks.ask("step", batch=folder / "one")
    asked = {"folder": folder / "after", "version": "1", "base": folder / "before"}
    after = ranks.ask("publish", **asked)["sha256"]
    assert json.loads((folder / "after" / "published.json").read_text())["base"] == before
    for name, sha256 in after.items():
        old, difference = folder / "before" / name, folder / "after" / (name + DIFFERENCE)
        assert difference.stat().st_size < old.stat().st_size / 2
        assert apply_difference(old, difference, folder / "made") == sha256
