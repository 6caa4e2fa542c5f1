"""OpenAI's parameters: supported, ignored or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentloop.agent.rollout import TurnOptions
from agentloop.api.requests import UNSUPPORTED, ChatRequest
from agentloop.errors import RequestError, Unsupported

HELLO = [{"role": "user", "content": "hello"}]
THEIRS = {"type": "function", "function": {"name": "theirs"}}


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": HELLO, **fields}).encode()


def said(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", **fields}]}).encode()


def test_supported_parameters_are_parsed() -> None:
    asked = ChatRequest.parse(
        body(
            model="m",
            temperature=0,
            top_p=0.9,
            seed=3,
            max_tokens=10,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
            stop=["a", "b"],
            logprobs=True,
            top_logprobs=2,
            tools=[THEIRS],
            tool_choice="auto",
            parallel_tool_calls=False,
            ignore_eos=True,
        )
    )
    assert asked.sampling_overrides() == {"temperature": 0, "top_p": 0.9, "seed": 3}
    assert asked.token_limit == 10
    assert asked.turn_options() == TurnOptions(("a", "b"), True, True, 2)
    assert asked.has_caller_tools
    assert ChatRequest.parse(body(max_tokens=1, max_completion_tokens=2)).token_limit == 2
    assert ChatRequest.parse(body(stop="a")).turn_options() == TurnOptions(("a",))
    assert not ChatRequest.parse(body(tools=[THEIRS], tool_choice="none")).has_caller_tools


def test_null_equals_a_missing_parameter() -> None:
    names = [*ChatRequest.model_fields, *UNSUPPORTED]
    given = {name: None for name in names if name != "messages"}
    asked = ChatRequest.parse(body(**given))
    assert asked == ChatRequest.parse(body())
    assert asked.turn_options() == TurnOptions()
    assert (asked.token_limit, asked.sampling_overrides()) == (None, {})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(name, value) for name, only in UNSUPPORTED.items() for value in only.values],
        ("presence_penalty", 0.0),
        ("stop", []),
        ("logprobs", False),
        ("top_logprobs", 0),
        ("parallel_tool_calls", True),
        ("ignore_eos", False),
        ("stream_options", {}),
        ("metadata", {"a": "b"}),
        ("user", "somebody"),
        ("store", True),
        ("service_tier", "flex"),
        ("prompt_cache_key", "k"),
        ("unheard_of", [1]),
    ],
)
def test_parameters_without_effect_are_accepted(field: str, value: Any) -> None:
    asked = ChatRequest.parse(body(**{field: value}))
    assert asked.turn_options() == TurnOptions()


@pytest.mark.parametrize(("seed", "sent"), [(0, 0), (-1, (1 << 63) - 1), (-(1 << 63), 0)])
def test_a_seed_may_be_negative(seed: int, sent: int) -> None:
    assert ChatRequest.parse(body(seed=seed)).sampling_overrides() == {"seed": sent}


def test_integers_may_be_large_or_integral_floats() -> None:
    assert ChatRequest.parse(body(max_tokens=2**70)).token_limit == 2**70
    asked = ChatRequest.parse(body(n=2.0, seed=1e3, tools=[]))
    assert (asked.n, asked.seed) == (2, 1000)


def test_additional_fields_of_messages_and_tools_are_kept() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a", "more": 1}], "more": [2]}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}, "more": 3}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    function = {"name": "f", "parameters": {"properties": {"n": {"const": 2**70}}}, "more": 4}
    tool = {"type": "function", "function": function}
    asked = ChatRequest.parse(body(messages=[message, answer], tools=[tool]))
    assert (asked.messages, asked.tools) == ([message, answer], [tool])


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("logit_bias", {"3": 1}, "leave it out, or use {}"),
        ("presence_penalty", 0.5, "of one turn"),
        ("frequency_penalty", -1, "of one turn"),
        ("presence_penalty", False, "of one turn"),
        ("functions", [{}], "use tools"),
        ("tool_choice", "required", 'use "auto"'),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}, 'use "auto"'),
        ("response_format", {"type": "json_object"}, "describe the format in a message"),
        ("guided_json", {}, "describe the format in a message"),
        ("chat_template_kwargs", {"enable_thinking": False}, "leave it out"),
        ("continue_final_message", True, "leave it out, or use false"),
        ("web_search_options", {}, "leave it out"),
        ("audio", {"voice": "alloy"}, "leave it out"),
        ("best_of", 2, "use n"),
        ("reasoning_effort", "low", '"medium"'),
        ("modalities", ["audio"], '["text"]'),
    ],
)
def test_unsupported_parameters_that_would_change_the_answer_are_refused(
    field: str, value: Any, instead: str
) -> None:
    with pytest.raises(
        Unsupported, match=f"^{field}: .* is not supported by this server; "
    ) as told:
        ChatRequest.parse(body(**{field: value}))
    assert instead in str(told.value)


def test_every_parameter_is_documented() -> None:
    told = (Path(__file__).parents[3] / "docs" / "http.md").read_text()
    for name in [*ChatRequest.model_fields, *UNSUPPORTED]:
        assert f"`{name}`" in told, name


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b'{"a": "\\ud800"}', "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"{}", "messages: Field required"),
        (b'{"messages": []}', "messages: "),
        (b'{"messages": "hi"}', "messages: "),
        (b'{"messages": ["hi"]}', r"messages\[0\]: "),
        (b'{"messages": [{}]}', r"messages\[0\]\.role: "),
        (said(content=5), r"messages\[0\]\.content: "),
        (said(content=[{"type": "text"}]), r"messages\[0\]\.content\[0\]\.text: Field required"),
        (said(content=[{"type": "image_url"}]), r"messages\[0\]\.content\[0\]\.t"),
        (
            said(tool_calls=[{"function": {"name": "f"}}]),
            r"\.tool_calls\[0\]\.function\.arguments: ",
        ),
        (
            body(tools=[{"type": "function", "function": {"name": ""}}]),
            r"tools\[0\]\.function\.name",
        ),
        (body(n="2"), "n: "),
        (body(n=True), "n: "),
        (body(n=1.5), "n: "),
        (body(stream="true"), "stream: "),
        (body(temperature="0.5"), "temperature: "),
        (body(temperature=True), "temperature: "),
        (b'{"messages": [], "temperature": NaN}', "not valid JSON"),
        (body(n=0), "n: "),
        (body(n=1000), "n: "),
        (body(temperature=3), "temperature: "),
        (body(max_tokens=0), "max_tokens: "),
        (body(stop=["a"] * 5), "stop: "),
        (body(stop=""), "stop: "),
        (body(stop=["a", ""]), r"stop\[1\]: "),
        (body(stop=5), "stop: "),
        (body(top_logprobs=2), "top_logprobs: set logprobs to true"),
        (body(logprobs=0), "logprobs: "),
        (body(parallel_tool_calls=1), "parallel_tool_calls: "),
        (body(ignore_eos=0), "ignore_eos: "),
        (body(seed=1 << 63), "seed: "),
        (body(tools={}), "tools: "),
    ],
)
def test_a_bad_request_names_the_field(raw: bytes, said: str) -> None:
    with pytest.raises(RequestError, match=f"^(the body is )?{said}|{said}"):
        ChatRequest.parse(raw)
