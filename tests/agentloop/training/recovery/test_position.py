"""Where a run is, by its files, and how it is continued from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentloop.errors import SettingsError
from agentloop.training.recovery.position import (
    Phase,
    Position,
    Stages,
    resume_command,
    telling_how_to_continue,
)
from agentloop.training.run.collapse import RunCollapsed

THREE = Stages(("short", "longer", "hard"), (2, 2, 1))


def write_rows(folder: Path, *rows: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_checkpoint(folder: Path, step: int) -> None:
    checkpoint = folder / "checkpoints" / f"step-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"state": {"step": step}}))


def write_model(run: Path) -> None:
    (run / "sft" / "model").mkdir(parents=True)
    (run / "sft" / "model" / "config.json").touch()


def step(number: int, stage: int) -> dict[str, Any]:
    return {"step": number, "stage": stage}


def test_steps_of_fine_tuning_are_not_steps_of_training(tmp_path: Path) -> None:
    write_rows(tmp_path / "sft", {"step": 34})
    write_checkpoint(tmp_path / "sft", 30)
    position = Position.of(tmp_path)
    assert (position.phase, position.step, position.checkpoint) == (Phase.FINE_TUNING, 34, 30)
    assert not position.is_last_of(Stages((), (16,)))
    assert not position.is_last_of(Stages((), (34,)))
    assert str(position) == "a checkpoint of step 30 of supervised fine-tuning"


def test_fine_tuning_ends_with_its_model(tmp_path: Path) -> None:
    write_rows(tmp_path / "sft", {"step": 34})
    write_model(tmp_path)
    position = Position.of(tmp_path)
    assert (position.phase, position.step, str(position)) == (
        Phase.MAIN,
        None,
        "the fine-tuned model",
    )
    write_rows(tmp_path, {"step": 0, "held_out/reward": 0.5})
    assert Position.of(tmp_path) == Position(tmp_path, Phase.MAIN, 0)


def test_run_before_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "sft").mkdir()  # the teacher plays
    assert Position.of(tmp_path) == Position(tmp_path, Phase.FINE_TUNING)
    assert str(Position.of(tmp_path)) == "no checkpoint yet"
    assert Position.of(tmp_path / "other") == Position(tmp_path / "other", Phase.MAIN)


def test_step_counts_within_its_stage(tmp_path: Path) -> None:
    write_rows(tmp_path, step(1, 1), step(2, 1), {"step": 2, "held_out/reward": 0.5}, step(3, 2))
    position = Position.of(tmp_path)
    assert (position.step, position.stage, position.stage_step) == (3, 2, 1)
    assert not position.is_last_of(THREE)
    assert not position.is_last_of(Stages(THREE.names, (1, 1, 1)))  # the first two have ended


def test_last_step_is_that_of_the_last_stage(tmp_path: Path) -> None:
    rows = [step(1, 1), step(2, 1), step(3, 2), step(4, 2), step(5, 3)]
    write_rows(tmp_path, *rows)
    assert Position.of(tmp_path).is_last_of(THREE)
    assert not Position.of(tmp_path).is_last_of(Stages(THREE.names, (2, 2, 4)))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (Stages((), (2,)), r"^loop\.steps: 2, but .* has done 3: give a larger number"),
        (Stages(("one",), (2,)), r"^stages\.one\.steps: 2, but .* has done 3 of this stage: give"),
    ],
)
def test_fewer_steps_than_were_done_are_refused(
    tmp_path: Path, stages: Stages, message: str
) -> None:
    write_rows(tmp_path, step(1, 1), step(2, 1), step(3, 1))
    with pytest.raises(SettingsError, match=message):
        Position.of(tmp_path).is_last_of(stages)


def test_fewer_stages_than_were_begun_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path, step(1, 1), step(2, 2))
    with pytest.raises(SettingsError, match=r"^stages: .* is in stage 2, but .* have 1 stage: "):
        Position.of(tmp_path).is_last_of(Stages((), (9,)))


def test_command_is_as_a_shell_reads_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "my runs" / "one"
    assert resume_command("train", run) == "agentloop train --resume 'my runs/one'"
    command = resume_command("train", Path("/runs/one"), from_step=4)
    assert command == "agentloop train --resume /runs/one --from 4"


async def test_stopped_run_says_how_to_continue(tmp_path: Path) -> None:
    lines: list[str] = []
    write_checkpoint(tmp_path, 7)
    with anyio.CancelScope() as scope, telling_how_to_continue("train", tmp_path, lines.append):
        scope.cancel()
        await anyio.lowlevel.checkpoint()
    command = f"agentloop train --resume {tmp_path}"
    assert lines == [f"Stopped; there is a checkpoint of step 7. Continue with: {command}"]


@pytest.mark.parametrize(("error", "num_notes"), [(OSError("full"), 1), (RunCollapsed("why"), 0)])
async def test_failed_run_says_how_to_continue(
    tmp_path: Path, error: Exception, num_notes: int
) -> None:
    lines: list[str] = []
    with (
        pytest.raises(type(error)) as raised,
        telling_how_to_continue("train", tmp_path, lines.append),
    ):
        raise error
    notes = getattr(raised.value, "__notes__", [])
    expected = "There is no checkpoint yet. When the cause is removed, continue with: "
    assert notes == [f"{expected}agentloop train --resume {tmp_path}"][:num_notes]
    assert not lines
