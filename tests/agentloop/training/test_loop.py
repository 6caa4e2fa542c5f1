"""The training loop around a played learner: what it asks for, keeps, and writes down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from agentloop.errors import RequestError
from agentloop.groups.reward import RewardSettings, Scorer
from agentloop.groups.roc import RocSettings
from agentloop.groups.tasks import TaskSource, TasksSettings
from agentloop.inference.router import Router, RouterSettings
from agentloop.inference.sglang import SGLangServer, http_session
from agentloop.training.learner import Learner
from agentloop.training.loop import LoopSettings, TrainingLoop
from agentloop.training.run_folder import RunFolder
from agentloop.trajectory import (
    CallStatus,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    TurnEnd,
)
from tests.support import FakeSGLang

pytestmark = pytest.mark.anyio


class PlayedLearner:
    """Notes what it is asked, and what stands in the batches."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.batches: list[dict[str, Any]] = []

    async def ask(self, op: str, *, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        self.asked.append((op, arguments))
        if op == "step":
            from safetensors.numpy import load

            self.batches.append(load(await anyio.Path(arguments["batch"]).read_bytes()))
            return {"loss": 0.5}
        if op == "publish":
            await anyio.Path(arguments["folder"]).mkdir()
        return {"seconds": 0.1}


def trajectory(key: str, text: str, *, failed: bool, broken: bool = False) -> Trajectory:
    call = ToolCall(f"{key}-c", "python", {}, "", 0, 1)
    status = CallStatus.ERROR if failed else CallStatus.OK
    calling = Turn(
        output_ids=[1, 2],
        logprobs=[-0.5, -0.25],
        end=TurnEnd.STOP,
        calls=[call],
        results=[ToolResult(call.id, "python", status, "", 0, 0, 1)],
        observation_ids=[7],
    )
    last = Turn(output_ids=[3], logprobs=[-1.0], end=TurnEnd.STOP, text=text)
    reason = StopReason.INFRASTRUCTURE if broken else StopReason.ANSWERED
    return Trajectory(key, [9, 9], [calling, last], stop_reason=reason)


class Played:
    """Half of a group is right, unless it is one of an evaluation; one is broken."""

    def __init__(self, tasks: TaskSource, *, right: float = 0.5) -> None:
        self.sizes: list[int] = []
        self._answers = {task.prompt: task.answer for task in tasks.held_out()}
        self._right = right

    async def __call__(
        self, prompt: object, *, size: int, name: str, at_gate: Any
    ) -> Sequence[Trajectory]:
        at_gate()
        self.sizes.append(size)
        answer = self.answer(prompt)
        group = []
        for index in range(size):
            is_right = index < self._right * size
            text = f"\\boxed{{{answer if is_right else answer + 'x'}}}"
            group.append(trajectory(f"{name}.{index}", text, failed=bool(index % 2)))
        if size > 1:
            group[-1] = trajectory(f"{name}.{size - 1}", "", failed=False, broken=True)
        return group

    def answer(self, prompt: object) -> str:
        words = str(prompt).rstrip("?").split()
        left, op, right = words[2:5]
        value = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}[op]
        return str(value(int(left), int(right)))


async def played(
    folder: Path, *, right: float = 0.5, **settings: Any
) -> tuple[PlayedLearner, Played, RunFolder]:
    tasks = TaskSource.open(TasksSettings(kind="arithmetic", held_out=4))
    run_group = Played(tasks, right=right)
    learner = PlayedLearner()
    run = RunFolder(folder / "run", "")
    fake = FakeSGLang([5])
    async with fake.serving(), http_session() as session:
        async with (
            Router.open([SGLangServer(fake.url, session)], RouterSettings()) as router,
            Scorer(RewardSettings(function="exact")) as scorer,
        ):
            loop = TrainingLoop(
                LoopSettings(tasks_per_step=3, group_size=8, evaluate_tasks=4, **settings),
                RocSettings(down_sample_to_n=4),
                run_group=run_group,
                router=router,
                learner=cast(Learner, learner),
                scorer=scorer,
                tasks=tasks,
                folder=run,
                progress=lambda line: None,
            )
            await loop.run()
    assert fake.version == str(settings["steps"] if learner.batches else 0)
    return learner, run_group, run


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_each_step_learns_from_what_was_kept(tmp_path: Path) -> None:
    learner, run_group, run = await played(tmp_path, steps=2, evaluate_every=2)
    ops = [op for op, _ in learner.asked]
    assert ops == ["publish", "step", "publish", "step", "publish", "save"]
    assert run_group.sizes == [1] * 4 + [8] * 6 + [1] * 4
    for batch in learner.batches:
        assert batch["lengths"].tolist() == [6] * 12  # four of each of three groups
        assert batch["groups"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
        assert batch["ids"].tolist() == [9, 9, 1, 2, 7, 3] * 12
        assert batch["mask"].tolist() == [0, 0, 1, 1, 0, 1] * 12
        assert batch["logprobs"].tolist()[:6] == [0, 0, -0.5, -0.25, 0, -1]
        for group in range(3):
            mine = batch["advantages"][batch["groups"] == group]
            assert abs(mine.sum()) < 1e-5
            assert mine.max() > 0 > mine.min()
    metrics = lines(run.path / "metrics.jsonl")
    trained = [one for one in metrics if "reward" in one]
    assert [one["step"] for one in trained] == [1, 2]
    assert trained[0]["reward"] == pytest.approx(4 / 7)  # the broken one has none
    assert trained[0]["num_without_reward"] == 3
    assert trained[0]["num_kept"] == 12
    assert trained[0]["learner/loss"] == 0.5
    assert [one["step"] for one in metrics if "held_out/reward" in one] == [0, 2]
    rows = lines(run.path / "trajectories" / "step-00001.jsonl")
    assert len(rows) == 24
    assert sum(row["advantage"] is not None for row in rows) == 12
    assert sum(row["dropped"] == "infrastructure" for row in rows) == 3
    assert list((run.path / "batches").iterdir()) == []
    assert [path.name for path in (run.path / "weights").iterdir()] == ["2"]


async def test_a_step_that_teaches_nothing_asks_nothing(tmp_path: Path) -> None:
    learner, _, run = await played(tmp_path, right=1.0, steps=1, evaluate_every=0)
    assert [op for op, _ in learner.asked] == ["publish", "save"]
    (metrics,) = [one for one in lines(run.path / "metrics.jsonl") if "reward" in one]
    assert metrics["num_groups_rejected"] == 3
    state = learner.asked[-1][1]["state"]
    assert state["step"] == 1
    assert state["cursor"]["position"] == 3


async def test_a_task_that_cannot_be_asked_ends_the_run(tmp_path: Path) -> None:
    class Refused(Played):
        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            raise RequestError("messages: they make 9000 tokens")

    tasks = TaskSource.open(TasksSettings(kind="arithmetic", held_out=1))
    fake = FakeSGLang([5])
    async with fake.serving(), http_session() as session:
        async with Router.open([SGLangServer(fake.url, session)], RouterSettings()) as router:
            loop = TrainingLoop(
                LoopSettings(steps=1),
                RocSettings(),
                run_group=Refused(tasks),
                router=router,
                learner=cast(Learner, PlayedLearner()),
                scorer=Scorer(RewardSettings(function="exact")),
                tasks=tasks,
                folder=RunFolder(tmp_path / "run", ""),
                progress=lambda line: None,
            )
            with pytest.raises(RequestError, match="9000 tokens"):
                await loop.run()
