"""Load settings from TOML files, the environment and dotted overrides into pydantic models.

Later sources win: the class's defaults, the environment (`AGENTLOOP_SECTION__KEY`), files from
left to right, overrides (`section.key=value`). An unknown key is an error that suggests the most
similar known one.

TOML has no null: write "none" for an optional value that is to be None.
A file may extend others: `extends = "base.toml"`, or a list of paths, relative to the file. Its own
values win over theirs; a file that two files extend is read once, below both.
A name without an ending, such as `small`, is that of a recipe that comes with agentloop.
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import pydantic
import pydantic_settings
from pydantic_settings import EnvSettingsSource

from agentloop.errors import SettingsError, summary_of

__all__ = [
    "describe_settings",
    "import_named",
    "is_recipe",
    "load_known",
    "load_settings",
    "path_of",
    "section_of",
    "to_toml",
    "with_values",
]

_ENV_PREFIX = "AGENTLOOP_"
_BASE = "the base"
_MAX_SUGGESTED = 3
_RECIPES = Path(__file__).with_name("cli") / "recipes"
# Settings that were removed, with the value that the code now has: older runs name them. With ...,
# whatever the run had does not change what it computes.
_REMOVED: dict[str, object] = {
    "ranks.hostfile": ...,
    "ranks.launcher": "processes",
    "ranks.port": ...,
    "sandbox.max_output_bytes": 1 << 20,
    "server.stop_timeout_s": ...,
    "weights.pause": "retract",
}
M = TypeVar("M", bound=pydantic.BaseModel)


def is_recipe(name: str) -> bool:
    """Return whether a recipe that comes with agentloop has this name."""
    return (_RECIPES / f"{name}.toml").is_file()


def path_of(name: Path | str, ending: str = ".toml", *, folder: Path | None = None) -> Path:
    """Return the path of a file, relative to `folder`, or of the recipe that has this name.

    Raises:
        ValueError: there is no such recipe.
    """
    if not re.fullmatch(r"[\w-]+", str(name)):
        return (folder or Path()) / Path(name).expanduser()
    path = _RECIPES / f"{name}{ending}"
    if not path.is_file():
        recipes = sorted(file.stem for file in _RECIPES.glob(f"*{ending}"))
        near = difflib.get_close_matches(str(name), recipes, n=1) or recipes
        raise ValueError(
            f"there is no recipe {str(name)!r} (did you mean {' or '.join(near)}?); the name of a "
            f"file ends in {ending}"
        )
    return path


def load_known(model: type[pydantic.BaseModel], file: Path) -> dict[str, object]:
    """Return the top-level keys of `file` that are fields of `model`. Raises SettingsError."""
    return {key: value for key, value in _read_toml(file).items() if key in model.model_fields}


def load_settings(
    model: type[M],
    files: Sequence[Path | str] = (),
    overrides: Sequence[str] = (),
    *,
    base: Mapping[str, object] | None = None,
) -> M:
    """Build `model` from all sources; values in `base` replace the class's defaults.

    Raises:
        SettingsError: a source is invalid; the message names the key, the value and the source.
    """
    merged: dict[str, object] = {}
    sources: dict[str, str] = {}
    layers = _layers(model, files, overrides)
    for source, layer in itertools.chain([(_BASE, dict(base or {}))], layers):
        _merge(merged, _normalize(model, layer, source), sources, source)
    try:
        return model.model_validate(merged)
    except pydantic.ValidationError as error:
        raise SettingsError(_explain(error, sources)) from error


def with_values(settings: M, values: Mapping[str, object], *, source: str) -> M:
    """Return a copy of `settings` with `values` set.

    Raises:
        SettingsError: as in `load_settings`.
    """
    if not values:
        return settings
    values = _normalize(type(settings), values, source)
    merged = {**settings.model_dump(exclude_unset=True), **values}
    try:
        return type(settings).model_validate(merged)
    except pydantic.ValidationError as error:
        raise SettingsError(_explain(error, dict.fromkeys(values, source))) from error


def _layers(
    model: type[pydantic.BaseModel], files: Sequence[Path | str], overrides: Sequence[str]
) -> Iterator[tuple[str, dict[str, object]]]:
    yield "the environment", _environment(model)
    read: set[Path] = set()
    for file in files:
        yield from _file_layers(_settings_file(file), read)
    for override in overrides:
        yield f"override {override!r}", _parse_override(override)


def _environment(model: type[pydantic.BaseModel]) -> dict[str, object]:
    source = EnvSettingsSource(
        model,  # type: ignore[arg-type]  # any model works: only its fields are read
        env_prefix=_ENV_PREFIX,
        env_nested_delimiter="__",
        case_sensitive=False,
    )
    try:
        values: dict[str, object] = source()
    except pydantic_settings.SettingsError as error:
        reason = f"{error.__cause__ or error}"
        raise SettingsError(
            f"the environment: {_field_of(error)}: expected JSON: {reason}"
        ) from error
    return values


def _field_of(error: pydantic_settings.SettingsError) -> str:
    named = re.search('field "([^"]+)"', str(error))
    return _ENV_PREFIX + named.group(1).upper() if named else str(error)


def _file_layers(
    file: Path, read: set[Path], above: tuple[Path, ...] = ()
) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the values of the files that `file` extends, then its own; skip files in `read`.

    `above` is the chain of files that extend this one, outermost first.
    """
    where = f"{above[-1]}: extends: " if above else ""
    if file.resolve() in (outer.resolve() for outer in above):
        raise SettingsError(f"{where}a cycle: {' -> '.join(map(str, (*above, file)))}")
    values = _read_toml(file, where)
    extends = values.pop("extends", [])
    bases = [extends] if isinstance(extends, str) else extends
    if not isinstance(bases, list) or not all(isinstance(base, str) and base for base in bases):
        raise SettingsError(f"{file}: extends: expected a file name or a list of file names")
    for base in bases:
        path = _settings_file(base, folder=file.parent, where=f"{file}: extends: ")
        # A base shared with an earlier file must not override that file.
        if path.resolve() not in read:
            yield from _file_layers(path, read, (*above, file))
    read.add(file.resolve())
    yield str(file), values


def _settings_file(name: Path | str, *, folder: Path | None = None, where: str = "") -> Path:
    try:
        return path_of(name, folder=folder)
    except ValueError as error:
        raise SettingsError(f"{where}{error}") from error


def _read_toml(file: Path, where: str = "") -> dict[str, object]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        hint = f"; the recipe of that name is {file.stem}, without .toml"
        hint = hint if is_recipe(file.stem) else ""
        raise SettingsError(f"{where}{file}: {error.strerror or error}{hint}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{where}{file}: {error}") from error


def _parse_override(override: str) -> dict[str, object]:
    key, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*", key.strip()):
        raise SettingsError(f"{override!r} is not a setting: write section.key=value")
    values: object = _parse_value(text.strip())
    for part in reversed(key.strip().split(".")):
        values = {part.replace("-", "_"): values}
    assert isinstance(values, dict)
    return values


def _parse_value(text: str) -> object:
    """Parse `text` as a TOML value, or return it as it is: a shell argument needs no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _merge(
    into: dict[str, object],
    values: Mapping[str, object],
    sources: dict[str, str],
    source: str,
    at: str = "",
) -> None:
    for key, value in values.items():
        path = f"{at}.{key}" if at else key
        if isinstance(value, Mapping):
            table = into.get(key)
            if not isinstance(table, dict):
                table = into[key] = {}
            _merge(table, value, sources, source, path)
        else:
            into[key] = value
            sources[path] = source


def _normalize(
    model: type[pydantic.BaseModel], values: Mapping[str, object], source: str, at: str = ""
) -> dict[str, object]:
    """Return the values of a source as `model` takes them.

    The plain value of a section that has a `SHORT_FORM`, the name of a key, becomes that key's; in
    a list of such sections, each may be a plain value. The text "none" becomes None in fields that
    accept None but not that text.

    Raises:
        SettingsError: a key is unknown, or a section or list of sections is of another type.
    """
    normal: dict[str, object] = {}
    for key, value in values.items():
        path = f"{at}.{key}" if at else key
        field = model.model_fields.get(key)
        if field is None and path in _REMOVED:
            usual = _REMOVED[path]
            of_a_run = source == _BASE or Path(source).name == "config.toml"
            if value == usual or (usual is ... and of_a_run):
                continue
            always = "" if usual is ... else f" and is now always {_toml_value(usual)}"
            raise SettingsError(f"{source}: {path!r} was removed{always}")
        if field is None:
            raise SettingsError(f"{source}: unknown setting {path!r}{_suggest(model, key, at)}")
        section = section_of(field.annotation)
        short = getattr(section, "SHORT_FORM", None)
        if section is None:
            is_none = value == "none" and type(None) in get_args(field.annotation)
            normal[key] = None if is_none and not _takes_text(field.annotation) else value
        elif _is_list(field.annotation):
            tables = value if isinstance(value, list) else [None]
            if short is not None:
                tables = [{short: table} if isinstance(table, str) else table for table in tables]
            if not all(isinstance(table, Mapping) for table in tables):
                raise SettingsError(f"{source}: {path!r} is a list of tables: write [[{path}]]")
            normal[key] = [
                _normalize(section, table, source, f"{path}.{number}")
                for number, table in enumerate(tables)
            ]
        elif short is not None and isinstance(value, str):
            normal[key] = _normalize(section, {short: value}, source, path)
        elif not isinstance(value, Mapping):
            raise SettingsError(f"{source}: {path!r} is a section: set {path}.KEY")
        elif not _has_names(field.annotation):
            normal[key] = _normalize(section, value, source, path)
        else:
            normal[key] = named = dict[str, object]()
            for name, table in value.items():
                if not isinstance(table, Mapping):
                    raise SettingsError(f"{source}: '{path}.{name}' is a section: set its keys")
                named[name] = _normalize(section, table, source, f"{path}.{name}")
    return normal


def _has_names(annotation: object) -> bool:
    """Return whether the field maps names chosen by the user to sections."""
    return get_origin(annotation) is dict


def _is_list(annotation: object) -> bool:
    """Return whether the field is a list, such as of sections: `[[envs]]`."""
    return get_origin(annotation) is list


def _takes_text(annotation: Any) -> bool:
    """Return whether the text "none" is a valid value."""
    try:
        pydantic.TypeAdapter(annotation).validate_python("none")
    except pydantic.ValidationError:
        return False
    return True


def section_of(annotation: object) -> type[pydantic.BaseModel] | None:
    """Return the class of the settings that a field holds, if it is a section."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, pydantic.BaseModel):
            return candidate
    return None


def _suggest(model: type[pydantic.BaseModel], key: str, at: str) -> str:
    prefix = f"{at}." if at else ""
    # Without the section: it would make all of its settings alike.
    near = difflib.get_close_matches(key, model.model_fields, n=1, cutoff=0.65)
    # Such as learner.optimizer.lr for learner.lr.
    if near := _below(model, key)[:_MAX_SUGGESTED] or near:
        return f" (did you mean {' or '.join(repr(prefix + name) for name in near)}?)"
    return f" (known here: {', '.join(prefix + name for name in model.model_fields)})"


def _below(model: type[pydantic.BaseModel], key: str) -> list[str]:
    """Return the full names of the settings in sections of `model` that have this name."""
    names = []
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        is_one = section is field.annotation or type(None) in get_args(field.annotation)
        if section is not None and is_one:
            inner = [key] * (key in section.model_fields) + _below(section, key)
            names += [f"{name}.{found}" for found in inner]
    return names


def _explain(error: pydantic.ValidationError, sources: Mapping[str, str]) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        path = ".".join(map(str, problem["loc"]))
        source = next((sources[at] for at in _parents(path) if at in sources), None)
        source = source or _sources_within(path, problem["msg"], sources)
        where = f" (from {source})" if source else ""
        # Never print a whole section: it may hold a token.
        plain = isinstance(problem["input"], str | int | float | None)
        actual = f", not {problem['input']!r}" if plain else ""
        message = problem["msg"]
        if problem["type"] == "value_error":  # our own message, which may quote the value
            message = str(problem["ctx"]["error"])
            actual = "" if repr(problem["input"]) in message else actual
        line = f"{path or 'settings'}: {message}{actual}{where}"
        lines.append(re.sub(r"://[^\s'\"]*@", "://...@", line))  # hide passwords in URLs
    return "; ".join(lines)


def _sources_within(path: str, message: str, sources: Mapping[str, str]) -> str:
    """Return the sources of the section's keys that `message` names, or of all that are set."""
    keys = [at for at in sources if at.startswith(f"{path}.")]
    named = [at for at in keys if re.search(rf"\b{re.escape(at.rpartition('.')[2])}\b", message)]
    # Quote an override without its value, which may be a token.
    quoted = (re.sub(r"^(override '[^=]*)=.*", r"\1'", sources[at]) for at in named or keys)
    return ", ".join(dict.fromkeys(quoted))


def _parents(path: str) -> Iterator[str]:
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        yield ".".join(parts[:length])


def describe_settings(
    model: type[pydantic.BaseModel], at: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Yield each setting as (dotted key, default as TOML, description).

    A list of tables is one setting, whose description names the keys. So is a field with
    `json_schema_extra={"is_one_setting": True}`.
    """
    for name, field in model.model_fields.items():
        path = f"{at}.{name}" if at else name
        section = section_of(field.annotation)
        is_one = _is_list(field.annotation) or field.json_schema_extra == {"is_one_setting": True}
        if section is not None and not is_one:
            names = _has_names(field.annotation)
            yield from describe_settings(section, f"{path}.NAME" if names else path)
        else:
            default = "(required)"
            if not field.is_required():
                value = field.get_default(call_default_factory=True)
                if isinstance(value, pydantic.BaseModel):
                    value = value.model_dump(mode="json", exclude_defaults=True)
                default = _toml_value(value)
            yield path, default, field.description or ""


def to_toml(settings: pydantic.BaseModel) -> str:
    """Return the settings, without secrets, as TOML that `load_settings` can read back."""
    return "\n".join(_toml_section(_without_secrets(settings), "")).strip() + "\n"


def _without_secrets(settings: pydantic.BaseModel) -> dict[str, object]:
    values = settings.model_dump(mode="json")
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if isinstance(value, pydantic.BaseModel):
            values[name] = _without_secrets(value)
        elif value is None and field.get_default(call_default_factory=True) is not None:
            values[name] = "none"  # otherwise the default would be read back
        elif isinstance(value, pydantic.SecretStr):
            del values[name]  # otherwise its asterisks would be read back as the secret
    return values


def _toml_section(values: Mapping[str, object], at: str) -> Iterator[str]:
    plain = {k: v for k, v in values.items() if not isinstance(v, Mapping) and v is not None}
    if at and plain:
        yield f"\n[{at}]"
    for key, value in plain.items():
        yield f"{key} = {_toml_value(value)}"
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _toml_section(value, f"{at}.{key}" if at else key)


def _toml_value(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case list() | tuple():
            return "[" + ", ".join(map(_toml_value, value)) + "]"
        case dict():
            present = {key: entry for key, entry in value.items() if entry is not None}
            pairs = (f"{json.dumps(key)} = {_toml_value(entry)}" for key, entry in present.items())
            return "{" + ", ".join(pairs) + "}"
        case _:
            # TOML has the same escapes as JSON, but also requires one for DEL.
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def import_named(name: str, setting: str) -> Any:
    """Import `module:name`, also from the current folder.

    Args:
        setting: the setting that contains the name, for messages.

    Raises:
        SettingsError: there is no such module or name, or importing it raised.
    """
    module, _, attribute = name.partition(":")
    if (folder := os.getcwd()) not in sys.path:  # a command's path begins with its own folder
        sys.path.append(folder)
    try:
        imported = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise SettingsError(f"{setting}: {name}: {error}") from error
        raise SettingsError(
            f"{setting}: there is no module {error.name!r}; it must be importable from here, such "
            "as a file in the current folder or an installed package"
        ) from error
    except Exception as error:
        raise SettingsError(f"{setting}: importing {module} raised {summary_of(error)}") from error
    try:
        return attrgetter(attribute)(imported)
    except AttributeError as error:
        file = getattr(imported, "__file__", None) or "built into Python"
        near = difflib.get_close_matches(attribute, vars(imported), n=3)
        hint = f": did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise SettingsError(f"{setting}: {module} has no {attribute!r} ({file}){hint}") from error
