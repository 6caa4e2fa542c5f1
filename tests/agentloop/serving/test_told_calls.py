"""Calls that the agent ran, as clients are told of them, in the forms of all families."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from agentloop.agent.rollout import Rollout, TurnOptions
from agentloop.events import Event
from agentloop.serving.protocols.chat.chat_completions import ChunkWriter, chunk_frame, completion
from agentloop.trajectory import StopReason, ToolCallStatus, Trajectory
from tests.agentloop.agent.call_forms import FORMS, Call
from tests.agentloop.agent.formats.test_families import chat_of
from tests.agentloop.agent.random_conversations import chunks_of
from tests.support import END, ScriptedEngine, chunks, written

# The first test makes the tokenizer.
pytestmark = pytest.mark.timeout(120)

ASKED = [{"role": "user", "content": "hello"}]
CALLS: list[Call] = [("search", {"text": "the secret"}), ("python_code", {"number": 7})]


async def search(text: str) -> str:
    """Search."""
    return "found"


async def python_code(number: int) -> str:
    """Run a program."""
    return "ran"


def answer(name: str, text: str) -> str:
    return f"<|channel|>final<|message|>{text}<|end|>" if name == "harmony" else text


def writer(name: str, stop: Sequence[str]) -> ChunkWriter:
    return ChunkWriter(
        chunk_frame("c-1", "m"), 0, chat=chat_of(name), stop=stop, tells_executed=True
    )


async def run_and_convert(
    name: str, turns: Sequence[str], dice: random.Random, stop: Sequence[str] = ()
) -> tuple[Trajectory, dict[str, str]]:
    """Return a rollout and its message, which is the same in a stream and as a whole."""
    chat, events = chat_of(name), list[Event]()
    script = []
    for text in turns:
        ids = written(chat, text + END)
        edges = chunks_of(dice, len(ids))
        sizes = [b - a for a, b in itertools.pairwise(edges)]
        script.append(list(chunks(ids, sizes)))
    trajectory = await Rollout(
        ScriptedEngine(*script),
        chat,
        ASKED,
        [search, python_code],
        options=TurnOptions(stop=tuple(stop)),
        emit=events.append,
    ).run()
    made = writer(name, stop)
    message = {"content": "", "reasoning_content": ""}
    for event in events:
        for chunk in made.feed(event):
            delta: Any = chunk["choices"][0]["delta"]
            for key in message:
                message[key] += delta.get(key) or ""
    expected: Any = completion([(writer(name, stop), trajectory)])["choices"][0]["message"]
    assert message == {key: expected.get(key) or "" for key in message}
    return trajectory, message


def reasoning_of(name: str, calls: Sequence[Call], turns: int) -> str:
    thought = ["Let me see."] if name == "harmony" else []
    results = {"search": "\u25b6 search", "python_code": "\u25b6 python_code"}
    return " ".join((thought + [results[tool] for tool, _ in calls]) * turns)


def headings(reasoning: str) -> str:
    """Return the thoughts, and the first lines of what is told of calls."""
    kept = (part.split("\n")[0] for part in reasoning.split("\n\n"))
    return " ".join(part.split("(")[0].strip() for part in kept)


@pytest.mark.parametrize("name", sorted(FORMS))
async def test_calls_are_shown_separately_and_the_text_once(name: str) -> None:
    form, calls = FORMS[name], CALLS[: 1 if FORMS[name].one_call else 2]
    calling, dice = form.before + form.text(calls), random.Random(name)
    for _ in range(4):
        trajectory, message = await run_and_convert(
            name, [calling, calling, answer(name, "The answer.")], dice
        )
        assert [result.status for result in trajectory.results] == [ToolCallStatus.OK] * 2 * len(
            calls
        )
        before = [form.before.strip()] * 2 if form.before else []
        assert message["content"] == "\n\n".join([*before, "The answer."])
        assert headings(message["reasoning_content"]) == reasoning_of(name, calls, 2)


@pytest.mark.parametrize("name", sorted(FORMS))
async def test_stop_sequences_are_found_in_one_turn_only(name: str) -> None:
    form, calls = FORMS[name], CALLS[: 1 if FORMS[name].one_call else 2]
    calling, dice = form.before + form.text(calls), random.Random(name)
    turns = [calling, answer(name, "The answer is 7.")]
    before = form.before.strip() + "\n\n" if form.before else ""
    # "." ends one turn and "The" begins the next; the arguments of calls are no answer.
    stops = [".The", ".\n\nThe", "secret", "answer"]
    trajectory, message = await run_and_convert(name, turns, dice, stops)
    assert trajectory.stop_reason is StopReason.STOP_SEQUENCE
    assert message["content"] == f"{before}The"
    assert headings(message["reasoning_content"]) == reasoning_of(name, calls, 1)
    if form.before:  # the answer ends in the first turn, so its calls are not told
        trajectory, message = await run_and_convert(name, turns, dice, ["look"])
        assert trajectory.stop_reason is StopReason.STOP_SEQUENCE
        assert (message["content"], message["reasoning_content"]) == ("I", "")
