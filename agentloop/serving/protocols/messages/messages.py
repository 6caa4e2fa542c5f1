"""Anthropic's Messages API: its requests, as requests for chat completions.

    body ──parse──> MessagesRequest ──to_chat──> ChatRequest

The rules are those of chat completions: a parameter or block that would change the answer and is
not supported is refused by name, anything else that is unknown is ignored. Messages are in
reading.py, answers in answers.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal, TypeVar

import pydantic

from agentloop.errors import Unsupported
from agentloop.serving.protocols.messages.reading import (
    BLOCKS,
    ConversationMessage,
    TextBlock,
    of_messages,
    of_system,
)
from agentloop.serving.requests import (
    ONLY_BARE_MODEL,
    UNSUPPORTED,
    ChatRequest,
    Only,
    TypedObject,
    describe_unsupported,
    load_object,
    objects_in,
    refuse_types,
    refuse_unsupported,
    validate,
)
from agentloop.serving.sampling_fields import SamplerFields, StopSequence

C = TypeVar("C", bound="_Conversation")

_ADVICE = {
    "use n": "",
    "use response_format": "use output_config.format",
    "use stop": "use stop_sequences",
}

# Parameters that would change the answer, with the values that do not.
UNSUPPORTED_IN_MESSAGES: dict[str, Only] = {
    **{
        name: only._replace(advice=_ADVICE.get(only.advice, only.advice))
        for name, only in {**UNSUPPORTED, **ONLY_BARE_MODEL}.items()
        if name != "thinking"
    },
    # Anthropic's
    "compaction": Only(),
    "container": Only(),
    "mcp_servers": Only(([],), "name the servers in the settings of this service"),
    "prefill": Only(),
    "thread": Only(),
    # of chat completions, with another name or without a meaning here
    "ignore_eos": Only((False,)),
    "logit_bias": Only(({},), "use chat completions"),
    "logprobs": Only((False,), "use chat completions"),
    "max_completion_tokens": Only((), "use max_tokens"),
    "n": Only((1,), "use chat completions"),
    "parallel_tool_calls": Only((True,), "use tool_choice.disable_parallel_tool_use"),
    "reasoning_effort": Only((), "use output_config.effort"),
    "response_format": Only(({"type": "text"},), "use output_config.format"),
    "stop": Only(([],), "use stop_sequences"),
    "thinking_token_budget": Only((), "use thinking.budget_tokens"),
    "top_logprobs": Only((0,), "use chat completions"),
}


# --- options --------------------------------------------------------------------------------------


class CustomTool(pydantic.BaseModel):
    """A tool that the caller runs."""

    type: Literal["custom"] | None = None
    name: str = pydantic.Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, object]
    input_examples: list[dict[str, object]] | None = None
    strict: bool | None = None

    def to_chat(self) -> dict[str, object]:
        fields = {
            "description": self.description,
            "parameters": self.input_schema,
            "input_examples": self.input_examples,  # templates show the whole definition
            "strict": self.strict,
        }
        present = {name: value for name, value in fields.items() if value is not None}
        return {"type": "function", "function": {"name": self.name, **present}}


class FreeChoice(pydantic.BaseModel):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(pydantic.BaseModel):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class ThinkingWithBudget(pydantic.BaseModel):
    type: Literal["enabled"]
    budget_tokens: int = pydantic.Field(ge=1)


class ThinkingChoice(pydantic.BaseModel):
    type: Literal["adaptive", "disabled"]


class OutputFormat(pydantic.BaseModel):
    type: Literal["json_schema"]
    json_schema: dict[str, object] = pydantic.Field(alias="schema")


class OutputConfig(pydantic.BaseModel):
    effort: str | None = pydantic.Field(None, max_length=32)
    format: OutputFormat | None = None


class RecentTurns(pydantic.BaseModel):
    type: Literal["thinking_turns"]
    value: int = pydantic.Field(ge=1)


class AllTurns(pydantic.BaseModel):
    type: Literal["all"]


class ClearThinking(pydantic.BaseModel):
    """Removes the thinking of all turns but the latest."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | RecentTurns | AllTurns | None = None

    @property
    def num_kept(self) -> int | None:
        """The number of turns that keep their thinking; None: all."""
        if self.keep is None:
            return 1
        return self.keep.value if isinstance(self.keep, RecentTurns) else None


class ContextManagement(pydantic.BaseModel):
    edits: list[ClearThinking] | None = None


# --- requests -------------------------------------------------------------------------------------


class _Conversation(pydantic.BaseModel):
    """The parameters that the prompt is made from."""

    model_config = pydantic.ConfigDict(
        json_schema_extra=describe_unsupported(UNSUPPORTED_IN_MESSAGES)
    )

    model: str | None = None
    messages: list[Annotated[ConversationMessage, pydantic.Field(discriminator="role")]] = (
        pydantic.Field(min_length=1)
    )
    system: str | list[TextBlock] | None = None
    tools: list[CustomTool] | None = None
    tool_choice: (
        Annotated[FreeChoice | NamedChoice, pydantic.Field(discriminator="type")] | None
    ) = None
    thinking: (
        Annotated[ThinkingWithBudget | ThinkingChoice, pydantic.Field(discriminator="type")] | None
    ) = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None
    chat_template_kwargs: dict[str, object] | None = None

    @classmethod
    def parse(cls: type[C], body: bytes) -> C:
        """Parse a request body.

        Raises:
            RequestError: A field is invalid or unsupported; the message names it.
        """
        value = load_object(body)
        refuse_unsupported(value, UNSUPPORTED_IN_MESSAGES)
        refuse_types(_typed_objects(value))
        _refuse_callers(value)
        return validate(cls, value)

    def to_chat(self) -> ChatRequest:
        """Return the same request for chat completions."""
        fields = {name: value for name, value in self._fields().items() if value is not None}
        return validate(ChatRequest, fields)

    def _fields(self) -> dict[str, object]:
        choice, config = self.tool_choice, self.output_config or OutputConfig()
        asked_format = config.format or self.output_format
        thinking = self.thinking
        budget = thinking.budget_tokens if isinstance(thinking, ThinkingWithBudget) else None
        single = choice is not None and choice.disable_parallel_tool_use
        return {
            "model": self.model,
            "messages": [*of_system(self.system), *of_messages(self.messages, self._num_kept)],
            "tools": None if self.tools is None else [tool.to_chat() for tool in self.tools],
            "tool_choice": None if choice is None else _tool_choice(choice),
            "parallel_tool_calls": False if single else None,
            "response_format": None if asked_format is None else _response_format(asked_format),
            "reasoning_effort": config.effort,
            "thinking_token_budget": budget,
            "chat_template_kwargs": self._template_arguments or None,
        }

    @property
    def _template_arguments(self) -> dict[str, object]:
        """The variables by which templates switch thinking on and off, under both of its names."""
        arguments = self.chat_template_kwargs or {}
        if self.thinking is None or self.thinking.type == "adaptive":
            return arguments
        thinks = self.thinking.type == "enabled"
        return {"enable_thinking": thinks, "thinking": thinks, **arguments}

    @property
    def _num_kept(self) -> int | None:
        """The number of turns that keep their thinking; None: all."""
        edits = (self.context_management or ContextManagement()).edits or ()
        return min((edit.num_kept for edit in edits if edit.num_kept is not None), default=None)


class TokenCountRequest(_Conversation):
    """The body of `POST /v1/messages/count_tokens`."""


class MessagesRequest(_Conversation, SamplerFields):
    """The supported parameters of Anthropic's `POST /v1/messages`, and more ways to sample."""

    max_tokens: int = pydantic.Field(ge=1)
    stop_sequences: list[StopSequence] | None = pydantic.Field(None, max_length=4)
    stream: bool | None = None

    @classmethod
    def parse(cls, body: bytes) -> MessagesRequest:
        """Parse a request body.

        Raises:
            RequestError: A field is invalid or unsupported; the message names it.
        """
        request = super().parse(body)
        if request.messages[-1].role == "assistant":
            raise Unsupported(
                f"messages[{len(request.messages) - 1}].role: a last message of the assistant "
                "(prefill) is not supported by this server; end with a message of the user"
            )
        return request

    def _fields(self) -> dict[str, object]:
        return {
            **super()._fields(),
            **self.model_dump(include={"max_tokens", "stream", *SamplerFields.model_fields}),
            "stop": self.stop_sequences,
            "stream_options": {"include_usage": True} if self.stream else None,
        }


def _tool_choice(choice: FreeChoice | NamedChoice) -> object:
    if isinstance(choice, NamedChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _response_format(output_format: OutputFormat) -> dict[str, object]:
    return {
        "type": "json_schema",
        "json_schema": {"schema": output_format.json_schema, "strict": True},
    }


# --- types ----------------------------------------------------------------------------------------


def _typed_objects(body: Mapping[str, object]) -> Iterator[TypedObject]:
    for path, tool in objects_in("tools", body.get("tools")):
        yield path, tool, ("custom",), "define a tool of your own, with an input_schema"
    for path, message in objects_in("messages", body.get("messages")):
        if (supported := BLOCKS.get(str(message.get("role")))) is not None:
            yield from _typed_blocks(f"{path}.content", message.get("content"), supported)
    yield from _typed_blocks("system", body.get("system"), BLOCKS["system"])
    thinking_types = ("adaptive", "enabled", "disabled")
    yield "thinking", body.get("thinking"), thinking_types, f"use {', '.join(thinking_types)}"
    if isinstance(management := body.get("context_management"), dict):
        for path, edit in objects_in("context_management.edits", management.get("edits")):
            yield path, edit, ("clear_thinking_20251015",), "shorten the conversation yourself"


def _typed_blocks(path: str, content: object, supported: Sequence[str]) -> Iterator[TypedObject]:
    for block_path, block in objects_in(path, content):
        yield block_path, block, supported, f"it takes {', '.join(supported)}"


def _refuse_callers(body: Mapping[str, object]) -> None:
    for path, tool in objects_in("tools", body.get("tools")):
        callers = tool.get("allowed_callers")
        if isinstance(callers, list) and callers and "direct" not in callers:
            raise Unsupported(
                f"{path}.allowed_callers: {json.dumps(callers[0]):.60} is not supported by this "
                'server; use ["direct"]'
            )
