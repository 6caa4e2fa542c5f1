"""Puzzles of reasoning-gym with a difficulty of their own and partial credit.

    env=agentloop.environments.adapters.reasoning_gym:puzzle
    env.args.families=["countdown","sudoku"] env.args.options.sudoku.max_empty=30

The tasks of `tasks.kind = "reasoning_gym"` are the same puzzles, with the library's default
difficulty and a reward of 1 or 0. Answers are scored in the sandbox in both cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from random import Random

from agentloop.distribution import require
from agentloop.environments.agent import Agent
from agentloop.environments.environment import environment
from agentloop.environments.rewards.answers import final_answer
from agentloop.environments.rewards.puzzles import score
from agentloop.environments.rewards.reward import Reward
from agentloop.environments.tasks.sources import Task
from agentloop.errors import SettingsError

__all__ = ["puzzle"]

_SYSTEM = (
    "Think step by step. Then give your final answer between <answer> and </answer>, without an "
    "explanation and in the form that the question asks for."
)


def make_task(
    rng: Random, *, families: list[str], options: dict[str, dict[str, object]] | None
) -> Mapping[str, object]:
    """Make a puzzle of one of the families.

    Raises:
        SettingsError: there is no such family, or it refuses an option.
    """
    require("reasoning-gym", {"reasoning_gym": "puzzles"})
    gym = import_module("reasoning_gym")
    family = rng.choice(families)
    chosen = (options or {}).get(family, {})
    where = {"family": family, "size": 1, "seed": rng.randrange(1 << 31), "index": 0}
    try:
        entry = gym.create_dataset(family, size=1, seed=where["seed"], **chosen)[0]
    except (ValueError, TypeError, AssertionError) as error:
        raise SettingsError(f"env.args: reasoning-gym's {family!r}: {error}") from error
    return {
        "prompt": entry["question"],
        "answer": "" if entry["answer"] is None else entry["answer"],
        "source": f"reasoning_gym/{family}",
        "puzzle": {**where, "options": chosen},
    }


@environment(tasks=make_task)
async def puzzle(
    task: Task,
    agent: Agent,
    *,
    families: list[str],
    options: dict[str, dict[str, object]] | None = None,
    partial_credit: bool = True,
    system: str = _SYSTEM,
    timeout_s: float = 60.0,
) -> Reward:
    """Let the model answer a puzzle, and score the answer.

    Args:
        families: names of families of puzzles, such as sudoku.
        options: settings of families, by their names, such as their difficulty.
        partial_credit: give the score as the reward; otherwise only a score of 1 counts.
        system: system message; it should ask for the answer in <answer> tags.
        timeout_s: time limit of the scorer, which imports the library first.
    """
    trajectory = await agent.run(task.prompt, system=system or None)
    answer = final_answer(trajectory)
    if answer is None:
        return Reward(0.0, None, "it gives no answer")
    if answer == task.answer:  # scoring costs seconds of CPU
        return Reward(1.0, answer, "it is the answer of the puzzle")
    value, reason = await score(agent.sandbox, task.puzzle, answer, timeout_s=timeout_s)
    return Reward(value if partial_credit else float(value == 1), answer, reason)
