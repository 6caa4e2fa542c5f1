"""Rollouts whose process is killed: what is sampled again, what runs twice, which lengths remain.

    python -m bench.kill_turns --kills 1000           simulated engine, real journal and rollouts
    python -m bench.kill_turns --real 30 --folder F   `agentloop train small`, killed by SIGKILL

Simulated: groups of rollouts of random lengths on the real agent loop and the real journal. A kill
comes at a random moment; from then on nothing is written, everything is dropped, and the group is
rolled out again from the journal. Time is the number of tokens that the engine has sampled. It is
done with the journal, as it was without it, and without kills.

Real: all parts, and an environment whose tool writes a line with each call. Kills come at random
moments while rollouts are in flight.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import anyio
import anyio.lowlevel

import agentloop
from agentloop.agent.rollout import Budget, Rollout
from agentloop.agent.tools import as_tool
from agentloop.environments.agent import Agent
from agentloop.environments.rewards.reward import Grader
from agentloop.environments.tasks.sources import Task
from agentloop.inference.sglang.frames import Chunk
from agentloop.inference.sglang.sampling import Sampling
from agentloop.inference.turns import Generation
from agentloop.rollouts.metrics import GroupFigures
from agentloop.rollouts.player import EnvironmentPlayer
from agentloop.rollouts.progress import GroupProgress
from agentloop.rollouts.record import RolloutRecord
from agentloop.rollouts.request import GroupRequest
from agentloop.rollouts.runner import GroupRunner
from agentloop.training.loop.queue import GroupQueue
from agentloop.trajectory import Trajectory, TurnEnd
from bench.kill_environment import EFFECTS
from bench.kill_real import RECIPE

__all__ = ["Lengths", "distance", "main", "simulate"]

_SIZE = 8
_TURN = 12  # mean number of tokens in a turn
_LAST = 0.15  # probability that a turn is the last one
_BUDGET = Budget(max_turns=1000, max_response_tokens=100_000)


# --- simulated ------------------------------------------------------------------------------------


class Killed(Exception):
    """The end of a process."""


@dataclass
class Lengths:
    """The rollouts that have ended, and what it took.

    Attributes:
        lengths: number of sampled tokens of each.
        num_sampled: number of all tokens sampled.
        num_in_flight: of them, those of turns that a kill has cut off.
        calls: how often each call has run.
    """

    lengths: list[int] = field(default_factory=list)
    num_sampled: int = 0
    num_in_flight: int = 0
    num_kills: int = 0
    num_taken_up: int = 0
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def num_again(self) -> int:
        """Tokens that no rollout that ended has."""
        return self.num_sampled - sum(self.lengths)


class _Engine:
    """Samples turns of random lengths; `chat` reads them as answers of a conversation."""

    context_length = 1_000_000

    def __init__(self, draw: Random, result: Lengths) -> None:
        self._draw, self._result = draw, result
        self.in_flight: dict[str, int] = {}
        self.now = 0
        self.until = math.inf
        self.killed = anyio.Event()

    async def generate(
        self, generation: Generation, *, on_chunk: Callable[[Chunk], None], **_: Any
    ) -> None:
        num = max(2, round(self._draw.expovariate(1 / _TURN)))
        self.in_flight[generation.key] = 0
        for index in range(num):
            if self.now >= self.until:
                self.killed.set()
            if self.killed.is_set():
                await anyio.sleep_forever()
            await anyio.lowlevel.checkpoint()
            is_last = index == num - 1
            ends = is_last and self._draw.random() < _LAST
            token = (_ENDS if ends else _GOES_ON) if is_last else 10 + self._draw.randrange(1000)
            on_chunk(Chunk([token], [-1.0], "0", end=TurnEnd.STOP if is_last else None))
            self.in_flight[generation.key] += 1
            self._result.num_sampled += 1
            self.now += 1
        self.in_flight[generation.key] = 0 if ends else 0

    def forget(self, key: str, *, is_complete: bool) -> None:
        self.in_flight.pop(key, None)


_ENDS, _GOES_ON = 1, 2
