"""A noisy teacher: dialogues in which arithmetic is left to Python, and often goes wrong. Pure.

Half of its calls fail, on purpose, and are tried again; where one does not fail, it computes
something else than was asked for, or its result is not listened to, more often than not. So a
third of the dialogues ends with the right answer, and a right answer says little about the calls
before it: who imitates this teacher has to learn from rewards what to compute and whom to believe,
and from Resample-on-Correct to make no failing calls. What the tool answers is written as the
runtime and the sandbox write it (a test holds it against them), so nothing has to run.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from agentloop.agent.sandbox_tools import PythonCode
from agentloop.agent.tool_stream import decode_call
from agentloop.groups.tasks import Task, TaskSource, TasksSettings

__all__ = ["dialogues", "lessons"]

_SIGNS = {
    "plus": "+",
    "add": "+",
    "minus": "-",
    "subtract": "-",
    "times": "*",
    "multiply by": "*",
}
_APPLY = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
# How often a call goes which way, in percent.
_CALLS = {
    "right": 17,
    "wrong": 15,  # another operation: nothing looks amiss
    "ignored": 18,  # it is right, and is not listened to
    "broken": 22,  # not JSON
    "unknown tool": 22,
    "syntax": 6,
}
_UNKNOWN = ("python", "calculator", "run_code")
_MAX_CALLS = 4


@dataclass(frozen=True, slots=True)
class _Sum:
    """A first number, and what is done to it, step by step."""

    first: int
    steps: tuple[tuple[str, int], ...]

    @property
    def value(self) -> int:
        value = self.first
        for sign, number in self.steps:
            value = _APPLY[sign](value, number)
        return value

    def __str__(self) -> str:
        text = str(self.first)
        for index, (sign, number) in enumerate(self.steps):
            text = f"({text}) {sign} {number}" if index else f"{text} {sign} {number}"
        return text

    def changed(self, rng: Random) -> _Sum:
        """With another last operation."""
        *before, (sign, number) = self.steps
        other = rng.choice([one for one in _APPLY if one != sign])
        return _Sum(self.first, (*before, (other, number)))


def lessons(count: int, *, levels: Sequence[int], seed: int = 0) -> Iterator[dict[str, Any]]:
    """`count` dialogues about problems of these levels, none of which any run may hold out: a
    number of held-out problems comes from an eighth of all, and that eighth is left out here."""
    settings = TasksSettings(levels=list(levels), seed=seed, held_out=1)
    yield from dialogues(itertools.islice(TaskSource.open(settings), count), seed=seed)


def dialogues(tasks: Iterable[Task], *, seed: int = 0) -> Iterator[dict[str, Any]]:
    """A dialogue about each task of the kind `arithmetic`: {"messages": [...], "tools": [...]}.

    The same task and seed give the same dialogue.
    """
    for task in tasks:
        assert isinstance(task.prompt, str)
        rng = Random(f"{seed} {task.id} {task.prompt}")
        messages = [{"role": "user", "content": task.prompt}, *_turns(_read(task.prompt), rng)]
        yield {"messages": messages, "tools": [PythonCode.schema]}


def _read(text: str) -> _Sum:
    first, *numbers = map(int, re.findall(r"\d+", text))
    signs = [_SIGNS[word] for word in re.findall("|".join(_SIGNS), text)]
    return _Sum(first, tuple(zip(signs, numbers, strict=True)))


def _turns(asked: _Sum, rng: Random) -> Iterator[dict[str, str]]:
    for attempt in range(_MAX_CALLS):
        how = rng.choices(list(_CALLS), list(_CALLS.values()))[0]
        sum_ = asked.changed(rng) if how == "wrong" else asked
        call, response = _call(how, sum_, rng)
        reason = "It failed. I try again." if attempt else "I compute it."
        yield _says(f"<reason>{reason}</reason>\n<tool_call>\n{call}\n</tool_call>")
        yield {"role": "tool", "content": response}
        if how in ("right", "wrong"):
            yield _answers("The tool says so.", sum_.value)
            return
        if how == "ignored":
            break
    yield _answers("I guess.", _guess(asked.value, rng))


def _call(how: str, sum_: _Sum, rng: Random) -> tuple[str, str]:
    """What stands between the tags of a call, and what the tool answers."""
    code = f"print({sum_})"
    if how == "syntax":
        code = code[:-1]
        said = "SyntaxError: '(' was never closed"
        trace = f'  File "<call>", line 1\n    {code}\n         ^\n{said}'
        ending = f"[error] {said} (<call>, line 1) (line 1)"
        return _json(PythonCode.name, code), f"[stderr]\n{trace}\n{ending}"
    if how == "unknown tool":
        name = rng.choice(_UNKNOWN)
        known = PythonCode.name
        return _json(name, code), (
            f"[unknown tool] there is no tool {name!r}; the tools are: {known}"
        )
    call = _json(PythonCode.name, code)
    if how == "broken":
        call = rng.choice((call[:-1], call.replace(json.dumps(code), code)))
        _, _, error = decode_call(f"\n{call}\n")
        return call, f"[malformed tool call] {error}"
    return call, str(sum_.value)


def _json(name: str, code: str) -> str:
    return json.dumps({"name": name, "arguments": {"code": code}})


def _guess(value: int, rng: Random) -> int:
    """A number of about that size, and another one."""
    guessed = rng.randrange(10 ** len(str(abs(value))))
    return guessed + 1 if guessed == value else guessed


def _says(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def _answers(reason: str, value: int) -> dict[str, str]:
    return _says(f"<reason>{reason}</reason>\n<answer>\\boxed{{{value}}}</answer>")
