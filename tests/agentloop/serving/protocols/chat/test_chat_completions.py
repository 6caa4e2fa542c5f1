"""OpenAI's protocol: a stream contains exactly the text of the whole completion."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.agent.rollout import Budget, Rollout, TurnOptions
from agentloop.agent.tools import CallerTool
from agentloop.events import CallFinished, CallStarted, Event, RolloutStarted, TurnSampled
from agentloop.serving.protocols.chat.chat_completions import ChunkWriter, chunk_frame, completion
from agentloop.trajectory import (
    StopReason,
    ToolCall,
    ToolCallStatus,
    ToolResult,
    Trajectory,
    Turn,
    TurnEnd,
)
from tests.support import END, ScriptedEngine, call_text, chat_format, chunks, written

CHAT = chat_format()
HELLO = [{"role": "user", "content": "hello"}]
THEIRS = {"type": "function", "function": {"name": "theirs"}}


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
    """Join the chunks of a choice as a client does."""
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


def writer(
    *, stop: Sequence[str] = (), has_caller_tools: bool = False, tells_executed: bool = False
) -> ChunkWriter:
    return ChunkWriter(
        chunk_frame("c-1", "m"),
        0,
        chat=CHAT,
        stop=stop,
        has_caller_tools=has_caller_tools,
        tells_executed=tells_executed,
        token_text=lambda token: CHAT.decode([token]),
    )


def whole_of(trajectory: Trajectory, **options: Any) -> dict[str, Any]:
    """Return the only choice of a completion."""
    (choice,) = completion([(writer(**options), trajectory)])["choices"]
    return cast(dict[str, Any], choice)


def as_message(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice in the form that `message_of` returns."""
    message = choice["message"]
    texts = {key: message.get(key) or "" for key in ("content", "reasoning_content")}
    lists = {key: message.get(key, []) for key in ("tool_calls", "executed_tools")}
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
    st.booleans(),
    st.sampled_from([TurnEnd.STOP, TurnEnd.LENGTH]),
)
async def test_joined_chunks_equal_the_completions_message(
    texts: list[str],
    cuts: list[int],
    whose: str,
    stop: list[str],
    single: bool,
    tells: bool,
    end: TurnEnd,
) -> None:
    """Equal byte by byte, for any grouping of the tokens."""

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
        options["tells_executed"] = tells
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
        assert last.get("matched_stop") == choice.get("matched_stop")
        assert {chunk["id"] for chunk in sent} == {"c-1"}
        for chunk in sent:  # no part is opened by whitespace
            (piece,) = chunk["choices"]
            delta = piece["delta"]
            for text in (delta.get("content"), delta.get("reasoning_content")):
                assert not text or text.strip()
        assert len(joined["logprobs"]) == trajectory.num_sampled_tokens
        if single:
            assert all(len(turn.calls) <= 1 for turn in trajectory)
        if trajectory.stop_reason is StopReason.STOP_SEQUENCE:
            assert choice["finish_reason"] == "stop"
            assert choice["matched_stop"] in stop
            assert not any(sequence in joined["content"] for sequence in stop if sequence != "\n\n")
        return without_times(joined)

    assert await run(cuts) == await run([])


def trajectory(status: ToolCallStatus, arguments: dict[str, Any], **fields: Any) -> Trajectory:
    call = ToolCall("call_1", "f", arguments, "{}", 0, 1)
    result = ToolResult("call_1", "f", status, "out", 1.0, 1.1, 1.5)
    text = f"hi{call_text('f', {})}{END}"
    turn = Turn(calls=[call], results=[result], text=text, end=TurnEnd.STOP)
    return Trajectory("t", [1, 2], [turn], **fields)


def test_executed_calls_are_shown_in_the_reasoning() -> None:
    choice = whole_of(trajectory(ToolCallStatus.OK, {"code": "print(1)"}), tells_executed=True)
    assert choice["message"]["reasoning_content"] == "▶ f\nprint(1)\n◀ ok\nout"
    assert choice["message"]["content"] == "hi"
    assert len(choice["message"]["executed_tools"]) == 1


@pytest.mark.parametrize("arguments", [{"n": 2**70}, {"deep": [[[[{}]]]]}, {"é": "🐍"}, {}])
def test_arguments_are_sent_as_json(arguments: dict[str, Any]) -> None:
    made = trajectory(ToolCallStatus.CALLER, arguments, stop_reason=StopReason.CALLER_TOOLS)
    choice = whole_of(made, has_caller_tools=True)
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == arguments
    json.dumps(choice).encode()
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "hi"


def test_executed_calls_are_not_sent_as_tool_calls() -> None:
    made = trajectory(ToolCallStatus.OK, {"a": 1}, stop_reason=StopReason.ANSWERED)
    choice = whole_of(made)
    assert "tool_calls" not in choice["message"]
    (executed,) = choice["message"]["executed_tools"]
    assert (executed["status"], executed["output"]) == ("ok", "out")
    assert executed["duration_s"] == 0.5


def test_executed_calls_are_sent_in_order_after_their_turn() -> None:
    calls = [ToolCall(f"call_{n}", "f", {}, "{}", n, n + 1) for n in range(2)]
    results = [ToolResult(call.id, "f", ToolCallStatus.OK, "out", 0, 0, 0) for call in calls]
    record = Trajectory("t", [1], [Turn(calls=calls, end=TurnEnd.STOP)])
    made = writer()
    events: list[Event] = [
        RolloutStarted(record),
        *(CallStarted("t", 0, call) for call in calls),
        CallFinished("t", 0, results[1]),
        TurnSampled("t", 0),
    ]
    message = message_of([chunk for event in events for chunk in made.feed(event)])
    assert message["executed_tools"] == []
    message = message_of(list(made.feed(CallFinished("t", 0, results[0]))))
    assert [call["id"] for call in message["executed_tools"]] == ["call_0", "call_1"]


@pytest.mark.parametrize(
    "reason",
    [reason for reason in StopReason if reason is not StopReason.CONTENT_FILTER],  # of endpoints
)
def test_every_ending_has_a_finish_reason(reason: StopReason) -> None:
    choice = whole_of(Trajectory("t", [1], stop_reason=reason))
    allowed = {"error"} if reason.is_unscorable else {"stop", "length", "tool_calls"}
    assert choice["finish_reason"] in allowed


def test_token_of_half_a_character_has_no_bytes() -> None:
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
    usage = completion([(writer(), trajectory) for trajectory in made])["usage"]
    assert usage == {
        "prompt_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens": 7,
        "total_tokens": 10,
    }
