"""Groups that a kill interrupts: what was kept of them is not rolled out again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

import agentloop
from agentloop.agent.rollout import Budget
from agentloop.environments.agent import Agent
from agentloop.environments.environment import Environment
from agentloop.environments.rewards.reward import Grader
from agentloop.environments.tasks.sources import Task
from agentloop.errors import InfrastructureFailed, RunFolderError
from agentloop.inference.sglang.sampling import Sampling
from agentloop.plain_json import dumps, loads
from agentloop.rollouts.metrics import GroupFigures
from agentloop.rollouts.open_group import OpenGroup
from agentloop.rollouts.player import EnvironmentPlayer
from agentloop.rollouts.record import NoReward, RolloutGroup, RolloutRecord
from agentloop.rollouts.request import GroupRequest
from agentloop.rollouts.runner import GroupRunner
from agentloop.training.loop.queue import GroupQueue
from tests.agentloop.rollouts.test_player import Model

SIZE = 4


@asynccontextmanager
async def opened_group(folder: Path) -> AsyncIterator[tuple[GroupQueue, OpenGroup]]:
    """Open the journal anew, with an open group in it."""
    async with GroupQueue.open(folder / "queue.sqlite") as queue:
        if not await queue.open_groups():
            await queue.admit(Task("t", "?", "42"), version=0, cursor={})
        (group,) = await queue.open_groups()
        kept = await queue.rolled_out.of_group(group.number)
        yield queue, OpenGroup(partial(queue.rolled_out.add, group.number), kept)


async def roll_out(environment: Environment, opened: OpenGroup, model: Any = None) -> RolloutGroup:
    async with Grader() as grader:
        player = EnvironmentPlayer(environment, model or Model(), sampling=Sampling())
        request = GroupRequest(Task("t", "?", "42"), "1-t", SIZE, Budget(), open_group=opened)
        return await GroupRunner(player, grader).run(request)


def plain(records: Any) -> Any:
    return loads(dumps([*records]))


async def test_scored_rollouts_of_open_group_are_kept(tmp_path: Path) -> None:
    scored: list[RolloutRecord] = []
    played: list[str] = []
    is_resumed = False

    @agentloop.environment(weights={"found": 2.0})
    async def guess(task: Any, agent: Agent) -> dict[str, float]:
        played.append(agent.id)
        trajectory = await agent.run("?")
        trajectory.turns[0].reward = 0.5
        checker = agent.other("checker")
        await checker.chat("right?")
        checker.reward = 0.25
        agent.record(tries=len(played))
        if int(agent.id[-1]) >= SIZE // 2 and not is_resumed:
            await anyio.sleep_forever()
        return {"found": 1.0}

    class Keeps(OpenGroup):
        async def keep_rollout(self, record: RolloutRecord) -> None:
            await super().keep_rollout(record)
            scored.append(record)
            if len(scored) == SIZE // 2:
                scope.cancel()

    with anyio.CancelScope() as scope:
        async with opened_group(tmp_path) as (queue, _):
            await roll_out(guess, Keeps(partial(queue.rolled_out.add, 1)))
    first, played[:], is_resumed = [*scored], [], True
    async with opened_group(tmp_path) as (queue, opened):
        group = await roll_out(guess, opened)
        assert len(played) == SIZE - len(first)
        assert not {record.id for record in first} & set(played)
        again = {record.id: record for record in group.rollouts}
        assert plain(again[record.id] for record in first) == plain(first)
        assert all(reward.value == 2.0 for reward in group.rewards)
        await queue.finish(1, path=None, num_bytes=0, figures=GroupFigures.of(group))
        assert await queue.rolled_out.of_group(1) == []


async def test_rollout_lost_to_infrastructure_is_played_again(tmp_path: Path) -> None:
    played: list[str] = []

    @agentloop.environment
    async def fails_once(task: Any, agent: Agent) -> float:
        played.append(agent.id)
        await agent.run("?")
        if agent.id.endswith(".1") and len(played) <= SIZE:
            raise InfrastructureFailed("a server is lost")
        if agent.id.endswith(".2"):
            raise ValueError("no number")
        return 1.0

    async with opened_group(tmp_path) as (_, opened):
        await roll_out(fails_once, opened)
    async with opened_group(tmp_path) as (_, opened):
        group = await roll_out(fails_once, opened)
    assert played[SIZE:] == ["1-t.1"]
    no_rewards = [record.no_reward for record in group.rollouts]
    assert no_rewards == [None, None, NoReward.ENVIRONMENT, None]


async def test_group_of_environment_that_always_failed_is_refused_again(tmp_path: Path) -> None:
    @agentloop.environment
    async def fails(task: Any, agent: Agent) -> float:
        raise ValueError("no board")

    for _ in range(2):
        async with opened_group(tmp_path) as (_, opened):
            with pytest.raises(agentloop.AgentLoopError, match="no board"):
                await roll_out(fails, opened)


async def test_rows_of_ended_groups_are_dropped_at_opening(tmp_path: Path) -> None:
    async with opened_group(tmp_path) as (queue, _):
        await queue.rolled_out.add(1, "1-t.0", 0, {"a": 1})
        await queue.rolled_out.add(1, "1-t.0", 0, {"a": 2})
        await queue.rolled_out.add(7, "7-t.0", 0, {})
    async with opened_group(tmp_path) as (queue, _):
        assert await queue.rolled_out.conversations() == [(1, "1-t.0", False)]
        assert await queue.rolled_out.of_group(1) == [("1-t.0", 0, {"a": 2})]
        await queue.reopen([1], version=1)
        assert await queue.rolled_out.conversations() == []


async def test_damaged_row_names_the_journal(tmp_path: Path) -> None:
    async with opened_group(tmp_path) as (queue, _):
        await queue.rolled_out.add(1, "1-t.0", 0, {})
        queue._connection.execute("UPDATE kept SET value = x'00'")
        with pytest.raises(RunFolderError, match=r"queue\.sqlite: .*decompress"):
            await queue.rolled_out.of_group(1)


async def test_rows_that_come_together_share_transactions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened_group(tmp_path) as (queue, _):
        num_transactions = 0
        transact = queue._transaction

        async def count(work: Any) -> Any:
            nonlocal num_transactions
            num_transactions += 1
            return await transact(work)

        monkeypatch.setattr(queue, "_transaction", count)
        async with anyio.create_task_group() as writers:
            for index in range(100):
                writers.start_soon(queue.rolled_out.add, 1, f"1-t.{index}", 0, {"index": index})
        assert num_transactions <= 2
        assert len(await queue.rolled_out.of_group(1)) == 100


@pytest.mark.parametrize("replayable", [True, False])
async def test_replayable_environment_goes_on_with_its_remaining_time(
    tmp_path: Path, replayable: bool
) -> None:
    journals: dict[str, Any] = {}

    class Records(Model):
        async def rollout(self, messages: Any, **options: Any) -> Any:
            journals[options["id"]] = options["journal"], options["budget"].timeout_s
            return await super().rollout(messages, **options)

    @agentloop.environment(replayable=replayable)
    async def asks(task: Any, agent: Agent) -> float:
        await agent.other("checker").chat("?")
        await agent.run("?")
        return 1.0

    async with opened_group(tmp_path) as (queue, opened):
        await queue.rolled_out.add(
            1, "1-t.0", 0, {"at_s": 100.0, "history": "", "turn": {"ended_s": 3}}
        )
    async with opened_group(tmp_path) as (queue, opened):
        await roll_out(asks, opened, Records())
    for conversation in ("1-t.0", "1-t.0+checker", "1-t.1"):
        journal, timeout_s = journals[conversation]
        assert (journal is not None) is replayable
        is_later = replayable and conversation.startswith("1-t.0")
        assert (timeout_s < Budget().timeout_s - 99) is is_later
    if replayable:
        assert journals["1-t.0"][0].elapsed_s == 3


async def test_group_that_was_lost_repeats_no_turns(tmp_path: Path) -> None:
    async with opened_group(tmp_path) as (queue, _):
        await queue.rolled_out.add(
            1, "1-t.0", 0, {"at_s": 100.0, "history": "", "called": "send_mail"}
        )
    async with opened_group(tmp_path) as (_, opened):
        for kept in (1, 0):
            rollout = opened.rollout("1-t.0")
            assert rollout is not None
            assert rollout.elapsed_s == 100 * kept
            assert len(rollout.journal("1-t.0", lambda: 0.0).kept) == kept
            opened.start_anew()


async def test_environment_that_is_cancelled_leaves_the_journal_whole(tmp_path: Path) -> None:
    async with opened_group(tmp_path) as (queue, _):
        for number in range(50):
            keeping = asyncio.ensure_future(queue.rolled_out.add(1, "1-t.0", number, {}))
            await anyio.lowlevel.checkpoint()
            keeping.cancel()  # as `EnvironmentSibling` does it
            await asyncio.wait([keeping])
        await queue.rolled_out.add(1, "1-t.0", 50, {})
        assert len(await queue.rolled_out.of_group(1)) == 51
