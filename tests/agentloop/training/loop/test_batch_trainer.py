"""Training steps with a fake learner: batches, metrics, and collapse."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from aiohttp import web

from agentloop.environments.tasks.sources import TaskSource
from agentloop.errors import (
    RunFolderError,
    sole,
)
from agentloop.training.credit.roc import RocSettings
from agentloop.training.credit.settings import CreditSettings
from agentloop.training.loop import batch_trainer, group_buffer, held_out
from agentloop.training.loop.group_buffer import GroupBuffer
from agentloop.training.loop.queue import GroupQueue
from agentloop.training.loop.training_loop import TrainingLoop
from agentloop.training.run.collapse import CollapseSettings, RunCollapsed
from agentloop.trajectory import (
    StopReason,
    Trajectory,
    Turn,
    VersionSpan,
)
from tests.agentloop.training.loop_support import (
    ARITHMETIC,
    FakeRollouts,
    LostLearner,
    query_journal,
    read_lines,
    recorded_rows,
    run_loop,
    undo_to,
)
from tests.fakes import RecordedProgress
from tests.support import FakeSGLang, eventually

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]  # each step is synced to the disk


def last_advantages(batch: Any) -> Any:
    """Return the advantage of the last token of each sample, which is sampled."""
    return batch["advantages"][batch["lengths"].cumsum() - 1]


async def test_each_step_trains_on_the_selected_rollouts(tmp_path: Path) -> None:
    learner, run_group, run = await run_loop(tmp_path, steps=2, evaluate_every=2)
    ops = [op for op, _ in learner.requests]
    assert ops == ["publish", "step", "publish", "step", "publish", "save"]
    assert run_group.sizes == [1] * 4 + [8] * 6 + [1] * 4
    for batch in learner.batches:
        assert batch["lengths"].tolist() == [6] * 12  # four of each of three groups
        assert batch["groups"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
        assert batch["ids"].tolist() == [9, 9, 1, 2, 7, 3] * 12
        assert batch["mask"].tolist() == [0, 0, 1, 1, 0, 1] * 12
        assert batch["logprobs"].tolist()[:6] == [0, 0, -0.5, -0.25, 0, -1]
        for group in range(3):
            mine = last_advantages(batch)[batch["groups"] == group]
            assert abs(mine.sum()) < 1e-5
            assert mine.max() > 0 > mine.min()
    metrics = read_lines(run.path / "metrics.jsonl")
    trained = [row for row in metrics if "reward" in row]
    assert [row["step"] for row in trained] == [1, 2]
    assert trained[0]["reward"] == pytest.approx(4 / 7)  # the broken one has none
    assert trained[0]["num_without_reward"] == 3
    assert trained[0]["num_learned"] == 12
    assert trained[0]["pass_at_k"] == 1.0
    assert trained[0]["learner/loss"] == 0.5
    assert [row["step"] for row in metrics if "held_out/reward" in row] == [0, 2]
    rows = recorded_rows(run, [1, 2, 3])
    assert len(rows) == 24
    assert sum(row["advantage"] is not None for row in rows) == 12
    assert sum(row["dropped"] == "no_reward" for row in rows) == 3
    assert list((run.path / "batches").iterdir()) == []
    assert [path.name for path in (run.path / "weights").iterdir()] == ["2"]


async def test_step_without_a_signal_does_not_call_the_learner(tmp_path: Path) -> None:
    learner, _, run = await run_loop(tmp_path, right=1.0, steps=1, evaluate_every=0)
    assert [op for op, _ in learner.requests] == ["publish", "save"]
    (metrics,) = [row for row in read_lines(run.path / "metrics.jsonl") if "reward" in row]
    assert metrics["num_groups_rejected"] == 3
    assert learner.requests[-1][1]["state"] == {"step": 1, "version": 0}


async def test_three_steps_without_a_signal_are_explained_once(tmp_path: Path) -> None:
    report = RecordedProgress()
    await run_loop(tmp_path, right=1.0, steps=5, evaluate_every=0, report=report)
    (at,) = [n for n, line in enumerate(report.lines) if line.startswith("0 of 3 groups have a")]
    assert ": all rewards are 1; take harder problems" in report.lines[at]
    assert "step 3/5: reward 1.000, a signal in 0 of 3 groups" in report.lines[at - 1]


async def test_batch_does_not_depend_on_the_order_of_finished_groups(tmp_path: Path) -> None:
    batches = []
    for name, order in (("a", [0, 1, 2]), ("b", [2, 0, 1])):
        ended = [anyio.Event() for _ in range(4)]
        ended[3].set()

        class InOrder(FakeRollouts):
            async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
                number = int(options["name"].split("-")[0]) - 1
                place = order.index(number)  # noqa: B023
                await ended[place - 1].wait()  # noqa: B023
                group = await super().__call__(prompt, **options)
                for index, rollout in enumerate(group):
                    rollout.prompt_ids = [number, index]
                ended[place].set()  # noqa: B023
                return group

        tasks = TaskSource.open(ARITHMETIC)
        learner, _, _ = await run_loop(
            tmp_path / name, tasks=tasks, run_group=InOrder(tasks), steps=1, evaluate_every=0
        )
        batches.append({key: array.tolist() for key, array in learner.batches[0].items()})
    assert batches[0] == batches[1]


async def test_rollout_at_the_mean_counts_in_the_objective(tmp_path: Path) -> None:
    """Its advantage is 0, but its tokens count in the mean over its group."""

    def thirds(trajectory: Trajectory, task: object) -> float:
        return int(trajectory.id.rpartition(".")[2]) % 3 / 2

    settings: dict[str, Any] = {
        "group_size": 7,
        "steps": 1,
        "evaluate_every": 0,
    }  # the last one is broken
    roc = RocSettings(down_sample_to_n=0)
    learner, _, _ = await run_loop(tmp_path, reward=thirds, roc=roc, **settings)
    advantages = last_advantages(learner.batches[0]).tolist()
    assert len(advantages) == 18
    assert advantages.count(0.0) == 6


async def test_groups_with_equal_rewards_are_trained_on_unless_rejected(
    tmp_path: Path,
) -> None:
    def of_one_task(trajectory: Trajectory, task: Any) -> float:
        number, index = int(trajectory.id.split("-")[0]), int(trajectory.id.rpartition(".")[2])
        return float(number == 1 and index % 2)

    for rejects, num_samples in ((True, 4), (False, 12)):
        roc = RocSettings(down_sample_to_n=4, reject_equal_reward=rejects)
        learner, _, _ = await run_loop(
            tmp_path / str(rejects), reward=of_one_task, roc=roc, steps=1, evaluate_every=0
        )
        assert len(learner.batches[0]["lengths"]) == num_samples


async def test_rollout_without_sampled_tokens_has_no_reward(tmp_path: Path) -> None:
    class Silent(FakeRollouts):
        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            group = await super().__call__(prompt, **options)
            group[0].turns, group[0].stop_reason = [Turn()], StopReason.TIME_BUDGET
            return group

    tasks = TaskSource.open(ARITHMETIC)
    _, _, run = await run_loop(
        tmp_path, tasks=tasks, run_group=Silent(tasks), steps=1, evaluate_every=0
    )
    (metrics,) = read_lines(run.path / "metrics.jsonl")
    assert metrics["num_without_reward"] == 6


async def test_rollouts_sampled_with_other_weights_have_no_reward(tmp_path: Path) -> None:
    class Mixed(FakeRollouts):
        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            group = await super().__call__(prompt, **options)
            group[0].turns[0].versions = [VersionSpan("0", 0, 2)]
            group[1].turns[0].versions = [VersionSpan("0", 0, 1), VersionSpan("default", 1, 2)]
            return group

    tasks = TaskSource.open(ARITHMETIC)
    _, _, run = await run_loop(
        tmp_path, tasks=tasks, run_group=Mixed(tasks), steps=1, evaluate_every=0
    )
    rows = recorded_rows(run, [1])
    assert [row["reward"] for row in rows[:3]] == [1.0, None, 1.0]
    assert rows[1]["reason"] == "sampled with other weights: default"


async def test_shuffled_rewards_are_a_permutation_of_the_true_ones(tmp_path: Path) -> None:
    learned = []
    for shuffle in (False, True):
        learner, _, run = await run_loop(
            tmp_path / str(shuffle),
            roc=RocSettings(down_sample_to_n=0),
            steps=1,
            credit=CreditSettings(args={"shuffle_rewards": shuffle}),
            evaluate_every=0,
        )
        learned.append(last_advantages(learner.batches[0]).tolist())
        (metrics,) = [row for row in read_lines(run.path / "metrics.jsonl") if "reward" in row]
        assert metrics["reward"] == pytest.approx(4 / 7)
        assert metrics["num_without_reward"] == 3  # what is broken is broken
    straight, shuffled = learned
    assert straight != shuffled
    assert sorted(straight) == sorted(shuffled)


async def test_two_batches_complete_at_once_are_both_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_batch: Any = GroupBuffer.__dict__["has_batch"].fget

    def late(self: GroupBuffer) -> bool:
        """Delay the first batch until there are two."""
        return bool(has_batch(self)) and (bool(numbers) or self.num_finished == 6)

    numbers: list[int] = []
    lease = GroupQueue.lease

    async def leased(self: GroupQueue, step: int, *arguments: Any, **named: Any) -> Any:
        numbers.append(step)
        return await lease(self, step, *arguments, **named)

    monkeypatch.setattr(GroupBuffer, "has_batch", property(late))
    monkeypatch.setattr(GroupQueue, "lease", leased)
    _, _, run = await run_loop(tmp_path, steps=4, max_staleness=1, evaluate_every=0)
    learned = query_journal(run, "SELECT step, number FROM groups ORDER BY step, number")
    assert learned[:6] == [(1, 1), (1, 2), (1, 3), (2, 4), (2, 5), (2, 6)]
    assert [step for step, _ in learned if step is not None] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]


class CollapsingRollouts(FakeRollouts):
    """Fake rollouts that are all wrong from the seventh group on."""

    async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
        self._right = 0.5 if int(options["name"].split("-")[0]) < 7 else 0.0
        return await super().__call__(prompt, **options)


async def test_collapsed_run_ends_with_the_last_good_weights(tmp_path: Path) -> None:
    tasks = TaskSource.open(ARITHMETIC)
    learner = LostLearner("nothing", 1)
    settings: dict[str, Any] = {"steps": 9, "checkpoint_every": 1, "evaluate_every": 0}
    with pytest.raises(ExceptionGroup) as caught:
        await run_loop(
            tmp_path, tasks=tasks, run_group=CollapsingRollouts(tasks), learner=learner,
            collapse=CollapseSettings(window=1, patience=2), **settings,
        )  # fmt: skip
    error = sole(caught.value)
    assert isinstance(error, RunCollapsed)
    assert "--from 1`" in str(error)
    del caught, error
    gc.collect()
    path = tmp_path / "run"
    assert "The last good step was 2" in (path / "collapse.md").read_text()
    assert [entry.name for entry in (path / "weights").iterdir()] == ["1"]
    assert len(learner.learned) == 1

    with pytest.raises(RunFolderError, match=r"no checkpoint of step 7; available: 1, 2, 3"):
        await undo_to(tmp_path, 7)
    assert not (path / "undone").exists()
    tasks = await undo_to(tmp_path, 1)
    settings["steps"] = 3
    again, run_group, run = await run_loop(
        tmp_path, tasks=tasks, restored={"step": 1, "version": 1}, **settings
    )
    assert len(again.batches) == 2
    # The same tasks, rolled out anew.
    assert [name.split("-")[0] for name in run_group.names] == ["4", "5", "6", "7", "8", "9"]
    assert [row["step"] for row in run.metrics()] == [1, 2, 3]
    (undone,) = (path / "undone").iterdir()
    assert {entry.name for entry in undone.iterdir()} >= {"metrics.jsonl", "step-00002"}


async def test_collapse_waits_for_servers_that_are_loading_weights(tmp_path: Path) -> None:
    tasks, run = TaskSource.open(ARITHMETIC), tmp_path / "run"

    class Slow(FakeSGLang):
        """Servers that have not loaded the first step's weights when the collapse is detected."""

        num_read = 0

        async def _update_weights(self, request: web.Request) -> web.Response:
            if self.num_read:
                await eventually(lambda: (run / "collapse.md").exists(), within_s=50)
            self.num_read += 1
            folder = anyio.Path((await request.json())["model_path"])
            has_weights.append(await folder.exists())
            return await super()._update_weights(request)

    has_weights: list[bool] = []
    fake = Slow([5])
    with pytest.raises(ExceptionGroup) as caught:
        await run_loop(
            tmp_path, tasks=tasks, run_group=CollapsingRollouts(tasks), fake=fake,
            learner=LostLearner("nothing", 1), collapse=CollapseSettings(window=1, patience=2),
            steps=9, max_staleness=3, checkpoint_every=1, evaluate_every=0,
        )  # fmt: skip
    assert isinstance(sole(caught.value), RunCollapsed)
    assert len(has_weights) >= 2
    assert all(has_weights)
    assert fake.version == "2"


@pytest.mark.parametrize(("op", "number"), [("load", 1), ("publish", 4)])
async def test_learner_lost_during_a_collapse_still_leaves_the_good_weights(
    tmp_path: Path, op: str, number: int
) -> None:
    tasks, lost = TaskSource.open(ARITHMETIC), LostLearner(op, number)
    with pytest.raises(ExceptionGroup) as caught:
        await run_loop(
            tmp_path, tasks=tasks, run_group=CollapsingRollouts(tasks), learner=lost,
            max_restarts=2, steps=9, collapse=CollapseSettings(window=1, patience=2),
            checkpoint_every=1, evaluate_every=0,
        )  # fmt: skip
    assert isinstance(sole(caught.value), RunCollapsed)
    assert lost.num_starts == 2
    published = [request["version"] for name, request in lost.requests if name == "publish"]
    assert published == ["0", "1", "2", "1"]
    assert [entry.name for entry in (tmp_path / "run" / "weights").iterdir()] == ["1"]
    assert len(lost.learned) == 1  # what it had as it published


class Clock:
    """A clock that only its owner moves."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class TimedRollouts(FakeRollouts):
    """Each batch takes 10 s. The evaluation after step 1 takes longer than the batch beside it."""

    def __init__(self, tasks: TaskSource, clock: Clock) -> None:
        super().__init__(tasks)
        self._clock = clock
        self._loop: TrainingLoop | None = None
        self._num_begun = 0

    async def meanwhile(self, loop: TrainingLoop) -> None:
        self._loop = loop

    async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
        group = await super().__call__(prompt, **options)
        if options["name"].startswith("1-held-out-0"):
            await eventually(lambda: self._loop is not None and self._has_batch(self._loop))
            self._clock.now_s += 500
        elif "held-out" not in options["name"]:
            self._num_begun += 1
            if self._num_begun % 3 == 0:
                self._clock.now_s += 10
        return group

    def _has_batch(self, loop: TrainingLoop) -> bool:
        return loop.view()["queue_groups"] == 3


async def test_evaluation_has_its_own_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, tasks = Clock(), TaskSource.open(ARITHMETIC)
    for module in (batch_trainer, group_buffer, held_out):
        monkeypatch.setattr(module, "time", clock)
    rollouts = TimedRollouts(tasks, clock)
    _, _, run = await run_loop(
        tmp_path,
        tasks=tasks,
        run_group=rollouts,
        meanwhile=rollouts.meanwhile,
        steps=2,
        evaluate_every=1,
    )
    rows = read_lines(run.path / "metrics.jsonl")
    first, second = (row for row in rows if "reward" in row)
    before, between, _ = (row for row in rows if "held_out/reward" in row)
    assert (first["step_s"], before["held_out/evaluate_s"]) == (10, 0)
    # In the 10 s of the second batch, both have sampled.
    evaluation_rate = between["held_out/num_sampled_tokens"] / between["held_out/evaluate_s"]
    batch_rate = second["num_sampled_tokens"] / 10
    assert between["held_out/evaluate_s"] >= 500
    assert second["step_s"] == pytest.approx(10 * batch_rate / (batch_rate + evaluation_rate))
    assert second["wait_s"] == pytest.approx(second["step_s"])
    assert second["rollout_tokens_per_s"] == second["num_sampled_tokens"] / second["step_s"]
