"""The benchmark for one GPU: parts are run, skipped, ended and resumed; settings are valid."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentloop.config import load_settings
from agentloop.training.plan.checks import check_settings
from agentloop.training.plan.settings import TrainSettings
from bench import gpu, gpu_servers, handover
from bench.gpu_model import FULL, TINY, Setup

ON_GPU, ON_CPU = Setup("cuda", FULL, Path("/tmp")), Setup("cpu", TINY, Path("/tmp"))
DONE = 'print("hello"); write({"state": "done", "rows": [{"case": "x", "tokens/s": 1234.5}]})'
WRITE = """
import json, pathlib, sys
def write(result):
    about = {"part": "step", "device": "cpu", "size": "tiny"}
    pathlib.Path(sys.argv[1]).write_text(json.dumps(about | result))
"""


class Runs:
    """Runs of the benchmark whose parts are these programs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.program, self.num_started = folder, DONE, 0
        monkeypatch.setattr(gpu, "_command", self._command)
        monkeypatch.setattr(
            gpu, "PARTS", {"step": gpu.Part("", (), 60), "none": gpu.Part("", ("no_such_module",))}
        )

    def _command(self, name: str, options: argparse.Namespace) -> list[str]:
        self.num_started += 1
        return [sys.executable, "-c", WRITE + self.program, str(self.folder / f"{name}.json")]

    def __call__(self, *more: str) -> int:
        usual = ("--device", "cpu", "--size", "tiny", "--folder", str(self.folder))
        return gpu.main([*usual, *more])

    def result(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "step.json").read_text())
        return content


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path, monkeypatch)


def test_part_that_succeeded_is_not_run_again(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (runs(), runs.num_started) == (0, 1)
    first = capsys.readouterr().out
    assert first.startswith("step, ")
    assert " s: x: tokens/s 1,234\n" in first
    assert json.loads((runs.folder / "results.jsonl").read_text().splitlines()[0]) == runs.result()
    assert "| step | x | tokens/s 1,234 |" in first
    assert "| none | skipped | needs no_such_module, which is not installed |" in first
    assert (runs(), runs.num_started) == (0, 1)
    again = capsys.readouterr().out
    assert [each.split("| part")[1] for each in (first, again)] == 2 * [again.split("| part")[1]]
    assert (runs("--again"), runs.num_started) == (0, 2)
    assert (runs("--size", "full"), runs.num_started) == (0, 3), "another size is another result"


def test_part_that_failed_is_run_again(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.program = "raise SystemExit('out of memory')"
    assert (runs("--only", "step"), runs.num_started) == (1, 1)
    assert "ended with 1: out of memory (see " in capsys.readouterr().out
    runs.program = 'write({"state": "failed", "reason": "wrong"})'
    assert (runs("--only", "step"), runs.num_started) == (1, 2)
    assert "| step | failed | wrong |" in capsys.readouterr().out
    runs.program = DONE
    assert (runs("--only", "step"), runs.num_started) == (0, 3)


def test_part_that_takes_too_long_is_killed(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.program = "import signal; signal.pause()"
    monkeypatch.setattr(gpu, "PARTS", {"step": gpu.Part("", (), 0.5)})
    assert runs() == 1
    assert runs.result()["reason"] == "took over 0.5 s"


def test_parts_exist_and_are_short() -> None:
    for part in gpu.PARTS.values():
        module, _, name = part.function.partition(":")
        assert callable(getattr(importlib.import_module(module), name))
        assert part.limit_s <= 480


def test_gpu_is_missing_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_gpus, reason in ((0, "torch sees no GPU"), (1, None)):
        monkeypatch.setattr(gpu, "_num_gpus", lambda n=num_gpus: n)
        assert gpu.missing(gpu.Part("", ()), "cuda") == reason
    two = gpu.Part("", ("gpus",))
    assert "two GPUs" in str(gpu.missing(two, "cuda"))
    assert gpu.missing(two, "cpu") is None
    assert gpu.missing(gpu.Part("", ("cuda",)), "cpu") == "needs a GPU"


def test_list_has_a_command_for_each_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--list"]) == 0
    output = capsys.readouterr().out
    for name, part in gpu.PARTS.items():
        assert f"{name}: at most {part.limit_s:g} s" in output
        assert f"-m bench.gpu --run {name} --device cuda --size full" in output


@pytest.mark.parametrize("setup", [ON_GPU, ON_CPU], ids=["gpu", "cpu"])
def test_runs_settings_are_valid(setup: Setup, tmp_path: Path) -> None:
    handover.make_model(tmp_path / "model", 8, 1024)
    command, recipe, *overrides = gpu_servers.train_arguments(setup, tmp_path / "model", 10)
    settings = check_settings(load_settings(TrainSettings, [Path(recipe)], overrides))
    assert command == "train"
    assert settings.loop.steps == 10
    assert settings.learner.dtype == "bfloat16"
    assert (settings.server.device == "cuda") == setup.on_gpu
    assert ("--mem-fraction-static" in settings.server.extra_args) == setup.on_gpu


@pytest.mark.real
@pytest.mark.timeout(600)  # each part imports torch, and most of them DeepSpeed
@pytest.mark.parametrize("names", ["attention,head", "speed", "step"])
def test_parts_of_the_learner_work(
    names: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU, with a tiny model: the same code as on a GPU."""
    pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agentloop-rl[train]'")
    arguments: Sequence[str] = ("--device", "cpu", "--size", "tiny", "--folder", str(tmp_path))
    returncode = gpu.main([*arguments, "--only", names])
    logs = "".join(path.read_text()[-2000:] for path in tmp_path.glob("*.log"))
    assert returncode == 0, capsys.readouterr().out + logs
    for name in names.split(","):
        result = json.loads((tmp_path / f"{name}.json").read_text())
        assert result["state"] == "done"
        assert result["rows"]
