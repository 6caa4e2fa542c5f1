"""Reward functions for test_reward.py, which are called by name in other processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

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


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
    is_right = solution_str == f"#### {ground_truth}"
    return {"score": float(is_right), "acc": is_right, "pred": f"{data_source} {extra_info}"}


def verl_number(solution_str: str, ground_truth: str, **others: Any) -> float:
    return float(ground_truth in solution_str) + len(others["extra_info"])


def verl_without_score(solution_str: str, ground_truth: str) -> Any:
    return {"acc": 1.0}


def trl(prompts: Any, completions: Any, answer: Any, **columns: Any) -> list[float]:
    assert (len(prompts), len(completions), columns["level"]) == (1, 1, [0])
    return [float(a in text.lower()) for text, a in zip(completions, answer, strict=True)]


async def trl_messages(completions: Any, solution: Any) -> list[float | None]:
    contents = [completion[0]["content"] for completion in completions]
    return [float(a in text) for text, a in zip(contents, solution, strict=True)]


def trl_of_a_column(completions: Any, difficulty: Any) -> list[float]:
    return [float(difficulty[0])]


def trl_number(completions: Any) -> Any:
    return 1.0


def other_library(completion: str, answer: str) -> float:
    return 1.0


def one_parameter(trajectory: Trajectory) -> float:
    return 1.0


def never(trajectory: Trajectory, task: Task) -> float:
    return 0.0


def shaped(trajectory: Trajectory, task: Task) -> float:
    return 0.25 if trajectory.text == f"#### {task.answer}" else -1.0
