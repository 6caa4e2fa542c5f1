"""`agentloop data prepare`: from files at hand to one JSONL file, or a reason why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from agentloop.__main__ import main
from agentloop.groups.tasks import TaskSource, TasksSettings


def rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"problem": f"What is {n}?", "answer": n} for n in range(first, first + count)]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    return str(path)


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_files_become_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parquet = tmp_path / "2.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows(15, 15)), parquet)
    files = [jsonl(tmp_path / "1.jsonl", rows(15)), str(parquet)]
    out = tmp_path / "new" / "aime.jsonl"
    assert main(["data", "prepare", "aime-2025", *files, "--out", str(out)]) == 0
    assert written(out)[0] == {"problem": "What is 0?", "answer": "0", "source": "1"}
    assert [row["answer"] for row in written(out)] == [str(n) for n in range(30)]
    assert capsys.readouterr().out == f"{out}: 30 problems of 30 rows\n"
    source = TaskSource.open(TasksSettings(kind="jsonl", paths=[out], shuffle=False))
    assert next(source).answer == "0"


def test_another_number_of_rows_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = jsonl(tmp_path / "1.jsonl", rows(29)), tmp_path / "out.jsonl"
    command = ["data", "prepare", "aime-2024", file, "--out", str(out)]
    assert main(command) == 2
    assert "aime-2024: 29 rows, but there are 30 in AIME 2024" in capsys.readouterr().err
    assert not out.exists()
    assert main([*command, "--any-count"]) == 0
    assert len(written(out)) == 29


def test_copies_and_what_is_measured_are_left_out(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "1.jsonl", [*rows(10), *rows(3)])
    measured = jsonl(tmp_path / "2.jsonl", [{"problem": "What  is 4?", "answer": 4}])
    out = tmp_path / "out.jsonl"
    command = ["data", "prepare", "dapo-en", file, "--out", str(out), "--any-count"]
    assert main([*command, "--without", measured]) == 0
    assert [row["answer"] for row in written(out)] == list("012356789")


def test_messages_and_levels_are_kept(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1+1?"}]
    row = {"messages": messages, "answer": "2", "level": "Level 4", "source": "here"}
    file, out = jsonl(tmp_path / "1.jsonl", [row]), tmp_path / "out.jsonl"
    assert main(["data", "prepare", "math-500", file, "--out", str(out), "--any-count"]) == 0
    assert written(out) == [{"messages": messages, "answer": "2", "source": "here", "level": 4}]


def test_errors_name_the_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = jsonl(tmp_path / "1.jsonl", [*rows(1), {"problem": "x?"}])
    assert main(["data", "prepare", "aime-2024", file, "--out", str(tmp_path / "out")]) == 2
    assert f"{file}: line 2: one of the fields 'answer'" in capsys.readouterr().err
    file = jsonl(tmp_path / "1.jsonl", rows(30))
    assert main(["data", "prepare", "aime-2024", file, "--out", f"{file}/out"]) == 2
    assert f"agentloop: error: {file}/out: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["data", "prepare", "no-such-set", file, "--out", "x"])
    assert "math-500" in capsys.readouterr().err
