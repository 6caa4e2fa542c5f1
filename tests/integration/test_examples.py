"""The programs of examples/ run as they are, against the shared server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "prints"),
    [
        ("own_tool.py", "\\boxed{1776}"),
        ("watch.py", "answered"),
        ("groups.py", "ids sampled"),
    ],
)
def test_example(name: str, prints: str, docker_engine: None, sglang_url: str) -> None:
    environment = {
        **os.environ,
        "AGENTLOOP_SERVERS": f'["{sglang_url}"]',
        "AGENTLOOP_SAMPLING__TEMPERATURE": "0",
        "AGENTLOOP_TOOL_TIMEOUT_S": "60",
    }
    ended = subprocess.run(
        [sys.executable, EXAMPLES / name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert prints in ended.stdout


def test_every_example_is_run() -> None:
    run_here = {"own_tool.py", "watch.py", "groups.py"}
    run_by_test_docs_guides = {"my_reward.py", "stateful_tool.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == run_here | run_by_test_docs_guides
