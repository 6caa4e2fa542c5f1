"""The training loop with a fake learner: its requests, state and files."""

from __future__ import annotations

import gc
import itertools
import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, closing, nullcontext, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from aiohttp import web

from agentloop.agent.formats.values import decode_call
from agentloop.agent.rollout import Budget
from agentloop.analysis.run_list import RunState, summarize
from agentloop.cli.runs.export import find
from agentloop.cli.train import TrainSettings
from agentloop.config import to_toml
from agentloop.environments.rewards.reward import Grader, RewardFunction, RewardSettings
from agentloop.environments.tasks.mixed import MixedTasks
from agentloop.environments.tasks.sources import TaskSource, TasksSettings
from agentloop.errors import (
    EnvironmentFailed,
    ModelError,
    RequestError,
    RunFolderError,
    ServerError,
    leaves,
    sole,
)
from agentloop.events import Emit, Event, GroupFinished, GroupStarted, ignore
from agentloop.inference.router import Router, RouterSettings
from agentloop.inference.sglang.client import SGLangServer
from agentloop.inference.sglang.control import http_session
from agentloop.observe.stalls import Stalls
from agentloop.rollouts.metrics import GroupFigures
from agentloop.rollouts.runner import GroupRunner
from agentloop.training.collapse import CollapseSettings, RunCollapsed
from agentloop.training.credit.roc import RocSettings
from agentloop.training.credit.settings import CreditSettings
from agentloop.training.group_buffer import GroupBuffer
from agentloop.training.learner_client.client import LearnerError, LearnerLost
from agentloop.training.learner_client.protocol import TrainingState
from agentloop.training.loop import TrainingLoop
from agentloop.training.loop_settings import LoopSettings, StageSettings
from agentloop.training.queue import GroupQueue
from agentloop.training.rollouts import Rollouts
from agentloop.training.run_context import RunContext
from agentloop.training.run_control import RunControl
from agentloop.training.run_folder import RunFolder
from agentloop.training.run_status import RunStatus, StatusWatch, Unwatched
from agentloop.training.staleness import Slots
from agentloop.training.steps import Steps
from agentloop.training.undo import undo
from agentloop.training.weight_sync import loop as weight_sync_loop
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
    VersionSpan,
)
from tests.agentloop.training.fake_learner import FakeLearner
from tests.patience import patient
from tests.rollouts import GroupPlayer
from tests.support import FakeSGLang, eventually

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]  # each step is synced to the disk


class Told:
    """Records reports."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.statuses: list[RunStatus] = []

    def __call__(self, line: str) -> None:
        pass

    def say(self, line: str) -> None:
        self.lines.append(line)

    def show(self, status: RunStatus) -> None:
        self.statuses.append(status)


class PlayedLearner(FakeLearner):
    """A fake learner that records its requests and the contents of the batches."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.batches: list[dict[str, Any]] = []

    async def handle(self, op: str, **arguments: Any) -> dict[str, Any]:
        self.asked.append((op, arguments))
        if op == "step":
            from safetensors.numpy import load

            self.batches.append(load(await anyio.Path(arguments["batch"]).read_bytes()))
            return {"loss": 0.5}
        if op == "saved":
            (last,) = [asked["folder"] for name, asked in self.asked if name == "save"][-1:]
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


class Played:
    """Fake rollouts: half of a group is right, except in evaluations, and one is broken."""

    def __init__(self, tasks: TaskSource, *, right: float = 0.5) -> None:
        self.sizes: list[int] = []
        self.names: list[str] = []
        self.prompts: list[str] = []
        self.budgets: list[Budget] = []
        self._answers = {task.prompt: task.answer for task in tasks.held_out()}
        self._right = right

    async def __call__(
        self, prompt: object, *, size: int, name: str, budget: Budget, on_queued: Any
    ) -> Sequence[Trajectory]:
        on_queued()
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
        left, op, right = words[2:5]
        value = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}[op]
        return str(value(int(left), int(right)))


ARITHMETIC = TasksSettings(kind="arithmetic", held_out=4)


def of_samples(batch: Any) -> Any:
    """Return the advantage of the last token of each sample, which is sampled."""
    return batch["advantages"][batch["lengths"].cumsum() - 1]


async def played(
    folder: Path,
    *,
    right: float = 0.5,
    tasks: TaskSource | None = None,
    run_group: Any = None,
    reward: RewardFunction | None = None,
    roc: RocSettings | None = None,
    fake: FakeSGLang | None = None,
    stages: dict[str, StageSettings] | None = None,
    told: Told | None = None,
    weights: WeightsSettings | None = None,
    credit: CreditSettings | None = None,
    learner: PlayedLearner | None = None,
    restored: dict[str, Any] | None = None,
    max_restarts: int = 0,
    collapse: CollapseSettings | None = None,
    watch: StatusWatch | None = None,
    emit: Emit = ignore,
    meanwhile: Callable[[TrainingLoop], Coroutine[Any, Any, Any]] | None = None,
    **settings: Any,
) -> tuple[PlayedLearner, Played, RunFolder]:
    """Run a loop; with `restored`, resume an existing run. `meanwhile` acts on it while it runs."""
    tasks = tasks or TaskSource.open(ARITHMETIC)
    run_group = run_group or Played(tasks, right=right)
    learner = learner or PlayedLearner()
    run = RunFolder(folder / "run", "" if restored is None else None)
    fake = fake or FakeSGLang([5])
    router_settings = RouterSettings(probe_interval_s=0.01)
    async with fake.serving(), http_session() as session, AsyncExitStack() as opened:
        async with (
            Router.open([SGLangServer(fake.url, session)], router_settings) as router,
            Grader(RewardSettings(function="exact"), reward) as grader,
        ):
            queue = await opened.enter_async_context(GroupQueue.open(run.path / "queue.sqlite"))
            report = told or Told()
            context = RunContext(
                LoopSettings(
                    **{"prompts_per_step": 3, "group_size": 8, "evaluate_tasks": 4} | settings
                ),
                tasks,
                Rollouts(
                    GroupRunner(
                        GroupPlayer(run_group, router.wait_for_capacity), grader, emit=emit
                    ),
                    roc or RocSettings(down_sample_to_n=4),
                    credit,
                    seed=0,
                ),
                queue,
                run,
                report,
                stages=stages or {},
                budget=Budget(max_turns=10, max_response_tokens=100),
                control=RunControl(watch),
            )
            steps = Steps(
                learner,
                queue,
                run,
                restored=TrainingState(**restored) if restored else None,
                timeout_s=60,
                say=report.say,
                max_restarts=max_restarts,
            )
            loop = TrainingLoop(context, steps, Served(router), weights=weights, collapse=collapse)
            async with anyio.create_task_group() as people:
                if meanwhile is not None:
                    people.start_soon(meanwhile, loop)
                await loop.run()
                people.cancel_scope.cancel()
    assert fake.version == str(loop.version)
    return learner, run_group, run


def asked(run: RunFolder, query: str) -> list[Any]:
    """Query the run's journal."""
    with closing(sqlite3.connect(run.path / "queue.sqlite")) as db:
        return db.execute(query).fetchall()


def groups(run: RunFolder, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Return the recorded rollouts of these groups."""
    return [
        row
        for number in numbers
        for row in lines(run.path / "trajectories" / f"group-{number:07}.jsonl")
    ]


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
            mine = of_samples(batch)[batch["groups"] == group]
            assert abs(mine.sum()) < 1e-5
            assert mine.max() > 0 > mine.min()
    metrics = lines(run.path / "metrics.jsonl")
    trained = [one for one in metrics if "reward" in one]
    assert [one["step"] for one in trained] == [1, 2]
    assert trained[0]["reward"] == pytest.approx(4 / 7)  # the broken one has none
    assert trained[0]["num_without_reward"] == 3
    assert trained[0]["num_learned"] == 12
    assert trained[0]["pass_at_k"] == 1.0
    assert trained[0]["learner/loss"] == 0.5
    assert [one["step"] for one in metrics if "held_out/reward" in one] == [0, 2]
    rows = groups(run, [1, 2, 3])
    assert len(rows) == 24
    assert sum(row["advantage"] is not None for row in rows) == 12
    assert sum(row["dropped"] == "infrastructure" for row in rows) == 3
    assert list((run.path / "batches").iterdir()) == []
    assert [path.name for path in (run.path / "weights").iterdir()] == ["2"]


async def test_weights_go_by_group_where_that_is_asked_for(tmp_path: Path) -> None:
    weights = WeightsSettings(transport="group")
    learner, _, run = await played(tmp_path, steps=1, evaluate_every=0, weights=weights)
    sent = ["layout", "open", "join", "send", "leave"]
    # At the end the model stays in the run's folder.
    assert [op for op, _ in learner.asked] == [*sent, "step", *sent, "save", "publish"]
    updates = [asked["num_updates"] for op, asked in learner.asked if op == "send"]
    assert updates == [0, 1]
    (metrics,) = [one for one in lines(run.path / "metrics.jsonl") if "reward" in one]
    assert metrics["weights/num_servers"] == 1


@pytest.mark.parametrize("fails", [False, True])
async def test_a_run_leaves_no_weights_elsewhere(tmp_path: Path, fails: bool) -> None:
    shared = tmp_path / "shared"
    weights = WeightsSettings(folder=shared)
    seen: list[Path] = []

    async def rollouts(*arguments: Any, **named: Any) -> Any:
        seen.extend(shared.iterdir())
        raise RequestError("no such tool")

    run_group = rollouts if fails else None
    with pytest.raises(ExceptionGroup) if fails else nullcontext():  # of the router
        await played(
            tmp_path, run_group=run_group, weights=weights, steps=1, prompts_per_step=1,
            evaluate_every=0,
        )  # fmt: skip
    assert bool(seen) == fails
    assert list(shared.iterdir()) == []


async def test_a_step_that_teaches_nothing_asks_nothing(tmp_path: Path) -> None:
    learner, _, run = await played(tmp_path, right=1.0, steps=1, evaluate_every=0)
    assert [op for op, _ in learner.asked] == ["publish", "save"]
    (metrics,) = [one for one in lines(run.path / "metrics.jsonl") if "reward" in one]
    assert metrics["num_groups_rejected"] == 3
    assert learner.asked[-1][1]["state"] == {"step": 1, "version": 0}


async def test_without_evaluations_there_are_none_and_the_end_is_saved_once(
    tmp_path: Path,
) -> None:
    learner, run_group, _ = await played(tmp_path, steps=2, evaluate_every=0, checkpoint_every=1)
    assert set(run_group.sizes) == {8}
    assert [op for op, _ in learner.asked].count("save") == 2


async def test_no_steps_only_evaluate(tmp_path: Path) -> None:
    learner, run_group, run = await played(tmp_path, steps=0, evaluate_every=0)
    assert [op for op, _ in learner.asked] == ["publish"]
    assert run_group.sizes == [1] * 4
    (metrics,) = lines(run.path / "metrics.jsonl")
    assert metrics["held_out/reward"] == 1.0


async def test_a_task_that_comes_twice_in_a_step_is_two_groups(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"problem": "What is 1 plus 2?", "answer": "3"}\r\n')
    tasks = TaskSource.open(TasksSettings(kind="jsonl", paths=[file]))
    learner, run_group, _ = await played(tmp_path, tasks=tasks, steps=1)
    assert len(set(run_group.names)) == 3
    assert learner.batches[0]["groups"].tolist() == [0] * 4 + [1] * 4 + [2] * 4


async def test_what_is_chosen_does_not_depend_on_who_is_first(tmp_path: Path) -> None:
    batches = []
    for name, order in (("a", [0, 1, 2]), ("b", [2, 0, 1])):
        ended = [anyio.Event() for _ in range(4)]
        ended[3].set()

        class InOrder(Played):
            async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
                options["on_queued"]()
                number = int(options["name"].split("-")[0]) - 1
                place = order.index(number)  # noqa: B023
                await ended[place - 1].wait()  # noqa: B023
                found = await super().__call__(prompt, **options | {"on_queued": lambda: None})
                for index, one in enumerate(found):
                    one.prompt_ids = [number, index]
                ended[place].set()  # noqa: B023
                return found

        tasks = TaskSource.open(ARITHMETIC)
        learner, _, _ = await played(
            tmp_path / name, tasks=tasks, run_group=InOrder(tasks), steps=1, evaluate_every=0
        )
        batches.append({key: array.tolist() for key, array in learner.batches[0].items()})
    assert batches[0] == batches[1]


async def test_a_rollout_at_the_mean_counts_in_the_objective(tmp_path: Path) -> None:
    """Its advantage is 0, but its tokens count in the mean over its group."""

    def thirds(trajectory: Trajectory, task: object) -> float:
        return int(trajectory.id.rpartition(".")[2]) % 3 / 2

    settings: dict[str, Any] = {
        "group_size": 7,
        "steps": 1,
        "evaluate_every": 0,
    }  # the last one is broken
    roc = RocSettings(down_sample_to_n=0)
    learner, _, _ = await played(tmp_path, reward=thirds, roc=roc, **settings)
    advantages = of_samples(learner.batches[0]).tolist()
    assert len(advantages) == 18
    assert advantages.count(0.0) == 6


async def test_groups_without_a_difference_count_where_they_are_not_rejected(
    tmp_path: Path,
) -> None:
    def of_one_task(trajectory: Trajectory, task: Any) -> float:
        number, index = int(trajectory.id.split("-")[0]), int(trajectory.id.rpartition(".")[2])
        return float(number == 1 and index % 2)

    for rejects, num_samples in ((True, 4), (False, 12)):
        roc = RocSettings(down_sample_to_n=4, reject_equal_reward=rejects)
        learner, _, _ = await played(
            tmp_path / str(rejects), reward=of_one_task, roc=roc, steps=1, evaluate_every=0
        )
        assert len(learner.batches[0]["lengths"]) == num_samples


async def test_no_call_of_a_model_ends_a_run(tmp_path: Path) -> None:
    numbers = ["7" * 400, "1e999, 99999999999999999999", "NaN", "[" * 150 + "]" * 150, '"\\ud800"']

    class Odd(Played):
        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            found = await super().__call__(prompt, **options)
            for one, number in zip(found, numbers, strict=False):
                raw = f'{{"name": "python", "arguments": {{"n": [{number}]}}}}'
                name, arguments, error = decode_call(raw)
                one.turns[0].calls = [ToolCall("c", name, arguments, raw, 0, 1, error)]
            return found

    tasks = TaskSource.open(ARITHMETIC)
    learner, _, run = await played(
        tmp_path, tasks=tasks, run_group=Odd(tasks), steps=1, evaluate_every=0
    )
    assert len(learner.batches[0]["lengths"]) == 12
    first, second, *_ = groups(run, [1])
    assert first["trajectory"]["turns"][0]["calls"][0]["arguments"] == {"n": [int(numbers[0])]}
    assert "too large" in second["trajectory"]["turns"][0]["calls"][0]["error"]


async def test_a_run_that_such_a_call_had_ended_goes_on(tmp_path: Path) -> None:
    """Such runs wrote infinity as Python does, and could not read it again."""
    settings: dict[str, Any] = {"steps": 1, "evaluate_every": 0}
    with pytest.raises(ExceptionGroup):
        await played(tmp_path, learner=Dies(1, done=False), **settings)
    gc.collect()
    file = tmp_path / "run" / "trajectories" / "group-0000001.jsonl"
    n = f'"arguments": {{"n": Infinity, "m": {"7" * 400}}}'
    text = file.read_text()
    file.write_text(text.replace('"arguments":{}', n))
    assert file.read_text() != text
    learner, _, _ = await played(tmp_path, restored={"step": 0, "version": 0}, **settings)
    assert len(learner.batches) == 1


async def test_a_rollout_that_never_spoke_has_no_reward(tmp_path: Path) -> None:
    class Silent(Played):
        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            found = await super().__call__(prompt, **options)
            found[0].turns, found[0].stop_reason = [Turn()], StopReason.TIME_BUDGET
            return found

    tasks = TaskSource.open(ARITHMETIC)
    _, _, run = await played(
        tmp_path, tasks=tasks, run_group=Silent(tasks), steps=1, evaluate_every=0
    )
    (metrics,) = lines(run.path / "metrics.jsonl")
    assert metrics["num_without_reward"] == 6


async def test_what_was_sampled_with_other_weights_has_no_reward(tmp_path: Path) -> None:
    class Mixed(Played):
        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            found = await super().__call__(prompt, **options)
            found[0].turns[0].versions = [VersionSpan("0", 0, 2)]
            found[1].turns[0].versions = [VersionSpan("0", 0, 1), VersionSpan("default", 1, 2)]
            return found

    tasks = TaskSource.open(ARITHMETIC)
    _, _, run = await played(
        tmp_path, tasks=tasks, run_group=Mixed(tasks), steps=1, evaluate_every=0
    )
    rows = groups(run, [1])
    assert [row["reward"] for row in rows[:3]] == [1.0, None, 1.0]
    assert rows[1]["reason"] == "sampled with other weights: default"


async def test_a_server_that_comes_back_is_given_the_weights_while_rollouts_wait(
    tmp_path: Path,
) -> None:
    fake = FakeSGLang([5])

    class Waiting(Played):
        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            if not self.sizes:
                fake.version = "default"  # it was started again
                await eventually(lambda: fake.version == "0")
            return await super().__call__(prompt, **options)

    tasks = TaskSource.open(ARITHMETIC)
    learner, _, _ = await played(
        tmp_path, tasks=tasks, run_group=Waiting(tasks), fake=fake, steps=1, evaluate_every=0
    )
    assert len(learner.batches) == 1


async def test_an_outage_ends_the_run_with_its_cause_and_uses_up_no_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentloop.training.rollouts._FIRST_PAUSE_S", 0)

    class Broken(Played):
        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            found = await super().__call__(prompt, **options)
            for one in found:
                one.stop_reason, one.error = StopReason.INFRASTRUCTURE, "the sandbox is gone"
            return found

    tasks = TaskSource.open(ARITHMETIC)
    with pytest.raises(ExceptionGroup) as caught:
        await played(tmp_path, tasks=tasks, run_group=Broken(tasks), steps=1, evaluate_every=0)
    error = next(leaves(caught.value))
    assert isinstance(error, ServerError)
    assert "lost 5 times in a row: infrastructure: the sandbox is gone" in str(error)
    # The same tasks are trained on when the run is resumed.
    learner, _, run = await played(
        tmp_path, tasks=tasks, run_group=Played(tasks), steps=1, evaluate_every=0
    )
    assert len(learner.batches) == 1
    (numbers,) = [{row["group"] for row in groups(run, [1, 2, 3])}]
    assert numbers == {1, 2, 3}


class Refusing(Played):
    """Refuses some prompts as too long."""

    refuses = 1  # of three, in each step

    async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
        if int(options["name"].split("-")[0]) <= self.refuses:
            raise RequestError("messages: they make 9000 tokens")
        return await super().__call__(prompt, **options)


async def test_a_task_that_cannot_be_asked_is_left_out(tmp_path: Path) -> None:
    tasks, told = TaskSource.open(ARITHMETIC), Told()
    learner, _, run = await played(
        tmp_path, tasks=tasks, run_group=Refusing(tasks), told=told, steps=1, evaluate_every=0
    )
    assert len(learner.batches[0]["lengths"]) == 8
    assert len(groups(run, [2, 3])) == 16
    (said,) = [line for line in told.lines if line.startswith("Skipped task")]
    assert "9000 tokens" in said


async def test_tasks_that_all_cannot_be_asked_end_the_run(tmp_path: Path) -> None:
    tasks = TaskSource.open(ARITHMETIC)
    run_group = Refusing(tasks)
    run_group.refuses = 3
    with pytest.raises(ExceptionGroup) as caught:  # by the router around it
        await played(tmp_path, tasks=tasks, run_group=run_group, steps=1, evaluate_every=0)
    assert "9000 tokens (3 tasks in a row refused)" in str(sole(caught.value))


async def test_of_several_environments_one_that_always_fails_ends_the_run_with_its_name(
    tmp_path: Path,
) -> None:
    sources = {name: TaskSource.open(ARITHMETIC) for name in ("good", "bad")}
    tasks = MixedTasks(sources, {"good": 1, "bad": 1})

    class OneFails(Played):
        async def __call__(self, prompt: object, *, name: str, **options: Any) -> Any:
            if "-bad-" in name:
                raise EnvironmentFailed("environment bad: the judge's key has expired")
            return await super().__call__(prompt, name=name, **options)

    with pytest.raises(ExceptionGroup) as caught:
        await played(
            tmp_path, tasks=tasks, run_group=OneFails(sources["good"]), steps=9, evaluate_every=0
        )
    assert "key has expired (3 tasks of bad in a row refused)" in str(sole(caught.value))


async def test_a_group_is_of_the_weights_that_are_live_when_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If new weights go live while the group is recorded, the recorded version would make it
    too stale for the batch that may take it."""
    came, admit, now_live = anyio.Event(), GroupQueue.admit, Slots.now_live

    async def slow(self: GroupQueue, *arguments: Any, **named: Any) -> Any:
        group = await admit(self, *arguments, **named)
        if group.number == 6:
            await came.wait()
        return group

    def tell(self: Slots, version: int) -> None:
        now_live(self, version)
        if version == 1:
            came.set()

    monkeypatch.setattr(GroupQueue, "admit", slow)
    monkeypatch.setattr(Slots, "now_live", tell)
    _, _, run = await played(tmp_path, steps=3, max_staleness=1, evaluate_every=0)
    with closing(sqlite3.connect(run.path / "queue.sqlite")) as db:
        query = "SELECT version FROM groups WHERE number IN (1, 6) ORDER BY number"
        assert db.execute(query).fetchall() == [(0,), (1,)]


class Killed(Played):
    """Ends the process with the first group whose name has this prefix."""

    last = ""

    async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
        if options["name"].startswith(self.last):
            raise OSError("killed")
        return await super().__call__(prompt, **options)


async def ended(folder: Path, **settings: Any) -> None:
    """Run a loop that is expected to fail, and release its folder afterwards."""
    with suppress(ExceptionGroup):
        await played(folder, **settings)
        pytest.fail("it came to its end")
    gc.collect()  # who holds the lock is in the traceback


@pytest.mark.parametrize(("last", "again"), [("0-held-out", [0, 2]), ("2-held-out", [2])])
async def test_an_evaluation_is_made_once_whatever_is_killed(
    tmp_path: Path, last: str, again: list[int]
) -> None:
    tasks = TaskSource.open(ARITHMETIC)
    run_group = Killed(tasks)
    run_group.last = last
    settings: dict[str, Any] = {"steps": 2, "evaluate_every": 2}
    await ended(tmp_path, tasks=tasks, run_group=run_group, **settings)
    learner, others, run = await played(tmp_path, restored={"step": 0, "version": 0}, **settings)
    rows = lines(run.path / "metrics.jsonl")
    assert [one["step"] for one in rows if "held_out/reward" in one] == [0, 2]
    assert [one["step"] for one in rows if "reward" in one] == [1, 2]
    assert len(learner.batches) == 2
    assert sorted({int(n.split("-")[0]) for n in others.names if "held-out" in n}) == again


async def test_a_checkpoint_that_was_due_is_made_up_for(tmp_path: Path) -> None:
    tasks = TaskSource.open(ARITHMETIC)
    run_group = Killed(tasks)
    run_group.last = "2-held-out"  # before it
    settings: dict[str, Any] = {"steps": 4, "evaluate_every": 2, "checkpoint_every": 2}
    await ended(tmp_path, tasks=tasks, run_group=run_group, **settings)
    for name in ("7", ".1.partial", "notes"):  # a kill may leave the first two
        (tmp_path / "run" / "weights" / name).mkdir()
    learner, _, run = await played(tmp_path, restored={"step": 0, "version": 0}, **settings)
    assert {path.name for path in (run.path / "weights").iterdir()} == {"4", "notes"}
    assert [one["state"]["step"] for op, one in learner.asked if op == "save"] == [2, 4]


async def test_what_was_filtered_is_not_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = {
        "hard": StageSettings(steps=1, filter_tasks=4),
        "rest": StageSettings(steps=1),
    }

    async def killed(*arguments: Any, **named: Any) -> Any:
        raise OSError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(GroupQueue, "admit", killed)
        await ended(tmp_path, stages=stages, evaluate_every=0)
    async with GroupQueue.open(tmp_path / "run" / "queue.sqlite") as queue:
        cursor = await queue.noted("cursor")
    tasks = TaskSource.open(ARITHMETIC, cursor and cursor["tasks"])
    _, run_group, run = await played(
        tmp_path, tasks=tasks, stages=stages, restored={"step": 0, "version": 0}, evaluate_every=0
    )
    expected = list(itertools.islice(TaskSource.open(ARITHMETIC), 7))
    assert set(run_group.prompts[:3]) <= {task.prompt for task in expected[:4]}
    assert run_group.prompts[3:] == [task.prompt for task in expected[4:]]
    assert len([one for one in lines(run.path / "metrics.jsonl") if "filter/num_tasks" in one]) == 1


async def test_stages_have_their_own_budgets_and_optimizer(tmp_path: Path) -> None:
    stages = {
        "short": StageSettings(steps=1, max_turns=2, max_response_tokens=50),
        "long": StageSettings(steps=2, reset_optimizer=True),
    }
    told = Told()
    learner, run_group, run = await played(tmp_path, stages=stages, told=told, evaluate_every=5)
    ops = [op for op, _ in learner.asked]
    short, long = ["step", "publish"], ["reset_optimizer", "step", "publish", "step", "publish"]
    assert ops == ["publish", *short, *long, "save"]
    budgets = [(b.max_turns, b.max_response_tokens) for b in run_group.budgets]
    # Held-out tasks at the start, and at the end of each stage.
    assert budgets == [(10, 100)] * 4 + [(2, 50)] * 7 + [(10, 100)] * 10
    assert [one["step"] for one in lines(run.path / "metrics.jsonl")] == [0, 1, 1, 2, 3, 3]
    last = told.statuses[-1]
    assert (last.stage, last.step, last.num_steps) == ("stage 2 of 2: long", 2, 2)
    assert last.left_s == 0
    assert {"reward", "held-out reward", "time"} <= set(last.values)
    assert any("3/3: reward" in line for line in told.lines)


async def test_a_stage_learns_from_what_is_not_solved_each_time(tmp_path: Path) -> None:
    class HalfSolved(Played):
        """Solves every other task while tasks are filtered."""

        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            number = int(options["name"].split("-")[2]) if "filter" in options["name"] else 1
            self._right = 0.5 if number % 2 else 1.0
            return await super().__call__(prompt, **options)

    tasks = TaskSource.open(ARITHMETIC)
    run_group = HalfSolved(tasks)
    stages = {"hard": StageSettings(steps=2, filter_tasks=4)}
    _, _, run = await played(
        tmp_path, tasks=tasks, run_group=run_group, stages=stages, evaluate_every=0, group_size=6
    )
    assert run_group.sizes == [8] * 4 + [6] * 6
    hard = {run_group.prompts[1], run_group.prompts[3]}
    assert set(run_group.prompts[4:]) == hard
    filtered, *_ = lines(run.path / "metrics.jsonl")
    assert (filtered["filter/num_tasks"], filtered["filter/num_left"]) == (4, 2)


class Uneven(Played):
    """Solves sums with an even number each time, and half of the others."""

    killed_at = ""

    async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
        if options["name"].partition("-")[0] == self.killed_at:
            raise OSError("killed")
        self._right = 0.5 if int(str(prompt).split()[2]) % 2 else 1.0
        return await super().__call__(prompt, **options)


def sums(folder: Path, cursor: dict[str, Any] | None = None) -> TaskSource:
    """Return six sums as tasks."""
    file = folder / "sums.jsonl"
    rows = [{"problem": f"What is {n} plus 1?", "answer": str(n + 1)} for n in range(6)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return TaskSource.open(TasksSettings(kind="jsonl", paths=[file]), cursor)


async def test_a_curriculum_retires_what_is_solved_and_a_resumed_run_draws_the_same(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {"curriculum": True, "steps": 24, "evaluate_every": 0}
    tasks = sums(tmp_path)
    _, run_group, run = await played(
        tmp_path / "whole", tasks=tasks, run_group=Uneven(tasks), **settings
    )
    metrics = lines(run.path / "metrics.jsonl")
    assert metrics[0]["curriculum/num_tasks"] == 3
    assert metrics[-1]["curriculum/num_tasks"] == 6
    assert metrics[-1]["curriculum/num_retired"] == 3
    assert metrics[-1]["curriculum/solve_rate"] == pytest.approx((1 + 4 / 7) / 2)
    assert len(set(run_group.prompts[:6])) == 6  # the first epoch
    last = [int(prompt.split()[2]) for prompt in run_group.prompts[-12:]]
    assert sum(number % 2 for number in last) >= 9
    query = "SELECT number, version, json_extract(task, '$.id') FROM groups ORDER BY number"
    expected = asked(run, query)

    killed = Uneven(tasks)
    killed.killed_at = "25"
    await ended(tmp_path / "cut", tasks=sums(tmp_path), run_group=killed, **settings)
    async with GroupQueue.open(tmp_path / "cut" / "run" / "queue.sqlite") as queue:
        cursor = await queue.noted("cursor")
    tasks = sums(tmp_path, cursor["tasks"])
    _, _, run = await played(
        tmp_path / "cut", tasks=tasks, run_group=Uneven(tasks),
        restored={"step": 0, "version": 0}, **settings,
    )  # fmt: skip
    assert asked(run, query) == expected
    for now, then in zip(lines(run.path / "metrics.jsonl"), metrics, strict=True):
        names = [name for name in then if name.startswith("curriculum/")]
        assert len(names) == 3
        assert {name: now[name] for name in names} == {name: then[name] for name in names}


async def test_without_a_curriculum_every_task_comes_once_in_an_epoch(tmp_path: Path) -> None:
    tasks = sums(tmp_path)
    _, run_group, run = await played(
        tmp_path, tasks=tasks, run_group=Uneven(tasks), steps=8, evaluate_every=0
    )
    assert set(Counter(run_group.prompts).values()) == {4}
    assert not any(
        "curriculum" in name for row in lines(run.path / "metrics.jsonl") for name in row
    )
    rates = "SELECT key, sum(num_solved), sum(num_rollouts) FROM outcomes GROUP BY key"
    assert sorted(row[1:] for row in asked(run, rates)) == [(16, 28)] * 3 + [(28, 28)] * 3


async def test_it_is_told_of_which_groups_something_is_learned(tmp_path: Path) -> None:
    events: list[Event] = []
    stages = {"hard": StageSettings(steps=1, filter_tasks=4)}
    await played(tmp_path, stages=stages, evaluate_every=1, emit=events.append)
    started = {one.group: one for one in events if isinstance(one, GroupStarted)}
    finished = {one.group: one for one in events if isinstance(one, GroupFinished)}
    assert started.keys() == finished.keys()
    assert len(started) == 4 + 4 + 3 + 4
    for name, one in finished.items():
        is_chosen = "filter" not in name and "held-out" not in name
        assert one.is_chosen == started[name].is_chosen == is_chosen
        assert bool(one.kept or one.dropped or one.has_signal) == is_chosen
        assert one.mean_reward is not None


class Watched(Stalls, Unwatched):
    @property
    def told(self) -> list[tuple[str, str]]:
        return [(wait.rollout_id, wait.what) for wait in self.waits()]


async def test_who_waits_says_for_what_it_really_waits(tmp_path: Path) -> None:
    watch, at_evaluation = Watched(), []
    tasks = TaskSource.open(ARITHMETIC)
    run_group = Played(tasks)

    async def run(prompt: object, *, name: str, **options: Any) -> Sequence[Trajectory]:
        if name.startswith("2-held-out"):
            at_evaluation.extend(watch.told)
        return await run_group(prompt, name=name, **options)

    async def people(loop: TrainingLoop) -> None:
        loop.pause()
        await eventually(lambda: ("the next task", "the run to be resumed (paused)") in watch.told)
        assert not any("slot" in what for _, what in watch.told)
        loop.pause(False)

    await played(
        tmp_path, tasks=tasks, run_group=run, watch=watch, steps=2, evaluate_every=2,
        meanwhile=people,
    )  # fmt: skip
    assert ("the learner", "held-out tasks") in at_evaluation
    assert not any("slot" in what for _, what in at_evaluation)


async def test_a_stage_with_nothing_left_to_learn_is_passed_over(tmp_path: Path) -> None:
    stages = {"hard": StageSettings(steps=9, filter_tasks=2), "then": StageSettings(steps=1)}
    told = Told()
    _, run_group, run = await played(
        tmp_path, right=1.0, stages=stages, told=told, evaluate_every=0
    )
    assert run_group.sizes == [8] * 2 + [8] * 3
    run.write("config.toml", to_toml(TrainSettings(stages=stages)))
    path = run.path
    del run
    gc.collect()
    found = summarize(path)  # it has done what there was to do
    assert (found.state, found.step, found.num_steps) == (RunState.ENDED, 1, 10)
    assert any("every rollout solves its tasks" in line for line in told.lines)
    assert told.statuses[-1].left_s is None


async def test_without_learning_rollouts_are_written_down_alone(tmp_path: Path) -> None:
    learner, _, run = await played(tmp_path, steps=2, learn=False, evaluate_every=0)
    assert [op for op, _ in learner.asked] == ["publish"]
    assert len(groups(run, [4, 5, 6])) == 24


class HoldsThreads(Played):
    """Occupies all of anyio's default threads, as environments may that block in them."""

    async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
        limiter = anyio.to_thread.current_default_thread_limiter()
        with suppress(anyio.WouldBlock):
            while True:
                limiter.acquire_on_behalf_of_nowait(object())
        return await super().__call__(prompt, **options)


async def test_a_run_goes_on_while_environments_hold_all_threads(tmp_path: Path) -> None:
    run_group = HoldsThreads(TaskSource.open(ARITHMETIC))
    with anyio.fail_after(patient(20)):
        _, _, run = await played(
            tmp_path, run_group=run_group, steps=2, learn=False, evaluate_every=0
        )
    assert [row["step"] for row in lines(run.path / "metrics.jsonl")] == [1, 2]
    assert len(groups(run, [4, 5, 6])) == 24


async def test_shuffled_rewards_are_those_of_others(tmp_path: Path) -> None:
    learned = []
    for shuffle in (False, True):
        learner, _, run = await played(
            tmp_path / str(shuffle),
            roc=RocSettings(down_sample_to_n=0),
            steps=1,
            credit=CreditSettings(args={"shuffle_rewards": shuffle}),
            evaluate_every=0,
        )
        learned.append(of_samples(learner.batches[0]).tolist())
        (metrics,) = [one for one in lines(run.path / "metrics.jsonl") if "reward" in one]
        assert metrics["reward"] == pytest.approx(4 / 7)
        assert metrics["num_without_reward"] == 3  # what is broken is broken
    straight, shuffled = learned
    assert straight != shuffled
    assert sorted(straight) == sorted(shuffled)


class Freely(Played):
    """Ends each group on demand."""

    def __init__(self, tasks: TaskSource) -> None:
        super().__init__(tasks)
        self.may_end: dict[int, anyio.Event] = defaultdict(anyio.Event)

    async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
        found = await super().__call__(prompt, **options)
        await self.may_end[int(options["name"].split("-")[0])].wait()
        return found


async def test_rollouts_go_on_while_the_learner_learns(tmp_path: Path) -> None:
    tasks = TaskSource.open(ARITHMETIC)
    run_group = Freely(tasks)

    class Slow(PlayedLearner):
        async def handle(self, op: str, **arguments: Any) -> dict[str, Any]:
            if op == "step" and not self.batches:
                # All slots of two versions are in use, and a group that is late is waited for.
                await eventually(lambda: len(run_group.names) == 6)
                for number in (1, 2, 4):
                    run_group.may_end[number].set()
            if op == "step" and len(self.batches) == 1:
                for number in range(7, 20):
                    run_group.may_end[number].set()
            return await super().handle(op, **arguments)

    for number in (3, 5, 6):
        run_group.may_end[number].set()
    _, _, run = await played(
        tmp_path, tasks=tasks, run_group=run_group, learner=Slow(), steps=4, max_staleness=1,
        evaluate_every=0,
    )  # fmt: skip
    metrics = lines(run.path / "metrics.jsonl")
    assert [one["version"] for one in metrics] == [0, 1, 2, 3]
    assert [one["staleness_max"] for one in metrics] == [0, 1, 1, 1]
    assert asked(run, "SELECT step, number FROM groups ORDER BY step, number")[:6] == [
        (1, 3), (1, 5), (1, 6), (2, 1), (2, 2), (2, 4),
    ]  # fmt: skip


async def test_of_two_batches_that_are_ready_at_once_none_is_lost(
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
    _, _, run = await played(tmp_path, steps=4, max_staleness=1, evaluate_every=0)
    learned = asked(run, "SELECT step, number FROM groups ORDER BY step, number")
    assert learned[:6] == [(1, 1), (1, 2), (1, 3), (2, 4), (2, 5), (2, 6)]
    assert [step for step, _ in learned if step is not None] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]


async def test_a_group_that_teaches_nothing_may_be_replaced(tmp_path: Path) -> None:
    class Easy(Played):
        """Solves every other task each time."""

        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            self._right = 1.0 if int(options["name"].split("-")[0]) % 2 else 0.5
            return await super().__call__(prompt, **options)

    tasks = TaskSource.open(ARITHMETIC)
    learner, run_group, run = await played(
        tmp_path, tasks=tasks, run_group=Easy(tasks), steps=1, dynamic_sampling=True,
        evaluate_every=0,
    )  # fmt: skip
    assert learner.batches[0]["groups"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert len(run_group.sizes) == 6
    (metrics,) = lines(run.path / "metrics.jsonl")
    assert metrics["num_groups_replaced"] == metrics["num_groups_rejected"] == 3
    assert metrics["num_rollouts"] == 6 * 8


class Dies(PlayedLearner):
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
async def test_what_no_checkpoint_holds_is_done_again(
    tmp_path: Path, done: bool, max_staleness: int
) -> None:
    settings: dict[str, Any] = {"steps": 5, "max_staleness": max_staleness, "checkpoint_every": 2}
    settings |= {"evaluate_every": 0}
    whole, *_ = await played(tmp_path / "whole", **settings)
    died = Dies(4, done=done)
    with pytest.raises(ExceptionGroup) as caught:
        await played(tmp_path / "died", learner=died, **settings)
    assert str(sole(caught.value)) == "it died"
    del caught
    gc.collect()  # as when a process ends: nobody has the run any more
    state = [asked["state"] for op, asked in died.asked if op == "save"][-1]
    assert state == {"step": 2, "version": 2}
    async with GroupQueue.open(tmp_path / "died" / "run" / "queue.sqlite") as queue:
        tasks = TaskSource.open(ARITHMETIC, (await queue.noted("cursor"))["tasks"])
    again, _, run = await played(
        tmp_path / "died", tasks=tasks, learner=PlayedLearner(), restored=state, **settings
    )
    learned = [*died.batches[:2], *again.batches]
    assert len(learned) == 5
    if not max_staleness:
        for one, other in zip(learned, whole.batches, strict=True):
            assert {key: array.tolist() for key, array in one.items()} == {
                key: array.tolist() for key, array in other.items()
            }
    metrics = lines(run.path / "metrics.jsonl")
    assert [one["step"] for one in metrics] == [1, 2, 3, 4, 5]
    ids = "count(DISTINCT json_extract(task, '$.id'))"
    counted = asked(run, f"SELECT step, count(*), {ids} FROM groups GROUP BY step")
    assert counted == [(step, 3, 3) for step in range(1, 6)]


class Lost(PlayedLearner):
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

    async def lost(self) -> str:
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
            kept = json.loads(await (folder / "state.json").read_text())
            self.learned = kept["learned"]
            return {"state": kept["state"]}
        return answer


@pytest.mark.parametrize("op", ["step", "publish", "save", "saved"])
@pytest.mark.parametrize("checkpoint_every", [0, 2])
async def test_a_learner_that_is_lost_is_started_again_and_learns_the_same(
    tmp_path: Path, op: str, checkpoint_every: int
) -> None:
    settings: dict[str, Any] = {
        "steps": 5,
        "checkpoint_every": checkpoint_every,
        "evaluate_every": 0,
    }
    whole, *_ = await played(tmp_path / "whole", **settings)
    told = Told()
    number = {"step": 4, "publish": 5}.get(op, 1)
    lost = Lost(op, number)
    _, _, run = await played(tmp_path / "lost", learner=lost, max_restarts=2, told=told, **settings)
    if op == "saved" and not checkpoint_every:
        assert lost.num_starts == 1  # nothing is written beside the training
        return
    assert lost.num_starts == 2
    undisturbed = [{key: array.tolist() for key, array in one.items()} for one in whole.batches]
    assert lost.learned == undisturbed
    metrics = lines(run.path / "metrics.jsonl")
    assert [(one["step"], one["version"]) for one in metrics] == [(n, n - 1) for n in range(1, 6)]
    (said,) = [line for line in told.lines if "restarting it" in line]
    assert said == "The learner was lost; restarting it: rank 1 ended with exit status 137."
    assert (run.checkpoint or Path()).name == "step-00005"


async def test_a_learner_is_not_started_for_ever(tmp_path: Path) -> None:
    lost = Lost("step", 1, for_good=True)
    with pytest.raises(ExceptionGroup) as caught:
        await played(tmp_path, learner=lost, max_restarts=2, steps=1, evaluate_every=0)
    assert "lost too often (ranks.max_restarts)" in str(sole(caught.value))
    assert lost.num_starts == 3


class Falls(Played):
    """Fake rollouts that are all wrong from the seventh group on."""

    async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
        self._right = 0.5 if int(options["name"].split("-")[0]) < 7 else 0.0
        return await super().__call__(prompt, **options)


async def test_a_run_that_has_collapsed_ends_where_it_was_good(tmp_path: Path) -> None:
    tasks = TaskSource.open(ARITHMETIC)
    learner = Lost("nothing", 1)
    settings: dict[str, Any] = {"steps": 9, "checkpoint_every": 1, "evaluate_every": 0}
    with pytest.raises(ExceptionGroup) as caught:
        await played(
            tmp_path, tasks=tasks, run_group=Falls(tasks), learner=learner,
            collapse=CollapseSettings(window=1, patience=2), **settings,
        )  # fmt: skip
    error = sole(caught.value)
    assert isinstance(error, RunCollapsed)
    assert "--from 1`" in str(error)
    del caught, error
    gc.collect()
    path = tmp_path / "run"
    assert "The last good step was 2" in (path / "collapse.md").read_text()
    assert [one.name for one in (path / "weights").iterdir()] == ["1"]
    assert len(learner.learned) == 1

    with pytest.raises(RunFolderError, match=r"no checkpoint of step 7; available: 1, 2, 3"):
        await gone_back(tmp_path, 7)
    assert not (path / "undone").exists()
    tasks = await gone_back(tmp_path, 1)
    settings["steps"] = 3
    again, run_group, run = await played(
        tmp_path, tasks=tasks, restored={"step": 1, "version": 1}, **settings
    )
    assert len(again.batches) == 2
    # The same tasks, rolled out anew.
    assert [name.split("-")[0] for name in run_group.names] == ["4", "5", "6", "7", "8", "9"]
    assert [row["step"] for row in run.metrics()] == [1, 2, 3]
    (undone,) = (path / "undone").iterdir()
    assert {one.name for one in undone.iterdir()} >= {"metrics.jsonl", "step-00002"}


async def gone_back(folder: Path, step: int) -> TaskSource:
    """Return the run to the checkpoint of that step, like `--from`; return its tasks."""
    run = RunFolder(folder / "run")
    async with GroupQueue.open(run.path / "queue.sqlite") as queue:
        await undo(run, queue, step)
        cursor = (await queue.noted("cursor"))["tasks"]
    return TaskSource.open(ARITHMETIC, cursor)


class Marked(Lost):
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


def versions(run: Path) -> list[str]:
    """Return the versions of the weights in the folder."""
    return sorted(one.name for one in (run / "weights").iterdir() if one.is_dir())


@pytest.mark.parametrize("how", ["disk", "group", "elsewhere"])
@pytest.mark.parametrize("num_steps", [2, 3, 4])  # to below where it was, to there, and beyond
async def test_what_was_undone_is_nobodys_model(tmp_path: Path, how: str, num_steps: int) -> None:
    folder = tmp_path / "elsewhere" if how == "elsewhere" else None
    weights = WeightsSettings(transport="group" if how == "group" else "disk", folder=folder)
    settings: dict[str, Any] = {"weights": weights, "checkpoint_every": 1, "evaluate_every": 0}
    _, _, run = await played(tmp_path, learner=Marked("first"), steps=3, **settings)
    path = run.path
    assert RunFolder.model_in(path).name == "3"
    del run
    tasks = await gone_back(tmp_path, 1)
    with pytest.raises(RunFolderError, match="is not a run with a model"):
        RunFolder.model_in(path)
    with pytest.raises(ModelError, match="no published weights"):
        find(path)
    await played(
        tmp_path, learner=Marked("second"), tasks=tasks, restored={"step": 1, "version": 1},
        steps=num_steps, **settings,
    )  # fmt: skip
    model = json.loads((RunFolder.model_in(path) / "config.json").read_text())
    assert model == {"life": "second", "version": str(num_steps)}
    assert find(path).folder == RunFolder.model_in(path)
    assert versions(path) == [str(num_steps)]
    (kept,) = (path / "undone").glob("*/weights/3/config.json")
    assert json.loads(kept.read_text())["life"] == "first"


async def test_a_model_of_an_earlier_life_does_not_stay_where_none_is_handed_over_by_disk(
    tmp_path: Path,
) -> None:
    """A new run in the same folder may find weights of that version, and higher ones."""
    settings: dict[str, Any] = {"weights": WeightsSettings(transport="group"), "evaluate_every": 0}
    await played(tmp_path, learner=Marked("first"), steps=1, **settings)
    (tmp_path / "run" / "weights" / "1").rename(tmp_path / "run" / "weights" / "7")
    (tmp_path / "run" / "weights" / "2").mkdir()
    gc.collect()
    learner = Marked("second")
    _, _, run = await played(
        tmp_path, learner=learner, restored={"step": 0, "version": 0}, steps=2, **settings
    )
    assert versions(run.path) == ["2"]
    model = json.loads((run.path / "weights" / "2" / "config.json").read_text())
    assert model == {"life": "second", "version": "2"}


async def test_what_taught_nothing_to_the_undone_model_may_teach_now(tmp_path: Path) -> None:
    class Easy(Played):
        """Solves every other task each time."""

        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            self._right = 1.0 if int(options["name"].split("-")[0]) % 2 else 0.5
            return await super().__call__(prompt, **options)

    settings: dict[str, Any] = {"dynamic_sampling": True, "checkpoint_every": 1}
    settings |= {"evaluate_every": 0, "max_staleness": 0}
    tasks = TaskSource.open(ARITHMETIC)
    first = Easy(tasks)
    await played(
        tmp_path, tasks=tasks, run_group=first, learner=Lost("nothing", 1), steps=3, **settings
    )
    assert len(first.prompts) == 18
    tasks = await gone_back(tmp_path, 1)
    _, second, run = await played(
        tmp_path, tasks=tasks, restored={"step": 1, "version": 1}, steps=5, **settings
    )
    # None is left out, and none comes twice.
    expected = list(itertools.islice(TaskSource.open(ARITHMETIC), 18))
    assert [*first.prompts[:6], *second.prompts] == [task.prompt for task in expected]
    assert asked(run, "SELECT DISTINCT state FROM groups WHERE number > 6") == [("trained",)]


async def test_a_stage_that_was_undone_begins_anew_and_leaves_nothing_to_others(
    tmp_path: Path,
) -> None:
    class Half(Played):
        """Gives equal rewards to every other group of the second process, up to a number."""

        until = 0

        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            number = int(options["name"].split("-")[0])
            self._right = 1.0 if number % 2 and number < self.until else 0.5
            return await super().__call__(prompt, **options)

    stages = {
        "plain": StageSettings(steps=2),
        "hard": StageSettings(steps=2, filter_tasks=4),
        "rest": StageSettings(steps=1),
    }
    settings: dict[str, Any] = {"stages": stages, "dynamic_sampling": True, "evaluate_every": 0}
    settings |= {"checkpoint_every": 1}
    tasks = TaskSource.open(ARITHMETIC)
    first = Played(tasks)
    await played(tmp_path, tasks=tasks, run_group=first, learner=Lost("nothing", 1), **settings)
    expected = [task.prompt for task in itertools.islice(TaskSource.open(ARITHMETIC), 30)]
    assert first.prompts[:10] == expected[:10]  # two steps, and what is filtered
    tasks = await gone_back(tmp_path, 1)
    run_group = Half(tasks)
    run_group.until = 8
    _, second, run = await played(
        tmp_path, tasks=tasks, run_group=run_group, restored={"step": 1, "version": 1}, **settings
    )
    # Groups 4 to 6 were there; 5 and 7 teach nothing.
    assert second.prompts[:5] == expected[3:8]
    assert second.prompts[5:9] == expected[8:12]  # filtered
    assert set(second.prompts[9:15]) <= set(expected[8:12])
    assert second.prompts[15:] == expected[12:15]
    metrics = [row for row in run.metrics() if "reward" in row]
    assert [(row["step"], row["stage"]) for row in metrics] == [
        (1, 1), (2, 1), (3, 2), (4, 2), (5, 3),
    ]  # fmt: skip
    files = sorted(path.name for path in (run.path / "trajectories").iterdir())
    numbers = [number for (number,) in asked(run, "SELECT number FROM groups ORDER BY number")]
    assert files == [f"group-{number:07}.jsonl" for number in numbers]


async def test_what_a_stage_has_left_over_is_no_other_kinds_of_stages(tmp_path: Path) -> None:
    """A stage of hard tasks restores only groups of hard tasks."""

    class Easy(Played):
        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            self._right = 1.0 if int(options["name"].split("-")[0]) % 2 else 0.5
            return await super().__call__(prompt, **options)

    stages = {
        "plain": StageSettings(steps=2),
        "hard": StageSettings(steps=1, filter_tasks=4),
        "rest": StageSettings(steps=1),
    }
    settings: dict[str, Any] = {"stages": stages, "dynamic_sampling": True, "evaluate_every": 0}
    settings |= {"checkpoint_every": 1}
    tasks = TaskSource.open(ARITHMETIC)
    first = Easy(tasks)
    await played(tmp_path, tasks=tasks, run_group=first, learner=Lost("nothing", 1), **settings)
    tasks = await gone_back(tmp_path, 1)
    _, second, _ = await played(
        tmp_path, tasks=tasks, restored={"step": 1, "version": 1}, **settings
    )
    # Of the first step's six groups, the second step's six: three are enough now.
    expected = [task.prompt for task in itertools.islice(TaskSource.open(ARITHMETIC), 30)]
    assert second.prompts[:3] == expected[6:9]
    assert second.prompts[3:7] == expected[12:16]  # filtered
    assert set(second.prompts[7:10]) <= set(expected[12:16])
    assert second.prompts[10:] == expected[9:12]


async def test_what_was_kept_for_a_larger_batch_does_not_keep_a_smaller_one_waiting(
    tmp_path: Path,
) -> None:
    RunFolder(tmp_path / "run", "")
    gc.collect()
    tasks = TaskSource.open(ARITHMETIC)
    async with GroupQueue.open(tmp_path / "run" / "queue.sqlite") as queue:
        for task in itertools.islice(tasks, 4):  # of version 0: all are due in the next batch
            group = await queue.admit(task, version=0, cursor={"tasks": tasks.cursor()})
            await queue.finish(group.number, path=None, num_bytes=0, figures=GroupFigures())
    with anyio.fail_after(patient(50)):
        _, run_group, run = await played(
            tmp_path, tasks=tasks, restored={"step": 1, "version": 1}, steps=2,
            prompts_per_step=2, max_staleness=1, evaluate_every=0,
        )  # fmt: skip
    assert {name.split("-")[0] for name in run_group.names} == {"3", "4"}
    assert all(one["staleness_max"] <= 1 for one in lines(run.path / "metrics.jsonl"))


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_a_learner_that_is_lost_while_rollouts_go_on_does_not_lead_them_astray(
    tmp_path: Path, max_staleness: int
) -> None:
    """Groups that finish while steps are repeated belong to the next step."""
    tasks, told = TaskSource.open(ARITHMETIC), Told()
    run_group = Freely(tasks)
    for number in range(1, 7):
        run_group.may_end[number].set()

    class LostMeanwhile(Lost):
        """Lost after two steps, while the third one's rollouts run, which end while steps
        are repeated."""

        async def lost(self) -> str:
            await eventually(
                lambda: len(self.batches) == 2 and len(run_group.names) >= 9, within_s=50
            )
            if self.num_starts == 2:
                await anyio.sleep_forever()
            return "rank 1 ended with exit status 137."

        async def handle(self, op: str, **arguments: Any) -> dict[str, Any]:
            if op == "step" and self.num_starts == 2 and len(self.learned) == 1:
                for number in range(7, 20):
                    run_group.may_end[number].set()
                await eventually(taken_up)
            return await super().handle(op, **arguments)

    def taken_up() -> bool:
        """Return whether the third step's groups are finished and leased."""
        with closing(sqlite3.connect(tmp_path / "run" / "queue.sqlite")) as db:
            query = "SELECT count(*) FROM groups WHERE state != 'open'"
            (num_done,) = db.execute(query).fetchone()
        return num_done >= 9 and told.statuses[-1].waits == "the learner is training"

    lost = LostMeanwhile("", 0)
    _, _, run = await played(
        tmp_path, tasks=tasks, run_group=run_group, learner=lost, max_restarts=2, told=told,
        steps=4, max_staleness=max_staleness, evaluate_every=0,
    )  # fmt: skip
    assert lost.num_starts == 2
    assert len(lost.learned) == 4
    metrics = lines(run.path / "metrics.jsonl")
    assert [(one["step"], one["version"]) for one in metrics] == [(n, n - 1) for n in range(1, 5)]


async def test_a_run_that_does_not_learn_does_not_begin_to_when_it_goes_on(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"learn": False, "evaluate_every": 0}
    await played(tmp_path, steps=2, **settings)
    gc.collect()
    learner, _, run = await played(tmp_path, restored={}, steps=3, **settings)
    assert [op for op, _ in learner.asked] == ["publish"]
    assert [one["step"] for one in lines(run.path / "metrics.jsonl")] == [1, 2, 3]


async def test_a_learner_that_is_lost_as_it_sends_to_a_server_that_came_back_is_no_end(
    tmp_path: Path,
) -> None:
    fake, tasks = FakeSGLang([5]), TaskSource.open(ARITHMETIC)

    class LostToo(Lost):
        async def lost(self) -> str:
            await eventually(lambda: self._is_lost, within_s=50)
            return "rank 1 ended with exit status 137."

    class Waiting(Played):
        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            if not self.sizes:
                fake.version = "default"  # it was started again
                await eventually(lambda: fake.version == "0")
            return await super().__call__(prompt, **options)

    lost = LostToo("join", 2)  # the first is as the run begins
    await played(
        tmp_path, tasks=tasks, run_group=Waiting(tasks), fake=fake, learner=lost, max_restarts=2,
        weights=WeightsSettings(transport="group"), steps=1, prompts_per_step=1, evaluate_every=0,
    )  # fmt: skip
    assert lost.num_starts == 2
    assert len(lost.learned) == 1


async def test_it_is_told_where_all_groups_are_replaced(tmp_path: Path) -> None:
    tasks, told = TaskSource.open(ARITHMETIC), Told()

    class Easy(Played):
        """Solves everything until the warning is printed."""

        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            self._right = (
                0.5 if any("groups in a row were replaced" in line for line in told.lines) else 1.0
            )
            return await super().__call__(prompt, **options)

    with anyio.fail_after(patient(50)):
        _, run_group, _ = await played(
            tmp_path, tasks=tasks, run_group=Easy(tasks), told=told, steps=1, prompts_per_step=1,
            dynamic_sampling=True, evaluate_every=0,
        )  # fmt: skip
    assert len(run_group.names) >= 11
    (line,) = [line for line in told.lines if "groups in a row were replaced" in line]
    assert "10 groups in a row" in line


async def test_a_collapse_takes_no_weights_from_servers_that_load_them(tmp_path: Path) -> None:
    tasks, run = TaskSource.open(ARITHMETIC), tmp_path / "run"

    class Slow(FakeSGLang):
        """Servers that have not loaded the first step's weights when the collapse is detected."""

        num_read = 0

        async def _update_weights(self, request: web.Request) -> web.Response:
            if self.num_read:
                await eventually(lambda: (run / "collapse.md").exists(), within_s=50)
            self.num_read += 1
            folder = anyio.Path((await request.json())["model_path"])
            found.append(await folder.exists())
            return await super()._update_weights(request)

    found: list[bool] = []
    fake = Slow([5])
    with pytest.raises(ExceptionGroup) as caught:
        await played(
            tmp_path, tasks=tasks, run_group=Falls(tasks), fake=fake, learner=Lost("nothing", 1),
            collapse=CollapseSettings(window=1, patience=2), steps=9, max_staleness=3,
            checkpoint_every=1, evaluate_every=0,
        )  # fmt: skip
    assert isinstance(sole(caught.value), RunCollapsed)
    assert len(found) >= 2
    assert all(found)
    assert fake.version == "2"


async def test_a_stage_that_is_over_stays_so_when_it_is_told_to_be_longer(tmp_path: Path) -> None:
    tasks = TaskSource.open(ARITHMETIC)
    run_group = Killed(tasks)
    run_group.last = "10-"  # in the last step
    stages = {"one": StageSettings(steps=2), "two": StageSettings(steps=2)}
    await ended(tmp_path, tasks=tasks, run_group=run_group, stages=stages, evaluate_every=0)
    stages["one"] = StageSettings(steps=4)
    _, _, run = await played(
        tmp_path, restored={"step": 0, "version": 0}, stages=stages, evaluate_every=0
    )
    assert [(one["step"], one["stage"]) for one in lines(run.path / "metrics.jsonl")] == [
        (1, 1), (2, 1), (3, 2), (4, 2),
    ]  # fmt: skip


@pytest.mark.parametrize(("op", "number"), [("load", 1), ("publish", 4)])
async def test_a_learner_that_is_lost_as_it_goes_back_leaves_the_good_weights_all_the_same(
    tmp_path: Path, op: str, number: int
) -> None:
    tasks, lost = TaskSource.open(ARITHMETIC), Lost(op, number)
    with pytest.raises(ExceptionGroup) as caught:
        await played(
            tmp_path, tasks=tasks, run_group=Falls(tasks), learner=lost, max_restarts=2, steps=9,
            collapse=CollapseSettings(window=1, patience=2), checkpoint_every=1, evaluate_every=0,
        )  # fmt: skip
    assert isinstance(sole(caught.value), RunCollapsed)
    assert lost.num_starts == 2
    published = [asked["version"] for name, asked in lost.asked if name == "publish"]
    assert published == ["0", "1", "2", "1"]
    assert [one.name for one in (tmp_path / "run" / "weights").iterdir()] == ["1"]
    assert len(lost.learned) == 1  # what it had as it published


# --- what people ask of it ------------------------------------------------------------------------


def free(tasks: TaskSource) -> Freely:
    """Let all groups end."""
    run_group = Freely(tasks)
    for number in range(1, 100):
        run_group.may_end[number].set()
    return run_group


async def settled() -> None:
    """Wait until everything that can start has started."""
    for _ in range(20):
        await anyio.wait_all_tasks_blocked()
        await anyio.to_thread.run_sync(lambda: None)


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_paused_it_begins_no_groups_and_goes_on_when_it_is_told(
    tmp_path: Path, max_staleness: int
) -> None:
    tasks = TaskSource.open(ARITHMETIC)
    run_group = Freely(tasks)
    num_first = 3 * (max_staleness + 1)

    async def meanwhile(loop: TrainingLoop) -> None:
        await eventually(lambda: len(run_group.names) == num_first)  # as many as there are slots
        loop.pause()
        assert loop.view()["paused"]
        for number in range(1, num_first + 1):  # what runs goes on, and is learned from
            run_group.may_end[number].set()
        await eventually(lambda: loop.step == max_staleness + 1)
        await settled()
        assert len(run_group.names) == num_first
        for number in range(1, 100):
            run_group.may_end[number].set()
        await settled()
        assert (loop.step, len(run_group.names)) == (max_staleness + 1, num_first)
        loop.pause(False)
        await eventually(lambda: len(run_group.names) > num_first)
        assert not loop.view()["paused"]
        await anyio.sleep_forever()

    learner, _, run = await played(
        tmp_path, tasks=tasks, run_group=run_group, meanwhile=meanwhile, steps=5,
        max_staleness=max_staleness, evaluate_every=0,
    )  # fmt: skip
    assert len(learner.batches) == 5
    assert [one["step"] for one in lines(run.path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


async def test_paused_while_it_waits_for_room_it_begins_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = TaskSource.open(ARITHMETIC)
    run_group = free(tasks)
    asked_for, is_room = anyio.Event(), anyio.Event()

    async def wait_for_capacity(self: Rollouts, size: int) -> None:
        asked_for.set()
        await is_room.wait()

    monkeypatch.setattr(Rollouts, "wait_for_capacity", wait_for_capacity)

    async def meanwhile(loop: TrainingLoop) -> None:
        await asked_for.wait()
        loop.pause()
        is_room.set()
        await settled()
        assert run_group.names == []
        assert loop.view()["slots_used"] == 0
        loop.pause(False)
        await anyio.sleep_forever()

    learner, *_ = await played(
        tmp_path, tasks=tasks, run_group=run_group, meanwhile=meanwhile, steps=1, evaluate_every=0
    )
    assert len(learner.batches) == 1


async def test_a_pause_is_no_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog ends runs that are stalled for hours."""
    monkeypatch.setattr(weight_sync_loop, "_POLL_S", 0.05)
    moved: list[int] = []

    async def meanwhile(loop: TrainingLoop) -> None:
        loop.pause()
        await settled()
        monkeypatch.setattr(loop._control.watch, "moved", lambda: moved.append(1), raising=False)
        await eventually(lambda: len(moved) > 3)
        loop.pause(False)
        await anyio.sleep_forever()

    await played(tmp_path, meanwhile=meanwhile, steps=1, evaluate_every=0)


@pytest.mark.parametrize("num_filtered", [0, 2])
@pytest.mark.parametrize("drained", [False, True])
async def test_paused_it_filters_no_further_tasks(
    tmp_path: Path, num_filtered: int, drained: bool
) -> None:
    stages = {"hard": StageSettings(steps=1, filter_tasks=4)}
    tasks = TaskSource.open(ARITHMETIC)
    loops: list[TrainingLoop] = []

    class Pausing(Played):
        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            if len(self.names) + 1 == num_filtered:
                loops[0].pause()
            return await super().__call__(prompt, **options)

    run_group = Pausing(tasks)

    async def meanwhile(loop: TrainingLoop) -> None:
        loops.append(loop)
        if not num_filtered:
            loop.pause()
        await eventually(lambda: loop.is_paused and len(run_group.names) == num_filtered)
        await settled()
        assert len(run_group.names) == num_filtered
        if drained:
            loop.drain()
        else:
            loop.pause(False)
        await anyio.sleep_forever()

    told: dict[str, Any] = {"stages": stages, "evaluate_every": 0}
    learner, _, run = await played(
        tmp_path, tasks=tasks, run_group=run_group, meanwhile=meanwhile, **told
    )
    if not drained:
        assert (len(learner.batches), run_group.sizes) == (1, [8] * 7)
        return
    assert (len(learner.batches), run_group.sizes) == (0, [8] * num_filtered)
    loops.clear()
    del run
    gc.collect()
    nothing = {"step": 0, "version": 0}
    learner, again, _ = await played(
        tmp_path, tasks=await whole_cursor(tmp_path), restored=nothing, **told
    )
    assert (len(learner.batches), again.sizes) == (1, [8] * 7)
    assert again.prompts[:num_filtered] == run_group.prompts  # none was left out


async def whole_cursor(folder: Path) -> TaskSource:
    """Return the tasks from the position of the run in this folder."""
    async with GroupQueue.open(folder / "run" / "queue.sqlite") as queue:
        return TaskSource.open(ARITHMETIC, (await queue.noted("cursor") or {}).get("tasks"))


@pytest.mark.parametrize("num_begun", [0, 1, 4, 5, 9, 12])
@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("paused", [False, True])
async def test_a_run_that_was_drained_goes_on_and_learns_from_each_group_once(
    tmp_path: Path, max_staleness: int, num_begun: int, paused: bool
) -> None:
    tasks = TaskSource.open(ARITHMETIC)
    run_group, told = Freely(tasks), Told()
    for number in range(1, num_begun + 1):
        run_group.may_end[number].set()

    async def meanwhile(loop: TrainingLoop) -> None:
        await eventually(lambda: len(run_group.names) >= num_begun)
        if paused:
            loop.pause()
        loop.drain()
        assert loop.view()["draining"]
        for number in range(num_begun + 1, 100):
            run_group.may_end[number].set()
        await anyio.sleep_forever()

    settings: dict[str, Any] = {"steps": 5, "max_staleness": max_staleness, "evaluate_every": 0}
    first, _, run = await played(
        tmp_path, tasks=tasks, run_group=run_group, told=told, meanwhile=meanwhile, **settings
    )
    (said,) = [line for line in told.lines if line.startswith("Drained")]
    num_learned = len(first.batches)
    assert f"after step {num_learned};" in said
    assert f"agentloop train --resume {run.path}" in said
    assert num_learned < 5 or num_begun == 12  # then all may have begun
    # What has begun has ended: nothing hangs open, and there is a checkpoint of all of it.
    assert asked(run, "SELECT count(*) FROM groups WHERE state = 'open'") == [(0,)]
    run.write("config.toml", to_toml(TrainSettings(loop=LoopSettings(steps=5))))
    saves = [one["state"] for op, one in first.asked if op == "save"]
    state = {"step": num_learned, "version": num_learned}
    assert saves == ([state] if num_learned else [])
    del run
    gc.collect()
    is_stopped = summarize(tmp_path / "run").state is RunState.STOPPED
    assert is_stopped == (num_learned < 5)
    again, _, run = await played(
        tmp_path, tasks=await whole_cursor(tmp_path), restored=state, **settings
    )
    assert len(first.batches) + len(again.batches) == 5
    assert [one["step"] for one in lines(run.path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert all(one["staleness_max"] <= max_staleness for one in lines(run.path / "metrics.jsonl"))
    counted = asked(run, "SELECT count(*), count(DISTINCT json_extract(task, '$.id')) FROM groups")
    assert counted == [(15, 15)]
    query = "SELECT step, count(*) FROM groups GROUP BY step"
    assert asked(run, query) == [(step, 3) for step in range(1, 6)]


async def test_drained_in_its_first_stage_it_does_not_begin_the_second(tmp_path: Path) -> None:
    tasks = TaskSource.open(ARITHMETIC)
    run_group = free(tasks)
    stages = {"one": StageSettings(steps=2), "two": StageSettings(steps=2)}

    async def meanwhile(loop: TrainingLoop) -> None:
        await eventually(lambda: loop.step == 1)
        loop.drain()
        await anyio.sleep_forever()

    first, _, run = await played(
        tmp_path, tasks=tasks, run_group=run_group, stages=stages, meanwhile=meanwhile,
        evaluate_every=0,
    )  # fmt: skip
    assert 1 <= len(first.batches) <= 2
    assert {one["stage"] for one in lines(run.path / "metrics.jsonl")} == {1}
    del run
    gc.collect()
    state = [one["state"] for op, one in first.asked if op == "save"][-1]
    _, _, run = await played(
        tmp_path, tasks=await whole_cursor(tmp_path), stages=stages, restored=state,
        evaluate_every=0,
    )  # fmt: skip
    assert [one["stage"] for one in lines(run.path / "metrics.jsonl")] == [1, 1, 2, 2]


async def test_a_checkpoint_is_begun_when_somebody_asks(tmp_path: Path) -> None:
    tasks = TaskSource.open(ARITHMETIC)
    run_group = Freely(tasks)
    for number in range(1, 4):
        run_group.may_end[number].set()
    saved: list[int] = []

    async def meanwhile(loop: TrainingLoop) -> None:
        await eventually(lambda: len(run_group.names) == 6)  # the second step's
        saved.append(await loop.save())
        saved.append(await loop.save())  # there is one
        for number in range(4, 100):
            run_group.may_end[number].set()
        await anyio.sleep_forever()

    learner, *_ = await played(
        tmp_path, tasks=tasks, run_group=run_group, meanwhile=meanwhile, steps=2, evaluate_every=0
    )
    assert saved == [1, 1]
    saves = [one for op, one in learner.asked if op == "save"]
    assert [one["state"]["step"] for one in saves] == [1, 2]
    assert [one["beside"] for one in saves] == [True, False]


async def test_a_checkpoint_waits_for_the_step_at_hand(tmp_path: Path) -> None:
    begun, may_go_on = anyio.Event(), anyio.Event()
    saved: list[int] = []

    class Slow(PlayedLearner):
        async def handle(self, op: str, **arguments: Any) -> dict[str, Any]:
            if op == "step" and not self.batches:
                begun.set()
                await may_go_on.wait()
            return await super().handle(op, **arguments)

    async def meanwhile(loop: TrainingLoop) -> None:
        await begun.wait()
        async with anyio.create_task_group() as tasks:

            async def save() -> None:
                saved.append(await loop.save())

            tasks.start_soon(save)
            await settled()
            assert saved == []
            may_go_on.set()
        await anyio.sleep_forever()

    learner, *_ = await played(
        tmp_path, learner=Slow(), meanwhile=meanwhile, steps=2, evaluate_every=0
    )
    assert saved == [1]
    saves = [one["state"] for op, one in learner.asked if op == "save"]
    assert saves[0] == {"step": 1, "version": 1}


async def test_who_asks_for_a_checkpoint_and_leaves_does_no_harm(tmp_path: Path) -> None:
    """This holds even if the learner is lost at that moment and has to repeat steps."""
    whole, *_ = await played(tmp_path / "whole", steps=4, evaluate_every=0)
    tasks = TaskSource.open(ARITHMETIC)
    run_group = Freely(tasks)
    for number in range(1, 7):
        run_group.may_end[number].set()
    restarting, may_go_on = anyio.Event(), anyio.Event()

    class SlowToStart(Lost):
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
        for number in range(7, 100):
            run_group.may_end[number].set()
        may_go_on.set()
        await anyio.sleep_forever()

    await played(
        tmp_path / "lost", tasks=tasks, run_group=run_group, learner=lost, max_restarts=2,
        meanwhile=meanwhile, steps=4, evaluate_every=0,
    )  # fmt: skip
    assert lost.num_starts == 2
    undisturbed = [{key: array.tolist() for key, array in one.items()} for one in whole.batches]
    assert lost.learned == undisturbed


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_where_it_stands_is_plain_numbers(tmp_path: Path, max_staleness: int) -> None:
    tasks = TaskSource.open(ARITHMETIC)
    run_group = Freely(tasks)
    views: list[dict[str, Any]] = []
    loops: list[TrainingLoop] = []

    async def meanwhile(loop: TrainingLoop) -> None:
        loops.append(loop)
        views.append(loop.view())
        await eventually(lambda: len(run_group.names) == 3 * (max_staleness + 1))
        run_group.may_end[1].set()
        await eventually(lambda: loop.view()["queue_groups"] == 1)
        views.append(loop.view())
        for number in range(2, 100):
            run_group.may_end[number].set()
        await anyio.sleep_forever()

    await played(
        tmp_path, tasks=tasks, run_group=run_group, steps=4, max_staleness=max_staleness,
        evaluate_every=0, meanwhile=meanwhile,
    )  # fmt: skip
    first, amid = views
    assert (first["step"], first["num_steps"], first["slots_used"]) == (0, 4, 0)
    assert amid["slots"] == amid["slots_used"] == 3 * (max_staleness + 1)
    assert (amid["queue_groups"], amid["learner_version"]) == (1, "0")
    assert amid["queue_bytes"] > 0
    assert amid["max_staleness"] == max_staleness
    last = loops[0].view()
    assert (last["step"], last["slots_used"], last["queue_bytes"]) == (4, 0, 0)
    json.dumps([first, amid, last])
