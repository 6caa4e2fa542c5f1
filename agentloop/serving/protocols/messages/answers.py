"""Anthropic's Messages API: its answers and errors, from those of chat completions.

    chunks of a rollout ──MessagesStream──> events ──> a stream, or joined by `whole`: a message

Calls that the agent ran itself are blocks of the types mcp_tool_use and mcp_tool_result: the only
ones in Anthropic's protocol with a tool of any name and any text as its result that no client runs
again. (The names and results of server_tool_use are those of Anthropic's own tools.) Clients that
do not use the beta types keep them as blocks that they do not know.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NotRequired, cast

from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from agentloop.plain_json import JsonObject
from agentloop.serving.schemas import (
    AskedCall,
    ChatCompletionChunk,
    ChunkChoice,
    ErrorBody,
    ExecutedCall,
    FinishReason,
    Usage,
    UsageChunk,
)
from agentloop.trajectory import StopReason, ToolCallStatus

MessageEvent = tuple[str, dict[str, Any]]
"""The name of an event and its data."""

# Clients send it back with the thinking, and some drop thinking without one.
_SIGNATURE = "unsigned"
_SERVER_NAME = "agentloop"

_StopName = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
_STOP: dict[FinishReason, _StopName] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",  # clients try again later
    529: "overloaded_error",
}


class AnthropicUsage(TypedDict):
    input_tokens: int
    """Tokens of the prompt that were not in the server's cache."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(TypedDict):
    """The answer to `POST /v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, object]]
    stop_reason: _StopName | None
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(TypedDict):
    """The answer to `POST /v1/messages/count_tokens`."""

    input_tokens: int


class ThreadRefusal(TypedDict):
    """Tells a client to send its whole history, since nothing is kept between requests."""

    error_code: Literal["thread_unsupported_request"]
    unsupported: list[str]


class AnthropicErrorDetails(TypedDict):
    type: str
    message: str
    details: NotRequired[ThreadRefusal]


class AnthropicError(TypedDict):
    """An error, also as the last event of a stream."""

    type: Literal["error"]
    error: AnthropicErrorDetails
    request_id: str


class MessagesStream:
    """Converts the chunks of a chat completion with one choice to the events of a message.

    The last chunk must be the one with the usage, which `MessagesRequest.to_chat` asks for.
    """

    def __init__(self) -> None:
        self._num_blocks = 0
        self._open: Literal["text", "thinking"] | None = None
        self._ending: dict[str, object] = {}

    def feed(self, chunk: ChatCompletionChunk) -> Iterator[MessageEvent]:
        """Yield the name and the data of each event."""
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if "role" in delta:
                yield _event("message_start", message=_empty_message(chunk))
            if text := delta.get("reasoning_content"):
                yield from self._say("thinking", text)
            if text := delta.get("content"):
                yield from self._say("text", text)
            for executed in delta.get("executed_tools", ()):
                yield from self._executed_call(executed)
            for call in delta.get("tool_calls", ()):
                yield from self._caller_call(call)
            if choice["finish_reason"] is not None:
                yield from self._close()
                self._ending = _ending(choice)
        if (usage := cast(UsageChunk, chunk).get("usage")) is not None:
            yield _event("message_delta", delta=self._ending, usage=_usage(usage))
            yield _event("message_stop")

    def _say(self, kind: Literal["text", "thinking"], text: str) -> Iterator[MessageEvent]:
        if self._open != kind:
            yield from self._close()
            empty = {"text": ""} if kind == "text" else {"thinking": "", "signature": ""}
            yield self._start({"type": kind, **empty})
            self._open = kind
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _caller_call(self, call: AskedCall) -> Iterator[MessageEvent]:
        function = call["function"]
        yield from self._close()
        yield self._start(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
        )
        yield self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})
        yield self._stop()

    def _executed_call(self, call: ExecutedCall) -> Iterator[MessageEvent]:
        yield from self._close()
        # Whole, not in deltas, which clients accept only for the calls that they run.
        yield self._start(
            {
                "type": "mcp_tool_use",
                "id": call["id"],
                "name": call["function"]["name"],
                "server_name": _SERVER_NAME,
                "input": json.loads(call["function"]["arguments"]),
            }
        )
        yield self._stop()
        yield self._start(
            {
                "type": "mcp_tool_result",
                "tool_use_id": call["id"],
                "is_error": call["status"] != ToolCallStatus.OK,
                "content": [{"type": "text", "text": call["output"]}],
            }
        )
        yield self._stop()

    def _close(self) -> Iterator[MessageEvent]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        if self._open is not None:
            self._open = None
            yield self._stop()

    def _start(self, block: dict[str, object]) -> MessageEvent:
        self._num_blocks += 1
        return _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, object]) -> MessageEvent:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _stop(self) -> MessageEvent:
        return _event("content_block_stop", index=self._num_blocks - 1)


def whole(chunks: Iterable[ChatCompletionChunk]) -> MessageAnswer:
    """Return the answer without a stream, which is what a client makes of the stream's events.

    It is made from chunks, because a whole completion does not tell in which order the parts came.
    """
    stream = MessagesStream()
    message: Any = {}
    for _, data in (event for chunk in chunks for event in stream.feed(chunk)):
        match data:
            case {"type": "message_start"}:
                message = data["message"]
            case {"type": "content_block_start", "content_block": block}:
                message["content"].append(block)
            case {"type": "content_block_delta", "delta": delta}:
                _apply(delta, message["content"][-1])
            case {"type": "message_delta"}:
                message.update(data["delta"], usage=data["usage"])
    answer: MessageAnswer = message
    return answer


def _apply(delta: Mapping[str, str], block: JsonObject) -> None:
    match delta:
        case {"type": "input_json_delta", "partial_json": text}:
            block["input"] = json.loads(text)  # calls are sent in one piece
        case {"type": "signature_delta", "signature": signature}:
            block["signature"] = signature
        case _:
            block[block["type"]] += delta[block["type"]]


def _empty_message(chunk: ChatCompletionChunk) -> MessageAnswer:
    return {
        "id": "msg_" + chunk["id"].removeprefix("chatcmpl-"),
        "type": "message",
        "role": "assistant",
        "model": chunk["model"],
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        # The prompt is counted at the end, when it is known what was in the cache.
        "usage": {
            "input_tokens": 0,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        },
    }


def _ending(choice: ChunkChoice) -> dict[str, object]:
    if choice.get("stop_reason") == StopReason.STOP_SEQUENCE:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.get("matched_stop")}
    # Failed rollouts have no last chunk but an error: there is always a reason.
    return {"stop_reason": _STOP[choice["finish_reason"] or "stop"], "stop_sequence": None}


def _usage(usage: Usage) -> AnthropicUsage:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def _event(name: str, **data: object) -> MessageEvent:
    return name, {"type": name, **data}


# --- errors ---------------------------------------------------------------------------------------


def error_form(status: int, body: ErrorBody, request_id: str) -> AnthropicError:
    """Return an error of chat completions, with its HTTP status, in Anthropic's form."""
    kind = _ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error: AnthropicErrorDetails = {"type": kind, "message": body["error"]["message"]}
    if body["error"]["param"] == "thread":
        # Anthropic's tool runner asks for a thread first, and goes on without one after this.
        error["details"] = {
            "error_code": "thread_unsupported_request",
            "unsupported": ["thread"],
        }
    return {"type": "error", "error": error, "request_id": request_id}
