"""Arguments as models write them: between tags, or in Python."""

from __future__ import annotations

from typing import Any

import pytest

from agentloop.agent.formats.values import ArgumentTypes, decode_python_call


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (r"f(x='\d+')", {"x": r"\d+"}),  # Python warns of it
        ("f(x='two\nlines', y=\"a\" 'b')", {"x": "two\nlines", "y": "ab"}),
        ('f(x=[1, {"a": true, "b": None}], y=null)', {"x": [1, {"a": True, "b": None}], "y": None}),
        ("f(x=(1, -2.5), y=+3)", {"x": [1, -2.5], "y": 3}),
        ("f()", {}),
    ],
)
def test_arguments_are_literals_of_python_or_json(text: str, arguments: dict[str, Any]) -> None:
    assert decode_python_call(text) == ("f", arguments, None)


@pytest.mark.parametrize(
    "value", ["other", "g(1)", "{1, 2}", "b'a'", "1j", "{(1,): 2}", "[*a]", "{**a}", "-'a'"]
)
def test_argument_that_is_no_literal_always_has_the_same_error(value: str) -> None:
    name, arguments, error = decode_python_call(f"f(x={value})")
    assert (name, arguments) == ("f", {})
    assert error == "the argument 'x' of the tool call is not a literal"


@pytest.mark.parametrize(
    "text",
    [
        "f(1)", "f(**x)", "f(", "f", "1", "f(x='\ud800')", "", "f(x=1e999)", "f(x=1).g(y=2)",
        f"f(x={'-' * 9000}1)",
    ],
)  # fmt: skip
def test_only_a_call_with_named_arguments_is_valid(text: str) -> None:
    _, arguments, error = decode_python_call(text)
    assert not arguments
    assert error


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("None", ["string", "null"], None),
        ("True", ["string", "null"], "True"),
        ("true", ["string", "null"], "true"),
        ("True", ["boolean", "null"], True),
        ("None", ["boolean"], "None"),
        ("7", ["string", "integer"], 7),
        ("7", ["string"], "7"),
        ("7.5", ["string", "integer"], "7.5"),
        ("seven", ["integer"], "seven"),
    ],
)
def test_plain_text_gets_a_type_that_the_schema_allows(
    text: str, types: list[str], value: object
) -> None:
    union = {"anyOf": [{"type": name} for name in types]}
    for schema in ({"type": types}, union):
        assert ArgumentTypes({"properties": {"a": schema}}).decode("a", text) == value


_POINT = {"properties": {"x": {"type": "integer"}}}
_DEFS = {
    "Point": _POINT,
    "Level": {"enum": [1, 2]},
    "Circle": {"$ref": "#/$defs/Circle"},
    "a/b": {"type": "integer"},
}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ('{"x": 1}', {"$ref": "#/$defs/Point"}, {"x": 1}),
        ('{"x": 1}', {"allOf": [{"$ref": "#/$defs/Point"}], "description": "d"}, {"x": 1}),
        ('{"x": 1}', {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}, {"x": 1}),
        ("null", {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}, None),
        ("2", {"$ref": "#/$defs/Level"}, 2),
        ("2", {"$ref": "#/$defs/a~1b"}, 2),
        ("2", {"const": 2}, 2),
        ("2", {"const": "2"}, "2"),
        ("2", {"allOf": [{"type": ["integer", "string"]}, {"type": "string"}]}, "2"),
        ("2", {"allOf": [{"type": "number"}, {"type": "integer"}]}, 2),
        ("null", {"type": "string", "nullable": True}, None),
        ("2", {"type": "string", "nullable": True}, "2"),
        ("null", {"type": ["string", "null"]}, None),
        ("[1]", {"items": {"type": "integer"}}, [1]),
        ("2", {"anyOf": [{"type": "integer"}, {}]}, "2"),
        ("2", {"$ref": "#/$defs/Circle"}, "2"),
        ("2", {"$ref": "#/$defs/Missing"}, "2"),
        ("2", {"$ref": "https://example.org/schema"}, "2"),
        ("2", True, "2"),
    ],
)
def test_text_gets_the_type_behind_references_and_combinations(
    text: str, schema: object, value: object
) -> None:
    parameters = {"properties": {"a": schema}, "$defs": _DEFS}
    assert ArgumentTypes(parameters).decode("a", text) == value
    behind = {"$ref": "#/$defs/All", "$defs": {**_DEFS, "All": {"properties": {"a": schema}}}}
    assert ArgumentTypes(behind).decode("a", text) == value


def test_other_arguments_are_allowed_where_the_schema_says_so() -> None:
    named = {"properties": {"a": {"type": "string"}}}
    numbers = ArgumentTypes({**named, "additionalProperties": {"type": "integer"}})
    assert numbers.allow("b")
    assert numbers.decode("b", "2") == 2
    assert not ArgumentTypes(named).allow("b")
    assert ArgumentTypes({}).allow("b")
