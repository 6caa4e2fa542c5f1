"""The gate's runner: what fails it, and what it lists as flaky."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.run_tests import MAX_FLAKY, ROOT, report, run_tests

PASSES = "def test_passes(): pass\n"
FAILS = "def test_fails(): assert False\n"
# Fails as often as it is told to: a file counts the runs.
FLAKY = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range({number}))
def test_flaky(number):
    runs = Path(__file__).with_name(f"runs-{{number}}")
    count = int(runs.read_text()) if runs.exists() else 0
    runs.write_text(str(count + 1))
    assert count >= {failures}
"""


def run(folder: Path, program: str) -> list[str]:
    """Run the tests of `program`, and return those that were flaky."""
    (folder / "test_program.py").write_text(program)
    cache = folder / "cache"

    def run_pytest(arguments: list[str]) -> int:
        command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments]
        environment = {**os.environ, "PYTEST_ADDOPTS": ""}
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode

    return run_tests(["-n", "2", "."], run_pytest, cache / "v" / "cache" / "lastfailed")


def test_tests_that_pass_are_not_flaky(tmp_path: Path) -> None:
    assert run(tmp_path, PASSES) == []


@pytest.mark.parametrize("failures", [1, 2])
def test_test_that_passes_when_repeated_is_flaky(tmp_path: Path, failures: int) -> None:
    program = PASSES + FLAKY.format(number=1, failures=failures)
    assert run(tmp_path, program) == ["test_program.py::test_flaky[0]"]


@pytest.mark.parametrize("program", [FAILS, PASSES + FLAKY.format(number=1, failures=3)])
def test_test_that_fails_three_times_fails_the_run(tmp_path: Path, program: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, program)
    assert ended.value.code == 1


def test_error_of_an_import_is_not_run_again(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, "import nothing_that_exists\n" + PASSES)
    assert ended.value.code not in (None, 0)


def test_report_counts_all_environments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "py311.txt").write_text("a.py::test_a\nb.py::test_b\n")
    (tmp_path / "integration.txt").write_text("c.py::test_c\n" * (MAX_FLAKY - 2))
    assert report(tmp_path) == 0
    assert "* py311: a.py::test_a" in capsys.readouterr().out
    (tmp_path / "py312.txt").write_text("d.py::test_d\n")
    assert report(tmp_path) == 1


def test_report_is_part_of_the_gate() -> None:
    assert "flaky" in (ROOT / "tox.ini").read_text().split("env_list = ")[1].splitlines()[0]
