"""What a server on a CPU is given, without SGLang or torch at hand."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from agentloop.errors import ServerStartError
from agentloop.inference.cpu import OVERLAY, has_accelerator, install

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
UNPINNED = "999"


@pytest.fixture(autouse=True)
def _no_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AGENTLOOP_ACCELERATOR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("devices", "environment", "expected"),
    [
        ([], {}, False),
        (["nvidia0"], {}, True),
        (["nvidiactl"], {}, False),
        (["kfd"], {}, True),
        (["nvidia0"], {"CUDA_VISIBLE_DEVICES": ""}, False),
        (["nvidia0"], {"CUDA_VISIBLE_DEVICES": "0"}, True),
        (["nvidia0"], {"AGENTLOOP_ACCELERATOR": "0"}, False),
        ([], {"AGENTLOOP_ACCELERATOR": "1"}, True),
    ],
)
def test_has_accelerator(
    devices: list[str],
    environment: dict[str, str],
    expected: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in devices:
        (tmp_path / name).touch()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert has_accelerator(tmp_path) is expected


def test_wsl_needs_a_driver_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dxg").touch()
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert not has_accelerator(tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/nvidia-smi")
    assert has_accelerator(tmp_path)


def _python(script: str, *path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=15
    ).stdout


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A torch that records what is declared, and a torchvision that needs it."""
    torch = """
from types import SimpleNamespace
declared = []
loaded = []
class Library:
    def __init__(self, name, kind): self.name = name
    def define(self, schema): declared.append(f"{self.name}::{schema.split('(')[0]}")
    def __del__(self): declared.clear()
library = SimpleNamespace(Library=Library)
def load_library(path):
    if "works" not in path: raise OSError("libcudart")
    loaded.append(path)
ops = SimpleNamespace(load_library=load_library)
"""
    (tmp_path / "torch.py").write_text(torch)
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text("import torch; seen = list(torch.declared)")
    return tmp_path


def test_overlay_declares_what_torchvision_needs(site: Path) -> None:
    said = _python("import torchvision; print(torchvision.seen)", OVERLAY, site)
    assert said.strip() == "['torchvision::nms', 'torchvision::qnms']"


def test_overlay_keeps_off_a_torchvision_that_works(site: Path) -> None:
    works = site.rename(site.with_name("works"))
    said = _python(
        "import torch, torchvision; print(torchvision.seen, len(torch.loaded))", OVERLAY, works
    )
    assert said.strip() == "[] 1"


def test_overlay_costs_others_nothing(site: Path) -> None:
    said = _python("import sys; print('torch' in sys.modules, len(sys.modules))", OVERLAY, site)
    imported, modules = said.split()
    assert imported == "False"
    assert int(modules) < 100


def test_overlay_runs_the_sitecustomize_that_it_shadows(site: Path) -> None:
    (site / "sitecustomize.py").write_text("print('theirs')")
    assert _python("print('main')", OVERLAY, site).split() == ["theirs", "main"]


def _installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        try:
            return versions[name]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr("importlib.metadata.version", version)


def _all_pins() -> dict[str, str]:
    versions = {}
    for file, _ in install._STEPS:
        for requirement in install._read(install._HERE / file):
            exact = [s.version for s in requirement.specifier if s.operator == "=="]
            versions[requirement.name] = exact[0] if exact else UNPINNED
    return versions


def test_pins_agree_with_the_project() -> None:
    project = tomllib.loads(PYPROJECT.read_text())
    lines = [*project["project"]["dependencies"], *project["dependency-groups"]["test"]]
    asked = {r.name: r.specifier for r in map(Requirement, lines)}
    pinned = {name: pin for name, pin in _all_pins().items() if pin != UNPINNED}
    both = asked.keys() & pinned.keys()
    assert {"transformers", "tokenizers", "openai"} <= both
    assert [name for name in both if not asked[name].contains(pinned[name])] == []


def test_install_does_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, _all_pins() | {"torch": "2.13.0+cpu"})
    monkeypatch.setattr(install, "_run", lambda *_: pytest.fail("nothing is missing"))
    said: list[str] = []
    install.install(said.append)
    assert said == ["SGLang for the CPU is installed already."]


def test_install_runs_only_the_steps_that_lack_something(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = _all_pins()
    _installed(monkeypatch, versions := pins | {"sglang": "0.5.22"})
    ran: list[list[str]] = []

    def run(command: list[str], on_progress: object) -> None:
        ran.append(command)
        versions.update(pins)

    monkeypatch.setattr(install, "_run", run)
    assert install.missing() == ["sglang==0.5.23"]
    install.install(lambda _: None)
    [command] = ran
    assert "--no-deps" in command
    assert command[-1].endswith("requirements-nodeps.txt")


def test_install_says_why_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, {})
    script = "print('Collecting torch'); print('ERROR: No matching distribution'); exit(1)"
    monkeypatch.setattr(install, "_installer", lambda: [sys.executable, "-c", script])
    said: list[str] = []
    with pytest.raises(ServerStartError, match=r"tested with Python 3\.11") as caught:
        install.install(said.append)
    assert "ERROR: No matching distribution" in str(caught.value)
    assert "Collecting torch" in said


def test_install_needs_an_installer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _installed(monkeypatch, {})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert install.main() == 1
    assert "ensurepip" in capsys.readouterr().err
