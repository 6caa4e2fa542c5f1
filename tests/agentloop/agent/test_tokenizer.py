"""Loading a tokenizer, as far as the tests of chat formats do not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find_spec(name, *rest)
{}
"""
OURS = """
from agentloop.agent.tokenizer import load_tokenizer
from agentloop.models import SMALL
load_tokenizer(SMALL)
"""


@pytest.mark.timeout(60)  # imports transformers
@pytest.mark.parametrize(("program", "is_told"), [("import transformers", True), (OURS, False)])
@pytest.mark.full
def test_a_base_install_does_not_hear_that_there_is_no_torch(program: str, is_told: bool) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_VERBOSITY"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(program)],
        capture_output=True,
        text=True,
        check=True,
        env=env,
    )
    assert ("PyTorch was not found" in done.stderr) == is_told
