"""Training agents that are programs: the real SGLang, two ranks of DeepSpeed, containers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import openai
import pytest

import agentloop
from agentloop.config import load_settings
from agentloop.environments.tasks.sources import Task
from agentloop.launch.progress import ProgressLine
from agentloop.sandbox.engine import connect
from agentloop.training.plan.settings import TrainSettings
from agentloop.training.wiring import train
from agentloop.trajectory import Trajectory
from tests.fakes import RecordedProgress
from tests.integration.test_programs import containers
from tests.integration.test_train import RECIPE

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("docker_engine", "sglang_installed"),
]

EXAMPLES = Path(__file__).parents[2] / "examples"


def coin(trajectory: Trajectory, task: Task) -> float:
    """The small model is as good as always right here, which would teach it nothing."""
    return int(-sum(trajectory.logprobs) * 1e6) % 2


@agentloop.environment
async def branches(task: agentloop.Task, agent: agentloop.Agent) -> agentloop.Trajectory:
    """Ask twice, and the second time with a history that is not what the model said."""
    async with openai.AsyncOpenAI(base_url=agent.url, api_key=agent.key) as client:

        async def ask(*messages: Any) -> None:
            question: Any = {"role": "user", "content": task.prompt}
            await client.chat.completions.create(
                model="any",
                messages=[question, *messages],
                temperature=0,  # has no effect
            )

        await ask()
        stated = {"role": "assistant", "content": "\\boxed{1}"}
        await ask(stated, {"role": "user", "content": "What is 2 plus 3?"})
    return agent.trajectories[-1]


async def test_programs_and_clients_are_trained_on(tmp_path: Path) -> None:
    """A group of programs in containers, and one of clients that begin two branches each."""
    args = (
        f"{{settings = {{command = ['python3', 'command_line_agent.py'], folder = '{EXAMPLES}'}}}}"
    )
    program = f"{{name = 'agentloop.environments.program:program', args = {args}}}"
    overrides = [
        f"envs=[{program}, {{name = '{__name__}:branches'}}]", f"run.folder={tmp_path}",
        "page=false", "loop.steps=1", "loop.prompts_per_step=2", "tasks.held_out=0",
        "loop.group_size=4", "roc.down_sample_to_n=4", "roc.reject_equal_reward=false",
        "sampling.temperature=2.5", "budget.max_turn_tokens=48", "ranks.nproc_per_node=1",
        f"reward.function={__name__}:coin",
    ]  # fmt: skip
    settings = load_settings(TrainSettings, [RECIPE], overrides)
    folder = await train(settings, cast(ProgressLine, RecordedProgress()))
    async with connect() as docker:
        assert await containers(docker, os.getpid()) == []

    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    (step,) = [first for first in lines if "reward" in first]
    files = sorted((folder / "trajectories").iterdir())
    groups = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    assert sorted(map(len, groups)) == [4, 8]  # conversations of the programs, and the branches
    rows = [row for group in groups for row in group]
    assert step["num_rollouts"] == 8
    assert step["num_without_reward"] == 0
    assert step["learner/num_samples"] == len(rows)
    # The engine's log-probabilities, at the run's temperature, are those of the learner.
    assert abs(step["learner/mismatch_kl"]) < 1e-3
    records = [Trajectory.from_dict(row["trajectory"]) for row in rows]
    assert step["num_sampled_tokens"] == sum(first.num_sampled_tokens for first in records)
    for first in records:
        assert len(first.ids) == len(first.mask) == len(first.logprobs) == len(first.versions)
        ours = zip(first.versions, first.mask, strict=True)
        assert {version for version, is_sampled in ours if is_sampled} == {"0"}
    of_rollouts: dict[Any, set[float]] = {}
    for row in rows:
        of_rollouts.setdefault((row["task"], row["rollout"]), set()).add(row["advantage"])
    assert [len(advantages) for advantages in of_rollouts.values()] == [1] * 8
