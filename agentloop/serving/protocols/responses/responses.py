"""Requests of OpenAI's Responses API, translated to chat completions.

    body ──parse──> ResponsesRequest ──to_chat──> ChatRequest

The responses are in stream.py, and the items of a conversation in items.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal, get_args

import pydantic

from agentloop.errors import RequestError, Unsupported
from agentloop.serving.protocols.responses.items import (
    INPUT_ITEMS,
    TEXT_PARTS,
    Item,
    messages_of_items,
    name_in,
)
from agentloop.serving.requests import (
    UNSUPPORTED,
    ChatRequest,
    JsonFormat,
    Only,
    TextFormat,
    TypedObject,
    describe_unsupported,
    load_object,
    objects_in,
    refuse_types,
    refuse_unsupported,
    validate,
)
from agentloop.serving.sampling_fields import SamplingFields
from agentloop.trajectory import Message

_OUTPUT_LIMIT = "use max_output_tokens"
_LOGPROBS = "message.output_text.logprobs"
_Search = Literal[
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
]


# Parameters that would change the answer, with the values that do not.
UNSUPPORTED_RESPONSES: dict[str, Only] = {
    **{
        name: only._replace(advice=only.advice.replace("response_format", "text.format"))
        for name, only in UNSUPPORTED.items()
        if name != "reasoning"
    },
    "background": Only((False,)),
    "best_of": Only((1,)),
    "context_management": Only(([],)),
    "conversation": Only((), "use previous_response_id, or send the whole conversation as input"),
    "logprobs": Only((False,), f'use include: ["{_LOGPROBS}"]'),
    "max_completion_tokens": Only((), _OUTPUT_LIMIT),
    "max_tokens": Only((), _OUTPUT_LIMIT),
    "max_tool_calls": Only(),
    "messages": Only((), "use input"),
    "n": Only((1,)),
    "prompt": Only((), "send its text as instructions"),
    "reasoning_effort": Only((), "use reasoning.effort"),
    "response_format": Only((), "use text.format"),
}


class FlatFunctionTool(pydantic.BaseModel):
    """A function that the caller runs."""

    type: Literal["function"]
    name: str = pydantic.Field(min_length=1)
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class AnyText(pydantic.BaseModel):
    type: Literal["text"]


class InputGrammar(pydantic.BaseModel):
    """The grammar of a custom tool's input; the model reads it, but it is not enforced."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class TextTool(pydantic.BaseModel):
    """A tool that the caller runs, and that takes text instead of arguments."""

    type: Literal["custom"]
    name: str = pydantic.Field(min_length=1)
    description: str | None = None
    format: AnyText | InputGrammar | None = pydantic.Field(None, discriminator="type")


class SearchTool(pydantic.BaseModel):
    """OpenAI's search of the web, which the model is not offered here.

    Coding agents send it beside their own tools, whether or not a search is needed.
    """

    type: _Search


class NamespaceTool(pydantic.BaseModel):
    """A group of tools; the model is offered each under the names of both."""

    type: Literal["namespace"]
    name: str = pydantic.Field(min_length=1)
    description: str | None = None
    tools: list[Annotated[FlatFunctionTool | TextTool, pydantic.Field(discriminator="type")]]

    def qualified_tools(self) -> list[FlatFunctionTool | TextTool]:
        """Return the tools as the model is offered them."""
        return [
            tool.model_copy(
                update={
                    "name": name_in(self.name, tool.name),
                    "description": _passages(self.description, tool.description),
                }
            )
            for tool in self.tools
        ]


RequestTool = Annotated[
    FlatFunctionTool | TextTool | NamespaceTool | SearchTool, pydantic.Field(discriminator="type")
]


class ChosenTool(pydantic.BaseModel):
    type: Literal["function", "custom"]
    name: str


class AllowedTools(pydantic.BaseModel):
    """The tools that the model is offered, of those in the request."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ChosenTool] = pydantic.Field(min_length=1)


class FlatSchemaFormat(pydantic.BaseModel):
    type: Literal["json_schema"]
    name: str
    json_schema: dict[str, object] = pydantic.Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextSettings(pydantic.BaseModel):
    format: TextFormat | JsonFormat | FlatSchemaFormat | None = pydantic.Field(
        None, discriminator="type"
    )


class ReasoningSettings(pydantic.BaseModel):
    effort: str | None = pydantic.Field(None, max_length=32)
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    """If set, the thought is sent as a summary, in full: clients that ask display only that."""


_SAME_IN_CHAT = {
    *SamplingFields.model_fields,
    "top_logprobs",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "thinking_token_budget",
}


class ResponsesRequest(SamplingFields):
    """The supported parameters of OpenAI's `POST /v1/responses`."""

    model_config = pydantic.ConfigDict(
        json_schema_extra=describe_unsupported(UNSUPPORTED_RESPONSES)
    )

    input: str | Annotated[list[Item], pydantic.Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[RequestTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ChosenTool | AllowedTools | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    max_output_tokens: int | None = pydantic.Field(None, ge=1)
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    top_logprobs: int | None = pydantic.Field(None, ge=0, le=20)
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    thinking_token_budget: int | None = pydantic.Field(None, ge=1)

    @classmethod
    def parse(
        cls, body: bytes, item_of: Callable[[object], dict[str, object] | None] = lambda id: None
    ) -> ResponsesRequest:
        """Parse a request body.

        Args:
            item_of: Returns an item of an earlier response by its id, or None if it is not known.

        Raises:
            RequestError: A field is invalid or unsupported; the message names it.
        """
        value = load_object(body)
        if isinstance(items := value.get("input"), list):
            value["input"] = [_item_itself(item, item_of) for item in items]
        refuse_unsupported(value, UNSUPPORTED_RESPONSES)
        refuse_types(_typed_objects(value))
        request = validate(cls, value)
        request.to_chat()  # raises for what is invalid as a whole
        return request

    def conversation(self, previous: Sequence[Message] = ()) -> list[Message]:
        """Return the messages to keep for a request with this one's `previous_response_id`.

        The instructions are not among them: each request has its own.
        """
        if isinstance(self.input, str):
            return [*previous, {"role": "user", "content": self.input}]
        messages = [*previous, *messages_of_items(self.input)]
        if not messages:
            raise RequestError("input: there is no message; send at least one")
        return messages

    def to_chat(self, previous: Sequence[Message] = ()) -> ChatRequest:
        """Return the request as one for chat completions.

        Args:
            previous: The conversation before, if the request continues a response.

        Raises:
            RequestError: The parameters contradict each other; the message names one.
        """
        messages = self.conversation(previous)
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        tools = self.offered_tools
        chat: dict[str, object] = {
            **self.model_dump(include=_SAME_IN_CHAT, exclude_none=True),
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": self.wants_logprobs,
            "tools": [_as_function(tool) for tool in tools],
            "tool_choice": self._chat_tool_choice(),
            "response_format": self._response_format(),
            "reasoning_effort": self.reasoning and self.reasoning.effort,
        }
        return validate(ChatRequest, chat)

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())

    @property
    def wants_summary(self) -> bool:
        """True if the thought is to be sent as a summary instead of as reasoning text."""
        summary = self.reasoning.summary if self.reasoning else None
        return summary not in (None, "none")

    @property
    def custom_tools(self) -> frozenset[str]:
        """The names of the tools that take text."""
        return frozenset(tool.name for tool in self._own_tools if isinstance(tool, TextTool))

    @property
    def namespaces(self) -> dict[str, dict[str, str]]:
        """The fields of calls to tools in a group, by the names that the model writes."""
        return {
            name_in(group.name, tool.name): {"name": tool.name, "namespace": group.name}
            for group in self.tools or ()
            if isinstance(group, NamespaceTool)
            for tool in group.tools
        }

    @property
    def _own_tools(self) -> list[FlatFunctionTool | TextTool]:
        """The tools that the caller runs."""
        tools: list[FlatFunctionTool | TextTool] = []
        for tool in self.tools or ():
            if isinstance(tool, NamespaceTool):
                tools += tool.qualified_tools()
            elif not isinstance(tool, SearchTool):
                tools.append(tool)
        return tools

    @property
    def offered_tools(self) -> list[FlatFunctionTool | TextTool]:
        """The tools that the model is offered.

        Raises:
            RequestError: An allowed tool does not exist, or only searches are offered.
        """
        offered = self._own_tools
        if self.tools and not offered:
            raise Unsupported(
                f'tools[0].type: "{self.tools[0].type}" is not supported by this server; leave it '
                "out, or send a function that searches"
            )
        if not isinstance(self.tool_choice, AllowedTools):
            return offered
        by_name = {(tool.type, tool.name): tool for tool in offered}
        for index, choice in enumerate(self.tool_choice.tools):
            if (choice.type, choice.name) not in by_name:
                raise RequestError(
                    f"tool_choice.tools[{index}]: there is no {choice.type} {choice.name!r:.50} "
                    "among the tools"
                )
        allowed = {(choice.type, choice.name) for choice in self.tool_choice.tools}
        return [tool for key, tool in by_name.items() if key in allowed]

    def _chat_tool_choice(self) -> object:
        match self.tool_choice:
            case ChosenTool(name=name):
                return {"type": "function", "function": {"name": name}}
            case AllowedTools(mode=mode):
                return mode
            case choice:
                return choice

    def _response_format(self) -> object:
        match self.text.format if self.text else None:
            case FlatSchemaFormat(name=name, json_schema=schema, strict=strict):
                return {
                    "type": "json_schema",
                    "json_schema": {"name": name, "schema": schema, "strict": strict},
                }
            case None:
                return None
            case text_format:
                return {"type": text_format.type}


def _item_itself(item: object, item_of: Callable[[object], dict[str, object] | None]) -> object:
    """Return the item that a reference names, if it is known, or the item that it is."""
    if not isinstance(item, dict) or not {"id"} <= item.keys() <= {"id", "type"}:
        return item
    if item.get("type") not in ("item_reference", None):
        return item
    return item_of(item["id"]) or {**item, "type": "item_reference"}


def _as_function(tool: FlatFunctionTool | TextTool) -> dict[str, object]:
    """Return a tool of chat completions; a custom tool becomes a function of one text."""
    function: dict[str, object] = {"name": tool.name}
    if isinstance(tool, FlatFunctionTool):
        function |= tool.model_dump(include={"description", "parameters", "strict"})
    else:
        text = {"type": "string", "description": "The input of the tool, as plain text."}
        function["description"] = _description(tool)
        function["parameters"] = {
            "type": "object",
            "properties": {"input": text},
            "required": ["input"],
            "additionalProperties": False,
        }
    fields = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": fields}


def _description(tool: TextTool) -> str | None:
    if not isinstance(grammar := tool.format, InputGrammar):
        return tool.description
    kind = "this Lark grammar" if grammar.syntax == "lark" else "this regular expression"
    return _passages(tool.description, f"The input must match {kind}:", grammar.definition)


def _passages(*texts: str | None) -> str | None:
    return "\n\n".join(text for text in texts if text) or None


def _typed_objects(body: dict[str, object]) -> Iterator[TypedObject]:
    tool_types = ("function", "custom")
    use_function = "leave it out, or send a function instead"
    for path, item in objects_in("input", body.get("input")):
        yield path, item, INPUT_ITEMS, "leave it out, or send its text as a message"
        if item.get("type") != "reasoning":
            for part_path, part in objects_in(f"{path}.content", item.get("content")):
                yield part_path, part, TEXT_PARTS, "send text"
    for path, tool in objects_in("tools", body.get("tools")):
        yield path, tool, (*tool_types, "namespace", *get_args(_Search)), use_function
        if tool.get("type") == "namespace":
            for member_path, member in objects_in(f"{path}.tools", tool.get("tools")):
                yield member_path, member, tool_types, use_function
    choice = body.get("tool_choice")
    yield "tool_choice", choice, (*tool_types, "allowed_tools"), "use a function"
    if isinstance(choice, dict):
        for path, tool in objects_in("tool_choice.tools", choice.get("tools")):
            yield path, tool, tool_types, "leave it out"
