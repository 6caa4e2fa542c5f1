import json
from pathlib import Path

from bench.trl import NUM_PROBLEMS, Step, measure, table, write_problems
from bench.trl_script import reward


def test_problems_are_distinct(tmp_path: Path) -> None:
    write_problems(tmp_path / "problems")
    lines = (tmp_path / "problems").read_text("utf-8").splitlines()
    assert len(set(lines)) == NUM_PROBLEMS
    row = json.loads(lines[0])
    answer = [{"role": "assistant", "content": rf"It is \boxed{{{row['answer']}}}."}]
    wrong = [{"role": "assistant", "content": r"It is \boxed{x}."}]
    right, second = reward([answer, wrong], answer=[row["answer"]] * 2)
    assert right >= 1 > second


def test_first_step_does_not_count(tmp_path: Path) -> None:
    line = json.dumps({"num_sampled_tokens": 7})
    steps = measure(
        ["sh", "-c", 'for n in 1 2 3; do echo "$0" >> "$1"; done', line, tmp_path / "metrics"],
        tmp_path / "metrics",
        tmp_path / "log",
    )
    assert [step.num_tokens for step in steps] == [7, 7]


def test_table_gives_ratios_of_medians() -> None:
    steps = {"TRL": [Step(8.0, 12.0, 100)], "agentloop": [Step(2.0, 4.0, 50)]}
    assert table(steps).endswith("4.00 of time, 3.00 of CPU time, 2.00 of tokens")
