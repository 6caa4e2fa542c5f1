"""`agentloop runs entropy`: which rollouts are scored with which weights, and its output."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentloop import distribution
from agentloop.__main__ import main
from agentloop.agent.chat_format import ChatFormat
from agentloop.cli.runs import entropy as analyze
from agentloop.config import to_toml
from agentloop.evaluation.wiring import EvaluateSettings
from agentloop.models import SMALL
from agentloop.training.learner_client.client import LearnerProcesses
from agentloop.training.learner_client.settings import LearnerSettings
from agentloop.training.plan.settings import TrainSettings
from agentloop.training.run.folder import RunFolder
from agentloop.trajectory import (
    ToolCall,
    ToolCallStatus,
    ToolResult,
    Trajectory,
    Turn,
    TurnEnd,
    VersionSpan,
)
from tests.agentloop.analysis.test_entropy import Learner

CHAT = ChatFormat.load(SMALL)
THOUGHT, CALL, ANSWER = (
    CHAT.tokenizer.encode(text, add_special_tokens=False).ids
    for text in ("I compute", "<tool_call>{}</tool_call>", "The result is 4")
)


def rollout(name: str, version: str) -> Trajectory:
    """A rollout that reasons, makes a call and answers."""

    def turn(ids: list[int], **more: Any) -> Turn:
        spans = [VersionSpan(version, 0, len(ids))]
        return Turn(ids, [-1.0] * len(ids), spans, TurnEnd.STOP, **more)

    called = turn(
        THOUGHT + CALL,
        calls=[ToolCall("c", "python", {}, "", len(THOUGHT), len(THOUGHT + CALL))],
        results=[ToolResult("c", "python", ToolCallStatus.OK, "4", 0, 0, 0)],
        observation_ids=CALL,
    )
    return Trajectory(name, [1, 2], [called, turn(ANSWER)])


def weights(folder: Path) -> Path:
    """Create a model folder; its weights do not matter here."""
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (SMALL / name).is_file():
            shutil.copyfile(SMALL / name, folder / name)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Create a run with four groups of two, sampled under versions 1 to 4, that keeps weights 2
    and 5."""
    folder = RunFolder(tmp_path / "run", to_toml(TrainSettings()))
    for number in range(1, 5):
        rows = [
            {"trajectory": rollout(f"{number}.{index}", str(number)).to_dict()}
            for index in range(2)
        ]
        folder.add_group(number, rows)
    for version in ("2", "5"):
        weights(folder.path / "weights" / version)
    return folder.path


class Starts:
    """Records the settings of learners instead of starting processes."""

    def __init__(self) -> None:
        self.settings: list[LearnerSettings] = []
        self.learner = Learner(off=-0.5)

    @asynccontextmanager
    async def __call__(
        self, settings: Mapping[str, Any], ranks: Any, *, log_dir: Path, on_progress: Any
    ) -> AsyncIterator[Any]:
        self.settings.append(LearnerSettings.model_validate(settings))
        self.log_dir = log_dir
        yield self.learner, LearnerProcessesThatLive()


class LearnerProcessesThatLive(LearnerProcesses):
    async def while_alive(self, work: Any) -> Any:
        return await work()


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    starts = Starts()
    monkeypatch.setattr(analyze, "start_learner", starts)
    monkeypatch.setattr(analyze, "require", lambda *_: None)  # the learner's packages
    return starts


def entropy_report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["runs", "entropy", *arguments, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_newest_weights_score(
    run: Path, starts: Starts, capsys: pytest.CaptureFixture[str]
) -> None:
    report = entropy_report(capsys, str(run), "--groups", "3", "sampling.temperature=0.5")
    assert report["groups"] == [2, 3, 4]
    assert (report["weights"], report["temperature"]) == (str(run / "weights" / "5"), 0.5)
    assert report["mismatch_kl"] == pytest.approx(0.1065, abs=1e-4)
    assert starts.settings[0].model == run / "weights" / "5"
    assert starts.settings[0].temperature == 0.5
    assert not starts.log_dir.is_relative_to(run)  # not among those of a run that goes on
    second = str(run / "weights" / "2")
    assert entropy_report(capsys, str(run), "--weights", second)["weights"] == second


def test_text_and_reflection_are_separate_kinds(
    run: Path, starts: Starts, capsys: pytest.CaptureFixture[str]
) -> None:
    report = entropy_report(capsys, str(run))
    kinds = report["kinds"]
    assert report["num_rollouts"] == 8
    nums = {name: figures["num_tokens"] for name, figures in kinds.items()}
    assert nums == {
        "forking": 8 * len(THOUGHT),
        "call": 8 * len(CALL),
        "reflection": 8 * len(ANSWER),
    }
    assert sum(figures["share_of_marked"] for figures in kinds.values()) == pytest.approx(1)
    for name, ids in [("forking", THOUGHT), ("reflection", ANSWER)]:
        for token in kinds[name]["tokens"]:
            assert token["id"] in ids
            assert token["text"] == CHAT.decode([token["id"]])
            assert token["mean_entropy"] == pytest.approx(token["id"] / 100)


def test_people_get_a_table(run: Path, starts: Starts, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "entropy", str(run)]) == 0
    out, err = capsys.readouterr()
    assert f"groups 1 to 4 of {run}, scored by {run}/weights/5 at temperature 1" in out
    rows = [line.split()[:2] for line in out.splitlines()]
    assert [row for row in rows if row[1:] == ["(all)"]] == [
        ["forking", "(all)"],
        ["reflection", "(all)"],
        ["call", "(all)"],
    ]
    assert err.splitlines()[-1] == "Scoring group 4"


def test_long_rollouts_fit(run: Path, starts: Starts, capsys: pytest.CaptureFixture[str]) -> None:
    entropy_report(capsys, str(run), "learner.micro_batch_tokens=2")
    length = 2 + len(THOUGHT) + 2 * len(CALL) + len(ANSWER)
    assert starts.settings[0].micro_batch_tokens == length


def test_evaluation_is_scored_by_its_model(
    run: Path, starts: Starts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "weights")
    model = weights(tmp_path / "model")
    (run / "config.toml").write_text(to_toml(EvaluateSettings(model=str(model))))
    assert entropy_report(capsys, str(run))["weights"] == str(model)


def test_settings_of_an_older_run_are_read(
    run: Path, starts: Starts, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "config.toml").write_text('[ranks]\nlauncher = "processes"\n')
    assert entropy_report(capsys, str(run))["num_rollouts"] == 8


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nowhere"], "nowhere is not a run (no config.toml)"),
        (["{run}", "--weights", "{run}"], "--weights: {run} is not a model folder"),
        (["{run}", "ranks.counts=2"], "unknown setting 'ranks.counts'"),
    ],
)
def test_invalid_arguments_are_named(
    run: Path, starts: Starts, capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    filled = [argument.format(run=run) for argument in arguments]
    assert main(["runs", "entropy", *filled]) == 2
    assert error.format(run=run) in capsys.readouterr().err


def test_without_the_learner_it_says_what_to_install(
    run: Path, starts: Starts, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(analyze, "require", distribution.require)
    monkeypatch.setattr("agentloop.distribution.find_spec", lambda name: None)
    assert main(["runs", "entropy", str(run)]) == 2
    assert "pip install 'agentloop-rl[train]'" in capsys.readouterr().err


def test_bad_numbers_are_refused(run: Path) -> None:
    with pytest.raises(SystemExit):
        main(["runs", "entropy", str(run), "--groups", "0"])
