"""Rollouts whose process is killed: what is sampled again, what runs twice, which lengths remain.

    python -m bench.kill_turns --kills 1000 --rollouts 2000
    python -m bench.kill_turns --cost 20   what the journal adds to a turn: rounds with and without

Groups of rollouts of random lengths on the real agent loop and the real journal. At a kill, nothing
is written any more and everything is dropped; the group is then rolled out again from the journal,
which is opened anew. Time is the number of tokens that the simulated engine has sampled; kills come
at random, on average one in the time of a group. It is done with the journal, without it, as before
there was one, and without kills.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import anyio
import anyio.lowlevel

import agentloop
from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.rollout import Budget, Rollout
from agentloop.agent.tools import as_tool
from agentloop.environments.agent import Agent
from agentloop.environments.environment import Environment
from agentloop.environments.rewards.reward import Grader
from agentloop.environments.tasks.sources import Task
from agentloop.inference.sglang.frames import Chunk
from agentloop.inference.sglang.sampling import Sampling
from agentloop.inference.turns import Generation
from agentloop.models import SMALL
from agentloop.rollouts.metrics import GroupFigures
from agentloop.rollouts.open_group import OpenGroup
from agentloop.rollouts.player import EnvironmentPlayer
from agentloop.rollouts.record import RolloutRecord
from agentloop.rollouts.request import GroupRequest
from agentloop.rollouts.runner import GroupRunner
from agentloop.training.loop.queue import GroupQueue
from agentloop.trajectory import Trajectory, TurnEnd

__all__ = ["Played", "difference", "play"]

_SIZE = 8
_MEAN_TURN = 12  # tokens
_LAST = 0.15  # probability that a turn is the last one
_BETWEEN_KILLS = 1600  # tokens, on average: as many as a group has
_BUDGET = Budget(max_turns=1000, max_response_tokens=100_000)
_CALL = '<tool_call>\n{"name": "act", "arguments": {"turn": %d}}\n</tool_call>'


@dataclass
class Played:
    """What was played, in all lives.

    Attributes:
        lengths: sampled tokens of each rollout that has ended with a reward.
        num_lost: rollouts that a kill has cut off in a call that must not run twice.
        num_again: tokens that were sampled and are in no rollout.
        num_in_flight: tokens of the turns in flight at the kills.
        calls: how often each turn's call has run.
    """

    lengths: list[int] = field(default_factory=list)
    num_lost: int = 0
    num_kills: int = 0
    num_again: int = 0
    num_in_flight: int = 0
    calls: Counter[tuple[str, int]] = field(default_factory=Counter)


class _Engine:
    """Samples turns of random lengths that end with a call, except for the last one of a rollout.

    Attributes:
        in_flight: tokens of the newest turn of each rollout.
    """

    context_length = 1_000_000

    def __init__(self, chat: ChatFormat, draw: Random, until: float) -> None:
        self._chat, self._draw, self._until = chat, draw, until
        self.in_flight: dict[str, int] = {}
        self.cut: dict[str, int] = {}  # those at the kill
        self.num_sampled = 0
        self.killed = anyio.Event()

    async def generate(
        self, generation: Generation, *, on_chunk: Callable[[Chunk], None], **options: Any
    ) -> None:
        self.in_flight[generation.key] = 0
        for _number in range(1 + round(self._draw.expovariate(1 / _MEAN_TURN))):
            await self._emit(generation.key, [100 + self._draw.randrange(50)], on_chunk)
        turn = generation.ids.count(self._chat.end_id)
        call = "" if self._draw.random() < _LAST else _CALL % turn
        ids = self._chat.tokenizer.encode(call, add_special_tokens=False).ids
        await self._emit(generation.key, [*ids, self._chat.end_id], on_chunk, TurnEnd.STOP)

    async def _emit(
        self,
        key: str,
        ids: list[int],
        on_chunk: Callable[[Chunk], None],
        end: TurnEnd | None = None,
    ) -> None:
        await anyio.lowlevel.checkpoint()
        if self.num_sampled >= self._until:
            self.cut = self.cut or dict(self.in_flight)
            self.killed.set()
            await anyio.sleep_forever()
        on_chunk(Chunk(ids, [-1.0] * len(ids), "0", end=end))
        self.in_flight[key] += len(ids)
        self.num_sampled += len(ids)

    def forget(self, key: str, *, is_complete: bool) -> None:
        self.in_flight.pop(key, None)


@dataclass
class _Host:
    """Runs conversations on the engine (`Host`)."""

    engine: _Engine
    chat: ChatFormat
    pool: Any = None
    session_listener: Any = None

    async def listen_for_sessions(self) -> None:
        """Do nothing."""

    async def rollout(
        self, messages: Any, *, on_event: Any, tools: Any, **options: Any
    ) -> Trajectory:
        return await Rollout(self.engine, self.chat, messages, tools, **options).run()

    def resolve_tools(self, tools: Any) -> Any:
        return tools


def _environment(played: Played, *, may_repeat: bool) -> Environment:
    @agentloop.environment(replayable=True)
    async def acts(task: Task, agent: Agent) -> float:
        async def act(turn: int) -> str:
            """Act.

            Args:
                turn: number of the turn.
            """
            played.calls[agent.id, turn] += 1
            await anyio.lowlevel.checkpoint()
            return "done"

        tool: Any = as_tool(act)
        tool.is_stateless, tool.may_repeat = True, may_repeat
        await agent.run("Act.", tools=[tool])
        return 1.0

    return acts


async def play(
    folder: Path,
    *,
    num_groups: int,
    num_kills: float = math.inf,
    kills: bool = True,
    keeps: bool = True,
    may_repeat: bool = True,
    seed: int = 0,
) -> Played:
    """Play groups, one after the other, each to its end, until there were so many kills.

    Args:
        keeps: whether there is a journal of rollouts and turns.
        may_repeat: whether the tool's calls may run twice.
    """
    chat, draw, played = ChatFormat.load(SMALL), Random(seed), Played()
    environment = _environment(played, may_repeat=may_repeat)
    for number in range(1, num_groups + 1):
        num_sampled, records = 0, None
        while records is None:
            until = draw.expovariate(1 / _BETWEEN_KILLS) if kills else math.inf
            engine = _Engine(chat, draw, until)
            host = _Host(engine, chat)
            records = await _live(folder, number, environment, host, keeps=keeps)
            num_sampled += engine.num_sampled
            if records is None:
                played.num_kills += 1
                played.num_in_flight += sum(engine.cut.values())
        played.num_again += num_sampled - sum(record.num_sampled_tokens for record in records)
        for record in records:
            if record.reward is not None and record.reward.value is not None:
                played.lengths.append(record.num_sampled_tokens)
            else:
                played.num_lost += 1
        if played.num_kills >= num_kills:
            break
    return played


async def _live(
    folder: Path, number: int, environment: Environment, host: _Host, *, keeps: bool
) -> Sequence[RolloutRecord] | None:
    """Roll out a group from its journal; return its rollouts, or None if it was killed."""
    task = Task("t", "?", "")
    async with Grader() as grader, GroupQueue.open(folder / "queue.sqlite") as queue:
        if not await queue.open_groups():
            await queue.admit(task, version=0, cursor={})
        opened = OpenGroup()
        if keeps:
            opened = OpenGroup(
                partial(queue.rolled_out.add, number), await queue.rolled_out.of_group(number)
            )
        player = EnvironmentPlayer(environment, host, sampling=Sampling())
        request = GroupRequest(task, f"{number}-t", _SIZE, _BUDGET, open_group=opened)

        async def kill() -> None:
            await host.engine.killed.wait()
            dead: Any = queue
            dead._transaction = lambda work: anyio.sleep_forever()
            life.cancel_scope.cancel()

        async with anyio.create_task_group() as life:
            life.start_soon(kill)
            group = await GroupRunner(player, grader).run(request)
            await queue.finish(number, path=None, num_bytes=0, figures=GroupFigures())
            life.cancel_scope.cancel()
            return group.rollouts
    return None


def difference(first: Sequence[int], second: Sequence[int]) -> tuple[float, float]:
    """Return the statistic of Kolmogorov and Smirnov of two samples, and its p-value."""
    one, two = sorted(first), sorted(second)
    largest = max(
        abs(bisect_right(one, x) / len(one) - bisect_right(two, x) / len(two)) for x in {*one, *two}
    )
    root = math.sqrt(len(one) * len(two) / (len(one) + len(two)))
    scaled = (root + 0.12 + 0.11 / root) * largest
    if scaled < 0.2:
        return largest, 1.0
    terms = (2 * (-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return largest, min(1.0, max(0.0, sum(terms)))


async def _main(num_kills: int, num_rollouts: int) -> None:
    num_groups, usual = num_rollouts // _SIZE, list[int]()
    variants: dict[str, dict[str, Any]] = {
        "no kills": {"num_groups": num_groups, "kills": False},
        "kept": {"num_groups": num_groups},
        "without journal": {"num_groups": num_groups, "keeps": False},
        "tool with effects": {"num_groups": 8 * num_kills, "num_kills": num_kills},
    }
    for seed, (title, options) in enumerate(variants.items()):
        may_repeat = "num_kills" not in options
        with tempfile.TemporaryDirectory() as folder:
            played = await play(Path(folder), seed=seed, may_repeat=may_repeat, **options)
        if played.lengths:
            usual = usual or played.lengths
            largest, p = difference(played.lengths, usual)
            twice = 0 if may_repeat else sum(number > 1 for number in played.calls.values())
            print(
                f"{title:18} {len(played.lengths):6} rollouts, {played.num_kills:5} kills, mean "
                f"length {sum(played.lengths) / len(played.lengths):6.1f}, D {largest:.3f}, p "
                f"{p:.2g}; sampled again {played.num_again}, in flight {played.num_in_flight}; "
                f"lost {played.num_lost}, called twice {twice}",
                flush=True,
            )


async def _cost(rounds: int) -> None:
    added_s, waited_s = list[float](), list[float]()
    for seed in range(rounds):
        cpu_s, wall_s = dict[bool, float](), dict[bool, float]()
        for keeps in (seed % 2 == 0, seed % 2 == 1):
            with tempfile.TemporaryDirectory() as folder:
                cpu, wall = time.process_time(), time.perf_counter()
                options: dict[str, Any] = {"num_groups": 6, "kills": False, "keeps": keeps}
                played = await play(Path(folder), seed=seed, **options)
                num_turns = played.calls.total() + len(played.lengths)
                cpu_s[keeps] = (time.process_time() - cpu) / num_turns
                wall_s[keeps] = (time.perf_counter() - wall) / num_turns
        added_s.append(cpu_s[True] - cpu_s[False])
        waited_s.append(_SIZE * (wall_s[True] - wall_s[False]))  # as many are waited for at once
    for what, values in {"CPU": added_s, "waiting": waited_s}.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"a turn's {what}: {middle * 1e3:.2f} ms ({low * 1e3:.2f} to {high * 1e3:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--cost", type=int, default=0, help="rounds of the journal's cost alone")
    options = parser.parse_args()
    if options.cost:
        anyio.run(_cost, options.cost)
        return
    anyio.run(_main, options.kills, options.rollouts)


if __name__ == "__main__":
    main()
