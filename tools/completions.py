"""`python -m tools.completions`: write what a shell may complete, from the commands themselves.

each command's parser and settings ──> agentloop/cli/completions.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin
from unittest.mock import patch

import pydantic

from agentloop import __main__ as program
from agentloop.cli import console
from agentloop.cli.completion import FILE
from agentloop.config import describe_settings, section_of

__all__ = ["main", "text"]

_MAX_ABOUT = 80  # characters of a description, which is a line in a terminal
_RUN = ("run", "runs", "resume", "source", "evaluated")  # names of arguments that are runs


class _Reached(BaseException):
    """Ends a command at its parser, or where it would print its settings."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def text() -> str:
    """Return the text of completions.json."""
    described: dict[str, Any] = {}
    commands = _commands(program._COMMANDS, "agentloop.cli", described)
    return json.dumps({"commands": commands, "settings": described}, indent=1) + "\n"


def _commands(
    named: Mapping[str, str], package: str, described: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    completions: dict[str, dict[str, Any]] = {}
    for name, summary in named.items():
        group = program._GROUPS.get(name) if named is program._COMMANDS else None
        if group is not None:
            inner = _commands(group, f"{package}.{name}", described)
            completions[name] = {"about": summary, "commands": inner}
        elif name == "completion":
            shells = {"options": {}, "arguments": [["bash", "zsh", "fish"]]}
            completions[name] = {"about": summary, **shells}
        else:
            module = import_module(program._MODULES.get(name, f"{package}.{name}"))
            completions[name] = {"about": summary, **_command(module, name, described)}
    return completions


def _command(module: Any, name: str, described: dict[str, Any]) -> dict[str, Any]:
    with _intercepted_parsers():
        completions = _describe(_intercept(module, []))
    if completions.pop("has_settings", False):
        with patch.object(console, "settings_text", _raise_reached):
            model = _intercept(module, ["--list-settings"])
        completions["settings"] = _sections(model, name, described)
    return completions


@contextmanager
def _intercepted_parsers() -> Iterator[None]:
    raising = lambda parser, *_: _raise_reached(parser)  # noqa: E731
    with (
        patch.object(argparse.ArgumentParser, "parse_args", raising),
        patch.object(argparse.ArgumentParser, "parse_intermixed_args", raising),
    ):
        yield


def _raise_reached(value: Any) -> Any:
    raise _Reached(value)


def _intercept(module: Any, arguments: list[str]) -> Any:
    try:
        module.main(arguments)
    except _Reached as reached:
        return reached.value
    raise AssertionError(f"{module.__name__} has no parser, or no settings")


def _describe(parser: argparse.ArgumentParser) -> dict[str, Any]:
    options: dict[str, Any] = {}
    arguments: list[Any] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            inner: dict[str, Any] = {}
            for choice in action._choices_actions:
                below = _describe(action.choices[choice.dest])
                inner[choice.dest] = {"about": _short(choice.help or ""), **below}
            return {"commands": inner}
        if action.option_strings:
            name = max(action.option_strings, key=len)
            takes = None if action.nargs == 0 else _takes(action)
            options[name] = {"about": _short(action.help or ""), "takes": takes}
        elif action.dest != "settings":
            arguments.append(_takes(action))
    has_settings = any(action.dest == "list_settings" for action in parser._actions)
    return {"options": options, "arguments": arguments, "has_settings": has_settings}


def _takes(action: argparse.Action) -> Any:
    """Return the choices of an option or argument, or the kind of its values."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    if action.type is Path:
        return "run" if action.dest in _RUN else "path"
    return "path" if action.dest == "model" else "text"


def _sections(
    model: type[pydantic.BaseModel], command: str, described: dict[str, Any]
) -> dict[str, str]:
    """Add the settings of a command to those described, and return its sections.

    A section in which two commands differ is described once for each of them.
    """
    by_section: dict[str, dict[str, Any]] = {}
    for key, _, description in describe_settings(model):
        section = key.partition(".")[0]
        choices = _choices(_annotation(model, key.split(".")))
        setting = {"about": _short(description), "choices": choices}
        by_section.setdefault(section, {})[key] = setting
    for section, keys in by_section.items():
        short = getattr(section_of(model.model_fields[section].annotation), "SHORT_FORM", None)
        if (long := f"{section}.{short}") in keys:
            keys[section] = keys[long]
    sections: dict[str, str] = {}
    for section, keys in by_section.items():
        same_section = {
            key: setting for key, setting in described.items() if key.partition(".")[0] == section
        }
        at = section if same_section in ({}, keys) else f"{command}:{section}"
        described.update({f"{at}{key[len(section) :]}": setting for key, setting in keys.items()})
        sections[section] = at
    return sections


def _annotation(model: type[pydantic.BaseModel], path: list[str]) -> Any:
    """Return the type of the setting at `path`."""
    annotation: Any = model
    for part in path:
        section = section_of(annotation)
        if part != "NAME" and section is not None:
            annotation = section.model_fields[part].annotation
    return annotation


def _choices(annotation: Any) -> list[str]:
    """Return the values of a setting that has a few, as a shell's argument writes them."""
    if annotation is bool:
        return ["true", "false"]
    if annotation is NoneType:
        return ["none"]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [str(member.value) for member in annotation]
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if get_origin(annotation) in (list, dict, tuple):
        return []
    choices = [choice for inner in get_args(annotation) for choice in _choices(inner)]
    return [] if choices == ["none"] else list(dict.fromkeys(choices))


def _short(description: str) -> str:
    """Return the first sentence of a description, in one line of a terminal."""
    line = " ".join(description.replace("%%", "%").split()).split(". ")[0].rstrip(".")
    return line if len(line) <= _MAX_ABOUT else f"{line[: _MAX_ABOUT - 3].rstrip()}..."


def main() -> None:
    """Write agentloop/cli/completions.json."""
    FILE.write_text(text(), "utf-8")


if __name__ == "__main__":
    main()
