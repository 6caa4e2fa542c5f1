"""A fleet's runtime with fake rollouts, run in a test's process or in its own."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio

from agentloop.agent.chat_format import ChatSettings
from agentloop.agent.rollout import Budget
from agentloop.environments.environment import EnvSettings
from agentloop.environments.rewards.reward import RewardSettings
from agentloop.environments.tasks.sources import Task
from agentloop.errors import ServerError
from agentloop.inference.sglang.sampling import Sampling
from agentloop.training.credit.roc import RocSettings
from agentloop.training.credit.settings import CreditSettings
from agentloop.training.fleet.messages import Recipe
from agentloop.training.fleet.redis_link import RedisLink
from agentloop.training.fleet.settings import FleetSettings
from agentloop.training.fleet.worker import Member, wait_for_trainer
from agentloop.training.rollouts import Purpose, RolledOut, RollsOut
from agentloop.training.weight_sync.disk import PublishedFolder
from agentloop.training.weight_sync.sync import SyncResult
from agentloop.training.weight_sync.transport import PublishedWeights

LEASE_S = 8.0  # a busy machine may stop us for seconds
RECIPE = Recipe(
    env=EnvSettings(),
    model="model",
    chat=ChatSettings(),
    tools=[],
    tool_timeout_s=4,
    sampling=Sampling(),
    budget=Budget(),
    reward=RewardSettings(),
    roc=RocSettings(),
    credit=CreditSettings(),
    group_size=2,
    seed=0,
    early_stop_at=0,
)


@dataclass
class Group:
    """A group that was rolled out."""

    rows_: Sequence[Mapping[str, Any]]
    figures: Mapping[str, Any] = field(default_factory=lambda: {"rejected": None, "rollouts": []})
    has_signal: bool = True

    def rows(self) -> Sequence[Mapping[str, Any]]:
        return self.rows_


class Player:
    """Fakes rollouts and weight syncs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[str] = []
        self.versions: list[str] = []
        self.checksum = "sum"
        self.stop_reason = "answered"
        self.filling = ""  # of each row
        self.sampled: str | None = None  # the version that it says it samples with
        self.figures: dict[str, Any] = {}
        self.pauses: list[str] = []  # how it was told to load weights
        self.error: Exception | None = None
        self.fails: ServerError | None = None  # to load weights
        self.gate: anyio.Event | None = None  # groups wait for it
        self.room: anyio.Event | None = None

    async def wait_for_capacity(self, size: int) -> None:
        if self.room is not None:
            await self.room.wait()

    async def group(
        self,
        task: Task,
        name: str,
        *,
        size: int,
        budget: Budget,
        oldest: int,
        purpose: Purpose = Purpose.TRAIN,
        on_queued: Callable[[], None] = lambda: None,
    ) -> RolledOut:
        self.asked.append(name)
        on_queued()
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        version = self.sampled or self.versions[-1]
        turn = {"versions": [{"version": version, "start": 0, "end": 1}]}
        return Group(
            [
                {
                    "task": task.id,
                    "by": self.name,
                    "index": index,
                    "reward": 1.0,
                    "version": version,
                    "max_turns": budget.max_turns,
                    "filling": self.filling,
                    "trajectory": {"stop_reason": self.stop_reason, "turns": [turn]},
                }
                for index in range(size)
            ],
            figures={"rejected": None, "rollouts": [], **self.figures},
        )

    async def sync(self, published: PublishedWeights, *, timeout_s: float) -> SyncResult:
        if self.fails is not None:
            raise self.fails
        self.versions.append(published.version)
        assert isinstance(published, PublishedFolder)
        self.pauses.append(published.pause)
        return SyncResult(published, [self.name], {}, 0.0, self.checksum)

    async def sync_stale(self, handover: SyncResult, *, timeout_s: float) -> bool:
        return True

    async def run(self, settings: FleetSettings, rollouts: RollsOut | None = None) -> None:
        """Run like `agentloop rollouts`, with `rollouts` instead of the real ones."""
        async with RedisLink.open(settings, settings.run) as link:
            state = await wait_for_trainer(link, within_s=settings.give_up_s, say=lambda line: None)
            member = Member(
                link,
                state,
                rollouts or self,
                self,
                name=self.name,
                num_servers=1,
                give_up_s=settings.give_up_s,
                say=lambda line: None,
            )
            await member.run()


@asynccontextmanager
async def playing(settings: FleetSettings, *players: Player) -> AsyncIterator[None]:
    """Run fake runtimes while the context is open."""
    async with anyio.create_task_group() as tasks:
        for player in players:
            tasks.start_soon(player.run, settings)
        yield
        tasks.cancel_scope.cancel()


async def main(url: str, run: str, folder: str) -> None:
    """Run a fake runtime that writes its requests to files in the folder and never completes
    one."""
    player = Player(str(os.getpid()))
    player.gate = anyio.Event()
    settings = FleetSettings(redis=url, run=run)

    async def tell() -> None:
        while True:
            for name in player.asked:
                await anyio.Path(folder, name).touch()
            await anyio.sleep(0.02)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tell)
        await player.run(settings)


if __name__ == "__main__":
    anyio.run(partial(main, *sys.argv[1:]))
