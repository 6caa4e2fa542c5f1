"""The command of a rank, before it joins the others."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.learner.ranks import ROOT
from tests.patience import patient


@pytest.mark.parametrize(
    ("chosen", "seen"),
    [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "active"}, "active"), ({"GOMP_SPINCOUNT": "7"}, "None")],
)
def test_threads_sleep_while_they_wait_unless_the_user_chose(
    chosen: dict[str, str], seen: str
) -> None:
    """The policy also applies on another node, which passes an environment of its own."""
    script = (
        "import os, sys; from agentloop.learner.__main__ import main; "
        "assert 'torch' not in sys.modules; "
        "main(['/no/settings.json']); print(os.environ.get('OMP_WAIT_POLICY'), file=sys.stderr)"
    )
    bare = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env=bare | chosen,
        capture_output=True,
        text=True,
        check=True,
        timeout=patient(60),
    )
    assert ran.stderr.splitlines()[-1] == seen
