"""Environments, played by a script in place of the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

import agentloop
from agentloop.agent.chat_format import ChatFormat
from agentloop.models import SMALL
from agentloop.training.sft import DialoguesSettings, read_dialogues, trajectories_of
from examples import guess_teacher
from examples.guess_number import guess
from examples.solver_and_checker import solve_and_check

pytestmark = pytest.mark.anyio

TASK = {"answer": 37, "top": 100}


def halves(messages: Sequence[agentloop.Message]) -> agentloop.Message | str:
    """Search for the number by halves."""
    low, high = 1, 100
    for said, heard in zip(messages[1::2], messages[2::2], strict=False):
        number = said["tool_calls"][0]["function"]["arguments"]["number"]
        if heard["content"] == "right":
            return f"<reason>So</reason>It is {number}."
        low, high = (number + 1, high) if heard["content"] == "higher" else (low, number - 1)
    return agentloop.call("guess", "<reason>Halve it.</reason>", number=(low + high) // 2)


async def test_a_script_plays_a_game() -> None:
    played = await agentloop.play(guess, TASK, halves)
    assert played.reward.parts["found"] == 1.0
    (trajectory,) = played.episode.trajectories
    assert trajectory.answer.endswith("It is 37.")
    assert [call.arguments["number"] for call in trajectory.calls] == [50, 25, 37]
    assert [result.content for result in trajectory.results] == ["lower", "higher", "right"]


async def test_a_script_keeps_to_the_number_of_turns() -> None:
    played = await agentloop.play(guess, TASK, halves, budget=agentloop.Budget(max_turns=2))
    assert played.reward.parts["found"] == 0.0
    assert played.episode.trajectories[0].stop_reason is agentloop.StopReason.TURN_BUDGET


async def test_the_dialogues_can_be_learned_from(tmp_path: Path) -> None:
    played = await agentloop.play(guess, TASK, halves)
    chat = ChatFormat.load(SMALL)
    file = tmp_path / "dialogues.jsonl"
    file.write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in played.dialogues))
    (dialogue,) = read_dialogues(DialoguesSettings(paths=[file]))
    (trajectory,) = trajectories_of(chat, dialogue, max_tool_response_tokens=64)
    assert len(trajectory.turns) == 4


async def test_the_teacher_of_the_game_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    await guess_teacher.main(20)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 20
    won = ["It is" in row["messages"][-1]["content"] for row in rows]
    assert 0 < sum(won) < 20


async def test_a_script_plays_all_agents_and_replies() -> None:
    def both(messages: Sequence[agentloop.Message]) -> str:
        return "yes" if "Is this right?" in messages[-1]["content"] else "I say 6."

    played = await agentloop.play(solve_and_check, {"prompt": "2 times 3?", "answer": 6}, both)
    assert played.reward.value == 1.5
    assert played.episode.others["checker"].reward == 1.0
    assert len(played.dialogues) == 2

    @agentloop.environment
    async def talk(task: Any, agent: agentloop.Agent) -> float:
        async with agent.conversation() as conversation:
            return len({await conversation.ask(str(n)) for n in range(3)})

    async def echo(messages: Sequence[agentloop.Message]) -> str:
        return str(messages[-1]["content"])

    assert (await agentloop.play(talk, TASK, echo)).reward.value == 3.0


async def test_an_environment_that_fails_says_so() -> None:
    @agentloop.environment
    async def broken(task: Any, agent: agentloop.Agent) -> float:
        return float(task.nothing)

    with pytest.raises(agentloop.RequestError, match="the task has no field 'nothing'"):
        await agentloop.play(broken, TASK, halves)
