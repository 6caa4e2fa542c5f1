"""Environments that installed packages register."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentloop.environments.environment import Environment, EnvSettings, load
from agentloop.environments.registry import registered
from agentloop.errors import SettingsError

SOURCE = """
import agentloop

class Box:
    @agentloop.environment
    async def inner(task, agent):
        return 1.0

@agentloop.environment
async def play(task, agent, *, level: int = 1):
    return level
"""


def install(folder: Path, package: str, **environments: str) -> None:
    """Write what an installer writes of a package."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name.replace('_', '-')} = {target}\n" for name, target in environments.items()]
    (info / "entry_points.txt").write_text("[agentloop.environments]\n" + "".join(lines))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of installed packages, one of which registers two environments."""
    (tmp_path / "registered_here.py").write_text(SOURCE)
    install(tmp_path, "first", my_game="registered_here:play", my_gate="registered_here:Box.inner")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_name_without_a_colon_is_looked_up(site: Path) -> None:
    result = load(EnvSettings(name="my-game", args={"level": "3"}))
    assert isinstance(result, Environment)
    assert (result.name, result.arguments) == ("play", {"level": 3})
    inner = load(EnvSettings(name="my-gate"))
    assert isinstance(inner, Environment)
    assert inner.name == "inner"
    listed = [first for first in registered() if first.package == "first 1.0"]
    assert [(first.name, first.target) for first in listed] == [
        ("my-game", "registered_here:play"),
        ("my-gate", "registered_here:Box.inner"),
    ]


def test_unknown_name_is_refused_with_similar_ones(site: Path) -> None:
    with pytest.raises(SettingsError, match=r"'my-gme' \(did you mean 'my-game'"):
        load(EnvSettings(name="my-gme"))
    with pytest.raises(SettingsError, match=r"'zzz' \(installed are: .*my-game, my-gate"):
        load(EnvSettings(name="zzz"))


def test_name_that_two_packages_register_is_refused(site: Path) -> None:
    install(site, "second", my_game="registered_here:Box.inner")
    with pytest.raises(SettingsError, match=r"first 1.0 .* and second 1.0 .* both register"):
        load(EnvSettings(name="my-game"))
    install(site, "third", my_gate="registered_here:Box.inner")  # the same one
    assert load(EnvSettings(name="my-gate")) is not None


def test_registered_environment_that_cannot_be_imported_is_named(site: Path) -> None:
    install(site, "broken", gone="registered_here:gone", lost="no_such_module:play")
    with pytest.raises(SettingsError, match="registered_here has no 'gone'"):
        load(EnvSettings(name="gone"))
    with pytest.raises(SettingsError, match="there is no module 'no_such_module'"):
        load(EnvSettings(name="lost"))
