"""Several environments in one run: their settings, and where a group runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import agentloop
from agentloop.agent.rollout import Budget
from agentloop.environments.agent import Agent
from agentloop.environments.environment import EnvSettings
from agentloop.environments.mixture import (
    EnvsSettings,
    RunEnvironment,
    environments_of,
    open_mixture,
)
from agentloop.environments.rewards.reward import Grader
from agentloop.environments.tasks.sources import Task, TasksSettings
from agentloop.errors import DataError, SettingsError
from agentloop.events import ignore
from agentloop.inference.sglang.sampling import Sampling
from agentloop.rollouts.player import player_of
from agentloop.rollouts.record import RolloutRecord
from agentloop.trajectory import StopReason, Trajectory
from tests.fakes import NoModel
from tests.rollouts import records_of, reward_in

HERE = __name__


@agentloop.environment(tasks=lambda rng: {"answer": rng.randint(1, 9)})
async def game(task: Any, agent: Agent, *, worth: float = 1.0) -> float:
    await agent.run("?")
    return worth


def resolved(*envs: dict[str, Any], **options: Any) -> list[RunEnvironment]:
    return environments_of(
        options.get("env", EnvSettings()),
        [EnvsSettings(**single) for single in envs],
        options.get("tasks", TasksSettings(seed=3, held_out=4)),
        options.get("budget", Budget(max_turns=5, timeout_s=60)),
    )


def test_without_envs_there_is_one_environment_without_a_name() -> None:
    (single,) = resolved(env=EnvSettings(name="a:b"))
    assert (single.name, single.env.name, single.tasks.seed, dict(single.budget)) == (
        "",
        "a:b",
        3,
        {},
    )
    assert open_mixture([single], [None]).cursor()["position"] == 0


def test_item_has_what_differs_and_the_rest_of_the_run() -> None:
    first, second = resolved(
        {"name": "m:one", "weight": 2, "tasks": {"held_out": "1"}, "budget": {"max_turns": "9"}},
        {"name": "m:two", "args": {"x": 1}},
    )
    assert (first.name, first.weight, first.tasks.seed, first.tasks.held_out) == ("one", 2, 3, 1)
    assert first.budget_of(Budget(max_turns=2, timeout_s=7)) == Budget(max_turns=9, timeout_s=7)
    assert (second.tasks.held_out, second.env.args) == (4, {"x": 1})
    assert second.budget_of(Budget(max_turns=2)) == Budget(max_turns=2)


def test_names_are_short_and_distinct() -> None:
    names = ["m:game", "n:game", "", "game-2", "a b", "m:game", ""]
    result = resolved(*({"name": name} for name in names))
    assert [single.name for single in result] == [
        *("game", "game-2", "agent", "game-2-2", "a-b", "game-3", "agent-2")
    ]


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        ({"tasks": {"heldout": 1}}, r"envs\.1\.tasks: unknown setting 'heldout' .*'held_out'"),
        ({"tasks": {"levels": [0]}}, r"envs\.1\.tasks: levels: must be at least 1, got 0"),
        ({"budget": {"max_turns": 0}}, r"max_turns: .*envs\.1\.budget"),
        ({"budget": {"turns": 1}}, r"envs\.1\.budget: unknown setting 'turns'"),
    ],
)
def test_wrong_setting_of_an_item_is_named(item: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        resolved({"name": "m:one"}, {"name": "m:two", **item})


@pytest.mark.parametrize("env", [EnvSettings(name="m:f"), EnvSettings(args={"x": 1})])
def test_env_and_envs_exclude_each_other(env: EnvSettings) -> None:
    with pytest.raises(SettingsError, match=r"env, envs: both are set: move `env` into"):
        resolved({"name": "m:one"}, env=env)


class Model(NoModel):
    """Answers at once; records the budgets of environments and of the built-in agent."""

    async def listen_for_sessions(self) -> None:
        self.num_listens += 1

    router: Any = None
    own_tools: Any = ()

    async def prompt_ids(self, messages: Any, tools: Any) -> list[int]:
        return [9]

    def __init__(self) -> None:
        super().__init__()
        self.budgets: list[tuple[str, Budget]] = []
        self.num_listens = 0

    async def rollout(self, messages: Any, *, id: str, budget: Budget, **_: Any) -> Trajectory:
        self.budgets.append((id, budget))
        return Trajectory(id, [9], stop_reason=StopReason.ANSWERED)


def test_each_environment_needs_tasks_to_train_on(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"problem": "?", "answer": 1}\n')
    few = {"tasks": {"kind": "jsonl", "paths": [str(file)], "held_out": 1}}
    source = open_mixture(resolved({}, few), [None, None])
    with pytest.raises(DataError, match="all 1 are held out"):
        source.check_training()


async def test_group_runs_in_its_tasks_environment() -> None:
    environments = resolved(
        {"name": f"{HERE}:game", "args": {"worth": 0.5}, "budget": {"max_turns": 2}},
        {"name": f"{HERE}:game", "args": {"worth": 3}},
        {"budget": {"max_response_tokens": 77}, "tasks": {"levels": [2]}},
    )
    source = open_mixture(environments, [single.load() for single in environments])
    model = Model()
    player = player_of(environments, model, sampling=Sampling(), emit=ignore, grader=Grader())
    result: dict[str, Sequence[RolloutRecord]] = {}
    for task in islice(source, 3):
        result[task.env] = await records_of(
            player, task, size=2, name=task.id, budget=Budget(max_turns=5)
        )
    rewards = {
        name: [single.reward and single.reward.value for single in each]
        for name, each in result.items()
    }
    assert rewards == {"game": [0.5] * 2, "game-2": [3.0] * 2, "agent": [None] * 2}
    limits = {
        re.sub("-(environment|arithmetic).*", "", id): (
            single.max_turns,
            single.max_response_tokens,
        )
        for id, single in model.budgets
    }
    usual = Budget().max_response_tokens
    assert limits == {"game": (2, usual), "game-2": (5, usual), "agent": (5, 77)}


async def test_single_environment_is_run_as_it_is() -> None:
    environments = resolved(env=EnvSettings(name=f"{HERE}:game"))
    player = player_of(environments, Model(), sampling=Sampling(), emit=ignore, grader=Grader())
    (episode,) = await records_of(player, Task("t", "", ""))
    assert reward_in(episode).value == 1.0


@pytest.mark.parametrize(("name", "num_listens"), [(f"{HERE}:game", 1), ("", 0)])
async def test_port_for_clients_is_opened_for_environments_only(
    name: str, num_listens: int
) -> None:
    model = Model()
    environments = resolved(env=EnvSettings(name=name))
    player = player_of(environments, model, sampling=Sampling(), emit=ignore, grader=Grader())
    await records_of(player, Task("t", "Hm?", ""))
    assert model.num_listens == num_listens
