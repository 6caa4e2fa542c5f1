"""Programs that tests run to their end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tests.patience import patient

OUR_PATH = {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
"""The variable of a program that imports what a test does."""


def run_python(
    *arguments: object,
    status: int | None = 0,
    timeout_s: float = 240,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run Python to its end, and return its outputs.

    Args:
        arguments: those of the interpreter.
        status: how it has to end; None: in any way.
        timeout_s: how long it may take.
        env: variables besides the test's own.
        options: of `subprocess.run`.
    """
    ended = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=patient(timeout_s),
        check=False,
        env={**os.environ, **(env or {})},
        **options,
    )
    assert status is None or ended.returncode == status, ended.stdout + ended.stderr
    return ended
