"""Command-line flags from a settings class, with a readable --help."""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser

import pydantic
from pydantic_settings import BaseSettings, CliSettingsSource

# pydantic's names of types, and the placeholders shown for them.
WORDS = {
    "str": "TEXT",
    "{SecretStr,null}": "TEXT",
    "int": "N",
    "float": "NUMBER",
    "bool": "true|false",
    "list[str]": "TEXT,...",
    "list[list[str]]": "JSON",
    "[JSON]": "JSON",
}


def flags_of(settings: type[BaseSettings]) -> CliSettingsSource[ArgumentParser]:
    """Return the flags of a settings class.

    Call the result with the arguments, and pass that to the class as `_cli_settings_source`.
    """
    source = CliSettingsSource[ArgumentParser](settings)
    source.root_parser.usage = "%(prog)s [--SETTING VALUE | SETTING=VALUE ...]"
    for action in source.root_parser._actions:
        if isinstance(action.metavar, str):
            action.metavar = WORDS.get(action.metavar, action.metavar)
        if action.help:
            text = re.sub(r" \(default(?: factory)?: .*\)$", "", action.help, flags=re.DOTALL)
            default = _default(settings, action.dest.split("."))
            action.help = text + default.replace("%", "%%")
    return source


def _default(model: type[pydantic.BaseModel], path: list[str]) -> str:
    """Return the default of a setting in brackets, or "" if it has none."""
    name, *inner_path = path
    field = model.model_fields.get(name)
    if field is None:
        return ""
    value = field.get_default(call_default_factory=True)
    if inner_path:
        return _default(type(value), inner_path)
    if value in (None, "", []) or isinstance(value, pydantic.BaseModel):
        return ""
    text = value if isinstance(value, str) else json.dumps(value)
    return f" (default: {text})"
