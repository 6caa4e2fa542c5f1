"""Messages in OpenAI's format, in the one form that chat templates are given.

    clients, files, environments ──normal_form──> messages ──a chat template──> text

Clients and data sets write the same message in many ways, and templates differ in which of them
they can read: some test whether a key is there, others walk through the arguments of calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentloop.errors import RequestError, Unsupported
from agentloop.plain_json import with_whole_pairs

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",  # of the older form
}
_MAX_DEPTH = 64
_UNREADABLE = "arguments"  # the one argument of a call whose arguments are no JSON object
_TEXT_ONLY = "the model reads text only"


def normal_form(
    messages: Sequence[object],
    calls: Sequence[tuple[str, str]] = (),
    *,
    in_call_order: bool = True,
) -> list[dict[str, object]]:
    """Return messages in the form that chat templates are given.

    - No key has the value null, and `tool_calls` is not empty.
    - The role is system, user, assistant or tool; the content is a string.
    - Each call has an id and a function whose arguments are an object: also those of the older form
      (`function_call`), and those without arguments (`""`, `null`). Arguments that are not a JSON
      object, because their call was cut, are an object with their text as its `arguments`.
    - Results have the id of the call that they answer, and are in the order of the calls, from
      which a template that does not write ids tells whose they are.
    - Reasoning is `reasoning_content`.

    The form of messages in this form is the same again.

    Args:
        calls: The ids and names of the calls before the first message, to which results refer.
        in_call_order: Whether to bring results into the order of the calls.

    Raises:
        RequestError: A message is invalid; the error names it and the field.
    """
    form = _Form(calls, in_call_order)
    for index, message in enumerate(messages):
        form.add(f"messages[{index}]", message)
    return form.messages


class _Form:
    """Collects messages in the normal form."""

    def __init__(self, calls: Sequence[tuple[str, str]], in_call_order: bool) -> None:
        self._in_call_order = in_call_order
        self.messages: list[dict[str, object]] = []
        self._num_calls = 0
        self._order = [id for id, _ in calls]  # of the newest calls
        self._unanswered = dict(calls)
        self._results: list[dict[str, object]] = []

    def add(self, where: str, message: object) -> None:
        if not isinstance(message, Mapping):
            raise RequestError(f"{where}: expected an object, got {message!r:.50}")
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise RequestError(f"{where}.role: {role!r} is not a valid role")
        plain = {name: value for name, value in message.items() if value is not None}
        for name in ("name", "tool_call_id", "reasoning_content"):
            _check_text(f"{where}.{name}", plain.get(name, ""))
        plain["role"] = _ROLES[role]
        plain["content"] = text_of(f"{where}.content", message.get("content"), plain["role"])
        if "reasoning_content" not in plain and isinstance(plain.get("reasoning"), str):
            plain["reasoning_content"] = plain.pop("reasoning")
        if plain["role"] == "tool":
            self._add_result(plain, plain.pop("name", "") if role == "function" else "")
            return
        calls = self._calls(where, plain.pop("tool_calls", None), plain.pop("function_call", None))
        if calls:
            plain["tool_calls"] = calls
        if plain["role"] == "assistant":
            self._order = [call["id"] for call in calls]
            self._unanswered = {call["id"]: call["function"]["name"] for call in calls}
            self._results = []
        else:
            self._order, self._unanswered = [], {}
        self.messages.append(plain)

    def _add_result(self, plain: dict[str, object], name: object) -> None:
        """Add a call's result."""
        id = plain.get("tool_call_id")
        if not id:
            waiting = [id for id in self._unanswered if self._unanswered[id] == name]
            id = next(iter(waiting or self._unanswered), None)
        if id is not None:
            plain["tool_call_id"] = id
            self._unanswered.pop(str(id), None)
        self.messages.append(plain)
        if self._in_call_order and self._order:
            self._results.append(plain)
            self._results.sort(key=self._place)
            self.messages[-len(self._results) :] = self._results

    def _place(self, result: Mapping[str, object]) -> int:
        id = result.get("tool_call_id")
        return self._order.index(id) if id in self._order else len(self._order)

    def _calls(self, where: str, calls: object, older: object) -> list[dict[str, Any]]:
        if older is not None and not calls:
            return [self._call(where, {"function": older}, f"{where}.function_call")]
        if not isinstance(calls, list | tuple | None):
            raise RequestError(f"{where}.tool_calls: expected a list, got {calls!r:.50}")
        return [
            self._call(f"{where}.tool_calls[{number}]", call)
            for number, call in enumerate(calls or ())
        ]

    def _call(self, where: str, call: object, function_at: str = "") -> dict[str, object]:
        function_at = function_at or f"{where}.function"
        if not isinstance(call, Mapping):
            raise RequestError(f"{where}: expected an object, got {call!r:.50}")
        plain = {name: value for name, value in call.items() if value is not None}
        if isinstance(custom := plain.pop("custom", None), Mapping):  # a tool that takes text
            text = json.dumps({"input": custom.get("input")}, ensure_ascii=False)
            plain["function"] = {"name": custom.get("name"), "arguments": text}
        if "function" not in plain and "name" in plain:  # as in some data sets
            bare = {name: plain.pop(name) for name in ("name", "arguments") if name in plain}
            plain["function"] = bare
        function = plain.get("function")
        if not isinstance(function, Mapping):
            raise RequestError(f"{function_at}: expected an object, got {function!r:.50}")
        _check_text(f"{function_at}.name", function.get("name"))
        _check_text(f"{where}.id", plain.get("id", ""))
        plain["function"] = {
            **{field: value for field, value in function.items() if value is not None},
            "arguments": _arguments(function.get("arguments")),
        }
        plain["type"] = "function"
        plain["id"] = plain.get("id") or f"call{self._num_calls:05}"
        self._num_calls += 1
        return plain


def _check_text(where: str, value: object) -> None:
    if not isinstance(value, str):
        raise RequestError(f"{where}: expected a string, got {value!r:.50}")


def _arguments(arguments: object) -> dict[str, object]:
    """Return the arguments of a call, which may be JSON text as OpenAI's clients send them."""
    if isinstance(arguments, str):
        if not arguments.strip():
            return {}
        try:  # models write raw newlines into strings
            value = json.loads(with_whole_pairs(arguments), strict=False)
        except (ValueError, RecursionError):
            return {_UNREADABLE: arguments}
        return _arguments(value)  # some clients encode the text again
    if arguments is None:
        return {}
    return dict(arguments) if isinstance(arguments, Mapping) else {_UNREADABLE: arguments}


def text_of(where: str, content: object, role: str) -> str:
    """Return the text of a message's content: a string, or parts.

    Args:
        where: The content's path, for errors.

    Raises:
        RequestError: It has a part without text, and is not the result of a call.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(f"{where}: expected a string or text parts, got {content!r:.50}")
    return "".join(
        _text_of_part(f"{where}[{index}]", part, role) for index, part in enumerate(content)
    )


def _text_of_part(where: str, part: object, role: str) -> str:
    if isinstance(part, Mapping):
        kind = part.get("type")
        for name in ("text", "refusal"):
            if kind in (name, f"input_{name}", f"output_{name}"):
                _check_text(f"{where}.{name}", part.get(name))
                return str(part[name])
        if isinstance(kind, str):
            if role == "tool":  # no reason to end a conversation
                return note_omission(kind)
            raise Unsupported(
                f'{where}.type: "{kind:.50}" is not supported by this server: {_TEXT_ONLY}'
            )
    raise RequestError(f"{where}: expected a text part, got {part!r:.50}")


def note_omission(kind: str) -> str:
    """Return the text that stands for a part of a call's result that is no text."""
    return f"[{kind} omitted: {_TEXT_ONLY}]"


def one_call_each(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the normal form, in which none of the assistant has several calls.

    A message with several becomes one for each call, followed by its result.
    """
    split: list[dict[str, Any]] = []
    index = 0
    while index < len(messages):
        message, index = messages[index], index + 1
        if len(calls := message.get("tool_calls") or ()) < 2:
            split.append(message)
            continue
        begin = index
        while index < len(messages) and messages[index]["role"] == "tool":
            index += 1
        results = list(messages[begin:index])
        for number, call in enumerate(calls):
            fields = message if not number else {"role": message["role"], "content": ""}
            split.append({**fields, "tool_calls": [call]})
            split += [result for result in results if result.get("tool_call_id") == call["id"]]
        ids = {call["id"] for call in calls}
        split += [result for result in results if result.get("tool_call_id") not in ids]
    return split


def with_ids(
    messages: Sequence[dict[str, Any]], id_of: Callable[[str, str, int], str], num_calls: int = 0
) -> list[dict[str, Any]]:
    """Return messages in the normal form with other ids of their calls.

    Args:
        id_of: Returns the id of a call from its id, its name and its number in the conversation.
        num_calls: Number of calls before the messages.
    """
    ids: dict[object, str] = {}
    changed = []
    for message in messages:
        if calls := message.get("tool_calls"):
            renamed = []
            for call in calls:
                ids[call["id"]] = new = id_of(call["id"], call["function"]["name"], num_calls)
                renamed.append({**call, "id": new})
                num_calls += 1
            message = {**message, "tool_calls": renamed}
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
