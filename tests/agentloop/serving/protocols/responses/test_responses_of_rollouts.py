"""Responses of real rollouts: a stream ends with the response that there is without a stream."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from agentloop.agent.rollout import Budget, Rollout, TurnOptions
from agentloop.agent.tools import CallerTool
from agentloop.events import Event
from agentloop.serving.protocols.chat.chat_completions import ChunkWriter, chunk_frame, completion
from agentloop.serving.protocols.responses.responses import ResponsesRequest
from agentloop.serving.protocols.responses.stream import ResponsesStream, messages_of, whole
from agentloop.trajectory import Trajectory
from tests.support import END, ScriptedEngine, call_text, chat_format, chunks, written

CHAT = chat_format()
FRAME = chunk_frame("chatcmpl-1", "m")
THEIRS = {"type": "function", "function": {"name": "theirs"}}
ASKED = ResponsesRequest.parse(
    json.dumps({"input": "hello", "include": ["message.output_text.logprobs"]}).encode()
)

passages = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<answer>",
        " a\n",
        "b <",
        call_text("echo", {"text": "é"}),
        call_text("theirs", {"n": 1}),
        "<tool_call>{</tool_call>",
    ]
)
texts = st.lists(passages, max_size=5).map("".join)


async def echo(text: str) -> str:
    """Say it again."""
    return text


def writer(has_caller_tools: bool) -> ChunkWriter:
    return ChunkWriter(
        FRAME,
        0,
        chat=CHAT,
        has_caller_tools=has_caller_tools,
        token_text=lambda token: CHAT.decode([token]),
    )


async def rollout(
    texts: list[str], cuts: list[int], has_caller_tools: bool
) -> tuple[list[Event], Trajectory]:
    """Return the events and the trajectory of a model that samples these texts."""
    turns = [written(CHAT, text + END) for text in texts]
    script = [list(chunks(ids, [min(cut, len(ids)) for cut in cuts])) for ids in turns]
    events: list[Event] = []
    tools: list[Any] = [CallerTool(THEIRS)] if has_caller_tools else [echo]
    trajectory = await Rollout(
        ScriptedEngine(*script, list(chunks(written(CHAT, END)))),
        CHAT,
        [{"role": "user", "content": "hello"}],
        tools,
        budget=Budget(max_turns=len(texts)),
        options=TurnOptions(),
        emit=events.append,
        id="r" * 12,
    ).run()
    return events, trajectory


@pytest.mark.timeout(90)
@settings(max_examples=40)
@given(
    st.lists(texts, min_size=1, max_size=3), st.lists(st.integers(0, 60), max_size=6), st.booleans()
)
async def test_stream_ends_with_the_whole_response(
    texts: list[str], cuts: list[int], has_caller_tools: bool
) -> None:
    events, trajectory = await rollout(texts, cuts, has_caller_tools)
    written, streaming = writer(has_caller_tools), ResponsesStream(ASKED)
    live = [chunk for event in events for chunk in written.feed(event)]
    live += [written.last(trajectory), written.usage([trajectory])]
    *_, (_, last) = [event for chunk in live for event in streaming.feed(chunk)]

    again = writer(has_caller_tools)
    response = whole(ASKED, [*again.whole(trajectory), again.usage([trajectory])])
    Response.model_validate(response)
    assert messages_of(last["response"]) == messages_of(response)
    # Where the caller's calls stand among text of their turn depends on how tokens were grouped.
    kinds = [item["type"] for item in last["response"]["output"]]
    if not {("function_call", "message"), ("function_call", "reasoning")} & {*pairwise(kinds)}:
        assert last["response"] == response

    # The text is that of chat completions, but for the blank lines between turns.
    message = completion([(writer(has_caller_tools), trajectory)])["choices"][0]["message"]
    history = messages_of(response)
    text = "".join(
        message["content"] or "" for message in history if message["role"] == "assistant"
    )
    assert "".join(text.split()) == "".join((message["content"] or "").split())
    outputs = [message["content"] for message in history if message["role"] == "tool"]
    assert outputs == [call["output"] for call in message.get("executed_tools", [])]


async def test_history_is_that_of_the_rollout() -> None:
    call = call_text("echo", {"text": "é"})
    _, trajectory = await rollout([f"<think>hm</think>I ask.{call}", "It said é."], [], False)
    again = writer(False)
    response = whole(ASKED, [*again.whole(trajectory), again.usage([trajectory])])
    first, output, last = messages_of(response)
    assert (first["reasoning_content"], first["content"]) == ("hm", "I ask.")
    assert first["tool_calls"][0]["function"] == {"name": "echo", "arguments": '{"text": "é"}'}
    assert output["content"] == trajectory.turns[0].results[0].content
    assert last == {"role": "assistant", "content": "It said é."}
