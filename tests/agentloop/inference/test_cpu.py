"""The support for servers on a CPU, tested without SGLang or torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentloop.inference.cpu import OVERLAY, has_accelerator
from tests.patience import patient


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
        command, env=environment, capture_output=True, text=True, check=True, timeout=patient(15)
    ).stdout


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A torch that records declarations, and a torchvision that needs them."""
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
    output = _python("import torchvision; print(torchvision.seen)", OVERLAY, site)
    assert output.strip() == "['torchvision::nms', 'torchvision::qnms']"


def test_overlay_does_not_change_a_torchvision_that_works(site: Path) -> None:
    works = site.rename(site.with_name("works"))
    output = _python(
        "import torch, torchvision; print(torchvision.seen, len(torch.loaded))", OVERLAY, works
    )
    assert output.strip() == "[] 1"


def test_overlay_does_not_import_torch(site: Path) -> None:
    output = _python("import sys; print('torch' in sys.modules, len(sys.modules))", OVERLAY, site)
    imported, modules = output.split()
    assert imported == "False"
    assert int(modules) < 100


def test_overlay_runs_the_sitecustomize_that_it_shadows(site: Path) -> None:
    (site / "sitecustomize.py").write_text("print('theirs')")
    assert _python("print('main')", OVERLAY, site).split() == ["theirs", "main"]


@pytest.mark.skipif(sys.platform != "linux", reason="servers fork on Linux only")
def test_overlay_lets_a_servers_processes_be_forked(site: Path) -> None:
    program = """
import multiprocessing
multiprocessing.set_start_method("spawn", force=True)  # as SGLang does
imported = []
def child():
    print(imported, flush=True)
if __name__ == "__main__":
    imported.append("once")
    process = multiprocessing.Process(target=child)
    process.start()
    process.join()
"""
    assert _python(program, OVERLAY, site).strip() == "['once']"
