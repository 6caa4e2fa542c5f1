"""Anthropic's requests: translated, ignored or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.errors import RequestError, Unsupported
from agentloop.serving.protocols.messages.messages import (
    UNSUPPORTED_IN_MESSAGES,
    MessagesRequest,
    TokenCountRequest,
)
from agentloop.serving.requests import ChatRequest

HELLO = [{"role": "user", "content": "hello"}]
THEIRS = {"name": "theirs", "input_schema": {"type": "object"}}


def text(content: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **fields}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "max_tokens": 9, "messages": HELLO, **fields}).encode()


def chat(**fields: Any) -> ChatRequest:
    return MessagesRequest.parse(body(**fields)).to_chat()


def messages(*turns: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """Return the messages for chat completions, without the last one."""
    made = chat(messages=[*turns, {"role": "user", "content": "now"}], **fields).messages
    assert made[-1] == {"role": "user", "content": "now"}
    return [dict(message) for message in made[:-1]]


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def use(id: str = "c_0_0", kind: str = "tool_use", **arguments: Any) -> dict[str, Any]:
    return {"type": kind, "id": id, "name": "f", "input": arguments}


def result(id: str, content: Any = "out", kind: str = "tool_result", **more: Any) -> dict[str, Any]:
    return {"type": kind, "tool_use_id": id, "content": content, **more}


def call(id: str = "c_0_0", arguments: str = "{}") -> dict[str, Any]:
    return {
        "id": id,
        "type": "function",
        "function": {"name": "f", "arguments": json.loads(arguments)},
    }


def test_parameters_become_those_of_chat_completions() -> None:
    request = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=20,
        seed=3,
        stream=True,
        stop_sequences=["a", "b"],
        tools=[{**THEIRS, "description": "d", "strict": True, "type": "custom"}],
        tool_choice={"type": "tool", "name": "theirs", "disable_parallel_tool_use": True},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"a": 1}}},
        thinking={"type": "enabled", "budget_tokens": 1024},
        chat_template_kwargs={"lang": "en"},
    )
    function = {"name": "theirs", "description": "d", "parameters": {"type": "object"}}
    assert request == ChatRequest.parse(
        json.dumps(
            {
                "model": "m",
                "max_tokens": 9,
                "messages": HELLO,
                "temperature": 0.5,
                "top_p": 0.9,
                "top_k": 20,
                "seed": 3,
                "stream": True,
                "stream_options": {"include_usage": True},
                "stop": ["a", "b"],
                "tools": [{"type": "function", "function": {**function, "strict": True}}],
                "tool_choice": {"type": "function", "function": {"name": "theirs"}},
                "parallel_tool_calls": False,
                "reasoning_effort": "low",
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"a": 1}, "strict": True},
                },
                "thinking_token_budget": 1024,
                "chat_template_kwargs": {"enable_thinking": True, "thinking": True, "lang": "en"},
            }
        ).encode()
    )


@pytest.mark.parametrize(
    ("theirs", "ours"), [("auto", "auto"), ("any", "required"), ("none", "none")]
)
def test_choice_of_a_tool(theirs: str, ours: str) -> None:
    request = chat(tools=[THEIRS], tool_choice={"type": theirs})
    assert (request.tool_choice, request.parallel_tool_calls) == (ours, None)


def test_thinking_is_switched_by_the_templates_variables() -> None:
    off = {"enable_thinking": False, "thinking": False}
    assert chat(thinking={"type": "disabled"}).template_arguments == off
    assert chat(thinking={"type": "adaptive", "display": "omitted"}).template_arguments == {}
    request = chat(thinking={"type": "disabled"}, chat_template_kwargs={"thinking": True})
    assert request.template_arguments == {"enable_thinking": False, "thinking": True}


def test_format_may_also_be_given_by_its_older_name() -> None:
    request = chat(output_format={"type": "json_schema", "schema": {"type": "object"}})
    assert request.turn_options().rules.schema == {"type": "object"}


def test_null_equals_a_missing_parameter() -> None:
    names = [*MessagesRequest.model_fields, *UNSUPPORTED_IN_MESSAGES]
    given = {name: None for name in names if name not in ("messages", "max_tokens", "model")}
    assert chat(**given) == chat()


def test_no_parameter_of_chat_completions_is_ignored() -> None:
    names = {*ChatRequest.model_fields} - {*MessagesRequest.model_fields}
    assert names - {*UNSUPPORTED_IN_MESSAGES} == {"stream_options"}  # it only asks for the usage


def test_fields_that_do_not_change_the_answer_are_ignored() -> None:
    tool = {**THEIRS, "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}
    ignored = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "speed": "fast",
        "inference_geo": "eu",
        "cache_control": {"type": "ephemeral"},
        "betas": ["x"],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "mcp_servers": [],
        "n": 1,
    }
    content = [text("hello", cache_control={"type": "ephemeral"}, citations=None)]
    request = chat(tools=[tool], messages=[{"role": "user", "content": content}], **ignored)
    assert request == chat(tools=[THEIRS])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"type": "url", "url": "u", "name": "n"}]}, "mcp_servers"),
        ({"stop": ["a"]}, "stop: .*use stop_sequences"),
        ({"regex": "a"}, "regex: .*use output_config.format"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, r'tools\[0\]\.type: "web_sea'),
        ({"tools": [{**THEIRS, "allowed_callers": ["code_execution_20250825"]}]},
         r"tools\[0\]\.allowed_callers"),
        ({"thinking": {"type": "between_tools"}}, r"thinking\.type"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}},
         r"context_management\.edits\[0\]\.type"),
        ({"system": [{"type": "image"}]}, r'system\[0\]\.type: "image"'),
        ({"messages": [{"role": "user", "content": [text("a"), {"type": "document"}]}]},
         r'messages\[0\]\.content\[1\]\.type: "document"'),
        ({"messages": [*HELLO, assistant({"type": "server_tool_use"}), *HELLO]},
         r'messages\[1\]\.content\[0\]\.type: "server_tool_use"'),
        ({"messages": [*HELLO, assistant(text("The"))]}, r"messages\[1\]\.role: .*\(prefill\)"),
    ],
)  # fmt: skip
def test_fields_that_would_change_the_answer_are_refused_by_name(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(Unsupported, match=f"^{named}"):
        MessagesRequest.parse(body(**fields))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens: "),
        ({"max_tokens": "9"}, "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "tool", "content": "a"}]}, r"messages\[0\]"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, r"messages\[0\]\.content"),
        ({"messages": [{"role": "user", "content": [text("a") | {"text": 1}]}]}, r".*\.text: "),
        ({"tools": [{"name": "f"}]}, r"tools\[0\]\.input_schema: "),
        ({"tools": [7]}, r"tools\[0\]: "),
        ({"tool_choice": {"type": "tool"}}, r"tool_choice\.name: "),
        ({"stop_sequences": ["a"] * 5}, "stop_sequences: "),
        ({"thinking": {"type": "enabled"}}, r"thinking\.budget_tokens: "),
        ({"temperature": 3}, "temperature: "),
    ],
)
def test_invalid_field_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=f"^{named}"):
        MessagesRequest.parse(body(**fields))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "tools", "edits", "thinking"]),
            inner,
        )
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(
        st.sampled_from([*MessagesRequest.model_fields]), json_values | st.just(HELLO), max_size=5
    )
)
def test_any_body_is_parsed_or_refused(fields: dict[str, Any]) -> None:
    for model in (MessagesRequest, TokenCountRequest):
        try:
            request = model.parse(json.dumps(fields).encode())
        except RequestError as error:
            assert ": " in str(error)  # noqa: PT017
        else:
            assert request.to_chat().messages


def test_system_prompt_is_the_first_message() -> None:
    assert chat(system="S").messages[0] == {"role": "system", "content": "S"}
    assert chat(system="").messages == HELLO
    made = chat(system=[text("x-anthropic-billing-header: cch=1f"), text("A"), text("B")])
    assert made.messages[0] == {"role": "system", "content": "A\n\nB"}


def test_answer_is_one_message() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "unsigned"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    (_, made) = messages(HELLO[0], assistant(redacted, thinking, text("a"), use(x="é"), text("b")))
    assert made == {
        "role": "assistant",
        "content": "ab",
        "reasoning_content": "hm",
        "tool_calls": [call(arguments='{"x": "é"}')],
    }
    assert messages(HELLO[0], assistant(use()))[1]["content"] == ""


def test_results_come_before_what_the_user_says() -> None:
    user_message = {
        "role": "user",
        "content": [
            text("one"),
            result("a", [text("x"), text("y")]),
            result("b", "no", is_error=True),
            result("c", "[error] no", is_error=True),
            {"type": "tool_result", "tool_use_id": "d"},
            text("two"),
        ],
    }
    answer = assistant(*(use(id) for id in "abcd"))
    request = chat(messages=[*HELLO, answer, user_message])
    assert request.messages[2:] == [
        {"role": "tool", "tool_call_id": "a", "content": "x\ny"},
        {"role": "tool", "tool_call_id": "b", "content": "[error] no"},
        {"role": "tool", "tool_call_id": "c", "content": "[error] no"},
        {"role": "tool", "tool_call_id": "d", "content": ""},
        {"role": "user", "content": "one\n\ntwo"},
    ]


def test_adjacent_messages_of_a_role_are_one() -> None:
    made = messages(HELLO[0], HELLO[0], assistant(text("a")), assistant(text("b")))
    assert [message["content"] for message in made] == ["hello\n\nhello", "ab"]


def test_instruction_in_mid_conversation_is_said_by_the_user() -> None:
    """Many chat templates refuse a system message that is not the first."""
    brief = {"role": "system", "content": [text("be"), text("brief")]}
    got = {"role": "user", "content": [result("c_0_0")]}
    made = messages(
        HELLO[0], brief, assistant(use()), got, {**brief, "content": "stop"}, assistant(text(""))
    )
    assert [message["role"] for message in made] == [
        "user", "assistant", "tool", "user", "assistant",
    ]  # fmt: skip
    first, _, _, second, _ = (message["content"] for message in made)
    assert first == "hello\n\n<system-reminder>\nbe\n\nbrief\n</system-reminder>"
    assert second == "<system-reminder>\nstop\n</system-reminder>"


def test_calls_that_the_agent_ran_are_turns_of_their_own() -> None:
    """Calls of one turn have ids that differ behind the last underscore."""
    ran, came = "mcp_tool_use", "mcp_tool_result"
    made = messages(
        HELLO[0],
        assistant(
            text("first"),
            use("c_0_0", ran),
            result("c_0_0", [text("x")], came, is_error=False),
            use("c_0_1", ran),
            result("c_0_1", [text("y")], came, is_error=True),
            use("c_1_0", ran),
            result("c_1_0", [text("z")], came),
            {"type": "thinking", "thinking": "\n\nhm"},
            text("\n\nlast"),
        ),
    )
    assert made[1:] == [
        {"role": "assistant", "content": "first", "tool_calls": [call("c_0_0"), call("c_0_1")]},
        {"role": "tool", "tool_call_id": "c_0_0", "content": "x"},
        {"role": "tool", "tool_call_id": "c_0_1", "content": "y"},
        {"role": "assistant", "content": "", "tool_calls": [call("c_1_0")]},
        {"role": "tool", "tool_call_id": "c_1_0", "content": "z"},
        {"role": "assistant", "content": "last", "reasoning_content": "hm"},
    ]


@pytest.mark.parametrize(
    ("keep", "thoughts"),
    [("all", "abcd"), ({"type": "all"}, "abcd"), (2, "bcd"), (1, "cd"), (None, "cd"), (9, "abcd")],
)
def test_thinking_of_earlier_turns_is_cleared(keep: Any, thoughts: str) -> None:
    """A turn goes on while it gets results of its calls."""
    edit = {"type": "clear_thinking_20251015"}
    if keep is not None:
        keep = {"type": "thinking_turns", "value": keep} if isinstance(keep, int) else keep
        edit |= {"keep": keep}

    def thought(name: str, *more: dict[str, Any]) -> dict[str, Any]:
        return assistant({"type": "thinking", "thinking": name}, *more)

    made = messages(
        *[HELLO[0], thought("a", text("A")), HELLO[0], thought("b", text("B"))],
        *[HELLO[0], thought("c", use())],
        *[{"role": "user", "content": [result("c_0_0")]}, thought("d", text("D"))],
        context_management={"edits": [edit]},
    )
    assert "".join(message.get("reasoning_content", "") for message in made) == thoughts


def test_counting_takes_what_makes_the_prompt() -> None:
    answer = assistant(text("Hi"))
    given = {"model": "m", "messages": [*HELLO, answer], "tools": [THEIRS], "system": "S"}
    counted = TokenCountRequest.parse(json.dumps(given).encode()).to_chat()
    assert [message["role"] for message in counted.messages] == ["system", "user", "assistant"]
    assert counted.tools == chat(tools=[THEIRS]).tools
    with pytest.raises(Unsupported, match="container"):
        TokenCountRequest.parse(json.dumps({**given, "container": "c"}).encode())
