"""A training loop with a fake learner and fake rollouts: its requests, state and files."""

from __future__ import annotations

import gc
import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from agentloop.agent.rollout import Budget
from agentloop.environments.rewards.reward import Grader, RewardFunction, RewardSettings
from agentloop.environments.tasks.sources import TaskSource, TasksSettings
from agentloop.events import Emit, ignore
from agentloop.inference.router import Router, RouterSettings
from agentloop.inference.sglang.client import SGLangServer
from agentloop.inference.sglang.control import http_session
from agentloop.rollouts.request import WaitForCapacity
from agentloop.rollouts.runner import GroupRunner
from agentloop.training.credit.roc import RocSettings
from agentloop.training.credit.settings import CreditSettings
from agentloop.training.learner_client.client import LearnerLost
from agentloop.training.learner_client.protocol import TrainingState
from agentloop.training.loop.queue import GroupQueue
from agentloop.training.loop.settings import LoopSettings, StageSettings
from agentloop.training.loop.steps import Steps
from agentloop.training.loop.training_loop import TrainingLoop
from agentloop.training.recovery.undo import undo
from agentloop.training.rollouts import Rollouts
from agentloop.training.run.collapse import CollapseSettings
from agentloop.training.run.context import RunContext
from agentloop.training.run.control import RunControl
from agentloop.training.run.folder import RunFolder
from agentloop.training.run.status import StatusWatch
from agentloop.training.weight_sync.settings import WeightsSettings
from agentloop.training.weight_sync.sync import Served
from agentloop.trajectory import (
    StopReason,
    ToolCall,
    ToolCallStatus,
    ToolResult,
    Trajectory,
    Turn,
    TurnEnd,
)
from tests.agentloop.training.fake_learner import FakeLearner
from tests.fakes import RecordedProgress
from tests.rollouts import GroupPlayer
from tests.support import FakeSGLang

USUAL: dict[str, Any] = {
    "prompts_per_step": 3, "group_size": 8, "evaluate_tasks": 4, "evaluate_every": 0
}  # fmt: skip
ARITHMETIC = TasksSettings(kind="arithmetic", held_out=4)


class RecordingLearner(FakeLearner):
    """A fake learner that records its requests and the contents of the batches."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.batches: list[dict[str, Any]] = []

    async def handle(self, op: str, **arguments: Any) -> dict[str, Any]:
        self.requests.append((op, arguments))
        if op == "step":
            from safetensors.numpy import load

            self.batches.append(load(await anyio.Path(arguments["batch"]).read_bytes()))
            return {"loss": 0.5}
        if op == "saved":
            (last,) = [request["folder"] for name, request in self.requests if name == "save"][-1:]
            return {"folder": last, "writing": None, "failed": None}
        if op == "publish":
            await anyio.Path(arguments["folder"]).mkdir(parents=True, exist_ok=True)
        if op == "layout":
            layout = [{"names": ["norm"], "dtypes": ["float32"], "shapes": [[2]]}]
            await anyio.Path(arguments["out"]).write_text(json.dumps(layout))
            return {"num_updates": len(self.batches), "backend": "gloo"}
        return {}


def trajectory(key: str, text: str, *, failed: bool, broken: bool = False) -> Trajectory:
    call = ToolCall(f"{key}-c", "python", {}, "", 0, 1)
    status = ToolCallStatus.ERROR if failed else ToolCallStatus.OK
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


class FakeRollouts:
    """Fake rollouts: half of a group is right, except in evaluations, and one is broken."""

    def __init__(self, tasks: TaskSource | None = None, *, right: float = 0.5) -> None:
        self.tasks = tasks or TaskSource.open(ARITHMETIC)
        self.sizes: list[int] = []
        self.names: list[str] = []
        self.prompts: list[str] = []
        self.budgets: list[Budget] = []
        self._answers = {task.prompt: task.answer for task in self.tasks.held_out()}
        self._right = right

    async def __call__(
        self, prompt: object, *, size: int, name: str, budget: Budget
    ) -> Sequence[Trajectory]:
        self.sizes.append(size)
        self.prompts.append(str(prompt))
        self.budgets.append(budget)
        self.names.append(name)
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
        remaining, op, right = words[2:5]
        value = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}[op]
        return str(value(int(remaining), int(right)))


async def run_loop(
    folder: Path,
    *,
    right: float = 0.5,
    tasks: TaskSource | None = None,
    run_group: Any = None,
    wait_for_capacity: WaitForCapacity | None = None,
    reward: RewardFunction | None = None,
    roc: RocSettings | None = None,
    fake: FakeSGLang | None = None,
    stages: dict[str, StageSettings] | None = None,
    report: RecordedProgress | None = None,
    weights: WeightsSettings | None = None,
    credit: CreditSettings | None = None,
    learner: RecordingLearner | None = None,
    restored: dict[str, Any] | None = None,
    max_restarts: int = 0,
    lends: bool = False,
    collapse: CollapseSettings | None = None,
    watch: StatusWatch | None = None,
    emit: Emit = ignore,
    meanwhile: Callable[[TrainingLoop], Coroutine[Any, Any, Any]] | None = None,
    **settings: Any,
) -> tuple[RecordingLearner, FakeRollouts, RunFolder]:
    """Run a loop; with `restored`, resume an existing run. `meanwhile` acts on it while it runs.

    With `lends`, servers lend their memory to the learner.
    """
    run_group = run_group or FakeRollouts(tasks, right=right)
    tasks = tasks or getattr(run_group, "tasks", None) or TaskSource.open(ARITHMETIC)
    learner = learner or RecordingLearner()
    run = RunFolder(folder / "run", "" if restored is None else None)
    fake = fake or FakeSGLang([5])
    router_settings = RouterSettings(probe_interval_s=0.01)
    async with fake.serving(), http_session() as session:
        async with (
            Router.open([SGLangServer(fake.url, session)], router_settings) as router,
            Grader(RewardSettings(function="exact"), reward) as grader,
            GroupQueue.open(run.path / "queue.sqlite") as queue,
        ):
            report = report or RecordedProgress()
            context = RunContext(
                LoopSettings(**USUAL | settings),
                tasks,
                Rollouts(
                    GroupRunner(GroupPlayer(run_group), grader, emit=emit),
                    roc or RocSettings(down_sample_to_n=4),
                    credit,
                    seed=0,
                ),
                wait_for_capacity or router.gate.wait_for_capacity,
                queue,
                run,
                report,
                stages=stages or {},
                budget=Budget(max_turns=10, max_response_tokens=100),
                control=RunControl(watch),
            )
            served = Served(router)
            steps = Steps(
                learner,
                queue,
                run,
                restored=TrainingState(**restored) if restored else None,
                timeout_s=60,
                say=report.say,
                max_restarts=max_restarts,
                lending=partial(served.lending, timeout_s=5) if lends else nullcontext,
            )
            loop = TrainingLoop(context, steps, served, weights=weights, collapse=collapse)
            async with anyio.create_task_group() as people:
                if meanwhile is not None:
                    people.start_soon(meanwhile, loop)
                await loop.run()
                people.cancel_scope.cancel()
    assert fake.version == loop.view()["learner_version"]
    return learner, run_group, run


def query_journal(run: RunFolder, query: str) -> list[Any]:
    """Query the run's journal."""
    with closing(sqlite3.connect(run.path / "queue.sqlite")) as db:
        return db.execute(query).fetchall()


def recorded_rows(run: RunFolder, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Return the recorded rollouts of these groups."""
    return [
        row
        for number in numbers
        for row in read_lines(run.path / "trajectories" / f"group-{number:07}.jsonl")
    ]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class KilledRollouts(FakeRollouts):
    """Ends the process with the first group whose name has this prefix."""

    killed_at = ""

    async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
        if options["name"].startswith(self.killed_at):
            raise OSError("killed")
        return await super().__call__(prompt, **options)


async def run_until_failure(folder: Path, **settings: Any) -> None:
    """Run a loop that is expected to fail, and release its folder afterwards."""
    with suppress(ExceptionGroup):
        await run_loop(folder, **settings)
        pytest.fail("it came to its end")
    gc.collect()  # who holds the lock is in the traceback


class GatedRollouts(FakeRollouts):
    """Ends each group on demand."""

    def __init__(self, tasks: TaskSource | None = None) -> None:
        super().__init__(tasks)
        self.may_end: dict[int, anyio.Event] = defaultdict(anyio.Event)

    def let_end(self, first: int = 1, last: int = 99) -> None:
        """Let these groups end, those too that have not begun."""
        for number in range(first, last + 1):
            self.may_end[number].set()

    async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
        group = await super().__call__(prompt, **options)
        await self.may_end[int(options["name"].split("-")[0])].wait()
        return group


class LostLearner(RecordingLearner):
    """A learner that is lost at the n-th request of a kind, and can then be restarted."""

    def __init__(self, op: str, number: int, *, for_good: bool = False) -> None:
        super().__init__()
        self._op, self._left, self._for_good = op, number, for_good
        self._is_lost = False
        self.learned: list[Any] = []
        self.num_starts = 1

    async def restart(self) -> None:
        self._is_lost, self.learned = self._for_good, []
        self.num_starts += 1

    async def wait_lost(self) -> str:
        await anyio.sleep_forever()
        return ""

    async def handle(self, op: str, **arguments: Any) -> dict[str, Any]:
        self._left -= op == self._op
        if self._is_lost or (op == self._op and self._left == 0):
            self._is_lost = True
            raise LearnerLost("rank 1 ended with exit status 137.\nits log")
        answer = await super().handle(op, **arguments)
        folder = anyio.Path(arguments.get("folder", ""))
        if op == "step":
            self.learned.append({k: array.tolist() for k, array in self.batches[-1].items()})
        if op == "save":
            await folder.mkdir(parents=True)
            state = {"state": arguments["state"], "learned": self.learned}
            await (folder / "state.json").write_text(json.dumps(state))
        if op == "load":
            saved = json.loads(await (folder / "state.json").read_text())
            self.learned = saved["learned"]
            return {"state": saved["state"]}
        return answer


async def undo_to(folder: Path, step: int) -> TaskSource:
    """Return the run to the checkpoint of that step, like `--from`; return its tasks."""
    run = RunFolder(folder / "run")
    async with GroupQueue.open(run.path / "queue.sqlite") as queue:
        await undo(run, queue, step)
        cursor = (await queue.cursor())["tasks"]
    return TaskSource.open(ARITHMETIC, cursor)


class MarkedLearner(LostLearner):
    """A learner whose models record their process and their number of steps."""

    def __init__(self, life: str) -> None:
        super().__init__("nothing", 1)
        self.life = life

    async def handle(self, op: str, **arguments: Any) -> dict[str, Any]:
        answer = await super().handle(op, **arguments)
        if op == "publish":
            mark = json.dumps({"life": self.life, "version": arguments["version"]})
            await anyio.Path(arguments["folder"], "config.json").write_text(mark)
        return answer


def published_versions(run: Path) -> list[str]:
    """Return the versions of the weights in the folder."""
    return sorted(entry.name for entry in (run / "weights").iterdir() if entry.is_dir())
