"""Resuming after a kill or after the learner was lost, with a fake learner."""

from __future__ import annotations

import gc
import itertools
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from agentloop.environments.tasks.sources import TaskSource
from agentloop.errors import sole
from agentloop.rollouts.metrics import GroupFigures
from agentloop.training.learner_client.client import LearnerError
from agentloop.training.loop.queue import GroupQueue
from agentloop.training.run.folder import RunFolder
from agentloop.training.weight_sync.settings import WeightsSettings
from tests.agentloop.training.loop_support import (
    ARITHMETIC,
    GatedRollouts,
    KilledRollouts,
    LostLearner,
    MarkedLearner,
    RecordingLearner,
    published_versions,
    query_journal,
    read_lines,
    run_loop,
    run_until_failure,
)
from tests.fakes import RecordedProgress
from tests.patience import patient
from tests.support import eventually

pytestmark = pytest.mark.timeout(60)  # each step is synced to the disk


async def test_checkpoint_missed_because_of_a_kill_is_written_later(tmp_path: Path) -> None:
    run_group = KilledRollouts()
    run_group.killed_at = "2-held-out"  # before it
    settings: dict[str, Any] = {"steps": 4, "evaluate_every": 2, "checkpoint_every": 2}
    await run_until_failure(tmp_path, run_group=run_group, **settings)
    for name in ("7", ".1.partial", "notes"):  # a kill may leave the first two
        (tmp_path / "run" / "weights" / name).mkdir()
    learner, _, run = await run_loop(tmp_path, restored={"step": 0, "version": 0}, **settings)
    assert {path.name for path in (run.path / "weights").iterdir()} == {"4", "notes"}
    assert [request["state"]["step"] for op, request in learner.requests if op == "save"] == [2, 4]


class DyingLearner(RecordingLearner):
    """A learner that dies in a step, before or after it has trained."""

    def __init__(self, step: int, *, done: bool) -> None:
        super().__init__()
        self._step, self._done = step, done

    async def handle(self, op: str, **arguments: Any) -> dict[str, Any]:
        if op == "step" and len(self.batches) == self._step - 1 and not self._done:
            raise LearnerError("it died")
        answer = await super().handle(op, **arguments)
        if op == "publish" and len(self.batches) == self._step:
            raise LearnerError("it died")
        return answer


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_steps_since_the_checkpoint_are_repeated_after_a_restart(
    tmp_path: Path, done: bool, max_staleness: int
) -> None:
    settings: dict[str, Any] = {"steps": 5, "max_staleness": max_staleness, "checkpoint_every": 2}
    uninterrupted, *_ = await run_loop(tmp_path / "whole", **settings)
    died = DyingLearner(4, done=done)
    with pytest.raises(ExceptionGroup) as caught:
        await run_loop(tmp_path / "died", learner=died, **settings)
    assert str(sole(caught.value)) == "it died"
    del caught
    gc.collect()  # as when a process ends: nobody has the run any more
    state = [request["state"] for op, request in died.requests if op == "save"][-1]
    assert state == {"step": 2, "version": 2}
    async with GroupQueue.open(tmp_path / "died" / "run" / "queue.sqlite") as queue:
        tasks = TaskSource.open(ARITHMETIC, (await queue.cursor())["tasks"])
    again, _, run = await run_loop(
        tmp_path / "died", tasks=tasks, learner=RecordingLearner(), restored=state, **settings
    )
    learned = [*died.batches[:2], *again.batches]
    assert len(learned) == 5
    if not max_staleness:
        for batch, expected in zip(learned, uninterrupted.batches, strict=True):
            assert {key: array.tolist() for key, array in batch.items()} == {
                key: array.tolist() for key, array in expected.items()
            }
    metrics = read_lines(run.path / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5]
    ids = "count(DISTINCT json_extract(task, '$.id'))"
    counted = query_journal(run, f"SELECT step, count(*), {ids} FROM groups GROUP BY step")
    assert counted == [(step, 3, 3) for step in range(1, 6)]


@pytest.mark.parametrize("op", ["step", "publish", "save", "saved"])
@pytest.mark.parametrize("checkpoint_every", [0, 2])
async def test_lost_learner_is_restarted_and_the_training_is_the_same(
    tmp_path: Path, op: str, checkpoint_every: int
) -> None:
    settings: dict[str, Any] = {"steps": 5, "checkpoint_every": checkpoint_every}
    uninterrupted, *_ = await run_loop(tmp_path / "whole", **settings)
    report = RecordedProgress()
    number = {"step": 4, "publish": 5}.get(op, 1)
    lost = LostLearner(op, number)
    _, _, run = await run_loop(
        tmp_path / "lost", learner=lost, max_restarts=2, report=report, **settings
    )
    if op == "saved" and not checkpoint_every:
        assert lost.num_starts == 1  # nothing is written beside the training
        return
    assert lost.num_starts == 2
    undisturbed = [
        {key: array.tolist() for key, array in batch.items()} for batch in uninterrupted.batches
    ]
    assert lost.learned == undisturbed
    metrics = read_lines(run.path / "metrics.jsonl")
    assert [(row["step"], row["version"]) for row in metrics] == [(n, n - 1) for n in range(1, 6)]
    (line,) = [line for line in report.lines if "restarting it" in line]
    assert line == "The learner was lost; restarting it: rank 1 ended with exit status 137."
    assert (run.checkpoint or Path()).name == "step-00005"


async def test_learner_that_is_lost_too_often_ends_the_run(tmp_path: Path) -> None:
    lost = LostLearner("step", 1, for_good=True)
    with pytest.raises(ExceptionGroup) as caught:
        await run_loop(tmp_path, learner=lost, max_restarts=2, steps=1)
    assert "lost too often (ranks.max_restarts)" in str(sole(caught.value))
    assert lost.num_starts == 3


async def test_weights_of_an_earlier_process_are_replaced_with_transport_broadcast(
    tmp_path: Path,
) -> None:
    """A new run in the same folder may find weights of that version, and higher ones."""
    settings: dict[str, Any] = {"weights": WeightsSettings(transport="broadcast")}
    await run_loop(tmp_path, learner=MarkedLearner("first"), steps=1, **settings)
    (tmp_path / "run" / "weights" / "1").rename(tmp_path / "run" / "weights" / "7")
    (tmp_path / "run" / "weights" / "2").mkdir()
    gc.collect()
    learner = MarkedLearner("second")
    _, _, run = await run_loop(
        tmp_path, learner=learner, restored={"step": 0, "version": 0}, steps=2, **settings
    )
    assert published_versions(run.path) == ["2"]
    model = json.loads((run.path / "weights" / "2" / "config.json").read_text())
    assert model == {"life": "second", "version": "2"}


async def test_groups_of_a_larger_batch_do_not_block_a_smaller(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run", "")
    gc.collect()
    tasks = TaskSource.open(ARITHMETIC)
    async with GroupQueue.open(tmp_path / "run" / "queue.sqlite") as queue:
        for task in itertools.islice(tasks, 4):  # of version 0: all are due in the next batch
            group = await queue.admit(task, version=0, cursor={"tasks": tasks.cursor()})
            await queue.finish(group.number, path=None, num_bytes=0, figures=GroupFigures())
    with anyio.fail_after(patient(50)):
        _, run_group, run = await run_loop(
            tmp_path, tasks=tasks, restored={"step": 1, "version": 1}, steps=2,
            prompts_per_step=2, max_staleness=1,
        )  # fmt: skip
    assert {name.split("-")[0] for name in run_group.names} == {"3", "4"}
    assert all(row["staleness_max"] <= 1 for row in read_lines(run.path / "metrics.jsonl"))


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_groups_finished_during_repeated_steps_belong_to_the_next(
    tmp_path: Path, max_staleness: int
) -> None:
    """Groups that finish while steps are repeated belong to the next step."""
    report = RecordedProgress()
    run_group = GatedRollouts()
    run_group.let_end(1, 6)

    class LostMeanwhile(LostLearner):
        """Lost after two steps, while the third one's rollouts run, which end while steps
        are repeated."""

        async def wait_lost(self) -> str:
            await eventually(
                lambda: len(self.batches) == 2 and len(run_group.names) >= 9, within_s=50
            )
            if self.num_starts == 2:
                await anyio.sleep_forever()
            return "rank 1 ended with exit status 137."

        async def handle(self, op: str, **arguments: Any) -> dict[str, Any]:
            if op == "step" and self.num_starts == 2 and len(self.learned) == 1:
                run_group.let_end(7, 19)
                await eventually(taken_up)
            return await super().handle(op, **arguments)

    def taken_up() -> bool:
        """Return whether the third step's groups are finished and leased."""
        with closing(sqlite3.connect(tmp_path / "run" / "queue.sqlite")) as db:
            query = "SELECT count(*) FROM groups WHERE state != 'open'"
            (num_done,) = db.execute(query).fetchone()
        return num_done >= 9 and report.statuses[-1].waits == "the learner is training"

    lost = LostMeanwhile("", 0)
    _, _, run = await run_loop(
        tmp_path,
        run_group=run_group,
        learner=lost,
        max_restarts=2,
        report=report,
        steps=4,
        max_staleness=max_staleness,
    )
    assert lost.num_starts == 2
    assert len(lost.learned) == 4
    metrics = read_lines(run.path / "metrics.jsonl")
    assert [(row["step"], row["version"]) for row in metrics] == [(n, n - 1) for n in range(1, 5)]


async def test_resumed_run_without_learning_still_does_not_learn(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"learn": False}
    await run_loop(tmp_path, steps=2, **settings)
    gc.collect()
    learner, _, run = await run_loop(tmp_path, restored={}, steps=3, **settings)
    assert [op for op, _ in learner.requests] == ["publish"]
    assert [row["step"] for row in read_lines(run.path / "metrics.jsonl")] == [1, 2, 3]
