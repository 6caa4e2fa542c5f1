"""schemathesis against the service: its OpenAPI document says what it does; nothing breaks it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import need
from tests.integration.test_serve import start, stop
from tests.patience import patient

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

ROOT = Path(__file__).parent.parent.parent
TOKEN = "s3cret"


def test_schemathesis_finds_nothing(docker_engine: None, sglang_url: str, tmp_path: Path) -> None:
    """All checks on: statuses, types and schemas of what comes back, whether valid requests are
    taken and others refused, methods that are not there, requests without the token."""
    if importlib.util.find_spec("schemathesis") is None:
        need("schemathesis: pip install --group real")
    process, url = start(sglang_url, f"serve.token={TOKEN}", "budget.max_response_tokens=1")
    try:
        report = schemathesis(url, tmp_path)
    finally:
        assert stop(process, signal.SIGINT) == 130
    assert report["complete"]
    # All but the document itself.
    assert report["operations"]["tested"] == report["operations"]["total"] == 21
    reported = report["warnings"]
    assert (
        not reported["missing_deserializer"]
        + reported["missing_auth"]
        + reported["method_not_allowed"]
    )
    for requests in ("POST /v1/chat/completions", "POST /v1/rollouts"):
        for phase in ("coverage", "fuzzing"):
            rates = report["valid_rates"][requests][phase]
            assert rates["accepted"] > 0
            assert rates["rejected"] == 0


def schemathesis(url: str, folder: Path) -> dict[str, Any]:
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
            *("--header", f"Authorization: Bearer {TOKEN}"),
            *("--max-examples", "20", "--generation-deterministic", "--continue-on-failure"),
            *("--request-timeout", "120", "--suppress-health-check", "too_slow"),
            *("--no-color", "--report-json-path", "report.json"),
        ],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "SCHEMATHESIS_HOOKS": "tests.integration.schemathesis_hooks",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patient(600),
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report
