"""A limit on thinking: thoughts that are too long are closed, and the model goes on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.constraints import OutputRules
from agentloop.agent.formats import FAMILIES
from agentloop.agent.rollout import Budget, Rollout, TurnOptions
from agentloop.errors import RequestError
from agentloop.trajectory import StopReason, Trajectory, TurnEnd
from tests.support import (
    END,
    TAGS,
    TEMPLATE,
    ScriptedEngine,
    call_text,
    chunks,
    template,
    tokenizer,
    written,
)

THOUGHTS = ("<think>", "</think>")
CHAT = ChatFormat(tokenizer((*TAGS, *THOUGHTS)), template(), end_token=END)
OPENING = ChatFormat(
    CHAT.tokenizer,
    template(TEMPLATE.replace("|>assistant\n' }}", "|>assistant\n<think>\n' }}")),
    end_token=END,
)
ASKED = [{"role": "user", "content": "What is 37 times 48?"}]
CLOSED = "\n</think>\n\n"


def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


class Model:
    """Samples given texts, in frames cut at given places."""

    def __init__(self, *texts: str, cuts: list[int] | None = None) -> None:
        self.ids = [written(CHAT, text) for text in texts]
        self.engine = ScriptedEngine(
            *(
                chunks(
                    ids, range(1, len(ids)) if cuts is None else [min(c, len(ids)) for c in cuts]
                )
                for ids in self.ids
            )
        )

    async def answer(
        self, limit: int, chat: ChatFormat = CHAT, max_turns: int = 9, **options: Any
    ) -> Trajectory:
        budget = Budget(max_thought_tokens=limit, max_turns=max_turns)
        return await Rollout(
            engine=self.engine, chat=chat, messages=ASKED, budget=budget, **options
        ).run()


cut_places = st.lists(st.integers(0, 60), max_size=8)


@given(cut_places, st.booleans())
async def test_too_long_thought_is_closed_and_the_turn_continues(
    cuts: list[int], with_text: bool
) -> None:
    model = Model(f"<think>{'hello world, ' * 9}", f"It is 1776.{END}", cuts=cuts)
    record = await model.answer(5, with_text=with_text)
    thought, answer = record.turns
    assert thought.output_ids == model.ids[0][:6]  # the tag, and five tokens
    assert thought.end is TurnEnd.THOUGHT
    assert CHAT.decode(thought.observation_ids) == CLOSED
    assert CHAT.token_id("</think>") in thought.observation_ids
    assert model.engine.asked[1].ids == [
        *record.prompt_ids,
        *thought.output_ids,
        *thought.observation_ids,
    ]
    assert answer.output_ids == model.ids[1]
    assert (record.answer, record.stop_reason) == ("It is 1776.", StopReason.ANSWERED)
    assert sum(record.mask) == 6 + len(model.ids[1])


@pytest.mark.parametrize(
    "text", ["<think>hello</think>", "", "<think></think><think>hello</think>"]
)
async def test_shorter_thoughts_and_long_answers_are_left_alone(text: str) -> None:
    model = Model(f"{text}{'hello world, ' * 9}{END}")
    record = await model.answer(len(written(CHAT, "hello")) + 1)
    assert [turn.end for turn in record] == [TurnEnd.STOP]
    assert record.turns[0].output_ids == model.ids[0]


async def test_thought_that_the_prompt_opened_is_limited() -> None:
    model = Model("hello world, hello world, hello", f"It is 1776.{END}")
    record = await model.answer(3, chat=OPENING)
    assert record.turns[0].output_ids == model.ids[0][:3]
    assert OPENING.decode(record.turns[0].observation_ids) == CLOSED
    assert record.answer == "It is 1776."


async def test_each_thought_has_the_whole_limit() -> None:
    long = "<think>hello world, hello world, hello"
    model = Model(long, long, f"It is 1776.{END}")
    record = await model.answer(3)
    assert [turn.end for turn in record] == [TurnEnd.THOUGHT, TurnEnd.THOUGHT, TurnEnd.STOP]


async def test_closed_thought_is_not_a_turn_of_the_budget() -> None:
    long = "<think>hello world, hello world, hello"
    call = call_text("multiply", {"a": 37, "b": 48}) + END
    model = Model(long, call, long, f"It is 1776.{END}")
    record = await model.answer(3, max_turns=2, tools=[multiply])
    assert (record.answer, record.stop_reason) == ("It is 1776.", StopReason.ANSWERED)
    assert [result.content for result in record.results] == ["1776"]
    messages = CHAT.messages_of(record.turns)
    assert [message["role"] for message in messages] == ["assistant", "tool", "assistant"]
    thought = CHAT.decode(model.ids[0][:4])
    assert messages[2]["content"] == f"{thought}{CLOSED}It is 1776."


async def test_call_in_a_thought_runs_and_the_limit_waits() -> None:
    call = call_text("multiply", {"a": 37, "b": 48})
    model = Model(f"<think>{call}{'hello ' * 9}{END}", f"It is 1776.{END}")
    record = await model.answer(3, tools=[multiply])
    assert [turn.end for turn in record] == [TurnEnd.STOP, TurnEnd.STOP]
    assert record.turns[0].output_ids == model.ids[0]


async def test_forced_call_is_still_forced_after_the_thought() -> None:
    call = call_text("multiply", {"a": 37, "b": 48}) + END
    model = Model("<think>hello world, hello world", call, f"It is 1776.{END}")
    options = TurnOptions(rules=OutputRules("required"))
    await model.answer(2, max_turns=3, tools=[multiply], options=options)
    forced = [bool(generation.parameters) for generation in model.engine.asked]
    assert forced == [True, True, False]


async def test_format_whose_thoughts_cannot_be_closed_is_refused() -> None:
    harmony = next(family for family in FAMILIES if family.name == "harmony")
    with pytest.raises(RequestError, match=r"max_thought_tokens.*harmony.*reasoning_effort"):
        Budget(max_thought_tokens=3).check(harmony)
    Budget().check(harmony)
