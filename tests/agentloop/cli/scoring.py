"""Reward functions of a user's, in a module that is quick to import."""

from __future__ import annotations

from agentloop.environments.tasks.sources import Task
from agentloop.trajectory import Trajectory


def by_length(trajectory: Trajectory, task: Task) -> float:
    """Return the length of the answer; the task has what is known of it."""
    assert task.prompt in ("What is 6 times 7?", "Why?")
    return len(trajectory.answer)


def says_nothing(trajectory: Trajectory, task: Task) -> None:
    return None
