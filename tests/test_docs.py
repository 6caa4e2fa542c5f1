"""What the documents promise is there: the commands, the links, the settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentloop.config import describe_settings
from agentloop.runtime import Settings

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


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
    known = {key for key, _, _ in describe_settings(Settings)}
    sections = {key.split(".")[0] for key in known if "." in key}
    named = re.findall(rf"`((?:{'|'.join(sections)})\.[a-z]\w+)`", document.read_text())
    assert [key for key in named if key not in known and not key.endswith(".py")] == []


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
    assert [key for key, _, said in describe_settings(Settings) if not said] == []
