"""The training loop with a fake learner: pausing, draining, saving, and its state."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from agentloop.analysis.run_list import RunState, summarize
from agentloop.config import to_toml
from agentloop.environments.tasks.sources import TaskSource
from agentloop.observe.stalls import Stalls
from agentloop.training.loop.queue import GroupQueue
from agentloop.training.loop.settings import LoopSettings, StageSettings
from agentloop.training.loop.training_loop import LoopView, TrainingLoop
from agentloop.training.plan.settings import TrainSettings
from agentloop.training.run.status import Unwatched
from agentloop.training.weight_sync import loop as weight_sync_loop
from agentloop.trajectory import Trajectory
from tests.agentloop.training.loop_support import (
    ARITHMETIC,
    FakeRollouts,
    GatedRollouts,
    LostLearner,
    RecordingLearner,
    query_journal,
    read_lines,
    recorded_rows,
    run_loop,
)
from tests.fakes import RecordedProgress
from tests.patience import patient
from tests.support import eventually

pytestmark = pytest.mark.timeout(60)  # each step is synced to the disk


async def test_last_step_is_saved_once_without_evaluations(tmp_path: Path) -> None:
    learner, run_group, _ = await run_loop(tmp_path, steps=2, checkpoint_every=1)
    assert set(run_group.sizes) == {8}
    assert [op for op, _ in learner.requests].count("save") == 2


class RecordedWaits(Stalls, Unwatched):
    @property
    def reported(self) -> list[tuple[str, str]]:
        return [(wait.rollout_id, wait.what) for wait in self.waits()]


async def test_reported_waits_name_what_is_waited_for(tmp_path: Path) -> None:
    watch, at_evaluation = RecordedWaits(), []
    tasks = TaskSource.open(ARITHMETIC)
    run_group = FakeRollouts(tasks)

    async def run(prompt: object, *, name: str, **options: Any) -> Sequence[Trajectory]:
        if name.startswith("2-held-out"):
            at_evaluation.extend(watch.reported)
        return await run_group(prompt, name=name, **options)

    async def people(loop: TrainingLoop) -> None:
        loop.control.pause()
        await eventually(
            lambda: ("the next task", "the run to be resumed (paused)") in watch.reported
        )
        assert not any("slot" in kind for _, kind in watch.reported)
        loop.control.pause(False)

    await run_loop(
        tmp_path,
        tasks=tasks,
        run_group=run,
        watch=watch,
        steps=2,
        evaluate_every=2,
        meanwhile=people,
    )
    assert ("the learner", "held-out tasks") in at_evaluation
    assert not any("slot" in kind for _, kind in at_evaluation)


async def test_without_learning_only_rollouts_are_written(tmp_path: Path) -> None:
    learner, _, run = await run_loop(tmp_path, steps=2, learn=False)
    assert [op for op, _ in learner.requests] == ["publish"]
    assert len(recorded_rows(run, [4, 5, 6])) == 24


class ThreadHoldingRollouts(FakeRollouts):
    """Occupies all of anyio's default threads, as environments may that block in them."""

    async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
        limiter = anyio.to_thread.current_default_thread_limiter()
        with suppress(anyio.WouldBlock):
            while True:
                limiter.acquire_on_behalf_of_nowait(object())
        return await super().__call__(prompt, **options)


async def test_run_proceeds_while_environments_hold_all_threads(tmp_path: Path) -> None:
    run_group = ThreadHoldingRollouts(TaskSource.open(ARITHMETIC))
    with anyio.fail_after(patient(20)):
        _, _, run = await run_loop(tmp_path, run_group=run_group, steps=2, learn=False)
    assert [row["step"] for row in read_lines(run.path / "metrics.jsonl")] == [1, 2]
    assert len(recorded_rows(run, [4, 5, 6])) == 24


@pytest.mark.parametrize(("right", "has_learned"), [(0.5, True), (1.0, False)])
async def test_run_that_has_learned_nothing_says_why(
    tmp_path: Path, right: float, has_learned: bool
) -> None:
    report = RecordedProgress()
    run_group = FakeRollouts(right=right)
    await run_loop(tmp_path, run_group=run_group, report=report, steps=4)
    assert "\n".join(report.lines).count("have a signal: all rewards are 1") == (not has_learned)


async def wait_until_settled() -> None:
    """Wait until everything that can start has started."""
    for _ in range(20):
        await anyio.wait_all_tasks_blocked()
        await anyio.to_thread.run_sync(lambda: None)


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_paused_run_starts_no_groups_until_it_is_resumed(
    tmp_path: Path, max_staleness: int
) -> None:
    run_group = GatedRollouts()
    num_first = 3 * (max_staleness + 1)

    async def meanwhile(loop: TrainingLoop) -> None:
        await eventually(lambda: len(run_group.names) == num_first)  # as many as there are slots
        loop.control.pause()
        assert loop.view()["paused"]
        run_group.let_end(1, num_first)
        await eventually(lambda: loop.view()["step"] == max_staleness + 1)
        await wait_until_settled()
        assert len(run_group.names) == num_first
        run_group.let_end()
        await wait_until_settled()
        assert (loop.view()["step"], len(run_group.names)) == (max_staleness + 1, num_first)
        loop.control.pause(False)
        await eventually(lambda: len(run_group.names) > num_first)
        assert not loop.view()["paused"]
        await anyio.sleep_forever()

    learner, _, run = await run_loop(
        tmp_path, run_group=run_group, meanwhile=meanwhile, steps=5, max_staleness=max_staleness
    )
    assert len(learner.batches) == 5
    assert [row["step"] for row in read_lines(run.path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def open_rollouts() -> GatedRollouts:
    """Let all groups end."""
    run_group = GatedRollouts()
    run_group.let_end()
    return run_group


async def test_run_paused_while_waiting_for_capacity_starts_no_group(tmp_path: Path) -> None:
    run_group = open_rollouts()
    was_called, has_capacity = anyio.Event(), anyio.Event()

    async def wait_for_capacity(size: int) -> None:
        was_called.set()
        await has_capacity.wait()

    async def meanwhile(loop: TrainingLoop) -> None:
        await was_called.wait()
        loop.control.pause()
        has_capacity.set()
        await wait_until_settled()
        assert run_group.names == []
        assert loop.view()["slots_used"] == 0
        loop.control.pause(False)
        await anyio.sleep_forever()

    learner, *_ = await run_loop(
        tmp_path,
        run_group=run_group,
        wait_for_capacity=wait_for_capacity,
        meanwhile=meanwhile,
        steps=1,
    )
    assert len(learner.batches) == 1


async def test_pause_does_not_count_as_a_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog ends runs that are stalled for hours."""
    monkeypatch.setattr(weight_sync_loop, "_POLL_S", 0.05)
    moved: list[int] = []

    async def meanwhile(loop: TrainingLoop) -> None:
        loop.control.pause()
        await wait_until_settled()
        monkeypatch.setattr(loop.control.watch, "moved", lambda: moved.append(1), raising=False)
        await eventually(lambda: len(moved) > 3)
        loop.control.pause(False)
        await anyio.sleep_forever()

    await run_loop(tmp_path, meanwhile=meanwhile, steps=1)


async def tasks_from_cursor(folder: Path) -> TaskSource:
    """Return the tasks from the position of the run in this folder."""
    async with GroupQueue.open(folder / "run" / "queue.sqlite") as queue:
        return TaskSource.open(ARITHMETIC, (await queue.cursor()).get("tasks"))


@pytest.mark.parametrize("num_filtered", [0, 2])
@pytest.mark.parametrize("drained", [False, True])
async def test_paused_run_filters_no_further_tasks(
    tmp_path: Path, num_filtered: int, drained: bool
) -> None:
    stages = {"hard": StageSettings(steps=1, filter_tasks=4)}
    loops: list[TrainingLoop] = []

    class Pausing(FakeRollouts):
        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            if len(self.names) + 1 == num_filtered:
                loops[0].control.pause()
            return await super().__call__(prompt, **options)

    run_group = Pausing()

    async def meanwhile(loop: TrainingLoop) -> None:
        loops.append(loop)
        if not num_filtered:
            loop.control.pause()
        await eventually(lambda: loop.control.is_paused and len(run_group.names) == num_filtered)
        await wait_until_settled()
        assert len(run_group.names) == num_filtered
        if drained:
            loop.control.drain()
        else:
            loop.control.pause(False)
        await anyio.sleep_forever()

    settings: dict[str, Any] = {"stages": stages}
    learner, _, run = await run_loop(tmp_path, run_group=run_group, meanwhile=meanwhile, **settings)
    if not drained:
        assert (len(learner.batches), run_group.sizes) == (1, [8] * 7)
        return
    assert (len(learner.batches), run_group.sizes) == (0, [8] * num_filtered)
    loops.clear()
    del run
    gc.collect()
    nothing = {"step": 0, "version": 0}
    learner, again, _ = await run_loop(
        tmp_path, tasks=await tasks_from_cursor(tmp_path), restored=nothing, **settings
    )
    assert (len(learner.batches), again.sizes) == (1, [8] * 7)
    assert again.prompts[:num_filtered] == run_group.prompts  # none was left out


@pytest.mark.parametrize("num_begun", [0, 1, 4, 5, 9, 12])
@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("paused", [False, True])
async def test_drained_run_resumes_and_trains_on_each_group_once(
    tmp_path: Path, max_staleness: int, num_begun: int, paused: bool
) -> None:
    run_group, report = GatedRollouts(), RecordedProgress()
    run_group.let_end(1, num_begun)

    async def meanwhile(loop: TrainingLoop) -> None:
        await eventually(lambda: len(run_group.names) >= num_begun)
        if paused:
            loop.control.pause()
        loop.control.drain()
        assert loop.view()["draining"]
        run_group.let_end(num_begun + 1)
        await anyio.sleep_forever()

    settings: dict[str, Any] = {"steps": 5, "max_staleness": max_staleness}
    first, _, run = await run_loop(
        tmp_path, run_group=run_group, report=report, meanwhile=meanwhile, **settings
    )
    (line,) = [line for line in report.lines if line.startswith("Drained")]
    num_learned = len(first.batches)
    assert f"after step {num_learned};" in line
    assert f"agentloop train --resume {run.path}" in line
    assert num_learned < 5 or num_begun == 12  # then all may have begun
    # What has begun has ended: nothing hangs open, and there is a checkpoint of all of it.
    assert query_journal(run, "SELECT count(*) FROM groups WHERE state = 'open'") == [(0,)]
    run.write("config.toml", to_toml(TrainSettings(loop=LoopSettings(steps=5))))
    saves = [request["state"] for op, request in first.requests if op == "save"]
    state = {"step": num_learned, "version": num_learned}
    assert saves == ([state] if num_learned else [])
    del run
    gc.collect()
    is_drained = summarize(tmp_path / "run").state is RunState.DRAINED
    assert is_drained == (num_learned < 5)
    again, _, run = await run_loop(
        tmp_path, tasks=await tasks_from_cursor(tmp_path), restored=state, **settings
    )
    assert len(first.batches) + len(again.batches) == 5
    assert [row["step"] for row in read_lines(run.path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert all(
        row["staleness_max"] <= max_staleness for row in read_lines(run.path / "metrics.jsonl")
    )
    counted = query_journal(
        run, "SELECT count(*), count(DISTINCT json_extract(task, '$.id')) FROM groups"
    )
    assert counted == [(15, 15)]
    query = "SELECT step, count(*) FROM groups GROUP BY step"
    assert query_journal(run, query) == [(step, 3) for step in range(1, 6)]


async def test_run_drained_in_one_stage_does_not_begin_another(tmp_path: Path) -> None:
    run_group = open_rollouts()
    stages = {"one": StageSettings(steps=2), "two": StageSettings(steps=2)}

    async def meanwhile(loop: TrainingLoop) -> None:
        await eventually(lambda: loop.view()["step"] == 1)
        loop.control.drain()
        await anyio.sleep_forever()

    first, _, run = await run_loop(
        tmp_path, run_group=run_group, stages=stages, meanwhile=meanwhile
    )
    assert 1 <= len(first.batches) <= 2
    assert {row["stage"] for row in read_lines(run.path / "metrics.jsonl")} == {1}
    del run
    gc.collect()
    state = [request["state"] for op, request in first.requests if op == "save"][-1]
    _, _, run = await run_loop(
        tmp_path, tasks=await tasks_from_cursor(tmp_path), stages=stages, restored=state
    )
    assert [row["stage"] for row in read_lines(run.path / "metrics.jsonl")] == [1, 1, 2, 2]


async def test_save_starts_a_checkpoint_of_the_last_step(tmp_path: Path) -> None:
    run_group = GatedRollouts()
    run_group.let_end(1, 3)
    saved: list[int] = []

    async def meanwhile(loop: TrainingLoop) -> None:
        await eventually(lambda: len(run_group.names) == 6)  # the second step's
        saved.append(await loop.save())
        saved.append(await loop.save())  # there is one
        run_group.let_end(4)
        await anyio.sleep_forever()

    learner, *_ = await run_loop(tmp_path, run_group=run_group, meanwhile=meanwhile, steps=2)
    assert saved == [1, 1]
    saves = [request for op, request in learner.requests if op == "save"]
    assert [request["state"]["step"] for request in saves] == [1, 2]
    assert [request["beside"] for request in saves] == [True, False]


async def test_save_waits_for_the_current_step(tmp_path: Path) -> None:
    started, may_go_on = anyio.Event(), anyio.Event()
    saved: list[int] = []

    class Slow(RecordingLearner):
        async def handle(self, op: str, **arguments: Any) -> dict[str, Any]:
            if op == "step" and not self.batches:
                started.set()
                await may_go_on.wait()
            return await super().handle(op, **arguments)

    async def meanwhile(loop: TrainingLoop) -> None:
        await started.wait()
        async with anyio.create_task_group() as tasks:

            async def save() -> None:
                saved.append(await loop.save())

            tasks.start_soon(save)
            await wait_until_settled()
            assert saved == []
            may_go_on.set()
        await anyio.sleep_forever()

    learner, *_ = await run_loop(tmp_path, learner=Slow(), meanwhile=meanwhile, steps=2)
    assert saved == [1]
    saves = [request["state"] for op, request in learner.requests if op == "save"]
    assert saves[0] == {"step": 1, "version": 1}


async def test_cancelled_save_does_not_interrupt_the_recovery_of_learner(tmp_path: Path) -> None:
    """This holds even if the learner is lost at that moment and has to repeat steps."""
    uninterrupted, *_ = await run_loop(tmp_path / "whole", steps=4)
    run_group = GatedRollouts()
    run_group.let_end(1, 6)
    restarting, may_go_on = anyio.Event(), anyio.Event()

    class SlowToStart(LostLearner):
        async def restart(self) -> None:
            await super().restart()
            restarting.set()
            await may_go_on.wait()

    lost = SlowToStart("save", 1)

    async def meanwhile(loop: TrainingLoop) -> None:
        await eventually(lambda: len(run_group.names) == 9)  # two steps are done
        async with anyio.create_task_group() as visitors:
            visitors.start_soon(loop.save)
            await restarting.wait()
            visitors.cancel_scope.cancel()
        run_group.let_end(7)
        may_go_on.set()
        await anyio.sleep_forever()

    await run_loop(
        tmp_path / "lost",
        run_group=run_group,
        learner=lost,
        max_restarts=2,
        meanwhile=meanwhile,
        steps=4,
    )
    assert lost.num_starts == 2
    undisturbed = [
        {key: array.tolist() for key, array in batch.items()} for batch in uninterrupted.batches
    ]
    assert lost.learned == undisturbed


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_view_is_plain_data(tmp_path: Path, max_staleness: int) -> None:
    run_group = GatedRollouts()
    views: list[LoopView] = []
    loops: list[TrainingLoop] = []

    async def meanwhile(loop: TrainingLoop) -> None:
        loops.append(loop)
        views.append(loop.view())
        await eventually(lambda: len(run_group.names) == 3 * (max_staleness + 1))
        run_group.may_end[1].set()
        await eventually(lambda: loop.view()["queue_groups"] == 1)
        views.append(loop.view())
        run_group.let_end(2)
        await anyio.sleep_forever()

    await run_loop(
        tmp_path, run_group=run_group, steps=4, max_staleness=max_staleness, meanwhile=meanwhile
    )
    first, amid = views
    assert (first["step"], first["num_steps"], first["slots_used"]) == (0, 4, 0)
    assert amid["slots"] == amid["slots_used"] == 3 * (max_staleness + 1)
    assert (amid["queue_groups"], amid["learner_version"]) == (1, "0")
    assert amid["queue_bytes"] > 0
    assert amid["max_staleness"] == max_staleness
    last = loops[0].view()
    assert (last["step"], last["slots_used"], last["queue_bytes"]) == (4, 0, 0)
    json.dumps([first, amid, last])
