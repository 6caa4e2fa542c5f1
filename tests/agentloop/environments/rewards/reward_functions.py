"""Reward functions for test_reward.py, which are called by name in other processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from decimal import Decimal
from pathlib import Path

from agentloop.environments.rewards.reward import Reward
from agentloop.environments.tasks.sources import Task
from agentloop.trajectory import Trajectory


def length(trajectory: Trajectory, task: Task) -> float:
    print("what a function prints is no reply")
    return float(len(trajectory.text))


async def judged(trajectory: Trajectory, task: Task) -> Reward:
    return Reward(0.25, trajectory.text, f"judged for {task.id}")


def says(trajectory: Trajectory, task: Task) -> object:
    """Whatever the task asks for."""
    return {
        "none": None,
        "true": True,
        "text": "a text",
        "nan": float("nan"),
        "decimal": Decimal("0.5"),
        "set": {1, 2},
        "long": ["x" * (1 << 21)],
    }[task.answer]


def raises(trajectory: Trajectory, task: Task) -> float:
    raise KeyError("no such judge")


def hangs(trajectory: Trajectory, task: Task) -> float:
    Path(task.extra["pid"]).write_text(str(os.getpid()))
    while True:
        time.sleep(1)


def crashes(trajectory: Trajectory, task: Task) -> float:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 1.0


def exits(trajectory: Trajectory, task: Task) -> float:
    os._exit(3)


def eats_memory(trajectory: Trajectory, task: Task) -> float:
    return float(len(bytearray(1 << 40)))


def fails_once(trajectory: Trajectory, task: Task) -> float:
    mark = Path(task.extra["mark"])
    if mark.exists():
        return 1.0
    mark.touch()
    raise RuntimeError("the first time")


def process(trajectory: Trajectory, task: Task) -> float:
    """The process's id, to see whether it is the same one."""
    return float(os.getpid())


def reads(trajectory: Trajectory, task: Task) -> float:
    return float(len(sys.stdin.read()))
