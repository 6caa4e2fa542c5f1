"""The tasks of a stage, in an order that a restart continues."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from agentloop.environments.tasks.sources import Task, TaskSource
from agentloop.environments.tasks.task import problem_of
from agentloop.training.loop.curriculum import Curriculum, GroupOutcome
from agentloop.training.loop.queue import TaskCursor


class StageTasks(Iterator[Task]):
    """Draws the tasks of a stage: the next ones of the run's source, or its own, in epochs.

    The curriculum decides which of them are taken.
    """

    def __init__(
        self, source: TaskSource, number: int, curriculum: Curriculum | None = None
    ) -> None:
        """
        Args:
            source: the run's source of tasks.
            number: number of the stage.
            curriculum: the run's; by default, every task is taken.
        """
        self._source = source
        self._number = number
        self._curriculum = curriculum or Curriculum()
        self._num_drawn = 0  # tasks drawn from the stage's own
        self._own: Iterator[Task] | None = None

    def use(self, tasks: Sequence[Task], *, seed: str, cursor: TaskCursor) -> None:
        """Draw these tasks instead of the source's, each epoch in a new random order.

        Args:
            cursor: the last recorded `cursor`, to continue from if it is of this stage.
        """
        self._own = _repeat_shuffled(tasks, random.Random(seed))
        if cursor.get("stage") == self._number:
            self._num_drawn = cursor["num_drawn"]
            next(itertools.islice(self._own, self._num_drawn, self._num_drawn), None)

    def __next__(self) -> Task:
        if self._own is None:
            return self._source.draw(self._takes)
        for task in self._own:
            self._num_drawn += 1
            if self._takes(task):
                return task
        raise AssertionError("unreachable: there are epochs without end")

    def _takes(self, task: Task) -> bool:
        return self._curriculum.takes(self.rate_key(task))

    def rate_key(self, task: Task) -> str:
        """Return the key of the task's solve rate. The stage's own tasks always come again."""
        return self._source.rate_key(task) if self._own is None else problem_of(task)

    def observe(self, outcomes: Sequence[tuple[str, GroupOutcome]]) -> None:
        """Tell the curriculum the outcomes of groups, with the keys of their tasks."""
        for key, outcome in outcomes:
            self._curriculum.observe(key, outcome)

    def take(self, number: int) -> list[Task]:
        """Draw up to `number` tasks of the run's source, whatever the curriculum says."""
        return list(itertools.islice(self._source, number))

    def cursor(self) -> TaskCursor:
        """Return the positions after the last task."""
        return {
            "tasks": self._source.cursor(),
            "stage": self._number,
            "num_drawn": self._num_drawn,
            "num_offered": self._curriculum.num_offered,
        }


def _repeat_shuffled(tasks: Sequence[Task], draw: random.Random) -> Iterator[Task]:
    """Yield the tasks for ever, each epoch in a new random order."""
    while True:
        yield from draw.sample(tasks, len(tasks))
