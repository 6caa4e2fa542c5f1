"""`agentloop data`: make data files for training.

`prepare` converts local files of a well-known problem set into one JSONL file; nothing is
downloaded. The number of rows is checked, so that a truncated file or the wrong language or year
is detected before a training run. `filter` drops the problems that a policy already solves.
`teacher` writes dialogues for supervised fine-tuning. `score` scores what `agentloop serve` has
recorded, and `dialogues` exports scored rollouts for fine-tuning (docs/recorded-sessions.md).
`check` says what a run would make of a file or data set, and what is wrong with it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import anyio
import pydantic

from agentloop.cli import console
from agentloop.cli.data_check import check_data
from agentloop.cli.recorded import dialogues, score, write_rows
from agentloop.environments.rewards.reward import RewardSettings
from agentloop.environments.tasks.sources import Task, TasksSettings, read_jsonl, read_tasks
from agentloop.environments.tasks.task import problem_of, problem_of_row, problem_text, task_digest
from agentloop.environments.tasks.teacher import lessons
from agentloop.errors import AgentLoopError, DataError
from agentloop.launch.progress import ProgressLine
from agentloop.training.run.status import count_of

SETS = {
    "dapo-en": (14_116, "DAPO-Math-17k in English: open-r1/DAPO-Math-17k-Processed, en"),
    "aime-2024": (30, "AIME 2024 I and II"),
    "aime-2025": (30, "AIME 2025 I and II"),
    "math-500": (500, "500 problems of the MATH test set"),
    "hmmt-2025": (30, "HMMT February 2025"),
}
"""Number of rows and description of each problem set."""

Result = tuple[str, dict[str, object]]
"""The result of a command, as text and as data for JSON."""

_COUNTS = ("num_tasks", "num_too_few", "num_without", "num_unknown")  # of `Filtered`


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        with ProgressLine(options.doing, after_s=2.0):
            text, data = options.command(options)
    except AgentLoopError as error:
        print(f"agentloop: error: {error}", file=sys.stderr)
        return 2
    if options.json:
        console.print_json(data)
    else:
        print(text)
    return 1 if data.get("problems") else 0


def _prepare(options: argparse.Namespace) -> Result:
    num_rows, tasks = prepare(
        options.set, options.files, without=options.without, any_count=options.any_count
    )
    write_rows(options.out, map(_row, tasks))
    text = f"{options.out}: {count_of(len(tasks), 'problem')} from {count_of(num_rows, 'row')}"
    return text, {"out": str(options.out), "num_problems": len(tasks), "num_rows": num_rows}


def _filter(options: argparse.Namespace) -> Result:
    solved, rollouts = options.solved
    filtered = filter_solved(options.tasks, options.trajectories, solved=solved, rollouts=rollouts)
    write_rows(options.out, map(_row, filtered.tasks))
    num_kept = len(filtered.tasks)
    text = (
        f"{options.out}: {num_kept:,} of {count_of(filtered.num_tasks, 'problem')} kept; "
        f"solved at least {solved} of {rollouts} times: {filtered.num_tasks - num_kept:,}"
    )
    if filtered.num_too_few:
        text += (
            f"; kept for having fewer than {count_of(rollouts, 'rollout')} with a reward: "
            f"{filtered.num_too_few:,} ({filtered.num_without:,} have none)"
        )
    if filtered.num_unknown:
        text += f"; rolled out, but not in the --tasks files: {filtered.num_unknown:,}"
    counts = {name: getattr(filtered, name) for name in _COUNTS}
    return text, {"out": str(options.out), "num_problems": num_kept, **counts}


def _teacher(options: argparse.Namespace) -> Result:
    write_rows(options.out, lessons(options.count, levels=options.levels, seed=options.seed))
    text = f"{options.out}: {count_of(options.count, 'dialogue')}"
    return text, {"out": str(options.out), "num_dialogues": options.count}


def _score(options: argparse.Namespace) -> Result:
    settings = RewardSettings(function=options.reward)
    files = [*_trajectory_files(options.records)]
    scores = anyio.run(score, files, settings, [*_tasks(options.tasks)])
    text = f"{count_of(scores.num_scored, 'conversation')} scored"
    if scores.mean is not None:
        text += f", mean reward {scores.mean:.3f}"
    if scores.num_without:
        text += f"; {scores.num_without:,} without a reward"
        if not options.tasks and ":" not in options.reward:
            text += " (name the problems with --tasks, or a function of your own with --reward)"
    counts = {"num_scored": scores.num_scored, "num_without": scores.num_without}
    return text, {**counts, "mean_reward": scores.mean}


def _dialogues(options: argparse.Namespace) -> Result:
    lines = [*dialogues(_trajectory_files(options.records), least=options.min_reward)]
    if not lines:
        raise DataError(f"no rollout has a reward of at least {options.min_reward:g}")
    write_rows(options.out, lines)
    text = f"{options.out}: {count_of(len(lines), 'dialogue')}"
    return text, {"out": str(options.out), "num_dialogues": len(lines)}


def _check(options: argparse.Namespace) -> Result:
    try:
        report = anyio.run(check_data, options.data, options.settings)
    except DataError as error:  # the rows are no tasks
        return f"wrong: {error}", {"problems": [str(error)]}
    return report.text(), report.to_dict()


def _reward_function(text: str) -> str:
    try:
        return RewardSettings(function=text).function
    except pydantic.ValidationError as error:
        raise argparse.ArgumentTypeError(error.errors()[0]["msg"]) from error


def prepare(
    name: str, files: Sequence[Path], *, without: Sequence[Path] = (), any_count: bool = False
) -> tuple[int, list[Task]]:
    """Return the number of rows in `files` and their distinct problems, minus those in `without`.

    Raises:
        DataError: a row is invalid, or, unless `any_count`, the number of rows is not the set's.
    """
    rows = list(_tasks(files))
    expected, title = SETS[name]
    if len(rows) != expected and not any_count:
        raise DataError(
            f"{name}: found {count_of(len(rows), 'row')}, but {title} has {expected:,}; "
            "use --any-count to accept them anyway"
        )
    measured = {_problem(task) for task in _tasks(without)}
    remaining: dict[str, Task] = {}
    for task in rows:
        if (problem := _problem(task)) not in measured:
            remaining.setdefault(problem, task)
    return len(rows), list(remaining.values())


def _problem(task: Task) -> str:
    return task_digest(problem_text(task.prompt))


@dataclass(frozen=True, slots=True)
class Filtered:
    """The problems that remain after filtering, and counts.

    Attributes:
        num_tasks: distinct problems before filtering.
        num_too_few: problems kept because they have too few rollouts.
        num_without: problems among these that have no rollouts.
        num_unknown: problems with rollouts that are not among the tasks.
    """

    tasks: list[Task]
    num_tasks: int
    num_too_few: int
    num_without: int
    num_unknown: int


def filter_solved(
    files: Sequence[Path], trajectories: Sequence[Path], *, solved: int, rollouts: int
) -> Filtered:
    """Drop the problems that were solved at least `solved` times in their last `rollouts` rollouts.

    A rollout with a reward above 0 solves its problem; rollouts without a reward, which failed for
    reasons of infrastructure, are ignored. The last rollouts are those of the newest policy: files
    count in the order given, those of a run by step. A problem with fewer rollouts is kept.
    (Source: arXiv 2508.20722, stage 3, with 8 of 8.)

    Args:
        trajectories: run folders, or files from their `trajectories/`.

    Raises:
        DataError: a row is invalid, none of the problems rolled out is in `files`, or no problem
            is left.
    """
    last: dict[str, deque[float]] = {}
    for path in _trajectory_files(trajectories):
        counted = set()  # a rollout has a row for each of its conversations
        for number, row in read_jsonl(path):
            task_id, reward = _outcome(row, f"{path}: line {number}")
            rollout = (row.get("group"), task_id, row.get("rollout", f"line {number}"))
            if rollout in counted:
                continue
            counted.add(rollout)
            rewards = last.setdefault(problem_of_row(task_id), deque(maxlen=rollouts))
            if reward is not None:
                rewards.append(reward)
    tasks: dict[str, Task] = {}
    for task in _tasks(files):
        tasks.setdefault(task.id, task)
    problems = {id: problem_of(task) for id, task in tasks.items()}
    if last.keys().isdisjoint(problems.values()):
        raise DataError(
            f"--tasks: the rollouts have {count_of(len(last), 'problem')} and these files "
            f"{count_of(len(tasks), 'problem')}, with none in common; pass the files that the run "
            "was trained on"
        )
    counts = {id: len(last.get(problem, ())) for id, problem in problems.items()}
    remaining = [
        task
        for id, task in tasks.items()
        if counts[id] < rollouts or sum(reward > 0 for reward in last[problems[id]]) < solved
    ]
    if not remaining:
        raise DataError(f"no problems are left: all of them are solved ({len(tasks):,})")
    return Filtered(
        remaining,
        num_tasks=len(tasks),
        num_too_few=sum(count < rollouts for count in counts.values()),
        num_without=sum(not count for count in counts.values()),
        num_unknown=len(last.keys() - set(problems.values())),
    )


def _trajectory_files(paths: Iterable[Path]) -> Iterable[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
        elif files := sorted((path / "trajectories").glob("*.jsonl")):
            yield from files
        else:
            raise DataError(f"{path}: no trajectories/*.jsonl; expected a run's folder")


def _outcome(row: object, where: str) -> tuple[str, float | None]:
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: expected an object")
    task, reward = row.get("task"), row.get("reward")
    if not isinstance(task, str):
        raise DataError(f"{where}: field 'task': expected a problem's id")
    if "reward" not in row or not isinstance(reward, int | float | None):
        raise DataError(f"{where}: field 'reward': expected a number or null")
    return task, reward


def _tasks(files: Iterable[Path]) -> Iterable[Task]:
    for file in files:
        kind: Literal["jsonl", "parquet"] = "parquet" if file.suffix == ".parquet" else "jsonl"
        yield from read_tasks(TasksSettings(kind=kind, paths=[file]))


def _row(task: Task) -> dict[str, object]:
    field = "problem" if isinstance(task.prompt, str) else "messages"
    row: dict[str, object] = {field: task.prompt, "answer": task.answer, "source": task.source}
    row |= {"level": task.level} if task.level else {}
    return row | ({"extra_info": dict(task.extra)} if task.extra else {})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "agentloop data",
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="sets:\n"
        + "\n".join(
            f"  {name:<10} {count:>6} rows  {title}" for name, (count, title) in SETS.items()
        ),
    )
    commands = parser.add_subparsers(
        required=True, metavar="check | prepare | filter | teacher | score | dialogues"
    )
    check = commands.add_parser(
        "check",
        help="show what a run would make of a file or data set, and what is wrong with it; the "
        "exit status is 1 if anything is",
    )
    check.set_defaults(command=_check, doing="Checking the data")
    check.add_argument(
        "data",
        metavar="FILE | NAME",
        help="a .jsonl or .parquet file, a Hugging Face data set, or a recipe",
    )
    check.add_argument(
        "settings",
        nargs="*",
        metavar="KEY=VALUE",
        help="settings of the run, such as tasks.fields.answer=solution, reward.function=exact or "
        "model=FOLDER",
    )
    prepare = commands.add_parser("prepare", help="convert a problem set into one JSONL file")
    prepare.set_defaults(command=_prepare, doing="Reading the files")
    prepare.add_argument("set", choices=SETS)
    prepare.add_argument("files", nargs="+", type=Path, metavar="FILE", help=".jsonl or .parquet")
    prepare.add_argument("--out", required=True, type=Path, help="the JSONL file to write")
    prepare.add_argument(
        "--without",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="exclude the problems in this file, such as those used for evaluation",
    )
    prepare.add_argument(
        "--any-count", action="store_true", help="accept a different number of rows"
    )
    hard = commands.add_parser("filter", help="drop problems that the policy already solves")
    hard.set_defaults(command=_filter, doing="Reading the rollouts")
    hard.add_argument(
        "trajectories",
        nargs="+",
        type=Path,
        metavar="TRAJECTORIES",
        help="a run's folder, or files from its trajectories/",
    )
    hard.add_argument(
        "--solved",
        type=_share,
        default=(8, 8),
        metavar="K/N",
        help="drop problems solved at least K times in their last N rollouts (default: 8/8)",
    )
    hard.add_argument(
        "--tasks",
        action="append",
        required=True,
        type=Path,
        metavar="FILE",
        help="a .jsonl or .parquet file with the problems; may be repeated",
    )
    hard.add_argument("--out", required=True, type=Path, help="the JSONL file to write")
    teacher = commands.add_parser(
        "teacher", help="write synthetic arithmetic dialogues with frequent, corrected mistakes"
    )
    teacher.set_defaults(command=_teacher, doing="Writing the dialogues")
    teacher.add_argument("--out", required=True, type=Path, help="the JSONL file to write")
    teacher.add_argument(
        "--count",
        type=console.at_least(1),
        default=10_000,
        help="number of dialogues (default: 10000)",
    )
    teacher.add_argument(
        "--seed", type=console.at_least(0), default=0, help="random seed (default: 0)"
    )
    teacher.add_argument(
        "--levels",
        type=console.at_least(1),
        nargs="+",
        default=[2],
        help="difficulty of the problems, as in the setting tasks.levels (default: 2)",
    )
    scored = commands.add_parser("score", help="score what `agentloop serve` has recorded")
    scored.set_defaults(command=_score, doing="Scoring")
    scored.add_argument(
        "--reward",
        type=_reward_function,
        default="math",
        metavar="math | exact | MODULE:FUNCTION",
        help="how to score, as in the setting reward.function (default: math)",
    )
    scored.add_argument(
        "--tasks",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="a .jsonl or .parquet file of problems with answers; may be repeated",
    )
    best = commands.add_parser(
        "dialogues", help="export scored rollouts for `agentloop sft`, with their exact tokens"
    )
    best.set_defaults(command=_dialogues, doing="Reading the rollouts")
    best.add_argument(
        "--min-reward", type=float, default=0.5, help="smallest reward to export (default: 0.5)"
    )
    best.add_argument("--out", required=True, type=Path, help="the JSONL file to write")
    for command in (scored, best):
        command.add_argument(
            "records",
            nargs="+",
            type=Path,
            metavar="RECORD",
            help="the folder, or files from its trajectories/",
        )
    for command in (check, prepare, hard, teacher, scored, best):
        command.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _share(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form K/N, such as 8/8")
    return int(match[1]), int(match[2])
