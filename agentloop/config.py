"""Settings from TOML files and dotted overrides, into typed classes that live beside their owners.

Later sources win: the class's defaults, the environment (`AGENTLOOP_SECTION__KEY`), files from
left to right, overrides (`section.key=value`). A key that nobody knows is refused, with the
nearest that somebody does.

TOML has no word for nothing: a number, say, that can be left out is left out by "none".
A file may stand on others: `extends = "base.toml"`, or a list of them, relative to the file. They
lie below it; one that two files extend counts once, below both.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import pydantic
import pydantic_settings
from pydantic_settings import EnvSettingsSource

from agentloop.errors import SettingsError

__all__ = ["describe_settings", "load_known", "load_settings", "to_toml", "with_values"]

_ENV_PREFIX = "AGENTLOOP_"
M = TypeVar("M", bound=pydantic.BaseModel)


def load_known(model: type[pydantic.BaseModel], file: Path) -> dict[str, Any]:
    """What stands in `file`, at its top level, that `model` knows. Raises SettingsError."""
    return {key: value for key, value in _read_toml(file).items() if key in model.model_fields}


def load_settings(
    model: type[M],
    files: Sequence[Path | str] = (),
    overrides: Sequence[str] = (),
    *,
    base: Mapping[str, Any] | None = None,
) -> M:
    """Build `model` from every source; `base` is in place of the class's defaults.

    Raises:
        SettingsError: names the key, the value and the source of the first thing wrong.
    """
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    layers = _layers(model, files, overrides)
    for source, values in itertools.chain([("the base", dict(base or {}))], layers):
        _check_keys(model, values, source)
        _merge(merged, _with_nothing(model, values), sources, source)
    try:
        return model.model_validate(merged)
    except pydantic.ValidationError as error:
        raise SettingsError(_explain(error, sources)) from error


def with_values(settings: M, values: Mapping[str, Any], *, source: str) -> M:
    """`settings` with some of its keys set anew.

    Raises:
        SettingsError: as `load_settings`.
    """
    if not values:
        return settings
    _check_keys(type(settings), values, source)
    merged = {**settings.model_dump(exclude_unset=True), **values}
    try:
        return type(settings).model_validate(merged)
    except pydantic.ValidationError as error:
        raise SettingsError(_explain(error, dict.fromkeys(values, source))) from error


def _layers(
    model: type[pydantic.BaseModel], files: Sequence[Path | str], overrides: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "the environment", _environment(model)
    read: set[Path] = set()
    for file in files:
        yield from _file_layers(Path(file), read)
    for override in overrides:
        yield f"override {override!r}", _parse_override(override)


def _environment(model: type[pydantic.BaseModel]) -> dict[str, Any]:
    source = EnvSettingsSource(
        model,  # type: ignore[arg-type]  # any model will do: it reads the fields alone
        env_prefix=_ENV_PREFIX,
        env_nested_delimiter="__",
        case_sensitive=False,
    )
    try:
        values: dict[str, Any] = source()
    except pydantic_settings.SettingsError as error:
        why = f"{error.__cause__ or error}"
        raise SettingsError(f"the environment: {_field_of(error)}: JSON expected: {why}") from error
    return values


def _field_of(error: pydantic_settings.SettingsError) -> str:
    named = re.search('field "([^"]+)"', str(error))
    return _ENV_PREFIX + named.group(1).upper() if named else str(error)


def _file_layers(
    file: Path, read: set[Path], above: tuple[Path, ...] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """`file` and, before it, those that it extends, less those that were `read` already.

    `above` are the files that led here.
    """
    where = f"{above[-1]}: extends: " if above else ""
    if file.resolve() in (one.resolve() for one in above):
        raise SettingsError(f"{where}a circle: {' -> '.join(map(str, (*above, file)))}")
    values = _read_toml(file, where)
    extends = values.pop("extends", [])
    bases = [extends] if isinstance(extends, str) else extends
    if not isinstance(bases, list) or not all(isinstance(base, str) and base for base in bases):
        raise SettingsError(f"{file}: extends: a file's name, or a list of them, is expected")
    for base in bases:
        path = file.parent / Path(base).expanduser()
        # What another file stands on, too, would else lie above that one.
        if path.resolve() not in read:
            yield from _file_layers(path, read, (*above, file))
    read.add(file.resolve())
    yield str(file), values


def _read_toml(file: Path, where: str = "") -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"{where}{file}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{where}{file}: {error}") from error


def _parse_override(override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*", key.strip()):
        raise SettingsError(f"{override!r} is no setting: write section.key=value")
    values: Any = _parse_value(text.strip())
    for part in reversed(key.strip().split(".")):
        values = {part.replace("-", "_"): values}
    assert isinstance(values, dict)
    return values


def _parse_value(text: str) -> Any:
    """A TOML value where it is one, else the text: quotes can be left out on a command line."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _merge(
    into: dict[str, Any],
    values: Mapping[str, Any],
    sources: dict[str, str],
    source: str,
    at: str = "",
) -> None:
    for key, value in values.items():
        path = f"{at}.{key}" if at else key
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value, sources, source, path)
        elif isinstance(value, Mapping):
            into[key] = {}
            _merge(into[key], value, sources, source, path)
        else:
            into[key] = value
            sources[path] = source


def _check_keys(
    model: type[pydantic.BaseModel], values: Mapping[str, Any], source: str, at: str = ""
) -> None:
    for key, value in values.items():
        path = f"{at}.{key}" if at else key
        field = model.model_fields.get(key)
        if field is None:
            raise SettingsError(f"{source}: unknown setting {path!r}{_suggest(model, key, at)}")
        section = _section(field.annotation)
        if section is None:
            continue
        if not isinstance(value, Mapping):
            raise SettingsError(f"{source}: {path!r} is a section: set {path}.KEY")
        if not _has_names(field.annotation):
            _check_keys(section, value, source, path)
            continue
        for name, named in value.items():
            if not isinstance(named, Mapping):
                raise SettingsError(f"{source}: '{path}.{name}' is a section: set its keys")
            _check_keys(section, named, source, f"{path}.{name}")


def _has_names(annotation: Any) -> bool:
    """Whether it is not a section, but sections by names that are free to choose."""
    return get_origin(annotation) is dict


def _with_nothing(model: type[pydantic.BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """None for "none", where that is a value and the text is not."""
    found = dict(values)
    for key, value in values.items():
        annotation = model.model_fields[key].annotation
        section = _section(annotation)
        if section is not None and _has_names(annotation):
            found[key] = {name: _with_nothing(section, one) for name, one in value.items()}
        elif section is not None:
            found[key] = _with_nothing(section, value)
        elif value == "none" and type(None) in get_args(annotation) and not _takes_text(annotation):
            found[key] = None
    return found


def _takes_text(annotation: Any) -> bool:
    """Whether "none" could be meant as it stands."""
    try:
        pydantic.TypeAdapter(annotation).validate_python("none")
    except pydantic.ValidationError:
        return False
    return True


def _section(annotation: Any) -> type[pydantic.BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, pydantic.BaseModel):
            return candidate
    return None


def _suggest(model: type[pydantic.BaseModel], key: str, at: str) -> str:
    here = [f"{at}.{name}" if at else name for name in model.model_fields]
    near = difflib.get_close_matches(f"{at}.{key}" if at else key, here, n=1, cutoff=0.6)
    if near:
        return f" (did you mean {near[0]!r}?)"
    return f" (known here: {', '.join(here)})"


def _explain(error: pydantic.ValidationError, sources: Mapping[str, str]) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        path = ".".join(map(str, problem["loc"]))
        source = next((sources[at] for at in _parents(path) if at in sources), None)
        source = source or _sources_within(path, problem["msg"], sources)
        where = f" (from {source})" if source else ""
        # Not a section as a whole: a token may stand in it.
        plain = isinstance(problem["input"], str | int | float | None)
        given = f", not {problem['input']!r}" if plain else ""
        message = problem["msg"]
        if problem["type"] == "value_error":  # our own words, which may say what was given
            message = str(problem["ctx"]["error"])
            given = "" if repr(problem["input"]) in message else given
        line = f"{path or 'settings'}: {message}{given}{where}"
        lines.append(re.sub(r"://[^\s'\"]*@", "://...@", line))  # a URL's password
    return "; ".join(lines)


def _sources_within(path: str, message: str, sources: Mapping[str, str]) -> str:
    """Where the keys of a section come from that a message about it names, or all that are set."""
    keys = [at for at in sources if at.startswith(f"{path}.")]
    named = [at for at in keys if re.search(rf"\b{re.escape(at.rpartition('.')[2])}\b", message)]
    # An override without its value: a token may stand there.
    found = (re.sub(r"^(override '[^=]*)=.*", r"\1'", sources[at]) for at in named or keys)
    return ", ".join(dict.fromkeys(found))


def _parents(path: str) -> Iterator[str]:
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        yield ".".join(parts[:length])


def describe_settings(
    model: type[pydantic.BaseModel], at: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Every setting as (dotted key, default, description), for --help."""
    for name, field in model.model_fields.items():
        path = f"{at}.{name}" if at else name
        section = _section(field.annotation)
        if section is not None:
            names = _has_names(field.annotation)
            yield from describe_settings(section, f"{path}.NAME" if names else path)
        else:
            default = "(required)"
            if not field.is_required():
                default = _toml_value(field.get_default(call_default_factory=True))
            yield path, default, field.description or ""


def to_toml(settings: pydantic.BaseModel) -> str:
    """The settings as a TOML file that `load_settings` reads back; without secrets."""
    return "\n".join(_toml_section(_without_secrets(settings), "")).strip() + "\n"


def _without_secrets(settings: pydantic.BaseModel) -> dict[str, Any]:
    values = settings.model_dump(mode="json")
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if isinstance(value, pydantic.BaseModel):
            values[name] = _without_secrets(value)
        elif value is None and field.get_default(call_default_factory=True) is not None:
            values[name] = "none"  # else the default would be read back
        elif isinstance(value, pydantic.SecretStr):
            del values[name]  # else its asterisks would be read back as the secret
    return values


def _toml_section(values: Mapping[str, Any], at: str) -> Iterator[str]:
    plain = {k: v for k, v in values.items() if not isinstance(v, Mapping) and v is not None}
    if at and plain:
        yield f"\n[{at}]"
    for key, value in plain.items():
        yield f"{key} = {_toml_value(value)}"
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _toml_section(value, f"{at}.{key}" if at else key)


def _toml_value(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case list() | tuple():
            return "[" + ", ".join(map(_toml_value, value)) + "]"
        case _:
            # TOML's escapes are JSON's; DEL is the one that JSON leaves as it is.
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
