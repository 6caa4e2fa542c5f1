"""Training runs that are killed and resumed: some of bench/kill.py's, with fixed seeds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="guardians look at /proc"),
    pytest.mark.timeout(300),
    pytest.mark.full,
]

ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark in a process of its own, because it forks and adopts orphans."""
    command = [sys.executable, "-m", "bench.kill", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=patient(280), check=False
    )


def test_killed_runs_equal_undisturbed_ones(tmp_path: Path) -> None:
    """A run of each kind, in which the runtime, its learner and servers are killed."""
    done = bench("--runs", "10", "--seed", "0", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 runs" in done.stdout
    for victim in ("runtime", "learner", "server"):
        assert f", {victim} " in done.stdout
