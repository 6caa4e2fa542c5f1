"""A task: a prompt, an answer and additional fields, all plain data.

Plain data is what JSON gives back, so a task is the same before and after a resume and on every
machine, and so is its digest.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import traceback
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agentloop.errors import DataError
from agentloop.plain_json import JsonObject, dumps, loads
from agentloop.trajectory import Message

__all__ = [
    "NUM_PROBLEM_DIGITS",
    "Task",
    "describe",
    "is_digest",
    "level_of",
    "line_of",
    "plain_fields",
    "problem_digits",
    "problem_text",
    "row_digest",
    "task_digest",
    "task_of",
]

NUM_PROBLEM_DIGITS = 16  # of the 32 of an id


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt and its answer.

    Attributes:
        id: Identifies the task across runs, independent of the settings `template` and `system`.
        prompt: A question, or a conversation in OpenAI's format.
        source: Name of the data set.
        level: Difficulty, or 0 if the source does not give one.
        extra: Additional fields of the source.
        env: Name of its environment in a run with several; otherwise empty.
    """

    id: str
    prompt: str | Sequence[Message]
    answer: str
    source: str = ""
    level: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    env: str = ""

    def __getattr__(self, name: str) -> Any:
        """Return an additional field as an attribute, for environments: `task.top`."""
        if not name.startswith("_") and name in self.extra:
            return self.extra[name]
        raise AttributeError(f"the task has no field {name!r}")


def task_of(fields: object, where: str) -> Task:
    """Make a task of the fields that an environment gives.

    Its id is that of the field `id` or, without one, a digest of all fields.

    Raises:
        DataError: the fields are not a dict of plain data, or one has a name that agentloop sets.
    """
    if not isinstance(fields, Mapping):
        raise DataError(f"{where}: expected the fields of a task, a dict, not {fields!r:.100}")
    for name in ("env", "extra"):
        if name in fields:
            raise DataError(f"{where}: field {name!r}: agentloop sets it: choose another name")
    plain = plain_fields(fields, where)
    if len(plain) < len(fields):
        raise DataError(f"{where}: two names of fields are the same as text")
    for name, value in fields.items():
        try:
            _check_unchanged(value, plain[str(name)])
        except ValueError as error:
            raise DataError(f"{where}: field {name!r}: {error}") from error
    digest = _digest(_canonical(plain))
    id = plain.pop("id", digest)
    if not isinstance(id, str | int) or not str(id).strip():
        raise DataError(f"{where}: field 'id': expected text or a whole number, got {describe(id)}")
    prompt, answer = plain.pop("prompt", ""), plain.pop("answer", None)
    source = str(plain.pop("source", "environment"))
    level = level_of(plain.pop("level", None), where)
    return Task(str(id), prompt, "" if answer is None else str(answer), source, level, plain)


def plain_fields(fields: Mapping[str, object], where: str) -> JsonObject:
    """Return the fields as JSON gives them back: tuples as lists, keys as text.

    Raises:
        DataError: a field has what JSON cannot represent; the message begins with `where`.
    """
    plain = {}
    for name, value in fields.items():
        try:
            plain[str(name)] = loads(dumps(value, default=None))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{where}: field {name!r}: {error}: use text, numbers, lists and dicts"
            ) from error
    return plain


def _check_unchanged(value: object, plain: Any) -> None:
    """Raise ValueError if `plain`, which JSON gives back for plain data, lacks a part of it."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    if isinstance(value, Mapping):
        if len(plain) < len(value):
            raise ValueError("two keys are the same as text")
        value, plain = [*value.values()], plain.values()
    if isinstance(value, list | tuple):
        for part, plain_part in zip(value, plain, strict=True):
            _check_unchanged(part, plain_part)


def problem_text(prompt: str | Sequence[Message]) -> str:
    """Return the text of a prompt, without system messages; of a single question the question."""
    if isinstance(prompt, str):
        return prompt
    messages = [message for message in prompt if message["role"] != "system"]
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def level_of(level: object, where: str) -> int:
    """Parse a number or text such as "Level 5"; return 0 if there is none."""
    if level is None or level == "":
        return 0
    try:
        return int(str(level).lower().removeprefix("level"))
    except ValueError:
        if level == "Level ?":  # occurs in MATH
            return 0
        raise DataError(
            f"{where}: field 'level': expected a number, got {describe(level)}"
        ) from None


def line_of(function: Callable[..., object], error: Exception | None = None) -> str:
    """Return file:line of a function, or of its last line that `error` has come through."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None)
    if code is None:
        return repr(function)
    frames = traceback.extract_tb(error.__traceback__ if error else None)
    lines = [frame.lineno for frame in frames if frame.filename == code.co_filename]
    return f"{code.co_filename}:{lines[-1] if lines else code.co_firstlineno}"


def task_digest(text: str) -> str:
    """Return 32 hexadecimal digits that do not depend on the whitespace of the text."""
    plain = " ".join(unicodedata.normalize("NFC", text).split())
    return _digest(plain)


def row_digest(problem: object, other_fields: object) -> str:
    """Return 32 hexadecimal digits for a row of a file; the first half are the problem's.

    They do not depend on the problem's whitespace.
    """
    halves = task_digest(_canonical(problem)), _digest(_canonical(other_fields))
    return "".join(half[:NUM_PROBLEM_DIGITS] for half in halves)


def is_digest(id: str) -> bool:
    """Return whether an id is a digest, and not one that a task was given."""
    return re.fullmatch("[0-9a-f]{32}", id) is not None


def problem_digits(id: str) -> str:
    """Return the digits of a task's id that decide whether it is held out."""
    return (id if is_digest(id) else _digest(id))[:NUM_PROBLEM_DIGITS]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _canonical(plain: object) -> str:
    return json.dumps(plain, sort_keys=True, ensure_ascii=False)


def describe(value: object) -> str:
    """Return a value for an error message: its beginning, or its type."""
    return f"{value!r:.60}" if isinstance(value, str | int | float) else type(value).__name__
