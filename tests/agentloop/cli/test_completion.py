"""`agentloop completion`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.__main__ import main
from agentloop.cli.completion import candidates


def values(*words: str) -> list[str]:
    return [value for value, _ in candidates(words)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two runs, of which "new one" is newer, and files beside them."""
    for number, name in enumerate(("old", "new one")):
        config = tmp_path / "runs" / name / "config.toml"
        config.parent.mkdir(parents=True)
        config.touch()
        os.utime(config, (number, number))
    (tmp_path / "runs" / "no-run").mkdir()
    (tmp_path / "laptop.toml").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".hidden.toml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ev"], ["evaluate"]),
        (["runs", "en"], ["entropy"]),
        (["data", "pre"], ["prepare"]),
        (["train", "--sh"], ["--shape"]),
        (["serve", "server.dev"], ["server.device="]),
        (
            ["serve", "serv"],
            ["served_model_name=", "servers=", "servers_key=", "server.", "serve."],
        ),
        (
            ["serve", "server.device="],
            [f"server.device={first}" for first in ("auto", "cpu", "cuda")],
        ),
        (["train", "--resume", "x", "page=f"], ["page=false"]),
        (["runs", "export", "a", "b", "--dtype", "b"], ["bfloat16"]),
        (["runs", "export", "--dtype=f"], ["--dtype=float32"]),
        (["data", "prepare", "aime"], ["aime-2024", "aime-2025"]),
        (["completion", "z"], ["zsh"]),
        (["train", "stages.first.st"], ["stages.first.steps="]),
        (["evaluate", "env"], ["env.", "env=", "envs="]),
        (["nothing", ""], []),
        (["serve", "server.nothing=1"], []),
    ],
)
def test_candidates(words: list[str], expected: list[str]) -> None:
    assert values(*words) == expected


def test_runs_are_completed_newest_first(folder: Path) -> None:
    assert values("train", "--resume", "") == ["runs/new one", "runs/old"]
    assert values("runs", "view", "runs/o") == ["runs/old"]
    assert values("chat", "--run", "./ru") == ["./runs/"]


def test_settings_files_are_completed_beside_settings(folder: Path) -> None:
    assert values("serve", "l") == ["log_dir=", "laptop.toml"]
    assert values("evaluate", "--tasks", "n") == ["notes.txt"]


def test_candidates_say_what_they_mean() -> None:
    assert dict(candidates(["sft"]))["sft"].startswith("fine-tune a model")
    assert "Device" in dict(candidates(["serve", "server.device"]))["server.device="]


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from(["train", "runs", "view", "--resume", "a", "x=1", ""]), max_size=4),
    st.text("serv.=-lopd/ NAME", max_size=12),
)
def test_every_candidate_begins_with_what_is_typed(before: list[str], word: str) -> None:
    assert all(value.startswith(word) for value in values(*before, word))


def test_bash_completes_settings_choices_and_runs(folder: Path) -> None:
    """Bash breaks words at `=`, and takes candidates with a space only if it is escaped."""
    program = folder / "agentloop"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m agentloop "$@"\n')
    program.chmod(0o755)
    script = f"""
    eval "$({program} completion bash)"
    compopt() {{ echo "compopt $*"; }}  # bash has it only while it completes
    try() {{
        COMP_WORDS=({program} "$@"); COMP_CWORD=$#; _agentloop; printf '%s\\n' "${{COMPREPLY[@]}}"
    }}
    try serve server.device = cu
    try serve server.devi
    try train --resume runs/n
    try nothing ''
    """
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, cwd=folder, env=env, check=True
    )
    expected = ["cuda", "compopt -o nospace", "server.device=", "runs/new\\ one", "", ""]
    assert done.stdout.split("\n") == expected
    assert done.stderr == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert f"completion {shell} -- " in capsys.readouterr().out


def test_zsh_and_fish_get_the_meaning_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish", "--", "eval"]) == 0
    assert capsys.readouterr().out == "evaluate\tevaluate a model or an endpoint on tasks\n"


@pytest.mark.parametrize("arguments", [[], ["tcsh"], ["bash", "zsh"]])
def test_another_shell_is_an_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", *arguments]) == 2
    assert "usage: agentloop completion {bash,zsh,fish}" in capsys.readouterr().err
