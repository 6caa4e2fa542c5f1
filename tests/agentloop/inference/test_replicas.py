"""The registry of servers: their health, weights and load, without turns."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from agentloop.errors import ServerUnavailable
from agentloop.inference.ranks import DataParallelRank
from agentloop.inference.replicas import Replicas
from agentloop.inference.scheduling.health import ServerState
from agentloop.inference.scheduling.kv_ledger import KVLedger
from agentloop.inference.sglang.client import SGLangServer
from agentloop.inference.sglang.control import http_session
from tests.support import FakeSGLang, eventually


class Watched:
    """A registry with its ledger and the calls that it makes."""

    def __init__(self) -> None:
        self.ledger = KVLedger()
        self.num_capacity = 0
        self.retracted: list[int] = []
        self.replicas = Replicas(
            self.ledger,
            probe_interval_s=0.01,
            stall_timeout_s=60.0,
            on_capacity=self._on_capacity,
            on_report=lambda now, num_retracted, reported_s: self.retracted.append(num_retracted),
        )

    def _on_capacity(self) -> None:
        self.num_capacity += 1

    @property
    def states(self) -> list[ServerState]:
        return [replica.state for replica in self.replicas]


@asynccontextmanager
async def watching(*fakes: FakeSGLang) -> AsyncIterator[Watched]:
    async with AsyncExitStack() as stack:
        for fake in fakes:
            await stack.enter_async_context(fake.serving())
        session = await stack.enter_async_context(http_session())
        watched = Watched()
        servers = [SGLangServer(fake.url, session) for fake in fakes]
        await stack.enter_async_context(watched.replicas.watching(servers))
        yield watched


async def test_only_ranks_of_healthy_servers_count_as_capacity() -> None:
    a = FakeSGLang([], max_total_num_tokens=300, dp_size=2)
    b = FakeSGLang([], max_total_num_tokens=500, context_length=80)
    async with watching(a, b) as watched:
        replicas = watched.replicas
        ranks = [DataParallelRank(a.url), DataParallelRank(a.url, 1), DataParallelRank(b.url)]
        assert list(watched.ledger.pools) == replicas.accepting_ranks == ranks
        assert replicas.capacity == 1100
        assert (replicas.context_length, replicas.longest_context) == (80, 299)
        replicas.mark_exited(a.url, "killed")
        assert replicas.capacity == 500
        assert replicas.longest_context == 299  # it may come back
        replicas.retire(a.url)
        assert replicas.longest_context == 80


async def test_retired_server_is_removed_once_it_is_idle() -> None:
    fake = FakeSGLang([])
    async with watching(fake) as watched:
        rank = DataParallelRank(fake.url)
        watched.ledger.reserve("s", rank, 10, 10)
        watched.replicas.retire(f"{fake.url}/")
        before = watched.num_capacity
        watched.ledger.release("s", 0.0)
        await eventually(lambda: not list(watched.replicas))
        assert (watched.ledger.pools, watched.num_capacity) == ({}, before)
        assert watched.replicas.get(fake.url) is None
        with pytest.raises(KeyError):
            watched.replicas.retire(fake.url)
        with pytest.raises(ServerUnavailable, match="all have been retired"):
            _ = watched.replicas.context_length


async def test_giving_up_a_server_says_whether_any_is_left() -> None:
    a, b = FakeSGLang([]), FakeSGLang([])
    async with watching(a, b) as watched:
        assert watched.replicas.give_up(a.url)
        assert not watched.replicas.is_enabled(a.url)
        assert not watched.replicas.give_up(b.url)
        assert not watched.replicas.give_up("http://nobody")


async def test_retractions_are_reported_once() -> None:
    fake = FakeSGLang([], load={})
    async with watching(fake) as watched:
        await eventually(lambda: watched.retracted != [])
        watched.replicas[fake.url].num_retracted[DataParallelRank(fake.url)] += 2
        await eventually(lambda: sum(watched.retracted) == 2)
        num_reports = len(watched.retracted)
        await eventually(lambda: len(watched.retracted) >= num_reports + 3)
        assert sum(watched.retracted) == 2


async def test_reported_weights_do_not_count_before_verification() -> None:
    fake = FakeSGLang([], version="8")
    async with watching(fake) as watched:
        replicas = watched.replicas
        await eventually(lambda: replicas[fake.url].weight_version == "8")
        replicas.require_weights("8")
        assert watched.states == [ServerState.HEALTHY]
        replicas.require_weights("8", verified=True)
        assert watched.states == [ServerState.STALE]
        before = watched.num_capacity
        await eventually(lambda: watched.num_capacity >= before + 4)  # two probes
        assert watched.states == [ServerState.STALE]
        replicas.weights_loaded(fake.url, "7")  # an update before this one
        assert watched.states == [ServerState.STALE]
        replicas.weights_loaded(fake.url, "8")
        assert watched.states == [ServerState.HEALTHY]
        replicas.weights_loaded("http://nobody", "8")  # retired meanwhile


async def test_server_that_is_added_later_needs_the_required_weights() -> None:
    fake, late = FakeSGLang([], version="8"), FakeSGLang([], version="7")
    async with late.serving(), http_session() as session, watching(fake) as watched:
        watched.replicas.require_weights("8")
        await eventually(lambda: watched.states == [ServerState.HEALTHY])
        await watched.replicas.add(SGLangServer(late.url, session))
        assert watched.states == [ServerState.HEALTHY, ServerState.STALE]
        assert [server.url for server in watched.replicas.servers] == [fake.url, late.url]


async def test_server_that_cannot_be_used_is_an_error_of_opening() -> None:
    async with http_session() as session:
        replicas = Watched().replicas
        with pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1:1: no server listens there"):
            async with replicas.watching([SGLangServer("http://127.0.0.1:1", session)]):
                raise AssertionError("there is no server")


async def test_restarted_server_has_an_empty_pool_of_its_new_size() -> None:
    fake = FakeSGLang([], max_total_num_tokens=300)
    async with watching(fake) as watched:
        fake.ready = False
        await eventually(lambda: watched.states == [ServerState.DEAD])
        watched.ledger.reserve("s", DataParallelRank(fake.url), 10, 10)
        watched.replicas.mark_restarting(fake.url)
        assert watched.replicas.is_dead(fake.url)
        fake.max_total_num_tokens, fake.ready = 700, True
        await eventually(lambda: watched.states == [ServerState.HEALTHY])
        (view,) = watched.replicas.view()
        assert (view.capacity_tokens, view.num_running, view.healthy) == (700, 0, True)
