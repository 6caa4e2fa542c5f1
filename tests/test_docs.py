"""What the documents promise is there: the commands, the links, the settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentloop.cli.evaluate import EvaluateSettings
from agentloop.cli.rollouts import RolloutsSettings
from agentloop.cli.sft import SftSettings
from agentloop.cli.train import TrainSettings
from agentloop.config import describe_settings

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SETTINGS = {
    key: said
    for command in (TrainSettings, SftSettings, RolloutsSettings, EvaluateSettings)
    for key, _, said in describe_settings(command)
}


def test_ci_runs_the_readmes_test_command() -> None:
    commands = re.findall(r"^python3\.11 -m venv .*$", (ROOT / "README.md").read_text(), re.M)
    serve, test = commands
    assert serve.endswith("tox run -e serve")
    assert test in (ROOT / ".ci/run").read_text().splitlines()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_settings_that_are_named_exist(document: Path) -> None:
    sections = {key.rpartition(".")[0] for key in SETTINGS}
    first = "|".join({key.split(".")[0] for key in sections if key})
    # Arguments of an environment or a rule of credit assignment, `env.args.x`, are their own.
    args = {key for key in SETTINGS if key.endswith(".args")}
    named = re.findall(rf"`((?:{first})(?:\.[a-z]\w*)+)(?: ?=[^`]*)?`", document.read_text())
    known, files = SETTINGS.keys() | sections, (".py", ".md", ".toml", ".jsonl")
    unknown = [key for key in named if key not in known and not key.endswith(files)]
    assert [key for key in unknown if key.rpartition(".")[0] not in args] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_modules_that_are_named_exist(document: Path) -> None:
    named = re.findall(
        r"python -m ((?:agentloop|sandbox|learner|bench)[\w.]*)", document.read_text()
    )
    paths = [ROOT.joinpath(*name.rstrip(".").split(".")) for name in named]
    missing = [
        str(path.relative_to(ROOT))
        for path in paths
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists())
    ]
    assert missing == []


def test_every_setting_says_what_it_means() -> None:
    assert [key for key, said in SETTINGS.items() if not said] == []


def test_the_index_lists_every_document() -> None:
    docs = ROOT / "docs"
    index = (docs / "README.md").read_text("utf-8")
    documents = [*docs.glob("*.md"), *docs.glob("guides/*.md")]
    names = [str(path.relative_to(docs)) for path in documents if path.name != "README.md"]
    assert [name for name in names if f"({name})" not in index] == []


def test_the_modules_that_the_architecture_names_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    blocks = text.split("```")[1::2]
    named = {name for block in blocks for name in re.findall(r"[\w/]+\.py\b", block)}
    folders = ("agentloop", "sandbox", "learner", "tools")
    there = [str(path) for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(named) > 100
    assert {name for name in named if not any(p.endswith(f"/{name}") for p in there)} == set()
