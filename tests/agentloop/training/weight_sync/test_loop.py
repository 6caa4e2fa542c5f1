"""Keeping servers on the newest weights during a run, with a fake learner."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from agentloop.environments.tasks.sources import TaskSource
from agentloop.errors import RequestError
from agentloop.training.weight_sync.settings import WeightsSettings
from agentloop.trajectory import Trajectory
from tests.agentloop.training.loop_support import (
    ARITHMETIC,
    FakeRollouts,
    LostLearner,
    read_lines,
    run_loop,
)
from tests.support import FakeSGLang, eventually

pytestmark = pytest.mark.timeout(60)  # each step is synced to the disk


async def test_transport_broadcast_sends_weights_in_a_process_group(tmp_path: Path) -> None:
    weights = WeightsSettings(transport="broadcast")
    learner, _, run = await run_loop(tmp_path, steps=1, weights=weights)
    sent = ["layout", "open", "join", "send", "leave"]
    # At the end the model stays in the run's folder.
    assert [op for op, _ in learner.requests] == [*sent, "step", *sent, "save", "publish"]
    updates = [request["num_updates"] for op, request in learner.requests if op == "send"]
    assert updates == [0, 1]
    (metrics,) = [row for row in read_lines(run.path / "metrics.jsonl") if "reward" in row]
    assert metrics["weights/num_servers"] == 1


@pytest.mark.parametrize("fails", [False, True])
async def test_run_removes_its_weights_from_an_external_folder(tmp_path: Path, fails: bool) -> None:
    shared = tmp_path / "shared"
    weights = WeightsSettings(folder=shared)
    observed: list[Path] = []

    async def rollouts(*arguments: Any, **named: Any) -> Any:
        observed.extend(shared.iterdir())
        raise RequestError("no such tool")

    run_group = rollouts if fails else None
    with pytest.raises(ExceptionGroup) if fails else nullcontext():  # of the router
        await run_loop(
            tmp_path, run_group=run_group, weights=weights, steps=1, prompts_per_step=1,
        )  # fmt: skip
    assert bool(observed) == fails
    assert list(shared.iterdir()) == []


async def test_restarted_server_gets_the_weights_while_rollouts_wait(tmp_path: Path) -> None:
    fake = FakeSGLang([5])

    class Waiting(FakeRollouts):
        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            if not self.sizes:
                fake.version = "default"  # it was started again
                await eventually(lambda: fake.version == "0")
            return await super().__call__(prompt, **options)

    tasks = TaskSource.open(ARITHMETIC)
    learner, _, _ = await run_loop(
        tmp_path, tasks=tasks, run_group=Waiting(tasks), fake=fake, steps=1
    )
    assert len(learner.batches) == 1


async def test_learner_lost_while_sending_to_restarted_server_is_restarted(tmp_path: Path) -> None:
    fake, tasks = FakeSGLang([5]), TaskSource.open(ARITHMETIC)

    class LostToo(LostLearner):
        async def wait_lost(self) -> str:
            await eventually(lambda: self._is_lost, within_s=50)
            return "rank 1 ended with exit status 137."

    class Waiting(FakeRollouts):
        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            if not self.sizes:
                fake.version = "default"  # it was started again
                await eventually(lambda: fake.version == "0")
            return await super().__call__(prompt, **options)

    lost = LostToo("join", 2)  # the first is as the run begins
    await run_loop(
        tmp_path,
        tasks=tasks,
        run_group=Waiting(tasks),
        fake=fake,
        learner=lost,
        max_restarts=2,
        weights=WeightsSettings(transport="broadcast"),
        steps=1,
        prompts_per_step=1,
    )
    assert lost.num_starts == 2
    assert len(lost.learned) == 1
