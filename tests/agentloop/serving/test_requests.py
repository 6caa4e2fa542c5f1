"""OpenAI's parameters: supported, ignored or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentloop.agent.constraints import OutputRules
from agentloop.agent.rollout import TurnOptions
from agentloop.errors import RequestError, Unsupported
from agentloop.serving.protocols.chat.completions import CompletionRequest
from agentloop.serving.requests import ONLY_BARE_MODEL, UNSUPPORTED, ChatRequest

HELLO = [{"role": "user", "content": "hello"}]
THEIRS = {"type": "function", "function": {"name": "theirs"}}


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": HELLO, **fields}).encode()


def message_body(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", **fields}]}).encode()


def test_supported_parameters_are_parsed() -> None:
    request = ChatRequest.parse(
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
    assert request.sampling_overrides() == {"temperature": 0, "top_p": 0.9, "seed": 3}
    assert request.token_limit == 10
    assert request.turn_options() == TurnOptions(
        ("a", "b"), single_call=True, ignore_end=True, num_top_logprobs=2
    )
    assert request.has_caller_tools
    assert ChatRequest.parse(body(max_tokens=1, max_completion_tokens=2)).token_limit == 2
    assert ChatRequest.parse(body(stop="a")).turn_options() == TurnOptions(("a",))
    assert not ChatRequest.parse(body(tools=[THEIRS], tool_choice="none")).has_caller_tools


_CALLED = {"id": "call_1", "type": "function", "function": {"name": "theirs", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        # bfcl-eval 2026.3.23: OpenAICompletionsHandler, whose history holds OpenAI's own objects
        (
            ChatRequest,
            {
                "messages": [
                    *HELLO,
                    {
                        **dict.fromkeys(("content", "refusal", "annotations", "audio")),
                        "role": "assistant",
                        "function_call": None,
                        "tool_calls": [_CALLED],
                    },
                    {"role": "tool", "content": "{}", "tool_call_id": "call_1"},
                ],
                "model": "m",
                "temperature": 0.001,
                "store": False,
                "tools": [THEIRS],
            },
        ),
        # its handlers of open models; of GLM, of MiniCPM
        (CompletionRequest, {"model": "m", "temperature": 0.001, "max_tokens": 4096}),
        (CompletionRequest, {"model": "m", "max_tokens": 4096, "stop_token_ids": [151329]}),
        (CompletionRequest, {"model": "m", "max_tokens": 4096, "skip_special_tokens": False}),
        # Arena-Hard, commit 3bab294
        (ChatRequest, {"model": "m", "messages": HELLO, "max_tokens": 32000}),
    ],
)
def test_requests_of_harnesses_are_accepted(kind: Any, fields: dict[str, Any]) -> None:
    inputs = fields if kind is ChatRequest else {"prompt": "hello", **fields}
    request = kind.parse(json.dumps(inputs).encode())
    names = ("temperature", "max_tokens", "stop_token_ids")
    assert [getattr(request, name) for name in names] == [fields.get(name) for name in names]


def test_null_equals_a_missing_parameter() -> None:
    names = [*ChatRequest.model_fields, *UNSUPPORTED]
    inputs = {name: None for name in names if name != "messages"}
    request = ChatRequest.parse(body(**inputs))
    assert request == ChatRequest.parse(body())
    assert request.turn_options() == TurnOptions()
    assert (request.token_limit, request.sampling_overrides()) == (None, {})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[
            (name, value)
            for name, only in {**UNSUPPORTED, **ONLY_BARE_MODEL}.items()
            for value in only.values
        ],
        ("presence_penalty", 0.0),
        ("stop", []),
        ("logprobs", False),
        ("top_logprobs", 0),
        ("parallel_tool_calls", True),
        ("tool_choice", "auto"),
        ("tool_choice", "none"),
        ("response_format", {"type": "text"}),
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
    request = ChatRequest.parse(body(**{field: value}))
    request.refuse_for_agent()
    assert request.turn_options() == TurnOptions()


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("field", "value", "rules"),
    [
        ("tool_choice", "required", OutputRules("required")),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}, OutputRules("f")),
        ("response_format", {"type": "json_object"}, OutputRules(schema={"type": "object"})),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
            OutputRules(schema=SCHEMA),
        ),
    ],
)
def test_form_of_turns_may_be_constrained(field: str, value: Any, rules: OutputRules) -> None:
    assert ChatRequest.parse(body(**{field: value})).turn_options() == TurnOptions(rules=rules)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"type": "json_schema"}, "response_format.json_schema: Field required"),
        ({"type": "xml"}, "response_format: .* 'type'"),
        (
            {"type": "json_schema", "json_schema": {"name": "n"}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_incomplete_response_format_is_named(value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ChatRequest.parse(body(response_format=value))


def test_variables_of_the_chat_template_come_with_a_request() -> None:
    request = ChatRequest.parse(
        body(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
    )
    assert request.template_arguments == {"reasoning_effort": "low", "enable_thinking": False}


@pytest.mark.parametrize(("seed", "sent"), [(0, 0), (-1, (1 << 63) - 1), (-(1 << 63), 0)])
def test_seed_may_be_negative(seed: int, sent: int) -> None:
    assert ChatRequest.parse(body(seed=seed)).sampling_overrides() == {"seed": sent}


def test_integers_may_be_large_or_integral_floats() -> None:
    assert ChatRequest.parse(body(max_tokens=2**70)).token_limit == 2**70
    request = ChatRequest.parse(body(n=2.0, seed=1e3, tools=[]))
    assert (request.n, request.seed) == (2, 1000)


def test_additional_fields_of_messages_and_tools_are_kept() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a", "more": 1}], "more": [2]}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}, "more": 3}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    function = {"name": "f", "parameters": {"properties": {"n": {"const": 2**70}}}, "more": 4}
    tool = {"type": "function", "function": function}
    request = ChatRequest.parse(body(messages=[message, answer], tools=[tool]))
    plain = [{**message, "content": "a"}, {**answer, "content": ""}]
    assert (request.messages, request.tools) == (plain, [tool])


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("functions", [{}], "use tools"),
        ("guided_json", {}, "use response_format"),
        ("enable_thinking", False, "use chat_template_kwargs"),
        ("continue_final_message", True, "leave it out, or use false"),
        ("web_search_options", {}, "leave it out"),
        ("audio", {"voice": "alloy"}, "leave it out"),
        ("best_of", 2, "use n"),
        ("modalities", ["audio"], '["text"]'),
    ],
)
def test_unsupported_parameters_that_would_change_the_answer_are_refused(
    field: str, value: Any, instead: str
) -> None:
    with pytest.raises(
        Unsupported, match=f"^{field}: .* is not supported by this server; "
    ) as refusal:
        ChatRequest.parse(body(**{field: value}))
    assert instead in str(refusal.value)


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [("min_tokens", 2, "leave it out, or use 0"), ("stop_token_ids", [3], "use stop")],
)
def test_parameters_of_the_bare_model_are_refused_for_the_agent(
    field: str, value: Any, instead: str
) -> None:
    request = ChatRequest.parse(body(**{field: value}))
    with pytest.raises(
        Unsupported, match=f"^{field}: .* is not supported by this server; "
    ) as refusal:
        request.refuse_for_agent()
    assert instead in str(refusal.value)


def test_parameters_of_the_bare_model_are_sglangs() -> None:
    request = ChatRequest.parse(
        body(
            frequency_penalty=-1,
            presence_penalty=0.5,
            repetition_penalty=1.5,
            logit_bias={"3": -100, "03": 5, "7": 0.5},
            min_tokens=2,
            max_tokens=2,
            stop_token_ids=[5],
        )
    )
    options = request.turn_options()
    assert options.stop_ids == (5,)
    assert options.parameters == {
        "frequency_penalty": -1,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"3": 5, "7": 0.5},
        "min_new_tokens": 2,
    }


def test_parameters_of_the_bare_model_may_not_contradict_each_other() -> None:
    request = ChatRequest.parse(body(min_tokens=3, max_tokens=2))
    with pytest.raises(RequestError, match=r"^min_tokens: 3 are more than the limit of 2"):
        request.turn_options()
    request = ChatRequest.parse(body(stop_token_ids=[3], ignore_eos=True))
    with pytest.raises(RequestError, match=r"^stop_token_ids: "):
        request.turn_options()


def test_every_parameter_is_documented() -> None:
    document = (Path(__file__).parents[3] / "docs" / "http.md").read_text()
    for name in [*ChatRequest.model_fields, *CompletionRequest.model_fields, *UNSUPPORTED]:
        assert f"`{name}`" in document, name


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"{}", "messages: Field required"),
        (b'{"messages": []}', "messages: "),
        (b'{"messages": "hi"}', "messages: "),
        (b'{"messages": ["hi"]}', r"messages\[0\]: "),
        (b'{"messages": [{}]}', r"messages\[0\]\.role: "),
        (message_body(content=5), r"messages\[0\]\.content: "),
        (message_body(content=[{"type": "text"}]),
         r"messages\[0\]\.content\[0\]\.text: expected a string"),
        (message_body(content=[{"type": "image_url"}]), r"messages\[0\]\.content\[0\]\.t"),
        (message_body(tool_calls=[{"function": {"arguments": "{}"}}]),
         r"\.tool_calls\[0\]\.function\.name: "),
        (body(tools=[{"type": "function", "function": {"name": ""}}]),
         r"tools\[0\]\.function\.name"),
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
        (body(stop=["a"] * 5), "stop: List should have at most 4 items"),
        (body(stop=""), "stop: "),
        (body(stop=["a", ""]), r"stop\[1\]: "),
        (body(stop=5), "stop: "),
        (body(top_logprobs=2), "top_logprobs: set logprobs to true"),
        (body(logprobs=0), "logprobs: "),
        (body(parallel_tool_calls=1), "parallel_tool_calls: "),
        (body(ignore_eos=0), "ignore_eos: "),
        (body(seed=1 << 63), "seed: "),
        (body(presence_penalty=False), "presence_penalty: "),
        (body(frequency_penalty=2.1), "frequency_penalty: "),
        (body(repetition_penalty=0), "repetition_penalty: "),
        (body(logit_bias={"x": 1}), r"logit_bias\.x"),
        (body(logit_bias={"-1": 1}), r"logit_bias\.-1"),
        (body(logit_bias={"5": 101}), r"logit_bias\.5: "),
        (body(min_tokens=-1), "min_tokens: "),
        (body(stop_token_ids=[-1]), r"stop_token_ids\[0\]: "),
        (body(tools={}), "tools: "),
    ],
)  # fmt: skip
def test_bad_request_names_the_field(raw: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=f"^(the body is )?{message}|{message}"):
        ChatRequest.parse(raw)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"cut \ud83d", "cut \ufffd"),
        (r"\ude00 cut", "\ufffd cut"),
        (r"\uD83D\uDE00 \ud83d\n\\ud83d", "\N{GRINNING FACE} \ufffd\n\\ud83d"),
    ],
)
def test_half_a_surrogate_pair_becomes_a_replacement_character(text: str, expected: str) -> None:
    request = ChatRequest.parse(
        b'{"messages": [{"role": "user", "content": "%s"}]}' % text.encode()
    )
    assert request.messages == [{"role": "user", "content": expected}]


def test_answer_is_accepted_back_in_every_form() -> None:
    function = {"name": "f", "arguments": ""}
    requests = {"role": "assistant", "content": None}
    forms: list[dict[str, Any]] = [
        {**requests, "tool_calls": [{"id": "call00000", "type": "function", "function": function}]},
        {**requests, "tool_calls": [{"function": {"name": "f", "arguments": None}}]},
        {**requests, "tool_calls": None, "function_call": function},
    ]
    first, *remaining = (ChatRequest.parse(body(messages=[form])).messages for form in forms)
    assert all(second == first for second in remaining)
