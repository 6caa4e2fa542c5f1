"""`agentloop train`, killed by SIGKILL and gone on with, all parts real: one of bench/kill.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(900),  # servers and learner are started twice
    pytest.mark.skipif(sys.platform != "linux", reason="SGLang's wheels are for Linux"),
    pytest.mark.usefixtures("docker_engine", "sglang_installed"),
]

ROOT = Path(__file__).parents[2]


@pytest.mark.gate
def test_killed_run_goes_on_from_its_journal(tmp_path: Path) -> None:
    """The runtime is killed in the second of four steps; a checkpoint is made after every other.

    The rollouts are those of an environment with two agents, at a staleness of 1.
    """
    command = [sys.executable, "-m", "bench.kill", "--real", "1", "--seed", "5", "--steps", "4"]
    reported = ["--victims", "runtime", "--folder", str(tmp_path)]
    done = subprocess.run(
        [*command, *reported],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patient(880),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # The second kill comes as the run ends, or just too late.
    assert re.search(r"1 real runs, [23] lives", done.stdout), done.stdout
    assert re.search(r"Killed: runtime [12]", done.stdout), done.stdout
