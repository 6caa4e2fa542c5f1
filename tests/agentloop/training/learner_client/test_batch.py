"""The batch file that the learner is given."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("numpy", reason="needs numpy: pip install 'agentloop-rl[train]'")

from agentloop.training.learner_client.batch import Sample, write_batch


class Ids(list[int]):
    """A list that a weak reference can refer to."""


def test_samples_are_not_held_as_lists(tmp_path: Path) -> None:
    """When a sample is taken, at most the one before it still exists."""
    held: list[weakref.ref[Ids]] = []

    def samples() -> Iterator[Sample]:
        for number in range(5):
            assert all(ids() is None for ids in held[:-1])
            ids = Ids([number] * (number + 2))
            held.append(weakref.ref(ids))
            yield Sample(ids, [0] * (number + 1) + [1], [-1.0] * (number + 2), [2.0], number)
            del ids

    write_batch(tmp_path / "batch", samples())
    from agentloop.learner.batch import Batch

    batch = Batch.load(tmp_path / "batch")
    assert batch.lengths.tolist() == [2, 3, 4, 5, 6]
    assert batch.advantages[batch.mask == 1].tolist() == [2.0] * 5
    assert batch.groups.tolist() == [0, 1, 2, 3, 4]


def test_without_samples_nothing_is_written(tmp_path: Path) -> None:
    write_batch(tmp_path / "batch", [])
    assert not [*tmp_path.iterdir()]
