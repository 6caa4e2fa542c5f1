"""Requests of OpenAI's Responses API: translated, ignored or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentloop.agent.constraints import OutputRules
from agentloop.errors import RequestError, Unsupported
from agentloop.serving.protocols.responses.responses import UNSUPPORTED_RESPONSES, ResponsesRequest
from agentloop.serving.requests import ChatRequest

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
F = {"type": "function", "name": "f", "parameters": SCHEMA}
G = {"type": "custom", "name": "g", "description": "Edits files."}


def parse(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.parse(json.dumps({"input": "hello", **fields}).encode())


def chat(**fields: Any) -> ChatRequest:
    return parse(**fields).to_chat()


def call(id: str, name: str = "f", arguments: str = "{}") -> dict[str, Any]:
    return {
        "id": id,
        "type": "function",
        "function": {"name": name, "arguments": json.loads(arguments)},
    }


def message(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


def text(text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": text}


def test_supported_parameters_are_translated() -> None:
    request = chat(
        model="m",
        instructions="Be brief.",
        temperature=0,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=3,
        max_output_tokens=10,
        stream=True,
        stop=["a"],
        top_logprobs=2,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        tools=[F],
        tool_choice="required",
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"},
        chat_template_kwargs={"a": 1},
    )
    assert request.messages == [message("Be brief.", "system"), message("hello")]
    assert (request.model, request.stream, request.token_limit) == ("m", True, 10)
    assert request.sampling_overrides() == {
        "temperature": 0, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3,
    }  # fmt: skip
    options = request.turn_options()
    assert (options.stop, options.single_call, options.num_top_logprobs) == (("a",), True, 2)
    assert options.rules == OutputRules("required")
    assert request.tools == [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    assert request.template_arguments == {"reasoning_effort": "low", "a": 1}
    assert request.logprobs


def test_parameters_of_the_bare_model_are_left_to_the_service() -> None:
    request = chat(frequency_penalty=0.5, stop_token_ids=[3])
    assert request.server_parameters() == {"frequency_penalty": 0.5}
    with pytest.raises(Unsupported, match=r"^stop_token_ids: "):
        request.refuse_for_agent()


def test_null_equals_a_missing_parameter() -> None:
    names = {*ResponsesRequest.model_fields, *UNSUPPORTED_RESPONSES} - {"input"}
    assert parse(**dict.fromkeys(names)) == parse()
    assert chat(**dict.fromkeys(names)) == chat()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(name, value) for name, only in UNSUPPORTED_RESPONSES.items() for value in only.values],
        ("tools", []),
        ("tool_choice", "auto"),
        ("text", {"verbosity": "low", "format": {"type": "text"}}),
        ("truncation", "auto"),
        ("include", ["reasoning.encrypted_content"]),
        ("store", False),
        ("metadata", {"a": "b"}),
        ("stream_options", {"include_obfuscation": False}),
        ("prompt_cache_key", "k"),
        ("service_tier", "auto"),
        ("user", "somebody"),
        ("reasoning", {"effort": None, "summary": "detailed"}),
    ],
)
def test_parameters_without_effect_are_accepted(field: str, value: Any) -> None:
    inputs, plain = chat(**{field: value}), chat()
    assert inputs.turn_options() == plain.turn_options()
    assert inputs.template_arguments == {}


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("background", True, "background: true"),
        ("conversation", "conv_1", "conversation: .*previous_response_id"),
        ("prompt", {"id": "p"}, "prompt: .*instructions"),
        ("max_tool_calls", 3, "max_tool_calls: 3"),
        ("max_tokens", 3, "max_tokens: .*max_output_tokens"),
        ("response_format", {"type": "text"}, "response_format: .*text.format"),
        ("guided_json", {}, "guided_json: .*text.format"),
        ("tools", [F, {"type": "mcp"}], r'tools\[1\].type: "mcp" is not supported'),
        ("tools", [{"type": "local_shell"}], r'tools\[0\].type: "local_shell" is not'),
        ("tools", [{"type": "web_search"}], r'tools\[0\].type: "web_search" is not'),
        ("tool_choice", {"type": "file_search"}, 'tool_choice.type: "file_search"'),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}],
         r'input\[0\].content\[0\].type: "input_image"'),
        ("input", [{"type": "reasoning", "summary": [], "encrypted_content": "x"}],
         r"input\[0\].encrypted_content"),
    ],
)  # fmt: skip
def test_fields_that_would_change_the_answer_are_refused_by_name(
    field: str, value: Any, named: str
) -> None:
    with pytest.raises(Unsupported, match=f"^{named}"):
        parse(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("input", [], "input: "),
        ("input", None, "input: "),
        ("input", [{"type": "item_reference", "id": "m"}], r"input\[0\].id: 'm' is not known here"),
        ("input", [{"type": "reasoning", "summary": []}], "input: there is no message"),
        ("input", [{"content": "hello"}], r"input\[0\].role: Field required"),
        ("input", [{"type": 3, "role": "user", "content": "h"}], r"input\[0\].type: "),
        ("input", [{"type": "function_call", "call_id": "c"}], r"input\[0\].(name|arguments): "),
        ("temperature", "1", "temperature: "),
        ("max_output_tokens", 0, "max_output_tokens: "),
        ("tools", [{"type": "function"}], r"tools\[0\].name: "),
        (
            "tool_choice",
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "h"}]},
            r"tool_choice.tools\[0\]: there is no function 'h'",
        ),
        ("text", {"format": {"type": "json_schema", "name": "n"}}, "text.format.schema: "),
    ],
)
def test_errors_name_the_field(field: str, value: Any, named: str) -> None:
    with pytest.raises(RequestError, match=f"^{named}"):
        parse(**{field: value})


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"input": NaN}'])
def test_body_must_be_a_json_object(body: bytes) -> None:
    with pytest.raises(RequestError, match=r"^the body"):
        ResponsesRequest.parse(body)


def test_items_of_one_turn_become_one_message() -> None:
    items = [
        {"type": "message", "role": "developer", "content": "Be brief."},
        {"role": "user", "content": [text("hel"), text("lo")]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [text("first", "summary_text"), text("second", "summary_text")],
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{**text("I compute.", "output_text"), "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": 'a "b"'},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [text("2")]},
        {
            "type": "reasoning",
            "content": [text("aha", "reasoning_text")],
            "summary": [text("short", "summary_text")],
            "encrypted_content": "x",
        },
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": "Really not."},
        {"role": "user", "content": "bye"},
    ]
    assert chat(input=items, tools=[F, G]).messages == [
        message("Be brief.", "system"),
        message("hello"),
        {
            **message("I compute.", "assistant"),
            "reasoning_content": "first\n\nsecond",
            "tool_calls": [call("c1"), call("c2", "g", '{"input": "a \\"b\\""}')],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {**message("No.", "assistant"), "reasoning_content": "aha"},
        message("Really not.", "assistant"),
        message("bye"),
    ]


def test_executed_calls_are_part_of_the_history() -> None:
    def executed_call(id: str) -> dict[str, Any]:
        names = {"name": "f", "arguments": "{}", "server_label": "agentloop"}
        return {"type": "mcp_call", "id": id, "output": f"out {id}", "error": None, **names}

    items = [
        message("hello"),
        message("I compute.", "assistant"),
        executed_call("a"),
        executed_call("b"),
        message("3", "assistant"),
        message("Why?"),
    ]
    assert chat(input=items).messages == [
        message("hello"),
        {**message("I compute.", "assistant"), "tool_calls": [call("a"), call("b")]},
        {"role": "tool", "tool_call_id": "a", "content": "out a"},
        {"role": "tool", "tool_call_id": "b", "content": "out b"},
        message("3", "assistant"),
        message("Why?"),
    ]


def test_request_continues_a_conversation_with_its_own_instructions() -> None:
    first = parse(instructions="Be brief.")
    kept = [*first.conversation(), message("hi", "assistant")]
    second = parse(input="bye", instructions="Be long.", previous_response_id="resp_1")
    assert second.to_chat(kept).messages == [
        message("Be long.", "system"),
        message("hello"),
        message("hi", "assistant"),
        message("bye"),
    ]
    assert second.conversation(kept) == [*kept, message("bye")]


def test_tools_of_a_namespace_are_offered_under_both_names() -> None:
    group = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [F, G]}
    request = parse(
        tools=[F, group],
        input=[
            message("hello"),
            {
                "type": "function_call",
                "call_id": "c1",
                "namespace": "crm",
                "name": "f",
                "arguments": "{}",
            },
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
        ],
    )
    functions = [tool["function"] for tool in request.to_chat().tools or ()]
    assert [function["name"] for function in functions] == ["f", "crm__f", "crm__g"]
    assert functions[2].get("description") == "Customers.\n\nEdits files."
    assert request.custom_tools == {"crm__g"}
    assert request.to_chat().messages[1]["tool_calls"] == [call("c1", "crm__f")]
    searches = {**group, "tools": [{"type": "web_search"}]}
    with pytest.raises(Unsupported, match=r"tools\[0\]\.tools\[0\]\.type"):
        parse(tools=[searches])


def test_custom_tool_becomes_a_function_of_one_text() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
    request = parse(
        tools=[{**G, "format": grammar}, {"type": "custom", "name": "h"}],
        tool_choice={"type": "custom", "name": "g"},
    )
    first, second = request.to_chat().tools or []
    assert first["function"]["name"] == "g"
    assert first["function"].get("description") == (
        "Edits files.\n\nThe input must match this Lark grammar:\n\nstart: /a+/"
    )
    assert (second["function"].get("parameters") or {})["required"] == ["input"]
    assert "description" not in second["function"]
    assert request.to_chat().turn_options().rules == OutputRules("g")
    assert request.custom_tools == {"g", "h"}


def test_allowed_tools_are_the_ones_that_are_offered() -> None:
    allowed = {"type": "allowed_tools", "tools": [{"type": "custom", "name": "g"}]}
    request = chat(tools=[F, G], tool_choice={**allowed, "mode": "required"})
    assert [tool["function"]["name"] for tool in request.tools or ()] == ["g"]
    assert request.tool_choice == "required"


def test_search_beside_other_tools_is_not_offered() -> None:
    search = {"type": "web_search", "external_web_access": False}
    request = chat(tools=[search, F])
    assert [tool["function"]["name"] for tool in request.tools or ()] == ["f"]


def test_request_of_codex_is_accepted() -> None:
    """The fields are those of `ResponsesApiRequest` and `ResponseItem` in its sources."""
    request = chat(
        model="m",
        instructions="You are a coding agent.",
        input=[
            {"type": "message", "role": "user", "content": [text("List the files.")]},
            {
                "type": "reasoning",
                "summary": [text("I look.", "summary_text")],
                "content": None,
                "encrypted_content": None,
            },
            {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "c1"},
            {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
        ],
        tools=[
            {"type": "function", "name": "shell", "strict": False, "parameters": SCHEMA},
            {"type": "custom", "name": "apply_patch", "description": "", "format": None},
            {
                "type": "namespace",
                "name": "multi_agent_v1",
                "description": "Tools for sub-agents.",
                "tools": [{"type": "function", "name": "spawn_agent", "strict": False}],
            },
            {"type": "web_search", "external_web_access": False},
        ],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
    )
    assert request.messages == [
        message("You are a coding agent.", "system"),
        message("List the files."),
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I look.",
            "tool_calls": [call("c1", "shell")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
    ]


@pytest.mark.parametrize("name", ["input", "tools", *UNSUPPORTED_RESPONSES])
def test_schema_describes_each_parameter(name: str) -> None:
    assert name in ResponsesRequest.model_json_schema()["properties"]


@pytest.mark.parametrize(
    ("answer_format", "rules"),
    [
        ({"type": "json_object"}, OutputRules(schema={"type": "object"})),
        (
            {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True},
            OutputRules(schema=SCHEMA),
        ),
    ],
)
def test_form_of_the_answer(answer_format: Any, rules: OutputRules) -> None:
    assert chat(text={"format": answer_format}).turn_options().rules == rules
