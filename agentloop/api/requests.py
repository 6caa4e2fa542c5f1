"""Parse request bodies strictly: each field must have its JSON type; strings are not numbers.

    body ──JSON──> unsupported parameters are refused ──pydantic──> ChatRequest, or another model

An unsupported parameter that would change the answer is refused by name. Parameters that cannot
change the answer are ignored, known or not.
"""

from __future__ import annotations

import json
from functools import reduce
from operator import getitem
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import pydantic
import pydantic_core
from pydantic_core import ErrorDetails

from agentloop.agent.rollout import TurnOptions
from agentloop.api.schemas import InputMessage, ToolDefinition
from agentloop.errors import RequestError, Unsupported

__all__ = ["UNSUPPORTED", "ChatRequest", "parse"]

M = TypeVar("M", bound=pydantic.BaseModel)


class _Only(NamedTuple):
    """The values of a parameter that are accepted besides null, and advice for the others."""

    values: tuple[Any, ...] = ()
    advice: str = ""


_PENALTY = "leave it out: the servers would only count the tokens of one turn"
_OUTPUT_FORMAT = "leave it out and describe the format in a message: it cannot be enforced yet"

# Parameters that would change the answer, with the values that do not.
UNSUPPORTED: dict[str, _Only] = {
    # OpenAI
    "audio": _Only(),
    "frequency_penalty": _Only((0,), _PENALTY),
    "function_call": _Only(("none", "auto"), "use tools and tool_choice"),
    "functions": _Only(([],), "use tools"),
    "logit_bias": _Only(({},)),
    "modalities": _Only((["text"],)),
    "presence_penalty": _Only((0,), _PENALTY),
    "reasoning_effort": _Only(("medium",)),
    "response_format": _Only(({"type": "text"},), _OUTPUT_FORMAT),
    "tool_choice": _Only(("auto", "none"), 'use "auto": a call cannot be forced yet'),
    "verbosity": _Only(("medium",)),
    "web_search_options": _Only(),
    # SGLang, vLLM and others
    "add_generation_prompt": _Only((True,)),
    "allowed_token_ids": _Only(([],)),
    "bad_words": _Only(([],)),
    "best_of": _Only((1,), "use n"),
    "chat_template": _Only(),
    "chat_template_kwargs": _Only(({},)),
    "continue_final_message": _Only((False,)),
    "custom_logit_processor": _Only(),
    "documents": _Only(([],)),
    "ebnf": _Only((), _OUTPUT_FORMAT),
    "echo": _Only((False,)),
    "enable_thinking": _Only(),
    "guided_choice": _Only((), _OUTPUT_FORMAT),
    "guided_grammar": _Only((), _OUTPUT_FORMAT),
    "guided_json": _Only((), _OUTPUT_FORMAT),
    "guided_regex": _Only((), _OUTPUT_FORMAT),
    "include_reasoning": _Only((True,)),
    "include_stop_str_in_output": _Only((False,)),
    "json_schema": _Only((), _OUTPUT_FORMAT),
    "length_penalty": _Only((1,)),
    "logits_processors": _Only(([],)),
    "lora_path": _Only(),
    "min_tokens": _Only((0,)),
    "mm_processor_kwargs": _Only(({},)),
    "no_stop_trim": _Only((False,)),
    "prompt_logprobs": _Only(),
    "reasoning": _Only(),
    "regex": _Only((), _OUTPUT_FORMAT),
    "repetition_penalty": _Only((1,), _PENALTY),
    "return_hidden_states": _Only((False,)),
    "return_tokens_as_token_ids": _Only((False,)),
    "separate_reasoning": _Only((True,)),
    "session_params": _Only(),
    "skip_special_tokens": _Only((True,)),
    "stop_regex": _Only(([],), "use stop"),
    "stop_token_ids": _Only(([],), "use stop"),
    "structural_tag": _Only((), _OUTPUT_FORMAT),
    "structured_outputs": _Only((), _OUTPUT_FORMAT),
    "thinking": _Only(),
    "thinking_token_budget": _Only(),
    "truncate_prompt_tokens": _Only(),
    "use_beam_search": _Only((False,)),
}


def _with_unsupported(schema: dict[str, Any]) -> None:
    for name, only in UNSUPPORTED.items():
        schema["properties"][name] = {"enum": [*only.values, None]}
    wanted = {"top_logprobs": {"type": "integer", "minimum": 1}}
    schema["if"] = {"properties": wanted, "required": ["top_logprobs"]}
    schema["then"] = {"properties": {"logprobs": {"const": True}}, "required": ["logprobs"]}


class StreamOptions(pydantic.BaseModel):
    include_usage: bool | None = None


_StopSequence = Annotated[str, pydantic.Field(min_length=1, max_length=256)]


class ChatRequest(pydantic.BaseModel):
    """The supported parameters of OpenAI's `POST /v1/chat/completions`."""

    model_config = pydantic.ConfigDict(json_schema_extra=_with_unsupported)

    model: str | None = None
    messages: list[InputMessage] = pydantic.Field(min_length=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = pydantic.Field(None, ge=1, le=128)
    temperature: float | None = pydantic.Field(None, ge=0, le=2)
    top_p: float | None = pydantic.Field(None, gt=0, le=1)
    top_k: int | None = pydantic.Field(None, ge=-1, le=1 << 30)
    min_p: float | None = pydantic.Field(None, ge=0, le=1)
    seed: int | None = pydantic.Field(None, ge=-(1 << 63), lt=1 << 63)
    max_tokens: int | None = pydantic.Field(None, ge=1)
    max_completion_tokens: int | None = pydantic.Field(None, ge=1)
    stop: _StopSequence | Annotated[list[_StopSequence], pydantic.Field(max_length=4)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = pydantic.Field(None, ge=0, le=20)
    tools: list[ToolDefinition] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    ignore_eos: bool | None = None

    @classmethod
    def parse(cls, body: bytes) -> ChatRequest:
        """Parse a request body.

        Raises:
            RequestError: A field is invalid or unsupported; the message names it.
        """
        value = _load(body)
        for name, only in UNSUPPORTED.items():
            _check_supported(name, value.get(name), only)
        request = _validate(cls, value)
        if request.top_logprobs and not request.logprobs:
            raise RequestError("top_logprobs: set logprobs to true as well")
        return request

    def sampling_overrides(self) -> dict[str, Any]:
        names = ("temperature", "top_p", "top_k", "min_p")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        # SGLang does not accept negative seeds.
        return given if self.seed is None else {**given, "seed": self.seed % (1 << 63)}

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def stop_sequences(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def has_caller_tools(self) -> bool:
        """True if the caller runs the tool calls instead of the agent."""
        return bool(self.tools) and self.tool_choice != "none"

    def turn_options(self) -> TurnOptions:
        return TurnOptions(
            stop=self.stop_sequences,
            single_call=self.parallel_tool_calls is False,
            ignore_end=bool(self.ignore_eos),
            num_top_logprobs=self.top_logprobs or 0,
        )


def _check_supported(name: str, value: Any, only: _Only) -> None:
    if value is None or any(
        value == accepted and isinstance(value, bool) == isinstance(accepted, bool)
        for accepted in only.values
    ):
        return
    advice = only.advice
    if not advice:
        known = " or ".join(json.dumps(accepted) for accepted in only.values)
        advice = f"leave it out{f', or use {known}' if known else ''}"
    raise Unsupported(f"{name}: {json.dumps(value):.60} is not supported by this server; {advice}")


def parse(model: type[M], body: bytes) -> M:
    """Parse a request body; 3.0 counts as an integer, as in JSON Schema.

    Raises:
        RequestError: A field is invalid; the message names it.
    """
    return _validate(model, _load(body))


def _load(body: bytes) -> dict[str, Any]:
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False)  # integers of any size
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return value


def _validate(model: type[M], value: dict[str, Any]) -> M:
    try:
        try:
            return model.model_validate(value, strict=True)
        except pydantic.ValidationError as error:
            _convert_integral_floats(value, error)
        return model.model_validate(value, strict=True)
    except pydantic.ValidationError as error:
        raise RequestError(_error_message(error, value)) from error


def _convert_integral_floats(value: Any, error: pydantic.ValidationError) -> None:
    """Convert floats without a fraction to integers, in place, where integers were expected."""
    for problem in error.errors(include_url=False):
        given = problem["input"]
        if problem["type"] == "int_type" and isinstance(given, float) and given.is_integer():
            *above, last = _path(problem, value)
            reduce(getitem, above, value)[last] = int(given)


def _error_message(error: pydantic.ValidationError, value: Any) -> str:
    """Describe the error with the longest path: among a union's branches, the most specific one."""
    problems = [(_path(problem, value), problem) for problem in error.errors(include_url=False)]
    path, problem = max(problems, key=lambda item: len(item[0]))
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:]
    return f"{field}: {problem['msg']}"


def _path(problem: ErrorDetails, value: Any) -> list[int | str]:
    """Return the path of a problem in the body, without pydantic's names of union branches."""
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
