"""Rows of files, data sets and reasoning-gym as tasks, and the settings that name them."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Self

import pydantic

from agentloop.distribution import install_hint
from agentloop.environments.tasks.boxes import last_box
from agentloop.environments.tasks.task import (
    Task,
    describe,
    level_of,
    plain_fields,
    row_digest,
    shown_digest,
    task_digest,
)
from agentloop.errors import DataError, SettingsError, summary_of
from agentloop.plain_json import is_encodable
from agentloop.trajectory import Message

__all__ = [
    "FieldsSettings",
    "TasksSettings",
    "find_conflicts",
    "prompt_of",
    "read_jsonl",
    "read_tasks",
]

_PROMPTS = ("messages", "prompt", "problem", "question")
_ANSWERS = ("reward_model.ground_truth", "answer", "ground_truth", "target", "solution")
_OTHERS = ("data_source", "source", "level", "extra_info")
_WANTED = 'one JSON object per line is wanted, such as {"problem": "What is 1 + 1?", "answer": "2"}'
# How GSM8K and MetaMathQA end a solution.
_STATED = re.compile(
    r"(?:^|\n)\s*(?:####|(?:the )?(?:final )?answer(?: is)?\s*:|the (?:final )?answer is)\s*(.+)\Z",
    re.IGNORECASE,
)


class FieldsSettings(pydantic.BaseModel):
    """The columns of files and data sets."""

    model_config = pydantic.ConfigDict(extra="forbid")

    problem: str = pydantic.Field(
        "",
        description="Column of the problem; a.b is the field b of the column a. By default, the "
        f"first of {', '.join(_PROMPTS)}.",
    )
    answer: str = pydantic.Field(
        "",
        description="Column of the answer. By default, the first of "
        f"{', '.join(_ANSWERS)}. Of a solution that ends with a boxed answer, or with #### and the "
        "answer, that is the answer.",
    )

    @property
    def problems(self) -> Sequence[str]:
        """The columns where the problem may be."""
        return (self.problem,) if self.problem else _PROMPTS

    @property
    def answers(self) -> Sequence[str]:
        """The columns where the answer may be."""
        return (self.answer,) if self.answer else _ANSWERS


class TasksSettings(pydantic.BaseModel):
    """The source of tasks."""

    model_config = pydantic.ConfigDict(extra="forbid")

    kind: Literal[
        "arithmetic",
        "symbolic",
        "environment",
        "jsonl",
        "parquet",
        "huggingface",
        "reasoning_gym",
    ] = pydantic.Field(
        "arithmetic",
        description="Source of tasks: a generator (arithmetic, symbolic, or the environment's "
        "own), files (jsonl, or parquet with verl's columns), a Hugging Face data set "
        "(huggingface) or puzzles of reasoning-gym (reasoning_gym). An environment that makes "
        "tasks replaces a generator.",
    )
    paths: list[Path] = pydantic.Field(
        default_factory=list, description="Files to read, with kind = jsonl or parquet."
    )
    name: str = pydantic.Field(
        "", description="With kind = huggingface: hub name or local folder of the data set."
    )
    config: str = pydantic.Field(
        "", description="With kind = huggingface: configuration (subset) of the data set."
    )
    split: str = pydantic.Field(
        "train", description="With kind = huggingface: split of the data set."
    )
    held_out_split: str = pydantic.Field(
        "",
        description="With kind = huggingface: split that is held out, such as test; none of its "
        "problems is trained on. held_out: how many of them are evaluated; 0: all.",
    )
    fields: FieldsSettings = pydantic.Field(default_factory=lambda: FieldsSettings())
    families: list[str] = pydantic.Field(
        default_factory=list,
        description="With kind = reasoning_gym: families of puzzles, such as chain_sum.",
    )
    size: int = pydantic.Field(
        500, ge=1, description="With kind = reasoning_gym: number of tasks of each family."
    )
    levels: list[int] = pydantic.Field(
        default_factory=lambda: [1],
        min_length=1,
        description="With kind = arithmetic or symbolic: difficulty levels of the problems, used "
        "in turn.",
    )
    seed: int = pydantic.Field(0, description="Random seed of generators and of shuffling.")
    shuffle: bool = pydantic.Field(
        True, description="Shuffle the tasks in each epoch. false: keep the order of the source."
    )
    held_out: float = pydantic.Field(
        0.0,
        ge=0,
        description="Tasks to hold out for evaluation: below 1 a fraction, otherwise a number. For "
        "a generator, a fraction says how many of its problems are never trained on (default: an "
        "eighth), and a number how many of those to evaluate (default: 256). 0: none.",
    )
    template: str = pydantic.Field(
        "{problem}",
        description="Prompt for problems that are plain text; {problem} is replaced by the "
        "problem.",
    )
    system: str = pydantic.Field(
        "", description="System message before problems that are plain text. By default, none."
    )

    @pydantic.model_validator(mode="after")
    def _check_consistent(self) -> Self:
        needed = {
            "jsonl": "paths",
            "parquet": "paths",
            "huggingface": "name",
            "reasoning_gym": "families",
        }.get(self.kind)
        if needed and not getattr(self, needed):
            raise ValueError(f"{needed}: required by the kind {self.kind!r}")
        if self.held_out_split and self.kind != "huggingface":
            raise ValueError(f"held_out_split: not used with the kind {self.kind!r}: omit it")
        if min(self.levels) < 1:
            raise ValueError(f"levels: must be at least 1, got {min(self.levels)}")
        if self.held_out >= 1 and not self.held_out.is_integer():
            raise ValueError(
                f"held_out: expected a share below 1 or a whole number, got {self.held_out}"
            )
        if "{problem}" not in self.template:
            raise ValueError("template: must contain {problem}")
        return self


def read_tasks(settings: TasksSettings) -> Iterator[Task]:
    """Yield every task of a file, a data set or reasoning-gym, including duplicates.

    Raises:
        DataError: As `TaskSource.open`.
        SettingsError: As `TaskSource.open`.
    """
    if settings.kind == "reasoning_gym":
        yield from _read_reasoning_gym(settings)
    elif settings.kind == "huggingface":
        rows = enumerate(_read_huggingface(settings), 1)
        yield from _tasks(rows, settings.name, "row", settings.name, settings)
    else:
        for path in settings.paths:
            if settings.kind == "jsonl":
                yield from _tasks(read_jsonl(path), path, "line", path.stem, settings)
            else:
                columns = settings.fields.problems, settings.fields.answers
                yield from _tasks(_read_parquet(path, *columns), path, "row", path.stem, settings)


def _tasks(
    rows: Iterable[tuple[int, object]],
    origin: str | Path,
    unit: str,
    source: str,
    settings: TasksSettings,
) -> Iterator[Task]:
    number = 0
    for number, row in rows:
        yield _task(row, f"{origin}: {unit} {number}", source, settings)
    if not number:
        raise DataError(f"{origin}: no tasks were read: it has no {unit}s")


def find_conflicts(tasks: Iterable[Task], *, env: str) -> list[tuple[Task, Task]]:
    """Return pairs of rows of files that show the model the same, with different answers.

    Args:
        env: name of their environment, if any: where all rows show the same, it makes the
            difference.
    """
    by_shown: dict[str, list[Task]] = {}
    for task in tasks:
        if task.source_line:
            by_shown.setdefault(shown_digest(task), []).append(task)
    if env and len(by_shown) < 2:
        return []
    return [
        (same[0], task)
        for same in by_shown.values()
        for task in same[1:]
        if _comparable(same[0].answer) != _comparable(task.answer)
    ]


def _comparable(answer: str) -> Fraction | str:
    try:
        return Fraction(answer.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return answer


def read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each nonempty line.

    Raises:
        DataError: The file cannot be read, or a line is not JSON.
    """
    is_first = True
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        # Not orjson, which reads long integers as floats: answers may be long.
                        yield number, json.loads(line.removeprefix(b"\xef\xbb\xbf").decode())
                    except (ValueError, RecursionError) as error:
                        if is_first and (format := _format_of(path)):
                            raise DataError(f"{path}: {format}; {_WANTED}") from error
                        wanted = f"; {_WANTED}" if is_first else ""
                        raise DataError(
                            f"{path}: line {number}: not JSON: {error}{wanted}"
                        ) from error
                    is_first = False
    except FileNotFoundError as error:
        hint = "`agentloop data prepare --help` explains how to create one"
        raise DataError(f"{path}: {error.strerror}; {hint}") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _format_of(path: Path) -> str:
    """Describe a file that is not JSONL; return an empty text if its format is not known."""
    with path.open("rb") as file:
        start = file.read(4096)
    line = start.strip().partition(b"\n")[0].decode("utf-8", "replace").strip()
    if start.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in start[:2]:
        return "it is UTF-16 text: save it as UTF-8"
    if start.startswith(b"PAR1"):
        return "it is a Parquet file: set tasks.kind=parquet"
    if start.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK", b"BZh", b"\xfd7zXZ")):
        return "it is compressed: unpack it first"
    if line.startswith("["):
        return "it is a JSON array over several lines: write each of its objects on a line"
    if line.startswith("{") and line.endswith(("{", ",", "[")):
        return "it has a JSON object over several lines: write each object on one line"
    if line[:1] not in ("{", '"') or path.suffix in (".csv", ".tsv"):
        for separator, format in ((",", "CSV"), ("\t", "tab-separated values"), (";", "CSV")):
            if separator in line:
                return f"it looks like {format}, with the columns {line!r:.100}"
    return ""


def _read_parquet(
    path: Path, problems: Sequence[str], answers: Sequence[str]
) -> Iterator[tuple[int, object]]:
    arrow = _package("pyarrow", extra="data")
    parquet = import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            present = set(file.schema_arrow.names)
            for field, needed in (("problem", problems), ("answer", answers)):
                if not present.intersection(map(_column_of, needed)):
                    raise DataError(f"{path}: {_missing(field, needed, 'column', present)}")
            wanted = dict.fromkeys(map(_column_of, (*problems, *answers, *_OTHERS)))
            columns = [name for name in wanted if name in present]
            batches = file.iter_batches(batch_size=1024, columns=columns)
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
            yield from enumerate(rows, 1)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    except arrow.ArrowException as error:
        raise DataError(f"{path}: {error}") from error


def _read_huggingface(settings: TasksSettings) -> Iterable[object]:
    datasets = _package("datasets", extra="data")
    name = settings.name
    try:
        if (Path(name) / "state.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
            data = datasets.load_from_disk(name)
            rows: Iterable[object] = data[settings.split] if isinstance(data, dict) else data
        else:
            rows = datasets.load_dataset(name, settings.config or None, split=settings.split)
    except Exception as error:  # the hub, files, format or split may raise anything
        raise DataError(f"{name}: {summary_of(error)}") from error
    return rows


def _read_reasoning_gym(settings: TasksSettings) -> Iterator[Task]:
    gym = _package("reasoning_gym", extra="reasoning-gym")
    for family in settings.families:
        puzzle = {"family": family, "size": settings.size, "seed": settings.seed}
        try:
            dataset = gym.create_dataset(family, size=settings.size, seed=settings.seed)
        except ValueError as error:
            raise SettingsError(f"families: {family!r}: {error}") from error
        for index in range(settings.size):
            entry = dataset[index]
            text = entry["question"]
            yield Task(
                id=task_digest(text),
                prompt=prompt_of(text, settings),
                answer="" if entry["answer"] is None else str(entry["answer"]),
                source=f"reasoning_gym/{family}",
                extra={"reasoning_gym": {**puzzle, "index": index}},
                source_line=f"{family}: number {index}",
            )


def _package(name: str, *, extra: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise SettingsError(
            f"tasks: {name} cannot be imported ({error}): {install_hint(extra)}"
        ) from error


def _task(row: object, where: str, source: str, settings: TasksSettings) -> Task:
    if not isinstance(row, Mapping):
        array = f" (a JSON array); {_WANTED}" if isinstance(row, list) else ""
        raise DataError(f"{where}: expected an object, got {describe(row)}{array}")
    named, prompt = _first(row, "problem", settings.fields.problems, where)
    is_text = isinstance(prompt, str)
    question = prompt if isinstance(prompt, str) else _question(prompt, f"{where}: field {named!r}")
    if not question.strip():
        raise DataError(f"{where}: field {named!r} is empty")
    extra = row.get("extra_info")
    if not isinstance(extra, Mapping | None):
        raise DataError(f"{where}: field 'extra_info': expected an object, got {describe(extra)}")
    for name in dict.fromkeys(map(_column_of, (named, *settings.fields.answers, *_OTHERS))):
        if not is_encodable(row.get(name)):
            raise DataError(
                f"{where}: field {name!r} contains a lone surrogate (such as \\ud800), "
                "which cannot be encoded as UTF-8: replace it"
            )
    answer = _answer(*_first(row, "answer", settings.fields.answers, where), where)
    level = level_of(row.get("level"), where)
    own_source = str(row.get("data_source") or row.get("source") or "")
    fields = plain_fields({named: prompt, "extra_info": extra or {}}, where)
    plain, extra = fields.values()
    messages = [] if is_text else plain
    system_texts = [message["content"] for message in messages if message["role"] == "system"]
    return Task(
        id=row_digest(plain, answer, [own_source, level, system_texts, extra]),
        prompt=prompt_of(plain, settings) if is_text else plain,
        answer=answer,
        source=own_source or source,
        level=level,
        extra=extra,
        source_line=where,
    )


def _first(
    row: Mapping[str, object], field: str, names: Sequence[str], where: str
) -> tuple[str, object]:
    for name in names:
        if (value := _value(row, name)) is not None:
            return name, value
    nulls = [name for name in names if name in row]
    raise DataError(f"{where}: {_missing(field, names, 'field', row, nulls)}")


def _value(row: Mapping[str, object], name: str) -> object:
    """Return a field, or the field b of the field a if the name is a.b; None if there is none."""
    if name in row:
        return row[name]
    column, _, inner = name.partition(".")
    outer = row.get(column)
    return _value(outer, inner) if inner and isinstance(outer, Mapping) else None


def _column_of(name: str) -> str:
    return name.partition(".")[0]


def _missing(
    field: str,
    names: Sequence[str],
    unit: str,
    present: Iterable[object],
    nulls: Sequence[str] = (),
) -> str:
    one_of = f"one of the {unit}s {_join(names)}" if len(names) > 1 else f"the {unit} {names[0]!r}"
    if nulls:
        return f"{one_of} is required, and {_join(nulls)} is null: give the {field}"
    columns = _join(sorted(map(str, present))) or "none"
    has = f"the line has {columns}" if unit == "field" else f"the file has {columns}"
    return f"{one_of} is required; {has}: name its {unit} with tasks.fields.{field}=NAME"


def _join(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _question(messages: object, where: str) -> str:
    """Check a conversation, and return its last question."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: expected text or messages, got {describe(messages)}")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise DataError(f"{where}: message {number}: 'role' and 'content' must be text")
    last: Mapping[str, str] = messages[-1]
    if last["role"] != "user":
        raise DataError(
            f"{where}: the last message must have the role 'user', not {last['role']!r}"
        )
    return last["content"]


def _answer(name: str, answer: object, where: str) -> str:
    if isinstance(answer, float) and not math.isfinite(answer):  # how pandas writes missing values
        raise DataError(f"{where}: field {name!r}: expected a finite number, got {answer}")
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)  # from a column of integers with missing values
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise DataError(
            f"{where}: field {name!r}: expected text or a number, got {describe(answer)}"
        )
    text = str(answer).strip()
    if not text:
        raise DataError(f"{where}: field {name!r} is empty")
    if stated := _STATED.search(text):
        return stated[1].strip().removesuffix(".")
    return last_box(text) or text


def prompt_of(text: str, settings: TasksSettings) -> str | Sequence[Message]:
    """Return the prompt around a problem that is plain text."""
    text = settings.template.replace("{problem}", text)
    if not settings.system:
        return text
    return [{"role": "system", "content": settings.system}, {"role": "user", "content": text}]
