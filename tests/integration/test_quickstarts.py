"""The commands of the quick starts, run as they are, against the shared server.

Training on problems: test_train.py. Several machines: test_cluster.py.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentloop.observe.sample import SAMPLE
from tests.integration.quickstart import QuickStart
from tests.integration.test_serve import start, stop
from tests.test_docs import README

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.fixture
def served(docker_engine: None, sglang_url: str) -> dict[str, str]:
    """The settings that put the shared server in place of one that is started."""
    return {
        "AGENTLOOP_SERVERS": f'["{sglang_url}"]',
        "AGENTLOOP_SAMPLING__TEMPERATURE": "0",
        "AGENTLOOP_TOOL_TIMEOUT_S": "60",
    }


@pytest.fixture(scope="module")
def service(docker_engine: None, sglang_url: str) -> Iterator[str]:
    process, url = start(sglang_url)
    yield url
    stop(process, signal.SIGINT)


def test_install(tmp_path: Path) -> None:
    stated = QuickStart("install.md", tmp_path).run()
    assert "ok       SGLang" in stated


def test_serve_a_model(tmp_path: Path, served: dict[str, str], service: str) -> None:
    page = QuickStart("serve.md", tmp_path)
    page.write_files()
    stated = page.run(served, url=service)
    assert r'"\\boxed{1776}"' in stated  # curl's
    assert "2 turns, 1 call" in stated  # in the terminal
    assert r"\boxed{1776} ['multiply']" in stated


def test_train_in_your_environment(tmp_path: Path, served: dict[str, str]) -> None:
    page = QuickStart("environment.md", tmp_path)
    page.write_files()
    stated = page.run(served)
    assert "7 passed" in stated  # by scripts
    assert "in_time" in stated  # by the model
    assert "inference  1 server" in stated  # the plan


def test_train_your_agent(tmp_path: Path, served: dict[str, str]) -> None:
    stated = QuickStart("agent.md", tmp_path).run(served)
    assert "avg@2" in stated
    assert "inference  1 server" in stated


def test_commands_of_the_readme(tmp_path: Path, served: dict[str, str], service: str) -> None:
    """Those that need no minutes, GPU or second server: test_docs.py names the others."""
    for name in ("latest", "other"):
        shutil.copytree(SAMPLE, tmp_path / "runs" / name)
    page = QuickStart("../../README.md", tmp_path)
    stated = "".join(page.run(served, url=service, only=part) for part in README)
    assert "avg@" in stated
    assert (tmp_path / "run.html").stat().st_size > 100_000
    assert (tmp_path / "curves.svg").stat().st_size > 1_000


def test_evaluate_an_endpoint(tmp_path: Path, service: str) -> None:
    page = QuickStart("evaluate.md", tmp_path)
    page.write_files()
    stated = page.run(url=service)
    assert "avg@4" in stated
    assert "evaluate" in stated
