"""`agentloop data score` and `dialogues`: from a service's record to exact samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentloop.__main__ import main
from agentloop.agent.sessions.tree import Branch
from agentloop.errors import DataError
from agentloop.training.run.folder import RunFolder
from agentloop.training.sft.fine_tuning import DialoguesSettings, read_samples
from agentloop.trajectory import StopReason, Trajectory
from tests.agentloop.observe.test_recorder import CHAT, recorder, trajectory
from tests.support import chat_format


@pytest.fixture
def record(tmp_path: Path) -> RunFolder:
    """A session with two branches, of which one is right, and a question of another kind."""
    folder = RunFolder(tmp_path / "served", "")
    question = "What is 6 times 7?"
    right = trajectory("s", question, "<answer>42</answer>")
    wrong = trajectory("s+1", question, "<answer>41</answer>")
    broken = trajectory("b", question, "<answer>42</answer>")
    broken.stop_reason = StopReason.INFRASTRUCTURE

    async def write() -> None:
        async with recorder(folder).running() as recording:
            recording.add_session("s", [Branch(right), Branch(wrong, "again", "s")])
            recording.add(trajectory("r", "Why?", "Because."))
            recording.add(broken)

    anyio.run(write)
    return folder


def rows(folder: RunFolder, number: int) -> list[dict[str, Any]]:
    return folder.read_group(f"trajectories/group-{number:07}.jsonl")


def run(*arguments: object) -> int:
    return main(["data", *map(str, arguments)])


def test_answers_are_compared_where_the_task_is_known(
    record: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"problem": "What is 6 times 7?", "answer": "42"}))
    before = rows(record, 1)
    assert run("score", record.path, "--tasks", tasks, "--reward", "exact", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result == {"num_scored": 2, "num_without": 2, "mean_reward": 0.5}
    after = rows(record, 1)
    assert [row["reward"] for row in after] == [1.0, 0.0]
    assert [row["truth"] for row in after] == ["42", "42"]
    assert [row["trajectory"] for row in after] == [row["trajectory"] for row in before]
    assert [row["branch"] for row in after] == ["", "again"]
    assert rows(record, 2)[0]["reward"] is None
    assert rows(record, 3)[0]["reward"] is None
    assert "infrastructure" in rows(record, 3)[0]["reason"]

    out = tmp_path / "good.jsonl"
    assert run("dialogues", record.path, "--min-reward", "0.5", "--out", out) == 0
    (line,) = [json.loads(text) for text in out.read_text().splitlines()]
    assert line["id"] == "1-s.0"
    samples, _ = read_samples(CHAT, DialoguesSettings(paths=[out]), max_tokens=10_000, say=print)
    (sample,) = samples
    exact = Trajectory.from_dict(before[0]["trajectory"])
    assert (sample.ids, sample.mask) == (exact.ids, exact.mask)


@pytest.mark.timeout(60)  # starts processes, one after the other
def test_function_of_the_users_scores_every_conversation(
    record: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    function = "tests.agentloop.cli.scoring:by_length"
    assert run("score", record.path, "--reward", function) == 0
    assert "3 conversations scored, mean reward 15.333; 1 without" in capsys.readouterr().out
    assert rows(record, 2)[0]["reward"] == len("Because.")
    nothing = "tests.agentloop.cli.scoring:says_nothing"
    assert run("score", record.path, "--reward", nothing) == 0  # replaces the rewards
    assert rows(record, 2)[0]["reward"] is None
    assert run("dialogues", record.path, "--out", tmp_path / "x.jsonl") == 2
    assert "no rollout has a reward of at least 0.5" in capsys.readouterr().err
    assert not (tmp_path / "x.jsonl").exists()


def test_without_tasks_it_says_what_to_do(
    record: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    before = rows(record, 1)
    assert run("score", record.path) == 0
    assert "4 without a reward (name the problems with --tasks" in capsys.readouterr().out
    assert rows(record, 1) == before


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"task": "t", "reward": 1.0}, "line 1: not a record of `agentloop serve`"),
        ({"question": "q", "trajectory": {"id": "x"}}, "line 1: field 'trajectory': KeyError"),
    ],
)
def test_other_files_are_refused(
    row: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunFolder(tmp_path, "").add_group(1, [row])
    assert run("score", tmp_path, "--reward", "exact") == 2
    assert message in capsys.readouterr().err


def test_reward_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("score", "served", "--reward", "maths")
    assert "'maths' is not" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt_ids": [1], "turns": []}, "line 1: field 'turns'"),
        (
            {"prompt_ids": [1], "turns": [{"output_ids": [-1], "observation_ids": [], "text": ""}]},
            "line 1: field 'turns.0.output_ids.0'",
        ),
        (
            {
                "prompt_ids": [10**9],
                "turns": [{"output_ids": [1], "observation_ids": [], "text": ""}],
            },
            "not ids of this model's tokenizer",
        ),
        (
            {
                "prompt_ids": [1],
                "turns": [{"output_ids": [1], "observation_ids": [], "text": "other"}],
            },
            "not ids of this model's tokenizer",
        ),
    ],
)
def test_ids_that_cannot_be_trained_on_are_refused(line: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps(line))
    with pytest.raises(DataError, match=message):
        read_samples(chat_format(), DialoguesSettings(paths=[file]), max_tokens=100, say=print)
