"""Task sets of the real verifiers 0.4, with a scripted engine in place of SGLang.

It wants other versions than SGLang and than the other adapters: `tox -e verifiers-v1`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentloop.agent.rollout import Budget
from agentloop.distribution import is_installed
from agentloop.environments.adapters import verifiers_v1
from agentloop.environments.environment import EnvSettings, load, open_tasks
from agentloop.environments.tasks.sources import TasksSettings
from agentloop.errors import RequestError, ServerUnavailable, SettingsError
from agentloop.inference.sglang.sampling import Sampling
from agentloop.rollouts.player import EnvironmentPlayer
from agentloop.rollouts.record import NoReward, RolloutRecord
from agentloop.serving.sessions import listening_for_sessions
from tests.agentloop.serving.test_app import CHAT, says
from tests.fakes import NoModel
from tests.integration.conftest import need
from tests.patience import patient
from tests.rollouts import records_of, reward_in
from tests.support import ScriptedEngine, Step, call_text

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(300),
    # What the library does is not ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

SUMS = '''
import verifiers.v1 as vf

__all__ = ["Sums"]


class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class Data(vf.TaskData):
    answer: str


class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]

    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        if trace.last_reply == "break":
            raise KeyError("board")
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            number += 1
            data = Data(prompt=f"What is {number} plus 2?", answer=str(number + 2))
            yield Sum(data, self.config.task)


if __name__ == "__main__":
    Adder.run()
'''
NAME = "agentloop.environments.adapters.verifiers_v1:episode"


@pytest.fixture(autouse=True)
def task_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_installed("verifiers.v1.taskset"):
        need("verifiers 0.4: tox -e verifiers-v1")
    (tmp_path / "our_sums.py").write_text(SUMS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of its tool servers


def settings(taskset: str = "our-sums", **arguments: Any) -> EnvSettings:
    return EnvSettings(name=NAME, args={"taskset": taskset, "num_tasks": 3, **arguments})


async def played(*turns: Sequence[Step]) -> RolloutRecord:
    environment = load(settings())
    assert environment is not None
    task = next(iter(open_tasks(TasksSettings(), environment)))
    budget = Budget(timeout_s=patient(200))
    async with (
        environment.opened() as opened,
        listening_for_sessions(
            ScriptedEngine(*turns), CHAT, model_name="fake", sampling=Sampling(), budget=budget
        ) as listener,
    ):
        player = EnvironmentPlayer(opened, NoModel(session_listener=listener), sampling=Sampling())
        (record,) = await records_of(player, task, budget=budget)
    return record


async def test_task_set_is_played_with_its_tools_and_scored() -> None:
    record = await played(says(call_text("add", {"a": 1, "b": 1000})), says("3 4 5"))
    assert (reward_in(record).value, reward_in(record).parts) == (2.0, {"right": 2.0})
    assert record.recorded["length"] == 5
    (conversation,) = record.trained  # with exact ids, once
    assert len(conversation.turns) == 2
    assert "1001" in CHAT.decode(conversation.ids)


async def test_task_set_whose_scoring_fails_gives_no_reward() -> None:
    with pytest.raises(RequestError, match=r"verifiers: our-sums: .*KeyError: 'board'"):
        await played(says("break"))


async def test_failure_below_a_task_set_is_not_its_own() -> None:
    record = await played([ServerUnavailable("gone")] * 2)
    assert record.no_reward is NoReward.INFRASTRUCTURE


def test_tasks_of_a_set_without_end_are_the_first() -> None:
    tasks = open_tasks(TasksSettings(), load(settings())).distinct
    assert tasks is not None
    assert sorted(task.row for task in tasks) == [0, 1, 2]


@pytest.mark.parametrize(
    ("taskset", "config", "problem"),
    [
        ("no-such-set", {}, "verifiers cannot load 'no-such-set': ModuleNotFoundError"),
        ("our-sums", {"id": "agentic-judge"}, "has several agents"),
        ("our-sums", {"agnt": {}}, "verifiers cannot load 'our-sums': .*agnt"),
    ],
)
def test_task_set_that_cannot_be_played_is_named(
    taskset: str, config: dict[str, Any], problem: str
) -> None:
    with pytest.raises(SettingsError, match=problem):
        open_tasks(TasksSettings(), load(settings(taskset, config=config)))


def test_harness_that_runs_code_of_the_model_runs_in_docker() -> None:
    quiet = verifiers_v1.config_of("our-sums", {})
    assert (quiet.agent.harness.id, quiet.agent.runtime.type) == ("null", "subprocess")
    risky = verifiers_v1.config_of("our-sums", {"agent": {"harness": {"id": "bash"}}})
    assert (risky.agent.harness.id, risky.agent.runtime.type) == ("bash", "docker")
