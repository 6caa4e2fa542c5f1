"""What a run leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentloop.errors import SettingsError
from agentloop.training.run_folder import RunFolder, RunSettings
from agentloop.trajectory import ToolCall, Trajectory, Turn


def test_what_a_model_may_write_can_be_written_down(tmp_path: Path) -> None:
    """Integers of any size: a rollout that uses one must not end the run."""
    call = ToolCall("c", "python", {"n": 10**40}, "", 0, 1)
    one = Trajectory("t", [1], [Turn(calls=[call])])
    folder = RunFolder(tmp_path / "a run", "")
    folder.add_trajectories(1, [({"task": "a"}, one), ({"task": "b"}, Trajectory("u", [1]))])
    text = (folder.path / "trajectories" / "step-00001.jsonl").read_text()
    first, second = map(json.loads, text.splitlines())
    assert first["trajectory"]["turns"][0]["calls"][0]["arguments"] == {"n": 10**40}
    assert second["task"] == "b"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", "")
    (folder.path / "metrics.jsonl").mkdir()
    with pytest.raises(SettingsError, match=r"run\.folder: .*metrics\.jsonl: Is a directory"):
        folder.add_metrics({"step": 1})


def test_a_run_is_never_written_over(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run", "")  # it ended before anything came of it
    RunFolder(tmp_path / "run", "").add_metrics({"step": 0})
    with pytest.raises(SettingsError, match=r"run\.name: there is a run"):
        RunFolder(tmp_path / "run", "")


def test_the_latest_run_and_its_newest_model_are_found(tmp_path: Path) -> None:
    def model(path: Path) -> Path:
        path.mkdir(parents=True)
        (path / "config.json").write_text("{}")
        return path

    with pytest.raises(SettingsError, match="no run with a model"):
        RunFolder.model_in(tmp_path)
    for name in ("a", "b"):
        RunFolder.of(RunSettings(folder=tmp_path, name=name), "")
    latest = tmp_path / "latest"
    assert latest.resolve() == tmp_path / "b"
    first = model(tmp_path / "b" / "start" / "model")
    assert RunFolder.model_in(latest).resolve() == first
    model(tmp_path / "b" / "weights" / "9")
    newest = model(tmp_path / "b" / "weights" / "10")
    assert RunFolder.model_in(latest).resolve() == newest


def test_a_run_that_goes_on_is_nobody_elses(tmp_path: Path) -> None:
    going_on = RunFolder(tmp_path / "run", "mine")
    with pytest.raises(SettingsError, match=r"run\.name: .* is going on"):
        RunFolder(tmp_path / "run", "yours")
    assert (going_on.path / "config.toml").read_text() == "mine"


def test_a_run_whose_start_came_to_something_is_one(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run", "").within("start").add_metrics({"step": 1})
    with pytest.raises(SettingsError, match=r"run\.name: there is a run"):
        RunFolder(tmp_path / "run", "")
