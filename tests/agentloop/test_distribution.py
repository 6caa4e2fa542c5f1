"""Names and versions of packages, and hints to install them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from agentloop import distribution
from agentloop.__main__ import main
from agentloop.distribution import NAME, install_hint, require, version
from agentloop.errors import SettingsError
from agentloop.launch.machine import examine

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_name_is_that_of_the_project() -> None:
    assert PROJECT["name"] == NAME
    assert version() == PROJECT["version"]


def test_every_hint_names_an_extra_that_exists() -> None:
    """This covers the documents, which must not name another project's distribution either."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "tox.ini"]
    files += [*ROOT.glob("agentloop/**/*.py"), *ROOT.glob("tests/**/*.py")]
    extras = set()
    for file in files:
        text = file.read_text("utf-8")
        assert not re.search(r"pip install '?agentloop(?!-rl)\b", text), file
        extras |= set(re.findall(rf"{NAME}\[([a-z-]+)\]", text))
        extras |= set(re.findall(r"install_hint\(['\"]([a-z-]+)['\"]\)", text))
    assert extras - {"otel"} < set(PROJECT["optional-dependencies"])
    assert "otel" in extras


def test_missing_package_is_named_with_the_command_to_install_it() -> None:
    require("train", {"json": "everything"})
    with pytest.raises(SettingsError) as caught:
        require("train", {"json": "everything", "nobody_has_this": "plots", "nor_this": "speed"})
    assert str(caught.value) == (
        f"nobody_has_this (plots), nor_this (speed) are not installed: {install_hint('train')}"
    )


def test_another_project_of_the_import_name_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not distribution.conflict()
    info = tmp_path / "agentloop-0.2.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: agentloop\nVersion: 0.2.2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    advice = "agentloop 0.2.2, another project, is installed too"
    assert advice in distribution.conflict()
    (check,) = (result for result in examine() if result.name == "package agentloop")
    assert (check.is_there, check.is_optional) == (False, False)
    assert advice in check.remedy
    assert main(["env", "init", "a.b"]) == 2
    assert f"agentloop: warning: {advice}" in capsys.readouterr().err


def test_folder_of_that_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "not_a_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not distribution.is_installed("not_a_package")
