"""OpenAI's terms: what is understood and refused; a stream says what its whole does."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.agent.rollout import Budget, Rollout
from agentloop.agent.tools import CallerTool
from agentloop.api.openai import ChatRequest, ChunkWriter, completion, error_body, model_list
from agentloop.errors import RequestError
from agentloop.events import Event
from agentloop.trajectory import CallStatus, StopReason, ToolCall, ToolResult, Trajectory, Turn
from tests.support import END, ScriptedEngine, call_text, chat_format, chunks, written

pytestmark = pytest.mark.anyio

CHAT = chat_format()
HELLO = [{"role": "user", "content": "hello"}]


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": HELLO, **fields}).encode()


def said(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", **fields}]}).encode()


def test_what_is_understood() -> None:
    asked = ChatRequest.parse(
        body(
            model="m",
            temperature=0,
            top_p=0.9,
            seed=3,
            max_tokens=10,
            stream=True,
            stream_options={"include_usage": True},
            user="somebody",
            presence_penalty=0.0,
            logprobs=False,
            stop=[],
            response_format={"type": "text"},
            tool_choice="auto",
            parallel_tool_calls=True,
        )
    )
    assert asked.sampling_overrides() == {"temperature": 0, "top_p": 0.9, "seed": 3}
    assert asked.token_limit == 10
    assert ChatRequest.parse(body(max_tokens=1, max_completion_tokens=2)).token_limit == 2
    assert ChatRequest.parse(body()).token_limit is None


def test_an_integer_may_be_large_or_have_a_point() -> None:
    assert ChatRequest.parse(body(max_tokens=2**70)).token_limit == 2**70
    asked = ChatRequest.parse(body(n=2.0, seed=1e3, tools=[]))
    assert (asked.n, asked.seed) == (2, 1000)


def test_what_a_message_and_a_tool_have_besides_is_kept() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a", "more": 1}], "more": [2]}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}, "more": 3}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    function = {"name": "f", "parameters": {"properties": {"n": {"const": 2**70}}}, "more": 4}
    tool = {"type": "function", "function": function}
    asked = ChatRequest.parse(body(messages=[message, answer], tools=[tool]))
    assert (asked.messages, asked.tools) == ([message, answer], [tool])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ["\n"]),
        ("stop", "x"),
        ("logit_bias", {"3": 1}),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("parallel_tool_calls", False),
        ("parallel_tool_calls", 1),
        ("ignore_eos", 0),
        ("logprobs", 0),
        ("presence_penalty", False),
    ],
)
def test_what_would_change_the_answer_and_is_not_supported_is_refused(
    field: str, value: Any
) -> None:
    with pytest.raises(RequestError, match=f"{field}.*: not supported by this server"):
        ChatRequest.parse(body(**{field: value}))


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
        (body(tool_choice="required"), "tool_choice: "),
        (body(tools={}), "tools: "),
    ],
)
def test_a_bad_request_names_the_field(raw: bytes, said: str) -> None:
    with pytest.raises(RequestError, match=f"^(the body is )?{said}|{said}"):
        ChatRequest.parse(raw)


def test_errors_and_models_look_like_openais() -> None:
    assert error_body("no", "invalid_request_error", param="n") == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": None}
    }
    (entry,) = model_list("m", 5)["data"]
    assert (entry["id"], entry["object"], entry["created"]) == ("m", "model", 5)


pieces = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "<think>",
                "</think>",
                "<answer>",
                "</answer>",
                call_text("echo", {"text": "<think>é"}),
                call_text("theirs", {"n": 2**70}),
                call_text("nope", {}),
                "<tool_call>{</tool_call>",
            ]
        ),
        st.text("ab <|>/é\n", max_size=8),
    ),
    max_size=6,
).map("".join)


async def echo(text: str) -> str:
    """Say it again."""
    return text


def message_of(chunks_: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client that joins the chunks ends up with."""
    message: dict[str, Any] = {"content": "", "reasoning_content": ""}
    lists: dict[str, list[Any]] = {"tool_calls": [], "executed_tools": []}
    for chunk in chunks_:
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        for key in message:
            message[key] += delta.get(key) or ""
        for key, entries in lists.items():
            for entry in delta.get(key, ()):
                assert entry["index"] == len(entries)
                entries.append({k: v for k, v in entry.items() if k != "index"})
    return {**message, **lists}


@pytest.mark.timeout(60)
@settings(max_examples=60, deadline=None)
@given(st.lists(pieces, min_size=1, max_size=3), st.lists(st.integers(0, 150), max_size=8))
async def test_the_chunks_joined_are_the_completions_message(
    texts: list[str], cuts: list[int]
) -> None:
    events: list[Event] = []
    turns = [written(CHAT, text + END) for text in texts]
    script = [list(chunks(ids, [min(cut, len(ids)) for cut in cuts])) for ids in turns]
    theirs = CallerTool({"type": "function", "function": {"name": "theirs"}})
    trajectory = await Rollout(
        ScriptedEngine(*script, list(chunks(written(CHAT, END)))),
        CHAT,
        HELLO,
        [echo, theirs],
        budget=Budget(max_turns=len(texts)),
        emit=events.append,
    ).run()
    writer = ChunkWriter("c-1", "m", reasoning_first=False, index=0)
    sent = [writer.first(), *(c for event in events for c in writer.feed(event))]
    sent.append(writer.last(trajectory))
    joined = message_of(cast(list[dict[str, Any]], sent))
    whole = completion("c-1", "m", [trajectory], reasoning_first=False)
    (choice,) = whole["choices"]
    message = choice["message"]
    json.dumps([sent, whole])
    assert joined["content"].strip() == (message["content"] or "")
    assert joined["reasoning_content"].strip() == message.get("reasoning_content", "")
    assert sorted(joined["tool_calls"], key=str) == sorted(message.get("tool_calls", []), key=str)
    assert sorted(joined["executed_tools"], key=str) == sorted(
        message.get("executed_tools", []), key=str
    )
    assert sent[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert writer.usage([trajectory])["usage"] == whole["usage"]
    assert {chunk["id"] for chunk in sent} == {"c-1"}


def trajectory(status: CallStatus, arguments: dict[str, Any], **fields: Any) -> Trajectory:
    call = ToolCall("call_1", "f", arguments, "{}", 0, 1)
    result = ToolResult("call_1", "f", status, "out", 1.0, 1.1, 1.5)
    turn = Turn(calls=[call], results=[result], text=f"hi{call_text('f', {})}{END}")
    return Trajectory("t", [1, 2], [turn], **fields)


@pytest.mark.parametrize("arguments", [{"n": 2**70}, {"deep": [[[[{}]]]]}, {"é": "🐍"}, {}])
def test_arguments_of_every_kind_are_json_for_the_client(arguments: dict[str, Any]) -> None:
    made = trajectory(CallStatus.CALLER, arguments, stop_reason=StopReason.CALLER_TOOLS)
    whole = completion("c", "m", [made], reasoning_first=False)
    (choice,) = whole["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == arguments
    json.dumps(whole).encode()
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "hi"


def test_a_call_that_the_agent_ran_is_no_call_for_the_client() -> None:
    made = trajectory(CallStatus.OK, {"a": 1}, stop_reason=StopReason.ANSWERED)
    (choice,) = completion("c", "m", [made], reasoning_first=False)["choices"]
    assert "tool_calls" not in choice["message"]
    (executed,) = choice["message"]["executed_tools"]
    assert (executed["status"], executed["output"]) == ("ok", "out")
    assert executed["duration_s"] == 0.5


@pytest.mark.parametrize("reason", list(StopReason))
def test_every_ending_has_a_finish_reason(reason: StopReason) -> None:
    made = Trajectory("t", [1], stop_reason=reason)
    (choice,) = completion("c", "m", [made], reasoning_first=False)["choices"]
    allowed = {"error"} if reason.infrastructure else {"stop", "length", "tool_calls"}
    assert choice["finish_reason"] in allowed


def test_usage_counts_every_choice() -> None:
    made = [
        Trajectory("t", [1, 2], [Turn(output_ids=[1] * n, observation_ids=[2] * 5)]) for n in (3, 4)
    ]
    usage = completion("c", "m", made, reasoning_first=False)["usage"]
    assert usage == {"prompt_tokens": 2, "completion_tokens": 7, "total_tokens": 9}
