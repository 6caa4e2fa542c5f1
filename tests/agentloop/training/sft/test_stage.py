"""The fine-tuning that a run may begin with: the dialogues that environments' teachers play."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

import agentloop
from agentloop import RequestError, call
from agentloop.config import load_settings, to_toml
from agentloop.environments.environment import open_tasks
from agentloop.errors import DataError, SettingsError
from agentloop.launch.progress import ProgressLine
from agentloop.models import SMALL
from agentloop.training.learner_client.client import spawn_here
from agentloop.training.plan.settings import TrainSettings, fine_tuning
from agentloop.training.run.folder import RunFolder
from agentloop.training.sft import stage as sft_stage
from agentloop.training.sft.fine_tuning import DialoguesSettings
from agentloop.training.sft.run import DialogueTraining
from agentloop.training.sft.stage import FineTuning

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="guardians look at /proc"),
]

RAW = Path(__file__).parents[2] / "agent" / "mcp_raw.py"


def a_number(rng: Random) -> dict[str, Any]:
    return {"prompt": "Count.", "answer": rng.randint(1, 1000)}


def counter(task: agentloop.Task, rng: Random) -> Any:
    def play(messages: Sequence[agentloop.Message]) -> agentloop.Message | str:
        if messages[-1]["role"] == "tool":
            return f"{messages[-1]['content']} and {task.answer} and {rng.random()}"
        return call("count")

    return play


@agentloop.environment(tasks=a_number, teacher=counter)
async def count(task: agentloop.Task, agent: agentloop.Agent) -> bool:
    counted = await agent.run(task.prompt, tools=["mcp:raw"])
    return task.answer in counted.answer


@agentloop.environment(tasks=a_number, teacher=lambda task, rng: lambda messages: "program")
async def program(task: agentloop.Task, agent: agentloop.Agent) -> bool:
    await agent.chat(task.prompt)
    return (await agent.sandbox.run("1 + 1")).result == "2"


@agentloop.environment(tasks=a_number, teacher=lambda task, rng: lambda messages: call("end"))
async def deadly(task: agentloop.Task, agent: agentloop.Agent) -> bool:
    await agent.run(task.prompt, tools=["mcp:raw"])
    return True


@agentloop.environment(
    tasks=lambda rng: {"prompt": "?", "answer": "1"}, teacher=lambda task, rng: lambda messages: "2"
)
async def never(task: agentloop.Task, agent: agentloop.Agent) -> float:
    return float(await agent.chat(task.prompt) == task.answer)


@agentloop.environment(
    tasks=[{"prompt": str(number)} for number in range(4)],
    teacher=lambda task, rng: lambda messages: "odd",
)
async def sometimes(task: agentloop.Task, agent: agentloop.Agent) -> bool:
    await agent.chat(task.prompt)
    return int(str(task.prompt)) % 2 == 1


PLAYED: list[str] = []


@agentloop.environment(
    tasks=a_number,
    teacher=lambda task, rng: lambda messages: {"role": "assistant", "content": [{"image": "x"}]},
)
async def unfinished(task: agentloop.Task, agent: agentloop.Agent) -> float:
    PLAYED.append(task.id)
    await agent.chat(task.prompt)
    return 1.0


@agentloop.environment
async def untaught(task: agentloop.Task, agent: agentloop.Agent) -> float:
    return 0.0


def settings(*overrides: str) -> TrainSettings:
    command = [sys.executable, str(RAW)]
    base = ["sandbox.backend=process", "sandbox.workers=1", "sandbox.allow_weak_isolation=true"]
    return load_settings(TrainSettings, overrides=[*base, f"mcp.raw.command={command}", *overrides])


class Progress:
    """Records what is said, and passes over activities."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, text: str) -> None:
        pass

    def say(self, text: str) -> None:
        self.lines.append(text)


def tuning_of(run: TrainSettings) -> FineTuning:
    tuning = fine_tuning(run)
    assert tuning is not None
    return tuning


def training_of(run: TrainSettings) -> DialogueTraining:
    return tuning_of(run).training


async def with_teacher(
    run: TrainSettings, folder: RunFolder, progress: Progress | None = None
) -> DialoguesSettings:
    stated = cast(ProgressLine, progress or Progress())
    return await tuning_of(run).add_teacher_dialogues(folder, stated)


def rows(data: DialoguesSettings) -> list[dict[str, Any]]:
    (file,) = data.paths
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.full
async def test_teacher_plays_with_the_real_tools_and_only_once(tmp_path: Path) -> None:
    run = settings(f"env={__name__}:count", "sft.data.teacher=12", "tasks.held_out=0.5")
    async with RunFolder.open(tmp_path / "run", "") as folder:
        first = await with_teacher(run, folder)
        assert first.teacher == 0
        played = rows(first)
        assert await with_teacher(run, folder) == first
        assert rows(first) == played
    answers = [row["messages"][-1]["content"].split(" and ") for row in played]
    assert [int(number) for number, _, _ in answers] == list(range(1, 13))  # one server for all
    names = [tool["function"]["name"] for tool in played[0]["tools"]]
    assert names[:4] == ["count", "end", "freeze", "processes"]
    held_out = {task.answer for task in open_tasks(run.tasks, count).held_out()}
    assert not held_out & {answer for _, answer, _ in answers}

    async with RunFolder.open(tmp_path / "again", "") as folder:
        assert rows(await with_teacher(run, folder)) == played
    other_run = settings(f"env={__name__}:count", "sft.data.teacher=12", "sft.seed=1")
    async with RunFolder.open(tmp_path / "other", "") as folder:
        assert rows(await with_teacher(other_run, folder)) != played


@pytest.mark.full
async def test_server_that_dies_ends_the_teaching(tmp_path: Path) -> None:
    run = settings(f"env={__name__}:deadly", "sft.data.teacher=3")
    async with RunFolder.open(tmp_path / "run", "") as folder:
        with pytest.raises(RequestError, match=r"the teacher's rollout of task .*MCP server"):
            await with_teacher(run, folder)
        assert not (folder.path / "teacher.jsonl").exists()


@pytest.mark.full
async def test_teachers_of_several_environments_play_by_weight(tmp_path: Path) -> None:
    envs = f"[{{name='{__name__}:count'}}, {{name='{__name__}:program', weight=2}}]"
    run = settings(f"envs={envs}", "sft.data.teacher=9")
    async with RunFolder.open(tmp_path / "run", "") as folder:
        played = rows(await with_teacher(run, folder))
    assert sum(row["messages"][-1]["content"] == "program" for row in played) == 6


async def test_share_of_right_rollouts_is_said(tmp_path: Path) -> None:
    run, progress = settings(f"env={__name__}:sometimes", "sft.data.teacher=4"), Progress()
    async with RunFolder.open(tmp_path / "run", "") as folder:
        await with_teacher(run, folder, progress)
    assert "The teacher's rollouts: 2 of 4 right (50%)" in progress.lines


async def test_teacher_that_is_never_right_ends_the_run(tmp_path: Path) -> None:
    run = settings(f"env={__name__}:never", "sft.data.teacher=3")
    async with RunFolder.open(tmp_path / "run", "") as folder:
        with pytest.raises(SettingsError, match=r"^sft.data.teacher: none of the 3 rollouts of"):
            await with_teacher(run, folder)
        assert not (folder.path / "teacher.jsonl").exists()


async def test_first_rollout_is_checked_against_the_template(tmp_path: Path) -> None:
    num_played = 0

    async def check() -> None:
        await tuning_of(run).check_dialogues(cast(ProgressLine, Progress()))

    run = settings(f"env={__name__}:unfinished", "sft.data.teacher=300")
    with pytest.raises(DataError, match=r"^the teacher's first rollout: field 'messages'"):
        await check()
    num_played = len(PLAYED)
    async with RunFolder.open(tmp_path / "run", "") as folder:
        with pytest.raises(DataError, match=r"^the teacher's first rollout: field 'messages'"):
            await with_teacher(run, folder)
    assert (num_played, len(PLAYED)) == (1, 2)


async def test_first_dialogue_of_each_file_is_checked(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    reply = {"role": "assistant", "content": "Yes."}
    good.write_text(json.dumps({"messages": [{"role": "user", "content": "?"}, reply]}))
    bad.write_text('{"messages": [{"role": "user", "content": "?"}]}')
    for paths, message in (([good], ""), ([good, bad], f"^{bad}: line 1: field 'messages'")):
        run = settings(f"sft.data.paths={json.dumps([*map(str, paths)])}")
        check = tuning_of(run).check_dialogues(cast(ProgressLine, Progress()))
        if message:
            with pytest.raises(DataError, match=message):
                await check
        else:
            await check


@pytest.mark.parametrize("agent", ["env=", f"env={__name__}:untaught", "agent=python3 agent.py"])
async def test_without_a_teacher_the_dialogues_are_arithmetic(tmp_path: Path, agent: str) -> None:
    run = settings("sft.data.teacher=9", agent)
    async with RunFolder.open(tmp_path / "run", "") as folder:
        assert await with_teacher(run, folder) == training_of(run).data


def test_fine_tuning_inherits_unset_values_from_the_run() -> None:
    run = settings(
        "sft.data.teacher=9", "sft.seed=7", "sft.learner.micro_batch_tokens=99",
        "learner.seed=1", "learner.zero_stage=1", "ranks.nproc_per_node=2",
        "loop.step_timeout_s=5", "loop.seed=2", "budget.max_tool_response_tokens=64",
    )  # fmt: skip
    training = training_of(run)
    assert (training.data.seed, training.loop.seed, training.learner.seed) == (7, 7, 7)
    assert training.data.max_tool_response_tokens == 64
    assert training.loop.step_timeout_s == 5
    assert (training.learner.micro_batch_tokens, training.learner.zero_stage) == (99, 1)
    assert training.ranks.nproc_per_node == 2


@pytest.mark.parametrize("has_begun", [False, True])
async def test_refused_dialogues_are_played_again_unless_some_were_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    async def refuse(*_: object) -> None:
        raise DataError("line 1: no thought")

    monkeypatch.setattr(sft_stage, "samples_of", refuse)
    monkeypatch.setattr(
        sft_stage, "learner_of", lambda *_: SimpleNamespace(starting=lambda: nullcontext())
    )
    run = settings("sft.data.teacher=9", f"model={SMALL}")
    async with RunFolder.open(tmp_path / "run", to_toml(run)) as folder:
        games = folder.path / "sft" / "teacher.jsonl"
        games.parent.mkdir()
        games.write_text("{}\n")
        if has_begun:
            RunFolder(games.parent).add_metrics({"step": 1})
        dashboard = cast(Any, SimpleNamespace(folder=folder))
        stated = cast(ProgressLine, Progress())
        with pytest.raises(DataError, match="no thought"):
            await tuning_of(run).make_start_model(dashboard, stated, spawn_here)
        assert games.exists() == has_begun
