"""OpenAI's chat completions, as the agent speaks them: requests in, completions and chunks out.

Terms: the answer is `content`, thoughts are `reasoning_content` (as SGLang and vLLM have it). Calls
that the agent ran itself are in `executed_tools` (as Groq has it), so that no client runs them
again; calls that the caller must run are `tool_calls`, with the finish reason of that name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar

import orjson
import pydantic

from agentloop.agent.channels import Channel, Channels
from agentloop.errors import RequestError
from agentloop.events import CallFinished, CallStarted, Event, TokensSampled, TurnFinished
from agentloop.trajectory import CallStatus, StopReason, ToolCall, ToolResult, Trajectory

__all__ = ["ChatRequest", "ChunkWriter", "completion", "error_body", "model_list", "parse"]

Json = dict[str, Any]
M = TypeVar("M", bound=pydantic.BaseModel)

_FINISH = {
    StopReason.ANSWERED: "stop",
    StopReason.CALLER_TOOLS: "tool_calls",
    StopReason.TURN_BUDGET: "length",
    StopReason.TOKEN_BUDGET: "length",
    StopReason.TIME_BUDGET: "length",
}


class _StreamOptions(pydantic.BaseModel):
    include_usage: bool = False


class ChatRequest(pydantic.BaseModel):
    """What of OpenAI's request is used. What would change the answer and is not, is refused."""

    model: str | None = None
    messages: list[dict[str, Any]] = pydantic.Field(min_length=1)
    stream: bool = False
    stream_options: _StreamOptions | None = None
    n: int = pydantic.Field(1, ge=1, le=128)
    temperature: float | None = pydantic.Field(None, ge=0, le=2)
    top_p: float | None = pydantic.Field(None, gt=0, le=1)
    top_k: int | None = pydantic.Field(None, ge=-1, le=1 << 30)
    min_p: float | None = pydantic.Field(None, ge=0, le=1)
    seed: int | None = pydantic.Field(None, ge=0, lt=1 << 62)
    max_tokens: int | None = pydantic.Field(None, ge=1)
    max_completion_tokens: int | None = pydantic.Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None

    stop: tuple[()] | None = None
    logit_bias: None = None
    logprobs: Literal[False] | None = None
    top_logprobs: None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    functions: None = None
    function_call: None = None
    modalities: None = None
    repetition_penalty: Literal[1] | None = None
    min_tokens: Literal[0] | None = None
    stop_token_ids: tuple[()] | None = None
    ignore_eos: Literal[False] | None = None
    response_format: None = None
    parallel_tool_calls: Literal[True] | None = None  # a model writes as many as it likes

    @pydantic.field_validator("response_format", mode="before")
    @classmethod
    def _text_is_the_default(cls, value: Any) -> Any:
        return None if value == {"type": "text"} else value

    @pydantic.field_validator("presence_penalty", "frequency_penalty", mode="before")
    @classmethod
    def _as_int(cls, value: Any) -> Any:
        return 0 if value == 0 else value

    @classmethod
    def parse(cls, body: bytes) -> ChatRequest:
        """Raises RequestError, which names the field."""
        return parse(cls, body)

    def sampling_overrides(self) -> Json:
        names = ("temperature", "top_p", "top_k", "min_p", "seed")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


_UNSUPPORTED = {
    "stop",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "presence_penalty",
    "frequency_penalty",
    "functions",
    "function_call",
    "modalities",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "response_format",
    "parallel_tool_calls",
}


def parse(model: type[M], body: bytes) -> M:
    """Read a request's body. Raises RequestError, which names the field."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    try:
        return model.model_validate(value)
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in problem["loc"])
        if problem["loc"] and problem["loc"][0] in _UNSUPPORTED:
            raise RequestError(f"{field}: not supported by this server") from error
        raise RequestError(f"{field}: {problem['msg']}") from error


class ChunkWriter:
    """The events of one rollout in, the chunks of one choice out."""

    def __init__(
        self, completion_id: str, model: str, *, reasoning_first: bool, index: int
    ) -> None:
        self._frame = {
            "id": completion_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._index = index
        self._reasoning_first = reasoning_first
        self._channels = Channels(reasoning=reasoning_first)
        self._calls: dict[str, ToolCall] = {}
        self._num_caller_calls = 0
        self._thought = False  # in this turn
        self._num_executed = 0

    def first(self) -> Json:
        return self._chunk({"role": "assistant", "content": ""})

    def feed(self, event: Event) -> Iterator[Json]:
        match event:
            case TokensSampled(text=text):
                yield from map(self._said, self._channels.feed(text))
            case TurnFinished():
                yield from map(self._said, self._channels.flush())
                if self._thought:  # one turn's thoughts end where the next one's begin
                    yield self._said((Channel.REASONING, "\n"))
                self._thought = False
                self._channels = Channels(reasoning=self._reasoning_first)
            case CallStarted(call=call):
                self._calls[call.id] = call
            case CallFinished(result=result) if result.status is CallStatus.CALLER:
                mine = _tool_call(self._calls[result.call_id])
                yield self._chunk({"tool_calls": [{"index": self._num_caller_calls, **mine}]})
                self._num_caller_calls += 1
            case CallFinished(result=result):
                executed = _executed(self._calls[result.call_id], result)
                yield self._chunk({"executed_tools": [{"index": self._num_executed, **executed}]})
                self._num_executed += 1

    def last(self, trajectory: Trajectory) -> Json:
        return self._chunk({}, finish_reason=_FINISH.get(trajectory.stop_reason, "error"))

    def usage(self, trajectories: Sequence[Trajectory]) -> Json:
        return {**self._frame, "choices": [], "usage": _usage(trajectories)}

    def _said(self, piece: tuple[Channel, str]) -> Json:
        channel, text = piece
        self._thought |= channel is Channel.REASONING
        key = "content" if channel is Channel.CONTENT else "reasoning_content"
        return self._chunk({key: text})

    def _chunk(self, delta: Json, finish_reason: str | None = None) -> Json:
        choice = {"index": self._index, "delta": delta, "finish_reason": finish_reason}
        return {**self._frame, "choices": [choice]}


def completion(
    completion_id: str, model: str, trajectories: Sequence[Trajectory], *, reasoning_first: bool
) -> Json:
    """The answer to a request that does not stream."""
    return {
        "id": completion_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            _choice(index, trajectory, reasoning_first)
            for index, trajectory in enumerate(trajectories)
        ],
        "usage": _usage(trajectories),
    }


def _choice(index: int, trajectory: Trajectory, reasoning_first: bool) -> Json:
    said: dict[Channel, str] = {Channel.REASONING: "", Channel.CONTENT: ""}
    for turn in trajectory:
        channels = Channels(reasoning=reasoning_first)
        before = len(said[Channel.REASONING])
        for part in (channels.feed(turn.text), channels.flush()):
            for channel, text in part:
                said[channel] += text
        if len(said[Channel.REASONING]) > before:
            said[Channel.REASONING] += "\n"
    calls = {call.id: call for call in trajectory.calls}
    to_run = [r for r in trajectory.results if r.status is CallStatus.CALLER]
    executed = [r for r in trajectory.results if r.status is not CallStatus.CALLER]
    message: Json = {"role": "assistant", "content": said[Channel.CONTENT].strip()}
    if said[Channel.REASONING].strip():
        message["reasoning_content"] = said[Channel.REASONING].strip()
    if executed:
        message["executed_tools"] = [_executed(calls[r.call_id], r) for r in executed]
    if to_run:
        message["tool_calls"] = [_tool_call(calls[r.call_id]) for r in to_run]
        message["content"] = message["content"] or None
    return {
        "index": index,
        "message": message,
        "finish_reason": _FINISH.get(trajectory.stop_reason, "error"),
        "stop_reason": trajectory.stop_reason,
    }


def _tool_call(call: ToolCall) -> Json:
    # Not orjson, which refuses integers of more than 64 bits.
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _executed(call: ToolCall, result: ToolResult) -> Json:
    return {
        **_tool_call(call),
        "status": result.status,
        "output": result.content,
        "duration_s": round(result.ended_s - result.dispatched_s, 6),
    }


def _usage(trajectories: Sequence[Trajectory]) -> Json:
    prompt = len(trajectories[0].prompt_ids) if trajectories else 0
    sampled = sum(trajectory.num_sampled_tokens for trajectory in trajectories)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }


def error_body(
    message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def model_list(model: str, created: int) -> Json:
    entry = {"id": model, "object": "model", "created": created, "owned_by": "agentloop"}
    return {"object": "list", "data": [entry]}
