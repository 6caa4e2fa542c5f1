"""The items of OpenAI's Responses API: what a conversation consists of there, and as messages.

An assistant message is spread over several items: a thought, text and calls. Those of one turn of
the model become one message, so that the prompt of the next turn is the history as it was sampled:

    reasoning, message, function_call, function_call ──> assistant message with tool_calls
    function_call_output ──> tool message
    mcp_call (a call that the agent has run) ──> tool_calls of the assistant message, tool message
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pydantic

from agentloop.agent.openai_messages import function_call, note_omission, tool_message
from agentloop.errors import RequestError, Unsupported
from agentloop.trajectory import Message


class TextItemPart(pydantic.BaseModel):
    type: Literal["input_text", "output_text"]
    text: str


class RefusalPart(pydantic.BaseModel):
    type: Literal["refusal"]
    refusal: str


class ThoughtPart(pydantic.BaseModel):
    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class MessageItem(pydantic.BaseModel):
    """A message; its type may be left out."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Annotated[TextItemPart | RefusalPart, pydantic.Field(discriminator="type")]]


class ReasoningItem(pydantic.BaseModel):
    """The thought of the assistant message that follows."""

    type: Literal["reasoning"]
    summary: list[ThoughtPart] | None = None
    content: list[ThoughtPart] | None = None
    """Takes precedence over the summary."""
    encrypted_content: str | None = None


class FunctionCallItem(pydantic.BaseModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str | dict[str, object] | None = None


class CustomCallItem(pydantic.BaseModel):
    """A call of a tool that takes text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class OtherPart(pydantic.BaseModel):
    """A part of an output that is no text, such as an image; the model reads that it was there."""

    type: str

    @property
    def text(self) -> str:
        return note_omission(self.type)


def _kind_of(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "text" if kind in ("input_text", "output_text") else "other"


_OutputPart = Annotated[
    Annotated[TextItemPart, pydantic.Tag("text")] | Annotated[OtherPart, pydantic.Tag("other")],
    pydantic.Discriminator(_kind_of),
]


class CallOutputItem(pydantic.BaseModel):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | list[_OutputPart] | None = None


class ExecutedCallItem(pydantic.BaseModel):
    """A call that the agent has run itself."""

    type: Literal["mcp_call"]
    id: str
    name: str
    arguments: str
    output: str | None = None


class ItemReference(pydantic.BaseModel):
    """An item of an earlier response, by its id."""

    type: Literal["item_reference"]
    id: str


TEXT_PARTS = ("input_text", "output_text", "refusal")
INPUT_ITEMS = (
    "message",
    "reasoning",
    "function_call",
    "custom_tool_call",
    "function_call_output",
    "custom_tool_call_output",
    "mcp_call",
    "item_reference",
)


def _type_of(item: object) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if kind in INPUT_ITEMS else "message"


Item = Annotated[
    Annotated[MessageItem, pydantic.Tag("message")]
    | Annotated[ReasoningItem, pydantic.Tag("reasoning")]
    | Annotated[FunctionCallItem, pydantic.Tag("function_call")]
    | Annotated[CustomCallItem, pydantic.Tag("custom_tool_call")]
    | Annotated[CallOutputItem, pydantic.Tag("function_call_output")]
    | Annotated[CallOutputItem, pydantic.Tag("custom_tool_call_output")]
    | Annotated[ExecutedCallItem, pydantic.Tag("mcp_call")]
    | Annotated[ItemReference, pydantic.Tag("item_reference")],
    pydantic.Discriminator(_type_of),
]


def name_in(namespace: str | None, name: str) -> str:
    """Return the name by which the model calls a tool that may be in a namespace."""
    return name if namespace is None else f"{namespace}__{name}"


def custom_arguments(text: str) -> str:
    """Return the arguments of the function that stands for a custom tool."""
    return json.dumps({"input": text}, ensure_ascii=False)


@dataclass
class _Turn:
    """The items of one turn of the model, so far."""

    reasoning: str | None = None
    content: str | None = None
    calls: list[dict[str, object]] = field(default_factory=list)
    outputs: list[Message] = field(default_factory=list)  # of calls that the agent has run

    def messages(self) -> Iterable[Message]:
        message: dict[str, object] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return [message, *self.outputs] if self != _Turn() else []


def messages_of_items(items: Iterable[Item]) -> list[Message]:
    """Return the messages of chat completions that the items stand for.

    Raises:
        Unsupported: A thought is encrypted; the message names the item.
        RequestError: A reference was not resolved.
    """
    messages: list[Message] = []
    turn, before = _Turn(), None
    for index, item in enumerate(items):
        # Two messages in a row are two turns; so is whatever follows the outputs of calls.
        is_new_turn = isinstance(item, MessageItem) and isinstance(before, MessageItem)
        if is_new_turn or (turn.outputs and not isinstance(item, ExecutedCallItem)):
            messages += turn.messages()
            turn = _Turn()
        before = item
        match item:
            case ReasoningItem():
                if thought := _thought(index, item):
                    turn.reasoning = (turn.reasoning or "") + thought
            case MessageItem(role="assistant"):
                turn.content = (turn.content or "") + _text(item.content)
            case FunctionCallItem():
                name = name_in(item.namespace, item.name)
                turn.calls.append(function_call(item.call_id, name, item.arguments))
            case CustomCallItem():
                arguments = custom_arguments(item.input)
                name = name_in(item.namespace, item.name)
                turn.calls.append(function_call(item.call_id, name, arguments))
            case ExecutedCallItem():
                turn.calls.append(function_call(item.id, item.name, item.arguments))
                turn.outputs.append(tool_message(item.id, item.output or ""))
            case ItemReference():
                raise RequestError(
                    f"input[{index}].id: {item.id!r} is not known here: it was not stored, or is "
                    "of another session, or too old; send the item itself"
                )
            case MessageItem() | CallOutputItem():
                messages += turn.messages()
                turn = _Turn()
                if isinstance(item, MessageItem):
                    messages.append({"role": item.role, "content": _text(item.content)})
                else:
                    messages.append(tool_message(item.call_id, _text(item.output)))
    return [*messages, *turn.messages()]


def _text(content: str | Sequence[TextItemPart | RefusalPart | OtherPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)


def _thought(index: int, item: ReasoningItem) -> str:
    parts = item.content or item.summary or []
    if not parts and item.encrypted_content:
        raise Unsupported(
            f"input[{index}].encrypted_content: this server cannot read the thoughts of another; "
            "leave the item out"
        )
    return "\n\n".join(part.text for part in parts)
