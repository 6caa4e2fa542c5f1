"""`python -m tools.run_tests ARGUMENTS`: run pytest; run tests that failed again, alone.

    pytest ARGUMENTS ──what failed──> pytest, one process ──what failed──> pytest, one process
                                              │                                    │
                                              └── a test that passed is flaky ─────┘

A test that fails three times fails the run. Flaky tests do not, up to three of them. Each tox
environment keeps its own in build/flaky/; `--report` lists those of all environments and fails if
there are more than three. An error outside of tests, for example one of an import, or something
that the tests left behind, fails at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["MAX_FLAKY", "main", "report", "run_tests"]

ROOT = Path(__file__).parents[1]
MAX_FLAKY = 3
_MAX_RERUNS = 2
_TESTS_FAILED = 1
_FLAKY = ROOT / "build" / "flaky"


def run_tests(arguments: Sequence[str], run: Callable[[list[str]], int], failed: Path) -> list[str]:
    """Run pytest up to three times, and return the ids of the flaky tests.

    Args:
        run: Runs pytest with these arguments and returns its exit status.
        failed: Where pytest's cache keeps the ids of failed tests.

    Raises:
        SystemExit: A test failed each time, or something else than a test failed.
    """
    status = run([*arguments, "--cache-clear"])
    first = _failed_ids(failed)
    for _ in range(_MAX_RERUNS):
        if status != _TESTS_FAILED:
            break
        print(f"Running again, alone: {len(_failed_ids(failed))} tests that failed", flush=True)
        # The last of two options counts.
        status = run([*arguments, "-n", "0", "--last-failed", "--last-failed-no-failures", "none"])
    if status:
        raise SystemExit(status)
    return first


def report(folder: Path) -> int:
    """Print the flaky tests of all environments, and return 1 if there are too many."""
    flaky = {file.stem: file.read_text().splitlines() for file in sorted(folder.glob("*.txt"))}
    lines = [f"{environment}: {test}" for environment in flaky for test in flaky[environment]]
    print(f"{len(lines)} flaky tests, at most {MAX_FLAKY} are allowed")
    for line in lines:
        print(f"* {line}")
    return int(len(lines) > MAX_FLAKY)


def _failed_ids(file: Path) -> list[str]:
    return sorted(json.loads(file.read_text())) if file.exists() else []


def main() -> None:
    if sys.argv[1:] == ["--report"]:
        raise SystemExit(report(_FLAKY))
    environment = os.environ.get("TOX_ENV_NAME", "tests")
    cache = _FLAKY / "cache" / environment
    ours = _FLAKY / f"{environment}.txt"
    ours.parent.mkdir(parents=True, exist_ok=True)
    ours.unlink(missing_ok=True)

    def run(arguments: list[str]) -> int:
        command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments]
        return subprocess.run(command, check=False).returncode

    flaky = run_tests(sys.argv[1:], run, cache / "v" / "cache" / "lastfailed")
    ours.write_text("".join(f"{test}\n" for test in flaky))


if __name__ == "__main__":
    main()
