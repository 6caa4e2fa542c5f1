"""Threads of a rollout: what its functions keep from one call to the next."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import pytest

import agentloop
from agentloop.agent.threads import RolloutThreads, rollout_threads, sharing_connections
from agentloop.agent.tools import Tools
from agentloop.environments.agent import Agent
from agentloop.environments.environment import Environment
from agentloop.trajectory import ToolCallStatus
from tests.patience import patient


class Shop:
    """A tool with a connection that it opens where it is made, or at its first call.

    Two calls at the same time would both begin a transaction, so there are none.
    """

    def __init__(self, *, is_lazy: bool) -> None:
        self.db = None if is_lazy else sqlite3.connect(":memory:", isolation_level=None)

    def query(self, sql: str) -> str:
        """Ask the shop.

        Args:
            sql: A statement.
        """
        if self.db is None:
            self.db = sqlite3.connect(":memory:", isolation_level=None)
        return str(self.db.execute(sql).fetchall())


def model(messages: list[Any]) -> Any:
    """Create a table, fill it in two calls at the same time, and say what is in it."""
    match sum(message["role"] == "assistant" for message in messages):
        case 0:
            return agentloop.call("query", sql="CREATE TABLE fruit (name TEXT)")
        case 1:
            pair = [
                agentloop.call("query", sql=f"INSERT INTO fruit VALUES ('{name}')")
                for name in ("apple", "pear")
            ]
            return {**pair[0], "tool_calls": [call for each in pair for call in each["tool_calls"]]}
        case 2:
            return agentloop.call("query", sql="SELECT name FROM fruit ORDER BY name")
    return str(messages[-1]["content"])


async def is_right(environment: Environment) -> bool:
    played = await agentloop.play(environment, {"answer": ""}, model)
    return played.reward.value == 1.0


def reward_of(answer: str) -> float:
    return float(answer == "[('apple',), ('pear',)]")


@pytest.mark.parametrize("is_lazy", [False, True])
@pytest.mark.parametrize("is_method", [False, True])
async def test_tool_may_keep_sqlite_connection(is_lazy: bool, is_method: bool) -> None:
    @agentloop.environment
    async def shop(task: Any, agent: Agent) -> float:
        kept = Shop(is_lazy=is_lazy)

        def query(sql: str) -> str:
            """Ask the shop.

            Args:
                sql: A statement.
            """
            return kept.query(sql)

        trajectory = await agent.run("?", tools=[kept.query if is_method else query])
        return reward_of(trajectory.answer)

    assert await is_right(shop)


async def test_setup_may_open_sqlite_connection() -> None:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Shop]:
        shop = Shop(is_lazy=False)
        yield shop

    @agentloop.environment(setup=opened)
    async def shop(task: Any, agent: Agent, *, shared: Shop) -> float:
        return reward_of((await agent.run("?", tools=[shared.query])).answer)

    assert await is_right(shop)


async def test_connections_elsewhere_keep_their_check() -> None:
    connection = sqlite3.connect(":memory:")
    with sharing_connections():
        strict = sqlite3.connect(":memory:", check_same_thread=True)
    errors: list[Exception] = []

    def use() -> None:
        for each in (connection, strict):
            try:
                each.execute("SELECT 1")
            except sqlite3.ProgrammingError as error:
                errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(patient(10))
    assert len(errors) == 2


def thread_id() -> str:
    """Return the thread's id."""
    return str(threading.get_ident())


async def test_each_rollout_has_its_own_thread() -> None:
    async def ids_of_rollout() -> set[str]:
        result = set()
        for _ in range(3):
            async with Tools([thread_id]) as tools:
                result |= {(await tools.run("thread_id", {})).content for _ in range(2)}
        return result

    rollouts = [RolloutThreads(), RolloutThreads()]
    ids = []
    for threads in rollouts:
        with rollout_threads(threads):
            ids.append(await ids_of_rollout())
    for threads in rollouts:
        threads.close()
    first, second = ids
    assert len(first) == len(second) == 1
    assert first != second


async def test_parallel_calls_of_functions_run_concurrently() -> None:
    barrier = threading.Barrier(3)

    def meet() -> None:
        """Wait for the others."""
        barrier.wait(patient(10))

    async with Tools([meet]) as tools, anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(tools.run, "meet", {})
    assert not barrier.broken


async def test_hanging_thread_is_replaced() -> None:
    release = threading.Event()
    threads = RolloutThreads()

    def hang() -> None:
        release.wait(patient(10))

    first = await threads.run(threading.current_thread, 4)
    with anyio.move_on_after(0.01):
        await threads.run(hang, 4)
    second, third = [await threads.run(threading.current_thread, 4) for _ in range(2)]
    release.set()
    threads.close()
    assert first is not second
    assert second is third
    for thread in (first, second):
        await anyio.to_thread.run_sync(thread.join, patient(10))
        assert not thread.is_alive()


async def test_result_names_type_of_exception() -> None:
    def query() -> None:
        """Fail."""
        raise sqlite3.ProgrammingError("no")

    async with Tools([query]) as tools:
        output = await tools.run("query", {})
    assert (output.status, output.raised) == (ToolCallStatus.ERROR, "sqlite3.ProgrammingError")
    assert output.content == "[error] ProgrammingError: no"
