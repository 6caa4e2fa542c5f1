"""The files of a package with an environment, as `agentloop env init` writes them."""

from __future__ import annotations

from string import Template

from agentloop.distribution import NAME
from agentloop.environments.registry import GROUP

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

[project.optional-dependencies]
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
"""The game, played by scripts in place of the model."""

import random

import agentloop
import anyio
import pytest

from $module import Game, $module, make_task


def halving(messages):
    """Search by halves, as a good player would."""
    low, high = 1, 100
    for said, heard in zip(messages[1::2], messages[2::2], strict=False):
        number = said["tool_calls"][0]["function"]["arguments"]["number"]
        if heard["content"] == "right":
            return f"It is {number}."
        low, high = (number + 1, high) if heard["content"] == "higher" else (low, number - 1)
    return agentloop.call("guess", number=(low + high) // 2)


def silent(messages):
    """Call no tool."""
    return "I do not know."


def parts(script, number):
    """Return the parts of the reward of a rollout."""
    task = {"answer": number, "top": 100}
    return anyio.run(agentloop.play, $module, task, script).reward.parts


@pytest.mark.parametrize("number", [1, 37, 50, 100])
def test_a_good_player_gets_the_whole_reward(number):
    assert parts(halving, number) == {"found": 1, "in_time": 1}


def test_without_a_guess_there_is_no_reward():
    assert sum(parts(silent, 42).values()) == 0


def test_the_game_says_where_to_look():
    game = Game(42)
    assert [game.guess(number) for number in (10, 50, 42)] == ["higher", "lower", "right"]


def test_tasks_are_within_the_range():
    for seed in range(100):
        task = make_task(random.Random(seed))
        assert 1 <= task["answer"] <= task["top"]
'''

_TRAIN = """\
# A short run on a laptop's CPU, of the small model that ships with agentloop.

extends = "small"
env = "$module:$module"

[budget]
max_turns = 8
max_response_tokens = 512
"""

_README = """\
# $name

An environment for agentloop. The game, its tasks and its reward are in `$module.py`; replace
them by yours.

```sh
pip install -e '.[test]'
python -m pytest  # scripts play the game, no model is needed
agentloop env try $name  # ten rollouts of a model: transcripts, rewards, times
agentloop chat env=$name  # one rollout, as it happens
agentloop evaluate env=$name evaluate.num_samples=4
agentloop train train.toml  # a short run on two cores
```

Arguments are settings: `env.args.max_tries=5`. The small model that agentloop starts by default
knows some arithmetic and no games, so it plays badly: name another one by `model=...`, or that of a
service by `endpoint.url=https://HOST/v1 endpoint.model=NAME`, which needs neither SGLang nor a GPU.
"""


def files(name: str, module: str) -> dict[str, str]:
    """Return the text of each file, by its path in the package's folder.

    Args:
        name: the name of the package and of the environment.
        module: the name of its module and function.
    """
    values = {"name": name, "module": module, "group": GROUP, "agentloop": NAME}
    templates = {
        "pyproject.toml": _PYPROJECT,
        f"{module}.py": _MODULE,
        f"test_{module}.py": _TEST,
        "train.toml": _TRAIN,
        "README.md": _README,
    }
    return {path: Template(text).substitute(values) for path, text in templates.items()}
