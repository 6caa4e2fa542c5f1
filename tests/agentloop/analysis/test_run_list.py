"""Summaries of runs from the files in their folders."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from agentloop.analysis.run_list import RunKind, RunState, find_runs, summarize
from agentloop.config import to_toml
from agentloop.evaluation.wiring import EvaluateSettings
from agentloop.training.loop.settings import StageSettings
from agentloop.training.plan.settings import TrainSettings
from agentloop.training.run.folder import RunFolder
from agentloop.training.sft.fine_tuning import DialoguesSettings
from agentloop.training.sft.run import SftSettings

TRAIN = to_toml(TrainSettings())  # of 10 steps
SFT = to_toml(SftSettings(data=DialoguesSettings(paths=[Path("dialogues.jsonl")])))
STAGES = to_toml(
    TrainSettings(stages={"short": StageSettings(steps=3), "long": StageSettings(steps=4)})
)
EVALUATE = to_toml(EvaluateSettings())


def rows(path: Path, *content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in content))


def step(number: int, **more: Any) -> dict[str, Any]:
    return {"step": number, "stage": 1, "reward": number / 10, **more}


def make_run(path: Path, config: str, *metrics: dict[str, Any]) -> Path:
    """Create a run that has ended or was stopped, without a lock."""
    folder = RunFolder(path, config)
    for row in metrics:
        folder.add_metrics(row)
    return path


def later(path: Path, than: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    when = than.stat().st_mtime + 1
    os.utime(path, (when, when))


async def test_active_run_is_distinguished_from_a_stopped_one(tmp_path: Path) -> None:
    path = tmp_path / "run"
    async with RunFolder.open(path, TRAIN) as folder:
        folder.add_metrics(step(1))
        assert summarize(path).state is RunState.RUNNING
    assert summarize(path).state is RunState.STOPPED
    async with RunFolder.open(path):  # it was not disturbed
        pass


def test_figures_are_of_the_last_steps_that_have_them(tmp_path: Path) -> None:
    path = make_run(
        tmp_path / "run",
        TRAIN,
        {"step": 0, "held_out/reward": 0.2},
        step(1, tool_errors_in_correct=0.25),
        step(2, tool_errors_in_correct=None),
        {"step": 2, "held_out/reward": 0.5},
        step(3, reward=None),
    )
    (path / "checkpoints" / "step-00002").mkdir()
    (path / "checkpoints" / "step-00002" / "state.json").write_text('{"state": {"step": 2}}')
    (path / "checkpoints" / "step-00003").mkdir()  # not whole
    summary = summarize(path)
    assert (summary.kind, summary.step, summary.num_steps) == (RunKind.TRAIN, 3, 10)
    assert (summary.reward, summary.held_out_reward, summary.tool_errors) == (0.2, 0.5, 0.25)
    assert (summary.checkpoints, summary.stage, summary.problems) == ((2,), "", ())


def test_stages_add_up(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", STAGES, step(3), step(4, stage=2))
    summary = summarize(path)
    assert (summary.stage, summary.step, summary.num_steps) == ("2/2 long", 4, 7)
    assert summary.state is RunState.STOPPED
    RunFolder(path).add_metrics(step(7, stage=2))
    assert summarize(path).state is RunState.FINISHED


def test_start_is_a_stage_before_the_first(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", STAGES)
    assert (summarize(path).stage, summarize(path).step) == ("1/2 short", None)
    rows(path / "sft" / "metrics.jsonl", {"step": 40, "epoch": 1})
    assert (summarize(path).stage, summarize(path).step) == ("sft", 40)


@pytest.mark.parametrize(
    ("config", "sign", "state"),
    [
        (TRAIN, "ended", RunState.FINISHED),  # a stage may have had nothing left to learn
        (TRAIN, "plots.png", RunState.STOPPED),  # it may be drawn at any time
        (TRAIN, "collapse.md", RunState.COLLAPSED),
        (SFT, "model/config.json", RunState.FINISHED),
        (SFT, "plots.png", RunState.STOPPED),
        (EVALUATE, "results.md", RunState.STOPPED),
    ],
)
def test_last_written_files_show_how_a_run_ended(
    tmp_path: Path, config: str, sign: str, state: RunState
) -> None:
    path = make_run(tmp_path / "run", config, step(1))
    assert summarize(path).state is RunState.STOPPED
    later(path / sign, path / "metrics.jsonl")
    assert summarize(path).state is state
    later(path / "metrics.jsonl", path / sign)  # it went on
    assert summarize(path).state is RunState.STOPPED


def test_run_ended_by_an_error_has_failed_until_resumed(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", TRAIN, step(1))
    with pytest.raises(ExceptionGroup), RunFolder(path).noting_failure():
        raise ExceptionGroup("tasks", [ZeroDivisionError("division by zero"), *2 * [OSError("up")]])
    summary = summarize(path)
    assert (summary.state, summary.problems) == (RunState.FAILED, ("division by zero; up",))
    with pytest.raises(asyncio.CancelledError), RunFolder(path).noting_failure():
        raise asyncio.CancelledError
    RunFolder(path).tell(TRAIN)
    assert summarize(path).state is RunState.STOPPED


@pytest.mark.parametrize(
    ("drained", "state"), [(False, RunState.FINISHED), (True, RunState.DRAINED)]
)
def test_resumed_run_no_longer_counts_as_ended(
    tmp_path: Path, drained: bool, state: RunState
) -> None:
    path = make_run(tmp_path / "run", TRAIN, step(1))
    RunFolder(path).end(drained=drained)
    assert summarize(path).state is state
    RunFolder(path).tell(TRAIN)  # stopped before it wrote anything down
    assert summarize(path).state is RunState.STOPPED


def test_supervised_run_has_steps_and_no_reward(tmp_path: Path) -> None:
    summary = summarize(make_run(tmp_path / "run", SFT, {"step": 7, "learner/loss": 0.5}))
    assert (summary.kind, summary.step, summary.num_steps, summary.reward) == (
        RunKind.SFT,
        7,
        None,
        None,
    )


def test_evaluation_is_told_by_its_tasks(tmp_path: Path) -> None:
    task = {"source": "s", "tool_errors_in_correct": 0.5}
    path = make_run(
        tmp_path / "run",
        EVALUATE,
        {"step": 1, "group": 1, "reward": 0.0, **task},
        {"step": 2, "group": 2, "reward": 1.0, **task},
        {"step": 3, "group": 1, "reward": 0.5, **task},  # again, with what was missing
    )
    summary = summarize(path)
    assert (summary.kind, summary.step, summary.num_steps) == (RunKind.EVALUATE, 2, None)
    assert (summary.reward, summary.tool_errors) == (0.75, 0.5)
    results = {"num_tasks": 2, "avg_at_k": {"value": 0.7, "low": 0, "high": 1}}
    (path / "results.json").write_text(json.dumps({"all": results}))
    later(path / "results.json", path / "metrics.jsonl")
    summary = summarize(path)
    assert (summary.state, summary.num_steps, summary.reward) == (RunState.FINISHED, 2, 0.7)
    (path / "results.json").write_text("[]")
    assert summarize(path).problems[0].startswith("results.json: ")


@pytest.mark.parametrize(
    ("name", "damage", "problem"),
    [
        ("config.toml", b"[loop", "config.toml: "),
        ("config.toml", b"\xff\xfe", "config.toml: "),
        ("config.toml", None, "config.toml: No such file"),
        ("config.toml", b"[roc]\n", "config.toml: the number of steps"),
        ("config.toml", b"stages = 3\n[roc]\n", "config.toml: the number of steps"),
        ("config.toml", b"[roc]\n[stages.one]\nsteps = 'x'\n", "config.toml: the number of steps"),
        ("metrics.jsonl", b'{"st\n{"step": 2}\n', "metrics.jsonl: line 1 cannot be read"),
        ("metrics.jsonl", b'[1]\n\xff\n{"step": 2}\n', "line 1 and 1 more cannot be read"),
    ],
)
def test_damaged_files_are_reported_and_the_others_summarized(
    tmp_path: Path, name: str, damage: bytes | None, problem: str
) -> None:
    path = make_run(tmp_path / "run", TRAIN, step(1), step(2))
    if damage is None:
        (path / name).unlink()
    else:
        (path / name).write_bytes(damage)
    summary = summarize(path)
    assert problem in summary.problems[0]
    assert summary.step == 2


def test_line_that_is_being_written_is_no_damage(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", TRAIN, step(1))
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    summary = summarize(path)
    assert (summary.step, summary.problems) == (1, ())


@pytest.mark.parametrize("value", ["1", True, None, [1], {}, 10**30])
def test_values_of_another_kind_are_no_figures(tmp_path: Path, value: Any) -> None:
    path = make_run(tmp_path / "run", STAGES, step(1))
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": value, "stage": value, "reward": value}) + "\n")
    summary = summarize(path)
    assert summary.problems == ()
    assert summary.stage in ("1/2 short", "")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", TRAIN, step(1))
    (path / "metrics.jsonl").unlink()
    (path / "metrics.jsonl").mkdir()
    assert summarize(path).problems == ("metrics.jsonl: Is a directory",)


def test_size_is_what_the_disk_gives_for_it(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", TRAIN, step(1))
    before = summarize(path).num_bytes
    (path / "weights" / "1").mkdir()
    (path / "weights" / "1" / "model").write_bytes(b"x" * 1_000_000)
    os.link(path / "weights" / "1" / "model", path / "weights" / "same")  # takes nothing more
    num_bytes = summarize(path).num_bytes - before
    assert 1_000_000 <= num_bytes < 1_100_000


def test_runs_are_found_below_a_folder(tmp_path: Path) -> None:
    """Parts of a run are not runs of their own, nor are the targets of links."""
    for name in ("b", "a", "deep/er/c"):
        rows(tmp_path / name / "metrics.jsonl", step(1))
    rows(tmp_path / "a" / "sft" / "metrics.jsonl", step(1))
    rows(tmp_path / ".hidden" / "metrics.jsonl", step(1))
    (tmp_path / "latest").symlink_to("a")
    (tmp_path / "notes").mkdir()
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "config.toml").touch()
    (RunFolder(tmp_path / "c", TRAIN).path / ".lock").touch()  # it has not come to anything
    (tmp_path / "file.toml").touch()
    names = [str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)]
    assert names == ["a", "b", "c", "deep/er/c"]
    assert list(find_runs(tmp_path / "latest")) == [tmp_path / "latest"]
    with pytest.raises(OSError, match="nowhere"):
        list(find_runs(tmp_path / "nowhere"))
