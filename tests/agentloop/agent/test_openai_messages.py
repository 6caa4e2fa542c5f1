"""Messages of clients and files in the one form that templates are given."""

from __future__ import annotations

from typing import Any

import pytest

from agentloop.agent.openai_messages import normal_form, one_call_each, with_ids
from agentloop.errors import RequestError, Unsupported


def call(id: str | None, arguments: object, name: str = "add") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": id, "type": "function", "function": function}


def calling(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def result(id: str | None, content: object = "1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


def arguments_in(messages: list[dict[str, Any]]) -> object:
    return messages[0]["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("{}", {}),
        ("", {}),
        (" \n", {}),
        ("null", {}),
        (None, {}),
        ('{"a": 1}', {"a": 1}),
        ({"a": None}, {"a": None}),
        ('{"a": "x\ny"}', {"a": "x\ny"}),
        (r'{"a": "\ud83d"}', {"a": "\ufffd"}),
        ('{"a": "', {"arguments": '{"a": "'}),
        ('["a"]', {"arguments": ["a"]}),
        ('"a"', {"arguments": "a"}),
        (r'"{\"a\": 1}"', {"a": 1}),
        ('""', {}),
    ],
)
def test_arguments_are_an_object(arguments: object, expected: object) -> None:
    plain = normal_form([calling(call("c1", arguments))])
    assert arguments_in(plain) == expected
    assert normal_form(plain) == plain


def test_keys_without_a_value_are_left_out() -> None:
    """As in rows of parquet files, in which each message has all keys."""
    nulls = {"name": None, "function_call": None, "tool_call_id": None, "audio": None}
    messages = [
        {"role": "developer", "content": "s", "tool_calls": [], **nulls},
        {"role": "assistant", "content": None, "tool_calls": None, **nulls},
    ]
    assert normal_form(messages) == [
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": ""},
    ]


def test_calls_of_the_older_form_have_ids() -> None:
    older = {"name": "add", "arguments": '{"a": 1}'}
    messages = [
        {"role": "assistant", "content": None, "function_call": older},
        {"role": "function", "name": "add", "content": "1"},
    ]
    assert normal_form(messages) == [
        {"role": "assistant", "content": "", "tool_calls": [call("call00000", {"a": 1})]},
        result("call00000"),
    ]


def test_calls_of_data_sets_and_custom_tools_are_functions() -> None:
    bare = {"name": "add", "arguments": {"a": 1}}
    custom = {"id": "c2", "type": "custom", "custom": {"name": "say", "input": "hi"}}
    (message,) = normal_form([calling(bare, custom)])
    assert message["tool_calls"] == [
        call("call00000", {"a": 1}),
        call("c2", {"input": "hi"}, "say"),
    ]


def test_results_are_in_the_order_of_their_calls() -> None:
    messages = [calling(call("c1", "{}"), call("c2", "{}")), result("c2"), result("c1")]
    assert normal_form(messages)[1:] == [result("c1"), result("c2")]
    assert normal_form(messages[1:], [("c1", "add"), ("c2", "add")]) == [result("c1"), result("c2")]


def test_result_without_an_id_answers_the_next_call() -> None:
    messages = [calling(call("c1", "{}"), call("c2", "{}")), result(None, "x"), result(None, "y")]
    assert normal_form(messages)[1:] == [result("c1", "x"), result("c2", "y")]


def test_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "a", "image_url": None}, {"type": "refusal", "refusal": "b"}]
    assert normal_form([{"role": "assistant", "content": parts}])[0]["content"] == "ab"


def test_image_in_a_result_becomes_text() -> None:
    parts = [{"type": "text", "text": "seen: "}, {"type": "image_url", "image_url": {"url": "x"}}]
    (message,) = normal_form([result("c1", parts)])
    assert message["content"] == "seen: [image_url omitted: the model reads text only]"


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("hi", r"messages\[1\]: expected an object"),
        ({"role": "bot"}, r"messages\[1\].role: 'bot' is not a valid role"),
        ({"role": "user", "content": 5}, r"messages\[1\].content: expected a string or text parts"),
        ({"role": "user", "content": [5]}, r"messages\[1\].content\[0\]: expected a text part"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]},
         r"messages\[1\].content\[0\].text: expected a string"),
        ({"role": "assistant", "tool_calls": "[]"},
         r"messages\[1\].tool_calls: expected a list, got '\[\]'"),
        ({"role": "assistant", "function_call": {"name": 5}},
         r"messages\[1\].function_call.name: expected a string, got 5"),
        (calling({"id": "c1"}), r"messages\[1\].tool_calls\[0\].function: expected an object"),
        (
            calling(call("c1", "{}", 5)),  # type: ignore[arg-type]
            r"messages\[1\].tool_calls\[0\].function.name: expected a string, got 5",
        ),
    ],
)  # fmt: skip
def test_errors_name_message_and_field(message: object, error: str) -> None:
    with pytest.raises(RequestError, match=error):
        normal_form([{"role": "user", "content": "hi"}, message])


def test_image_of_a_user_is_refused_by_name() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(Unsupported, match=r'messages\[0\].content\[0\].type: "image_url"'):
        normal_form([{"role": "user", "content": parts}])


def test_one_call_each_keeps_results_with_their_calls() -> None:
    first, second = call("c1", {}), call("c2", {})
    requests = {"role": "assistant", "content": "both", "tool_calls": [first, second]}
    user = {"role": "user", "content": "hi"}
    assert one_call_each([requests, result("c1"), result("c2"), result("c9"), user]) == [
        {**requests, "tool_calls": [first]},
        result("c1"),
        {"role": "assistant", "content": "", "tool_calls": [second]},
        result("c2"),
        result("c9"),
        user,
    ]


def test_calls_are_counted_although_their_ids_repeat() -> None:
    turn = [calling(call("c1", {})), result("c1")]
    renamed = with_ids([*turn, *turn], lambda id, name, number: f"{name}:{number}", 3)
    ids = [message["tool_call_id"] for message in renamed if message["role"] == "tool"]
    assert ids == ["add:3", "add:4"]
