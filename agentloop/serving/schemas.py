"""Types of request and response bodies, used by the handlers and for the OpenAPI document."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, NotRequired

import pydantic
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from agentloop.trajectory import StopReason, ToolCallStatus, Trajectory

FinishReason = Literal["stop", "length", "tool_calls", "error"]


@pydantic.with_config(extra="allow", use_attribute_docstrings=True)
class _Open(TypedDict):
    """An object whose additional fields are kept, because a chat template may use them."""


@pydantic.with_config(use_attribute_docstrings=True)
class _Answer(TypedDict):
    pass


def _as(described: type) -> pydantic.GetPydanticSchema:
    """Describe a plain dict in the schema as `described`."""
    return pydantic.GetPydanticSchema(lambda _, handler: handler.generate_schema(described))


# --- requests -------------------------------------------------------------------------------------


class TextPart(_Open):
    type: Literal["text"]
    text: str


class InputFunction(_Open):
    name: str
    arguments: NotRequired[str | dict[str, object] | None]
    """JSON text, as OpenAI's clients send it, or the object itself."""


class InputCall(_Open):
    id: NotRequired[str | None]
    type: NotRequired[Literal["function"] | None]
    function: InputFunction


class InputMessage(_Open):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: NotRequired[str | list[TextPart] | None]
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[list[InputCall] | None]
    function_call: NotRequired[InputFunction | None]
    """The older form of a single call."""
    tool_call_id: NotRequired[str | None]
    name: NotRequired[str | None]


class FunctionSchema(_Open):
    name: Annotated[str, pydantic.Field(min_length=1)]
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, object] | None]
    """JSON schema of an object."""
    strict: NotRequired[bool | None]


class ToolDefinition(_Open):
    """A tool that the caller runs. Names must be unique within a request."""

    type: Literal["function"]
    function: FunctionSchema


# --- answers --------------------------------------------------------------------------------------


class CalledFunction(_Answer):
    name: str
    arguments: str
    """JSON text."""


class AskedCall(_Answer):
    """A tool call that the caller must run."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ExecutedCall(AskedCall):
    """A tool call that the agent has run itself."""

    status: ToolCallStatus
    output: str
    duration_s: float


class AskedCallPiece(AskedCall):
    """A call in a stream; each call is sent whole, in one piece."""

    index: int


class ExecutedCallPiece(ExecutedCall):
    index: int


class AnswerMessage(_Answer):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    executed_tools: NotRequired[list[ExecutedCall]]
    tool_calls: NotRequired[list[AskedCall]]


class LikelyToken(_Answer):
    token: str
    logprob: float
    bytes: list[int] | None
    """UTF-8 bytes of the token; null if it is only part of a character."""


class TokenLogprob(LikelyToken):
    """A token that the model sampled."""

    top_logprobs: list[LikelyToken]
    """The most likely tokens at this position, as many as requested."""


class Logprobs(_Answer):
    content: list[TokenLogprob]
    """All sampled tokens, including those of reasoning, tool calls and markup."""
    refusal: None


class ChatChoice(_Answer):
    index: int
    message: AnswerMessage
    logprobs: NotRequired[Logprobs]
    finish_reason: FinishReason
    stop_reason: StopReason
    matched_stop: NotRequired[str]
    """The stop sequence that ended the answer."""


class PromptTokensDetails(_Answer):
    cached_tokens: int
    """Prompt tokens that the server had in its cache."""


class Usage(_Answer):
    """Token counts; the tokens of tool responses are not counted."""

    prompt_tokens: int
    """Tokens of the request's messages and tools, counted once and not per turn."""
    prompt_tokens_details: PromptTokensDetails
    completion_tokens: int
    """All sampled tokens of all choices, including reasoning, tool calls and markup."""
    total_tokens: int


def usage_of(num_prompt: int, num_cached: int, num_sampled: int) -> Usage:
    return {
        "prompt_tokens": num_prompt,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }


class ChatCompletion(_Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(_Answer, total=False):
    role: Literal["assistant"]
    content: str
    reasoning_content: str
    executed_tools: list[ExecutedCallPiece]
    tool_calls: list[AskedCallPiece]


class ChunkChoice(_Answer):
    index: int
    delta: Delta
    logprobs: NotRequired[Logprobs]
    finish_reason: FinishReason | None
    stop_reason: NotRequired[StopReason]
    """Present in the last chunk only."""
    matched_stop: NotRequired[str]
    """The stop sequence that ended the answer."""


class Frame(_Answer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str


class ChatCompletionChunk(Frame):
    """A chunk of a streamed completion."""

    choices: list[ChunkChoice]


class UsageChunk(ChatCompletionChunk):
    """The last chunk, if it was requested; it has no choices."""

    usage: Usage


class TextLogprobs(_Answer):
    """Tokens of a completion; these lists have an entry for each."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """null for the first token of an echoed prompt."""
    top_logprobs: list[dict[str, float] | None]
    """The most likely tokens, as many as requested, and the token itself."""


class TextChoice(_Answer):
    index: int
    """The number of the prompt."""
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class TextCompletion(_Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class Model(_Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(_Answer):
    object: Literal["list"]
    data: list[Model]


@dataclass
class TrajectoryRecord(Trajectory):
    """The output of `Trajectory.to_dict_per_token()`."""

    ids: list[int] = field(kw_only=True)
    mask: list[int] = field(kw_only=True)
    logprobs: list[float] = field(kw_only=True)
    versions: list[str | None] = field(kw_only=True)


class RolloutLine(_Answer):
    """The result of one sample of a prompt: a trajectory, or an error if there is none."""

    index: int
    sample: int
    trajectory: NotRequired[Annotated[dict[str, object], _as(TrajectoryRecord)]]
    error: NotRequired[str]


class TrajectoryLine(_Answer):
    """A branch of a session as a trajectory."""

    trajectory: Annotated[dict[str, object], _as(TrajectoryRecord)]


class ServerCount(_Answer):
    healthy: int
    all: int


class HealthStatus(_Answer):
    status: str
    servers: ServerCount


class Error(_Answer):
    message: str
    type: str
    param: str | None
    """The invalid field."""
    code: str | None


class ErrorBody(_Answer):
    error: Error
