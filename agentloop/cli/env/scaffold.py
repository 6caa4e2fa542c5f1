"""The files of a package with an environment, as `agentloop env init` writes them."""

from __future__ import annotations

from string import Template

from agentloop.distribution import NAME
from agentloop.environments.registry import GROUP

__all__ = ["files"]

_PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "$name"
version = "0.1.0"
description = "An environment for agentloop"
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["$agentloop"]

[project.entry-points."$group"]
$name = "$module:$module"

[dependency-groups]
test = ["pytest"]

[tool.setuptools]
py-modules = ["$module"]

[tool.pytest.ini_options]
pythonpath = ["."]
"""

_MODULE = '''\
"""A game: find a number from "higher" and "lower"."""

import random

import agentloop


class Game:
    """The state of one rollout; its methods are the agent's tools."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tries = 0
        self.found = False

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: your guess.
        """
        self.tries += 1
        if number == self.number:
            self.found = True
            return "right"
        return "higher" if number < self.number else "lower"


def make_task(rng: random.Random) -> dict[str, int]:
    """Return the fields of a task."""
    return {"answer": rng.randint(1, 100), "top": 100}


@agentloop.environment(tasks=make_task)
async def $module(
    task: agentloop.Task, agent: agentloop.Agent, *, max_tries: int = 7
) -> dict[str, float]:
    """Let the agent play; return the parts of its reward."""
    game = Game(int(task.answer))
    await agent.run(
        f"Find my number, 1 to {task.top}, in at most {max_tries} tries.", tools=[game.guess]
    )
    return {"found": game.found, "in_time": game.found and game.tries <= max_tries}
'''

_TEST = '''\
"""The game, played by scripts instead of a model."""

import random

import anyio
import pytest
from agentloop import Task

from $module import Game, $module, make_task


class Halving:
    """Stands in for the agent: it calls the tools as a good player would."""

    async def run(self, messages, *, tools, **options):
        (guess,) = tools
        low, high = 1, 100
        while low <= high:
            middle = (low + high) // 2
            told = guess(middle)
            if told == "right":
                return
            low, high = (middle + 1, high) if told == "higher" else (low, middle - 1)


class Silent:
    """Stands in for an agent that calls no tool."""

    async def run(self, messages, *, tools, **options):
        pass


def play(agent, number):
    return anyio.run($module, Task("1", "", str(number), extra={"top": 100}), agent)


@pytest.mark.parametrize("number", [1, 37, 50, 100])
def test_a_good_player_gets_the_whole_reward(number):
    assert play(Halving(), number) == {"found": True, "in_time": True}


def test_without_a_guess_there_is_no_reward():
    assert sum(play(Silent(), 42).values()) == 0


def test_the_game_says_where_to_look():
    game = Game(42)
    assert [game.guess(number) for number in (10, 50, 42)] == ["higher", "lower", "right"]


def test_tasks_are_within_the_range():
    for seed in range(100):
        task = make_task(random.Random(seed))
        assert 1 <= task["answer"] <= task["top"]
'''

_README = """\
# $name

An environment for agentloop. The game, its tasks and its reward are in `$module.py`; replace
them by yours.

```sh
pip install -e . --group test
pytest                                # scripts play the game, no model is needed
agentloop env try $name               # ten rollouts of a model: transcripts, rewards, times
agentloop chat env=$name              # one rollout, as it happens
agentloop evaluate env=$name evaluate.num_samples=4
agentloop train recipe.toml env=$name
```

Arguments are settings: `env.args.max_tries=5`.
"""


def files(name: str, module: str) -> dict[str, str]:
    """Return the text of each file, by its path in the package's folder.

    Args:
        name: the name of the package and of the environment.
        module: the name of its module and function.
    """
    values = {"name": name, "module": module, "group": GROUP, "agentloop": NAME}
    found = {
        "pyproject.toml": _PYPROJECT,
        f"{module}.py": _MODULE,
        f"test_{module}.py": _TEST,
        "README.md": _README,
    }
    return {path: Template(text).substitute(values) for path, text in found.items()}
