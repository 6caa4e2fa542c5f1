"""Identify messages, so that a history can be compared with what a session knows.

Two messages have the same key if no chat template can tell them apart: how JSON is spaced does not
matter, and neither do the ids of calls, except for which call a response belongs to. A client's
history of the assistant's turns is compared without reasoning, which most clients do not send back,
and without space around its text; what a client has written itself is compared with both.

Other fields of a message, of a call or of its function belong to a key if the template reads them.

Keys are digests: a session keeps them, and a message, or the variables of a template, may be long
although hardly anything of it is in the prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from agentloop.plain_json import JsonObject, dumps, valid_text
from agentloop.trajectory import Message

Reads = Callable[[str, str], bool]
"""Returns whether the chat template reads a field of a role's messages, of a call or a function."""

_MAX_CACHED_CHARS = 2000
_FIELDS = frozenset(
    ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")
)
_CALL_FIELDS = frozenset(("id", "type", "function"))
_FUNCTION_FIELDS = frozenset(("name", "arguments"))


def keys_of(
    messages: Sequence[Message], reads: Reads = lambda kind, name: False, begin: int = 0
) -> list[bytes]:
    """Return a key for each message; the position of a response's call belongs to its key.

    Args:
        reads: returns whether another field belongs to it.
        begin: number of messages that need none.
    """
    keys: list[bytes] = []
    before = (
        previous for previous in reversed(messages[:begin]) if previous.get("role") == "assistant"
    )
    ids = call_ids_of(next(before, {}))  # of the newest message of the assistant
    for message in messages[begin:]:
        role = message.get("role")
        text = text_of(message)
        fields: list[object] = ["system" if role == "developer" else role, text]
        if role == "assistant":
            # Clients get it without surrounding space, and some join parts of it with their own.
            fields[1] = text.strip()
            fields.append([_call_key(call, reads) for call in message.get("tool_calls") or ()])
            ids = call_ids_of(message)
        elif role == "tool":
            id = message.get("tool_call_id")
            fields.append(ids.index(id) if id in ids else None)
        if name := message.get("name"):
            fields.append(["name", name])
        if more := _more_fields(message, _FIELDS, str(role), reads):
            fields.append(more)
        keys.append(_digest(fields))
    return keys


def given_keys_of(
    messages: Sequence[Message], sampled_keys: Sequence[bytes], begin: int = 0
) -> list[bytes]:
    """Return a key for each message as one that the client has written.

    Reasoning, and space around the text, are part of it.

    Args:
        sampled_keys: their keys by `keys_of`.
        begin: number of messages that need none.
    """
    keys = list(sampled_keys)
    for index, message in enumerate(messages[begin:]):
        thoughts = [message.get("reasoning_content"), message.get("reasoning")]
        text = text_of(message)
        if any(thoughts) or text != text.strip():
            keys[index] = _digest([keys[index].hex(), *thoughts, text])
    return keys


def context_key(
    tools: Sequence[Mapping[str, object]], template_arguments: Mapping[str, object]
) -> bytes:
    """Return a key of what else a prompt is made from."""
    return _digest([list(tools), sorted(template_arguments.items())])


def opening_key(context: bytes, messages: Sequence[Message], *, is_continued: bool) -> str:
    """Return a key of what a conversation is for: its context and the system's messages.

    Args:
        is_continued: whether it begins after messages of the model.
    """
    system = [m for m in messages if m.get("role") in ("system", "developer")]
    return _digest([context.hex(), [text_of(m) for m in system], is_continued]).hex()[:16]


def request_key(context: bytes, messages: Sequence[Message]) -> bytes:
    """Return a key that a request shares with those that ask the same again."""
    return _digest(
        [context.hex(), *(key.hex() for key in given_keys_of(messages, keys_of(messages)))]
    )


def text_of(message: Message) -> str:
    """Return a message's text; parts of it are joined."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content)
    if not content:
        return ""
    return content if content.isascii() else valid_text(content)


def question_in(messages: Sequence[Message]) -> str:
    """Return the text of the user's last message, or an empty one if there is none."""
    return next(
        (text_of(message) for message in reversed(messages) if message.get("role") == "user"), ""
    )


def reasoning_of(message: Message) -> str | None:
    """Return the reasoning that a message carries, without surrounding space; None: it has none."""
    text = message.get("reasoning_content") or message.get("reasoning")
    return text.strip() if isinstance(text, str) and text.strip() else None


def has_more_fields(message: Message) -> bool:
    """Return whether a message, a call in it or its function has other fields than are known."""
    return not (
        _FIELDS.issuperset(message)
        and all(
            _CALL_FIELDS.issuperset(call)
            and _FUNCTION_FIELDS.issuperset(call.get("function") or ())
            for call in message.get("tool_calls") or ()
        )
    )


def call_ids_of(message: Message) -> list[str]:
    """Return the ids of a message's calls."""
    return [str(call.get("id") or "") for call in message.get("tool_calls") or ()]


def with_our_ids(messages: Sequence[Message], from_client: Message, ours: Message) -> list[Message]:
    """Return the messages after a turn, whose responses refer to its calls by the ids we gave.

    Args:
        from_client: the turn as its client has sent it back.
        ours: the turn as its client got it.
    """
    ids = dict(zip(call_ids_of(from_client), call_ids_of(ours), strict=False))
    renamed = list(messages)
    for index, message in enumerate(messages):
        if message.get("role") == "assistant":  # the next turn has calls of its own
            break
        if (id := message.get("tool_call_id")) in ids:
            renamed[index] = {**message, "tool_call_id": ids[id]}
    return renamed


def _digest(value: object) -> bytes:
    return hashlib.blake2b(dumps(value), digest_size=32).digest()


def _more_fields(
    value: Mapping[str, object], known_fields: frozenset[str], kind: str, reads: Reads
) -> list[object]:
    """Return the names and the values of further fields that the template reads."""
    if known_fields.issuperset(value):
        return []
    return [
        [name, value[name]]
        for name in sorted(value.keys() - known_fields)
        if value[name] not in (None, [], {}) and reads(kind, name)
    ]


def _call_key(call: JsonObject, reads: Reads) -> list[object]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = _plain_arguments(arguments)
    elif len(arguments) <= _MAX_CACHED_CHARS:
        arguments = _arguments_in(arguments)
    else:
        arguments = _arguments_in.__wrapped__(arguments)
    more = [
        *_more_fields(call, _CALL_FIELDS, "call", reads),
        *_more_fields(function, _FUNCTION_FIELDS, "function", reads),
    ]
    return [function.get("name"), arguments, *more]


@lru_cache(8192)  # a history is sent again with each request
def _arguments_in(text: str) -> str:
    try:
        return _plain_arguments(json.loads(text))
    except (ValueError, RecursionError):
        return text


def _plain_arguments(arguments: object) -> str:
    # The order of keys stays: a template writes it.
    return json.dumps(arguments, ensure_ascii=False)
