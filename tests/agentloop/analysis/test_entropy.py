"""Which rollouts are read and scored, which tokens are marked, their kinds, and the statistics."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from agentloop.analysis.entropy import (
    Kind,
    ScoredRollout,
    analyze,
    last_rollouts,
    mark_highest,
    score,
)
from agentloop.errors import DataError
from agentloop.training.learner_client.client import LearnerError
from agentloop.training.run.folder import RunFolder
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

# Few values, so that many are equal.
entropies = st.lists(st.sampled_from([0.0, 0.1, 0.25, 1.5, 2.0]) | st.floats(0, 12), max_size=60)
shares = st.sampled_from([0.05, 0.1, 0.2, 1 / 3, 0.7, 1.0])


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


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Create a run with the groups 9, 10 and 12345678, of a rollout and one without tokens."""
    folder = RunFolder(tmp_path / "run", "")
    for number in (10, 9, 12_345_678):
        rollouts = (rollout(f"{number}.0"), Trajectory(f"{number}.1", [1, 2], [Turn()]))
        folder.add_group(number, [{"trajectory": item.to_dict()} for item in rollouts])
    return folder.path


def test_last_groups_are_read_in_order(run: Path) -> None:
    (run / "trajectories" / ".group-0000011.jsonl.partial").touch()
    assert list(last_rollouts(run)) == [9, 10, 12_345_678]
    assert list(last_rollouts(run, 2)) == [10, 12_345_678]
    assert [item.id for item in last_rollouts(run)[10]] == ["10.0"]


def test_run_without_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokens were sampled"):
        last_rollouts(tmp_path)
    folder = RunFolder(tmp_path / "run", "")
    folder.add_group(1, [{"trajectory": Trajectory("1.0", [1]).to_dict()}])
    with pytest.raises(DataError, match="no tokens were sampled"):
        last_rollouts(folder.path)


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
def test_damaged_line_is_named(run: Path, damage: Any) -> None:
    path = run / "trajectories" / "group-0000009.jsonl"
    row = {"trajectory": rollout().to_dict()}
    line = json.dumps(row)
    damage(row)
    path.write_text(f"{line}\n{json.dumps(row)}\n")
    with pytest.raises(DataError, match=r"group-0000009\.jsonl: line 2: not a rollout"):
        last_rollouts(run)


async def test_each_token_gets_its_own_entropy(tmp_path: Path) -> None:
    learner = Learner(off=-0.5)
    scored = await score(learner, [rollout(), rollout("1.1")], tmp_path, timeout_s=5)
    for item in scored:
        assert item.ids == [5, 6, 7, 3]
        assert item.kinds == [Kind.FORKING, Kind.CALL, Kind.CALL, Kind.REFLECTION]
        assert item.entropies == pytest.approx([0.05, 0.06, 0.07, 0.03])
        assert item.mismatch == pytest.approx([math.exp(-0.5) - 0.5] * 4)
    assert learner.asked[0]["lengths"].tolist() == [8, 8]


async def test_entropies_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match="not finite"):
        await score(Learner(entropy=float("nan")), [rollout()], tmp_path, timeout_s=5)


@given(entropies, shares)
def test_highest_are_marked_up_to_the_share(entropies: list[float], share: float) -> None:
    marks = mark_highest(entropies, share)
    above = [entropy for entropy, mark in zip(entropies, marks, strict=True) if mark]
    below = [entropy for entropy, mark in zip(entropies, marks, strict=True) if not mark]
    assert not above or not below or min(above) >= max(below)
    assert len(above) - 1 < share * len(entropies) + 1e-6
    assert len(above) >= share * len(entropies) - 1e-6


@given(entropies)
def test_ties_are_marked_first_come_first_served(entropies: list[float]) -> None:
    marks = mark_highest([1.0] * len(entropies))
    assert marks == sorted(marks, reverse=True)


def test_share_of_a_round_number_is_round() -> None:
    """0.1 * 30 is 3.0000000000000004."""
    assert [sum(mark_highest([1.0] * num, 0.1)) for num in (0, 1, 10, 11, 30)] == [0, 1, 1, 2, 3]


def scored(ids: list[int], entropies: list[float], kind: Kind = Kind.FORKING) -> ScoredRollout:
    return ScoredRollout(ids, [kind] * len(ids), entropies, [0.0] * len(ids))


def test_each_rollout_has_its_own_share() -> None:
    """A rollout of high entropy everywhere does not take all the marks."""
    sure, unsure = scored([1] * 10, [0.1] * 10), scored([2] * 10, [5.0] * 10)
    tokens = analyze([sure, unsure])[Kind.FORKING].tokens
    assert [(token.id, token.num, token.num_marked) for token in tokens] == [(2, 10, 2), (1, 10, 2)]


def test_kinds_are_counted_separately() -> None:
    text, call = scored([7, 8, 7, 9, 9], [3.0, 0.1, 0.2, 0, 0]), scored([7], [1.0], Kind.CALL)
    figures = analyze([text, call])
    assert [(item.num, item.num_marked) for item in figures.values()] == [(5, 1), (0, 0), (1, 1)]
    (token,) = figures[Kind.FORKING].tokens
    assert (token.id, token.num, token.num_marked, token.mean_entropy) == (7, 2, 1, 3.0)
    assert figures[Kind.FORKING].mean_entropy == pytest.approx(3.3 / 5)
    assert figures[Kind.REFLECTION].mean_entropy == 0
