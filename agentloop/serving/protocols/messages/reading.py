"""Anthropic's messages, as those of chat completions.

An assistant's message is one of chat completions. If the agent ran calls itself, it is the turns
that the agent had, each with its calls and their results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any, Literal

import pydantic

from agentloop.agent.openai_messages import function_call, note_omission, tool_message

_BILLING_HEADER = "x-anthropic-billing-header:"


class TextBlock(pydantic.BaseModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(pydantic.BaseModel):
    """Reasoning of an earlier answer. Its signature is not verified."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(pydantic.BaseModel):
    """Reasoning that only its author can read; ignored."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(pydantic.BaseModel):
    """A call that the caller runs."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, object] | str | None = None


class OtherBlock(pydantic.BaseModel):
    """A part of a result that is no text, such as an image; the model reads that it was there."""

    type: str

    @property
    def text(self) -> str:
        return note_omission(self.type)


def _kind_of(block: object) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return "text" if kind == "text" else "other"


_ResultBlock = Annotated[
    Annotated[TextBlock, pydantic.Tag("text")] | Annotated[OtherBlock, pydantic.Tag("other")],
    pydantic.Discriminator(_kind_of),
]


class ToolResultBlock(pydantic.BaseModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[_ResultBlock] | None = None
    is_error: bool | None = None


class ExecutedUseBlock(pydantic.BaseModel):
    """A call that the agent ran itself, in an earlier answer."""

    type: Literal["mcp_tool_use"]
    id: str
    name: str
    input: dict[str, object] | str | None = None


class ExecutedResultBlock(pydantic.BaseModel):
    type: Literal["mcp_tool_result"]
    tool_use_id: str
    content: str | list[_ResultBlock] | None = None


_UserBlock = TextBlock | ToolResultBlock
_AssistantBlock = (
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ExecutedUseBlock
    | ExecutedResultBlock
)


class UserInput(pydantic.BaseModel):
    role: Literal["user"]
    content: str | list[Annotated[_UserBlock, pydantic.Field(discriminator="type")]]


class AssistantInput(pydantic.BaseModel):
    role: Literal["assistant"]
    content: str | list[Annotated[_AssistantBlock, pydantic.Field(discriminator="type")]]


class SystemInput(pydantic.BaseModel):
    """An instruction in mid-conversation; it becomes part of the user's message, marked."""

    role: Literal["system"]
    content: str | list[TextBlock]


BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": (
        "text",
        "thinking",
        "redacted_thinking",
        "tool_use",
        "mcp_tool_use",
        "mcp_tool_result",
    ),
    "system": ("text",),
}
ConversationMessage = UserInput | AssistantInput | SystemInput


def of_system(system: str | list[TextBlock] | None) -> list[dict[str, object]]:
    """Return the first message for chat completions, if there is a system prompt."""
    blocks = _texts(system)
    # Claude Code's first block has a hash that changes with each request, for Anthropic's accounts.
    # It is no instruction, and no prompt would begin like an earlier one.
    kept = [text for text in blocks if not text.startswith(_BILLING_HEADER)]
    return [{"role": "system", "content": "\n\n".join(kept)}] if any(kept) else []


def of_messages(
    messages: Sequence[ConversationMessage], num_kept: int | None
) -> Iterator[dict[str, object]]:
    """Yield the messages for chat completions; adjacent ones of a role are one, as Anthropic's."""
    turns: list[tuple[str, list[Any]]] = [
        ("assistant" if is_answer else "user", [b for message in group for b in _blocks(message)])
        for is_answer, group in groupby(messages, lambda message: message.role == "assistant")
    ]
    if num_kept is not None:
        _forget_thinking(turns, num_kept)
    for role, blocks in turns:
        yield from _of_user(blocks) if role == "user" else _of_assistant(blocks)


def _blocks(message: ConversationMessage) -> Sequence[object]:
    content = message.content
    blocks = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
    if message.role != "system":
        return blocks
    # Many chat templates refuse a system message that is not the first, or a role twice in a row.
    text = "\n\n".join(block.text for block in blocks if isinstance(block, TextBlock))
    marked = f"<system-reminder>\n{text}\n</system-reminder>"
    return [TextBlock(type="text", text=marked)]


def _forget_thinking(turns: Sequence[tuple[str, list[object]]], num_kept: int) -> None:
    """Remove the thinking of all turns but the latest; a turn lasts until the user speaks again."""
    has_answer = False
    for role, blocks in reversed(turns):
        if role == "assistant":
            has_answer = True
            if num_kept <= 0:
                blocks[:] = [block for block in blocks if not isinstance(block, ThinkingBlock)]
        elif role == "user" and not any(isinstance(block, ToolResultBlock) for block in blocks):
            num_kept -= has_answer
            has_answer = False


def _of_user(blocks: Sequence[TextBlock | ToolResultBlock]) -> Iterator[dict[str, object]]:
    """Yield the results of calls, in order, and then what the user says."""
    texts = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        else:
            yield tool_message(block.tool_use_id, _result_text(block))
    if texts or not blocks:
        yield {"role": "user", "content": "\n\n".join(texts)}


def _result_text(block: ToolResultBlock) -> str:
    text = "\n".join(_texts(block.content))
    # Chat completions have no flag for failures: mark them like those of the agent's own tools.
    return f"[error] {text}" if block.is_error and not text.startswith("[error]") else text


def _of_assistant(blocks: Sequence[_AssistantBlock]) -> Iterator[dict[str, object]]:
    """Yield a message, or one for each turn of an agent that ran calls itself, with its results."""
    turn = _AnswerTurn()
    for block in blocks:
        if turn.ends_before(block):
            yield from turn.messages()
            turn = _AnswerTurn(is_first=False)
        turn.add(block)
    yield from turn.messages()


@dataclass
class _AnswerTurn:
    """A turn of the model, from the blocks of an assistant message."""

    is_first: bool = True
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolUseBlock | ExecutedUseBlock] = field(default_factory=list)
    results: list[ExecutedResultBlock] = field(default_factory=list)

    def ends_before(self, block: _AssistantBlock) -> bool:
        """Return whether the block is of a later turn: it follows a result, and is not of its turn.

        The calls of a turn have ids that differ only behind the last underscore.
        """
        if not self.results or isinstance(block, RedactedThinkingBlock | ExecutedResultBlock):
            return False
        if isinstance(block, ToolUseBlock | ExecutedUseBlock):
            same_turn = self.results[-1].tool_use_id.rpartition("_")[0]
            return not same_turn or block.id.rpartition("_")[0] != same_turn
        return True

    def add(self, block: _AssistantBlock) -> None:
        match block:
            case TextBlock():
                self.texts.append(block.text)
            case ThinkingBlock():
                self.thoughts.append(block.thinking)
            case ToolUseBlock() | ExecutedUseBlock():
                self.calls.append(block)
            case ExecutedResultBlock():
                self.results.append(block)
            case RedactedThinkingBlock():
                pass

    def messages(self) -> Iterator[dict[str, object]]:
        content, reasoning = "".join(self.texts), "".join(self.thoughts)
        if not self.is_first:  # a blank line separates what is said from what was said before
            content, reasoning = content.lstrip(), reasoning.lstrip()
        message: dict[str, object] = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = [
                function_call(block.id, block.name, block.input) for block in self.calls
            ]
            message["content"] = content or None
        yield message
        for result in self.results:
            yield tool_message(result.tool_use_id, "\n".join(_texts(result.content)))


def _texts(content: str | Sequence[TextBlock | OtherBlock] | None) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [block.text for block in content or ()]
