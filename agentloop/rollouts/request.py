"""A request for a group of rollouts: one value on the way from a task to its rollouts.

training, evaluation ──GroupRequest──> GroupRunner ──> Player ──> gate, where it waits its turn
          ▲                                                         │
          └───────── `queued`: the next task may be admitted ───────┘
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum

import anyio

from agentloop.agent.rollout import Budget
from agentloop.environments.tasks.sources import Task
from agentloop.rollouts.open_group import OpenGroup

WaitForCapacity = Callable[[int], Awaitable[None]]
"""Waits for the capacity to start a group of this many rollouts, before its task is chosen."""


class Purpose(StrEnum):
    """The purpose of a group of rollouts."""

    TRAIN = "train"
    EVALUATE = "evaluate"  # on held-out tasks, or to filter a stage's tasks


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A group of rollouts of one task.

    Attributes:
        name: determines all random choices; the rollouts are `NAME.0`, `NAME.1`, ...
        size: number of rollouts.
        budget: limits of each of them.
        oldest: oldest version of the weights that may sample rollouts to train on.
        queued: set when the group waits for capacity, so that the next one may be admitted.
        open_group: keeps what has been rolled out of it.
    """

    task: Task
    name: str
    size: int
    budget: Budget
    oldest: int = 0
    purpose: Purpose = Purpose.EVALUATE
    queued: anyio.Event = field(default_factory=anyio.Event, compare=False)
    open_group: OpenGroup = field(default_factory=OpenGroup, compare=False)

    def __reduce__(self) -> tuple[type[GroupRequest], tuple[object, ...]]:
        """Pickle without the event and the open group: another process has none of ours."""
        fields = (self.task, self.name, self.size, self.budget, self.oldest, self.purpose)
        return GroupRequest, fields
