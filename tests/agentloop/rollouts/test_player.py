"""Environments: what they may return, who is to blame for a failure, and what is recorded."""

from __future__ import annotations

import asyncio
import math
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest

import agentloop
from agentloop.agent.rollout import Budget
from agentloop.agent.tools import Tool, as_tool
from agentloop.environments.agent import Agent
from agentloop.environments.environment import Environment, EnvSettings, load, open_tasks, reward_of
from agentloop.environments.rewards.reward import Grader, Reward, RewardFunction
from agentloop.environments.tasks.sources import Task, TaskSource, TasksSettings
from agentloop.errors import (
    DataError,
    InfrastructureFailed,
    RequestError,
    RewardError,
    ServerUnavailable,
    SettingsError,
)
from agentloop.events import RolloutStarted
from agentloop.inference.scheduling.admission import Admission, AdmissionLimits, Forecast
from agentloop.inference.scheduling.group_gate import AdmittedGroup, GroupGate
from agentloop.inference.sglang.sampling import Sampling
from agentloop.plain_json import dumps, loads
from agentloop.rollouts.metrics import GroupFigures, RolloutFigures
from agentloop.rollouts.player import AgentPlayer, EnvironmentPlayer
from agentloop.rollouts.record import NoReward, RolloutGroup, RolloutRecord
from agentloop.rollouts.request import GroupRequest, Purpose
from agentloop.rollouts.runner import GroupRunner, play_siblings
from agentloop.sandbox import CallResult, CallStatus, LostBy, SandboxUnavailable, SessionLost
from agentloop.trajectory import StopReason, Trajectory, Turn, TurnEnd
from tests.fakes import FakePool, NoModel, Unprintable
from tests.rollouts import records_of, reward_in

TASK = Task("t", "", "42", extra={"top": 100})


class Model(NoModel):
    """Answers each conversation with the number of messages in it; records what it was asked.

    With `reply`, each further answer is one more.
    """

    def resolve_tools(self, tools: Sequence[Any]) -> list[Tool]:
        return [as_tool(tool) for tool in tools]

    def __init__(self, stop_reason: StopReason = StopReason.ANSWERED) -> None:
        super().__init__()
        self.asked: list[tuple[Any, dict[str, Any]]] = []
        self.stop_reason = stop_reason
        self.error: Exception | None = None
        self.max_turns = 3

    async def rollout(self, messages: Any, **options: Any) -> Trajectory:
        self.asked.append((messages, options))
        turn = Turn(output_ids=[1], logprobs=[-1.0], end=TurnEnd.STOP, text="hm")
        trajectory = Trajectory(options["id"], [9], [turn])
        options["on_event"](RolloutStarted(trajectory, ""))
        await anyio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error
        trajectory.answer = str(len(messages))
        while (
            options["reply"] is not None and await options["reply"](trajectory.answer) is not None
        ):
            if len(trajectory.turns) == self.max_turns:
                trajectory.stop_reason = StopReason.TURN_BUDGET
                return trajectory
            await anyio.lowlevel.checkpoint()
            trajectory.turns.append(turn)
            trajectory.answer = str(int(trajectory.answer) + 1)
        trajectory.stop_reason = self.stop_reason
        return trajectory


async def run(
    environment: Environment, model: Model | None = None, *, size: int = 2, **options: Any
) -> Sequence[RolloutRecord]:
    player = EnvironmentPlayer(environment, model or Model(), sampling=Sampling(seed=7))
    budget = Budget(timeout_s=options.pop("timeout_s", 5))
    task = options.pop("task", TASK)
    return await records_of(player, task, size=size, budget=budget, **options)


async def play_and_grade(
    environment: Environment, check: RewardFunction, *, timeout_s: float = 5
) -> Sequence[RolloutRecord]:
    async with Grader(function=check) as grader:
        player = EnvironmentPlayer(environment, Model(), sampling=Sampling(), grader=grader)
        budget = Budget(timeout_s=timeout_s)
        group = await GroupRunner(player, grader).run(GroupRequest(TASK, "1-t", 2, budget))
    return group.rollouts


async def grade_answer(trajectory: Trajectory, task: Task) -> Reward:
    return Reward(float(trajectory.answer), trajectory.answer, f"as {task.answer}")


async def test_conversation_that_is_returned_is_graded() -> None:
    @agentloop.environment
    async def asks(task: Any, agent: Agent) -> Trajectory:
        await agent.chat("Think.")
        return await agent.run("?", system="Answer.")

    for episode in await play_and_grade(asks, grade_answer):
        assert episode.reward == Reward(2.0, "2", "as 42")
        assert len(episode.trajectories) == 2


async def test_grading_does_not_take_the_environments_time() -> None:
    @agentloop.environment
    async def asks(task: Any, agent: Agent) -> Trajectory:
        return await agent.run("?")

    async def slow(trajectory: Trajectory, task: Task) -> float:
        started = anyio.current_time()
        while anyio.current_time() < started + 0.2:
            await anyio.lowlevel.checkpoint()
        return 1.0

    for episode in await play_and_grade(asks, slow, timeout_s=0.1):
        assert reward_in(episode).value == 1.0


async def test_environment_may_combine_a_grade_with_other_parts() -> None:
    @agentloop.environment
    async def brief(task: Any, agent: Agent) -> dict[str, float]:
        checker = agent.other("checker")
        trajectory = await agent.run("?")
        right = (await agent.grade(trajectory)).value
        checked = await checker.grade(await checker.run("Is it right?", system="Check."))
        checker.reward = checked.value
        assert right is not None
        return {"right": right, "brief": 0.25}

    for episode in await play_and_grade(brief, grade_answer):
        assert reward_in(episode).parts == {"right": 1.0, "brief": 0.25}
        assert episode.others["checker"].reward == 2.0


async def test_recorded_measurements_do_not_change_the_reward() -> None:
    @agentloop.environment
    async def measures(task: Any, agent: Agent) -> float:
        agent.record(tries=1, depth=np.float32(2))
        await agent.run("?")
        agent.other("checker").record(tries=3)
        return 1.0

    for rollout in await run(measures):
        assert rollout.recorded == {"tries": 3.0, "depth": 2.0}
        assert (reward_in(rollout).value, reward_in(rollout).parts) == (1.0, {})
        figures = RolloutFigures.of(rollout)
        assert GroupFigures.from_dict(asdict(GroupFigures([figures]))).rollouts == [figures]
    group = RolloutGroup(TASK, [rollout])
    assert [row.recorded for row in group.rows()] == [{"tries": 3.0, "depth": 2.0}]


async def test_recorded_value_must_be_a_number() -> None:
    @agentloop.environment
    async def measures(task: Any, agent: Agent) -> float:
        agent.record(tries=math.nan)
        return 1.0

    with pytest.raises(RequestError, match="record: tries: expected a finite number"):
        await run(measures)


@pytest.mark.parametrize("inside", [False, True])
async def test_failing_reward_function_ends_the_run(inside: bool) -> None:
    @agentloop.environment
    async def asks(task: Any, agent: Agent) -> Any:
        trajectory = await agent.run("?")
        if not inside:
            return trajectory
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(agent.grade, trajectory)
        return 1.0

    def broken(trajectory: Trajectory, task: Task) -> float:
        raise KeyError("board")

    with pytest.raises(RewardError, match="board"):
        await play_and_grade(asks, broken)


class Gate:
    """Admits a group when it is told to."""

    def __init__(self) -> None:
        self.opened = anyio.Event()
        self.log: list[Any] = []

    @asynccontextmanager
    async def group(
        self, name: str, size: int, num_prompt: int, *, is_single: bool
    ) -> AsyncIterator[AdmittedGroup]:
        self.log.append((name, size, num_prompt, is_single))
        await self.opened.wait()
        yield AdmittedGroup(
            name, (f"{name}.0",), lambda key, is_whole: self.log.append(f"{key} ended: {is_whole}")
        )
        self.log.append("left")


async def test_group_waits_until_it_may_start_before_its_time_begins() -> None:
    gate, model = Gate(), Model()

    @agentloop.environment
    async def asks(task: Any, agent: Agent) -> float:
        await agent.run("?")
        gate.log.append("played")
        return 1.0

    player = EnvironmentPlayer(asks, model, sampling=Sampling(), gate=gate)
    request = GroupRequest(TASK, "1-t", 1, Budget(timeout_s=5))

    async def play() -> None:
        async with player.group(request) as siblings:
            await play_siblings(siblings)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(play)
        await anyio.wait_all_tasks_blocked()
        assert (gate.log, model.asked) == ([("1-t", 1, 0, False)], [])
        assert request.queued.is_set()
        opened_s = anyio.current_time()
        gate.opened.set()
    assert gate.log[1:] == ["played", "1-t.0 ended: True", "left"]
    ((_, options),) = model.asked
    assert options["budget"].timeout_s == pytest.approx(5, abs=anyio.current_time() - opened_s)


class UnendingModel(Model):
    """Never answers, so that a group that has started stays in flight."""

    own_tools: Any = None

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        admission = Admission(AdmissionLimits(), Forecast(longest=320, prior=200))
        self.router = GroupGate(admission, capacity=lambda: num_tokens)

    async def prompt_ids(self, messages: Any, tools: Any) -> list[int]:
        return [9]

    async def rollout(self, messages: Any, **options: Any) -> Trajectory:
        self.asked.append((messages, options))
        await anyio.sleep_forever()
        raise AssertionError


@pytest.mark.parametrize("num_tokens", [2000, 20000])
async def test_environment_starts_as_many_groups_as_the_built_in_agent(num_tokens: int) -> None:
    @agentloop.environment
    async def asks(task: Any, agent: Agent) -> float:
        await agent.run("?")
        return 1.0

    async def num_started(make: Callable[[UnendingModel], EnvironmentPlayer]) -> int:
        model = UnendingModel(num_tokens)
        player = make(model)

        async def play(name: str) -> None:
            async with player.group(GroupRequest(TASK, name, 8, Budget())) as siblings:
                await play_siblings(siblings)

        async with anyio.create_task_group() as tasks:
            for index in range(40):
                tasks.start_soon(play, f"{index}-t")
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        return len({options["id"].partition(".")[0] for _, options in model.asked})

    num_of_agent = await num_started(lambda model: AgentPlayer(model, [], sampling=Sampling()))
    num_of_environment = await num_started(
        lambda model: EnvironmentPlayer(asks, model, sampling=Sampling(), gate=model.router)
    )
    assert num_of_environment == num_of_agent
    assert 1 <= num_of_agent < 40


async def test_rollouts_that_begin_alike_share_their_prompt() -> None:
    def look() -> str:
        """Look."""
        return "nothing"

    @agentloop.environment
    async def asks(task: Any, agent: Agent) -> float:
        index = int(agent.id[-1])
        await agent.run("?" if index < 3 else "??", tools=[look] if index else [])
        await agent.run("?", tools=[look])  # later ones may have any history
        await agent.other("checker").run("?", tools=[look])
        return 1.0

    model = Model()
    await run(asks, model, size=4)
    shared = {options["id"]: options["group"] for _, options in model.asked}
    assert [name for name, group in shared.items() if group] == ["1-t.0"]
    assert shared["1-t.0"] == "1-t"

    @agentloop.environment
    async def same(task: Any, agent: Agent) -> float:
        await agent.run("?", tools=["jupyter_code", look, Model().rollout])
        return 1.0

    model = Model()
    await run(same, model, size=3)
    assert [options["group"] for _, options in model.asked] == ["1-t"] * 3


async def test_rollout_has_the_conversations_and_the_reward_of_its_environment() -> None:
    @agentloop.environment
    async def two(task: Any, agent: Agent) -> dict[str, float]:
        first = await agent.run(f"Up to {task.top}?", system="Be brief.")
        second = await agent.chat([{"role": "user", "content": "And now?"}])
        return {"a": float(first.answer), "b": float(second)}

    model = Model()
    episodes = await run(two, model)
    assert [rollout.id for rollout in episodes] == ["1-t.0", "1-t.1"]
    ids = [[trajectory.id for trajectory in episode.trajectories] for episode in episodes]
    assert ids == [["1-t.0", "1-t.0+1"], ["1-t.1", "1-t.1+1"]]
    for episode in episodes:
        assert episode.reward == Reward(3.0, "1", "a 2, b 1", {"a": 2.0, "b": 1.0})
    seeds = [options["sampling"].seed for _, options in model.asked]
    assert len(set(seeds)) == 4
    assert model.asked[0][0][0] == {"role": "system", "content": "Be brief."}
    again = Model()
    await run(two, again)
    assert sorted(seeds) == sorted(options["sampling"].seed for _, options in again.asked)


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.25, 0.25),
        ({"x": 1, "y": False}, 2.0),
        (Decimal("0.5"), 0.5),
        (Reward(0.5, "a", "why"), 0.5),
        (Reward(None, None, "unknown"), None),
        (None, None),
        ({"x": 0.05, "y": 0.2, "z": -0.3}, 0.0),  # and not 5.6e-17
    ],
)
def test_values_that_an_environment_may_return(value: Any, reward: float | None) -> None:
    assert reward_of(value, {"x": 2.0}).value == reward


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("1", "the reward: expected .* got '1'"),
        ([1], "the reward: "),
        (1j, "the reward: "),
        (float("nan"), "the reward: .* got nan"),
        (-1e160, "the reward: .* got -1e[+]160"),
        (10**400, "the reward: "),
        (Decimal("sNaN"), "the reward: "),
        ({}, "the reward: expected at least one part"),
        ({"x": None}, "part 'x': .* got None"),
        ({"x": float("inf")}, "part 'x': .* got inf"),
        (Reward(float("inf"), None, ""), "reward: .* got inf"),
        (Reward("0.5", None, ""), "reward: .* got '0.5'"),  # type: ignore[arg-type]
        (Reward(1.0, None, "", {"x": float("nan")}), "part 'x': .* got nan"),
    ],
)
def test_reward_must_be_a_finite_number_of_sane_size(value: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        reward_of(value, {})


def test_rewards_of_numpy_become_plain_numbers() -> None:
    np = pytest.importorskip("numpy")
    reward = Reward(np.float32(0.5), np.int64(7), "why", {"x": np.bool_(True)})
    for value in (reward, {"x": np.float64(0.5)}, np.float32(0.5), np.bool_(False)):
        converted = reward_of(value, {})
        assert loads(dumps(asdict(converted), default=None)) == asdict(converted)
    assert reward_of(reward, {}) == Reward(0.5, "7", "why", {"x": 1.0})


@pytest.mark.parametrize("kind", ["other agent", "turn", "token"])
@pytest.mark.parametrize("bad", [math.nan, 1e39, "0.5"])
async def test_bad_number_costs_only_its_own_rollout_the_reward(kind: str, bad: Any) -> None:
    @agentloop.environment
    async def rewards(task: Any, agent: Agent) -> float:
        trajectory = await agent.run("?")
        number = bad if agent.id.endswith(".1") else 0.5
        if kind == "other agent":
            agent.other("checker").reward = number
        elif kind == "turn":
            trajectory.turns[0].reward = number
        else:
            trajectory.turns[0].token_rewards = [number]
        return 1.0

    good, lost = await run(rewards)
    assert reward_in(good).value == 1.0
    assert reward_in(lost).value is None
    where = {
        "other agent": "reward of 1-t.1+checker",
        "turn": "turn 1 of 1-t.1: reward",
        "token": "turn 1 of 1-t.1: token_rewards",
    }
    assert f"bad value: {where[kind]}: expected a finite number" in reward_in(lost).reason
    assert reward_in(lost).reason.endswith(f"got {bad!r}")


def test_weight_of_a_missing_reward_part_is_refused() -> None:
    assert reward_of({"won": 1, "fast": 0.5}, {"fast": 2}).value == 2.0
    with pytest.raises(ValueError, match=r"weights: wonn: .* no such part; its parts: won, fast"):
        reward_of({"won": 1, "fast": 0.5}, {"wonn": 5, "fast": 2})


async def test_misspelt_weight_refuses_the_task_and_is_named() -> None:
    @agentloop.environment(weights={"wonn": 5})
    async def game(task: Any, agent: Agent) -> dict[str, float]:
        await agent.run("?")
        return {"won": 1.0}

    with pytest.raises(RequestError, match=r"environment game: .* weights: wonn: "):
        await run(game)


async def test_environment_that_always_fails_refuses_the_task() -> None:
    @agentloop.environment
    async def broken(task: Any, agent: Agent) -> None:
        raise KeyError("board")

    with pytest.raises(RequestError, match=r"environment broken: .* raised KeyError: 'board'"):
        await run(broken)


async def test_rollout_that_its_environment_failed_has_no_reward() -> None:
    @agentloop.environment
    async def sometimes(task: Any, agent: Agent) -> float:
        trajectory = await agent.run("?")
        return 1.0 if trajectory.id.endswith(".0") else float("nan")

    good, bad = await run(sometimes)
    assert (reward_in(good).value, reward_in(bad).value) == (1.0, None)
    assert reward_in(bad).reason.startswith("the environment gave a bad value: the reward: ")


@pytest.mark.parametrize("kind", ["own", "infrastructure", "value"])
async def test_error_without_text_costs_only_its_own_rollout_the_reward(kind: str) -> None:
    class Lost(Unprintable, InfrastructureFailed):
        pass

    class Value:
        def __float__(self) -> float:
            raise Unprintable

    @agentloop.environment
    async def sometimes(task: Any, agent: Agent) -> Any:
        await agent.run("?")
        if agent.id.endswith(".0"):
            return 1.0
        if kind == "value":
            return Value()
        raise Lost if kind == "infrastructure" else Unprintable

    good, bad = await run(sometimes)
    assert (reward_in(good).value, reward_in(bad).value) == (1.0, None)


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("raises", [False, True])
async def test_failure_of_the_infrastructure_is_no_reward_whatever_is_returned(
    hides: bool, raises: bool
) -> None:
    @agentloop.environment
    async def hiding(task: Any, agent: Agent) -> float:
        try:
            await agent.run("?")
        except InfrastructureFailed:
            if not hides:
                raise
        return 1.0

    model = Model(StopReason.INFRASTRUCTURE)
    if raises:
        model.error = ServerUnavailable("gone")
    for episode in await run(hiding, model):
        assert reward_in(episode).value is None
        assert reward_in(episode).reason.startswith("infrastructure: ")


async def test_environment_that_hangs_ends_at_its_deadline() -> None:
    ended: list[str] = []

    @agentloop.environment
    async def hangs(task: Any, agent: Agent) -> float:
        trajectory = await agent.run("?")
        if trajectory.id.endswith(".1"):
            try:
                await anyio.sleep_forever()
            finally:
                ended.append(trajectory.id)
        return 1.0

    good, bad = await run(hangs, timeout_s=0.2)
    assert ended == ["1-t.1"]
    assert reward_in(good).value == 1.0
    assert reward_in(bad).reason == "the environment ran out of time (0.2 s)"


async def test_environment_that_waits_for_a_thread_is_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentloop.rollouts.player._GRACE_S", 0.1)
    release = threading.Event()

    @agentloop.environment
    async def waits(task: Any, agent: Agent) -> float:
        await agent.run("?")
        if agent.id.endswith("0"):
            return 1.0
        await anyio.to_thread.run_sync(release.wait)
        return 2.0

    try:
        done, late = await run(waits, timeout_s=0.2)
    finally:
        release.set()
    assert reward_in(done).value == 1.0
    assert late.reward == Reward(None, None, "the environment ran out of time (0.2 s)")
    assert late.no_reward is NoReward.ENVIRONMENT


async def test_late_reward_does_not_count() -> None:
    @agentloop.environment
    async def is_late(task: Any, agent: Agent) -> float:
        await agent.run("?")
        if agent.id.endswith("0"):
            with anyio.CancelScope(shield=True):
                await anyio.sleep(2 * 0.1)
        return 1.0

    late, done = await run(is_late, timeout_s=0.1)
    assert late.reward == Reward(None, None, "the environment ran out of time (0.1 s)")
    assert reward_in(done).value == 1.0


async def test_conversations_that_the_environment_left_running_are_stopped() -> None:
    model = Model()
    leaked: list[asyncio.Future[Any]] = []

    async def never(answer: str) -> str | None:
        await anyio.sleep_forever()
        return None

    @agentloop.environment
    async def leaks(task: Any, agent: Agent) -> float:
        await agent.run("?")
        leaked.append(asyncio.ensure_future(agent.run("!", reply=never)))
        await anyio.wait_all_tasks_blocked()
        leaked.append(asyncio.ensure_future(asks_later(agent)))
        return 1.0

    async def asks_later(agent: Agent) -> None:
        await agent.run("and now?")

    (episode,) = await run(leaks, model, size=1)
    running, later = await asyncio.gather(*leaked, return_exceptions=True)
    for error in (running, later):
        assert isinstance(error, RequestError)
        assert "1-t.0 has ended" in str(error)
    assert [trajectory.stop_reason for trajectory in episode.trajectories] == [
        "answered",
        "environment",
    ]
    assert [trajectory.id for trajectory in episode.trained] == ["1-t.0"]
    assert len(model.asked) == 2


@pytest.mark.parametrize("ends", ["cancels", "exits"])
async def test_cancelled_error_and_system_exit_fail_a_single_rollout(ends: str) -> None:
    @agentloop.environment
    async def slips(task: Any, agent: Agent) -> float:
        await agent.run("?")
        if agent.id.endswith("0"):
            if ends == "exits":
                sys.exit(3)
            helper = asyncio.ensure_future(anyio.sleep_forever())
            helper.cancel()
            await helper
        return 1.0

    failed, done = await run(slips)
    name = "SystemExit: 3" if ends == "exits" else "CancelledError"
    assert reward_in(failed).value is None
    assert reward_in(failed).reason.startswith(f"the environment raised {name} (test_player.py:")
    assert reward_in(done).value == 1.0


async def test_error_that_the_agent_causes_has_the_declared_reward() -> None:
    @agentloop.environment(agent_errors={ValueError: -1.0})
    async def parses(task: Any, agent: Agent) -> float:
        if agent.id.endswith("0"):

            def read(answer: str) -> str | None:
                raise ValueError(f"{answer} is no number")

            await agent.run("?", reply=read)
        await agent.run("?")
        return 1.0 if agent.id.endswith("1") else float({**task.extra}["missing"])

    parsed, done, broken = await run(parses, size=3)
    assert reward_in(parsed).value == -1.0
    assert reward_in(parsed).reason.startswith("the agent caused ValueError: 1 is no number (test_")
    # What it has written is trained on.
    assert [trajectory.stop_reason for trajectory in parsed.trained] == [StopReason.ANSWERED]
    assert reward_in(done).value == 1.0
    assert broken.no_reward is NoReward.ENVIRONMENT


@pytest.mark.parametrize("bad_part", ["turn", "text", "token", "short", "none", "other"])
@pytest.mark.parametrize("raises", [False, True])
async def test_rewards_are_checked_however_rollout_ends(bad_part: str, raises: bool) -> None:
    @agentloop.environment(agent_errors={ValueError: -1.0})
    async def scores(task: Any, agent: Agent) -> float:
        trajectory = await agent.run("?")
        critic = agent.other("critic")
        await critic.run("?")
        critic.reward = 0.5
        turn: Any = trajectory.turns[0]
        turn.reward, turn.token_rewards = np.float32(2), np.ones(1)
        if agent.id.endswith("0"):
            match bad_part:
                case "turn":
                    turn.reward = math.nan
                case "text":
                    turn.reward = "1"
                case "token":
                    turn.token_rewards = [math.inf]
                case "short":
                    turn.token_rewards = [1.0, 2.0]
                case "none":
                    turn.token_rewards = 1.0
                case "other":
                    critic.reward = math.nan
        if raises:
            raise ValueError("not a move")
        return 1.0

    bad, good = await run(scores)
    assert bad.no_reward is NoReward.ENVIRONMENT
    assert reward_in(bad).reason.startswith("the environment gave a bad value: ")
    assert [(turn.reward, turn.token_rewards) for turn in bad.trajectories[0]] == [(None, [])]
    assert bad.others["critic"].reward is None
    assert reward_in(good).value == (-1.0 if raises else 1.0)
    (turn,) = good.trajectories[0]
    assert (turn.reward, turn.token_rewards, type(turn.reward)) == (2.0, [1.0], float)
    assert good.others["critic"].reward == 0.5


async def test_bad_rewards_of_straggler_are_dropped() -> None:
    @agentloop.environment
    async def waits(task: Any, agent: Agent) -> float:
        trajectory = await agent.run("?")
        if agent.id.endswith("1"):
            trajectory.turns[0].reward = object()  # type: ignore[assignment]
            await agent.run("!", reply=never)
        return 1.0

    async def never(answer: str) -> str | None:
        await anyio.sleep_forever()
        return None

    _, straggler = await run(waits, enough=1)
    assert straggler.no_reward is NoReward.STOPPED
    ended, stopped = straggler.trajectories
    assert (ended.turns[0].reward, ended.stop_reason) == (None, StopReason.ANSWERED)
    assert stopped.stop_reason is StopReason.STRAGGLER


async def test_agent_error_keeps_earlier_stops() -> None:
    @agentloop.environment(agent_errors={ValueError: -1.0})
    async def plays(task: Any, agent: Agent) -> float:
        async def never(answer: str) -> str | None:
            side_scope.cancel()
            await anyio.sleep_forever()
            return None

        async def fails(answer: str) -> str | None:
            raise KeyError(answer)

        with anyio.CancelScope() as side_scope:
            await agent.run("a side question", reply=never)
        with suppress(KeyError):
            await agent.run("another one", reply=fails)
        await agent.run("move")
        raise ValueError("not a move")

    (record,) = await run(plays, size=1)
    assert reward_in(record).value == -1.0
    assert [trajectory.stop_reason for trajectory in record.trajectories] == [
        StopReason.ENVIRONMENT,
        StopReason.ENVIRONMENT,
        StopReason.ANSWERED,
    ]
    assert [trajectory.id for trajectory in record.trained] == ["1-t.0+2"]


@pytest.mark.parametrize("talks", ["message by message", "at the same time", "translated"])
async def test_conversations_cut_off_by_agent_error_count(talks: str) -> None:
    @agentloop.environment(agent_errors={ValueError: -1.0})
    async def plays(task: Any, agent: Agent) -> float:
        def parse(answer: str) -> str | None:
            raise ValueError(f"{answer} is not a move")

        async def never(answer: str) -> str | None:
            await anyio.sleep_forever()
            return None

        if talks == "message by message":
            async with agent.conversation() as talk:
                parse(await talk.ask("Your move?"))
        elif talks == "translated":
            try:
                await agent.run("Your move?", reply=lambda answer: answer["move"])  # type: ignore[index]
            except TypeError as error:
                raise ValueError("not a move") from error
        else:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(agent.other("black").run, "?", reply=never))
                await anyio.wait_all_tasks_blocked()
                tasks.start_soon(partial(agent.run, "?", reply=parse))
        return 1.0

    (record,) = await run(plays, size=1)
    assert reward_in(record).value == -1.0
    assert {trajectory.stop_reason for trajectory in record.all_trajectories} == {
        StopReason.ANSWERED
    }


async def test_refused_conversation_takes_no_number() -> None:
    model = Model()

    @agentloop.environment
    async def asks(task: Any, agent: Agent) -> float:
        await agent.run("?")
        with pytest.raises(RequestError):
            await agent.run("?", max_turns=0)
        rollout, model.rollout = model.rollout, refuses  # type: ignore[method-assign]
        with pytest.raises(RequestError):
            await agent.run("far too long")
        model.rollout = rollout  # type: ignore[method-assign]
        await agent.run("!")
        return 1.0

    async def refuses(*_: Any, **options: Any) -> Trajectory:
        raise RequestError("the prompt is too long")

    (record,) = await run(asks, model, size=1)
    assert [trajectory.id for trajectory in record.trajectories] == ["1-t.0", "1-t.0+1"]


@pytest.mark.parametrize(
    ("last_text", "answer"), [("It is \\boxed{0}", "0"), ("It is 12.", "It is 12."), ("", None)]
)
@pytest.mark.parametrize("gives", ["mapping", "number", "reward", "error"])
async def test_answer_is_what_model_said_last(
    gives: str, last_text: str, answer: str | None
) -> None:
    @agentloop.environment(agent_errors={ValueError: 0.0})
    async def asks(task: Any, agent: Agent) -> Any:
        last = await agent.run("?")
        first = await agent.run("!")
        last.answer, first.answer = last_text, last_text and "something else"
        first.elapsed_s, last.elapsed_s = 1.0, 2.0
        match gives:
            case "mapping":
                return {"found": 0.0}
            case "number":
                return 0.0
            case "reward":
                return Reward(0.0, None, "wrong")
        raise ValueError("wrong")

    (record,) = await run(asks, size=1)
    assert (reward_in(record).value, reward_in(record).answer) == (0.0, answer)


async def test_number_of_reward_function_keeps_model_answer() -> None:
    @agentloop.environment
    async def asks(task: Any, agent: Agent) -> Trajectory:
        return await agent.run("?", system="Answer.")

    (record, _) = await play_and_grade(asks, lambda trajectory, task: 0.5)
    assert (reward_in(record).value, reward_in(record).answer) == (0.5, "2")


async def test_environment_that_leaves_no_time_for_its_agent_has_failed() -> None:
    @agentloop.environment
    async def dawdles(task: Any, agent: Agent) -> float:
        if agent.id.endswith("1"):
            return 1.0
        await anyio.sleep(1.01 * agent.time_left_s)
        await agent.run("?")
        return 1.0

    late, _ = await run(dawdles, timeout_s=0.1)
    assert "left no time" in reward_in(late).reason
    assert late.no_reward is NoReward.ENVIRONMENT


@pytest.mark.parametrize("in_group", [False, True])
async def test_environment_that_ignores_its_cancellation_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, in_group: bool
) -> None:
    monkeypatch.setattr("agentloop.rollouts.player._GRACE_S", 0.1)
    may_end = anyio.Event()

    async def persists() -> None:
        while not may_end.is_set():
            with suppress(BaseException):
                await may_end.wait()

    @agentloop.environment
    async def ignores(task: Any, agent: Agent) -> float:
        await agent.run("?")
        if agent.id.endswith("0"):
            return 1.0
        if in_group:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(persists)
        await persists()
        return 2.0

    done, late = await run(ignores, timeout_s=0.2)
    may_end.set()
    assert reward_in(done).value == 1.0
    assert late.reward == Reward(None, None, "the environment ran out of time (0.2 s)")


async def test_actions_of_leaked_tasks_do_not_count() -> None:
    refused: list[str] = []
    has_returned = anyio.Event()

    @agentloop.environment
    async def leaks(task: Any, agent: Agent) -> float:
        trajectory = await agent.run("?")
        black = agent.other("black")
        await black.run("?")

        async def acts_later() -> None:
            await has_returned.wait()
            black.reward, trajectory.turns[0].reward = float("nan"), 1e200
            trajectory.turns[0].token_rewards.append(1e200)
            for act in (lambda: agent.other("white"), lambda: agent.url):
                with pytest.raises(RequestError, match="its environment has returned"):
                    act()
                refused.append("")

        if agent.id.endswith("0"):
            leaked.append(asyncio.ensure_future(acts_later()))
            return 1.0
        has_returned.set()
        await asyncio.wait(leaked)
        return 0.0

    leaked: list[asyncio.Future[None]] = []
    model = Model()
    model.session_listener = SimpleNamespace(url_of=str)
    early, _ = await run(leaks, model)
    await asyncio.gather(*leaked)
    assert len(refused) == 2
    assert early.others["black"].reward is None
    assert [(turn.reward, turn.token_rewards) for turn in early.trajectories[0]] == [(None, [])]


async def test_outage_inside_a_task_group_is_the_infrastructures() -> None:
    @agentloop.environment
    async def judges(task: Any, agent: Agent) -> float:
        await agent.run("?")

        async def ask(fails: bool) -> None:
            if fails:
                raise InfrastructureFailed("the judge is down")
            raise KeyError("a victim")

        if agent.id.endswith("0"):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, True)
                tasks.start_soon(ask, False)
        return 1.0

    lost, _ = await run(judges)
    assert lost.reward == Reward(None, None, "infrastructure: the judge is down")
    assert lost.no_reward is NoReward.INFRASTRUCTURE


async def test_only_exceptions_of_the_function_are_errors_of_the_agent() -> None:
    errors = {ValueError: np.float32(0.5), TimeoutError: -1.0, Exception: -2.0}

    @agentloop.environment(agent_errors=errors)  # type: ignore[arg-type]
    async def plays(task: Any, agent: Agent) -> Any:
        await agent.run("?")
        match agent.id[-1]:
            case "0":
                return float("nan")  # a mistake of the environment's
            case "1":
                raise ExceptionGroup("two", [ValueError("a"), ValueError("b")])
            case "2":
                raise RequestError("an unknown tool")
        return 1.0

    bad, parsed, unknown, _ = await run(plays, size=4)
    assert (bad.no_reward, unknown.no_reward) == (NoReward.ENVIRONMENT, NoReward.ENVIRONMENT)
    assert (reward_in(parsed).value, type(reward_in(parsed).value)) == (0.5, float)


async def test_environment_that_cancels_itself_has_failed() -> None:
    @agentloop.environment
    async def cancels(task: Any, agent: Agent) -> float:
        await agent.run("?")
        if agent.id.endswith("0"):
            running = asyncio.current_task()
            assert running is not None
            running.cancel()
            await anyio.sleep(1)
        return 1.0

    failed, done = await run(cancels)
    assert failed.no_reward is NoReward.ENVIRONMENT
    assert reward_in(done).value == 1.0


def test_task_and_agent_types_may_exist_for_type_checkers_only() -> None:
    async def game(task: Missing, agent: Missing, top: int = 3) -> None:  # type: ignore[name-defined]  # noqa: F821
        pass

    assert agentloop.environment(game).with_arguments({"top": "7"}).arguments == {"top": 7}


async def test_stragglers_are_stopped_when_enough_have_ended() -> None:
    @agentloop.environment
    async def waits(task: Any, agent: Agent) -> float:
        trajectory = await agent.run("?")
        if not trajectory.id.endswith(".0"):
            await anyio.sleep_forever()
        return 1.0

    first, *stopped = await run(waits, size=3, enough=1)
    assert reward_in(first).value == 1.0
    assert [rollout.reward and rollout.reward.reason for rollout in stopped] == [
        "stopped: enough rollouts of its group had ended"
    ] * 2


@agentloop.environment(tasks=lambda rng: {"answer": rng.randint(1, 9), "top": 9}, weights={"x": 2})
async def counting(task: Any, agent: Agent, *, highest: int, name: str = "a") -> float:
    return highest


def test_arguments_are_checked_against_the_signature() -> None:
    environment = load(EnvSettings(name=f"{__name__}:counting", args={"highest": "3"}))
    assert environment is not None
    assert environment.arguments == {"highest": 3, "name": "a"}
    for arguments, problem in (
        ({}, "env.args.highest: Field required"),
        ({"highest": "x"}, "env.args.highest: Input should be a valid integer"),
        (
            {"highest": 1, "mots": 2},
            r"env.args.mots: Extra .* \(arguments of counting: highest, name\)",
        ),
    ):
        with pytest.raises(SettingsError, match=problem):
            load(EnvSettings(name=f"{__name__}:counting", args=arguments))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no_such_module:f", "there is no module 'no_such_module'"),
        (f"{__name__}:nothing", "has no 'nothing'"),
        (f"{__name__}:Mdel", r"has no 'Mdel' \(.*\): did you mean 'Model'"),
        (f"{__name__}:Model", "decorate it with @agentloop.environment"),
        ("plain", "no installed package registers an environment .plain."),
        ("plain:", "not of the form module:function"),
    ],
)
def test_name_that_is_no_environment_is_refused(name: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        load(EnvSettings(name=name))


def test_environments_are_async_functions_of_task_and_agent() -> None:
    def plain(task: Any, agent: Any) -> float:
        return 1.0

    async def alone(task: Any) -> float:
        return 1.0

    for function in (plain, alone):
        with pytest.raises(TypeError, match="environment: "):
            agentloop.environment(function)  # type: ignore[arg-type]


def test_tasks_are_reproducible_and_separate_from_held_out_ones() -> None:
    def make(rng: Random) -> dict[str, Any]:
        return {"answer": rng.randint(1, 1000), "top": 1000}

    settings = TasksSettings(kind="environment", held_out=8)
    source = TaskSource.open(settings, function=make)
    first = [next(source) for _ in range(20)]
    cursor = source.cursor()
    later = [next(source) for _ in range(20)]
    assert [next(TaskSource.open(settings, cursor, function=make))] == later[:1]
    assert first[0].top == 1000
    held_out = source.held_out()
    assert len(held_out) == 8
    assert not {task.answer for task in held_out} & {task.answer for task in first + later}
    assert source.find(first[3].id) == first[3]


@agentloop.environment(tasks=lambda rng: {"size": 9})
async def maze(task: Any, agent: Agent) -> float:
    return 1.0


def a_task(tasks: Any) -> Task:
    """Return the first task of an environment with these tasks."""
    return next(open_tasks(TasksSettings(), replace(maze, tasks=tasks)))


def test_task_is_plain_data_before_and_after_journaling() -> None:
    made = {"start": (0, 1), "prices": {1: "a"}, "size": 10**30, "at": 0.1}
    task = a_task(lambda rng: made)
    assert task == Task(**loads(dumps(asdict(task))))
    assert (task.start, task.prices, task.size, task.at) == ([0, 1], {"1": "a"}, 10**30, 0.1)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"words": {"a", "b"}}, "field 'words': Type is not JSON serializable: set: use text, "),
        ({"board": [object()]}, "field 'board': Type is not JSON serializable: object: use text"),
        ({"extra": 7}, "field 'extra': agentloop sets it: choose another name"),
        ({"env": "maze"}, "field 'env': agentloop sets it"),
        ({"extra": {}}, "field 'extra': agentloop sets it"),
        ({"level": "hard"}, "field 'level': expected a number, got 'hard'"),
        ({"odds": {"win": [0.5, math.nan]}}, "field 'odds': nan is not a finite number"),
        ({"prices": {1: "a", "1": "b"}}, "field 'prices': two keys are the same as text"),
        ({"rules": [{True: 1, "true": 2}]}, "field 'rules': two keys are the same as text"),
        ({1: "a", "1": "b"}, "two names of fields are the same as text"),
        (["prompt"], "expected the fields of a task, a dict, not ['prompt']"),
    ],
)
def test_fields_that_are_refused_are_named_with_their_environment(
    fields: Any, problem: str
) -> None:
    cases: list[tuple[Any, str]] = [
        (lambda rng: fields, rf"{__file__}:\d+"), ([{}, fields], "number 2")
    ]  # fmt: skip
    for tasks, where in cases:
        with pytest.raises(DataError, match=f"the tasks of maze: {where}: {re.escape(problem)}"):
            a_task(tasks)


def test_tasks_that_differ_only_in_whitespace_are_different_tasks() -> None:
    boards = ["#  #", "# #", "#  #\n"]
    game = replace(maze, tasks=[{"prompt": "Out?", "board": board} for board in boards])
    source = open_tasks(TasksSettings(), game)
    assert source.distinct is not None
    assert [task.board for task in source.distinct] == boards
    assert len({task.id for task in source.distinct}) == 3


def test_error_in_a_task_function_names_its_line() -> None:
    def make(rng: Random) -> dict[str, Any]:
        return {"word": Random().sample([], 1)}

    where = f"{__file__}:{make.__code__.co_firstlineno + 1}"
    for tasks in (make, partial(make)):
        with pytest.raises(DataError, match=f"the tasks of maze: {where}: ValueError: Sample"):
            a_task(tasks)

    def refuse(rng: Random) -> dict[str, Any]:
        raise SettingsError("env.args.file: there is none")

    with pytest.raises(SettingsError, match=r"^env.args.file: there is none$"):
        a_task(refuse)


def test_task_function_must_be_sync_and_take_known_parameters() -> None:
    async def game(task: Any, agent: Agent, *, top: int = 9) -> float:
        return 1.0

    def good(rng: Random, *, top: int, bottom: int = 1) -> dict[str, Any]:
        return {}

    assert agentloop.environment(tasks=good)(game).tasks is good

    def greedy(rng: Random, *, top: int, more: int) -> dict[str, Any]:
        return {}

    line = rf"{__file__}:{greedy.__code__.co_firstlineno}"
    with pytest.raises(TypeError, match=rf"tasks: {line}: it must .*, of which game lacks more$"):
        agentloop.environment(tasks=greedy)(game)

    async def slow(rng: Random) -> dict[str, Any]:
        return {}

    with pytest.raises(TypeError, match=rf"tasks: {__file__}:\d+: it must not be async"):
        agentloop.environment(tasks=slow)(game)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tasks": 5}, "tasks: expected a function of random numbers, or a list of .*, not 5"),
        ({"tasks": {"answer": 1}}, "tasks: expected a function .* a list of .*, not dict"),
        ({"weights": 0.5}, "weights: expected a mapping such as {'quick': 0.2}, not 0.5"),
        ({"weights": {"quick": "much"}}, "weights: 'quick': expected a finite number.*'much'"),
        ({"teacher": "expert"}, "teacher: expected a function of a task .*, not 'expert'"),
        ({"agent_errors": ValueError}, "agent_errors: expected a mapping such as .*, not type"),
    ],
)
def test_argument_of_decorator_that_cannot_be_right_is_named(options: Any, problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^environment: {problem}"):
        agentloop.environment(**options)(maze.function)


def test_tasks_may_be_a_list_of_their_fields() -> None:
    listed = ({"prompt": f"{number}?", "answer": number, "top": [number]} for number in range(6))
    game = agentloop.environment(tasks=listed)(maze.function)
    source = open_tasks(TasksSettings(held_out=2), game.with_arguments({}))
    assert len(source.held_out()) == 2
    epochs = [[next(source) for _ in range(4)] for _ in range(2)]
    assert sorted(task.id for task in epochs[0]) == sorted(task.id for task in epochs[1])
    tops = {task.prompt: task.top for task in epochs[0] + source.held_out()}
    assert tops == {f"{number}?": [number] for number in range(6)}


async def test_siblings_do_not_share_changes_of_their_task() -> None:
    @agentloop.environment
    async def deck(task: Any, agent: Agent) -> float:
        await agent.run(task.prompt)
        return float(task.cards.pop())

    task = Task("t", "Draw.", "", extra={"cards": [1, 2, 3]})
    for _ in range(2):
        episodes = await run(deck, size=3, task=task)
        assert [rollout.reward and rollout.reward.value for rollout in episodes] == [3, 3, 3]


async def test_siblings_do_not_share_changes_of_their_arguments() -> None:
    @agentloop.environment
    async def deck(task: Any, agent: Agent, *, cards: list[int], names: dict[str, Any]) -> float:
        await agent.run("Draw.")
        names["first"].append(agent.id)
        return float(cards.pop() + len(names["first"]))

    dealt = deck.with_arguments({"cards": [1, 2, 3], "names": {"first": []}})
    for _ in range(2):
        episodes = await run(dealt, size=3)
        assert [rollout.reward and rollout.reward.value for rollout in episodes] == [4, 4, 4]


def test_environments_tasks_replace_only_those_of_a_generator(tmp_path: Path) -> None:
    @agentloop.environment(tasks=lambda rng: {"answer": rng.randint(1, 9), "top": 9})
    async def game(task: Any, agent: Agent) -> float:
        return 1.0

    assert next(open_tasks(TasksSettings(kind="symbolic"), game)).top == 9
    assert next(open_tasks(TasksSettings(), None)).source == "arithmetic"
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "1 + 1?", "answer": "2"}\n{"prompt": "1 + 2?", "answer": "3"}\n')
    listed = TasksSettings(kind="jsonl", paths=[file])
    assert next(open_tasks(listed, game)).prompt in ("1 + 1?", "1 + 2?")


async def test_slow_server_is_not_the_environments_fault() -> None:
    @agentloop.environment
    async def twice(task: Any, agent: Agent) -> float:
        await agent.run("?")
        started = anyio.current_time()
        while anyio.current_time() == started:  # the event loop's clock has milliseconds
            await anyio.lowlevel.checkpoint()
        await agent.run("And now?")
        return 1.0

    model = Model()
    await run(twice, model, size=1, timeout_s=5)
    first, second = (options["budget"].timeout_s for _, options in model.asked)
    assert 5 >= first > second > 0

    late = Model(StopReason.TIME_BUDGET)
    episodes = await run(twice, late)  # no RequestError: the task is not refused
    for episode in episodes:
        assert reward_in(episode).value is None
        assert reward_in(episode).reason.startswith("infrastructure: it ran out of time")


async def test_conversation_goes_on_with_what_the_environment_replies() -> None:
    heard: list[str] = []

    def hint(answer: str) -> str | None:
        heard.append(answer)
        return "higher" if len(heard) < 3 else None

    async def slow_hint(answer: str) -> str | None:
        await anyio.lowlevel.checkpoint()
        return hint(answer)

    for reply in (hint, slow_hint):

        @agentloop.environment
        async def game(task: Any, agent: Agent) -> float:
            return float((await agent.run("Find it.", reply=reply)).answer)  # noqa: B023

        heard.clear()
        (episode,) = await run(game, size=1)
        assert heard == ["1", "2", "3"]
        assert reward_in(episode).value == 3.0


async def test_environment_may_converse_message_by_message() -> None:
    ends: list[Any] = []

    @agentloop.environment
    async def game(task: Any, agent: Agent) -> float:
        answers: list[str] = []
        async with agent.conversation(system="Guess.") as talk:
            while not talk.has_ended and len(answers) < task.top:
                answers.append(await talk.ask("higher"))
        assert talk.trajectory is not None
        ends.append((answers, talk.has_ended, talk.trajectory.stop_reason))
        return len(answers)

    model = Model()
    (episode,) = await run(game, model, size=1)
    assert ends == [(["2", "3", "4", ""], True, StopReason.TURN_BUDGET)]
    assert [message["content"] for message in model.asked[0][0]] == ["Guess.", "higher"]
    assert len(episode.trajectories) == 1

    @agentloop.environment
    async def once(task: Any, agent: Agent) -> float:
        async with agent.conversation() as talk:
            first = await talk.ask("?")
        assert talk.trajectory is not None
        assert talk.trajectory.stop_reason is StopReason.ANSWERED
        return float(first)

    (episode,) = await run(once, size=1)
    assert reward_in(episode).value == 1.0


async def test_failed_conversation_is_attributed_correctly() -> None:
    @agentloop.environment
    async def asks_too_much(task: Any, agent: Agent) -> float:
        async with agent.conversation() as talk:
            for _ in range(9):
                await talk.ask("?")
        return 1.0

    with pytest.raises(RequestError, match=r"has ended \(turn_budget\): check has_ended"):
        await run(asks_too_much)

    broken = Model()
    broken.error = ServerUnavailable("gone")
    (episode,) = await run(asks_too_much, broken, size=1)
    assert reward_in(episode).reason == "infrastructure: gone"


async def test_question_that_is_given_up_ends_the_conversation() -> None:
    @agentloop.environment
    async def impatient(task: Any, agent: Agent) -> float:
        async with agent.conversation() as talk:
            with anyio.CancelScope() as scope:
                scope.cancel()
                await talk.ask("?")
            assert talk.has_ended
        return 1.0

    (episode,) = await run(impatient, size=1)
    assert reward_in(episode).value == 1.0


async def test_stopped_conversations_are_recorded_and_not_trained_on() -> None:
    @agentloop.environment
    async def race(task: Any, agent: Agent) -> float:
        def never(answer: str) -> str:
            return "again"

        async def endless() -> None:
            await agent.run("?", reply=never)

        model.max_turns = 1 << 60
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(endless)
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        await agent.chat("?")
        return 1.0

    model = Model()
    (episode,) = await run(race, model, size=1)
    stopped, answered = episode.trajectories
    assert stopped.stop_reason is StopReason.ENVIRONMENT
    assert stopped.num_sampled_tokens
    assert (answered.stop_reason, episode.whole) == (StopReason.ANSWERED, [answered])


async def test_failure_is_recorded_with_its_reason() -> None:
    @agentloop.environment
    async def broken(task: Any, agent: Agent) -> float:
        if agent.id.endswith(".0"):
            return float((await agent.run("?")).answer)
        if agent.id.endswith(".1"):
            raise KeyError("board")
        await agent.run("?")
        await anyio.sleep_forever()
        raise AssertionError

    good, bad, cut = await run(broken, size=3, timeout_s=0.2)
    assert good.trajectories[0].stop_reason is StopReason.ANSWERED
    assert bad.trajectories[0].stop_reason is StopReason.ENVIRONMENT
    error = bad.trajectories[0].error or ""
    assert re.fullmatch(r"the environment raised KeyError: 'board' \(test_player.py:\d+\)", error)
    assert cut.trajectories[0].stop_reason is StopReason.ANSWERED
    assert reward_in(cut).value is None


@pytest.mark.parametrize(
    ("returned", "reason"),
    [(0.0, "its agent did not run: nothing was sampled"), (None, "the environment gives none")],
)
async def test_rollout_without_a_conversation_has_a_record_and_no_reward(
    returned: float | None, reason: str
) -> None:
    @agentloop.environment
    async def early(task: Any, agent: Agent) -> float | None:
        return returned

    (episode,) = await run(early, size=1)
    assert episode.reward == Reward(None, None, reason)
    (record,) = episode.all_trajectories
    assert (record.turns, record.error, episode.whole) == ([], None, [])


async def test_other_agents_are_recorded_under_their_names() -> None:
    @agentloop.environment
    async def debate(task: Any, agent: Agent) -> float:
        checker = agent.other("checker")
        assert agent.other("checker") is checker
        judge = agent.other("judge", is_trained=False)
        await agent.run("Solve it.")
        await checker.run("Check it.")
        await checker.run("Check it again.")
        checker.reward = 0.25
        await judge.chat("Is it right?")
        with pytest.raises(ValueError, match="is another agent itself"):
            checker.other("checker")
        with pytest.raises(ValueError, match="is not a name"):
            agent.other("a b")
        return 1.0

    model = Model()
    (episode,) = await run(debate, model, size=1)
    assert [trajectory.id for trajectory in episode.all_trajectories] == [
        "1-t.0",
        "1-t.0+checker",
        "1-t.0+checker+1",
        "1-t.0+judge",
    ]
    checker, judge = episode.others["checker"], episode.others["judge"]
    assert (checker.reward, checker.is_trained) == (0.25, True)
    assert (judge.reward, judge.is_trained) == (None, False)
    seeds = {options["sampling"].seed for _, options in model.asked}
    assert len(seeds) == 4


async def test_only_other_agents_have_a_reward_that_can_be_set() -> None:
    @agentloop.environment
    async def sets(task: Any, agent: Agent) -> float:
        await agent.run("?")
        with pytest.raises(AttributeError, match=r"agent\.reward: return the reward from the env"):
            agent.reward = 1.0
        return 0.5

    (episode,) = await run(sets, size=1)
    assert reward_in(episode).value == 0.5


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tools": "guess"}, "tools: expected a list of functions or names, got 'guess'"),
        ({"tools": len}, "tools: expected a list of functions or names, got <built-in"),
        ({"messages": None}, "messages: expected text or a list of messages, got None"),
        ({"messages": {"role": "user"}}, "messages: expected text or a list of messages, got {"),
        ({"max_turns": 0}, "max_turns: expected a number of at least 1, got 0"),
        ({"max_tokens": "9"}, "max_tokens: expected a number of at least 1, got '9'"),
    ],
)
async def test_invalid_argument_of_a_conversation_is_named(options: Any, problem: str) -> None:
    @agentloop.environment
    async def asks(task: Any, agent: Agent) -> float:
        with pytest.raises(RequestError, match=f"^{problem}"):
            await agent.run(**{"messages": "?", **options})
        await agent.run("?")
        return 1.0

    (episode,) = await run(asks, size=1)
    assert reward_in(episode).value == 1.0
    assert [trajectory.id for trajectory in episode.trajectories] == ["1-t.0"]


async def test_another_agent_takes_the_same_arguments_each_time() -> None:
    @agentloop.environment
    async def changes(task: Any, agent: Agent) -> float:
        judge = agent.other("judge", is_trained=False)
        assert agent.other("judge", is_trained=False) is judge
        with pytest.raises(RequestError, match=r"agent\.other\('judge'\): is_trained=True"):
            agent.other("judge")
        await judge.chat("?")
        return float(not judge.is_trained)

    (episode,) = await run(changes, size=1)
    assert reward_in(episode).value == 1.0


async def test_failure_below_another_agent_is_one_of_the_rollout() -> None:
    @agentloop.environment
    async def hides(task: Any, agent: Agent) -> float:
        with pytest.raises(InfrastructureFailed):
            await agent.other("checker").run("?")
        return 1.0

    (episode,) = await run(hides, Model(StopReason.INFRASTRUCTURE), size=1)
    assert reward_in(episode).value is None


async def test_slow_replies_are_the_environments_own_fault() -> None:
    @agentloop.environment
    async def slow(task: Any, agent: Agent) -> float:
        async def reply(answer: str) -> None:
            await anyio.sleep(0.01)

        late = await agent.run("?", reply=reply)
        return float(late.answer)

    class Late(Model):
        async def rollout(self, messages: Any, **options: Any) -> Trajectory:
            trajectory = await super().rollout(messages, **options)
            trajectory.elapsed_s = 0.01
            return trajectory

    with pytest.raises(RequestError, match=r"its replies took .* s, most of the time"):
        await run(slow, Late(StopReason.TIME_BUDGET))


@pytest.mark.parametrize(
    ("status", "reward"),
    [(CallStatus.OK, 1.0), (CallStatus.TIMEOUT, 0.0), (CallStatus.SANDBOX_ERROR, None)],
)
async def test_failing_program_is_a_result_but_failing_sandbox_is_not(
    status: CallStatus, reward: float | None
) -> None:
    @agentloop.environment
    async def runs_program(task: Any, agent: Agent) -> float:
        await agent.run("Write a program.")
        return (await agent.sandbox.run(str(status))).ok

    model = Model()
    model.pool = FakePool(lambda code, *_: CallResult(1, CallStatus(code)))
    (episode,) = await run(runs_program, model, size=1)
    assert reward_in(episode).value == reward


async def test_session_that_cannot_be_opened_is_no_reward() -> None:
    @agentloop.environment
    async def runs_program(task: Any, agent: Agent) -> float:
        async with agent.sandbox.session() as session:
            await session.run("1")
        return 1.0

    model = Model()
    model.pool = FakePool(no_session=SandboxUnavailable("no worker"))
    (episode,) = await run(runs_program, model, size=1)
    assert reward_in(episode).reason == "infrastructure: sandbox: no worker"


@pytest.mark.parametrize("by", [LostBy.PROGRAM, LostBy.INFRASTRUCTURE])
async def test_session_that_its_program_has_ended_is_a_result(by: LostBy) -> None:
    ended: list[CallResult] = []

    @agentloop.environment
    async def runs_program(task: Any, agent: Agent) -> float:
        async with agent.sandbox.session() as session:
            ended.append(await session.run("1"))
        await agent.chat("?")
        return 0.5

    model = Model()
    model.pool = FakePool(SessionLost("the session has ended: exit status 3", by))
    (episode,) = await run(runs_program, model, size=1)
    if by is LostBy.PROGRAM:
        assert ended[0].status is CallStatus.KILLED
        assert ended[0].error is not None
        assert ended[0].error.message == "the session has ended: exit status 3"
        assert reward_in(episode).value == 0.5
    else:
        assert not ended
        assert reward_in(episode).value is None


def test_task_function_may_take_arguments_of_the_environment() -> None:
    def make(rng: Random, *, top: int, unrelated: str = "x") -> dict[str, Any]:
        return {"answer": rng.randint(1, top), "top": top, "unrelated": unrelated}

    @agentloop.environment(tasks=make)
    async def game(task: Any, agent: Agent, *, top: int = 9, name: str = "") -> float:
        return 1.0

    few = next(open_tasks(TasksSettings(), game.with_arguments({"top": "3", "name": "a"})))
    assert (few.top, few.unrelated) == (3, "x")
    assert next(open_tasks(TasksSettings(), game.with_arguments({}))).top == 9


@pytest.mark.parametrize("purpose", Purpose)
async def test_only_rollouts_to_train_on_record_kept_ids(purpose: Purpose) -> None:
    @agentloop.environment
    async def two(task: Any, agent: Agent) -> float:
        await agent.run("?")
        await agent.other("checker").run("?")
        return 1.0

    model = Model()
    player = EnvironmentPlayer(two, model, sampling=Sampling(top_p=0.9, top_k=20))
    async with player.group(GroupRequest(TASK, "1-t", 2, Budget(), purpose=purpose)) as siblings:
        await play_siblings(siblings)
    recorded = [options["sampling"].records_kept_ids for _, options in model.asked]
    assert recorded == [purpose is Purpose.TRAIN] * 4
