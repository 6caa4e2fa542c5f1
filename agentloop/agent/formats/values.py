"""Parse the names and arguments of tool calls, as models write them.

Each parser returns the name, the arguments and an error for the model to read; the error is None if
the call is well-formed, otherwise name and arguments may be empty.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

Parsed = tuple[str, dict[str, object], str | None]
Schemas = Mapping[str, Mapping[str, object]]
"""JSON schemas of the parameters of tools, by the tools' names."""

_MAX_DEPTH = 100
_MAX_SHOWN = 40  # characters of a number in an error
_PYTHON_STRING_RE = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_JSON_SCALARS = (str, int, float)
_INFINITE = (math.inf, -math.inf)
_MAX_SCHEMA_DEPTH = 16  # of references, which may form a circle
# Keywords that say something of values of one type only.
_IMPLIED = {
    "object": {"properties", "required", "additionalProperties", "patternProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
}
_SURROGATE_RE = re.compile("[\ud800-\udfff]")


def parameters_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """Return the parameters' schemas of tools in OpenAI's form, by name."""
    functions = [tool.get("function") or tool for tool in tools]
    return {str(function.get("name")): function.get("parameters") or {} for function in functions}


def decode_call(raw: str) -> Parsed:
    """Parse a JSON object with a name, and arguments or parameters."""
    try:
        value = decode_json(raw)
    except ValueError as error:
        return "", {}, f"the tool call is not valid JSON: {error}"
    if not isinstance(value, dict):
        return "", {}, 'the tool call must be a JSON object {"name": ..., "arguments": {...}}'
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return "", {}, 'the tool call has no "name"'
    arguments = value["arguments"] if "arguments" in value else value.get("parameters", {})
    return name, *decode_arguments(arguments)


def decode_arguments(arguments: object) -> tuple[dict[str, object], str | None]:
    """Return the arguments of a call, which may be JSON text as in OpenAI's API, and the error.

    The error is None if they are well-formed; otherwise the arguments are empty.
    """
    if isinstance(arguments, str):
        try:
            arguments = decode_json(arguments)
        except ValueError as error:
            return {}, f'"arguments" is not valid JSON: {error}'
    if not isinstance(arguments, dict):
        return {}, '"arguments" must be a JSON object'
    return arguments, None


def decode_python_call(raw: str) -> Parsed:
    """Parse a call of Python with keyword arguments that are literals.

    As in JSON, strings may contain raw newlines.
    """
    source = raw.strip()
    if "\n" in source:
        source = _PYTHON_STRING_RE.sub(lambda match: match[0].replace("\n", "\\n"), source)
    try:
        if "\\" in source:  # Python warns of '\\d'
            with warnings.catch_warnings(action="ignore"):
                call = ast.parse(source, mode="eval").body
        else:
            call = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return "", {}, f"the tool call is not valid Python: {error}"
    name = source.partition("(")[0].strip()
    called = call.func if isinstance(call, ast.Call) else None
    while isinstance(called, ast.Attribute):
        called = called.value
    if not isinstance(call, ast.Call) or not isinstance(called, ast.Name):
        return "", {}, "the tool call must be a call such as name(argument=value)"
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        return name, {}, "the tool call must name its arguments, such as name(argument=value)"
    arguments: dict[str, object] = {}
    for keyword in call.keywords:
        try:
            arguments[str(keyword.arg)] = _literal(keyword.value)
        except (ValueError, RecursionError):
            return name, {}, f"the argument {keyword.arg!r} of the tool call is not a literal"
    if "\\u" in source.lower() or source.count("[") + source.count("{") > _MAX_DEPTH:
        return name, *decode_arguments(json.dumps(arguments))
    return name, arguments, None


def _literal(node: ast.expr | None) -> object:
    """Return the value of a literal of Python that is also a value of JSON.

    Raises:
        ValueError: It is none.
    """
    if isinstance(node, ast.Constant):
        value = node.value
        if value is None or (isinstance(value, _JSON_SCALARS) and value not in _INFINITE):
            return value
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {_key(key): _literal(value) for key, value in pairs}
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = _literal(node.operand)
        if isinstance(number, int | float):
            return -number if isinstance(node.op, ast.USub) else number
    raise ValueError


def _key(node: ast.expr | None) -> str:
    value = _literal(node)
    if isinstance(value, list | dict):
        raise ValueError
    return value if isinstance(value, str) else json.dumps(value)


class ArgumentTypes:
    """The types of a tool's arguments, by the JSON schema of its parameters."""

    def __init__(self, parameters: Mapping[str, object]) -> None:
        self._root = parameters
        self._schemas: dict[str, list[object]] = {}
        self._others: list[object] = []  # schemas of arguments with other names
        self._collect(parameters, 0)

    def allow(self, name: str) -> bool:
        """Return whether the schema allows an argument, as far as it names arguments at all."""
        return name in self._schemas or bool(self._others) or not self._schemas

    def decode(self, name: str, text: str) -> object:
        """Return the value that `text` stands for in an argument.

        A string is taken literally. Anything else is JSON; text that is not stays as it is, for the
        tool's own validation to explain.
        """
        types = self._union(self._schemas.get(name) or self._others, 0)
        if not types or types == {"string"}:
            return text
        try:
            value = decode_json(text)
        except ValueError:
            words = {"true": True, "false": False, "none": None}
            value = words.get(text.strip().lower(), text)
            return value if _is_one_of(value, types) else text
        if "string" in types and not _is_one_of(value, types - {"string"}):
            return text
        return value

    def _collect(self, schema: object, depth: int) -> None:
        """Collect the schemas of arguments, also behind references and in combinations."""
        if not isinstance(schema, Mapping) or depth > _MAX_SCHEMA_DEPTH:
            return
        for name, value in (schema.get("properties") or {}).items():
            self._schemas.setdefault(name, []).append(value)
        patterns = schema.get("patternProperties") or {}
        self._others += [*patterns.values(), *filter(None, [schema.get("additionalProperties")])]
        for part in self._parts(schema, ("allOf", "anyOf", "oneOf")):
            self._collect(part, depth + 1)

    def _parts(self, schema: Mapping[str, Any], names: Sequence[str]) -> Iterator[object]:
        """Yield what a reference in a schema stands for, and the schemas that it combines."""
        if isinstance(reference := schema.get("$ref"), str):
            yield _resolve(reference, self._root)
        for name in names:
            yield from schema.get(name) or ()

    def _union(self, schemas: Iterable[object], depth: int) -> set[str]:
        """Return the JSON types that any of the schemas allows; empty: any, or unknown."""
        types: set[str] = set()
        for schema in schemas:
            if not (allowed := self._types(schema, depth + 1)):
                return set()
            types |= allowed
        return types

    def _types(self, schema: object, depth: int) -> set[str]:
        """Return the JSON types that a schema allows; empty: any, or unknown."""
        if not isinstance(schema, Mapping) or depth > _MAX_SCHEMA_DEPTH:
            return set()
        declared = schema.get("type") or ()
        limits = [{declared} if isinstance(declared, str) else set(declared)]
        if "enum" in schema:
            limits.append({_type_of(value) for value in schema["enum"]})
        if "const" in schema:
            limits.append({_type_of(schema["const"])})
        limits += [self._union(schema.get(name) or (), depth) for name in ("anyOf", "oneOf")]
        limits += [self._types(part, depth + 1) for part in self._parts(schema, ("allOf",))]
        limits = [
            types | ({"integer"} if "number" in types else set()) for types in limits if types
        ]
        if not limits:
            limits = [{type} for type, keywords in _IMPLIED.items() if keywords & schema.keys()][:1]
        types = set.intersection(*limits) if limits else set()
        return types | {"null"} if types and schema.get("nullable") is True else types


def _resolve(reference: str, root: object) -> object:
    """Return the schema at a JSON pointer such as `#/$defs/Point`, or None."""
    if not reference.startswith("#"):
        return None
    at = root
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(at, Mapping):
            at = at.get(name)
        elif isinstance(at, list) and name.isdigit() and int(name) < len(at):
            at = at[int(name)]
        else:
            return None
    return at


def _is_one_of(value: object, types: set[str]) -> bool:
    type_name = _type_of(value)
    return type_name in types or (type_name == "integer" and "number" in types)


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def decode_json(text: str) -> object:
    """Parse JSON written by a model: integers stay exact, and strings may contain raw newlines.

    Raises:
        ValueError: The text is not JSON, or its value cannot be serialized again.
    """
    try:
        value = json.loads(text, strict=False, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if text.count("[") + text.count("{") > _MAX_DEPTH and _depth(value) > _MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    may_have_half = "\\ud" in text.lower() or not text.isascii()
    if may_have_half and _SURROGATE_RE.search(json.dumps(value, ensure_ascii=False)):
        raise ValueError("it has half of a surrogate pair")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _finite(text: str) -> float:
    """Parse a float; reject 1e999, which parses as infinity and cannot be serialized again."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:_MAX_SHOWN]} is too large for a floating-point number")
    return value


def _depth(value: object) -> int:
    depth, level = 0, [value]
    while level := [item for value in level for item in _items(value)]:
        depth += 1
    return depth


def _items(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
