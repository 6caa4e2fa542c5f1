"""OpenAI's terms: what is understood and refused; a stream says what its whole does."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.agent.rollout import Budget, Rollout, TurnOptions
from agentloop.agent.tools import CallerTool
from agentloop.api.openai import (
    UNSUPPORTED,
    ChatRequest,
    ChunkWriter,
    chunk_frame,
    completion,
    error_body,
    model_list,
)
from agentloop.errors import RequestError, Unsupported
from agentloop.events import CallFinished, CallStarted, Event, RolloutStarted, TurnSampled
from agentloop.trajectory import (
    CallStatus,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    TurnEnd,
)
from tests.support import END, ScriptedEngine, call_text, chat_format, chunks, written

pytestmark = pytest.mark.anyio

CHAT = chat_format()
HELLO = [{"role": "user", "content": "hello"}]
THEIRS = {"type": "function", "function": {"name": "theirs"}}


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


def test_what_is_null_is_as_if_it_were_left_out() -> None:
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
def test_what_changes_nothing_is_accepted(field: str, value: Any) -> None:
    asked = ChatRequest.parse(body(**{field: value}))
    assert asked.turn_options() == TurnOptions()


@pytest.mark.parametrize(("seed", "sent"), [(0, 0), (-1, (1 << 63) - 1), (-(1 << 63), 0)])
def test_a_seed_may_be_negative(seed: int, sent: int) -> None:
    assert ChatRequest.parse(body(seed=seed)).sampling_overrides() == {"seed": sent}


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
    ("field", "value", "instead"),
    [
        ("logit_bias", {"3": 1}, "leave it out, or use {}"),
        ("presence_penalty", 0.5, "one turn only"),
        ("frequency_penalty", -1, "one turn only"),
        ("presence_penalty", False, "one turn only"),
        ("functions", [{}], "use tools"),
        ("tool_choice", "required", 'use "auto"'),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}, 'use "auto"'),
        ("response_format", {"type": "json_object"}, "ask for the form in a message"),
        ("guided_json", {}, "ask for the form in a message"),
        ("chat_template_kwargs", {"enable_thinking": False}, "leave it out"),
        ("continue_final_message", True, "leave it out, or use false"),
        ("web_search_options", {}, "leave it out"),
        ("audio", {"voice": "alloy"}, "leave it out"),
        ("best_of", 2, "use n"),
        ("reasoning_effort", "low", '"medium"'),
        ("modalities", ["audio"], '["text"]'),
    ],
)
def test_what_would_change_the_answer_and_is_not_supported_is_refused(
    field: str, value: Any, instead: str
) -> None:
    with pytest.raises(
        Unsupported, match=f"^{field}: .* is not supported by this server; "
    ) as told:
        ChatRequest.parse(body(**{field: value}))
    assert instead in str(told.value)


def test_every_parameter_is_in_the_document_for_people() -> None:
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
        (body(top_logprobs=2), "top_logprobs: they need logprobs: true"),
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


def message_of(chunks_: Iterable[Any], index: int = 0) -> dict[str, Any]:
    """What a client that joins the chunks of a choice ends up with."""
    message: dict[str, Any] = {"content": "", "reasoning_content": ""}
    lists: dict[str, list[Any]] = {"tool_calls": [], "executed_tools": [], "logprobs": []}
    for chunk in chunks_:
        (choice,) = chunk["choices"]
        assert choice["index"] == index
        delta = choice["delta"]
        for key in message:
            message[key] += delta.get(key) or ""
        for key in ("tool_calls", "executed_tools"):
            for entry in delta.get(key, ()):
                assert entry["index"] == len(lists[key])
                lists[key].append({k: v for k, v in entry.items() if k != "index"})
        lists["logprobs"] += choice.get("logprobs", {}).get("content", [])
    return {**message, **lists}


def writer(*, stop: Sequence[str] = (), has_caller_tools: bool = False) -> ChunkWriter:
    return ChunkWriter(
        chunk_frame("c-1", "m"),
        0,
        reasoning_first=False,
        stop=stop,
        has_caller_tools=has_caller_tools,
        token_text=lambda token: CHAT.decode([token]),
    )


def whole_of(trajectory: Trajectory, **options: Any) -> dict[str, Any]:
    """The one choice of a completion."""
    (choice,) = completion([(writer(**options), trajectory)])["choices"]
    return cast(dict[str, Any], choice)


def as_message(choice: dict[str, Any]) -> dict[str, Any]:
    """What `message_of` makes of a stream."""
    told = choice["message"]
    texts = {key: told.get(key) or "" for key in ("content", "reasoning_content")}
    lists = {key: told.get(key, []) for key in ("tool_calls", "executed_tools")}
    return {**texts, **lists, "logprobs": choice.get("logprobs", {}).get("content", [])}


def without_times(message: dict[str, Any]) -> dict[str, Any]:
    executed = [call | {"duration_s": 0} for call in message["executed_tools"]]
    return message | {"executed_tools": executed}


stops = st.lists(st.sampled_from(["a", "b ", "\n\n", "ab", "</answer>", "/>"]), max_size=2)


@pytest.mark.timeout(90)
@settings(max_examples=80, deadline=None)
@given(
    st.lists(pieces, min_size=1, max_size=3),
    st.lists(st.integers(0, 150), max_size=8),
    st.sampled_from(["agent", "caller"]),
    stops,
    st.booleans(),
    st.sampled_from([TurnEnd.STOP, TurnEnd.LENGTH]),
)
async def test_the_chunks_joined_are_the_completions_message(
    texts: list[str], cuts: list[int], whose: str, stop: list[str], single: bool, end: TurnEnd
) -> None:
    """Byte by byte, and the same however the tokens arrive."""

    async def run(cuts: list[int]) -> dict[str, Any]:
        events: list[Event] = []
        turns = [written(CHAT, text + END) for text in texts]
        script = [list(chunks(ids, [min(cut, len(ids)) for cut in cuts])) for ids in turns]
        script[-1] = list(chunks(turns[-1], [min(cut, len(turns[-1])) for cut in cuts], end=end))
        tools: list[Any] = [CallerTool(THEIRS)] if whose == "caller" else [echo]
        trajectory = await Rollout(
            ScriptedEngine(*script, list(chunks(written(CHAT, END)))),
            CHAT,
            HELLO,
            tools,
            budget=Budget(max_turns=len(texts)),
            options=TurnOptions(stop=tuple(stop), single_call=single),
            emit=events.append,
            id="r" * 12,
        ).run()
        options: Any = {"stop": stop, "has_caller_tools": whose == "caller"}
        made = writer(**options)
        sent = [chunk for event in events for chunk in made.feed(event)]
        sent.append(made.last(trajectory))
        choice = whole_of(trajectory, **options)
        json.dumps([sent, choice])
        joined = message_of(sent)
        assert joined == as_message(choice)
        last = sent[-1]["choices"][0]
        assert last["finish_reason"] == choice["finish_reason"]
        assert last["stop_reason"] == choice["stop_reason"]
        assert {chunk["id"] for chunk in sent} == {"c-1"}
        for chunk in sent:  # no part is opened by whitespace
            (piece,) = chunk["choices"]
            for key in ("content", "reasoning_content"):
                text = piece["delta"].get(key)
                assert not text or text.strip()
        assert len(joined["logprobs"]) == trajectory.num_sampled_tokens
        if single:
            assert all(len(turn.calls) <= 1 for turn in trajectory)
        if trajectory.stop_reason is StopReason.STOP_SEQUENCE:
            assert choice["finish_reason"] == "stop"
            assert not any(one in joined["content"] for one in stop if one != "\n\n")
        return without_times(joined)

    assert await run(cuts) == await run([])


def trajectory(status: CallStatus, arguments: dict[str, Any], **fields: Any) -> Trajectory:
    call = ToolCall("call_1", "f", arguments, "{}", 0, 1)
    result = ToolResult("call_1", "f", status, "out", 1.0, 1.1, 1.5)
    text = f"hi{call_text('f', {})}{END}"
    turn = Turn(calls=[call], results=[result], text=text, end=TurnEnd.STOP)
    return Trajectory("t", [1, 2], [turn], **fields)


@pytest.mark.parametrize("arguments", [{"n": 2**70}, {"deep": [[[[{}]]]]}, {"é": "🐍"}, {}])
def test_arguments_of_every_kind_are_json_for_the_client(arguments: dict[str, Any]) -> None:
    made = trajectory(CallStatus.CALLER, arguments, stop_reason=StopReason.CALLER_TOOLS)
    choice = whole_of(made, has_caller_tools=True)
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == arguments
    json.dumps(choice).encode()
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "hi"


def test_a_call_that_the_agent_ran_is_no_call_for_the_client() -> None:
    made = trajectory(CallStatus.OK, {"a": 1}, stop_reason=StopReason.ANSWERED)
    choice = whole_of(made)
    assert "tool_calls" not in choice["message"]
    (executed,) = choice["message"]["executed_tools"]
    assert (executed["status"], executed["output"]) == ("ok", "out")
    assert executed["duration_s"] == 0.5


def test_an_agents_own_calls_are_told_in_their_order_once_their_turn_is_sampled() -> None:
    calls = [ToolCall(f"call_{n}", "f", {}, "{}", n, n + 1) for n in range(2)]
    results = [ToolResult(call.id, "f", CallStatus.OK, "out", 0, 0, 0) for call in calls]
    record = Trajectory("t", [1], [Turn(calls=calls, end=TurnEnd.STOP)])
    made = writer()
    events: list[Event] = [
        RolloutStarted(record),
        *(CallStarted("t", 0, call) for call in calls),
        CallFinished("t", 0, results[1]),
        TurnSampled("t", 0),
    ]
    told = message_of([chunk for event in events for chunk in made.feed(event)])
    assert told["executed_tools"] == []
    told = message_of(list(made.feed(CallFinished("t", 0, results[0]))))
    assert [call["id"] for call in told["executed_tools"]] == ["call_0", "call_1"]


@pytest.mark.parametrize("reason", list(StopReason))
def test_every_ending_has_a_finish_reason(reason: StopReason) -> None:
    choice = whole_of(Trajectory("t", [1], stop_reason=reason))
    allowed = {"error"} if reason.infrastructure else {"stop", "length", "tool_calls"}
    assert choice["finish_reason"] in allowed


def test_a_token_of_half_a_character_has_no_bytes() -> None:
    ids = written(CHAT, "é")
    assert len(ids) == 2  # the fake tokenizer has no merge for it
    turn = Turn(ids, [-0.5, -0.25], text="é", top_logprobs=[[(-0.5, ids[0])], [(-0.1, 0)]])
    first, second = whole_of(Trajectory("t", [1], [turn]))["logprobs"]["content"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("\ufffd", None, -0.5)
    assert first["top_logprobs"] == [{"token": "\ufffd", "logprob": -0.5, "bytes": None}]
    assert second["top_logprobs"][0]["token"] == CHAT.decode([0])
    assert second["top_logprobs"][0]["bytes"] == list(CHAT.decode([0]).encode())


def test_usage_counts_every_choice() -> None:
    made = [
        Trajectory("t", [1, 2, 3], [Turn([1] * n, [0.0] * n, cached_tokens=2), Turn()])
        for n in (3, 4)
    ]
    usage = completion([(writer(), one) for one in made])["usage"]
    assert usage == {
        "prompt_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens": 7,
        "total_tokens": 10,
    }
