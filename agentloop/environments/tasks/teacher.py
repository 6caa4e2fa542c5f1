"""A noisy teacher: synthetic dialogues that use Python for arithmetic, often wrongly. Pure.

Two in five of its calls fail on purpose and are retried. Most calls that succeed compute the wrong
operation or have their result ignored. Somewhat more than two in five dialogues end with the right
answer, which says little about the calls before it: a model that imitates this teacher must learn
from rewards what to compute and when to trust the tool, and from Resample-on-Correct to avoid
failing calls. Tool responses are written in the format of the runtime and the sandbox (a test
compares them), so no code has to run.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypedDict

from agentloop.agent.formats.values import decode_call
from agentloop.agent.sandbox_tools import PythonCode
from agentloop.agent.tools import Schema
from agentloop.environments.tasks.sources import Task, TaskSource, TasksSettings
from agentloop.trajectory import Message

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
# Frequency of each kind of call, in percent.
_CALLS = {
    "right": 26,
    "wrong": 16,  # computes another operation without an error
    "ignored": 18,  # is right, but the result is not used
    "broken": 18,  # is not valid JSON
    "unknown tool": 18,
    "syntax": 4,
}
_UNKNOWN = ("python", "calculator", "run_code")
_MAX_CALLS = 4


class TaughtDialogue(TypedDict):
    """A dialogue, as `agentloop sft` reads it."""

    messages: list[Message]
    tools: list[Schema]


@dataclass(frozen=True, slots=True)
class _Sum:
    """A first number and the operations applied to it, in order."""

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

    def with_other_operation(self, rng: Random) -> _Sum:
        """Return a copy whose last operation is a different one."""
        *before, (sign, number) = self.steps
        other_sign = rng.choice([candidate for candidate in _APPLY if candidate != sign])
        return _Sum(self.first, (*before, (other_sign, number)))


def lessons(count: int, *, levels: Sequence[int], seed: int = 0) -> Iterator[TaughtDialogue]:
    """Yield `count` dialogues about problems of these levels that no run holds out.

    Held-out problems, when given as a number, come from an eighth of all problems, which is
    excluded.
    """
    settings = TasksSettings(levels=list(levels), seed=seed, held_out=1)
    yield from dialogues(itertools.islice(TaskSource.open(settings), count), seed=seed)


def dialogues(tasks: Iterable[Task], *, seed: int = 0) -> Iterator[TaughtDialogue]:
    """Yield {"messages": [...], "tools": [...]} for each task of the kind `arithmetic`.

    The same task and seed give the same dialogue.
    """
    for task in tasks:
        assert isinstance(task.prompt, str)
        rng = Random(f"{seed} {task.id} {task.prompt}")
        messages: list[Message] = [
            {"role": "user", "content": task.prompt},
            *_turns(_parse(task.prompt), rng),
        ]
        yield {"messages": messages, "tools": [PythonCode.schema]}


def _parse(text: str) -> _Sum:
    first, *numbers = map(int, re.findall(r"\d+", text))
    signs = [_SIGNS[word] for word in re.findall("|".join(_SIGNS), text)]
    return _Sum(first, tuple(zip(signs, numbers, strict=True)))


def _turns(problem: _Sum, rng: Random) -> Iterator[Message]:
    for attempt in range(_MAX_CALLS):
        kind = rng.choices(list(_CALLS), list(_CALLS.values()))[0]
        sum_ = problem.with_other_operation(rng) if kind == "wrong" else problem
        call, response = _call(kind, sum_, rng)
        reason = "It failed. I try again." if attempt else "I compute it."
        yield _assistant(f"<reason>{reason}</reason>\n<tool_call>\n{call}\n</tool_call>")
        yield {"role": "tool", "content": response}
        if kind in ("right", "wrong"):
            yield _final_turn("The tool says so.", sum_.value)
            return
        if kind == "ignored":
            break
    yield _final_turn("I guess.", _guess(problem.value, rng))


def _call(kind: str, sum_: _Sum, rng: Random) -> tuple[str, str]:
    """Return the text inside the tags of a call, and the tool's response."""
    code = f"print({sum_})"
    if kind == "syntax":
        code = code[:-1]
        message = "SyntaxError: '(' was never closed"
        trace = f'  File "<call>", line 1\n    {code}\n         ^\n{message}'
        ending = f"[error] {message} (<call>, line 1) (line 1)"
        return _json(PythonCode.name, code), f"[stderr]\n{trace}\n{ending}"
    if kind == "unknown tool":
        name = rng.choice(_UNKNOWN)
        tools = PythonCode.name
        return _json(name, code), (
            f"[unknown tool] there is no tool {name!r}; the tools are: {tools}"
        )
    call = _json(PythonCode.name, code)
    if kind == "broken":
        call = rng.choice((call[:-1], call.replace(json.dumps(code), code)))
        _, _, error = decode_call(f"\n{call}\n")
        return call, f"[malformed tool call] {error}"
    return call, str(sum_.value)


def _json(name: str, code: str) -> str:
    return json.dumps({"name": name, "arguments": {"code": code}})


def _guess(value: int, rng: Random) -> int:
    """Return a wrong number of about the same size as `value`."""
    guessed = rng.randrange(10 ** len(str(abs(value))))
    return guessed + 1 if guessed == value else guessed


def _assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def _final_turn(reason: str, value: int) -> dict[str, str]:
    return _assistant(f"<reason>{reason}</reason>\n<answer>\\boxed{{{value}}}</answer>")
