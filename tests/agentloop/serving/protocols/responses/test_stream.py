"""Events and objects of the Responses API, checked with the types of OpenAI's package."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import httpx
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent

from agentloop.agent.openai_messages import normal_form
from agentloop.errors import PromptTooLong, RequestError, ServerError, Unsupported
from agentloop.serving.http import error_of
from agentloop.serving.protocols.responses.responses import ResponsesRequest
from agentloop.serving.protocols.responses.stream import (
    ResponsesStream,
    StreamEvent,
    error_form,
    messages_of,
    whole,
)
from agentloop.serving.schemas import ChatCompletionChunk, Usage
from agentloop.trajectory import StopReason

# The types of events by their names. To try all of them on each event would take seconds.
EVENTS: dict[str, type[pydantic.BaseModel]] = {
    get_args(cls.model_fields["type"].annotation)[0]: cls
    for cls in get_args(get_args(ResponseStreamEvent)[0])
}
USAGE: Usage = {
    "prompt_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 2},
    "completion_tokens": 7,
    "total_tokens": 12,
}
TOOLS = [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}]


def request(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.parse(json.dumps({"input": "hello", **fields}).encode())


def chunk(
    finish: str | None = None, logprobs: Sequence[Any] = (), **delta: Any
) -> ChatCompletionChunk:
    choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish}
    if logprobs:
        choice["logprobs"] = {"content": list(logprobs), "refusal": None}
    if finish:
        choice["stop_reason"] = StopReason.ANSWERED
    made: dict[str, Any] = {
        "id": "chatcmpl-0f",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
    }
    return cast(ChatCompletionChunk, made)


def call(id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(arguments, ensure_ascii=False)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def executed_call(id: str, output: str = "out", status: str = "ok") -> dict[str, Any]:
    return {**call(id, "py", {"code": "1"}), "status": status, "output": output, "duration_s": 0.1}


def chunks_of(*deltas: dict[str, Any], finish: str = "stop") -> list[ChatCompletionChunk]:
    first = chunk(role="assistant", content="")
    return [first, *(chunk(**delta) for delta in deltas), chunk(finish), usage()]


def usage() -> ChatCompletionChunk:
    return cast(ChatCompletionChunk, {**chunk(), "choices": [], "usage": USAGE})


def stream_events(
    parameters: ResponsesRequest, chunks: Iterable[ChatCompletionChunk]
) -> tuple[list[StreamEvent], dict[str, Any]]:
    """Return the events, and the response in the last one."""
    stream = ResponsesStream(parameters)
    events = [event for chunk in chunks for event in stream.feed(chunk)]
    return events, events[-1][1]["response"]


def check(events: Sequence[StreamEvent]) -> None:
    """Check the types, the numbers and the order of a whole stream."""
    for number, (name, data) in enumerate(events):
        assert name == data["type"]
        EVENTS[name].model_validate(data)
        assert data["sequence_number"] == number
    finished = [data for name, data in events if name == "response.output_item.done"]
    added = [data for name, data in events if name == "response.output_item.added"]
    last = events[-1][1]["response"]
    assert [data["output_index"] for data in added] == [*range(len(added))]
    assert [data["item"]["id"] for data in added] == [item["id"] for item in last["output"]]
    assert [data["item"] for data in finished] == last["output"]


# --- any turn of the model ------------------------------------------------------------------------

words = st.text(min_size=1, max_size=8).map(lambda text: f"a{text}b")  # stripped, as it comes
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@dataclass(frozen=True)
class SampledTurn:
    """A turn of the model that ends with an answer or with calls."""

    reasoning: str | None
    content: str | None
    calls: tuple[tuple[str, Any], ...] = ()

    def message(self) -> dict[str, Any]:
        """Return the message of chat completions."""
        content = self.content if self.calls else self.content or ""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [self._call(index) for index in range(len(self.calls))]
        return message

    def deltas(self, before: str = "") -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        if self.reasoning:
            made.append({"reasoning_content": before + self.reasoning})
        if self.content:
            made.append({"content": before + self.content})
        calls = [{"index": index, **self._call(index)} for index in range(len(self.calls))]
        return made + [{"tool_calls": [piece]} for piece in calls]

    def _call(self, index: int) -> dict[str, Any]:
        name, value = self.calls[index]
        return call(f"call_{index}", name, value if name == "f" else {"input": value})


calls = st.one_of(
    st.tuples(st.just("f"), st.dictionaries(st.text(max_size=3), values, max_size=3)),
    st.tuples(st.just("g"), st.text()),
)
turns = st.builds(
    SampledTurn,
    reasoning=st.none() | words,
    content=st.none() | words,
    calls=st.lists(calls, max_size=3).map(tuple),
)


@st.composite
def splits(draw: st.DrawFn, deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cut the texts of deltas in two, but not the blank line between turns."""
    cut = []
    for delta in deltas:
        (name, text), *_ = delta.items()
        if isinstance(text, str):
            at = draw(st.integers(min(3, len(text)), len(text)))
            cut += [{name: part} for part in (text[:at], text[at:]) if part]
        else:
            cut.append(delta)
    return cut


@settings(max_examples=50)  # the types of OpenAI's package are slow
@given(turn=turns, summary=st.sampled_from([None, "auto"]), data=st.data())
def test_turn_comes_back_as_it_was_sampled(
    turn: SampledTurn, summary: str | None, data: st.DataObject
) -> None:
    parameters = request(tools=TOOLS, reasoning={"summary": summary})
    finish = "tool_calls" if turn.calls else "stop"
    chunks = chunks_of(*turn.deltas(), finish=finish)
    events, response = stream_events(
        parameters, chunks_of(*data.draw(splits(turn.deltas())), finish=finish)
    )
    check(events)
    assert response["status"] == "completed"
    assert response == whole(parameters, chunks)
    assert messages_of(whole(parameters, chunks)) == [turn.message()]
    # A client sends the items back as OpenAI's package read them.
    echo = Response.model_validate(response).model_dump(mode="json", exclude_unset=True)
    items = [{"role": "user", "content": "hello"}, *echo["output"]]
    again = request(input=items, tools=TOOLS).to_chat().messages
    assert again == normal_form([{"role": "user", "content": "hello"}, turn.message()])


@settings(max_examples=50)
@given(
    first=turns.filter(lambda turn: not turn.calls),
    results=st.lists(st.text(), min_size=1, max_size=3),
    last=turns.filter(lambda turn: not turn.calls),
    data=st.data(),
)
def test_calls_that_the_agent_ran_come_back_as_its_history(
    first: SampledTurn, results: list[str], last: SampledTurn, data: st.DataObject
) -> None:
    ran = [
        {"executed_tools": [{"index": at, **executed_call(f"c{at}", result)}]}
        for at, result in enumerate(results)
    ]
    parameters = request()
    deltas = [*first.deltas(), *ran, *last.deltas("\n\n")]
    events, response = stream_events(parameters, chunks_of(*data.draw(splits(deltas))))
    check(events)
    assert response == whole(parameters, chunks_of(*deltas))
    history = messages_of(whole(parameters, chunks_of(*deltas)))
    assert [message["role"] for message in history] == [
        "assistant",
        *["tool"] * len(results),
        "assistant",
    ]
    assert history[0].get("content") == first.content
    assert history[0].get("reasoning_content") == first.reasoning
    assert [message["content"] for message in history[1:-1]] == results
    assert history[-1] == last.message()


# --- examples -------------------------------------------------------------------------------------


def test_events_of_an_answer() -> None:
    deltas = [{"reasoning_content": "hm"}, {"content": "1"}, {"content": "2"}]
    events, response = stream_events(request(), chunks_of(*deltas))
    assert [name.removeprefix("response.") for name, _ in events] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert response["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12,
    }
    assert response["stop_reason"] == "answered"
    assert Response.model_validate(response).output_text == "12"


def test_summary_is_sent_to_those_who_ask_for_one() -> None:
    parameters = request(reasoning={"summary": "auto"})
    events, response = stream_events(
        parameters, chunks_of({"reasoning_content": "hm"}, {"content": "1"})
    )
    deltas = [data for name, data in events if name == "response.reasoning_summary_text.delta"]
    assert [data["delta"] for data in deltas] == ["hm"]
    assert "content" not in response["output"][0]
    assert response["output"][0]["summary"] == [{"type": "summary_text", "text": "hm"}]


def test_executed_calls_have_their_output() -> None:
    deltas: list[dict[str, Any]] = [
        {"content": "I compute."},
        {"executed_tools": [{"index": 0, **executed_call("c0", "1")}]},
        {"executed_tools": [{"index": 1, **executed_call("c1", "boom", "error")}]},
        {"content": "\n\n1"},
    ]
    events, response = stream_events(request(), chunks_of(*deltas))
    check(events)
    kinds = [item["type"] for item in response["output"]]
    assert kinds == ["message", "mcp_call", "mcp_call", "message"]
    ok, failed = response["output"][1:3]
    assert (ok["status"], ok["output"], ok["server_label"]) == ("completed", "1", "agentloop")
    assert (failed["status"], failed["output"]) == ("failed", "boom")
    assert response["output"][-1]["content"][0]["text"] == "1"


@pytest.mark.parametrize(
    "arguments", [{"x": 1}, {"input": 1}, {"input": "a", "x": 1}, {"input": "a"}]
)
def test_custom_call_has_text(arguments: dict[str, Any]) -> None:
    piece = {"index": 0, **call("c", "g", arguments)}
    parameters = request(tools=TOOLS)
    events, response = stream_events(
        parameters, chunks_of({"tool_calls": [piece]}, finish="tool_calls")
    )
    check(events)
    item = response["output"][0]
    assert item["type"] == "custom_tool_call"
    assert item["input"] == ("a" if arguments == {"input": "a"} else json.dumps(arguments))


def test_call_names_the_namespace_of_its_tool() -> None:
    parameters = request(tools=[{"type": "namespace", "name": "crm", "tools": TOOLS}, *TOOLS])
    names = ("crm__f", "crm__g", "f")
    calls = [{"index": i, **call(f"c{i}", name, {})} for i, name in enumerate(names)]
    events, response = stream_events(
        parameters, chunks_of({"tool_calls": calls}, finish="tool_calls")
    )
    check(events)
    assert [(item["type"], item["name"], item.get("namespace")) for item in response["output"]] == [
        ("function_call", "f", "crm"),
        ("custom_tool_call", "g", "crm"),
        ("function_call", "f", None),
    ]


def test_answer_that_was_cut_off_is_incomplete() -> None:
    events, response = stream_events(request(), chunks_of({"content": "1"}, finish="length"))
    check(events)
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert response["output"][0]["status"] == "incomplete"
    assert events[-1][0] == "response.incomplete"


def test_parameters_are_repeated_in_the_response() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    parameters = request(
        instructions="Be brief.",
        tools=[*TOOLS, {"type": "web_search"}],
        tool_choice={"type": "custom", "name": "g"},
        text={"format": schema},
        reasoning={"effort": "low"},
        temperature=0.5,
        max_output_tokens=9,
        parallel_tool_calls=False,
        metadata={"a": "b"},
        previous_response_id="resp_1",
    )
    response = Response.model_validate(whole(parameters, chunks_of({"content": "1"})))
    assert (response.id, response.created_at, response.model) == ("resp_0f", 1, "m")
    assert (response.instructions, response.temperature) == ("Be brief.", 0.5)
    assert (response.max_output_tokens, response.parallel_tool_calls) == (9, False)
    assert [tool.type for tool in response.tools] == ["function", "custom"]
    assert (response.metadata, response.previous_response_id) == ({"a": "b"}, "resp_1")
    assert response.reasoning is not None
    assert response.reasoning.effort == "low"
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"


def test_logprobs_of_all_tokens_are_at_the_last_message() -> None:
    def token(text: str) -> dict[str, Any]:
        likely = {"token": text, "logprob": -0.5, "bytes": None}
        return {**likely, "top_logprobs": [likely]}

    parameters = request(include=["message.output_text.logprobs"], top_logprobs=1)
    chunks = [
        chunk(reasoning_content="hm", logprobs=[token("<think>"), token("hm")]),
        chunk(content="1", logprobs=[token("1")]),
        chunk(content="2"),
        chunk("stop"),
        usage(),
    ]
    events, response = stream_events(parameters, chunks)
    for name, data in events:
        EVENTS[name].model_validate(data)
    sent = [data["logprobs"] for name, data in events if name == "response.output_text.delta"]
    assert [[entry["token"] for entry in group] for group in sent] == [["<think>", "hm", "1"], []]
    part = Response.model_validate(response).output[-1].to_dict()["content"]
    assert [entry["token"] for entry in part[0]["logprobs"]] == ["<think>", "hm", "1"]  # type: ignore[index]


def test_failure_ends_the_response() -> None:
    stream = ResponsesStream(request())
    events = [event for chunk in chunks_of({"content": "1"})[:-2] for event in stream.feed(chunk)]
    events += stream.fail(*error_of(ServerError("all servers are gone")))
    check(events)
    response = events[-1][1]["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "all servers are gone"}
    assert response["output"][0]["status"] == "incomplete"


def test_failure_before_the_response_is_an_error() -> None:
    [(name, data)] = ResponsesStream(request()).fail(*error_of(Unsupported("tool_choice: no")))
    assert name == "error"
    EVENTS[name].model_validate(data)
    assert (data["code"], data["param"]) == ("unsupported_parameter", "tool_choice")


@pytest.mark.parametrize(
    ("error", "status", "param", "message"),
    [
        (RequestError("messages[3].content: bad"), 400, "input", "input: bad"),
        (PromptTooLong("messages: too long"), 400, "input", "input: too long"),
        (RequestError("response_format.schema: bad"), 400, "text.format.schema",
         "text.format.schema: bad"),
        (RequestError("temperature: bad"), 400, "temperature", "temperature: bad"),
        (ServerError("messages: gone"), 503, None, "messages: gone"),
    ],
)  # fmt: skip
def test_errors_name_the_fields_of_this_protocol(
    error: Any, status: int, param: str | None, message: str
) -> None:
    got, body = error_of(error)
    form = error_form(body)["error"]
    assert (got, form["param"], form["message"]) == (status, param, message)
    assert form["code"] == getattr(error, "code", None)


def test_openais_client_reads_the_stream() -> None:
    deltas: list[dict[str, Any]] = [
        {"reasoning_content": "hm"},
        {"content": "1"},
        {"content": "2"},
        {"tool_calls": [{"index": 0, **call("c", "f", {"a": 1})}]},
    ]
    parameters = request(tools=TOOLS)
    events, response = stream_events(parameters, chunks_of(*deltas, finish="tool_calls"))
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)

    def answer(request: httpx.Request) -> httpx.Response:
        ResponsesRequest.parse(request.content)
        return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, text=body)

    transport = httpx.MockTransport(answer)
    with (
        OpenAI(api_key="-", http_client=httpx.Client(transport=transport)) as client,
        client.responses.stream(model="m", input="hello") as stream,
    ):
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
        final = stream.get_final_response()
    assert text == final.output_text == "12"
    ids = [item["id"] for item in json.loads(final.to_json())["output"]]
    assert ids == [item["id"] for item in response["output"]]
