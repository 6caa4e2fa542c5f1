"""OpenAI's chat completions, as the agent speaks them: requests in, completions and chunks out.

Terms: the answer is `content`, thoughts are `reasoning_content` (as SGLang and vLLM have it). Calls
that the agent ran itself are in `executed_tools` (as Groq has it), so that no client runs them
again; calls that the caller must run are `tool_calls`, with the finish reason of that name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import getitem
from typing import Annotated, Any, Literal, TypeVar

import pydantic
import pydantic_core
from pydantic_core import ErrorDetails

from agentloop.agent.channels import Channel, Channels
from agentloop.api.bodies import (
    AnswerMessage,
    AskedCall,
    Choice,
    Chunk,
    ChunkChoice,
    Completion,
    Delta,
    ErrorBody,
    ExecutedCall,
    FinishReason,
    Frame,
    FunctionTool,
    InputMessage,
    Model,
    ModelList,
    TextFormat,
    Usage,
    UsageChunk,
)
from agentloop.errors import RequestError
from agentloop.events import CallFinished, CallStarted, Event, TokensSampled, TurnFinished
from agentloop.trajectory import CallStatus, StopReason, ToolCall, ToolResult, Trajectory

__all__ = ["ChatRequest", "ChunkWriter", "completion", "error_body", "model_list", "parse"]

M = TypeVar("M", bound=pydantic.BaseModel)


def _is_boolean(value: Any) -> Any:
    """0 is none, though it equals False: a literal takes it."""
    if value is None or isinstance(value, bool):
        return value
    raise ValueError("a boolean is expected")


_Nothing = Annotated[list[Any], pydantic.Field(max_length=0)]
_Off = Annotated[Literal[False], pydantic.BeforeValidator(_is_boolean)]
_On = Annotated[Literal[True], pydantic.BeforeValidator(_is_boolean)]

_FINISH: dict[StopReason, FinishReason] = {
    StopReason.ANSWERED: "stop",
    StopReason.CALLER_TOOLS: "tool_calls",
    StopReason.TURN_BUDGET: "length",
    StopReason.TOKEN_BUDGET: "length",
    StopReason.TIME_BUDGET: "length",
}


class StreamOptions(pydantic.BaseModel):
    include_usage: bool = False


class ChatRequest(pydantic.BaseModel):
    """What of OpenAI's request is used. What would change the answer and is not, is refused."""

    model_config = pydantic.ConfigDict(
        json_schema_extra={  # a stream has one choice
            "if": {"properties": {"stream": {"const": True}}, "required": ["stream"]},
            "then": {"properties": {"n": {"const": 1}}},
        }
    )

    model: str | None = None
    messages: list[InputMessage] = pydantic.Field(min_length=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = pydantic.Field(1, ge=1, le=128)
    temperature: float | None = pydantic.Field(None, ge=0, le=2)
    top_p: float | None = pydantic.Field(None, gt=0, le=1)
    top_k: int | None = pydantic.Field(None, ge=-1, le=1 << 30)
    min_p: float | None = pydantic.Field(None, ge=0, le=1)
    seed: int | None = pydantic.Field(None, ge=0, lt=1 << 62)
    max_tokens: int | None = pydantic.Field(None, ge=1)
    max_completion_tokens: int | None = pydantic.Field(None, ge=1)
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none"] | None = None

    stop: _Nothing | None = None
    logit_bias: None = None
    logprobs: _Off | None = None
    top_logprobs: None = None
    presence_penalty: float | None = pydantic.Field(None, ge=0, le=0)
    frequency_penalty: float | None = pydantic.Field(None, ge=0, le=0)
    functions: None = None
    function_call: None = None
    modalities: None = None
    repetition_penalty: float | None = pydantic.Field(None, ge=1, le=1)
    min_tokens: int | None = pydantic.Field(None, ge=0, le=0)
    stop_token_ids: _Nothing | None = None
    ignore_eos: _Off | None = None
    response_format: TextFormat | None = None
    parallel_tool_calls: _On | None = None  # a model writes as many as it likes

    @classmethod
    def parse(cls, body: bytes) -> ChatRequest:
        """Raises RequestError, which names the field."""
        return parse(cls, body)

    def sampling_overrides(self) -> dict[str, Any]:
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
    """Read a request's body: each field is of its own type, a number no text. 3.0 is an integer,
    as it is in JSON Schema.

    Raises:
        RequestError: names the field.
    """
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False)  # integers of any size
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    try:
        try:
            return model.model_validate(value, strict=True)
        except pydantic.ValidationError as error:
            _make_whole(value, error)
        return model.model_validate(value, strict=True)
    except pydantic.ValidationError as error:
        raise RequestError(_told(error, value)) from error


def _make_whole(value: Any, error: pydantic.ValidationError) -> None:
    """Turn floats without a fraction to integers, where integers were expected."""
    for problem in error.errors(include_url=False):
        given = problem["input"]
        if problem["type"] == "int_type" and isinstance(given, float) and given.is_integer():
            *above, last = _path(problem, value)
            reduce(getitem, above, value)[last] = int(given)


def _told(error: pydantic.ValidationError, value: Any) -> str:
    """The problem that is told most exactly: of a union's branches, the one that was meant."""
    problems = [(_path(problem, value), problem) for problem in error.errors(include_url=False)]
    path, problem = max(problems, key=lambda one: len(one[0]))
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:]
    if path and path[0] in _UNSUPPORTED:
        return f"{field}: not supported by this server"
    return f"{field}: {problem['msg']}"


def _path(problem: ErrorDetails, value: Any) -> list[int | str]:
    """Where in the body it is: without the names that pydantic gives to a union's branches."""
    path: list[int | str] = []
    for part in problem["loc"]:
        is_missing = problem["type"] == "missing" and part == problem["loc"][-1]
        if isinstance(value, dict) and (part in value or is_missing):
            path.append(part)
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int):
            path.append(part)
            value = value[part]
    return path


class ChunkWriter:
    """The events of one rollout in, the chunks of one choice out."""

    def __init__(
        self, completion_id: str, model: str, *, reasoning_first: bool, index: int
    ) -> None:
        self._frame: Frame = {
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

    def first(self) -> Chunk:
        return self._chunk({"role": "assistant", "content": ""})

    def feed(self, event: Event) -> Iterator[Chunk]:
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

    def last(self, trajectory: Trajectory) -> Chunk:
        return self._chunk({}, finish_reason=_FINISH.get(trajectory.stop_reason, "error"))

    def usage(self, trajectories: Sequence[Trajectory]) -> UsageChunk:
        return {**self._frame, "choices": [], "usage": _usage(trajectories)}

    def _said(self, piece: tuple[Channel, str]) -> Chunk:
        channel, text = piece
        self._thought |= channel is Channel.REASONING
        if channel is Channel.CONTENT:
            return self._chunk({"content": text})
        return self._chunk({"reasoning_content": text})

    def _chunk(self, delta: Delta, finish_reason: FinishReason | None = None) -> Chunk:
        choice: ChunkChoice = {
            "index": self._index,
            "delta": delta,
            "finish_reason": finish_reason,
        }
        return {**self._frame, "choices": [choice]}


def completion(
    completion_id: str, model: str, trajectories: Sequence[Trajectory], *, reasoning_first: bool
) -> Completion:
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


def _choice(index: int, trajectory: Trajectory, reasoning_first: bool) -> Choice:
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
    message: AnswerMessage = {"role": "assistant", "content": said[Channel.CONTENT].strip()}
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


def _tool_call(call: ToolCall) -> AskedCall:
    # Not orjson, which refuses integers of more than 64 bits.
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _executed(call: ToolCall, result: ToolResult) -> ExecutedCall:
    return {
        **_tool_call(call),
        "status": result.status,
        "output": result.content,
        "duration_s": round(result.ended_s - result.dispatched_s, 6),
    }


def _usage(trajectories: Sequence[Trajectory]) -> Usage:
    prompt = len(trajectories[0].prompt_ids) if trajectories else 0
    sampled = sum(trajectory.num_sampled_tokens for trajectory in trajectories)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }


def error_body(
    message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> ErrorBody:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def model_list(model: str, created: int) -> ModelList:
    entry: Model = {"id": model, "object": "model", "created": created, "owned_by": "agentloop"}
    return {"object": "list", "data": [entry]}
