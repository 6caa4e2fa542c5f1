"""Read tasks from files, data sets and generators, as an endless source that can be resumed.

Held-out tasks are chosen by a hash of their content, not by their position in a file,
so they stay out of training if the file is reordered, extended or contains duplicates.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any, Literal, Self

import pydantic

from agentloop.distribution import install_hint
from agentloop.environments.tasks.problems import GENERATORS
from agentloop.environments.tasks.task import (
    NUM_PROBLEM_DIGITS,
    Task,
    level_of,
    line_of,
    plain_fields,
    problem_text,
    row_digest,
    shown,
    task_digest,
    task_of,
)
from agentloop.errors import AgentLoopError, DataError, SettingsError, summary_of
from agentloop.plain_json import is_encodable
from agentloop.trajectory import Message

__all__ = ["Task", "TaskSource", "TasksSettings", "read_jsonl", "read_tasks", "task_digest"]

log = logging.getLogger(__name__)

_PROMPTS = ("messages", "prompt", "problem", "question")
_ANSWERS = ("answer", "ground_truth")
_NESTED = "reward_model.ground_truth"
_OTHERS = ("reward_model", "data_source", "source", "level", "extra_info")
_MAX_HELD_OUT = 256  # of a generator, whose problems are endless
_GENERATED_SHARE = 1 / 8
_MAX_MISSES = 1000


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


class TaskSource(ABC):
    """An endless iterator over the training tasks, with a list of held-out tasks.

    Pass the result of `cursor()` to `open` to resume with the same tasks in the same order.

    Attributes:
        distinct: all tasks in the order of the source; None: it generates them without end.
    """

    distinct: list[Task] | None = None

    @staticmethod
    def open(
        settings: TasksSettings | None = None,
        cursor: Mapping[str, Any] | None = None,
        *,
        function: Callable[[Random], Any] | Sequence[Any] | None = None,
        env: str = "",
    ) -> TaskSource:
        """Read or prepare the tasks, and continue from `cursor` if given.

        Args:
            function: with the kind `environment`, makes the fields of a task from random numbers,
                or is a list of the fields of tasks.
            env: name of the environment, for messages.

        Raises:
            DataError: A row is invalid (the message names the file, line or row, and field), or the
                tasks differ from those of the cursor.
            SettingsError: A required package is missing.
        """
        settings = settings or TasksSettings()
        source: TaskSource
        if settings.kind == "environment":
            if function is None:
                raise SettingsError("tasks.kind: the environment makes no tasks: name another kind")
            if callable(function):
                source = _Made(settings, function, env)
            else:
                where = f"the tasks of {env}"
                named = (
                    task_of(fields, f"{where}: number {number}")
                    for number, fields in enumerate(function, 1)
                )
                source = _Listed(settings, named, where)
        elif settings.kind in GENERATORS:
            source = _Generated(settings)
        else:
            source = _Listed(settings, read_tasks(settings), "tasks")
        if cursor is not None:
            source.go_to(cursor)
        return source

    def __init__(self, settings: TasksSettings) -> None:
        self._settings = settings
        self._epoch = 0
        self._position = 0

    def __iter__(self) -> Self:
        return self

    @abstractmethod
    def __next__(self) -> Task: ...

    def draw(self, accepts: Callable[[Task], bool]) -> Task:
        """Return the next task that is accepted, passing over the others."""
        return next(filter(accepts, self))

    def rate_key(self, task: Task) -> str:
        """Return what a task's solve rate is kept under: its id, if it comes again.

        Tasks that are made without end do not, so theirs is the rate of their source and level.
        """
        return task.id if self.distinct is not None else f"{task.source} level {task.level}"

    @abstractmethod
    def held_out(self) -> list[Task]:
        """Return the tasks that are never trained on, in an order of their own."""

    @abstractmethod
    def find(self, id: str) -> Task:
        """Return the task with this id, held out or not.

        Raises:
            KeyError: There is no such task.
        """

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A digest that is equal for the same tasks in the same order."""

    def cursor(self) -> dict[str, Any]:
        """Return the position in the current epoch, as JSON-compatible data."""
        return {
            "epoch": self._epoch, "position": self._position, "fingerprint": self.fingerprint
        }  # fmt: skip

    def go_to(self, cursor: Mapping[str, Any]) -> None:
        """Continue from a cursor.

        Raises:
            DataError: The cursor belongs to other tasks.
        """
        if cursor.get("fingerprint") != self.fingerprint:
            raise DataError(
                "tasks: they differ from the tasks of the saved cursor: use the same files, seed "
                "and split"
            )
        self._epoch, self._position = int(cursor["epoch"]), int(cursor["position"])


class _Generated(TaskSource):
    """Generated problems; the position is the number of the next one, and there are no epochs."""

    @property
    def fingerprint(self) -> str:
        settings = self._settings
        return task_digest(f"{settings.kind} {settings.levels} {settings.seed} {self._share}")

    @property
    def _share(self) -> float:
        held_out = self._settings.held_out
        return held_out if held_out < 1 else _GENERATED_SHARE

    def __next__(self) -> Task:
        for index in range(self._position, self._position + 10_000):
            task, digest = self._make(index)
            if not _is_below(digest, self._share):
                self._position = index + 1
                return task
        raise DataError(f"held_out: {self._share} leaves no tasks to train on")

    def held_out(self) -> list[Task]:
        wanted = self._settings.held_out
        most = int(wanted) if wanted >= 1 else _MAX_HELD_OUT
        tasks: dict[str, Task] = {}
        index = last_new = 0
        # Low levels have few problems: stop once new ones no longer turn up.
        while len(tasks) < most and wanted and index - last_new < _MAX_MISSES / self._share:
            task, digest = self._make(index)
            if _is_below(digest, self._share) and digest not in tasks:
                tasks[digest] = task
                last_new = index
            index += 1
        return list(tasks.values())

    def find(self, id: str) -> Task:
        kind, _, index = id.rpartition("-")
        if kind != self._settings.kind or not index.isdecimal():
            raise KeyError(id)
        return self._make(int(index))[0]

    def _make(self, index: int) -> tuple[Task, str]:
        settings = self._settings
        level = settings.levels[index % len(settings.levels)]
        problem = GENERATORS[settings.kind](level, Random(f"{settings.seed} {level} {index}"))
        prompt = _prompt(problem.text, settings)
        answer = str(problem.answer)
        task = Task(f"{settings.kind}-{index}", prompt, answer, source=settings.kind, level=level)
        return task, task_digest(problem.text)


class _Made(_Generated):
    """Tasks made by a function of random numbers."""

    def __init__(
        self, settings: TasksSettings, function: Callable[[Random], Any], env: str
    ) -> None:
        super().__init__(settings)
        self._function = function
        self._env = env

    def _make(self, index: int) -> tuple[Task, str]:
        try:
            fields = self._function(Random(f"{self._settings.seed} {index}"))
        except AgentLoopError:
            raise
        except Exception as error:  # the user's code
            where = line_of(self._function, error)
            raise DataError(f"the tasks of {self._env}: {where}: {summary_of(error)}") from error
        task = task_of(fields, f"the tasks of {self._env}: {line_of(self._function)}")
        return replace(task, id=f"{self._settings.kind}-{index}"), task.id


class _Listed(TaskSource):
    """Tasks of a list, epoch by epoch; of those that are equal in all fields one is kept.

    The first half of an id is that of the problem: rows of files that differ only in source, level
    or system message are held out together.
    """

    def __init__(self, settings: TasksSettings, listed: Iterable[Task], where: str) -> None:
        super().__init__(settings)
        tasks: dict[str, Task] = {}
        num_listed = 0
        for task in listed:
            num_listed += 1
            tasks.setdefault(task.id, task)
        if num_listed > len(tasks):
            log.warning(
                "%s: %d of %d are dropped: they equal others in all fields",
                *(where, num_listed - len(tasks), num_listed),
            )
        self._tasks = tasks
        self.distinct = list(tasks.values())
        ids = sorted(tasks)
        held_out = settings.held_out
        if held_out < 1:
            self._held_out = [id for id in ids if _is_below(id, held_out)]
        else:
            self._held_out = ids[: int(held_out)]
        held = {id[:NUM_PROBLEM_DIGITS] for id in self._held_out}
        order = ids if settings.shuffle else tasks
        self._training = [id for id in order if id[:NUM_PROBLEM_DIGITS] not in held]
        if not tasks:
            raise DataError("no tasks were read")
        self._order: tuple[int, list[str]] = (-1, [])

    @cached_property
    def fingerprint(self) -> str:
        settings = self._settings
        return task_digest(f"{settings.seed} {settings.shuffle} {' '.join(self._training)}")

    def __next__(self) -> Task:
        if not self._training:
            raise DataError(f"no tasks to train on: all {len(self._tasks)} are held out")
        if self._position == len(self._training):
            self._epoch, self._position = self._epoch + 1, 0
        if self._order[0] != self._epoch:
            self._order = self._epoch, self._training[:]
            if self._settings.shuffle:
                Random(f"{self._settings.seed} {self._epoch}").shuffle(self._order[1])
        self._position += 1
        return self._tasks[self._order[1][self._position - 1]]

    def held_out(self) -> list[Task]:
        return [self._tasks[id] for id in self._held_out]

    def find(self, id: str) -> Task:
        return self._tasks[id]


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


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    arrow = _package("pyarrow", extra="data")
    parquet = import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            present = set(file.schema_arrow.names)
            columns = [name for name in (*_PROMPTS, *_ANSWERS, *_OTHERS) if name in present]
            for needed in (_PROMPTS, (*_ANSWERS, "reward_model")):
                if not present.intersection(needed):
                    raise DataError(
                        f"{path}: one of the columns {_listed(needed)} is required; the file has "
                        f"{_listed(sorted(present)) or 'none'}"
                    )
            batches = file.iter_batches(batch_size=1024, columns=columns)
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
            yield from enumerate(rows, 1)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    except arrow.ArrowException as error:
        raise DataError(f"{path}: {error}") from error


def _read_huggingface(settings: TasksSettings) -> Iterable[Any]:
    datasets = _package("datasets", extra="data")
    name = settings.name
    try:
        if (Path(name) / "state.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(name)
            rows: Iterable[Any] = found[settings.split] if isinstance(found, dict) else found
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
                prompt=_prompt(text, settings),
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


def _task(row: Any, where: str, source: str, settings: TasksSettings) -> Task:
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: expected an object, got {shown(row)}")
    named, prompt = _first(row, _PROMPTS, where)
    is_text = isinstance(prompt, str)
    question = prompt if is_text else _question(prompt, f"{where}: field {named!r}")
    if not question.strip():
        raise DataError(f"{where}: field {named!r} is empty")
    extra = row.get("extra_info")
    if not isinstance(extra, Mapping | None):
        raise DataError(f"{where}: field 'extra_info': expected an object, got {shown(extra)}")
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
    said = [] if is_text else [one["content"] for one in prompt if one["role"] == "system"]
    problem = [task_digest(problem_text(prompt)), answer, extra]
    return Task(
        id=row_digest(problem, [own_source, level, said]),
        prompt=_prompt(prompt, settings) if is_text else prompt,
        answer=answer,
        source=own_source or source,
        level=level,
        extra=extra,
    )


def _first(row: Mapping[str, Any], names: Sequence[str], where: str) -> tuple[str, Any]:
    for name in names:
        if row.get(name) is not None:
            return name, row[name]
    raise DataError(f"{where}: one of the fields {_listed(names)} is required")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _question(messages: Any, where: str) -> str:
    """Check a conversation, and return its last question."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: expected text or messages, got {shown(messages)}")
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
        raise DataError(f"{where}: field {name!r}: expected text or a number, got {shown(answer)}")
    if not str(answer).strip():
        raise DataError(f"{where}: field {name!r} is empty")
    return str(answer).strip()


def _prompt(text: str, settings: TasksSettings) -> str | Sequence[Message]:
    text = settings.template.replace("{problem}", text)
    if not settings.system:
        return text
    return [{"role": "system", "content": settings.system}, {"role": "user", "content": text}]


def _is_below(digest: str, share: float) -> bool:
    """Return whether a digest is in the lowest `share` of all possible digests."""
    return int(digest[:12], 16) < share * 16**12
