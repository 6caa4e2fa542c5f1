"""What tests leave behind is found, and fails their run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.leftovers import EXIT_STATUS
from tests.patience import patient

ROOT = Path(__file__).parents[1]
CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.leftovers import Leftovers

def pytest_configure(config):
    config.pluginmanager.register(Leftovers())
"""
FOLDER = "import tempfile\ndef test_leaves_it(): tempfile.mkdtemp(prefix='agentloop-server-')\n"
PROCESS = "import subprocess\ndef test_leaves_it(): subprocess.Popen(['sleep', '1000'])\n"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("program", "description"), [(FOLDER, "folder agentloop-server-"), (PROCESS, "process")]
)
def test_test_that_left_something_is_named(
    tmp_path: Path, program: str, description: str, workers: int
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_other.py").write_text("def test_leaves_nothing(): pass\n")
    (tmp_path / "test_program.py").write_text(program)
    usual = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AGENTLOOP_TEST", "PYTEST_", "TMPDIR"))
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", str(workers), "-q", "."],
        cwd=tmp_path,
        env={**usual, "AGENTLOOP_TEST_PATIENCE": "0.01"},
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    for process in re.findall(r"\* process (\d+)", done.stdout):
        os.kill(int(process), signal.SIGKILL)
    assert "2 passed" in done.stdout
    assert done.returncode == EXIT_STATUS, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("* ")]
    assert line.startswith(f"* {description}")
    assert "test_program.py::test_leaves_it" in line
