"""`agentloop env init` and `agentloop env list`: a new package, and that it works."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path

import pytest

from agentloop.__main__ import main
from agentloop.environments.registry import GROUP
from tests.commands import run_python

ROOT = Path(__file__).parents[4]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert main(["env", "init", "my-game"]) == 0
    return tmp_path / "my-game"


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in `folder`, as a user would."""
    return run_python(*arguments, cwd=folder, timeout_s=60, status=None)


@pytest.mark.timeout(90)  # two processes import agentloop
@pytest.mark.full
def test_tests_of_a_new_package_pass(package: Path) -> None:
    assert sorted(path.name for path in package.iterdir()) == [
        "README.md", "my_game.py", "pyproject.toml", "test_my_game.py", "train.toml",
    ]  # fmt: skip
    planned = python(package, "-m", "agentloop", "train", "--dry-run", "train.toml")
    assert (planned.returncode, "steps      10;" in planned.stdout) == (0, True), planned.stderr
    ended = python(package, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "7 passed" in ended.stdout
    game = package / "my_game.py"
    game.write_text(game.read_text().replace('return "right"', 'return "wrong"'))
    broken = python(package, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider")
    assert broken.returncode == 1


@pytest.mark.timeout(90)  # two processes import agentloop
@pytest.mark.full
def test_installed_package_is_listed_and_used_by_its_name(package: Path) -> None:
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    info = package / "my_game-0.1.0.dist-info"  # as an installer writes it
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [f"{name} = {value}\n" for name, value in project["entry-points"][GROUP].items()]
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n" + "".join(lines))
    listed = python(package, "-m", "agentloop", "env", "list", "--json")
    rows = [row for row in json.loads(listed.stdout) if row["package"] == "my-game 0.1.0"]
    assert rows == [{"name": "my-game", "target": "my_game:my_game", "package": "my-game 0.1.0"}]
    planned = python(
        package, "-m", "agentloop", "evaluate", "--dry-run", "env=my-game", "env.args.max_tries=5"
    )
    assert "tasks      64 (environment)" in planned.stdout, planned.stderr


def test_printed_commands_install_what_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["env", "init", "my-game"]) == 0
    out = capsys.readouterr().out
    assert out.index("pip install -e '.[test]'") < out.index("python -m pytest")
    project = tomllib.loads((tmp_path / "my-game/pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"] == {"test": ["pytest"]}


@pytest.mark.parametrize(
    "name", ["My-Game", "2nd", "a--b", "-a", "a.b", "class", "../x", "spiel ä"]
)
def test_name_that_no_package_can_have_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["env", "init", "--", name]) == 2
    assert f"NAME: {name!r} must be lower-case words" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_no_module_is_shadowed_and_no_file_overwritten(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "init", "json"]) == 2
    assert "a module 'json' exists already" in capsys.readouterr().err
    before = (package / "README.md").read_text()
    assert main(["env", "init", "other-game", "--folder", str(package)]) == 2
    assert f"{package}: File exists" in capsys.readouterr().err
    assert (package / "README.md").read_text() == before


def test_list_is_a_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    info = tmp_path / "chess-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: chess\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nmate = chess.envs:mate\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["env", "list"]) == 0
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["name", "environment", "package"]
    assert ["mate", "chess.envs:mate", "chess 2.0"] in rows
    monkeypatch.setattr("agentloop.cli.env.list.registered", list)
    assert main(["env", "list"]) == 0
    assert "No installed package registers" in capsys.readouterr().out
