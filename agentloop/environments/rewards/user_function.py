"""Reward functions of the user's, called in the form that they were written for.

    (trajectory, task)                                        of agentloop
    (data_source, solution_str, ground_truth, extra_info)     of verl
    (prompts, completions, **columns)                         of TRL

A function is recognized by the names of its parameters.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import is_dataclass
from importlib import import_module
from operator import attrgetter
from typing import SupportsFloat

from agentloop.environments.tasks.task import Task, line_of, problem_text
from agentloop.errors import RewardError, SettingsError, summary_of
from agentloop.trajectory import Trajectory

__all__ = ["ask", "call", "check"]

Function = Callable[..., object]

_FORMS = (
    "(trajectory, task), verl's (data_source, solution_str, ground_truth, extra_info) and TRL's "
    "(prompts, completions, **columns)"
)
_ANSWERS = ("answer", "ground_truth", "label", "solution", "target")
# What other libraries name the parameters of functions that are not called in these forms.
_FOREIGN = {
    *("answers", "completion", "data_source", "gold", "info", "labels", "messages", "output"),
    *("outputs", "prediction", "predictions", "prompt", "prompts", "reference", "references"),
    *("response", "responses", "state", "targets", *_ANSWERS),
}  # fmt: skip
# What a function raises that finds text where it expects messages.
_UNLIKE_MESSAGES = AttributeError, KeyError, TypeError
_CONTROL_TOKENS = re.compile(r"(?:\s*(?:<\|[^|<>\s]{1,40}\|>|</s>))+\s*\Z")


def call(name: str, trajectory: Trajectory, task: Task) -> object:
    """Call the function `module:name`, as `ask` does, in a process of its own."""
    return ask(_find(name), trajectory, task)


def check(name: str) -> None:
    """Raise SettingsError if the function `module:name` cannot be called in any of the forms."""
    _form_of(_find(name))


def ask(function: Function, trajectory: Trajectory, task: Task) -> object | Awaitable[object]:
    """Return what a function says of a rollout, or an awaitable of that if it is async.

    It is a number, None, a Reward or a mapping with the fields of one.

    Raises:
        RewardError: the function raised, or returned something else; the message names its line.
        SettingsError: it cannot be called in any of the forms.
    """
    form = _form_of(function)
    try:
        value = form(function, trajectory, task)
    except MemoryError:  # ends the process
        raise
    except Exception as error:
        raise _failure(function, error) from error
    return _wait(function, value) if inspect.isawaitable(value) else _check_value(function, value)


async def _wait(function: Function, value: Awaitable[object]) -> object:
    try:
        result = await value  # no deadline: the caller has one
    except MemoryError:
        raise
    except Exception as error:
        raise _failure(function, error) from error
    return _check_value(function, result)


def _failure(function: Function, error: Exception) -> RewardError:
    return RewardError(f"{summary_of(error)} ({line_of(function, error)})")


def _check_value(function: Function, value: object) -> object:
    if value is None or is_dataclass(value) or isinstance(value, Mapping | SupportsFloat):
        return value  # the caller knows a Reward
    raise RewardError(f"expected a number or a Reward, not {value!r:.100} ({line_of(function)})")


def _find(name: str) -> Function:
    module, _, path = name.partition(":")
    function: Function = attrgetter(path)(import_module(module))
    return function


def _form_of(function: Function) -> Callable[[Function, Trajectory, Task], object]:
    if not callable(function):
        raise SettingsError(f"expected a function, not {function!r:.100}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # not written in Python
        return _call_ours
    parameters = signature.parameters
    if "solution_str" in parameters:
        return _call_verl
    if "completions" in parameters:
        return _call_trl
    required = [name for name, it in parameters.items() if it.default is it.empty]
    try:
        signature.bind(None, None)
    except TypeError:
        is_ours = False
    else:
        is_ours = _FOREIGN.isdisjoint(required)
    if not is_ours:
        raise SettingsError(
            f"{line_of(function)}: its parameters are {signature}: the forms that work are {_FORMS}"
        )
    return _call_ours


def _call_ours(function: Function, trajectory: Trajectory, task: Task) -> object:
    return function(trajectory, task)


def _call_verl(function: Function, trajectory: Trajectory, task: Task) -> object:
    values = {
        "data_source": task.source,
        "solution_str": _text_of(trajectory),
        "ground_truth": task.answer,
        "extra_info": dict(task.extra),
    }
    value = function(**_arguments(function, values))
    return _await_verl(value) if inspect.isawaitable(value) else _reward_of_verl(value)


async def _await_verl(value: Awaitable[object]) -> object:
    return _reward_of_verl(await value)  # no deadline: the caller has one


def _reward_of_verl(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    if "score" not in value:
        raise ValueError(f"verl's form returns a number or a dict with 'score', not {value!r:.100}")
    numbers = {
        str(name): part
        for name, part in value.items()
        if name != "score" and isinstance(part, SupportsFloat) and not isinstance(part, str)
    }
    return {"value": value["score"], "answer": None, "reason": "verl's form", "parts": numbers}


def _call_trl(function: Function, trajectory: Trajectory, task: Task) -> object:
    first, *further = _arguments_of_trl(function, trajectory, task)
    if inspect.iscoroutinefunction(function):
        return _await_trl(function, first, further)
    try:
        return _reward_of_trl(function(**first))
    except _UNLIKE_MESSAGES:
        if not further:
            raise
        return _reward_of_trl(function(**further[0]))


async def _await_trl(
    function: Callable[..., Awaitable[object]],
    first: Mapping[str, object],
    further: Sequence[Mapping[str, object]],
) -> object:
    try:
        return _reward_of_trl(await function(**first))  # no deadline: the caller has one
    except _UNLIKE_MESSAGES:
        if not further:
            raise
        return _reward_of_trl(await function(**further[0]))  # no deadline: the caller has one


def _arguments_of_trl(
    function: Function, trajectory: Trajectory, task: Task
) -> list[dict[str, object]]:
    """Return the arguments for a completion that is text and, to try next, one that is messages.

    In TRL, a prompt of messages has a completion of messages. What is text here may be messages
    there, since here it is a message of the user's in any case.
    """
    text = _text_of(trajectory)
    as_messages = [{"role": "assistant", "content": text}]
    columns = {
        **dict.fromkeys(("problem", "question"), problem_text(task.prompt)),
        **dict.fromkeys(("source", "data_source"), task.source),
        "level": task.level,
        **dict.fromkeys(_ANSWERS, task.answer),
        **task.extra,
        "prompts": task.prompt,
        "completion_ids": trajectory.turns[-1].output_ids if trajectory.turns else [],
    }
    completions: list[object] = (
        [text, as_messages] if isinstance(task.prompt, str) else [as_messages]
    )
    return [
        _arguments(
            function,
            {name: [value] for name, value in {**columns, "completions": completion}.items()},
        )
        for completion in completions
    ]


def _reward_of_trl(value: object) -> object:
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence) or len(value) != 1:
        raise ValueError(
            f"TRL's form returns a list with one number for one completion, not {value!r:.100}"
        )
    return value[0]


def _arguments(function: Function, values: Mapping[str, object]) -> dict[str, object]:
    parameters = inspect.signature(function).parameters.values()
    if any(it.kind is it.VAR_KEYWORD for it in parameters):
        return dict(values)
    missing = [it.name for it in parameters if it.default is it.empty and it.name not in values]
    if missing:
        raise ValueError(f"the task has no {missing[0]!r}, which the function requires")
    return {it.name: values[it.name] for it in parameters if it.name in values}


def _text_of(trajectory: Trajectory) -> str:
    """Return the text of the last turn without the control tokens at its end, as both have it."""
    return _CONTROL_TOKENS.sub("", trajectory.text)
