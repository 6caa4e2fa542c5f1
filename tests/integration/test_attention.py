"""The servers' attention on a CPU against SGLang's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentloop.inference.processes import supervise
from agentloop.inference.processes.supervise import ServerSettings

pytest.importorskip("sglang", reason="needs SGLang: python -m agentloop.inference.install")
SCRIPT = Path(__file__).with_name("attention_script.py")


@pytest.mark.real
@pytest.mark.gate
def test_attention_on_random_batches() -> None:
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "100"],
        env=supervise._environment(ServerSettings(), on_cpu=True, offline=True),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout.splitlines()[-1]) < 2e-6
