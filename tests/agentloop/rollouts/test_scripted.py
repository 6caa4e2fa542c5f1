"""Environments, played by a script in place of the model."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, cast

import orjson
import pytest

import agentloop
from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.tools import as_tool
from agentloop.environments.examples.guess_number import guess
from agentloop.environments.examples.shop import Shop, ask
from agentloop.environments.examples.solver_and_checker import solve_and_check
from agentloop.environments.examples.warehouse import find
from agentloop.environments.examples.warehouse_server import locate
from agentloop.environments.player import DialogueRow
from agentloop.environments.rewards.reward import Grader
from agentloop.environments.tasks.sources import Task
from agentloop.models import SMALL
from agentloop.rollouts.scripted import play_teacher
from agentloop.sandbox import Pool
from agentloop.training.sft.fine_tuning import DialoguesSettings, read_dialogues, trajectories_of

# A script may be the first to import the parser of schemas, which takes seconds on a busy machine.
pytestmark = pytest.mark.timeout(60)

TASK = {"answer": 37, "top": 100}


def task_of(fields: Mapping[str, Any]) -> Task:
    extra = {name: value for name, value in fields.items() if name not in ("prompt", "answer")}
    return Task("task", fields.get("prompt", ""), str(fields["answer"]), extra=extra)


def halves(messages: Sequence[agentloop.Message]) -> agentloop.Message | str:
    """Search for the number by halves."""
    low, high = 1, 100
    for call, reply in zip(messages[1::2], messages[2::2], strict=False):
        number = call["tool_calls"][0]["function"]["arguments"]["number"]
        if reply["content"] == "right":
            return f"<reason>So</reason>It is {number}."
        low, high = (number + 1, high) if reply["content"] == "higher" else (low, number - 1)
    return agentloop.call("guess", "<reason>Halve it.</reason>", number=(low + high) // 2)


async def test_script_plays_a_game() -> None:
    played = await agentloop.play(guess, TASK, halves)
    assert played.reward.parts["found"] == 1.0
    (trajectory,) = played.record.trajectories
    assert trajectory.answer.endswith("It is 37.")
    assert [call.arguments["number"] for call in trajectory.calls] == [50, 25, 37]
    assert [result.content for result in trajectory.results] == ["lower", "higher", "right"]


async def test_script_keeps_to_the_number_of_turns() -> None:
    played = await agentloop.play(guess, TASK, halves, budget=agentloop.Budget(max_turns=2))
    assert played.reward.parts["found"] == 0.0
    assert played.record.trajectories[0].stop_reason is agentloop.StopReason.TURN_BUDGET


async def test_dialogues_can_be_learned_from(tmp_path: Path) -> None:
    played = await agentloop.play(guess, TASK, halves)
    chat = ChatFormat.load(SMALL)
    file = tmp_path / "dialogues.jsonl"
    file.write_bytes(b"".join(orjson.dumps(dialogue) + b"\n" for dialogue in played.dialogues))
    (dialogue,) = read_dialogues(DialoguesSettings(paths=[file]))
    (trajectory,) = trajectories_of(chat, dialogue, max_tool_response_tokens=64)
    assert len(trajectory.turns) == 4


LEARNABLE = {
    "guess": (guess, "found", {}),
    "shop": (ask, None, {}),
    "two agents": (solve_and_check, "right", {}),
    "warehouse": (find, None, {"mcp:warehouse": [locate]}),
}


@pytest.mark.parametrize(
    ("sql", "error"),
    [
        ("ATTACH 'file' AS other", "not authorized"),
        ("WITH RECURSIVE t(n) AS (SELECT 1 UNION SELECT n + 1 FROM t) SELECT n FROM t", "not auth"),
        ("SELECT 1 FROM items a, items b, items c, items d, items e, items f", "interrupted"),
        ("SELECT zeroblob(1000000)", "too big"),
    ],
)
def test_shop_can_only_be_read(sql: str, error: str) -> None:
    with closing(Shop([(name, 1, 2) for name in "abcdef"])) as shop:
        with pytest.raises(sqlite3.Error, match=error):
            shop.query(sql)
        assert shop.query("SELECT sum(price) FROM items") == "6"


@pytest.mark.parametrize("name", LEARNABLE)
async def test_examples_teacher_is_understood_and_wins_sometimes(name: str, tmp_path: Path) -> None:
    environment, part, tools = LEARNABLE[name]
    make_task = cast("Callable[[Random], Mapping[str, Any]]", environment.tasks)
    assert environment.teacher is not None
    won: list[float] = []
    dialogues: list[DialogueRow] = []
    for number in range(40):
        rng = Random(number)
        task = task_of(make_task(rng))
        played = await agentloop.play(
            environment, task, environment.teacher(task, rng), tools=tools
        )
        assert played.reward.value is not None
        won.append(played.reward.parts[part] if part else played.reward.value)
        dialogues += played.dialogues
    assert 0 < sum(won) < 40
    file = tmp_path / "dialogues.jsonl"
    file.write_bytes(b"".join(orjson.dumps(dialogue) + b"\n" for dialogue in dialogues))
    chat = ChatFormat.load(SMALL)
    for dialogue in read_dialogues(DialoguesSettings(paths=[file])):
        trajectories_of(chat, dialogue, max_tool_response_tokens=64)


async def test_taught_rollout_that_its_budget_cuts_short_is_left_out() -> None:
    task = task_of(TASK)
    play = partial(
        play_teacher,
        replace(guess, teacher=lambda task, rng: halves),
        task,
        Random(0),
        resolve=lambda tools: [as_tool(tool) for tool in tools if not isinstance(tool, str)],
        pool=cast(Pool, None),
    )
    async with Grader() as grader:
        cut = await play(grader=grader, budget=agentloop.Budget(max_turns=3))
        assert cut.dialogues == []
        complete = await play(grader=grader, budget=agentloop.Budget(max_turns=4))
    (dialogue,) = complete.dialogues
    assert dialogue["messages"][-1]["content"].endswith("It is 37.")


async def test_tool_that_an_environment_names_must_be_given() -> None:
    def clerk(messages: Sequence[agentloop.Message]) -> str:
        return "Shelf 1."

    with pytest.raises(agentloop.RequestError, match=r"pass play\(tools=\{'mcp:warehouse'"):
        await agentloop.play(find, {"prompt": "Find parcel 5.", "answer": "1"}, clerk)


async def test_script_plays_all_agents_and_replies() -> None:
    def play_both(messages: Sequence[agentloop.Message]) -> str:
        return "yes" if "Is this right?" in messages[-1]["content"] else "I say 6."

    played = await agentloop.play(solve_and_check, {"prompt": "2, 3 or 6?", "answer": 6}, play_both)
    assert played.reward.value == 1.0
    assert played.record.others["checker"].reward == 1.0
    assert len(played.dialogues) == 2

    @agentloop.environment
    async def talk(task: Any, agent: agentloop.Agent) -> float:
        async with agent.conversation() as conversation:
            return len({await conversation.ask(str(n)) for n in range(3)})

    async def echo(messages: Sequence[agentloop.Message]) -> str:
        return str(messages[-1]["content"])

    assert (await agentloop.play(talk, TASK, echo)).reward.value == 3.0


async def test_environment_that_fails_says_so() -> None:
    @agentloop.environment
    async def broken(task: Any, agent: agentloop.Agent) -> float:
        return float(task.nothing)

    with pytest.raises(agentloop.RequestError, match="the task has no field 'nothing'"):
        await agentloop.play(broken, TASK, halves)


async def test_environment_is_told_answers_without_reasoning() -> None:
    answers: list[str] = []

    @agentloop.environment
    async def talk(task: Any, agent: agentloop.Agent) -> float:
        await agent.run("?", reply=answers.append)  # returns None: the conversation ends
        return 1.0

    played = await agentloop.play(talk, TASK, lambda messages: "<think>Hm.</think> It is 37.")
    assert answers == ["It is 37."]
    assert played.dialogues[0]["messages"][-1]["content"] == "<think>Hm.</think> It is 37."
