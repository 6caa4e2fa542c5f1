"""Anthropic's answers: what its client reads from a stream, and sends back, is what was sampled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import starmap
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.agent.openai_messages import normal_form
from agentloop.agent.rollout import Budget, Rollout
from agentloop.agent.tools import CallerTool
from agentloop.errors import RequestError, ServerError, UnknownModel
from agentloop.serving.exchange import named_event
from agentloop.serving.http import error_body, error_of
from agentloop.serving.protocols.chat.chat_completions import ChunkWriter, chunk_frame, completion
from agentloop.serving.protocols.messages.answers import MessagesStream, error_form, whole
from agentloop.serving.protocols.messages.messages import MessagesRequest
from agentloop.serving.schemas import ChatCompletionChunk
from agentloop.trajectory import StopReason, Trajectory, Turn
from tests.support import END, ScriptedEngine, call_text, chat_format, chunks, written

anthropic = pytest.importorskip(
    "anthropic", reason="needs Anthropic's client: pip install --group test"
)
import httpx2  # noqa: E402  (what the client speaks HTTP with)

CHAT = chat_format()
HELLO = [{"role": "user", "content": "hello"}]
THEIRS = {"type": "function", "function": {"name": "theirs"}}

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
json_objects = st.dictionaries(st.text(max_size=3), json_values, max_size=3)
words = st.text("ab é\n", max_size=6)
thoughts = words.map(lambda text: f"<think>{text}</think>")


def turn_texts(*calls: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Texts of a turn: what is thought and said, and then calls."""
    texts = st.lists(thoughts | words, max_size=3).map("".join)
    return st.tuples(texts, st.lists(st.one_of(*calls), max_size=3).map("".join)).map("".join)


echoes = words.map(lambda text: call_text("echo", {"text": text}))
malformed = st.just("<tool_call>{</tool_call>")


async def echo(text: str) -> str:
    """Say it again, but not everything."""
    if "é" in text:
        raise ValueError(text)
    return text


async def rolled_out(texts: Sequence[str], tools: Sequence[Any], **options: Any) -> Trajectory:
    turns = [list(chunks(written(CHAT, text + END))) for text in [*texts, ""]]
    budget = Budget(max_turns=len(texts))
    return await Rollout(
        ScriptedEngine(*turns), CHAT, HELLO, tools, budget=budget, id="r" * 12, **options
    ).run()


def writer(*, has_caller_tools: bool = False, stop: Sequence[str] = ()) -> ChunkWriter:
    frame = chunk_frame("chatcmpl-1", "m")
    return ChunkWriter(frame, 0, chat=CHAT, stop=stop, has_caller_tools=has_caller_tools)


def chunks_with_usage(trajectory: Trajectory, **options: Any) -> list[ChatCompletionChunk]:
    made = writer(**options)
    return [*made.whole(trajectory), made.usage([trajectory])]


def events(sent: Sequence[ChatCompletionChunk]) -> list[tuple[str, dict[str, Any]]]:
    stream = MessagesStream()
    return [event for chunk in sent for event in stream.feed(chunk)]


def client(status: int, content: bytes, kind: str) -> Any:
    """Return Anthropic's client of a server that answers this."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(status, content=content, headers={"content-type": kind})

    http_client = anthropic.DefaultHttpxClient(transport=httpx2.MockTransport(answer))
    return anthropic.Anthropic(api_key="k", http_client=http_client, max_retries=0)


def read(frames: bytes, *, beta: bool) -> Any:
    """Return the message that Anthropic's client makes of a stream."""
    with client(200, frames, "text/event-stream") as made:
        resource = made.beta.messages if beta else made.messages
        with resource.stream(model="m", max_tokens=9, messages=HELLO) as stream:
            return stream.get_final_message()


def as_sent(message: Any) -> dict[str, Any]:
    made: dict[str, Any] = message.to_dict()
    for name in ("container", "stop_details", "context_management"):
        assert made.pop(name, None) is None
    return made


def sent_back(content: Any, **fields: Any) -> list[dict[str, Any]]:
    """Return the messages of a next request whose client sends an answer back as it was read."""
    talk = [*HELLO, {"role": "assistant", "content": content}, *HELLO]
    body = json.dumps({"model": "m", "max_tokens": 9, "messages": talk, **fields})
    request = MessagesRequest.parse(body.encode()).to_chat()
    return [dict(message) for message in request.messages[1:-1]]


@pytest.mark.timeout(120)
# The client without the beta types says that it does not know the blocks of executed calls.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
@settings(max_examples=60, deadline=None)
@given(st.lists(turn_texts(echoes, malformed), min_size=1, max_size=3), st.booleans())
@pytest.mark.full
async def test_client_reads_a_stream_as_the_whole_answer(texts: list[str], beta: bool) -> None:
    """Calls that the agent ran are included, although only the beta client has types of them."""
    sent = chunks_with_usage(await rolled_out(texts, [echo]))
    frames = b"".join(starmap(named_event, events(sent)))
    assert as_sent(read(frames, beta=beta)) == whole(sent)


@pytest.mark.timeout(120)
@settings(max_examples=60, deadline=None)
@given(
    turn_texts(json_objects.map(lambda arguments: call_text("theirs", arguments))), st.booleans()
)
async def test_returned_answer_becomes_a_chat_completions_message(text: str, beta: bool) -> None:
    trajectory = await rolled_out([text], [CallerTool(THEIRS)])
    sent = chunks_with_usage(trajectory, has_caller_tools=True)
    frames = b"".join(starmap(named_event, events(sent)))
    message = read(frames, beta=beta)
    (choice,) = completion([(writer(has_caller_tools=True), trajectory)])["choices"]
    assert sent_back(message.to_dict()["content"]) == normal_form([choice["message"]])
    assert message.to_dict()["content"] == whole(sent)["content"]
    assert (message.stop_reason == "tool_use") == bool(trajectory.turns[0].calls)


@pytest.mark.timeout(120)
@settings(max_examples=60, deadline=None)
@given(st.lists(turn_texts(echoes), min_size=1, max_size=3))
async def test_returned_turns_of_the_agent_match_its_own(texts: list[str]) -> None:
    trajectory = await rolled_out(texts, [echo])
    expected: list[dict[str, Any]] = []
    for turn in trajectory:
        alone = Trajectory("t", trajectory.prompt_ids, [turn], stop_reason=StopReason.ANSWERED)
        (choice,) = completion([(writer(), alone)])["choices"]
        message: dict[str, Any] = {**choice["message"]}
        executed = message.pop("executed_tools", [])
        if executed:
            message["content"] = message["content"] or None
            names = ("id", "type", "function")
            message["tool_calls"] = [{name: call[name] for name in names} for call in executed]
        if executed or message["content"] or "reasoning_content" in message or not expected:
            expected.append(message)
        expected += [
            {"role": "tool", "tool_call_id": call["id"], "content": call["output"]}
            for call in executed
        ]
    assert sent_back(whole(chunks_with_usage(trajectory))["content"]) == normal_form(expected)


async def test_events_of_an_answer() -> None:
    text = f"<think>hm</think>hi{call_text('theirs', {'n': 2**70})}"
    trajectory = await rolled_out([text], [CallerTool(THEIRS)])
    stream_events = events(chunks_with_usage(trajectory, has_caller_tools=True))
    assert [(name, *(data.get("delta") or {"": 0})) for name, data in stream_events] == [
        ("message_start", ""),
        ("content_block_start", ""),
        ("content_block_delta", "type", "thinking"),
        ("content_block_delta", "type", "signature"),
        ("content_block_stop", ""),
        ("content_block_start", ""),
        ("content_block_delta", "type", "text"),
        ("content_block_stop", ""),
        ("content_block_start", ""),
        ("content_block_delta", "type", "partial_json"),
        ("content_block_stop", ""),
        ("message_delta", "stop_reason", "stop_sequence"),
        ("message_stop", ""),
    ]
    assert [data["index"] for _, data in stream_events if "index" in data] == [0] * 4 + [1] * 3 + [
        2
    ] * 3
    start = stream_events[0][1]["message"]
    assert (start["id"], start["model"], start["content"]) == ("msg_1", "m", [])


async def test_call_that_the_agent_ran_is_not_a_tool_use() -> None:
    trajectory = await rolled_out([call_text("echo", {"text": "é"}), "done"], [echo])
    use, result, text = whole(chunks_with_usage(trajectory))["content"]
    assert use == {
        "type": "mcp_tool_use",
        "id": trajectory.turns[0].calls[0].id,
        "name": "echo",
        "server_name": "agentloop",
        "input": {"text": "é"},
    }
    assert (result["type"], result["tool_use_id"]) == ("mcp_tool_result", use["id"])
    assert result["is_error"]
    assert result["content"] == [{"type": "text", "text": trajectory.turns[0].results[0].content}]
    assert text == {"type": "text", "text": "done"}


@pytest.mark.parametrize(
    ("reason", "theirs"),
    [
        (StopReason.ANSWERED, "end_turn"),
        (StopReason.CALLER_TOOLS, "tool_use"),
        (StopReason.TURN_BUDGET, "max_tokens"),
        (StopReason.TOKEN_BUDGET, "max_tokens"),
        (StopReason.TIME_BUDGET, "max_tokens"),
    ],
)
def test_every_ending_has_a_reason(reason: StopReason, theirs: str) -> None:
    answer = whole(chunks_with_usage(Trajectory("t", [1], stop_reason=reason)))
    assert (answer["stop_reason"], answer["stop_sequence"], answer["content"]) == (theirs, None, [])


def test_answer_names_the_stop_sequence_that_ended_it() -> None:
    turn = Turn(text="one two", output_ids=[1], logprobs=[0.0])
    trajectory = Trajectory("t", [1], [turn], stop_reason=StopReason.STOP_SEQUENCE)
    answer = whole(chunks_with_usage(trajectory, stop=["three", "two"]))
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "two")
    assert answer["content"] == [{"type": "text", "text": "one"}]


def test_usage_counts_cached_tokens_apart() -> None:
    turn = Turn([1] * 3, [0.0] * 3, cached_tokens=2)
    answer = whole(
        chunks_with_usage(Trajectory("t", [1] * 5, [turn], stop_reason=StopReason.ANSWERED))
    )
    assert answer["usage"] == {
        "input_tokens": 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 3,
    }


@pytest.mark.parametrize(
    ("status", "body", "raised", "kind"),
    [
        (*error_of(RequestError("tools: no")), "BadRequestError", "invalid_request_error"),
        (*error_of(UnknownModel("model: no")), "NotFoundError", "not_found_error"),
        (*error_of(ServerError("down")), "InternalServerError", "overloaded_error"),
        (401, error_body("no", "x"), "AuthenticationError", "authentication_error"),
        (403, error_body("no", "x"), "PermissionDeniedError", "permission_error"),
        (408, error_body("no", "x"), "APIStatusError", "invalid_request_error"),
        (413, error_body("no", "x"), "RequestTooLargeError", "request_too_large"),
        (500, error_body("no", "x"), "InternalServerError", "api_error"),
    ],
)
def test_client_knows_errors(status: int, body: Any, raised: str, kind: str) -> None:
    form = error_form(status, body, "req_1")
    with client(status, json.dumps(form).encode(), "application/json") as made:
        with pytest.raises(getattr(anthropic, raised)) as caught:
            made.messages.create(model="m", max_tokens=9, messages=HELLO)
    assert caught.value.body == form
    assert form["error"]["type"] == kind
    assert form["error"]["message"] == body["error"]["message"]


def test_refused_thread_is_reported_as_unsupported() -> None:
    with pytest.raises(RequestError) as refused:
        MessagesRequest.parse(
            json.dumps({"max_tokens": 9, "messages": HELLO, "thread": {"type": "create"}}).encode()
        )
    form = error_form(*error_of(refused.value), "req_1")
    assert form["error"]["details"]["error_code"] == "thread_unsupported_request"


def test_client_knows_an_error_in_a_stream() -> None:
    status, body = error_of(ServerError("down"))
    answered = Trajectory("t", [1], stop_reason=StopReason.ANSWERED)
    first_events = events(chunks_with_usage(answered))[:1]
    last = ("error", error_form(status, body, "req_1"))
    frames = b"".join(starmap(named_event, [*first_events, last]))
    with pytest.raises(anthropic.APIStatusError) as caught:
        read(frames, beta=False)
    assert caught.value.body["error"] == {"type": "overloaded_error", "message": "down"}
