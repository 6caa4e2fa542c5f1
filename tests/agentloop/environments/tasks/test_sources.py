"""Tasks: all kinds of sources, held-out tasks, cursors, and errors that name the location."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet
import pydantic
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from agentloop.environments.tasks.problems import Problem, arithmetic, polynomial, symbolic
from agentloop.environments.tasks.sources import Task, TaskSource, TasksSettings, read_tasks
from agentloop.environments.tasks.task import problem_of
from agentloop.errors import DataError, SettingsError
from agentloop.plain_json import dumps, loads

OPS = {"plus": "+", "minus": "-", "times": "*", "add": "+", "subtract": "-", "multiply by": "*"}


def take(source: TaskSource, count: int) -> list[Task]:
    return list(itertools.islice(source, count))


def jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    return path


def rows(count: int) -> list[dict[str, Any]]:
    return [{"problem": f"What is {number}?", "answer": number} for number in range(count)]


def opened(path: Path, kind: Any = "jsonl", cursor: Any = None, **settings: Any) -> TaskSource:
    return TaskSource.open(TasksSettings(kind=kind, paths=[path], **settings), cursor)


def only_task(tmp_path: Path, row: Any, **settings: Any) -> Task:
    return next(opened(jsonl(tmp_path / "data.jsonl", [row]), **settings))


def verl(number: int) -> dict[str, Any]:
    return {
        "data_source": "dapo",
        "prompt": [{"role": "user", "content": f"What is {number}?"}],
        "reward_model": {"ground_truth": str(number), "style": "rule"},
        "extra_info": {"index": number},
    }


# What a row may look like.


@pytest.mark.parametrize("prompt", ["prompt", "problem", "question"])
@pytest.mark.parametrize("answer", ["answer", "ground_truth"])
def test_rows_of_text(tmp_path: Path, prompt: str, answer: str) -> None:
    task = only_task(tmp_path, {prompt: "What is 1+1?", answer: " 2 ", "level": "Level 3"})
    assert (task.prompt, task.answer, task.level) == ("What is 1+1?", "2", 3)
    assert task.source == "data"
    assert task.extra == {}


def test_rows_of_messages(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    task = only_task(
        tmp_path, {"messages": messages, "answer": 2}, template="Q: {problem}", system="No."
    )
    assert (task.prompt, task.answer) == (messages, "2")


def test_conversations_with_the_same_last_message_differ(tmp_path: Path) -> None:
    def task(*turns: tuple[str, str]) -> Task:
        messages = [{"role": role, "content": content} for role, content in turns]
        return only_task(tmp_path, {"messages": messages, "answer": 2})

    last = ("user", "And twice that?")
    first = task(("user", "1+1?"), ("assistant", "2"), last)
    second = task(("user", "2+2?"), ("assistant", "4"), last)
    assert len({first.id, second.id, task(last).id}) == 3
    assert first == task(("user", "1+1?"), ("assistant", "2"), last)
    # A question alone is the problem itself; another system message makes it another task.
    plain = only_task(tmp_path, {"problem": "And twice  that?", "answer": 2})
    introduced = task(("system", "Be brief."), last)
    assert plain.id == task(last).id != introduced.id
    assert problem_of(plain) == problem_of(introduced)


def test_rows_of_verl(tmp_path: Path) -> None:
    task = only_task(tmp_path, verl(7))
    assert (task.answer, task.source, task.extra) == ("7", "dapo", {"index": 7})
    assert task.prompt == [{"role": "user", "content": "What is 7?"}]


def test_numbers_as_answers(tmp_path: Path) -> None:
    for inputs_, answer in [(25, "25"), (25.0, "25"), (0, "0"), (0.5, "0.5"), (-1, "-1")]:
        assert only_task(tmp_path, {"problem": "x?", "answer": inputs_}).answer == answer


def test_prompt_around_a_problem(tmp_path: Path) -> None:
    row = {"problem": "What is {1}?", "answer": 1}
    made = only_task(tmp_path, row, template="{problem} Use \\boxed{}.", system="Be brief.")
    assert made.prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is {1}? Use \\boxed{}."},
    ]
    assert made.id == only_task(tmp_path, row).id


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ([1, 2], "expected an object, got list"),
        ({"answer": 1},
         "one of the fields 'messages', 'prompt', 'problem', 'question' is required"),
        (
            {"problem": "x?"},
            "one of the fields 'reward_model.ground_truth', 'answer', 'ground_truth', 'target', "
            "'solution' is required; the line has 'problem': name its field with "
            "tasks.fields.answer=NAME",
        ),
        ({"problem": " ", "answer": 1}, "field 'problem' is empty"),
        ({"problem": 5, "answer": 1}, "field 'problem': expected text or messages, got 5"),
        ({"prompt": [], "answer": 1}, "field 'prompt': expected text or messages, got list"),
        ({"prompt": ["x"], "answer": 1}, "field 'prompt': message 1: 'role' and 'content'"),
        ({"prompt": [{"role": "user", "content": 1}], "answer": 1}, "message 1: 'role' and"),
        ({"messages": [{"role": "assistant", "content": "2"}], "answer": 1},
         "field 'messages': the last message must have the role 'user', not 'assistant'"),
        ({"problem": "x?", "answer": [1]}, "field 'answer': expected text or a number"),
        ({"problem": "x?", "reward_model": {"style": "rule"}}, "'reward_model.ground_truth', "),
        ({"problem": "x?", "answer": None}, "one of the fields 'reward_model.ground_truth', 'ans"),
        ({"problem": "x?", "answer": None}, "is required, and 'answer' is null: give the answer"),
        ({"problem": None, "answer": 1}, "is required, and 'problem' is null: give the problem"),
        ({"problem": "x?", "answer": True}, "field 'answer': expected text or a number"),
        ({"problem": "x?", "answer": " "}, "field 'answer' is empty"),
        ({"problem": "x?", "reward_model": {"ground_truth": {}}}, "'reward_model.ground_truth': "),
        ({"problem": "x?", "answer": 1, "level": "hard"}, "field 'level': expected a number"),
        ({"problem": "x?", "answer": 1, "extra_info": 3}, "field 'extra_info': expected an object"),
        ({"problem": "x\ud800?", "answer": 1}, "field 'problem' contains a lone surrogate"),
        ({"problem": "x?", "answer": "\udc00"}, "field 'answer' contains a lone surrogate"),
        ({"prompt": [{"role": "user", "content": "\ud800"}], "answer": 1},
         "field 'prompt' contains a lone"),
        ({"problem": "x?", "answer": 1, "extra_info": {"\ud800": 1}},
         "field 'extra_info' contains a lone"),
    ],
)  # fmt: skip
def test_bad_row_is_named(tmp_path: Path, row: Any, problem: str) -> None:
    path = jsonl(tmp_path / "data.jsonl", [*rows(2), row])
    with pytest.raises(DataError, match=re.escape(f"{path}: line 3: ") + ".*" + re.escape(problem)):
        opened(path)


def test_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    for line in (b'{"problem"', b"[" * 100_000):
        path.write_bytes(b'\xef\xbb\xbf{"problem": "x?", "answer": 1}\n\n' + line + b"\n")
        with pytest.raises(DataError, match=re.escape(f"{path}: line 3: not JSON")):
            opened(path)


@pytest.mark.parametrize(("level", "number"), [(2.0, 2), (math.nan, 0), ("Level 3", 3)])
def test_level_may_be_a_float_as_from_pandas(tmp_path: Path, level: Any, number: int) -> None:
    assert only_task(tmp_path, {"problem": "1+1?", "answer": 2, "level": level}).level == number


def test_missing_files_are_named(tmp_path: Path) -> None:
    for kind in ("jsonl", "parquet"):
        with pytest.raises(DataError, match="No such file"):
            opened(tmp_path / "data", kind)
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match="empty: no tasks were read: it has no lines"):
        opened(tmp_path / "empty")
    with pytest.raises(DataError, match=f"^{re.escape(str(tmp_path / 'empty'))}: "):
        opened(tmp_path / "empty", "parquet")


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"question": "x?", "answer": "48/2 = 24\nAltogether 72.\n#### 72"}, "72"),
        ({"question": "x?", "answer": "so\n#### 1,504"}, "1,504"),
        ({"question": "x?", "answer": "so 5.\nThe answer is: 5"}, "5"),
        ({"problem": "x?", "solution": r"Thus $x = \boxed{\frac{1}{2}}$."}, r"\frac{1}{2}"),
        ({"problem": "x?", "solution": r"\boxed{1}", "answer": "2"}, "2"),
        ({"problem": "x?", "target": 7}, "7"),
        ({"problem": "x?", "answer": None, "ground_truth": "3"}, "3"),
        ({"problem": "x?", "answer": "Tuesday"}, "Tuesday"),
    ],
)
def test_answers_of_known_data_sets(tmp_path: Path, row: Any, answer: str) -> None:
    assert only_task(tmp_path, row).answer == answer


def test_columns_that_settings_name(tmp_path: Path) -> None:
    row = {"Problem": "x?", "problem": "no", "meta": {"gold": 4}, "answer": 5}
    named = {"problem": "Problem", "answer": "meta.gold"}
    task = only_task(tmp_path, row, fields=named)
    assert (task.prompt, task.answer) == ("x?", "4")
    with pytest.raises(DataError, match=r"the field 'gold' is required; the line has 'meta', 'x'"):
        only_task(tmp_path, {"x": "?", "meta": 1}, fields={"problem": "x", "answer": "gold"})
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    (task,) = take(opened(path, "parquet", fields=named), 1)
    assert (task.prompt, task.answer) == ("x?", "4")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"problem,answer\nx?,1\n", "it looks like CSV, with the columns 'problem,answer'"),
        (b"problem\tanswer\nx?\t1\n", "it looks like tab-separated values"),
        (b'[\n{"problem": "x?", "answer": 1}\n]', "it is a JSON array over several lines"),
        (
            b'[{"problem": "x?", "answer": 1}]',
            "line 1: expected an object, got list (a JSON array)",
        ),
        (b'{\n"problem": "x?"\n}', "it has a JSON object over several lines"),
        ('{"problem": "x?"}'.encode("utf-16"), "it is UTF-16 text: save it as UTF-8"),
        (b"PAR1...", "it is a Parquet file: set tasks.kind=parquet"),
        (b"\x1f\x8b\x08\x00", "it is compressed"),
    ],
)
def test_other_formats_are_recognized(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "data"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        opened(path)
    assert str(caught.value).startswith(f"{path}: {problem}")
    assert "one JSON object per line is wanted, such as" in str(caught.value)


# Files of other kinds.


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    table = pyarrow.Table.from_pylist([verl(number) | {"image": b"x"} for number in range(3)])
    pyarrow.parquet.write_table(table, path)
    tasks = take(opened(path, "parquet", shuffle=False), 3)
    assert [task.answer for task in tasks] == ["0", "1", "2"]
    assert tasks == take(opened(jsonl(tmp_path / "data.jsonl", [verl(0), verl(1), verl(2)]),
                                shuffle=False), 3)  # fmt: skip
    bad = pyarrow.Table.from_pylist([verl(0), verl(1) | {"reward_model": None}])
    pyarrow.parquet.write_table(bad, path)
    with pytest.raises(DataError, match=re.escape(f"{path}: row 2: one of the fields 'reward")):
        opened(path, "parquet")


def test_parquet_file_of_other_columns_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    for columns, reason in [
        ({"text": ["x?"], "answer": ["1"]}, "one of the columns 'messages', 'prompt', "),
        ({"text": ["x?"], "answer": ["1"]}, "is required; the file has 'answer', 'text'"),
        ({"problem": ["x?"]}, "one of the columns 'reward_model.ground_truth', 'answer', "),
        ({"problem": ["x?"]}, "name its column with tasks.fields.answer=NAME"),
        ({}, "the file has none"),
    ]:
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        with pytest.raises(DataError, match=f"^{re.escape(str(path))}: .*{re.escape(reason)}"):
            opened(path, "parquet")
    gaps = pyarrow.table({"problem": ["x?", "y?", None], "answer": [1.0, float("nan"), 2.0]})
    pyarrow.parquet.write_table(gaps, path)
    with pytest.raises(
        DataError, match=re.escape(f"{path}: row 2: field 'answer': expected a finite")
    ):
        opened(path, "parquet")
    pyarrow.parquet.write_table(gaps.filter([True, False, True]), path)
    with pytest.raises(DataError, match=re.escape(f"{path}: row 2: one of the fields 'messages'")):
        opened(path, "parquet")


def test_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(SettingsError, match=r"pip install 'agentloop-rl\[data\]'"):
        opened(tmp_path / "data.parquet", "parquet")


@pytest.mark.full
def test_hugging_face_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets  # slow: only the worker that runs this test shall import it

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    result = datasets.Dataset.from_list([verl(number) for number in range(5)])
    result.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"test": result}).save_to_disk(tmp_path / "splits")
    (tmp_path / "files").mkdir()
    result.to_parquet(tmp_path / "files" / "train-0.parquet")
    for name, split in [("saved", "train"), ("splits", "test"), ("files", "train")]:
        settings = TasksSettings(
            kind="huggingface", name=str(tmp_path / name), split=split, shuffle=False
        )
        tasks = take(TaskSource.open(settings), 5)
        assert [task.answer for task in tasks] == ["0", "1", "2", "3", "4"]
    with pytest.raises(DataError, match=r"splits: KeyError: .*train"):
        TaskSource.open(TasksSettings(kind="huggingface", name=str(tmp_path / "splits")))


# Epochs, cursors, and what is held out.


def test_every_epoch_has_every_task_in_another_order(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "data.jsonl", rows(20))
    source = opened(path)
    epochs = [[task.answer for task in take(source, 20)] for _ in range(3)]
    assert all(sorted(epoch, key=int) == [str(n) for n in range(20)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [task.answer for task in take(opened(path), 20)] == epochs[0]
    assert [task.answer for task in take(opened(path, seed=1), 20)] != epochs[0]
    ordered = opened(path, shuffle=False)
    for _ in range(2):
        assert [task.answer for task in take(ordered, 20)] == [str(n) for n in range(20)]


@pytest.mark.parametrize("kind", ["jsonl", "arithmetic", "symbolic"])
@pytest.mark.parametrize("num_taken", [0, 1, 19, 20, 21, 55])
def test_cursor_continues_where_it_was_taken(tmp_path: Path, kind: str, num_taken: int) -> None:
    path = jsonl(tmp_path / "data.jsonl", rows(20))
    source = opened(path, kind, held_out=0.1)
    take(source, num_taken)
    cursor = json.loads(json.dumps(source.cursor()))
    again = opened(path, kind, cursor, held_out=0.1)
    expected = take(source, 50)
    assert take(again, 50) == expected
    assert again.cursor() == source.cursor()
    again.go_to(cursor)
    assert take(again, 50) == expected


def test_cursor_of_other_tasks_is_rejected(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "data.jsonl", rows(20))
    cursor = opened(path).cursor()
    jsonl(path, list(reversed(rows(20))))
    opened(path, cursor=cursor)  # the order of the file is of no account
    for changed in ({"seed": 1}, {"held_out": 3}, {"shuffle": False}):
        with pytest.raises(DataError, match="they are not those that the run began with"):
            opened(path, cursor=cursor, **changed)
    with pytest.raises(DataError, match="they are not those that the run began with"):
        opened(jsonl(path, rows(21)), cursor=cursor)
    generated = TaskSource.open(TasksSettings(levels=[1, 2])).cursor()
    with pytest.raises(DataError, match="they are not those that the run began with"):
        TaskSource.open(TasksSettings(levels=[2]), generated)


def test_rows_that_differ_in_any_field_are_different_tasks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row: dict[str, Any] = {"problem": "Play.", "answer": 1, "extra_info": {"pot": [1], "by": "me"}}
    turned = {**row, "problem": "Play. ", "extra_info": {"by": "me", "pot": [1]}}
    remaining: list[dict[str, Any]] = [
        {"answer": 2}, {"extra_info": {"pot": [2], "by": "me"}}, {"level": 2}, {"source": "x"}
    ]  # fmt: skip
    path = jsonl(
        tmp_path / "data.jsonl", [row, turned, *(row | another for another in remaining), row]
    )
    source = opened(path)
    assert source.distinct is not None
    assert len({task.id for task in source.distinct}) == len(source.distinct) == 5
    dropped, _ = [record.getMessage() for record in caplog.records]
    assert dropped == "tasks: 2 of 7 are dropped: they equal others in all fields"


@pytest.mark.parametrize("held_out", [0.3, 7.0])
def test_split_ignores_row_numbers(tmp_path: Path, held_out: float) -> None:
    numbered = [verl(n % 40) | {"extra_info": {"index": n, "split": "train"}} for n in range(120)]
    source = opened(jsonl(tmp_path / "data.jsonl", numbered), held_out=held_out)
    held = {problem_of(task) for task in source.held_out()}
    assert 1 < len(held) < 40
    assert not held & {problem_of(task) for task in take(source, 120)}
    turned = [row | {"extra_info": {"index": -n}} for n, row in enumerate(reversed(numbered))]
    again = opened(jsonl(tmp_path / "data.jsonl", turned), held_out=0.3)
    expected = opened(jsonl(tmp_path / "data.jsonl", numbered), held_out=0.3)
    problems = {problem_of(task) for task in expected.held_out()}
    assert {problem_of(task) for task in again.held_out()} == problems


def test_solve_rates_are_those_of_problems(tmp_path: Path) -> None:
    numbered = [verl(n % 2) | {"extra_info": {"index": n}} for n in range(4)]
    source = opened(jsonl(tmp_path / "data.jsonl", numbered))
    tasks = take(source, 4)
    assert len({task.id for task in tasks}) == 4
    assert len({source.rate_key(task) for task in tasks}) == 2


def test_two_answers_to_one_problem_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    same = {"problem": "1/2?", "answer": "0.5"}, {"problem": "1/2? ", "answer": "1/2"}
    path = jsonl(
        tmp_path / "data.jsonl", [*rows(20), {"problem": "What is 1?", "answer": 9}, *same]
    )
    source = opened(path, held_out=0.5)
    assert [record.getMessage() for record in caplog.records] == [
        f"tasks: one problem with two answers: '1' in {path}: line 2, '9' in {path}: line 21"
    ]
    trained = {task.prompt for task in take(source, 30)}
    assert not trained & {task.prompt for task in source.held_out()}
    path = jsonl(tmp_path / "same.jsonl", [{"problem": "Play.", "answer": n} for n in range(2)])
    for env in ("", "guess"):  # whose secret may be the answer
        TaskSource.open(TasksSettings(kind="jsonl", paths=[path]), env=env)
        assert len(caplog.records) == 2


def test_rows_that_differ_in_other_fields_are_held_out_separately(tmp_path: Path) -> None:
    """Their environment shows the model what differs."""
    games = [{"problem": "Play.", "answer": "won", "extra_info": {"seed": n}} for n in range(40)]
    source = opened(jsonl(tmp_path / "data.jsonl", games), held_out=0.3)
    held = {task.seed for task in source.held_out()}
    assert 1 < len(held) < 40
    assert held | {task.seed for task in take(source, 40)} == set(range(40))
    assert not held & {task.seed for task in take(source, 40)}


def test_rows_of_one_problem_are_held_out_together(tmp_path: Path) -> None:
    labelled = [row | {"source": source} for row in rows(40) for source in "ab"]
    for held_out in (0.3, 7):
        source = opened(jsonl(tmp_path / "data.jsonl", labelled), held_out=held_out)
        held = {task.prompt for task in source.held_out()}
        assert 1 < len(held) < 40
        assert not held & {task.prompt for task in take(source, 80)}


def test_fields_of_a_row_are_plain_data(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    for value, expected in [(moment, "2026-01-01T00:00:00+00:00"), (float("nan"), None)]:
        table = pyarrow.Table.from_pylist([verl(0) | {"extra_info": {"at": value}}])
        pyarrow.parquet.write_table(table, path)
        task = next(opened(path, "parquet"))
        assert task == Task(**loads(dumps(asdict(task))))
        assert task.at == expected
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([verl(0) | {"extra_info": {"image": b"x"}}]), path
    )
    with pytest.raises(DataError, match=r"row 1: field 'extra_info': .* serializable: bytes"):
        opened(path, "parquet")


@given(st.permutations(range(12)), st.sampled_from([0.3, 4.0]))
def test_order_of_a_file_does_not_matter(order: list[int], held_out: float) -> None:
    """Duplicates and whitespace do not matter either."""
    path = Path("unused.jsonl")
    plain, mixed = rows(12), [rows(12)[index] for index in order]
    copies = [{**row, "problem": row["problem"].replace(" ", "  ")} for row in mixed[:5]]
    sources = []
    for made in (plain, mixed + copies):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "agentloop.environments.tasks.rows.read_jsonl",
                lambda path, made=made: enumerate(made, 1),
            )
            sources.append(opened(path, held_out=held_out))
    assert sources[0].held_out() == sources[1].held_out()
    assert take(sources[0], 30) == take(sources[1], 30)
    trained = {task.id for task in take(sources[1], 30)}
    assert not trained & {task.id for task in sources[1].held_out()}


def test_held_out_tasks_stay_held_out_when_a_file_grows(tmp_path: Path) -> None:
    few = opened(jsonl(tmp_path / "few.jsonl", rows(200)), held_out=0.2)
    many = opened(jsonl(tmp_path / "many.jsonl", rows(400)), held_out=0.2)
    assert {task.id for task in few.held_out()} < {task.id for task in many.held_out()}
    assert 20 <= len(few.held_out()) <= 60
    assert len(opened(tmp_path / "few.jsonl", held_out=50).held_out()) == 50
    assert opened(tmp_path / "few.jsonl").held_out() == []
    with pytest.raises(DataError, match=r"all 200 are held out: tasks\.held_out is 200"):
        next(opened(tmp_path / "few.jsonl", held_out=200))


@pytest.mark.parametrize("kind", ["arithmetic", "symbolic"])
def test_generator_never_trains_on_what_it_holds_out(kind: Any) -> None:
    settings = TasksSettings(kind=kind, levels=[1, 2], held_out=40)
    source = TaskSource.open(settings)
    held_out = source.held_out()
    assert len({task.prompt for task in held_out}) == 40
    trained = take(source, 2000)
    assert not {task.prompt for task in trained} & {task.prompt for task in held_out}
    assert {task.level for task in trained} == {1, 2}
    assert TaskSource.open(settings).held_out() == held_out
    assert take(TaskSource.open(settings), 50) == trained[:50]
    another = settings.model_copy(update={"seed": 1})
    assert take(TaskSource.open(another), 50) != trained[:50]
    assert TaskSource.open(TasksSettings(kind=kind)).held_out() == []


def test_level_with_few_problems_holds_out_few() -> None:
    source = TaskSource.open(TasksSettings(levels=[1], held_out=10_000))
    held_out = source.held_out()
    assert 10 < len(held_out) == len({task.prompt for task in held_out}) < 100
    with pytest.raises(DataError, match="leaves no tasks"):
        next(TaskSource.open(TasksSettings(levels=[1], held_out=0.9999)))


@pytest.mark.parametrize("kind", ["jsonl", "arithmetic"])
def test_task_is_found_by_its_id(tmp_path: Path, kind: str) -> None:
    source = opened(jsonl(tmp_path / "data.jsonl", rows(20)), kind, held_out=2)
    for task in [*take(source, 5), *source.held_out()]:
        assert source.find(task.id) == task
    for id in ("no-such-task", "arithmetic-x", "symbolic-1"):
        with pytest.raises(KeyError):
            source.find(id)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kind": "jsonl"}, "paths: required by the kind 'jsonl'"),
        ({"kind": "huggingface"}, "name: required by the kind 'huggingface'"),
        ({"kind": "reasoning_gym"}, "families: required by the kind 'reasoning_gym'"),
        ({"levels": [0]}, "levels: must be at least 1, got 0"),
        ({"held_out": 1.5}, "held_out: expected a share below 1 or a whole number"),
        ({"template": "What?"}, "must contain {problem}"),
    ],
)
def test_inconsistent_settings_are_rejected(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=re.escape(problem)):
        TasksSettings(**settings)


# What is generated.


def solved_arithmetic(text: str) -> int:
    value = 0
    if result := re.fullmatch(r"What is (\d+) (\w+) (\d+)\?", text):
        first, op, second = result.groups()
        return int(sympy.sympify(f"{first}{OPS[op]}{second}"))
    result = re.fullmatch(r"Take (.*)\. What is the result\?", text)
    assert result
    first, *remaining = result[1].split(", then ")
    still_open, op, right = first.split(" ")
    value = int(sympy.sympify(f"{still_open}{OPS[op]}{right}"))
    for another in remaining:
        op, _, operand = another.rpartition(" ")
        value = int(sympy.sympify(f"({value}){OPS[op]}{operand}"))
    return value


def solved_symbolic(text: str) -> int:
    x, y = sympy.symbols("x y")

    def expression(text: str) -> Any:
        return sympy.sympify(re.sub(r"(\d)([xy])", r"\1*\2", text).replace("^", "**"))

    def equation(text: str) -> Any:
        return sympy.Eq(*map(expression, text.split(" = ")))

    if result := re.fullmatch(r"Solve for x: (.*)", text):
        return int(*sympy.solve(equation(result[1]), x))
    if result := re.fullmatch(r"What is the largest solution of (.*)\?", text):
        return int(max(sympy.solve(equation(result[1]), x)))
    if result := re.fullmatch(r"Let (.*) and (.*)\. What is x \+ y\?", text):
        (solution,) = sympy.solve([equation(result[1]), equation(result[2])], [x, y], dict=True)
        return int(solution[x] + solution[y])
    if result := re.fullmatch(r"Let f\(x\) = (.*)\. What is f'\((.*)\)\?", text):
        return int(sympy.diff(expression(result[1]), x).subs(x, int(result[2])))
    result = re.fullmatch(r"What is the integral of (.*) from x = (.*) to x = (.*)\?", text)
    assert result
    return int(sympy.integrate(expression(result[1]), (x, int(result[2]), int(result[3]))))


@pytest.mark.parametrize("level", [1, 2, 3, 4, 6, 7, 12])
def test_arithmetic_is_right(level: int) -> None:
    rng = Random(level)
    for _ in range(20):
        problem = arithmetic(level, rng)
        assert solved_arithmetic(problem.text) == problem.answer
        digits = max(map(len, re.findall(r"\d+", problem.text)))
        assert digits <= 1 + (level - 1) % 3
        assert problem.text.count(", then ") == (level - 1) // 3


@pytest.mark.parametrize("level", [1, 2, 4])
def test_sympy_confirms_the_symbolic_problems(level: int) -> None:
    rng = Random(level)
    made: list[Problem] = [symbolic(level, rng) for _ in range(20)]
    for problem in made:
        assert solved_symbolic(problem.text) == problem.answer, problem
    assert len({problem.text.split(" ")[3] for problem in made}) >= 4  # kinds


def test_polynomials_in_the_usual_notation() -> None:
    assert polynomial([5, -1, 0, 3]) == "3x^3 - x + 5"
    assert polynomial([0, 1]) == "x"
    assert polynomial([-2]) == "-2"
    assert polynomial([0, 0]) == "0"


def test_long_integers_keep_their_digits(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"problem": "?", "answer": 123456789012345678901234567890}\n')
    (task,) = read_tasks(TasksSettings(kind="jsonl", paths=[file]))
    assert task.answer == "123456789012345678901234567890"


def test_benchmark_may_be_held_out_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"problem": "?", "answer": 1}\n')
    source = TaskSource.open(TasksSettings(kind="jsonl", paths=[file], held_out=1))
    assert len(source.held_out()) == 1
    with pytest.raises(DataError, match="all 1 are held out"):
        next(source)
