"""Tasks from generators, environments, files and data sets: an endless source that can be resumed.

Held-out tasks are chosen by a hash of what the model is shown, not by their position in a file,
so they stay out of training if the file is reordered, extended or contains duplicates.
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from random import Random
from typing import Self, cast

import pydantic

from agentloop.environments.tasks.problems import GENERATORS
from agentloop.environments.tasks.rows import (
    TasksSettings,
    find_conflicts,
    prompt_of,
    read_jsonl,
    read_tasks,
)
from agentloop.environments.tasks.task import (
    Task,
    line_of,
    problem_of,
    shown_digest,
    task_digest,
    task_of,
)
from agentloop.errors import AgentLoopError, DataError, SettingsError, summary_of

__all__ = [
    "Task",
    "TaskList",
    "TaskSource",
    "TasksSettings",
    "read_jsonl",
    "read_tasks",
    "task_digest",
]

log = logging.getLogger(__name__)

_MAX_HELD_OUT = 256  # of a generator, whose problems are endless
_GENERATED_SHARE = 1 / 8
_MAX_MISSES = 1000


class _Place(pydantic.BaseModel):
    """The place in a source, as a cursor has it."""

    epoch: int
    position: int


class TaskSource(ABC):
    """An endless iterator over the training tasks, with a list of held-out tasks.

    Pass the result of `cursor()` to `open` to resume with the same tasks in the same order.

    Attributes:
        distinct: all tasks in the order of the source; None: it generates them without end.
        has_split: whether its held-out tasks are not taken from the others.
    """

    distinct: list[Task] | None = None
    has_split = False

    @staticmethod
    def open(
        settings: TasksSettings | None = None,
        cursor: Mapping[str, object] | None = None,
        *,
        function: Callable[[Random], object] | Iterable[object] | None = None,
        held_out: Callable[[Random], object] | Iterable[object] | None = None,
        env: str = "",
    ) -> TaskSource:
        """Read or prepare the tasks, and continue from `cursor` if given.

        Args:
            function: makes the fields of a task from random numbers, or iterates over those of all
                tasks; for the kind `environment`.
            held_out: the same for the tasks that are held out; None: some of the others are.
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
            if held_out is None:
                source = _of_environment(settings, function, env)
            else:
                without_held_out = settings.model_copy(update={"held_out": 0.0})
                # The seed is that of a generator.
                held_out_settings = without_held_out.model_copy(update={"seed": -1 - settings.seed})
                source = _SplitTasks(
                    settings.held_out,
                    _of_environment(without_held_out, function, env),
                    _of_environment(held_out_settings, held_out, f"{env} (held out)"),
                )
        elif settings.kind in GENERATORS:
            source = _GeneratedTasks(settings)
        elif split := settings.held_out_split:
            training = settings.model_copy(update={"held_out": 0.0})
            other = training.model_copy(update={"split": split})
            source = _SplitTasks(
                settings.held_out,
                _ListedTasks(training, read_tasks(training), "tasks", env),
                _ListedTasks(training, read_tasks(other), "tasks", env),
            )
        else:
            source = _ListedTasks(settings, read_tasks(settings), "tasks", env)
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

    def listed(self) -> list[Task]:
        """Return all tasks that are not made without end, held out or not."""
        return self.distinct or []

    def check_training(self) -> None:  # noqa: B027  # most have no list
        """Raise DataError if all tasks are held out."""

    def draw(self, accepts: Callable[[Task], bool]) -> Task:
        """Return the next task that is accepted, passing over the others."""
        return next(filter(accepts, self))

    def rate_key(self, task: Task) -> str:
        """Return what a task's solve rate is kept under: its problem, if it comes again.

        Tasks that are made without end do not, so theirs is the rate of their source and level.
        """
        if self.distinct is not None:
            return problem_of(task)
        return f"{task.source} level {task.level}"

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

    def cursor(self) -> dict[str, object]:
        """Return the position in the current epoch, as JSON-compatible data."""
        return {
            "epoch": self._epoch, "position": self._position, "fingerprint": self.fingerprint
        }  # fmt: skip

    def go_to(self, cursor: Mapping[str, object]) -> None:
        """Continue from a cursor.

        Raises:
            DataError: The cursor belongs to other tasks.
        """
        self._check(cursor)
        place = _Place.model_validate(cursor)
        self._epoch, self._position = place.epoch, place.position

    def _check(self, cursor: Mapping[str, object]) -> None:
        if cursor.get("fingerprint") != self.fingerprint:
            raise DataError(
                "tasks: they are not those that the run began with: use the same files, unchanged, "
                "with the same tasks.seed and tasks.held_out"
            )


class _GeneratedTasks(TaskSource):
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
        max_tasks = int(wanted) if wanted >= 1 else _MAX_HELD_OUT
        tasks: dict[str, Task] = {}
        index = last_new = 0
        # Low levels have few problems: stop once new ones no longer turn up.
        while len(tasks) < max_tasks and wanted and index - last_new < _MAX_MISSES / self._share:
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
        prompt = prompt_of(problem.text, settings)
        answer = str(problem.answer)
        task = Task(f"{settings.kind}-{index}", prompt, answer, source=settings.kind, level=level)
        return task, task_digest(problem.text)


class TaskList:
    """The tasks that a function returns, all at once: it is called when they are read."""

    def __init__(self, function: Callable[..., Iterable[object]]) -> None:
        self.function = function

    def __iter__(self) -> Iterator[Mapping[str, object]]:
        # `task_of` checks what the user's function has made.
        return cast(Iterator[Mapping[str, object]], iter(self.function()))


def _of_environment(
    settings: TasksSettings, tasks: Callable[[Random], object] | Iterable[object], env: str
) -> TaskSource:
    """Open the tasks that an environment makes or lists."""
    if callable(tasks):
        return _FunctionTasks(settings, tasks, env)
    where = f"the tasks of {env}"

    def read_listed() -> Iterator[Task]:
        number = 0
        try:
            for number, fields in enumerate(tasks, 1):
                yield task_of(fields, f"{where}: number {number}")
        except AgentLoopError:
            raise
        except Exception as error:  # the user's code, or a library's
            line = f"{line_of(tasks.function, error)}: " if isinstance(tasks, TaskList) else ""
            raise DataError(f"{where}: after number {number}: {line}{summary_of(error)}") from error

    return _ListedTasks(settings, read_listed(), where, env)


class _FunctionTasks(_GeneratedTasks):
    """Tasks made by a function of random numbers."""

    def __init__(
        self, settings: TasksSettings, function: Callable[[Random], object], env: str
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
        return replace(task, id=f"{self._settings.kind}-{index}"), shown_digest(task)


class _SplitTasks(TaskSource):
    """Training tasks from one source, and held-out ones from another, which are in no group."""

    has_split = True

    def __init__(self, limit: float, training: TaskSource, held_out: TaskSource) -> None:
        """
        Args:
            limit: number of tasks to hold out; below 1: all.
        """
        held_out_tasks = held_out.distinct
        if held_out_tasks is None:
            new_tasks = itertools.islice(held_out, _MAX_HELD_OUT)
            held_out_tasks = [replace(task, id=f"held-out-{task.id}") for task in new_tasks]
        self._held_out = {task.id: task for task in held_out_tasks}
        self._shown = {shown_digest(task) for task in held_out_tasks}
        if len(self._shown) < min(2, len(held_out_tasks)):  # the environment shows what differs
            self._shown = set()
        self._limit = int(limit) or None
        self._training = training
        if training.distinct is not None:
            self.distinct = [task for task in training.distinct if self._is_trained_on(task)]
            if not self.distinct:
                raise DataError("no tasks to train on: all of them are held out, too")

    def __next__(self) -> Task:
        return self._training.draw(self._is_trained_on)

    def _is_trained_on(self, task: Task) -> bool:
        return task.id not in self._held_out and shown_digest(task) not in self._shown

    def held_out(self) -> list[Task]:
        return list(self._held_out.values())[: self._limit]

    def find(self, id: str) -> Task:
        return self._held_out.get(id) or self._training.find(id)

    @property
    def fingerprint(self) -> str:
        return task_digest(f"{self._training.fingerprint} {' '.join(self._held_out)}")

    def cursor(self) -> dict[str, object]:
        return {**self._training.cursor(), "fingerprint": self.fingerprint}

    def go_to(self, cursor: Mapping[str, object]) -> None:
        self._check(cursor)
        self._training.go_to({**cursor, "fingerprint": self._training.fingerprint})


class _ListedTasks(TaskSource):
    """Tasks of a list, epoch by epoch; of those that are equal in all fields one is kept.

    Tasks that show the model the same are held out together, whatever their other fields.
    """

    def __init__(
        self, settings: TasksSettings, read_listed: Iterable[Task], where: str, env: str
    ) -> None:
        super().__init__(settings)
        tasks: dict[str, Task] = {}
        num_listed = 0
        for task in read_listed:
            num_listed += 1
            if tasks.setdefault(task.id, task) != task and not task.source_line:
                raise DataError(f"{where}: two tasks have the id {task.id!r} and other fields")
        if not tasks:
            raise DataError(f"{where}: no tasks were read")
        if num_listed > len(tasks):
            log.warning(
                "%s: %d of %d are dropped: they equal others in all fields",
                *(where, num_listed - len(tasks), num_listed),
            )
        if conflicts := find_conflicts(tasks.values(), env=env):
            first, second = conflicts[0]
            more = f" ({len(conflicts) - 1} more)" if len(conflicts) > 1 else ""
            log.warning(
                "%s: one problem with two answers: %r in %s, %r in %s%s",
                *(where, first.answer, first.source_line, second.answer, second.source_line),
                more,
            )
        self._tasks = tasks
        self.distinct = list(tasks.values())
        shown = {id: shown_digest(task) for id, task in tasks.items()}
        if len(set(shown.values())) == 1:  # the environment shows what differs
            shown = {id: task_digest(id) for id in tasks}
        ids = sorted(tasks, key=lambda id: (shown[id], id))
        held_out = settings.held_out
        if held_out < 1:
            self._held_out = [id for id in ids if _is_below(shown[id], held_out)]
        else:
            self._held_out = ids[: int(held_out)]
        held = {shown[id] for id in self._held_out}
        order = ids if settings.shuffle else tasks
        self._training = [id for id in order if shown[id] not in held]
        self._order: tuple[int, list[str]] = (-1, [])

    @cached_property
    def fingerprint(self) -> str:
        settings = self._settings
        return task_digest(f"{settings.seed} {settings.shuffle} {' '.join(self._training)}")

    def __next__(self) -> Task:
        self.check_training()
        if self._position == len(self._training):
            self._epoch, self._position = self._epoch + 1, 0
        if self._order[0] != self._epoch:
            self._order = self._epoch, self._training[:]
            if self._settings.shuffle:
                Random(f"{self._settings.seed} {self._epoch}").shuffle(self._order[1])
        self._position += 1
        return self._tasks[self._order[1][self._position - 1]]

    def check_training(self) -> None:
        if not self._training:
            raise DataError(
                f"no tasks to train on: all {len(self._tasks)} are held out: "
                f"tasks.held_out is {self._settings.held_out:g}"
            )

    def held_out(self) -> list[Task]:
        return [self._tasks[id] for id in self._held_out]

    def find(self, id: str) -> Task:
        return self._tasks[id]


def _is_below(digest: str, share: float) -> bool:
    """Return whether a digest is in the lowest `share` of all possible digests."""
    return int(digest[:12], 16) < share * 16**12
