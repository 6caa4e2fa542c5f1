"""Messages in OpenAI's format, as chat templates expect them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentloop.errors import RequestError

__all__ = ["for_template", "function_call", "num_chars", "tool_message", "with_ids"]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_DEPTH = 64


def for_template(index: int, message: object) -> dict[str, object]:
    """Return messages[index] with text as its content and objects as the arguments of calls.

    Raises:
        RequestError: The message is invalid; the error names it.
    """
    if not isinstance(message, Mapping):
        raise RequestError(f"messages[{index}]: expected an object, got {message!r:.50}")
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(f"messages[{index}].role: {role!r} is not a valid role")
    plain = {**message, "role": "system" if role == "developer" else role}
    plain["content"] = _text(index, message.get("content"))
    if isinstance(calls := message.get("tool_calls"), list):
        plain["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return plain


def with_ids(
    messages: Sequence[dict[str, object]], id_of: Callable[[str, str, int], str]
) -> list[dict[str, object]]:
    """Return the messages with other ids of their calls.

    Args:
        id_of: Returns the id of a call from its id, its name and its number in the conversation.
    """
    ids: dict[str, str] = {}
    changed = []
    for message in messages:
        if isinstance(calls := message.get("tool_calls"), list):
            made = []
            for call in calls:
                function = call.get("function") if isinstance(call, Mapping) else None
                name = function.get("name") if isinstance(function, Mapping) else None
                id = str(call.get("id") or "") if isinstance(call, Mapping) else ""
                new = id_of(id, str(name), len(ids))
                ids[id or new] = new
                made.append({**call, "id": new} if isinstance(call, Mapping) else call)
            message = {**message, "tool_calls": made}
        if (answered := message.get("tool_call_id")) in ids:
            message = {**message, "tool_call_id": ids[answered]}
        changed.append(message)
    return changed


def function_call(id: str, name: str, arguments: object) -> dict[str, object]:
    """Return a tool call of an assistant's message."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_message(call_id: str, content: str) -> dict[str, object]:
    """Return the message with a call's response."""
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def num_chars(value: object) -> int:
    """Return the total length of all strings in `value`, at any depth.

    Raises:
        RequestError: The value is nested too deeply.
    """
    total, pending = 0, [(value, 0)]
    while pending:
        item, depth = pending.pop()
        if depth > _MAX_DEPTH:
            raise RequestError(f"messages: nested more than {_MAX_DEPTH} levels deep")
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            pending += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, list | tuple):
            pending += [(part, depth + 1) for part in item]
    return total


def _with_parsed_arguments(call: Any) -> object:
    """Parse a call's arguments if they are a JSON string, as OpenAI's clients send them."""
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _text(index: int, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(texts)  # type: ignore[arg-type]
    raise RequestError(f"messages[{index}].content: expected a string or text parts")
