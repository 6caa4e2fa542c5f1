"""A run that begins with fine-tuning, with all parts real, struck in its phases and continued."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.agentloop.cli.test_resume_phases import arguments_for, struck

pytestmark = [
    pytest.mark.real,
    pytest.mark.full,
    pytest.mark.timeout(1200),  # servers and learner start in each of its lives
    pytest.mark.skipif(sys.platform != "linux", reason="SGLang's wheels are for Linux"),
    pytest.mark.usefixtures("sglang_installed"),
]


@pytest.mark.parametrize("way", ["interrupt", "kill the child"])
def test_struck_run_goes_on_with_real_parts(tmp_path: Path, way: str) -> None:
    short = ["budget.max_response_tokens=40", "stages.short.max_response_tokens=40"]
    arguments = [*arguments_for("laptop"), *short]
    outcome = struck(tmp_path, way, ["fine-tuning", "stage 1"], arguments, parts="real")
    steps = {phase: [row[0] for row in rows] for phase, rows in outcome["rows"].items()}
    assert steps["sft"] == sorted(set(steps["sft"]))  # each once, though some were repeated
    trained = [row[0] for row in outcome["rows"][""] if len(row) > 2]
    assert trained == [1, 2, 3, 4, 5, 6]
