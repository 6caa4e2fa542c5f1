"""Constraints on turns: what may be sampled, as xgrammar's structural tags."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentloop.agent.constraints import OutputRules, check_rules, constraint_of
from agentloop.agent.formats import FAMILIES, HERMES, get_family
from agentloop.errors import RequestError

SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("search", "read")
]
ANSWER = {"type": "object", "properties": {"n": {"type": "integer"}}}


def tag(rules: OutputRules, *, family: Any = HERMES, tools: Any = TOOLS, **options: Any) -> Any:
    inputs = {"opened_thought": "", "message": 0, **options}
    parameters = constraint_of(rules, family, tools, **inputs)
    return json.loads(parameters["structural_tag"])["format"]["elements"] if parameters else None


def tags_in(value: Any) -> list[dict[str, Any]]:
    """The tags of a format, at any depth."""
    if isinstance(value, dict):
        tags = [value] if value.get("type") == "tag" else []
        return tags + [tag for item in value.values() for tag in tags_in(item)]
    return [tag for item in value for tag in tags_in(item)] if isinstance(value, list) else []


def test_free_turn_has_no_constraint() -> None:
    assert tag(OutputRules()) is None
    assert tag(OutputRules("required"), message=1) is None


def test_required_call_is_one_of_the_tools() -> None:
    *_, calls = tag(OutputRules("required"))
    begins = [tag["begin"] for tag in tags_in(calls)]
    assert ['"search"' in begins[0], '"read"' in begins[1], len(begins)] == [True, True, 2]
    *_, calls = tag(OutputRules("read"), single_call=True)
    (only,) = tags_in(calls)
    assert (only["content"]["json_schema"], calls["stop_after_first"]) == (SCHEMA, True)


def test_thought_may_come_first_and_an_opened_one_ends_first() -> None:
    thought, _, _ = tag(OutputRules("required"))
    assert thought["type"] == "optional"
    thought, _, _ = tag(OutputRules("required"), opened_thought="<think>\n")
    assert (thought["begin"], thought["end"]) == ("", "</think>")


def test_answer_is_json_and_calls_stay_possible() -> None:
    *_, answer = tag(OutputRules(schema=ANSWER), tools=[])
    assert (answer["type"], answer["json_schema"]) == ("json_schema", ANSWER)
    *_, either = tag(OutputRules(schema=ANSWER), message=1)
    assert [element["type"] for element in either["elements"]] == [
        "tags_with_separator",
        "json_schema",
    ]
    *_, first = tag(OutputRules("required", ANSWER))
    assert first["type"] == "tags_with_separator"


@pytest.mark.parametrize(
    ("rules", "tools", "family", "error"),
    [
        (OutputRules("required"), [], "hermes", "tool_choice: there are no tools"),
        (OutputRules("write"), TOOLS, "hermes", "no tool 'write'; the tools are search, read"),
        (OutputRules("read"), TOOLS, "llama-pythonic", "cannot be forced .* 'llama-pythonic'"),
    ],
)
def test_rules_that_cannot_be_kept_are_named(
    rules: OutputRules, tools: Any, family: str, error: str
) -> None:
    with pytest.raises(RequestError, match=error):
        check_rules(rules, get_family(family), tools)


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family.call_form], ids=lambda f: f.name
)
def test_every_form_names_the_tools(family: Any) -> None:
    check_rules(OutputRules("required"), family, TOOLS)
    *_, calls = tag(OutputRules("required"), family=family)
    begins = [
        entry["begin"] for entry in tags_in(calls) if entry["content"]["type"] == "json_schema"
    ]
    assert len(begins) == 2
    assert "search" in begins[0]
    assert "read" in begins[1]
    assert not any("NAME" in begin for begin in begins)


def test_named_tool_is_called_once_within_the_markup() -> None:
    odd = {"type": "function", "function": {"name": 'a"b', "parameters": None}}
    *_, calls = tag(OutputRules('a"b'), tools=[*TOOLS, odd])
    (only,) = tags_in(calls)
    assert calls["stop_after_first"]
    assert only["begin"] == '<tool_call>\n{"name": "a\\"b", "arguments": '
    assert only["content"]["json_schema"] == {"type": "object"}


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"properties": {"n": {"multipleOf": 2}}}, "multipleOf"),
        ({"anyOf": [{"type": "null"}, {"not": {"type": "string"}}]}, "not"),
        ({"$defs": {"if": {"items": {"if": {}}}}}, "if"),
    ],
)
def test_keyword_that_would_be_ignored_is_named(schema: Any, keyword: str) -> None:
    with pytest.raises(RequestError, match=rf"^response_format.*schema: '{keyword}' cannot"):
        check_rules(OutputRules(schema=schema), HERMES, [])


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"not": {"type": "string"}, "if": {}}, "required": ["not", "if"]},
        {"uniqueItems": False},
        {"enum": [{"not": 1}], "default": {"if": 1}},
    ],
)
def test_names_and_values_are_no_keywords(schema: Any) -> None:
    check_rules(OutputRules(schema=schema), HERMES, [])
