"""agentloop/cli/completions.json, which is made from the commands."""

from __future__ import annotations

import pytest

from agentloop.cli.completion import FILE
from tools.completions import text


@pytest.mark.timeout(60)  # imports every command
def test_completions_are_up_to_date() -> None:
    hint = "run `python -m tools.completions` and review the difference"
    assert FILE.read_text("utf-8") == text(), hint
