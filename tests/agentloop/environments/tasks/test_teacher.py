"""The noisy teacher: documented error rates, deterministic, and consistent with the sandbox."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from pathlib import Path

import pytest

from agentloop.__main__ import main
from agentloop.agent.sandbox_tools import PythonCode
from agentloop.environments.tasks.sources import Task, TaskSource, TasksSettings
from agentloop.environments.tasks.teacher import dialogues
from agentloop.sandbox import Pool, PoolSettings


def tasks(count: int, *levels: int) -> list[Task]:
    source = TaskSource.open(TasksSettings(levels=list(levels or (2,)), held_out=1))
    return list(itertools.islice(source, count))


@pytest.mark.parametrize("level", [1, 2, 6])
def test_teacher_errs_in_the_expected_shares_of_dialogues(level: int) -> None:
    requests = tasks(3000, level)
    num_right = num_calls = num_faulty = 0
    ratios = []
    for task, row in zip(requests, dialogues(requests), strict=True):
        *_, last = row["messages"]
        boxed = re.search(r"<answer>\\boxed\{(-?\d+)\}</answer>$", last["content"])
        assert boxed is not None
        results = [m["content"] for m in row["messages"] if m["role"] == "tool"]
        faulty = sum(not re.fullmatch(r"-?\d+", result) for result in results)
        num_calls += len(results)
        num_faulty += faulty
        if boxed[1] == task.answer:
            num_right += 1
            ratios.append(faulty / len(results))
        # Who says that the tool says so says what it says; who guesses is wrong.
        says_so = "The tool says so." in last["content"]
        assert (boxed[1] == results[-1]) if says_so else (boxed[1] != task.answer)
    assert 0.38 < num_right / 3000 < 0.5 + 0.1 * (level == 1)  # 1 + 0 is 1 - 0, whatever the call
    assert 0.35 < num_faulty / num_calls < 0.45
    assert 0.18 < statistics.fmean(ratios) < 0.28  # a failed call costs nothing but another


def test_dialogues_are_deterministic() -> None:
    requests = tasks(50)
    assert list(dialogues(requests, seed=3)) == list(dialogues(requests, seed=3))
    assert list(dialogues(requests, seed=3)) != list(dialogues(requests, seed=4))


@pytest.mark.real
@pytest.mark.timeout(120)
@pytest.mark.full
async def test_results_are_those_of_the_sandbox() -> None:
    """Local processes return the same text as containers, regardless of isolation."""
    ran: dict[str, str] = {}
    for row in dialogues(tasks(120, 2, 5)):
        for turn, result in itertools.pairwise(row["messages"]):
            if result["role"] == "tool" and not result["content"].startswith(("[mal", "[unk")):
                call = turn["content"].split("<tool_call>")[1].removesuffix("</tool_call>")
                ran[json.loads(call)["arguments"]["code"]] = result["content"]
    assert any(content.startswith("[stderr]") for content in ran.values())
    async with Pool(PoolSettings(backend="process", workers=1)) as pool:
        async with PythonCode(pool, timeout_s=60).open() as run:
            for code, content in ran.items():
                assert (await run({"code": code})).content == content


def test_command_writes_dialogues_about_nothing_that_is_held_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "teacher.jsonl"
    command = ["data", "teacher", "--out", str(out), "--count", "500", "--levels", "1", "2"]
    assert main(command) == 0
    assert capsys.readouterr().out == f"{out}: 500 dialogues\n"
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert len(rows) == 500
    requests = {row["messages"][0]["content"] for row in rows}
    for held_out in (32, 0.1):
        second = TasksSettings(levels=[1, 2], seed=7, held_out=held_out)
        assert not requests & {task.prompt for task in TaskSource.open(second).held_out()}
    assert all(row["tools"] == [PythonCode.schema] for row in rows)


@pytest.mark.parametrize("option", ["--count=0", "--levels=0", "--seed=x"])
def test_bad_options_are_named(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "teacher", "--out", "x", option])
    assert option.split("=")[0] in capsys.readouterr().err
