"""Replays of a run: which steps are the same, which learner does them, and what is missing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.environments.tasks.sources import Task
from agentloop.errors import RunFolderError
from agentloop.rollouts.metrics import GroupFigures
from agentloop.rollouts.record import ConversationRow, TokenCredit
from agentloop.training.learner_client.client import LearnerLost
from agentloop.training.learner_client.launch import RanksSettings
from agentloop.training.learner_client.protocol import ReadyReply
from agentloop.training.learner_client.settings import LearnerSettings
from agentloop.training.loop.queue import GroupQueue, StepNotes
from agentloop.training.loop.steps import Steps
from agentloop.training.recovery.learner_record import (
    LearnerRecord,
    learner_records,
    record_learner,
)
from agentloop.training.recovery.replay import Replay, ReplayedStep, Replayer, step_ranges
from agentloop.training.recovery.resume import load_newest
from agentloop.training.run.folder import RunFolder
from agentloop.training.run.token_difference import TokenDifferences
from agentloop.training.weight_sync.disk import FolderPublisher
from agentloop.training.weight_sync.settings import WeightsSettings
from agentloop.trajectory import Trajectory, Turn, VersionSpan
from tests.agentloop.training.fake_learner import FakeLearner

READY = ReadyReply(
    num_ranks=1, device="cpu", num_parameters=1, num_trained=1, made_with={"torch": "2"}
)


def record(after: int, seed: int = 0) -> LearnerRecord:
    return LearnerRecord.of(LearnerSettings(seed=seed), RanksSettings(), READY, after=after)


class Lineage(FakeLearner):
    """A learner whose weights are a digest of its seed and of all batches, in order."""

    def __init__(self, seed: int = 0, *, lost_at: int | None = None) -> None:
        self.seed = seed
        self.weights = "start"
        self.num_steps = 0
        self.lost_at = lost_at

    async def handle(self, op: str, **arguments: Any) -> dict[str, Any]:
        if op == "step":
            self.num_steps += 1
            if self.num_steps == self.lost_at:
                raise LearnerLost("killed")
            batch = await anyio.Path(arguments["batch"]).read_bytes()
            made = f"{self.seed} {self.weights}".encode() + batch
            self.weights = hashlib.sha256(made).hexdigest()
            return {"loss": int(self.weights[:6], 16) / 1e6}
        if op == "save":
            folder = anyio.Path(arguments["folder"])
            await folder.mkdir(parents=True)
            state = {"state": arguments["state"], "weights": self.weights}
            await (folder / "state.json").write_text(json.dumps(state))
        if op == "load":
            saved = json.loads(await (anyio.Path(arguments["folder"]) / "state.json").read_bytes())
            self.weights = saved["weights"]
            return {"state": saved["state"]}
        if op == "publish":
            await anyio.Path(arguments["folder"]).mkdir(parents=True, exist_ok=True)
            return {"sha256": {"model.safetensors": self.weights}}
        if op == "logprobs":
            from safetensors.numpy import load, save

            arrays = load(await anyio.Path(arguments["batch"]).read_bytes())
            scores = {"logprobs": arrays["logprobs"] - arrays["mask"] / 4}
            await anyio.Path(arguments["out"]).write_bytes(save(scores))
        return {}


async def train(
    run: Path, first: int, last: int, *, seed: int = 0, lost_at: int | None = None
) -> None:
    """Go on with a run as `agentloop train` does, with a learner that checkpoints every 2 steps."""
    async with GroupQueue.open(run / "queue.sqlite") as queue:
        folder, learner = RunFolder(run, ""), Lineage(seed, lost_at=lost_at)
        restored = await load_newest(learner, folder, timeout_s=5)
        after = 0 if restored is None else restored.step
        await record_learner(queue, record(after, seed))
        steps = Steps(learner, queue, folder, restored=restored, timeout_s=5, say=lambda line: None)
        publisher = FolderPublisher(learner, run / "weights", WeightsSettings())

        async def nothing(*_: object) -> None:
            pass

        await steps.repeat_since_checkpoint(nothing)
        await steps.publish(publisher)
        for step in range(first, last + 1):
            await steps.learn(await lease(queue, folder, step))
            await steps.publish(publisher)
            if step % 2 == 0:
                await steps.checkpoint(wait=True)


async def lease(queue: GroupQueue, folder: RunFolder, step: int) -> Any:
    if leased := [single for single in await queue.rewind(step - 1) if single.step == step]:
        return leased[0]
    group = await queue.admit(Task("t", "?", "1"), version=0, cursor={})
    versions = [VersionSpan("0", 0, 1), VersionSpan(str(step - 1), 1, 2)]
    rows = [
        ConversationRow(
            rollout=index,
            trajectory=Trajectory(
                f"{step}.{index}", [step], [Turn([2, 3], [-0.5, -0.25], versions)]
            ),
            credit=TokenCredit(advantage, 1.0),
        ).to_dict()
        for index, advantage in enumerate([0.5, -0.5])
    ]
    path, num_bytes = folder.add_group(group.number, rows)
    await queue.finish(group.number, path=path, num_bytes=num_bytes, figures=GroupFigures())
    notes = StepNotes(version=step - 1)
    return await queue.lease(step, [group.number], notes)


class Repeated:
    """What a replay tells."""

    def __init__(self) -> None:
        self.steps: list[ReplayedStep] = []
        self.tokens: dict[int, TokenDifferences] = {}
        self.learners: list[LearnerRecord] = []
        self.said: list[str] = []

    @asynccontextmanager
    async def start(self, record: LearnerRecord) -> AsyncIterator[Replayer]:
        self.learners.append(record)
        yield Replayer(
            Lineage(LearnerSettings.model_validate(record.settings).seed), max_tokens=100
        )

    async def all_of(self, run: Path, first: int = 1, last: int | None = None) -> bool:
        async with Replay.open(run) as replay:
            return await replay.repeat(
                self.start,
                first=first,
                last=last or replay.last,
                timeout_s=5,
                on_step=self.steps.append,
                on_tokens=self.tokens.__setitem__,
                say=self.said.append,
            )


async def test_all_steps_of_a_killed_run_are_the_same(tmp_path: Path) -> None:
    await train(tmp_path, 1, 2)
    with pytest.raises(LearnerLost):  # step 4 is leased, and not trained on
        await train(tmp_path, 3, 5, lost_at=2)
    await train(tmp_path, 5, 5)
    before = (tmp_path / "queue.sqlite").read_bytes()
    repeated = Repeated()
    assert await repeated.all_of(tmp_path)
    assert [single.step for single in repeated.steps] == [0, 1, 2, 3, 4, 5]
    assert all(single.has_same_loss for single in repeated.steps)
    assert all(single.has_same_weights for single in repeated.steps if single.step not in (4,))
    assert repeated.learners == [record(0)]
    assert (tmp_path / "queue.sqlite").read_bytes() == before
    assert not list((tmp_path / "replay" / "weights").iterdir())
    assert (tmp_path / "trajectories" / "group-0000001.jsonl").exists()


async def test_first_step_that_differs_ends_it(tmp_path: Path) -> None:
    await train(tmp_path, 1, 3)
    file = tmp_path / "trajectories" / "group-0000002.jsonl"
    file.write_text(file.read_text().replace('"advantages":0.5', '"advantages":0.25'))
    repeated = Repeated()
    assert not await repeated.all_of(tmp_path)
    *same, last = repeated.steps
    assert [single.differs for single in same] == [False, False]
    assert (last.step, last.has_same_loss, last.has_same_weights) == (2, False, False)


async def test_other_settings_are_used_from_where_the_run_used_them(tmp_path: Path) -> None:
    await train(tmp_path, 1, 3)
    await train(tmp_path, 4, 4, seed=1)  # from the checkpoint of step 2: repeats step 3
    repeated = Repeated()
    assert await repeated.all_of(tmp_path)
    assert repeated.learners == [record(0), record(2, seed=1)]
    assert [single.step for single in repeated.steps] == [0, 1, 2, 3, 4]
    assert all(single.has_same_weights is not False for single in repeated.steps)


async def test_single_step_is_repeated_from_the_checkpoint_before_it(tmp_path: Path) -> None:
    await train(tmp_path, 1, 5)
    repeated = Repeated()
    assert await repeated.all_of(tmp_path, 4, 4)
    assert [single.step for single in repeated.steps] == [2, 3, 4]
    assert all(single.has_same_weights for single in repeated.steps)
    result = repeated.tokens[4]
    assert list(repeated.tokens) == [4]
    assert (result.num, result.mean, result.p99, result.max) == (4, 0.25, 0.25, 0.25)
    assert result.versions == {"0": 2, "3": 2}
    assert result.worst[0].before == (4,)


async def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no journal"):
        await Repeated().all_of(tmp_path)
    assert not await anyio.Path(tmp_path / "replay").exists()
    await train(tmp_path, 1, 2)
    with pytest.raises(RunFolderError, match="has the steps 1 to 2, not 2 to 3"):
        await Repeated().all_of(tmp_path, 2, 3)
    (tmp_path / "trajectories" / "group-0000002.jsonl").unlink()
    repeated = Repeated()
    with pytest.raises(RunFolderError, match=r"step 2 needs .*group-0000002\.jsonl.*missing"):
        await repeated.all_of(tmp_path)
    assert repeated.learners == []


async def test_weights_are_not_compared_where_the_run_has_no_digests(tmp_path: Path) -> None:
    await train(tmp_path, 1, 2)
    async with GroupQueue.open(tmp_path / "queue.sqlite") as queue:
        for key in ("weights 0", "weights 1", "weights 2"):
            await queue.note(key, None)
    repeated = Repeated()
    assert await repeated.all_of(tmp_path)
    assert {single.has_same_weights for single in repeated.steps} == {None}


async def test_undone_steps_leave_no_digest(tmp_path: Path) -> None:
    async with GroupQueue.open(tmp_path / "queue.sqlite") as queue:
        for step in (1, 2, 10):
            await queue.note(f"weights {step}", "digest")
        await queue.undo(1)
        noted = {step: await queue.read_note(f"weights {step}") for step in (1, 2, 10)}
    assert noted == {1: "digest", 2: None, 10: None}


async def test_learner_is_recorded_where_it_changes(tmp_path: Path) -> None:
    async with GroupQueue.open(tmp_path / "queue.sqlite") as queue:
        for after, seed in ((0, 0), (4, 0), (6, 1), (8, 1), (6, 2), (2, 2)):
            await record_learner(queue, record(after, seed))
            if (after, seed) == (8, 1):
                assert await learner_records(queue) == [record(0), record(6, 1)]
        assert await learner_records(queue) == [record(0), record(2, 2)]


@given(st.sets(st.integers(0, 12)).map(sorted), st.integers(1, 10), st.integers(0, 10))
def test_segments_cover_all_steps_with_the_learner_of_each(
    started: list[int], first: int, num: int
) -> None:
    started = sorted({0, *started})
    last = first + num
    result = step_ranges([record(after) for after in started], first, last)
    steps = [step for single in result for step in range(single.first, single.last + 1)]
    assert steps == list(range(first, last + 1))
    for single in result:
        for step in range(single.first, single.last + 1):
            assert single.learner.after == max(after for after in started if after < step)


def test_recorded_learner_has_the_model_of_today() -> None:
    current = LearnerSettings(model=Path("/here"), seed=7)
    made = record(0, seed=3).learner(current)
    assert (made.model, made.seed) == (Path("/here"), 3)
    second = record(0).model_copy(update={"settings": {"unheard_of": 1}})
    with pytest.raises(RunFolderError, match="unheard_of"):
        second.learner(current)
