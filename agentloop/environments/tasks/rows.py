"""Rows of files, data sets and reasoning-gym as tasks, and the settings that name them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Self

import pydantic

from agentloop.distribution import install_hint
from agentloop.environments.tasks.task import (
    Task,
    describe,
    level_of,
    plain_fields,
    problem_text,
    row_digest,
    task_digest,
)
from agentloop.errors import DataError, SettingsError, summary_of
from agentloop.plain_json import is_encodable
from agentloop.trajectory import Message

__all__ = ["TasksSettings", "prompt_of", "read_jsonl", "read_tasks"]

_PROMPTS = ("messages", "prompt", "problem", "question")
_ANSWERS = ("answer", "ground_truth")
_NESTED = "reward_model.ground_truth"
_OTHERS = ("reward_model", "data_source", "source", "level", "extra_info")


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
        for number, row in enumerate(_read_huggingface(settings), 1):
            yield _task(row, f"{settings.name}: row {number}", settings.name, settings)
    else:
        read, unit = (read_jsonl, "line") if settings.kind == "jsonl" else (_read_parquet, "row")
        for path in settings.paths:
            for number, row in read(path):
                yield _task(row, f"{path}: {unit} {number}", path.stem, settings)


def read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each nonempty line.

    Raises:
        DataError: The file cannot be read, or a line is not JSON.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        # Not orjson, which reads long integers as floats: answers may be long.
                        yield number, json.loads(line.removeprefix(b"\xef\xbb\xbf"))
                    except ValueError as error:
                        raise DataError(f"{path}: line {number}: not JSON: {error}") from error
    except FileNotFoundError as error:
        hint = "`agentloop data prepare --help` explains how to create one"
        raise DataError(f"{path}: {error.strerror}; {hint}") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _read_parquet(path: Path) -> Iterator[tuple[int, object]]:
    arrow = _package("pyarrow", extra="data")
    parquet = import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            present = set(file.schema_arrow.names)
            columns = [name for name in (*_PROMPTS, *_ANSWERS, *_OTHERS) if name in present]
            for needed in (_PROMPTS, (*_ANSWERS, "reward_model")):
                if not present.intersection(needed):
                    raise DataError(
                        f"{path}: one of the columns {_join(needed)} is required; the file has "
                        f"{_join(sorted(present)) or 'none'}"
                    )
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
            )


def _package(name: str, *, extra: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise SettingsError(
            f"tasks: {name} cannot be imported ({error}): {install_hint(extra)}"
        ) from error


def _task(row: object, where: str, source: str, settings: TasksSettings) -> Task:
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: expected an object, got {describe(row)}")
    named, prompt = _first(row, _PROMPTS, where)
    is_text = isinstance(prompt, str)
    question = prompt if is_text else _question(prompt, f"{where}: field {named!r}")
    if not question.strip():
        raise DataError(f"{where}: field {named!r} is empty")
    extra = row.get("extra_info")
    if not isinstance(extra, Mapping | None):
        raise DataError(f"{where}: field 'extra_info': expected an object, got {describe(extra)}")
    for name in (named, *_ANSWERS, *_OTHERS):
        if not is_encodable(row.get(name)):
            raise DataError(
                f"{where}: field {name!r} contains a lone surrogate (such as \\ud800), "
                "which cannot be encoded as UTF-8: replace it"
            )
    answer, level = _answer(row, where), level_of(row.get("level"), where)
    own_source = str(row.get("data_source") or row.get("source") or "")
    fields = plain_fields({named: prompt, "extra_info": extra or {}}, where)
    prompt, extra = fields.values()
    messages = [] if is_text else prompt
    system_texts = [message["content"] for message in messages if message["role"] == "system"]
    problem = [task_digest(problem_text(prompt)), answer, extra]
    return Task(
        id=row_digest(problem, [own_source, level, system_texts]),
        prompt=prompt_of(prompt, settings) if is_text else prompt,
        answer=answer,
        source=own_source or source,
        level=level,
        extra=extra,
    )


def _first(row: Mapping[str, Any], names: Sequence[str], where: str) -> tuple[str, Any]:
    for name in names:
        if row.get(name) is not None:
            return name, row[name]
    raise DataError(
        f"{where}: one of the fields {_join(names)} is required; the line has "
        f"{_join(sorted(map(str, row))) or 'none'}"
    )


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


def _answer(row: Mapping[str, Any], where: str) -> str:
    nested = row.get("reward_model")
    if isinstance(nested, Mapping):
        row = {_NESTED: nested.get("ground_truth"), **row}
    name, answer = _first(row, (_NESTED, *_ANSWERS), where)
    if isinstance(answer, float) and not math.isfinite(answer):  # how pandas writes missing values
        raise DataError(f"{where}: field {name!r}: expected a finite number, got {answer}")
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)  # from a column of integers with missing values
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise DataError(
            f"{where}: field {name!r}: expected text or a number, got {describe(answer)}"
        )
    if not str(answer).strip():
        raise DataError(f"{where}: field {name!r} is empty")
    return str(answer).strip()


def prompt_of(text: str, settings: TasksSettings) -> str | Sequence[Message]:
    """Return the prompt around a problem that is plain text."""
    text = settings.template.replace("{problem}", text)
    if not settings.system:
        return text
    return [{"role": "system", "content": settings.system}, {"role": "user", "content": text}]
