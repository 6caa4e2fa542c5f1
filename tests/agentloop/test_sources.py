"""docs/recipes/sources.md against the recipes: each value, and each difference with its reason."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pydantic
import pytest
from pydantic_core import to_jsonable_python

from agentloop.cli.evaluate import EvaluateSettings
from agentloop.cli.sft import SftSettings
from agentloop.cli.train import TrainSettings
from agentloop.config import load_settings
from tests.agentloop.test_recipes import FOLDER, ROOT

NOT_STATED = "not stated"
COMMANDS: dict[str, type[pydantic.BaseModel]] = {
    "paper-sft.toml": SftSettings,
    "evaluate-paper.toml": EvaluateSettings,
}


@dataclass(frozen=True)
class Row:
    """A line of a list or a table. Without a setting, it is a difference in words."""

    setting: str
    here: str
    there: str
    where: str
    why: str


def chosen(name: str) -> set[str]:
    """The settings of a recipe that no source states, and that have no line in the table."""
    section = (
        (ROOT / "docs" / "recipes" / "sources.md")
        .read_text()
        .partition(f"## {name}\n")[2]
        .partition("\n## ")[0]
    )
    return set(re.findall(r"`([^`]+)`", section.partition("Not stated:")[2]))


@cache
def tables() -> Mapping[str, list[Row]]:
    """The rows of the document, by the recipe that they are about."""
    by_recipe: dict[str, list[Row]] = {}
    for section in re.split(
        r"^## ", (ROOT / "docs" / "recipes" / "sources.md").read_text(), flags=re.M
    )[1:]:
        name, _, text = section.partition("\n")
        equal = re.findall(r"^- `(\S+) = (.*?)`: (.+)$", text, re.M)
        lines = [line for line in text.splitlines() if line.startswith("|")]
        assert not lines or lines[0] == "| setting | here | there | where | why |"
        cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
        by_recipe[name] = [
            *(Row(setting, here, here, where, "") for setting, here, where in equal),
            *(Row(setting.strip("`"), *cells_of_row) for setting, *cells_of_row in cells),
        ]
    return by_recipe


def bases(name: str) -> list[str]:
    """A recipe and those that it extends, itself last."""
    extended = tomllib.loads((FOLDER / name).read_text()).get("extends")
    return [*(bases(extended) if extended else []), name]


def rows(name: str) -> dict[str, Row]:
    """The row of each setting that a recipe has a value for."""
    every = [row for base in bases(name) for row in tables()[base]]
    return {row.setting: row for row in every if row.setting}


def settings_in(values: Mapping[str, Any], at: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from settings_in(value, f"{at}{name}.")
        else:
            yield f"{at}{name}"


def is_said(setting: str, said: Collection[str]) -> bool:
    """Tables of arguments have one row, as a whole."""
    return any(setting == name or setting.startswith(f"{name}.") for name in said)


def not_in(setting: str, given: Collection[str]) -> bool:
    return not any(is_said(name, [setting]) for name in given)


def toml(cell: str) -> Any:
    return tomllib.loads(f"value = {cell.strip('`')}")["value"]


def value(settings: Any, name: str) -> Any:
    for part in name.split("."):
        settings = settings[part] if isinstance(settings, dict) else getattr(settings, part)
    return to_jsonable_python(settings)


RECIPES = sorted(tables())
ROWS = [(name, row) for name in RECIPES for row in tables()[name]]
# The prompt has several lines: test_paper_format.py compares it with its source.
ELSEWHERE = ("extends", "run.name", "env.args.system")


def test_the_papers_recipes_and_the_releases_have_tables() -> None:
    names = {path.name for path in FOLDER.glob("*.toml") if "paper" in path.name}
    assert set(RECIPES) == names | {"release-8gpu.toml"}


@pytest.mark.parametrize("name", RECIPES)
def test_every_value_of_a_recipe_has_a_source(name: str) -> None:
    table = {row.setting: row for row in tables()[name]}
    settings_given = set(settings_in(tomllib.loads((FOLDER / name).read_text()))).difference(
        ELSEWHERE
    )
    not_stated = chosen(name)
    said = {*table, *not_stated}
    assert sorted(setting for setting in settings_given if not is_said(setting, said)) == []
    assert sorted(setting for setting in not_stated if not_in(setting, settings_given)) == []


def test_the_release_inherits_only_what_no_source_states() -> None:
    table = {row.setting: row for row in tables()["release-8gpu.toml"]}
    inherited = [row for base in bases("release-8gpu.toml")[:-1] for row in tables()[base]]
    stated = {row.setting for row in inherited if row.setting and row.there != NOT_STATED}
    assert sorted(setting for setting in stated if not is_said(setting, table)) == []


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_values_of_its_table(name: str) -> None:
    settings = load_settings(COMMANDS.get(name, TrainSettings), [FOLDER / name])
    expected = {setting: toml(row.here) for setting, row in rows(name).items()}
    assert expected["chat.template"] == "paper"
    expected["chat.template"] = (FOLDER / "paper.jinja").read_text()  # the settings hold the text
    actual = {setting: value(settings, setting) for setting in expected}
    assert actual == expected


@pytest.mark.parametrize(("name", "row"), ROWS, ids=[f"{n}: {row.setting}" for n, row in ROWS])
def test_a_difference_has_its_reason_and_nothing_else_has_one(name: str, row: Row) -> None:
    if not row.setting or row.there == NOT_STATED:
        assert row.why, "a difference without a reason"
        return
    assert row.where
    assert bool(row.why) == (toml(row.here) != toml(row.there)), row


def test_a_table_names_a_setting_once() -> None:
    for name in RECIPES:
        named = [row.setting for row in tables()[name] if row.setting]
        assert len(named) == len(set(named)), name
