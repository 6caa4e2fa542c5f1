"""Inspect AI evaluates the service, by its provider for whatever speaks OpenAI's protocol."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentloop.environments.tasks.problems import arithmetic
from tests.integration.conftest import need
from tests.integration.test_serve import start, stop
from tests.patience import patient

# The first time, an environment is made.
pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

ROOT = Path(__file__).parent.parent.parent
TASKS = Path(__file__).with_name("inspect_task.py")
TOKEN = "s3cret"


@pytest.fixture(scope="session")
def inspect_ai(pytestconfig: pytest.Config) -> Path:
    """Its command, in an environment of its own that later runs find again."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = pyproject["dependency-groups"]["inspect"]
    assert pytestconfig.cache is not None
    key = hashlib.sha256(repr(wanted).encode()).hexdigest()[:12]
    folder = pytestconfig.cache.mkdir("inspect") / key
    is_whole = folder / "whole"
    if not is_whole.exists():
        venv.create(folder, clear=True)
        # With our own pip, and without compiling a hundred packages of which few are imported.
        pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
        install = [*pip, "install", "--quiet", "--no-compile", *wanted]
        usual = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
        done = subprocess.run(
            install, env=usual, capture_output=True, text=True, timeout=patient(600), check=False
        )  # without the pins of this environment, which has another client
        if done.returncode != 0:
            need(f"Inspect AI, which pip does not get: {done.stderr.strip()[-500:]}")
        is_whole.touch()
    return folder / "bin" / "inspect"


@pytest.fixture(scope="module")
def url(docker_engine: None, sglang_url: str) -> Iterator[str]:
    process, url = start(sglang_url, f"serve.token={TOKEN}")
    yield url
    assert stop(process, signal.SIGINT) == 130


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(5)
    made = [arithmetic(level, rng) for level in (1, 2, 2, 3)]
    path = tmp_path_factory.mktemp("problems") / "problems.jsonl"
    samples = [{"input": problem.text, "target": str(problem.answer)} for problem in made]
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return path


def evaluated(command: Path, url: str, task: str, problems: Path, folder: Path) -> Any:
    """Inspect's log."""
    ended = subprocess.run(
        [
            *(command, "eval", f"{TASKS}@{task}", "-T", f"problems={problems}"),
            *("--model", "openai-api/local/small-agent", "--display", "plain"),
            *("--log-dir", folder, "--log-format", "json"),
        ],
        env={
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "LOCAL_BASE_URL": f"{url}/v1",
            "LOCAL_API_KEY": TOKEN,
        },
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patient(400),
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    (log,) = folder.glob("*.json")
    return json.loads(log.read_text())


@pytest.mark.parametrize("task", ["integers", "with_tools"])
def test_inspect_evaluates_a_task(
    inspect_ai: Path, url: str, problems: Path, tmp_path: Path, task: str
) -> None:
    log = evaluated(inspect_ai, url, task, problems, tmp_path)
    assert log["status"] == "success", log.get("error")
    samples = log["samples"]
    assert len(samples) == 4
    scores = [sample["scores"]["pattern"]["value"] for sample in samples]
    assert set(scores) <= {"C", "I"}
    assert scores.count("C") >= 3  # greedy, so the small model knows them or it does not
    for sample in samples:
        assert sample.get("error") is None
        roles = [message["role"] for message in sample["messages"]]
        # The agent's own calls are no calls for Inspect; those of the tool that it brings are.
        once = ["user", "assistant"]
        assert roles == (once if task == "integers" else ["user", "assistant", "tool", "assistant"])
