"""What is carried to a machine without a network: cut, fixed, in front of what is there."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bench import gpu_carry

ROOT = Path(__file__).parents[2]


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "some-1.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("sgl_kernel/__init__.py", "kind = 'old'\n")
        archive.writestr("sgl_kernel/flash_ops.abi3.so", "large")
    return path


def test_packed_packages_are_cut_and_fixed(wheel: Path, tmp_path: Path) -> None:
    fixes = {"sgl_kernel/__init__.py": {"'old'": "'new'"}}
    gpu_carry.pack([wheel], tmp_path / "site.zip", fixes)
    with zipfile.ZipFile(tmp_path / "site.zip") as archive:
        assert archive.read("sgl_kernel/__init__.py") == b"kind = 'new'\n"
        assert "sgl_kernel/flash_ops.abi3.so" not in archive.namelist()
        assert "flashinfer/__init__.py" in archive.namelist()


@pytest.mark.parametrize(
    "fixes", [{"sgl_kernel/__init__.py": {"absent": ""}}, {"other.py": {"old": ""}}]
)
def test_fix_that_does_not_apply_is_an_error(
    fixes: dict[str, dict[str, str]], wheel: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=next(iter(fixes))):
        gpu_carry.pack([wheel], tmp_path / "site.zip", fixes)


USE = """
import sys, json
from pathlib import Path
from bench import gpu_carry
gpu_carry.use(Path(sys.argv[1]), Path(sys.argv[2]))
import subprocess
code = '''
import json, sgl_kernel
from flashinfer.sampling import top_k
try: top_k()
except NotImplementedError as error: refused = str(error)
try: import flashinfer.norm
except ImportError: print(json.dumps([sgl_kernel.kind, refused]))
'''
print(subprocess.check_output([sys.executable, "-c", code], text=True))
"""


def test_children_import_what_was_unpacked(wheel: Path, tmp_path: Path) -> None:
    gpu_carry.pack([wheel], tmp_path / "site.zip", {})
    arguments = [sys.executable, "-c", USE, str(tmp_path), str(tmp_path / "site")]
    output = subprocess.check_output(arguments, text=True, cwd=ROOT, timeout=60)
    kind, refused = json.loads(output)
    assert kind == "old"
    assert refused == "flashinfer.top_k was not carried along"
