"""Parse request bodies strictly: each field must have its JSON type; strings are not numbers.

    body ──JSON──> unsupported parameters are refused ──pydantic──> ChatRequest, or another model

An unsupported parameter that would change the answer is refused by name. Parameters that cannot
change the answer are ignored, known or not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import pydantic
import pydantic_core
from pydantic.config import JsonDict, JsonValue
from pydantic_core import ErrorDetails

from agentloop.agent.constraints import OutputRules
from agentloop.agent.openai_messages import normal_form
from agentloop.agent.rollout import TurnOptions
from agentloop.errors import RequestError, Unsupported
from agentloop.plain_json import with_whole_pairs
from agentloop.serving.sampling_fields import SamplingFields
from agentloop.serving.schemas import InputMessage, ToolDefinition

M = TypeVar("M", bound=pydantic.BaseModel)


TypedObject = tuple[str, object, Sequence[str], str]
"""An object whose type may be unsupported: its path, itself, supported types, and advice."""


class Only(NamedTuple):
    """The values of a parameter that are accepted besides null, and advice for the others."""

    values: tuple[JsonValue, ...] = ()
    advice: str = ""


_OUTPUT_FORMAT = "use response_format"

# Parameters that would change the answer, with the values that do not.
UNSUPPORTED: dict[str, Only] = {
    # OpenAI
    "audio": Only(),
    "function_call": Only(("none", "auto"), "use tools and tool_choice"),
    "functions": Only(([],), "use tools"),
    "modalities": Only((["text"],)),
    "web_search_options": Only(),
    # SGLang, vLLM and others
    "add_generation_prompt": Only((True,)),
    "allowed_token_ids": Only(([],)),
    "bad_words": Only(([],)),
    "best_of": Only((1,), "use n"),
    "chat_template": Only(),
    "continue_final_message": Only((False,)),
    "custom_logit_processor": Only(),
    "documents": Only(([],)),
    "ebnf": Only((), _OUTPUT_FORMAT),
    "echo": Only((False,)),
    "enable_thinking": Only((), "use chat_template_kwargs"),
    "guided_choice": Only((), _OUTPUT_FORMAT),
    "guided_grammar": Only((), _OUTPUT_FORMAT),
    "guided_json": Only((), _OUTPUT_FORMAT),
    "guided_regex": Only((), _OUTPUT_FORMAT),
    "include_reasoning": Only((True,)),
    "include_stop_str_in_output": Only((False,)),
    "json_schema": Only((), _OUTPUT_FORMAT),
    "length_penalty": Only((1,)),
    "logits_processors": Only(([],)),
    "lora_path": Only(),
    "mm_processor_kwargs": Only(({},)),
    "no_stop_trim": Only((False,)),
    "prompt_logprobs": Only(),
    "reasoning": Only(),
    "regex": Only((), _OUTPUT_FORMAT),
    "return_hidden_states": Only((False,)),
    "return_tokens_as_token_ids": Only((False,)),
    "separate_reasoning": Only((True,)),
    "session_params": Only(),
    "skip_special_tokens": Only((True,)),
    "stop_regex": Only(([],), "use stop"),
    "structural_tag": Only((), _OUTPUT_FORMAT),
    "structured_outputs": Only((), _OUTPUT_FORMAT),
    "thinking": Only(),
    "truncate_prompt_tokens": Only(),
    "use_beam_search": Only((False,)),
}

# Fields that the bare model supports. For the agent, whose turns are generations of their own, they
# would not mean what they mean for a whole answer.
ONLY_BARE_MODEL: dict[str, Only] = {
    "min_tokens": Only((0,)),
    "stop_token_ids": Only(([],), "use stop"),
}


def describe_unsupported(unsupported: Mapping[str, Only]) -> Callable[[JsonDict], None]:
    """Return what adds to a JSON schema the values that are accepted of unsupported parameters."""

    def describe(schema: JsonDict) -> None:
        properties = schema["properties"]
        assert isinstance(properties, dict)
        for name, only in unsupported.items():
            properties[name] = {"enum": [*only.values, None]}

    return describe


def _with_unsupported(schema: JsonDict) -> None:
    describe_unsupported(UNSUPPORTED)(schema)
    wanted: JsonDict = {"top_logprobs": {"type": "integer", "minimum": 1}}
    schema["if"] = {"properties": wanted, "required": ["top_logprobs"]}
    schema["then"] = {"properties": {"logprobs": {"const": True}}, "required": ["logprobs"]}


class NamedFunction(pydantic.BaseModel):
    name: str


class NamedToolChoice(pydantic.BaseModel):
    type: Literal["function"]
    function: NamedFunction


class AnswerSchema(pydantic.BaseModel):
    name: str | None = None
    json_schema: dict[str, object] = pydantic.Field(alias="schema")
    strict: bool | None = None


class TextFormat(pydantic.BaseModel):
    type: Literal["text"]


class JsonFormat(pydantic.BaseModel):
    type: Literal["json_object"]


class SchemaFormat(pydantic.BaseModel):
    type: Literal["json_schema"]
    json_schema: AnswerSchema


class _Named(ValueError):
    """An error that already names the field."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(str(error))
        self.error = error


class _Checked(pydantic.BaseModel):
    messages: list[InputMessage]


def _in_normal_form(messages: object) -> list[dict[str, object]]:
    try:
        if not isinstance(messages, list):
            raise RequestError("messages: expected a list")
        if not messages:
            raise RequestError("messages: at least one message is required")
        plain = normal_form(messages)  # which also checks the contents
        others = [
            {name: message[name] for name in message if name != "content"} for message in messages
        ]
        validate(_Checked, {"messages": others})
        return plain
    except RequestError as error:
        raise _Named(error) from error


_Messages = Annotated[
    list[dict[str, object]],
    pydantic.PlainValidator(
        _in_normal_form,
        json_schema_input_type=Annotated[list[InputMessage], pydantic.Field(min_length=1)],
    ),
]


class ChatRequest(SamplingFields):
    """The supported parameters of OpenAI's `POST /v1/chat/completions`."""

    model_config = pydantic.ConfigDict(json_schema_extra=_with_unsupported)

    messages: _Messages
    max_tokens: int | None = pydantic.Field(None, ge=1)
    max_completion_tokens: int | None = pydantic.Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = pydantic.Field(None, ge=0, le=20)
    tools: list[ToolDefinition] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice | None = None
    response_format: TextFormat | JsonFormat | SchemaFormat | None = pydantic.Field(
        None, discriminator="type"
    )
    chat_template_kwargs: dict[str, object] | None = None
    reasoning_effort: str | None = pydantic.Field(None, max_length=32)
    thinking_token_budget: int | None = pydantic.Field(None, ge=1)
    parallel_tool_calls: bool | None = None

    @classmethod
    def parse(cls, body: bytes) -> ChatRequest:
        """Parse a request body.

        Raises:
            RequestError: A field is invalid or unsupported; the message names it.
        """
        value = load_object(body)
        refuse_unsupported(value, UNSUPPORTED)
        request = validate(cls, value)
        if request.top_logprobs and not request.logprobs:
            raise RequestError("top_logprobs: set logprobs to true as well")
        return request

    def refuse_for_agent(self) -> None:
        """Refuse parameters that only the bare model supports.

        Raises:
            Unsupported: The request sets one of them; the message names it.
        """
        refuse_unsupported(self.__dict__, ONLY_BARE_MODEL)

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

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
            rules=OutputRules(self._forced_tool, self._answer_schema),
            stop_ids=tuple(self.stop_token_ids or ()),
            parameters=self.server_parameters(),
        )

    @property
    def template_arguments(self) -> dict[str, object]:
        """The variables of the chat template for this request."""
        effort = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else {}
        return {**effort, **(self.chat_template_kwargs or {})}

    @property
    def is_constrained(self) -> bool:
        """True if a call or the form of the answer is enforced."""
        return self._forced_tool is not None or self._answer_schema is not None

    @property
    def _forced_tool(self) -> str | None:
        if isinstance(self.tool_choice, NamedToolChoice):
            return self.tool_choice.function.name
        return self.tool_choice if self.tool_choice == "required" else None

    @property
    def _answer_schema(self) -> dict[str, object] | None:
        match self.response_format:
            case SchemaFormat(json_schema=answer_schema):
                return answer_schema.json_schema
            case JsonFormat():
                return {"type": "object"}
            case _:
                return None


def refuse_unsupported(value: Mapping[str, object], unsupported: Mapping[str, Only]) -> None:
    """Raise Unsupported if an unsupported parameter has a value that would change the answer."""
    if not unsupported.keys().isdisjoint(value):  # nearly always it is
        for name, only in unsupported.items():
            _check_supported(name, value.get(name), only)


def _check_supported(name: str, value: object, only: Only) -> None:
    if value is None or any(
        value == accepted and isinstance(value, bool) == isinstance(accepted, bool)
        for accepted in only.values
    ):
        return
    advice = only.advice
    if not advice:
        accepted_values = " or ".join(json.dumps(accepted) for accepted in only.values)
        advice = f"leave it out{f', or use {accepted_values}' if accepted_values else ''}"
    raise Unsupported(f"{name}: {json.dumps(value):.60} is not supported by this server; {advice}")


def refuse_types(objects: Iterable[TypedObject]) -> None:
    """Raise Unsupported for the first object of a body whose type is not supported."""
    for path, value, supported, advice in objects:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in supported:
            raise Unsupported(
                f'{path}.type: "{kind:.50}" is not supported by this server; {advice}'
            )


def objects_in(path: str, values: object) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the objects of a list with their paths; an empty one for what is none."""
    for index, value in enumerate(values if isinstance(values, list) else ()):
        yield f"{path}[{index}]", value if isinstance(value, dict) else {}


def parse(model: type[M], body: bytes) -> M:
    """Parse a request body; 3.0 counts as an integer, as in JSON Schema.

    Raises:
        RequestError: A field is invalid; the message names it.
    """
    return validate(model, load_object(body))


def load_object(body: bytes) -> dict[str, object]:
    """Return the JSON object in a request body. Raises RequestError if it is not one."""
    try:
        value = _from_json(body)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return value


def _from_json(body: bytes) -> object:
    """Parse JSON with integers of any size; half a surrogate pair becomes U+FFFD."""
    try:
        return pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        try:
            repaired = with_whole_pairs(body.decode())
        except UnicodeDecodeError:
            raise error from None
        return pydantic_core.from_json(repaired, allow_inf_nan=False)


def validate(model: type[M], value: dict[str, object]) -> M:
    """Validate the object of a request body strictly. Raises RequestError naming a field."""
    try:
        try:
            return model.model_validate(value, strict=True)
        except pydantic.ValidationError as error:
            _convert_integral_floats(value, error)
        return model.model_validate(value, strict=True)
    except pydantic.ValidationError as error:
        for problem in error.errors(include_url=False):
            if isinstance(named := problem.get("ctx", {}).get("error"), _Named):
                raise named.error from error
        raise RequestError(_error_message(error, value)) from error


def with_overrides(base: M, overrides: Mapping[str, object], name: str) -> M:
    """Return settings with some fields replaced.

    Args:
        name: The name of the settings.

    Raises:
        RequestError: A field is invalid; the message names it.
    """
    if not overrides:
        return base
    try:
        return type(base).model_validate({**base.model_dump(), **overrides})
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in problem["loc"])
        raise RequestError(f"{name}.{field}: {problem['msg']}") from error


def _convert_integral_floats(value: Any, error: pydantic.ValidationError) -> None:
    """Convert floats without a fraction to integers, in place, where integers were expected."""
    for problem in error.errors(include_url=False):
        number = problem["input"]
        if problem["type"] == "int_type" and isinstance(number, float) and number.is_integer():
            *above, last = _path(problem, value)
            reduce(getitem, above, value)[last] = int(number)


def _error_message(error: pydantic.ValidationError, value: object) -> str:
    """Describe the error of the branch of a union that was meant: that with the longest path, and
    of those one that is no wrong type."""
    problems = [(_path(problem, value), problem) for problem in error.errors(include_url=False)]
    path, problem = max(
        problems, key=lambda item: (len(item[0]), not item[1]["type"].endswith("_type"))
    )
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:]
    return f"{field}: {problem['msg']}"


def _path(problem: ErrorDetails, value: object) -> list[int | str]:
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
