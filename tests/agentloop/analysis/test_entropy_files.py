"""The entropies of rollouts on disk: computed by a learner, cached, and read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from agentloop.analysis.entropy_files import (
    EntropyFolder,
    GroupScores,
    Origin,
    RecordedRollout,
    group_files,
    read_rollouts,
    score,
)
from agentloop.errors import DataError, RunFolderError
from agentloop.training.learner_client.client import LearnerError, LearnerRefused
from agentloop.training.run_folder import RunFolder
from agentloop.trajectory import (
    ToolCall,
    ToolCallStatus,
    ToolResult,
    Trajectory,
    Turn,
    TurnEnd,
    VersionSpan,
)
from tests.agentloop.training.fake_learner import FakeLearner

ORIGIN = Origin("/weights/2", "abc", "2", 1.0)


def rollout(name: str = "1.0") -> Trajectory:
    """Create a rollout that makes a call, gets a result, and is then cut off at once."""
    called = Turn(
        output_ids=[5, 6, 7],
        logprobs=[-0.5, -1.0, -1.5],
        versions=[VersionSpan("1", 0, 1), VersionSpan("2", 1, 3)],
        end=TurnEnd.STOP,
        calls=[ToolCall("c", "python", {}, "", 1, 3)],
        results=[ToolResult("c", "python", ToolCallStatus.OK, "4", 0, 0, 0)],
        observation_ids=[8, 9],
    )
    answered = Turn([3], [-2.0], [VersionSpan("2", 0, 1)], TurnEnd.STOP)
    return Trajectory(name, [1, 2], [called, answered, Turn()])


def group(folder: Path, *rollouts: Trajectory, number: int = 1) -> Path:
    """Write a group of a run as training does."""
    (folder / "trajectories").mkdir(parents=True, exist_ok=True)
    path = folder / "trajectories" / f"group-{number:07}.jsonl"
    rows = [{"task": "t", "reward": 1.0, "trajectory": rollout.to_dict()} for rollout in rollouts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Learner(FakeLearner):
    """A fake learner: entropies are a hundredth of the ids, log-probabilities the engine's plus
    `off`."""

    def __init__(self, off: float = 0.0, entropy: float | None = None) -> None:
        self.off, self.entropy = off, entropy
        self.asked: list[dict[str, Any]] = []

    async def handle(self, op: str, **arguments: Any) -> dict[str, Any]:
        assert op == "logprobs"
        batch = load_file(arguments["batch"])
        self.asked.append(batch)
        mask = batch["mask"].astype(np.float32)
        entropies = batch["ids"].astype(np.float32) / 100
        if self.entropy is not None:
            entropies = np.full_like(entropies, self.entropy)
        logprobs = batch["logprobs"] + np.float32(self.off)
        save_file({"logprobs": logprobs * mask, "entropies": entropies * mask}, arguments["out"])
        return {}


def test_groups_are_found_by_number(tmp_path: Path) -> None:
    for number in (10, 9, 12_345_678):
        group(tmp_path, number=number)
    (tmp_path / "trajectories" / ".group-0000011.jsonl.partial").touch()
    (tmp_path / "trajectories" / "group-all.jsonl").touch()
    assert list(group_files(tmp_path)) == [9, 10, 12_345_678]


def test_a_rollout_is_read_as_training_writes_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", "")
    folder.add_group(3, [{"trajectory": rollout().to_dict()}])
    (read,) = read_rollouts(group_files(folder.path)[3])
    assert (read.id, read.versions) == ("1.0", {"1": 1, "2": 3})
    assert read.ids == [1, 2, 5, 6, 7, 8, 9, 3]
    assert read.sampled_logprobs == [-0.5, -1.0, -1.5, -2.0]
    assert [turn.after_result for turn in read.turns] == [False, True, False]
    assert [tuple(turn.calls) for turn in read.turns] == [((1, 3),), (), ()]


@pytest.mark.parametrize(
    "damage",
    [
        lambda row: row.pop("trajectory"),
        lambda row: row["trajectory"].pop("turns"),
        lambda row: row["trajectory"]["turns"][0]["logprobs"].pop(),
        lambda row: row["trajectory"]["turns"][0].update(output_ids=[1]),
        lambda row: row["trajectory"].update(turns=[None]),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, damage: Any) -> None:
    path = group(tmp_path, rollout(), rollout())
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    damage(rows[1])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"group-0000001\.jsonl: line 2: not a rollout"):
        read_rollouts(path)


@pytest.mark.anyio
async def test_each_token_gets_its_own(tmp_path: Path) -> None:
    empty = Trajectory("1.1", [1, 2], [Turn()])  # it waited too long
    rollouts = read_rollouts(group(tmp_path, rollout(), empty, rollout("1.2")))
    learner = Learner(off=-0.5)
    scores = await score(learner, rollouts, tmp_path, timeout_s=5)
    entropies = [[0.05, 0.06, 0.07], [0.03], []]
    assert scores.entropies == [entropies, [[]], entropies]
    assert scores.mismatch_kl == pytest.approx(np.exp(-0.5) - 0.5)
    assert learner.asked[0]["lengths"].tolist() == [8, 8]
    assert names_in(tmp_path) == ["trajectories"]


@pytest.mark.anyio
async def test_the_learner_is_not_asked_if_nothing_was_sampled(tmp_path: Path) -> None:
    rollouts = read_rollouts(group(tmp_path, Trajectory("1.0", [1, 2], [])))
    assert await score(Learner(), rollouts, tmp_path, timeout_s=5) == GroupScores([[]], 0.0)


@pytest.mark.anyio
async def test_entropies_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    rollouts = read_rollouts(group(tmp_path, rollout()))
    with pytest.raises(LearnerError, match="not finite"):
        await score(Learner(entropy=float("nan")), rollouts, tmp_path, timeout_s=5)


@pytest.mark.anyio
async def test_a_refusal_leaves_no_files(tmp_path: Path) -> None:
    class Refuses(FakeLearner):
        async def handle(self, op: str, **arguments: Any) -> dict[str, Any]:
            raise LearnerRefused("no")

    rollouts = read_rollouts(group(tmp_path, rollout()))
    with pytest.raises(LearnerRefused):
        await score(Refuses(), rollouts, tmp_path, timeout_s=5)
    assert names_in(tmp_path) == ["trajectories"]


@pytest.fixture
def rollouts(tmp_path: Path) -> list[RecordedRollout]:
    return read_rollouts(group(tmp_path, rollout(), rollout("1.1")))


def test_saved_entropies_are_loaded_again(tmp_path: Path, rollouts: list[RecordedRollout]) -> None:
    """The file has the form that the page reads: a line for each rollout, by its id."""
    folder = EntropyFolder(tmp_path)
    scores = GroupScores([[[0.1, 0.2, 0.3], [0.4], []]] * 2, 0.25)
    assert folder.load(1, rollouts, ORIGIN) is None
    folder.save(1, rollouts, ORIGIN, scores)
    folder.save(2, rollouts, ORIGIN, scores)
    assert folder.load(1, rollouts, ORIGIN) == scores
    lines = (tmp_path / "entropy" / "group-0000001.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"id": "1.0", "entropies": [[0.1, 0.2, 0.3], [0.4], []]},
        {"id": "1.1", "entropies": [[0.1, 0.2, 0.3], [0.4], []]},
    ]


def test_entropies_of_other_weights_or_rollouts_are_not_used(
    tmp_path: Path, rollouts: list[RecordedRollout]
) -> None:
    folder = EntropyFolder(tmp_path)
    folder.save(1, rollouts, ORIGIN, GroupScores([[[0.1, 0.2, 0.3], [0.4], []]] * 2, 0.25))
    other_origin = Origin("/weights/2", "other weights there", "2", 1.0)
    assert folder.load(1, rollouts, other_origin) is None
    assert folder.load(2, rollouts, ORIGIN) is None
    assert folder.load(1, rollouts[::-1], ORIGIN) is None
    assert folder.load(1, rollouts[:1], ORIGIN) is None


@pytest.mark.parametrize("name", ["group-0000001.jsonl", "about.json"])
@pytest.mark.parametrize("damage", [b"", b"[1]\n", b"{", b'{"1": {}}', b'{"id": "1.0"}\n'])
def test_damaged_entropies_are_computed_again(
    tmp_path: Path, rollouts: list[RecordedRollout], name: str, damage: bytes
) -> None:
    folder = EntropyFolder(tmp_path)
    scores = GroupScores([[[0.1, 0.2, 0.3], [0.4], []]] * 2, 0.25)
    folder.save(1, rollouts, ORIGIN, scores)
    (tmp_path / "entropy" / name).write_bytes(damage)
    assert folder.load(1, rollouts, ORIGIN) is None
    folder.save(1, rollouts, ORIGIN, scores)
    assert folder.load(1, rollouts, ORIGIN) == scores


def test_a_place_that_cannot_be_written_is_named(
    tmp_path: Path, rollouts: list[RecordedRollout]
) -> None:
    (tmp_path / "entropy").touch()
    with pytest.raises(RunFolderError, match="entropy"):
        EntropyFolder(tmp_path).save(1, rollouts, ORIGIN, GroupScores([[], []], 0.0))


def test_other_weights_in_the_same_place_are_others(tmp_path: Path) -> None:
    def origin() -> Origin:
        return Origin.of(tmp_path, version="2", temperature=1.0)

    (tmp_path / "model.safetensors").write_bytes(b"one")
    files = origin()
    assert origin() == files
    (tmp_path / "model.safetensors").write_bytes(b"others")
    assert origin() != files
    (tmp_path / "published.json").write_text('{"sha256": {"model.safetensors": "1"}}')
    published = origin()
    assert origin() == published != files
    (tmp_path / "published.json").write_text('{"sha256": {"model.safetensors": "2"}}')
    assert origin() != published
