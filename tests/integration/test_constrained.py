"""Forced calls and structured answers, by the grammars of a real SGLang server."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

from agentloop.agent.constraints import OutputRules, constraint_of
from agentloop.agent.formats import FAMILIES, HERMES, Family

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

QUESTION: Any = [{"role": "user", "content": "What is 37 times 48?"}]
CITY: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


class Person(pydantic.BaseModel):
    """What `parse` of OpenAI's client sends as a strict schema; pydantic-ai and the AI SDK, too."""

    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=99)


async def ask(client: openai.AsyncOpenAI, **options: Any) -> Any:
    made = await client.chat.completions.create(**_request(options))
    return made.choices[0]


def _request(options: dict[str, Any]) -> dict[str, Any]:
    return {"model": "small-agent", "messages": QUESTION, "max_completion_tokens": 400, **options}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
async def test_call_is_forced(client: openai.AsyncOpenAI, choice: Any) -> None:
    second = {**CITY, "function": {**CITY["function"], "name": "other"}}
    tools = [CITY] if choice == "required" else [second, CITY]
    answer = await ask(client, tools=tools, tool_choice=choice, parallel_tool_calls=False)
    (call,) = answer.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather"
    assert arguments["city"] in ("Paris", "Rome")
    assert 1 <= arguments["days"] <= 9
    assert answer.finish_reason == "tool_calls"


async def test_agents_own_tool_is_forced_and_then_it_answers(client: openai.AsyncOpenAI) -> None:
    answer = await ask(client, tool_choice="required")
    assert [first["function"]["name"] for first in answer.message.executed_tools] == [
        "python_code_with_standard_io"
    ]
    assert "1776" in answer.message.content


async def test_answer_has_the_schema_of_a_class(client: openai.AsyncOpenAI) -> None:
    made = await client.chat.completions.parse(
        **_request({"response_format": Person, "tool_choice": "none"})
    )
    person = made.choices[0].message.parsed
    assert isinstance(person, Person)
    assert made.choices[0].finish_reason == "stop"


async def test_answer_is_an_object(client: openai.AsyncOpenAI) -> None:
    """The small model knows no JSON besides its calls, and may write until its limit."""
    answer = await ask(client, response_format={"type": "json_object"}, tool_choice="none")
    assert answer.message.content.startswith("{")
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content), dict)


async def test_agent_may_call_tools_before_answering_with_a_schema(
    client: openai.AsyncOpenAI,
) -> None:
    schema = {
        "name": "product",
        "schema": {
            "type": "object",
            "properties": {"product": {"type": "integer", "minimum": 0, "maximum": 9999}},
            "required": ["product"],
            "additionalProperties": False,
        },
    }
    answer = await ask(
        client,
        response_format={"type": "json_schema", "json_schema": schema},
        tool_choice="required",
    )
    assert len(answer.message.executed_tools) >= 1
    assert json.loads(answer.message.content).keys() == {"product"}


# What clients send besides the tools and a schema.
CLIENTS: Any = {
    "instructor": {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
    "LangChain": {
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
    },
    "LlamaIndex": {"tool_choice": "required", "parallel_tool_calls": False},
    "pydantic-ai": {"tool_choice": "required"},
    "smolagents": {"tool_choice": "required", "stop": ["Observation:", "Calling tools:"]},
}


@pytest.mark.parametrize("options", CLIENTS.values(), ids=CLIENTS)
async def test_streamed_call_equals_a_whole_one(client: openai.AsyncOpenAI, options: Any) -> None:
    requests = {**options, "tools": [CITY]}
    complete = await ask(client, **requests)
    pieces: dict[int, str] = {}
    names, content, end = [], "", None
    stream = await client.chat.completions.create(**_request({**requests, "stream": True}))
    async for chunk in stream:
        for choice in chunk.choices:
            end = choice.finish_reason or end
            content += choice.delta.content or ""
            for piece in choice.delta.tool_calls or ():
                names += [piece.function.name] if piece.function.name else []
                pieces[piece.index] = pieces.get(piece.index, "") + piece.function.arguments
    assert [call.function.name for call in complete.message.tool_calls] == names
    assert [call.function.arguments for call in complete.message.tool_calls] == list(
        pieces.values()
    )
    assert set(names) == {"weather"}
    assert (content, end) == ("", "tool_calls")


async def test_forced_call_comes_even_where_the_model_would_write_anything(
    client: openai.AsyncOpenAI,
) -> None:
    """A hot model spells markers in other ways than with their tokens."""
    made = await client.chat.completions.create(
        **_request({"tools": [CITY], "tool_choice": "required", "n": 16, "temperature": 1.5})
    )
    for choice in made.choices:
        if choice.finish_reason != "length":
            assert choice.finish_reason == "tool_calls"
            for call in choice.message.tool_calls:
                assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    assert any(choice.finish_reason == "tool_calls" for choice in made.choices)


async def test_recorded_logprobs_are_of_the_constrained_distribution(
    client: openai.AsyncOpenAI,
) -> None:
    """So training on such turns would be wrong; see agentloop/agent/constraints.py."""
    only = {"type": "object", "properties": {"a": {"const": "zq"}}, "required": ["a"]}
    answer = await ask(
        client,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": only}},
        tool_choice="none",
        logprobs=True,
    )
    tokens = answer.logprobs.content
    # What the model would hardly write is certain inside of the string.
    (last,) = [token for token in tokens if token.token.endswith("q")][-1:]
    assert last.logprob > -0.01


@pytest.mark.parametrize("stream", [False, True])
async def test_constraints_that_cannot_be_enforced_are_refused(
    client: openai.AsyncOpenAI, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match="tool_choice: there is no tool 'none such'"):
        await ask(
            client,
            tools=[CITY],
            tool_choice={"type": "function", "function": {"name": "none such"}},
            stream=stream,
        )
    for schema, stated in [
        ({"type": "no such type"}, "response_format: its schema .* cannot be enforced: .*no such"),
        ({"type": "array", "uniqueItems": True}, "response_format.* 'uniqueItems' cannot be enf"),
    ]:
        wanted = {"type": "json_schema", "json_schema": {"name": "bad", "schema": schema}}
        with pytest.raises(openai.BadRequestError, match=stated):
            await ask(client, response_format=wanted, stream=stream)
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"type": "nope"}}}
    with pytest.raises(openai.BadRequestError, match=r"parameters cannot be enforced: .*nope"):
        await ask(client, tools=[bad], tool_choice="required", stream=stream)


@pytest.mark.parametrize(
    "family", [first for first in FAMILIES if first.call_form], ids=lambda f: f.name
)
def test_xgrammar_takes_the_form_of_every_family(family: Family, sglang_installed: None) -> None:
    import xgrammar  # comes with SGLang

    result = constraint_of(OutputRules("required"), family, [CITY], opened_thought="", message=0)
    xgrammar.Grammar.from_structural_tag(result["structural_tag"])


SEARCH: Any = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    },
}
READ_FILE: Any = {"type": "function", "function": {**SEARCH["function"], "name": "read"}}
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}}
CALL = '<tool_call>\n{"name": "search", "arguments": {"q": "x"}}\n</tool_call>'
READ = CALL.replace("search", "read")


@pytest.mark.parametrize(
    ("rules", "opened", "accepted", "refused"),
    [
        (OutputRules("required"), "", [CALL, f"{CALL}\n{READ}", f"<think>Well.</think>\n\n{READ}"],
         ["", "It is 3.", f"It is 3. {CALL}", f"{CALL} Done.", f"<think>{CALL}</think>\n{CALL}"]),
        (OutputRules("read"), "<reason>", [f"Well.</reason>\n{READ}", f"</reason>{READ}"],
         [READ, f"Well.</reason>\n{CALL}", f"Well.</reason>\n{READ}\n{READ}", "Well.</reason>"]),
        (OutputRules(schema=NUMBER), "",
         ['{"n": 3}', '{ "n":3 }', CALL, '<think>{"n": "?"}</think>{"n": 3}'],
         ["", "3", '{"n": "3"}', f'{{"n": 3}}{CALL}', '{"n":        3}']),
        (OutputRules(schema={"type": "object"}), "<think>\n",
         ["</think>{}", 'Well.</think>\n\n{"a": [{"b": null}]}'],
         ["{}", "</think>[]", "</think>3"]),
    ],
)  # fmt: skip
def test_xgrammar_samples_what_the_rules_allow(
    rules: OutputRules, opened: str, accepted: list[str], refused: list[str], sglang_installed: None
) -> None:
    import xgrammar.testing  # comes with SGLang

    result = constraint_of(
        rules, HERMES, [SEARCH, READ_FILE], opened_thought=opened, message=0, ends=["<|im_end|>"]
    )
    grammar = xgrammar.Grammar.from_structural_tag(result["structural_tag"])
    accepts = xgrammar.testing._is_grammar_accept_string
    assert [text for text in accepted if not accepts(grammar, text)] == []
    assert [text for text in refused if accepts(grammar, text)] == []
