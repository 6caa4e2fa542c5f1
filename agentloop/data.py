"""`agentloop data`: files to train from.

`prepare` makes one JSONL file of a well-known set of problems, from files at hand. Nothing is
downloaded. Each set is known by its number of rows, so that half a file, another
language or another year is noticed before a training run, not after it. `teacher` writes dialogues
to start from.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentloop.errors import AgentLoopError, DataError
from agentloop.groups.tasks import Task, TasksSettings, read_tasks
from agentloop.groups.teacher import lessons

__all__ = ["SETS", "main", "prepare"]

SETS = {
    "dapo-en": (14_116, "DAPO-Math-17k in English: open-r1/DAPO-Math-17k-Processed, en"),
    "aime-2024": (30, "AIME 2024, I and II"),
    "aime-2025": (30, "AIME 2025, I and II"),
    "math-500": (500, "500 of MATH's test problems"),
    "hmmt-2025": (30, "HMMT, February 2025"),
}
"""The number of rows of each set, and what it is."""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        print(options.command(options))
    except AgentLoopError as error:
        print(f"agentloop: error: {error}", file=sys.stderr)
        return 2
    return 0


def _prepare(options: argparse.Namespace) -> str:
    num_rows, tasks = prepare(
        options.set, options.files, without=options.without, any_count=options.any_count
    )
    _write(map(_row, tasks), options.out)
    return f"{options.out}: {len(tasks)} problems of {num_rows} rows"


def _teacher(options: argparse.Namespace) -> str:
    _write(lessons(options.count, levels=options.levels, seed=options.seed), options.out)
    return f"{options.out}: {options.count} dialogues"


def prepare(
    name: str, files: Sequence[Path], *, without: Sequence[Path] = (), any_count: bool = False
) -> tuple[int, list[Task]]:
    """The number of rows in `files`, and their problems: each once, less those in `without`.

    Raises:
        DataError: a bad row; or another number of rows than the set has, unless `any_count`.
    """
    rows = list(_tasks(files))
    expected, what = SETS[name]
    if len(rows) != expected and not any_count:
        raise DataError(
            f"{name}: {len(rows)} rows, but there are {expected} in {what}; "
            "with --any-count they are taken nevertheless"
        )
    measured = {task.id for task in _tasks(without)}
    left: dict[str, Task] = {}
    for task in rows:
        if task.id not in measured:
            left.setdefault(task.id, task)
    return len(rows), list(left.values())


def _tasks(files: Iterable[Path]) -> Iterable[Task]:
    for file in files:
        kind: Any = "parquet" if file.suffix == ".parquet" else "jsonl"
        yield from read_tasks(TasksSettings(kind=kind, paths=[file]))


def _write(rows: Iterable[Mapping[str, Any]], out: Path) -> None:
    """Whole, or not at all."""
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        unfinished.replace(out)
    except OSError as error:
        raise DataError(f"{out}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink()


def _row(task: Task) -> dict[str, Any]:
    field = "problem" if isinstance(task.prompt, str) else "messages"
    row = {field: task.prompt, "answer": task.answer, "source": task.source}
    return row | ({"level": task.level} if task.level else {})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "agentloop data",
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="sets:\n"
        + "\n".join(
            f"  {name:<10} {count:>6} rows  {what}" for name, (count, what) in SETS.items()
        ),
    )
    commands = parser.add_subparsers(required=True, metavar="prepare | teacher")
    prepare = commands.add_parser("prepare", help="make one JSONL file of a set")
    prepare.set_defaults(command=_prepare)
    prepare.add_argument("set", choices=SETS)
    prepare.add_argument("files", nargs="+", type=Path, metavar="FILE", help=".jsonl or .parquet")
    prepare.add_argument("--out", required=True, type=Path, help="the JSONL file to write")
    prepare.add_argument(
        "--without",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="leave out the problems that stand here: what is measured must not be trained on",
    )
    prepare.add_argument(
        "--any-count", action="store_true", help="take files with another number of rows"
    )
    teacher = commands.add_parser(
        "teacher", help="write dialogues about arithmetic, of a teacher who often errs"
    )
    teacher.set_defaults(command=_teacher)
    teacher.add_argument("--out", required=True, type=Path, help="the JSONL file to write")
    teacher.add_argument("--count", type=_from(1), default=10_000, help="dialogues (10000)")
    teacher.add_argument("--seed", type=_from(0), default=0, help="of problems and faults (0)")
    teacher.add_argument(
        "--levels",
        type=_from(1),
        nargs="+",
        default=[2],
        help="levels of the problems, as in tasks.levels of a training run (2)",
    )
    return parser


def _from(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise ValueError
        return value

    return number
