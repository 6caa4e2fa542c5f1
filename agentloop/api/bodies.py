"""What goes over the wire, as types: the handlers are checked against them, and the OpenAPI
document is made from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired

import pydantic
from typing_extensions import TypedDict  # of typing's, pydantic cannot read all before 3.12

from agentloop.trajectory import CallStatus, StopReason, Trajectory

__all__ = [
    "AskedCall",
    "Chunk",
    "Completion",
    "ErrorBody",
    "ExecutedCall",
    "FunctionTool",
    "Health",
    "InputMessage",
    "Logprobs",
    "Model",
    "ModelList",
    "RolloutLine",
    "TokenLogprob",
    "Usage",
    "UsageChunk",
]

FinishReason = Literal["stop", "length", "tool_calls", "error"]


@pydantic.with_config(extra="allow", use_attribute_docstrings=True)
class _Open(TypedDict):
    """What is in it besides is kept: a chat template may know it."""


@pydantic.with_config(use_attribute_docstrings=True)
class _Answer(TypedDict):
    pass


def _as(described: type) -> pydantic.GetPydanticSchema:
    """Of a plain dict: it is what `described` says."""
    return pydantic.GetPydanticSchema(lambda _, handler: handler.generate_schema(described))


# --- requests -------------------------------------------------------------------------------------


class TextPart(_Open):
    type: Literal["text"]
    text: str


class InputFunction(_Open):
    name: str
    arguments: str | dict[str, Any]
    """JSON, as OpenAI's clients send it, or what it says."""


class InputCall(_Open):
    id: NotRequired[str | None]
    type: NotRequired[Literal["function"] | None]
    function: InputFunction


class InputMessage(_Open):
    """One of a conversation's messages."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: NotRequired[str | list[TextPart] | None]
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[list[InputCall] | None]
    tool_call_id: NotRequired[str | None]
    name: NotRequired[str | None]


class FunctionSchema(_Open):
    name: Annotated[str, pydantic.Field(min_length=1)]
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    """A JSON schema of an object."""
    strict: NotRequired[bool | None]


class FunctionTool(_Open):
    """A tool that the caller runs. No two of a request have one name."""

    type: Literal["function"]
    function: FunctionSchema


# --- answers --------------------------------------------------------------------------------------


class CalledFunction(_Answer):
    name: str
    arguments: str
    """JSON."""


class AskedCall(_Answer):
    """A call of a tool that the caller must run."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ExecutedCall(AskedCall):
    """A call that the agent has run itself."""

    status: CallStatus
    output: str
    duration_s: float


class AskedCallPiece(AskedCall):
    """Calls come whole: each is one piece."""

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
    """Its UTF-8; null where the token is part of a character."""


class TokenLogprob(LikelyToken):
    """A token that the model sampled."""

    top_logprobs: list[LikelyToken]
    """The likeliest in its place, as many as were asked for."""


class Logprobs(_Answer):
    content: list[TokenLogprob]
    """All tokens that the model sampled, those of thoughts, calls and markup included."""
    refusal: None


class Choice(_Answer):
    index: int
    message: AnswerMessage
    logprobs: NotRequired[Logprobs]
    finish_reason: FinishReason
    stop_reason: StopReason


class PromptTokensDetails(_Answer):
    cached_tokens: int
    """Of the prompt, those that the server had in its cache."""


class Usage(_Answer):
    """Tokens; those of tool responses are not counted."""

    prompt_tokens: int
    """Of the request's messages and tools, once; not once more for each turn."""
    prompt_tokens_details: PromptTokensDetails
    completion_tokens: int
    """All that were sampled: those of thoughts, calls and markup, too, in all choices."""
    total_tokens: int


class Completion(_Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
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
    """With the last one."""


class Frame(_Answer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str


class Chunk(Frame):
    """A piece of a completion that streams."""

    choices: list[ChunkChoice]


class UsageChunk(Chunk):
    """The last one, where it was asked for. It has no choices."""

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
    """`Trajectory.to_dict()`."""

    ids: list[int] = field(kw_only=True)
    mask: list[int] = field(kw_only=True)
    logprobs: list[float] = field(kw_only=True)
    versions: list[str | None] = field(kw_only=True)


class RolloutLine(_Answer):
    """What came of a sample of a prompt: a trajectory, or the error for which there is none."""

    index: int
    sample: int
    trajectory: NotRequired[Annotated[dict[str, Any], _as(TrajectoryRecord)]]
    error: NotRequired[str]


class ServerCount(_Answer):
    healthy: int
    all: int


class Health(_Answer):
    status: str
    servers: ServerCount


class Error(_Answer):
    message: str
    type: str
    param: str | None
    """The field that is wrong."""
    code: str | None


class ErrorBody(_Answer):
    error: Error
