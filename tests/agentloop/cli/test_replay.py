"""`agentloop train --replay`: its arguments, and what it prints of a step."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.cli.replay import differences, step_line
from agentloop.cli.train import _step_range as step_range
from agentloop.cli.train import main
from agentloop.training.recovery.replay import ReplayedStep


@given(st.integers(1, 10**9), st.integers(0, 10**9))
def test_range_of_steps_is_read(first: int, more: int) -> None:
    assert step_range(f"{first}") == (first, first)
    assert step_range(f"{first}-{first + more}") == (first, first + more)


@pytest.mark.parametrize("text", ["", "-", "0", "3-2", "-3", "1-2-3", "a", "1 2", "1.5"])
def test_invalid_range_of_steps_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        step_range(text)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--step", "3"], "--step: requires --replay"),
        (["--replay", "runs/a", "loop.steps=3"], "--replay: takes no settings"),
        (["--replay", "runs/a", "--resume", "runs/a"], "nor --resume"),
        (["--replay", "runs/a", "--step", "0"], "expected steps from 1 on"),
    ],
)
def test_arguments_that_do_not_go_together(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert reason in capsys.readouterr().err


def test_folder_without_a_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--replay", str(tmp_path)]) == 2
    assert f"--replay: {tmp_path} is not a run" in capsys.readouterr().err


def test_line_of_a_step_says_what_differs() -> None:
    same = ReplayedStep(3, 0.5, 0.5, "a" * 64, "a" * 64)
    assert step_line(same) == "step 3: loss 0.5, again 0.5; weights: the same (aaaaaaaaaaaa)"
    changed = ReplayedStep(3, 0.5, 0.5, "b" * 64, "a" * 64)
    assert step_line(changed).endswith("DIFFERENT (aaaaaaaaaaaa), the run's: bbbbbbbbbbbb")
    start = ReplayedStep(0, None, None, None, "a" * 64)
    assert step_line(start) == "step 0: weights: no digest recorded (aaaaaaaaaaaa)"
    assert [step.differs for step in (same, changed, start)] == [False, True, False]


def test_differences_between_machines_are_named() -> None:
    recorded = {"torch": "2.10", "cpu": "AVX2"}
    current = {"torch": "2.11", "cpu": "AVX2", "threads": "2"}
    assert differences(recorded, current) == ["threads 2, was ?", "torch 2.11, was 2.10"]
