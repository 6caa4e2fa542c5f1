"""`agentloop data`: JSONL files from local files, and errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from agentloop.__main__ import main
from agentloop.environments.tasks.sources import TaskSource, TasksSettings, read_tasks


def rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"problem": f"What is {n}?", "answer": n} for n in range(first, first + count)]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    return str(path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.full
def test_files_become_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parquet = tmp_path / "2.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows(15, 15)), parquet)
    files = [jsonl(tmp_path / "1.jsonl", rows(15)), str(parquet)]
    out = tmp_path / "new" / "aime.jsonl"
    assert main(["data", "prepare", "aime-2025", *files, "--out", str(out)]) == 0
    assert read_rows(out)[0] == {"problem": "What is 0?", "answer": "0", "source": "1"}
    assert [row["answer"] for row in read_rows(out)] == [str(n) for n in range(30)]
    assert capsys.readouterr().out == f"{out}: 30 problems from 30 rows\n"
    source = TaskSource.open(TasksSettings(kind="jsonl", paths=[out], shuffle=False))
    assert next(source).answer == "0"


def test_json_output_says_what_was_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = jsonl(tmp_path / "1.jsonl", [*rows(30), *rows(1)]), tmp_path / "out.jsonl"
    command = ["data", "prepare", "aime-2025", file, "--out", str(out), "--any-count", "--json"]
    assert main(command) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == {"out": str(out), "num_problems": 30, "num_rows": 31}
    assert main(["data", "teacher", "--count", "3", "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"out": str(out), "num_dialogues": 3}


def test_another_number_of_rows_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = jsonl(tmp_path / "1.jsonl", rows(29)), tmp_path / "out.jsonl"
    command = ["data", "prepare", "aime-2024", file, "--out", str(out)]
    assert main(command) == 2
    assert "aime-2024: found 29 rows, but AIME 2024 I and II has 30" in capsys.readouterr().err
    assert not out.exists()
    assert main([*command, "--any-count"]) == 0
    assert len(read_rows(out)) == 29


def test_copies_and_what_is_measured_are_left_out(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "1.jsonl", [*rows(10), *rows(3)])
    measured = jsonl(tmp_path / "2.jsonl", [{"problem": "What  is 4?", "answer": 4}])
    out = tmp_path / "out.jsonl"
    command = ["data", "prepare", "dapo-en", file, "--out", str(out), "--any-count"]
    assert main([*command, "--without", measured]) == 0
    assert [row["answer"] for row in read_rows(out)] == list("012356789")


def test_messages_and_levels_are_kept(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1+1?"}]
    row = {"messages": messages, "answer": "2", "level": "Level 4", "source": "here"}
    file, out = jsonl(tmp_path / "1.jsonl", [row]), tmp_path / "out.jsonl"
    assert main(["data", "prepare", "math-500", file, "--out", str(out), "--any-count"]) == 0
    assert read_rows(out) == [{"messages": messages, "answer": "2", "source": "here", "level": 4}]


def test_errors_name_the_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = jsonl(tmp_path / "1.jsonl", [*rows(1), {"problem": "x?"}])
    assert main(["data", "prepare", "aime-2024", file, "--out", str(tmp_path / "out")]) == 2
    assert (
        f"{file}: line 2: one of the fields 'reward_model.ground_truth', 'answer'"
        in capsys.readouterr().err
    )
    file = jsonl(tmp_path / "1.jsonl", rows(30))
    assert main(["data", "prepare", "aime-2024", file, "--out", f"{file}/out"]) == 2
    assert f"agentloop: error: {file}/out: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["data", "prepare", "no-such-set", file, "--out", "x"])
    assert "math-500" in capsys.readouterr().err


# What a policy solves already.


def write_rollouts(path: Path, *rewards: tuple[int, Sequence[float | None]]) -> str:
    """Write a file of rollouts from (number of the problem, its rewards) pairs."""
    path.parent.mkdir(exist_ok=True)
    settings = TasksSettings(kind="jsonl", paths=[Path(jsonl(path.parent / "problems", rows(20)))])
    ids = {task.answer: task.id for task in read_tasks(settings)}
    rollout_rows = [
        {"task": ids[str(n)], "reward": reward}
        for n, rewards_of_problem in rewards
        for reward in rewards_of_problem
    ]
    return jsonl(path, rollout_rows)


def test_problems_that_are_always_solved_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [jsonl(tmp_path / "1.jsonl", rows(4)), jsonl(tmp_path / "2.jsonl", rows(4, 3))]
    rollouts = write_rollouts(
        tmp_path / "step-00001.jsonl",
        (0, [1.0] * 8),
        (1, [1.0] * 7 + [0.0]),
        (2, [1.0] * 7),  # too few
        (3, [1.0] * 8 + [None]),
        (4, [1.0] * 7 + [None]),
        (5, [None]),
        (19, [1.0]),
    )
    out = tmp_path / "hard.jsonl"
    command = ["data", "filter", rollouts, "--tasks", tasks[0], "--tasks", tasks[1]]
    assert main([*command, "--solved", "8/8", "--out", str(out)]) == 0
    assert [row["answer"] for row in read_rows(out)] == ["1", "2", "4", "5", "6"]
    assert read_rows(out)[0] == {"problem": "What is 1?", "answer": "1", "source": "1"}
    assert capsys.readouterr().out == (
        f"{out}: 5 of 7 problems kept; solved at least 8 of 8 times: 2; kept for having fewer than "
        "8 rollouts with a reward: 4 (2 have none); rolled out, but not in the --tasks files: 1\n"
    )
    assert main([*command, "--solved", "7/8", "--out", str(out), "--json"]) == 0
    counts = {"num_tasks": 7, "num_too_few": 4, "num_without": 2, "num_unknown": 1}
    result = json.loads(capsys.readouterr().out)
    assert result == {"out": str(out), "num_problems": 4, **counts}
    assert [row["answer"] for row in read_rows(out)] == ["2", "4", "5", "6"]


def test_rollout_with_several_conversations_counts_once(tmp_path: Path) -> None:
    problems = jsonl(tmp_path / "problems.jsonl", rows(1))
    (task,) = read_tasks(TasksSettings(kind="jsonl", paths=[Path(problems)]))
    row = {"group": 1, "task": task.id, "rollout": 0, "reward": 1.0}
    rollouts = jsonl(tmp_path / "group.jsonl", [row, row])
    out = tmp_path / "hard.jsonl"
    command = ["data", "filter", rollouts, "--solved", "2/2", "--tasks", problems]
    assert main([*command, "--out", str(out)]) == 0
    assert len(read_rows(out)) == 1


def test_only_the_newest_rollouts_of_a_problem_count(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_rollouts(run / "trajectories" / "step-00010.jsonl", (0, [1.0, 1.0]), (1, [0.0, 1.0]))
    write_rollouts(run / "trajectories" / "step-00002.jsonl", (0, [0.0, 0.0]), (1, [1.0, 1.0]))
    tasks, out = jsonl(tmp_path / "1.jsonl", rows(2)), tmp_path / "hard.jsonl"
    command = ["data", "filter", str(run), "--solved", "2/2", "--tasks", tasks]
    assert main([*command, "--out", str(out)]) == 0
    assert [row["answer"] for row in read_rows(out)] == ["1"]


def test_rollouts_that_say_nothing_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks, out = jsonl(tmp_path / "1.jsonl", rows(2)), tmp_path / "hard.jsonl"

    def refused(rollouts: str, *more: str) -> str:
        command = ["data", "filter", rollouts, "--tasks", tasks, "--out", str(out), *more]
        assert main(command) == 2
        assert not out.exists()
        return capsys.readouterr().err

    bad = tmp_path / "bad.jsonl"
    for row, message in [
        ([1], "line 1: expected an object"),
        ({"reward": 1.0}, "line 1: field 'task': expected a problem's id"),
        ({"task": "a"}, "line 1: field 'reward': expected a number or null"),
        ({"task": "a", "reward": "1"}, "line 1: field 'reward': expected a number or null"),
    ]:
        assert f"{bad}: {message}" in refused(jsonl(bad, [row]))  # type: ignore[list-item]
    unrelated = write_rollouts(bad, (7, [1.0]))
    assert "--tasks: the rollouts have 1 problem and these files 2 problems" in refused(unrelated)
    solved = write_rollouts(bad, (0, [1.0]), (1, [1.0]))
    assert "no problems are left: all of them are solved (2)" in refused(solved, "--solved", "1/1")
    assert f"{tmp_path}: no trajectories/*.jsonl" in refused(str(tmp_path))
    for share in ("0/8", "9/8", "8", "a/b"):
        with pytest.raises(SystemExit):
            main(["data", "filter", str(bad), "--tasks", tasks, "--out", "x", "--solved", share])
        assert f"'{share}' is not of the form K/N, such as 8/8" in capsys.readouterr().err


def test_filter_counts_rollouts_of_a_problem_whatever_its_row(tmp_path: Path) -> None:
    numbered = [{"problem": "1+1?", "answer": 2, "extra_info": {"index": n}} for n in range(2)]
    file, out = jsonl(tmp_path / "1.jsonl", [*numbered, *rows(1)]), tmp_path / "out.jsonl"
    tasks = [*read_tasks(TasksSettings(kind="jsonl", paths=[Path(file)]))]
    rollouts = [
        {"group": f"1-{n}", "task": f"sums-{task.id}", "rollout": 0, "reward": 1.0}
        for n, task in enumerate(tasks[:2])
    ]
    records = jsonl(tmp_path / "rollouts.jsonl", rollouts)
    command = ["data", "filter", records, "--tasks", file, "--solved", "2/2", "--out", str(out)]
    assert main(command) == 0
    assert [row["problem"] for row in read_rows(out)] == ["What is 0?"]


@pytest.mark.full
def test_check_shows_what_a_run_would_make_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = jsonl(tmp_path / "1.jsonl", [*rows(4), *rows(1)])
    assert main(["data", "check", file]) == 0
    shown = capsys.readouterr().out
    assert "rows       5\ntasks      4 (1 equal others in all fields)\nproblems   4\n" in shown
    assert shown.count("--- prompt") == 3
    assert "What is 2?<|im_end|>" in shown
    assert "--- its answer: 2" in shown
    assert "Nothing is wrong" in shown


@pytest.mark.full
def test_check_fails_where_something_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conflict = [{"problem": "x?", "answer": 1}, {"problem": "x?", "answer": 2}]
    file = jsonl(tmp_path / "1.jsonl", [*rows(1), *conflict, {"problem": "y?", "answer": "{"}])
    assert main(["data", "check", file, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == [
        f"{file}: line 3: the answer is '2', but '1' in {file}: line 2, and the problem is the "
        "same",
        f"{file}: line 4: the answer '{{' has braces that do not match",
    ]
    assert (report["num_rows"], report["num_problems"]) == (4, 4)
    csv = tmp_path / "tasks.csv"
    csv.write_text("problem,answer\nx?,1\n")
    assert main(["data", "check", str(csv)]) == 1
    assert "it looks like CSV" in capsys.readouterr().out
    assert main(["data", "check", file, "tasks.fields.answer=nothing"]) == 1
    assert "the field 'nothing' is required" in capsys.readouterr().out
    assert main(["data", "check", file, "reward.function=nothing"]) == 2
