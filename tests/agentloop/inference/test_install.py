"""The installer's requests, without installing anything."""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from agentloop.errors import ServerStartError
from agentloop.inference import install

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
UNPINNED = "999"


@pytest.fixture(autouse=True)
def _no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTLOOP_ACCELERATOR", "0")


def _fake_versions(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(name: str, folder: object = None) -> str:
        try:
            return versions[name]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(install, "_version", version)


def _all_pins() -> dict[str, str]:
    versions = {}
    for step in install.steps(accelerator=False):
        for requirement in step.requirements:
            exact = [s.version for s in requirement.specifier if s.operator == "=="]
            versions[requirement.name] = exact[0] if exact else UNPINNED
    return versions


def test_pins_agree_with_the_project() -> None:
    project = tomllib.loads(PYPROJECT.read_text())
    lines = [*project["project"]["dependencies"], *project["dependency-groups"]["test"]]
    required = {r.name: r.specifier for r in map(Requirement, lines)}
    pinned = {name: pin for name, pin in _all_pins().items() if pin != UNPINNED}
    shared = required.keys() & pinned.keys()
    assert {"transformers", "tokenizers", "openai"} <= shared
    assert [name for name in shared if not required[name].contains(pinned[name])] == []


def test_install_does_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_versions(monkeypatch, _all_pins() | {"torch": "2.13.0+cpu"})
    monkeypatch.setattr(install, "_run", lambda *_: pytest.fail("nothing is missing"))
    progress: list[str] = []
    install.install(progress.append)
    assert progress == ["SGLang for the CPU is already installed."]


def test_install_runs_only_the_steps_that_lack_something(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = _all_pins()
    _fake_versions(monkeypatch, versions := pins | {"sglang": "0.5.22"})
    ran: list[list[str]] = []

    def run(command: list[str], on_progress: object) -> None:
        ran.append(command)
        versions.update(pins)

    monkeypatch.setattr(install, "_run", run)
    monkeypatch.setattr(install, "_installer", lambda: ["pip", "install"])
    assert install.missing(install.steps(accelerator=False)) == ["sglang==0.5.23"]
    install.install(lambda _: None)
    [command] = ran
    assert "--no-deps" in command
    assert "sglang==0.5.23" in command


def test_with_a_gpu_only_sglang_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTLOOP_ACCELERATOR", "1")
    _fake_versions(monkeypatch, versions := dict[str, str]())
    ran: list[list[str]] = []

    def run(command: list[str], on_progress: object) -> None:
        ran.append(command)
        versions["sglang"] = "0.5.23"

    monkeypatch.setattr(install, "_run", run)
    monkeypatch.setattr(install, "_installer", lambda: ["pip", "install"])
    install.install(lambda _: None)
    assert [command[-1] for command in ran] == ["sglang==0.5.23"]


def test_install_says_why_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_versions(monkeypatch, {})
    script = "print('Collecting torch'); print('ERROR: No matching distribution'); exit(1)"
    monkeypatch.setattr(install, "_installer", lambda: [sys.executable, "-c", script])
    progress: list[str] = []
    with pytest.raises(ServerStartError, match=r"tested with Python 3\.11") as caught:
        install.install(progress.append)
    assert "ERROR: No matching distribution" in str(caught.value)
    assert "Collecting torch" in progress


def test_install_needs_an_installer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _fake_versions(monkeypatch, {})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert install.main([]) == 1
    assert "ensurepip" in capsys.readouterr().err
