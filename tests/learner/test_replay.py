"""The real learner's steps, repeated from a journal: the weights are the same to the bit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agentloop-rl[train]'")

from agentloop.environments.tasks.sources import Task
from agentloop.models import SMALL
from agentloop.rollouts.metrics import GroupFigures
from agentloop.rollouts.record import ConversationRow, TokenCredit
from agentloop.training.learner_client.client import KeptLearner
from agentloop.training.learner_client.launch import RanksSettings
from agentloop.training.learner_client.settings import LearnerSettings, OptimizerSettings
from agentloop.training.loop.queue import GroupQueue, StepNotes
from agentloop.training.loop.steps import Steps
from agentloop.training.recovery.learner_record import LearnerRecord, record_learner
from agentloop.training.recovery.replay import Replay, ReplayedStep, Replayer
from agentloop.training.recovery.resume import load_newest
from agentloop.training.run.folder import RunFolder
from agentloop.training.run.token_difference import TokenDifferences
from agentloop.training.weight_sync.disk import FolderPublisher
from agentloop.training.weight_sync.settings import WeightsSettings
from agentloop.trajectory import Trajectory, Turn, VersionSpan
from tests.learner.ranks import ROOT, make_batch

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

SETTINGS = LearnerSettings(
    model=SMALL, micro_batch_tokens=128, optimizer=OptimizerSettings(lr=1e-3, warmup_steps=3)
)
RANKS = RanksSettings(threads=2)
TIMEOUT_S = 120.0


def learner(log_dir: Path) -> KeptLearner:
    return KeptLearner(SETTINGS, RANKS, log_dir=log_dir, on_progress=lambda line: None)


def turns_of(ids: list[int], mask: list[int], logprobs: list[float], *, version: str) -> list[Turn]:
    """Return the turns of a sample: tokens that are sampled, and then others."""
    turns: list[Turn] = []
    for position in range(mask.index(1), len(ids)):
        if mask[position]:
            if not mask[position - 1]:
                turns.append(Turn())
            turns[-1].output_ids.append(ids[position])
            turns[-1].logprobs.append(logprobs[position])
        else:
            turns[-1].observation_ids.append(ids[position])
    for turn in turns:
        turn.versions = [VersionSpan(version, 0, len(turn.output_ids))]
    return turns


async def admit_all(queue: GroupQueue, folder: RunFolder, num_steps: int) -> None:
    """Lease a group of random conversations to each step."""
    for step in range(1, num_steps + 1):
        batch, rows, start = make_batch(seed=step), [], 0
        for index, length in enumerate(batch.lengths.tolist()):
            part = slice(start, start + length)
            start += length
            ids, mask = batch.ids[part].tolist(), batch.mask[part].tolist()
            turns = turns_of(ids, mask, batch.logprobs[part].tolist(), version=str(step - 1))
            trajectory = Trajectory(f"{step}.{index}", ids[: mask.index(1)], turns)
            credit = TokenCredit((-1.0) ** index, 1.0)
            rows.append(
                ConversationRow(rollout=index, trajectory=trajectory, credit=credit).to_dict()
            )
        group = await queue.admit(Task(str(step), "?", "1"), version=0, cursor={})
        path, num_bytes = folder.add_group(group.number, rows)
        await queue.finish(group.number, path=path, num_bytes=num_bytes, figures=GroupFigures())
        notes = StepNotes(version=step - 1, resets=step == 4)
        await queue.lease(step, [group.number], notes)


async def live(queue: GroupQueue, folder: RunFolder, *, last: int) -> None:
    """Train up to a step as a run that is resumed, with a checkpoint of step 2."""
    async with learner(folder.path / "logs") as kept:
        restored = await load_newest(kept, folder, timeout_s=TIMEOUT_S)
        after = 0 if restored is None else restored.step
        record = LearnerRecord.of(SETTINGS, RANKS, await kept.about(), after=after)
        await record_learner(queue, record)
        steps = Steps(
            kept, queue, folder, restored=restored, timeout_s=TIMEOUT_S, say=lambda line: None
        )
        publisher = FolderPublisher(kept, folder.path / "weights", WeightsSettings())
        await steps.publish(publisher)
        for lease in await queue.rewind(after):
            if lease.step <= last:
                await steps.learn(lease)
                await steps.publish(publisher)
            if lease.step == 2:
                await steps.checkpoint(wait=True)


async def test_run_of_two_lives_again_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first life ends after step 3, which is not in a checkpoint: the second repeats it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder = RunFolder(tmp_path, "")
    async with GroupQueue.open(tmp_path / "queue.sqlite") as queue:
        await admit_all(queue, folder, 5)
        await live(queue, folder, last=3)
        await live(queue, folder, last=5)

    @asynccontextmanager
    async def start(record: LearnerRecord) -> AsyncIterator[Replayer]:
        assert record.made_with["threads"] == "2"
        async with learner(replay.logs) as kept:
            yield Replayer(kept, SETTINGS.max_sample_tokens)

    result: list[ReplayedStep] = []
    tokens: dict[int, TokenDifferences] = {}
    async with Replay.open(tmp_path) as replay:
        assert await replay.repeat(
            start,
            first=1,
            last=5,
            timeout_s=TIMEOUT_S,
            on_step=result.append,
            on_tokens=tokens.__setitem__,
            say=lambda line: None,
        )
    assert [first.step for first in result] == [0, 1, 2, 3, 4, 5]
    assert all(first.has_same_weights and first.has_same_loss for first in result)
    assert len({first.weights for first in result}) == 6
    assert all(0 < first.mean < first.max for first in tokens.values())
