"""The training loop around a played learner: what it asks for, keeps, and writes down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from agentloop.agent.rollout import Budget
from agentloop.errors import RequestError, sole
from agentloop.groups.reward import RewardFunction, RewardSettings, Scorer
from agentloop.groups.roc import RocSettings
from agentloop.groups.tasks import TaskSource, TasksSettings
from agentloop.inference.router import Router, RouterSettings
from agentloop.inference.sglang import SGLangServer, http_session
from agentloop.training.handover import WeightsSettings
from agentloop.training.learner import Learner
from agentloop.training.loop import LoopSettings, StageSettings, TrainingLoop
from agentloop.training.run_folder import RunFolder
from agentloop.training.standing import Standing
from agentloop.trajectory import (
    CallStatus,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    TurnEnd,
    VersionSpan,
)
from tests.support import FakeSGLang, eventually

pytestmark = pytest.mark.anyio


class Told:
    """What was reported."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.standings: list[Standing] = []

    def __call__(self, line: str) -> None:
        pass

    def say(self, line: str) -> None:
        self.lines.append(line)

    def show(self, standing: Standing) -> None:
        self.standings.append(standing)


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
            await anyio.Path(arguments["folder"]).mkdir(parents=True)
        if op == "layout":
            layout = [{"names": ["norm"], "dtypes": ["float32"], "shapes": [[2]]}]
            await anyio.Path(arguments["out"]).write_text(json.dumps(layout))
            return {"num_updates": len(self.batches), "backend": "gloo"}
        return {"seconds": 0.1, "port": 1, "sums": {}}


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
        self.names: list[str] = []
        self.prompts: list[str] = []
        self.budgets: list[Budget] = []
        self._answers = {task.prompt: task.answer for task in tasks.held_out()}
        self._right = right

    async def __call__(
        self, prompt: object, *, size: int, name: str, budget: Budget, at_gate: Any
    ) -> Sequence[Trajectory]:
        at_gate()
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
    **settings: Any,
) -> tuple[PlayedLearner, Played, RunFolder]:
    tasks = tasks or TaskSource.open(ARITHMETIC)
    run_group = run_group or Played(tasks, right=right)
    learner = PlayedLearner()
    run = RunFolder(folder / "run", "")
    fake = fake or FakeSGLang([5])
    router_settings = RouterSettings(probe_interval_s=0.01)
    async with fake.serving(), http_session() as session:
        async with (
            Router.open([SGLangServer(fake.url, session)], router_settings) as router,
            Scorer(RewardSettings(function="exact"), reward) as scorer,
        ):
            loop = TrainingLoop(
                LoopSettings(
                    **{"tasks_per_step": 3, "group_size": 8, "evaluate_tasks": 4} | settings
                ),
                roc or RocSettings(down_sample_to_n=4),
                run_group=run_group,
                router=router,
                learner=cast(Learner, learner),
                scorer=scorer,
                tasks=tasks,
                folder=run,
                report=told or Told(),
                stages=stages,
                budget=Budget(max_turns=10, max_response_tokens=100),
                weights=weights,
            )
            await loop.run()
    assert fake.version == str(len(learner.batches))
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
    assert trained[0]["num_learned"] == 12
    assert trained[0]["pass_at_k"] == 1.0
    assert trained[0]["learner/loss"] == 0.5
    assert [one["step"] for one in metrics if "held_out/reward" in one] == [0, 2]
    rows = lines(run.path / "trajectories" / "step-00001.jsonl")
    assert len(rows) == 24
    assert sum(row["advantage"] is not None for row in rows) == 12
    assert sum(row["dropped"] == "infrastructure" for row in rows) == 3
    assert list((run.path / "batches").iterdir()) == []
    assert [path.name for path in (run.path / "weights").iterdir()] == ["2"]


async def test_weights_go_by_group_where_that_is_asked_for(tmp_path: Path) -> None:
    weights = WeightsSettings(by="group")
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
            tmp_path, run_group=run_group, weights=weights, steps=1, tasks_per_step=1,
            evaluate_every=0,
        )  # fmt: skip
    assert bool(seen) == fails
    assert list(shared.iterdir()) == []


async def test_a_step_that_teaches_nothing_asks_nothing(tmp_path: Path) -> None:
    learner, _, run = await played(tmp_path, right=1.0, steps=1, evaluate_every=0)
    assert [op for op, _ in learner.asked] == ["publish", "save"]
    (metrics,) = [one for one in lines(run.path / "metrics.jsonl") if "reward" in one]
    assert metrics["num_groups_rejected"] == 3
    state = learner.asked[-1][1]["state"]
    assert state["step"] == 1
    assert state["cursor"]["position"] == 3


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
                options["at_gate"]()
                number = int(options["name"].split("-")[1])
                place = order.index(number)  # noqa: B023
                await ended[place - 1].wait()  # noqa: B023
                found = await super().__call__(prompt, **options | {"at_gate": lambda: None})
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
    """Its advantage is 0, and its tokens stand below the mean over its group."""

    def thirds(trajectory: Trajectory, task: object) -> float:
        return int(trajectory.id.rpartition(".")[2]) % 3 / 2

    settings: dict[str, Any] = {
        "group_size": 7,
        "steps": 1,
        "evaluate_every": 0,
    }  # the last one is broken
    roc = RocSettings(down_sample_to_n=0)
    learner, _, _ = await played(tmp_path, reward=thirds, roc=roc, **settings)
    advantages = learner.batches[0]["advantages"].tolist()
    assert len(advantages) == 18
    assert advantages.count(0.0) == 6


async def test_groups_without_a_difference_count_where_they_are_not_rejected(
    tmp_path: Path,
) -> None:
    def of_one_task(trajectory: Trajectory, task: Any) -> float:
        number, index = int(trajectory.id.split("-")[1]), int(trajectory.id.rpartition(".")[2])
        return float(number == 0 and index % 2)

    for rejects, num_samples in ((True, 4), (False, 12)):
        roc = RocSettings(down_sample_to_n=4, reject_equal_reward=rejects)
        learner, _, _ = await played(
            tmp_path / str(rejects), reward=of_one_task, roc=roc, steps=1, evaluate_every=0
        )
        assert len(learner.batches[0]["lengths"]) == num_samples


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
    rows = lines(run.path / "trajectories" / "step-00001.jsonl")
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


async def test_without_any_reward_none_is_reported(tmp_path: Path) -> None:
    class Broken(Played):
        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            found = await super().__call__(prompt, **options)
            for one in found:
                one.stop_reason = StopReason.INFRASTRUCTURE
            return found

    tasks = TaskSource.open(ARITHMETIC)
    _, _, run = await played(tmp_path, tasks=tasks, run_group=Broken(tasks), steps=1)
    held_out, trained, *_ = lines(run.path / "metrics.jsonl")
    assert (held_out["held_out/reward"], trained["reward"]) == (None, None)


class Refusing(Played):
    """Some prompts are too long."""

    refuses = 1  # of three, in each step

    async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
        if int(options["name"].split("-")[1]) < self.refuses:
            raise RequestError("messages: they make 9000 tokens")
        return await super().__call__(prompt, **options)


async def test_a_task_that_cannot_be_asked_is_left_out(tmp_path: Path) -> None:
    tasks, told = TaskSource.open(ARITHMETIC), Told()
    learner, _, run = await played(
        tmp_path, tasks=tasks, run_group=Refusing(tasks), told=told, steps=1, evaluate_every=0
    )
    assert len(learner.batches[0]["lengths"]) == 8
    assert len(lines(run.path / "trajectories" / "step-00001.jsonl")) == 16
    (said,) = [line for line in told.lines if line.startswith("Left out")]
    assert "9000 tokens" in said


async def test_tasks_that_all_cannot_be_asked_end_the_run(tmp_path: Path) -> None:
    tasks = TaskSource.open(ARITHMETIC)
    run_group = Refusing(tasks)
    run_group.refuses = 3
    with pytest.raises(ExceptionGroup) as caught:  # by the router around it
        await played(tmp_path, tasks=tasks, run_group=run_group, steps=1, evaluate_every=0)
    assert "9000 tokens, and so it is with all tasks" in str(sole(caught.value))


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
    last = told.standings[-1]
    assert (last.stage, last.step, last.num_steps) == ("stage 2 of 2: long", 2, 2)
    assert last.left_s == 0
    assert {"reward", "held-out reward", "time"} <= set(last.values)
    assert any("3/3: reward" in line for line in told.lines)


async def test_a_stage_learns_from_what_is_not_solved_each_time(tmp_path: Path) -> None:
    class HalfSolved(Played):
        """Every other task is, when they are filtered."""

        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            number = int(options["name"].split("-")[2]) if "filter" in options["name"] else 1
            self._right = 0.5 if number % 2 else 1.0
            return await super().__call__(prompt, **options)

    tasks = TaskSource.open(ARITHMETIC)
    run_group = HalfSolved(tasks)
    stages = {"hard": StageSettings(steps=2, filter_tasks=4, filter_rollouts=4)}
    _, _, run = await played(
        tmp_path, tasks=tasks, run_group=run_group, stages=stages, evaluate_every=0
    )
    assert run_group.sizes == [4] * 4 + [8] * 6
    hard = {run_group.prompts[1], run_group.prompts[3]}
    assert set(run_group.prompts[4:]) == hard
    filtered, *_ = lines(run.path / "metrics.jsonl")
    assert (filtered["filter/num_tasks"], filtered["filter/num_left"]) == (4, 2)


async def test_a_stage_with_nothing_left_to_learn_is_passed_over(tmp_path: Path) -> None:
    stages = {"hard": StageSettings(steps=9, filter_tasks=2), "then": StageSettings(steps=1)}
    told = Told()
    _, run_group, _ = await played(tmp_path, right=1.0, stages=stages, told=told, evaluate_every=0)
    assert run_group.sizes == [8] * 2 + [8] * 3
    assert any("every task is solved each time" in line for line in told.lines)
    assert told.standings[-1].left_s is None


async def test_without_learning_rollouts_are_written_down_alone(tmp_path: Path) -> None:
    learner, _, run = await played(tmp_path, steps=2, learn=False, evaluate_every=0)
    assert [op for op, _ in learner.asked] == ["publish"]
    assert len(lines(run.path / "trajectories" / "step-00002.jsonl")) == 24


async def test_shuffled_rewards_are_those_of_others(tmp_path: Path) -> None:
    learned = []
    for shuffle in (False, True):
        learner, _, run = await played(
            tmp_path / str(shuffle),
            roc=RocSettings(down_sample_to_n=0),
            steps=1,
            shuffle_rewards=shuffle,
            evaluate_every=0,
        )
        learned.append(learner.batches[0]["advantages"].tolist())
        (metrics,) = [one for one in lines(run.path / "metrics.jsonl") if "reward" in one]
        assert metrics["reward"] == pytest.approx(4 / 7)
        assert metrics["num_without_reward"] == 3  # what is broken is broken
    straight, shuffled = learned
    assert straight != shuffled
    assert sorted(straight) == sorted(shuffled)
