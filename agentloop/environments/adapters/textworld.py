"""Text adventures of TextWorld: the model reads what it sees, and writes commands.

    tw-make custom --world-size 3 --quest-length 3 --seed 1 --output games/1.z8
    env=agentloop.environments.adapters.textworld:game env.args.file=games/*.z8

A game is one conversation, and each command a turn of it, so `budget.max_turns` should be at least
`max_moves`. The reward is the share of the game's points that the model has got.
"""

from __future__ import annotations

import glob
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from functools import partial
from importlib import import_module
from random import Random
from typing import Protocol, TypedDict, TypeVar

import anyio

from agentloop.agent.threads import DaemonThread, in_daemon_thread
from agentloop.aio import LimiterVar
from agentloop.distribution import require
from agentloop.environments.agent import Agent
from agentloop.environments.environment import environment
from agentloop.environments.tasks.sources import Task
from agentloop.errors import SettingsError

__all__ = ["game"]


class Scene(TypedDict):
    """The fields of TextWorld's state of a game that are shown."""

    feedback: str
    objective: str | None
    admissible_commands: list[str]


class Closable(Protocol):
    def close(self) -> None: ...


Result = TypeVar("Result")
Resource = TypeVar("Resource", bound=Closable)

_CLOSE_S = 10.0
_threads = LimiterVar("_textworld_threads")
_SYSTEM = (
    "You play a text adventure. Each of your messages is one command, such as: look, inventory, "
    "go east, open chest, take key from chest. Write the command on the last line of the message."
)


def make_task(rng: Random, *, file: str) -> Mapping[str, object]:
    """Choose one of the games.

    Raises:
        SettingsError: there is no such file, or TextWorld is not installed.
    """
    require("textworld", {"textworld": "text adventures"})
    files = sorted(glob.glob(file, recursive=True))
    if not files:
        raise SettingsError(f"env.args.file: {file}: there is no such file: make one with tw-make")
    return {"file": rng.choice(files), "source": "textworld"}


@environment(tasks=make_task, weights={"won": 0.0, "moves": 0.0})
async def game(
    task: Task,
    agent: Agent,
    *,
    file: str,
    max_moves: int = 50,
    lists_commands: bool = False,
    system: str = _SYSTEM,
    timeout_s: float = 30.0,
) -> dict[str, float]:
    """Let the model play a game until it ends.

    Args:
        file: a game (.z8 or .ulx), or a pattern of several, such as games/*.z8.
        max_moves: the game ends after this many commands.
        lists_commands: tell the model which commands are possible.
        system: system message.
        timeout_s: time limit of one command.
    """
    textworld = import_module("textworld")
    wanted = ("objective", "score", "max_score", "won", "admissible_commands")
    infos = textworld.EnvInfos(**dict.fromkeys(wanted, True))
    library = Library(timeout_s)
    async with library.open(textworld.start, task.file, infos) as play:
        state = await library.call(play.reset)
        if not state["max_score"]:
            raise RuntimeError(f"textworld: {task.file}: the game does not say what points it has")
        moves = 0

        async def answer(command: str) -> str | None:
            nonlocal state, moves
            moves += 1
            state, _, is_over = await library.call(play.step, _command(command))
            return None if is_over or moves == max_moves else _scene(state, lists_commands)

        await agent.run(_scene(state, lists_commands), system=system or None, reply=answer)
    return {"score": state["score"] / state["max_score"], "won": state["won"], "moves": moves}


class Library:
    """Calls TextWorld for one game, in one thread; of all games, one call at a time.

    A call that exceeds its deadline cannot be stopped. Its thread is abandoned, and so is the game,
    which is not closed then. Until the thread ends, other calls wait.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._is_abandoned = False
        self._thread = DaemonThread()

    async def call(self, function: Callable[..., Result], *args: object) -> Result:
        """Call a function. Raises TimeoutError, and whatever the function raises."""
        self._is_abandoned = True  # unless it returns
        with anyio.move_on_after(self._timeout_s):
            try:
                call = partial(function, *args)
                result = await in_daemon_thread(call, 1, _threads, self._thread)
            except Exception:
                self._is_abandoned = False
                raise
            self._is_abandoned = False
            return result
        raise TimeoutError(f"textworld: {function.__name__} took more than {self._timeout_s:g} s")

    @asynccontextmanager
    async def open(
        self, function: Callable[..., Resource], *args: object
    ) -> AsyncIterator[Resource]:
        """Call a function that returns an object with a `close` method; close that at the end."""
        with closing(self._thread):
            resource = await self.call(function, *args)
            try:
                yield resource
            finally:
                if not self._is_abandoned:
                    with anyio.move_on_after(_CLOSE_S, shield=True):
                        await self.call(resource.close)


def _command(answer: str) -> str:
    """Return the command in the model's answer: its last line that is not empty."""
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    return lines[-1].removeprefix(">").strip() if lines else "look"


def _scene(state: Scene, lists_commands: bool) -> str:
    """Return what the player sees, without the title, the prompt and the score."""
    text = re.sub(r"\n>[^\n]*\Z", "", state["feedback"].rstrip()).strip()
    if (objective := state.get("objective")) and objective in text:
        text = text[text.index(objective) :]  # the title is before it, as a picture
    if not lists_commands:
        return text
    return f"{text}\n\nYou can: {', '.join(state['admissible_commands'])}"
