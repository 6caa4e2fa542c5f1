"""The learner's steps: what is asked of it, what stays on disk, and what is repeated."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentloop.environments.tasks.sources import Task
from agentloop.rollouts.metrics import GroupFigures
from agentloop.rollouts.record import ConversationRow, TokenCredit
from agentloop.training.learner_client.client import LearnerLost
from agentloop.training.learner_client.protocol import TrainingState
from agentloop.training.loop.queue import GroupQueue, Lease, StepNotes
from agentloop.training.loop.steps import Steps
from agentloop.training.run.folder import RunFolder
from agentloop.training.run.step_metrics import Learned
from agentloop.trajectory import Trajectory, Turn
from tests.agentloop.training.fake_learner import FakeLearner

NOTES = StepNotes(version=0)


class Recorder(FakeLearner):
    """A learner whose loss is the number of its updates; it is lost where `lost_at` says."""

    def __init__(self) -> None:
        self.ops: list[str] = []
        self.num_samples: list[int] = []
        self.lost_at: int | None = None  # number of the request
        self.num_updates = 0
        self.offset = 0.0
        self.saved: dict[str, tuple[int, Mapping[str, Any]]] = {}

    async def handle(self, op: str, **arguments: Any) -> dict[str, Any]:
        self.ops.append(op)
        if len(self.ops) == self.lost_at:
            raise LearnerLost("killed")
        if op == "step":
            from safetensors.numpy import load

            batch = load(await anyio.Path(arguments["batch"]).read_bytes())
            self.num_samples.append(len(batch["lengths"]))
            self.num_updates += 1
            return {"loss": self.num_updates + self.offset}
        if op == "save":
            await anyio.Path(arguments["folder"]).mkdir(parents=True)
            await (anyio.Path(arguments["folder"]) / "state.json").write_text(
                json.dumps({"state": arguments["state"]})
            )
            self.saved[arguments["folder"]] = self.num_updates, arguments["state"]
        if op == "saved":
            return {"folder": [*self.saved][-1], "writing": None, "failed": None}
        if op == "load":
            self.num_updates, state = self.saved[arguments["folder"]]
            return {"state": state}
        if op == "publish":
            await anyio.Path(arguments["folder"]).mkdir(parents=True, exist_ok=True)
        return {}

    async def restart(self) -> None:
        self.num_updates = 0

    async def wait_lost(self) -> str:
        await anyio.sleep_forever()
        return ""


class Run:
    """A run's journal and folder with a learner."""

    def __init__(self, queue: GroupQueue, folder: RunFolder, learner: Recorder) -> None:
        self.queue = queue
        self.folder = folder
        self.learner = learner
        self.said: list[str] = []

    def steps(self, restored: TrainingState | None = None) -> Steps:
        return Steps(
            self.learner,
            self.queue,
            self.folder,
            restored=restored,
            timeout_s=5,
            say=self.said.append,
            max_restarts=1,
        )

    async def lease(
        self, step: int, advantages: list[float | None], *, of_each: int = 1, **notes: Any
    ) -> Lease:
        """Lease a batch of one group, with these advantages of its conversations.

        Args:
            of_each: number of conversations of each rollout.
        """
        group = await self.queue.admit(Task("t", "?", "1"), version=0, cursor={})
        trajectory = Trajectory("t", [1], [Turn([2], [-0.5])])
        rows = [
            ConversationRow(
                rollout=index // of_each,
                trajectory=trajectory,
                credit=None if advantage is None else TokenCredit(advantage, 1.0),
            )
            for index, advantage in enumerate(advantages)
        ]
        path, num_bytes = self.folder.add_group(group.number, [row.to_dict() for row in rows])
        await self.queue.finish(
            group.number, path=path, num_bytes=num_bytes, figures=GroupFigures()
        )
        return await self.queue.lease(step, [group.number], replace(NOTES, **notes))


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Run]:
    async with GroupQueue.open(folder / "queue.sqlite") as queue:
        yield Run(queue, RunFolder(folder / "run", ""), Recorder())


async def test_step_trains_on_rollouts_with_an_advantage(tmp_path: Path) -> None:
    async with opened(tmp_path) as run:
        steps = run.steps()
        learned = await steps.learn(await run.lease(1, [0.5, None, -0.5, 0.0]))
        assert (learned.num_learned, learned.loss) == (3, 1.0)
        assert (steps.step, steps.version) == (1, 1)
        assert run.learner.num_samples == [3]
        assert list((run.folder.path / "batches").iterdir()) == []
        (lease,) = await run.queue.rewind(0)
        assert lease.result == learned.row()


async def test_rollout_of_several_conversations_counts_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as run:
        lease = await run.lease(1, [0.5, 0.5, -0.5, None], of_each=2)
        assert (await run.steps().learn(lease)).num_learned == 2
        assert run.learner.num_samples == [3]


@pytest.mark.parametrize(
    ("advantages", "notes"), [([0.0, None], {}), ([0.5, -0.5], {"learns": False})]
)
async def test_step_without_a_signal_leaves_the_learner_alone(
    tmp_path: Path, advantages: list[float | None], notes: dict[str, Any]
) -> None:
    async with opened(tmp_path) as run:
        steps = run.steps()
        learned = await steps.learn(await run.lease(1, advantages, **notes))
        assert (learned.num_learned, learned.learner) == (0, {})
        assert (steps.step, steps.version) == (1, 0)
        assert run.learner.ops == []


async def test_optimizer_is_reset_before_the_step(tmp_path: Path) -> None:
    async with opened(tmp_path) as run:
        await run.steps().learn(await run.lease(1, [0.5, -0.5], resets=True))
        assert run.learner.ops == ["reset_optimizer", "step"]


async def test_groups_are_acknowledged_when_their_checkpoint_is_complete(tmp_path: Path) -> None:
    async with opened(tmp_path) as run:
        steps = run.steps()
        await steps.learn(await run.lease(1, [0.5, -0.5]))
        assert await steps.checkpoint()
        assert await run.queue.counts() == {"leased": 1}
        await steps.learn(await run.lease(2, [0.5, -0.5]))  # learns that it is complete
        assert await run.queue.counts() == {"trained": 1, "leased": 1}
        assert await steps.checkpoint(wait=True)
        assert await run.queue.counts() == {"trained": 2}


async def test_lost_learner_repeats_the_steps_since_its_checkpoint(tmp_path: Path) -> None:
    async with opened(tmp_path) as run:
        steps = run.steps()
        await steps.learn(await run.lease(1, [0.5, -0.5]))
        state = {"step": 1, "version": 1}
        assert await steps.checkpoint(wait=True)
        assert [*run.learner.saved.values()] == [(1, state)]
        await steps.learn(await run.lease(2, [0.5, -0.5]))
        run.learner.lost_at = len(run.learner.ops) + 1
        learned = await steps.learn(await run.lease(3, [0.5, -0.5]))
        assert learned.loss == 3.0
        assert run.learner.ops[-4:] == ["step", "load", "step", "step"]
        assert (steps.step, steps.version) == (3, 3)
        assert [line for line in run.said if "loss" in line] == []


async def test_learner_that_moves_repeats_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as run:
        steps = run.steps()
        await steps.move()  # before the first step
        assert run.learner.ops == []
        await steps.learn(await run.lease(1, [0.5, -0.5]))
        await steps.move()
        assert run.learner.ops == ["step", "save", "load"]
        learned = await steps.learn(await run.lease(2, [0.5, -0.5]))
        assert learned.loss == 2.0
        run.learner.lost_at = len(run.learner.ops) + 1
        await steps.move()  # the learner is lost before it can write a checkpoint
        assert run.learner.num_updates == 2


async def test_repeated_step_with_another_loss_is_reported(tmp_path: Path) -> None:
    async with opened(tmp_path) as run:
        await run.steps().learn(await run.lease(1, [0.5, -0.5]))
        run.learner.num_updates, run.learner.offset = 0, 0.25  # another process, other weights
        done: list[tuple[int, float | None]] = []

        async def on_done(lease: Lease, learned: Learned) -> None:
            done.append((lease.step, learned.loss))

        steps = run.steps()
        await steps.repeat_since_checkpoint(on_done)
        assert done == [(1, 1.25)]
        assert (steps.step, steps.version) == (1, 1)
        assert run.said[-1] == "Step 1 had a loss of 1, but of 1.25 when it was repeated"


async def test_only_the_newest_weights_stay(tmp_path: Path) -> None:
    async with opened(tmp_path) as run:
        steps = run.steps()
        await steps.learn(await run.lease(1, [0.5, -0.5]))
        weights = run.folder.path / "weights"
        for name in ("0", "7", "notes"):
            (weights / name).mkdir(parents=True)
        await steps.leave_model()
        assert {path.name for path in weights.iterdir()} == {"1", "notes"}
