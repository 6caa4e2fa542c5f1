"""The batch file that the learner is given."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("numpy", reason="needs numpy: pip install 'agentloop-rl[train]'")

from agentloop.learner.batch import Batch, make_micro_batch
from agentloop.token_records import KeptIds, RoutedExperts
from agentloop.training.learner_client.batch import Sample, write_batch
from agentloop.trajectory import Trajectory, Turn


def test_learner_reads_the_samples_that_were_written(tmp_path: Path) -> None:
    samples = [
        Sample([number] * length, [0] * (length - 1) + [1], [-1.0] * length, [2.0], number)
        for number, length in enumerate((2, 3, 4, 5, 6))
    ]
    write_batch(tmp_path / "batch", samples)
    batch = Batch.load(tmp_path / "batch")
    assert batch.lengths.tolist() == [2, 3, 4, 5, 6]
    assert batch.ids.tolist() == [token for sample in samples for token in sample.ids]
    assert batch.advantages[batch.mask == 1].tolist() == [2.0] * 5
    assert batch.groups.tolist() == [0, 1, 2, 3, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["batch"]


def test_learner_reads_the_experts(tmp_path: Path) -> None:
    turns = [
        Turn([5], [-1.0], observation_ids=[6], experts=RoutedExperts(1, 2, bytes([8, 9]))),
        Turn([7, 8], [-1.0, 0.0], experts=RoutedExperts(2, 2, bytes(range(4)))),
    ]
    samples = [Sample.of(Trajectory("t", [3, 4], turns)), Sample([4, 5], [0, 1], [0, -1.0], 1.0, 0)]
    write_batch(tmp_path / "batch", samples)
    batch = Batch.load(tmp_path / "batch")
    assert batch.expert_counts is not None
    assert batch.experts is not None
    assert batch.ids.tolist() == [3, 4, 5, 6, 7, 8, 4, 5]
    assert batch.expert_counts.tolist() == [0, 2, 2, 2, 0, 0, 0, 0]
    assert batch.experts.tolist() == [8, 9, 0, 1, 2, 3]
    fitting = batch.up_to(2)
    assert fitting is not None
    assert fitting.experts is not None
    assert fitting.experts.size == 0
    assert make_micro_batch(fitting, [0], fitting.weights).experts is None


def test_learner_reads_the_kept_ids(tmp_path: Path) -> None:
    kept = KeptIds([[], [5, 8], [6]])
    samples = [
        Sample([4, 5, 6], [0, 1, 1], [0, -1.0, 0], 1.0, 0, kept=kept),
        Sample([4, 5], [0, 1], [0, -1.0], 1.0, 0),  # from before the distribution was cut
    ]
    write_batch(tmp_path / "batch", samples)
    batch = Batch.load(tmp_path / "batch")
    assert batch.kept_counts is not None
    assert batch.kept is not None
    assert batch.kept_counts.tolist() == [0, 2, 1, 0, 0]
    assert batch.kept.tolist() == [5, 8, 6]
    write_batch(tmp_path / "batch", samples[1:])
    assert Batch.load(tmp_path / "batch").kept is None
