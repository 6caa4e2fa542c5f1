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
    "Task",
    "describe",
    "level_of",
    "line_of",
    "plain_fields",
    "problem_of",
    "problem_of_row",
    "problem_text",
    "row_digest",
    "shown_digest",
    "task_digest",
    "task_of",
]

# Of the 32 digits of a row's id: what the model is shown, what it is graded by, other fields.
_NUM_SHOWN_DIGITS, _NUM_PROBLEM_DIGITS = 12, 20
_ROW_NUMBERS = ("row", "index")  # fields of an environment's tasks that the model is not shown


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
        source_line: File and line, or data set and row, that it was read from; otherwise empty.
    """

    id: str
    prompt: str | Sequence[Message]
    answer: str
    source: str = ""
    level: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    env: str = ""
    source_line: str = field(default="", compare=False)

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
    for name in ("env", "extra", "source_line"):
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
    if isinstance(level, float):  # from a column of integers with missing values, which are NaN
        level = None if math.isnan(level) else int(level) if level.is_integer() else level
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


def row_digest(prompt: str | Sequence[Message], answer: str, other_fields: object) -> str:
    """Return 32 hexadecimal digits for a row of a file, the first of which are the problem's.

    They do not depend on the whitespace of the prompt.
    """
    parts = problem_text(prompt), answer, _canonical(other_fields)
    shown, graded, others = map(task_digest, parts)
    num_graded = _NUM_PROBLEM_DIGITS - _NUM_SHOWN_DIGITS
    return shown[:_NUM_SHOWN_DIGITS] + graded[:num_graded] + others[: 32 - _NUM_PROBLEM_DIGITS]


def problem_of(task: Task) -> str:
    """Return what is equal for tasks that show the model the same and grade it by the same.

    Such rows of a file may differ in their number, source, level or other fields.
    """
    return task.id.removesuffix(_row_digits(task)[_NUM_PROBLEM_DIGITS:])


def problem_of_row(id: str) -> str:
    """Return `problem_of` a row of a file by its id, which a run of several environments prefixes.

    Other ids are returned as they are.
    """
    row = id.rpartition("-")[2]
    return row[:_NUM_PROBLEM_DIGITS] if re.fullmatch("[0-9a-f]{32}", row) else id


def shown_digest(task: Task) -> str:
    """Return the digits that decide whether a task is held out: those of what the model is shown.

    Of a row of a file, that is the prompt without system messages. What an environment shows is
    not known: all fields count there, except the id, source and level, and a row number if there is
    a prompt.
    """
    if digits := _row_digits(task):
        return digits[:_NUM_SHOWN_DIGITS]
    extra = {k: v for k, v in task.extra.items() if not task.prompt or k not in _ROW_NUMBERS}
    shown = [task.prompt, extra] if task.prompt or extra else [task.id]
    return _digest(_canonical([*shown, task.answer]))[:_NUM_SHOWN_DIGITS]


def _row_digits(task: Task) -> str:
    """Return the digest of a row of a file; an empty text for other tasks."""
    return task.id[-32:] if task.source_line else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _canonical(plain: object) -> str:
    return json.dumps(plain, sort_keys=True, ensure_ascii=False)


def describe(value: object) -> str:
    """Return a value for an error message: its beginning, or its type."""
    return f"{value!r:.60}" if isinstance(value, str | int | float) else type(value).__name__
