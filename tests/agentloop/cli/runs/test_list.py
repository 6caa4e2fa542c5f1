"""`agentloop runs list`: its table and its JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.__main__ import main
from agentloop.cli.runs.list import age
from agentloop.config import to_toml
from agentloop.training.plan.settings import TrainSettings
from agentloop.training.run.folder import RunFolder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, when in (("old", 1_000), ("new", 2_000)):
        folder = RunFolder(tmp_path / name, to_toml(TrainSettings()))
        folder.add_metrics({"step": 3, "reward": 0.5, "tool_errors_in_correct": 0.125})
        path = folder.path
        del folder
        for file in path.iterdir():
            os.utime(file, (when, when))
    return tmp_path


def test_newest_run_comes_first(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "list", str(runs)]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["name", "kind", "state", "stage"]
    assert first.split()[:6] == ["new", "train", "stopped", "-", "3/10", "0.500"]
    assert second.startswith("old")
    assert head.index("reward") + len("reward") == first.index("0.500") + len("0.500")


def test_script_gets_objects(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "list", str(runs), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["name"], second["name"]) == ("new", "old")
    assert first["path"] == str(runs / "new")
    assert (first["state"], first["step"], first["num_steps"]) == ("stopped", 3, 10)
    assert (first["reward"], first["held_out_reward"]) == (0.5, None)
    assert first["changed_unix_s"] == 2_000


def test_damage_is_told_below_the_table(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "old" / "config.toml").write_text("[[[")
    assert main(["runs", "list", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[3].startswith("old: config.toml: ")


def test_run_may_be_named_itself(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "list", str(runs / "old")]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("old ")


def test_names_cannot_speak_to_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "\x1b[31mred").mkdir()
    (tmp_path / "\x1b[31mred" / "config.toml").write_text("=")
    (tmp_path / "\x1b[31mred" / "metrics.jsonl").touch()
    assert main(["runs", "list", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"\x1b[31mred: config.toml: " in out


def test_without_runs_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs", "list"]) == 0
    assert capsys.readouterr().out == "No runs in runs\n"
    assert main(["runs", "list", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"No runs in {tmp_path}\n"
    assert main(["runs", "list", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["runs", "list", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: No such file or directory" in capsys.readouterr().err


@given(st.floats(0, 1e9))
def test_ages_are_short(seconds: float) -> None:
    number, unit = age(seconds).split()
    length = {"s": 1, "min": 60, "h": 3_600, "d": 86_400}[unit]
    assert int(number) * length <= seconds < (int(number) + 1) * length
