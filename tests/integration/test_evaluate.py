"""Evaluating with the real parts: the small model, its tools, and the service as an endpoint."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentloop.trajectory import Trajectory
from tests.integration.test_serve import start, stop
from tests.patience import patient

pytestmark = [pytest.mark.real, pytest.mark.timeout(600), pytest.mark.usefixtures("docker_engine")]

TOLD = [
    "tasks.levels=[3, 6]", "tasks.seed=5", "reward.function=exact", "tool_timeout_s=60",
    "budget.max_response_tokens=400", "evaluate.num_samples=4",
]  # fmt: skip


def command(path: Path, *arguments: str) -> Sequence[str]:
    folder = [] if "--resume" in arguments else [f"run.folder='{path}'", "run.name=one", *TOLD]
    return [sys.executable, "-m", "agentloop", "evaluate", *folder, *arguments]


def evaluated(path: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        command(path, "--json", *arguments), stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def rows(run: Path) -> list[dict[str, Any]]:
    files = sorted((run / "trajectories").glob("group-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def service(docker_engine: None, sglang_url: str) -> Iterator[str]:
    process, url = start(sglang_url)
    yield f"{url}/v1"
    stop(process, signal.SIGINT)


def test_small_model_by_our_own_loop(sglang_url: str, tmp_path: Path) -> None:
    result = evaluated(tmp_path, f'servers=["{sglang_url}"]', "evaluate.num_tasks=6")
    (reported,) = result["sets"].values()
    assert (reported["num_tasks"], reported["num_samples"], reported["num_missing"]) == (6, 24, 0)
    assert reported["avg_at_k"]["value"] > 0.7
    assert reported["avg_at_k"]["value"] <= reported["pass_at_k"]["4"]["value"]
    assert reported["turns_mean"] > 1.5  # it calls its tools
    assert reported["tool_errors_in_correct"] is not None
    for row in rows(tmp_path / "one"):
        trajectory = Trajectory.from_dict(row["trajectory"])
        assert len(trajectory.ids) == len(trajectory.logprobs) == len(trajectory.mask)
        assert row["figures"]["num_tokens"] == sum(trajectory.mask)
        assert row["reward"] in (0, 1)


def test_run_that_is_stopped_goes_on_and_samples_nothing_twice(
    sglang_url: str, tmp_path: Path
) -> None:
    more = [f'servers=["{sglang_url}"]', "evaluate.num_tasks=20", "evaluate.max_open=2"]
    run = tmp_path / "one"
    with subprocess.Popen(command(tmp_path, *more)) as process:
        try:
            deadline = time.monotonic() + patient(240)
            while len(list(run.glob("trajectories/group-*.jsonl"))) < 3:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            assert process.wait(patient(120)) == 130
        finally:
            process.kill()
    before = {row["trajectory"]["id"]: row for row in rows(run)}
    assert 12 <= len(before) < 80
    result = evaluated(tmp_path, "--resume", str(run))
    assert result["all"]["num_samples"] == 80
    after = {row["trajectory"]["id"]: row for row in rows(run)}
    assert len(after) == 80
    assert {id: after[id] for id in before} == before


def test_service_is_an_endpoint(service: str, tmp_path: Path) -> None:
    more = ["endpoint.model=small-agent", "evaluate.num_tasks=6", "sampling.seed=1"]
    result = evaluated(tmp_path, f"endpoint.url={service}", *more)
    assert (result["model"], result["by"]) == ("small-agent", service)
    (reported,) = result["sets"].values()
    assert (reported["num_samples"], reported["num_missing"]) == (24, 0)
    assert reported["avg_at_k"]["value"] > 0.7
    assert reported["length_mean"] > 10
    for row in rows(tmp_path / "one"):
        assert row["trajectory"]["stop_reason"] == "answered"
        assert "<think>" in row["trajectory"]["turns"][0]["text"]


def test_prompt_that_the_service_refuses_is_told(service: str, tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    tasks = [("What is 3 times 4?", "12"), ("1 " * 50_000, "1")]
    lines = [json.dumps({"problem": problem, "answer": answer}) for problem, answer in tasks]
    file.write_text("\n".join(lines), "utf-8")
    endpoint = [f"endpoint.url={service}", "endpoint.model=small-agent"]
    done = subprocess.run(
        command(tmp_path, "--json", "--tasks", str(file), *endpoint),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    result = json.loads(done.stdout)
    assert (result["all"]["num_refused"], result["all"]["num_missing"]) == (1, 4)
    (reason,) = result["missing"]
    assert "maximum context length" in reason
    assert result["all"]["avg_at_k"]["num_tasks"] == 1
