"""Checks of a dialogue's tools, and of what a message says about training and itself. Pure."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence

from agentloop.agent.tools import Schema
from agentloop.errors import DataError, RequestError
from agentloop.trajectory import Message

# What the assistant said besides the content and its calls.
_SAID = ("reasoning_content", "thinking", "reasoning_details", "refusal", "audio")


def tools_of(row: Mapping[str, object], where: str) -> list[Schema]:
    """Return a line's schemas of tools, also those of the older form (`functions`).

    Raises:
        DataError: they are not a list of functions, each with a name.
    """
    functions, tools = row.get("functions"), row.get("tools") or []
    if isinstance(functions, list) and not tools:
        tools = [{"type": "function", "function": function} for function in functions]
    if not isinstance(tools, list) or not all(map(_is_schema, tools)):
        raise DataError(
            f"{where}: field 'tools': expected a list of functions, each with a name, and with "
            "parameters that are an object"
        )
    return tools


def _is_schema(tool: object) -> bool:
    function = (tool.get("function") or tool) if isinstance(tool, Mapping) else None
    return (
        isinstance(function, Mapping)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("parameters") or {}, Mapping)
    )


def is_trained(index: int, message: Message) -> bool:
    """Return whether messages[index] of the assistant is trained on, by its `weight`.

    Raises:
        RequestError: The weight is neither 0 nor 1.
    """
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise RequestError(
            f"messages[{index}].weight: expected 0 (not trained on) or 1, got {weight!r:.50}"
        )
    return bool(weight)


def check_weight(index: int, message: Message) -> None:
    """Check the weight of messages[index], which is not the assistant's.

    Raises:
        RequestError: It says that the message is trained on.
    """
    if "weight" in message and is_trained(index, message):
        raise RequestError(
            f"messages[{index}].weight: only messages of the assistant are trained on"
        )


def check_calls(index: int, message: Message) -> None:
    """Check the calls of messages[index] of the assistant, as they are in the file.

    Raises:
        RequestError: The arguments of a call are not an object.
    """
    calls = message.get("tool_calls") or []
    fields = [(f"tool_calls[{number}].function", call) for number, call in enumerate(calls)]
    if not calls and message.get("function_call"):
        fields = [("function_call", message["function_call"])]
    for field, call in fields:
        arguments = call.get("function", call).get("arguments")
        if not _is_object(arguments):
            raise RequestError(
                f"messages[{index}].{field}.arguments: expected an object or its JSON text, got "
                f"{arguments!r:.50}; write a call that is meant to be malformed into the content"
            )


def _is_object(arguments: object) -> bool:
    if arguments is None or isinstance(arguments, Mapping):
        return True
    if not isinstance(arguments, str):
        return False
    try:
        return not arguments.strip() or isinstance(json.loads(arguments, strict=False), dict)
    except (ValueError, RecursionError):
        return False


def check_said(index: int, message: Message, text: str, tags: Sequence[str]) -> None:
    """Check that a chat template has written all that messages[index] of the assistant says.

    White space does not count: templates strip and break lines.

    Args:
        text: The prompt's end and the turn, as the template writes them.
        tags: Markup in the content, such as that of thoughts, which the template may write anew.

    Raises:
        RequestError: The template has left out a part.
    """
    written = _remove_space(text)
    pieces = {name: [message.get(name)] for name in _SAID if message.get(name)}
    if "reasoning_content" in pieces:
        pieces.pop("reasoning_details", None)  # the same again
    split = re.split("|".join(map(re.escape, tags)), message["content"]) if tags else []
    pieces["content"] = [*split] or [message["content"]]
    for name, parts in pieces.items():
        if all(isinstance(part, str) and _remove_space(part) in written for part in parts):
            continue
        raise RequestError(
            f"messages[{index}].{name}: the model's chat template has no place for it in a turn, "
            "so not all of it would be trained on: remove it, or set chat.template to a template "
            "that writes it"
        )


def _remove_space(text: str) -> str:
    """Return the text without white space, as a tokenizer may normalize it."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def check_answers(index: int, results: Sequence[Message], calls: Sequence[str]) -> None:
    """Check that results from messages[index] on answer the calls with these ids.

    Raises:
        RequestError: One answers another call, or a call that has an answer.
    """
    waiting = list(calls)
    for number, result in enumerate(results if calls else (), index):
        id = result.get("tool_call_id")
        if id in waiting:
            waiting.remove(id)
        elif id is not None:
            problem = "has a result already" if id in calls else f"is none of {', '.join(calls)}"
            raise RequestError(f"messages[{number}].tool_call_id: {id!r:.50} {problem}")
