"""docs/recipes/sources.toml against the recipes: each value, each difference with its reason."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pydantic
import pytest
from pydantic_core import to_jsonable_python

from agentloop.config import load_settings
from agentloop.evaluation.wiring import EvaluateSettings
from agentloop.training.plan.settings import TrainSettings
from agentloop.training.sft.run import SftSettings
from tests.agentloop.test_recipes import FOLDER, ROOT

COMMANDS: dict[str, type[pydantic.BaseModel]] = {
    "paper-sft.toml": SftSettings,
    "evaluate-paper.toml": EvaluateSettings,
}
SOURCES = tomllib.loads((ROOT / "docs" / "recipes" / "sources.toml").read_text("utf-8"))


@dataclass(frozen=True)
class Row:
    """What is said of a setting; `there` is None if no source states it."""

    setting: str
    here: Any
    there: Any
    where: str
    why: str


@cache
def tables() -> Mapping[str, list[Row]]:
    """The rows of the document, by the recipe that they are about."""
    return {
        name: [
            *(
                Row(setting, row["value"], row["value"], row["where"], "")
                for setting, row in section.get("stated", {}).items()
            ),
            *(
                Row(setting, row["here"], row.get("there"), row.get("where", ""), row["why"])
                for setting, row in section.get("differs", {}).items()
            ),
        ]
        for name, section in SOURCES.items()
    }


def bases(name: str) -> list[str]:
    """A recipe and those that it extends, itself last."""
    extended = tomllib.loads((FOLDER / name).read_text()).get("extends")
    return [*(bases(extended) if extended else []), name]


def rows(name: str) -> dict[str, Row]:
    """The row of each setting that a recipe has a value for."""
    every = [row for base in bases(name) for row in tables()[base]]
    return {row.setting: row for row in every}


def settings_in(values: Mapping[str, Any], at: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from settings_in(value, f"{at}{name}.")
        else:
            yield f"{at}{name}"


def is_said(setting: str, said: Collection[str]) -> bool:
    """Tables of arguments have one row, as a whole."""
    return any(setting == name or setting.startswith(f"{name}.") for name in said)


def not_in(setting: str, inputs: Collection[str]) -> bool:
    return not any(is_said(name, [setting]) for name in inputs)


def value(settings: Any, name: str) -> Any:
    for part in name.split("."):
        settings = settings[part] if isinstance(settings, dict) else getattr(settings, part)
    return to_jsonable_python(settings)


RECIPES = sorted(tables())
ROWS = [(name, row) for name in RECIPES for row in tables()[name]]
# The prompt has several lines: test_paper_format.py compares it with its source.
ELSEWHERE = ("extends", "run.name", "env.args.system")


def test_papers_recipes_and_the_releases_have_tables() -> None:
    names = {path.name for path in FOLDER.glob("*.toml") if "paper" in path.name}
    assert set(RECIPES) == names | {"release-8gpu.toml"}


@pytest.mark.parametrize("name", RECIPES)
def test_every_value_of_a_recipe_has_a_source(name: str) -> None:
    table = {row.setting: row for row in tables()[name]}
    settings_given = set(settings_in(tomllib.loads((FOLDER / name).read_text()))).difference(
        ELSEWHERE
    )
    not_stated = SOURCES[name].get("not_stated", [])
    text = {*table, *not_stated}
    assert sorted(setting for setting in settings_given if not is_said(setting, text)) == []
    assert sorted(setting for setting in not_stated if not_in(setting, settings_given)) == []


def test_release_inherits_only_what_no_source_states() -> None:
    table = {row.setting: row for row in tables()["release-8gpu.toml"]}
    inherited = [row for base in bases("release-8gpu.toml")[:-1] for row in tables()[base]]
    stated = {row.setting for row in inherited if row.there is not None}
    assert sorted(setting for setting in stated if not is_said(setting, table)) == []


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_has_the_values_of_its_table(name: str) -> None:
    settings = load_settings(COMMANDS.get(name, TrainSettings), [FOLDER / name])
    expected = {setting: row.here for setting, row in rows(name).items()}
    assert expected["chat.template"] == "paper"
    expected["chat.template"] = (FOLDER / "paper.jinja").read_text()  # the settings hold the text
    actual = {setting: value(settings, setting) for setting in expected}
    assert actual == expected


@pytest.mark.parametrize(("name", "row"), ROWS, ids=[f"{n}: {row.setting}" for n, row in ROWS])
def test_difference_has_its_reason_and_nothing_else_has_one(name: str, row: Row) -> None:
    assert bool(row.why) == (row.here != row.there), row
    assert row.where or row.there is None


def test_setting_is_named_once() -> None:
    for name in RECIPES:
        named = [row.setting for row in tables()[name]] + SOURCES[name].get("not_stated", [])
        assert len(named) == len(set(named)), name
