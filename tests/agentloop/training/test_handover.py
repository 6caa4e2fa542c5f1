"""New weights into every server: who cannot load them serves nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import anyio
import pytest
from aiohttp import web

from agentloop.errors import ServerError
from agentloop.inference.router import Generation, Router, RouterSettings
from agentloop.inference.sglang import Sampling, SGLangServer, http_session
from agentloop.training.handover import (
    Handover,
    InFolder,
    WeightsSettings,
    hand_over,
    keep_up,
    publisher,
)
from agentloop.training.learner import Learner
from agentloop.trajectory import Trajectory, Turn, VersionSpan
from tests.support import FakeSGLang, Fault, eventually

pytestmark = pytest.mark.anyio

ANSWER = [5, 6, 99]
LATE_S = 4.0  # for a server that never answers; the others have to, within it
ONE, TWO = (InFolder(version, Path("weights") / version) for version in ("1", "2"))


@asynccontextmanager
async def routed(*fakes: FakeSGLang, probe_interval_s: float = 1000.0) -> AsyncIterator[Router]:
    async with AsyncExitStack() as stack:
        for fake in fakes:
            await stack.enter_async_context(fake.serving())
        session = await stack.enter_async_context(http_session())
        servers = [SGLangServer(fake.url, session) for fake in fakes]
        # As a rule no probe comes in between: what is seen is the hand-over's own doing.
        settings = RouterSettings(probe_interval_s=probe_interval_s)
        yield await stack.enter_async_context(Router.open(servers, settings))


def states(router: Router) -> list[str]:
    return [view.state.value for view in router.view()]


async def test_all_servers_serve_the_new_weights_at_once() -> None:
    fakes = [FakeSGLang(ANSWER), FakeSGLang(ANSWER)]
    async with routed(*fakes) as router:
        came = await hand_over(router, ONE, timeout_s=15)
        assert came.loaded == sorted(fake.url for fake in fakes)
        assert (came.failed, came.checksum, came.version) == ({}, "sum", "1")
        assert states(router) == ["healthy", "healthy"]
    assert [(fake.version, fake.paused) for fake in fakes] == [("1", False)] * 2


@pytest.mark.parametrize("weights", [None, "", "others"])
async def test_who_cannot_load_them_is_stale(weights: str | None) -> None:
    """They cannot be read, take too long, or are not those that the others have."""
    fakes = [FakeSGLang(ANSWER, weights=weights), FakeSGLang(ANSWER), FakeSGLang(ANSWER)]
    async with routed(*fakes) as router:
        came = await hand_over(router, ONE, timeout_s=LATE_S)
        assert list(came.failed) == [fakes[0].url]
        assert states(router) == ["stale", "healthy", "healthy"]
        assert not any(fake.paused for fake in fakes)
        for fake in fakes:
            fake.weights = "sum"
        assert not (await hand_over(router, TWO, timeout_s=15)).failed
        assert states(router) == ["healthy"] * 3


async def turn(router: Router, moved: list[str], received: list[int], key: str = "key") -> None:
    await router.generate(
        Generation(key, key, [1, 2, 3], Sampling(), len(ANSWER), (99,)),
        vocab_size=100,
        on_chunk=lambda chunk: received.extend(chunk.ids),
        on_placed=lambda *_: None,
        on_moved=lambda url, _: moved.append(url),
    )


async def test_in_place_the_cache_is_kept_from_turns_to_come() -> None:
    """The server would find it by ids alone: a key that changes hides it."""
    fake = FakeSGLang(ANSWER)
    async with routed(fake) as router:
        for published in (ONE, replace(TWO, pause="in_place"), replace(ONE, pause="in_place")):
            await hand_over(router, published, timeout_s=15)
            await turn(router, [], [])
    assert fake.pauses == ["retract", "in_place", "in_place"]
    assert fake.flushes == [True, False, False]
    first, second, third = (request.get("extra_key") for request in fake.requests)
    assert first is None
    assert len({first, second, third}) == 3


async def test_in_place_is_refused_where_a_token_would_be_in_flight() -> None:
    fake = FakeSGLang(ANSWER, overlaps=True)
    async with routed(fake) as router:
        with pytest.raises(ServerError, match="--disable-overlap-schedule"):
            await hand_over(router, replace(ONE, pause="in_place"), timeout_s=15)
        assert (fake.pauses, fake.version) == ([], "v0")
        assert (await hand_over(router, ONE, timeout_s=15)).loaded


@pytest.mark.parametrize("weights", [None, "", "others"])
async def test_what_runs_where_weights_are_unknown_goes_on_elsewhere(weights: str | None) -> None:
    """From the tokens of weights that are known: it leaves before the server goes on. That they
    all broke says nothing of the server's health."""
    moved: list[str] = []
    received: list[list[int]] = [[] for _ in range(4)]
    left: list[int] = []  # how many had, when the server went on

    class Watched(FakeSGLang):
        async def _continue(self, request: web.Request) -> web.Response:
            left.append(len(moved))
            return await super()._continue(request)

    first = Watched(ANSWER, weights=weights, faults=deque([Fault("silence", after=2)] * 4))
    others = [FakeSGLang(ANSWER), FakeSGLang(ANSWER)]
    async with routed(first) as router, AsyncExitStack() as stack:
        session = await stack.enter_async_context(http_session())
        with anyio.fail_after(15):
            async with anyio.create_task_group() as tasks:
                for number, ids in enumerate(received):
                    tasks.start_soon(turn, router, moved, ids, str(number))
                await eventually(lambda: all(len(ids) == 2 for ids in received))
                for fake in others:
                    await stack.enter_async_context(fake.serving())
                    await router.add(SGLangServer(fake.url, session))
                came = await hand_over(router, ONE, timeout_s=LATE_S)
                assert list(came.failed) == [first.url]
        assert states(router) == ["stale", "healthy", "healthy"]
    assert received == [ANSWER] * 4
    assert moved == [first.url] * 4
    # That its weights are not the others' is known only once all have loaded.
    assert left == [0 if weights == "others" else 4]
    assert came.wrong == ({first.url} if weights == "others" else set())


def test_what_was_sampled_by_weights_of_the_wrong_name_is_distrusted() -> None:
    came = Handover(ONE, ["b"], {"a": "differs"}, 1.0, "sum", frozenset({"a"}))

    def trajectory(servers: list[str], *versions: str) -> Trajectory:
        spans = [VersionSpan(one, index, index + 1) for index, one in enumerate(versions)]
        return Trajectory("t", [1], [Turn(versions=spans, servers=servers)])

    assert came.distrusts(trajectory(["a"], "0", "1"))
    assert came.distrusts(trajectory(["a", "b"], "0", "1"))
    assert not came.distrusts(trajectory(["a"], "0"))
    assert not came.distrusts(trajectory(["b"], "0", "1"))


async def test_without_any_server_it_is_an_error() -> None:
    async with routed(FakeSGLang(ANSWER, weights=None)) as router:
        with pytest.raises(ServerError, match="no server could load version 1"):
            await hand_over(router, ONE, timeout_s=15)
        assert states(router) == ["stale"]


async def test_a_servers_own_word_for_its_version_is_not_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says that it has version 1, and its weights are others: probes change nothing."""
    probes: list[str] = []
    ask = SGLangServer.weight_version

    async def weight_version(self: SGLangServer) -> str:
        probes.append(self.url)
        return await ask(self)

    monkeypatch.setattr(SGLangServer, "weight_version", weight_version)
    fakes = [FakeSGLang(ANSWER, weights="others"), FakeSGLang(ANSWER), FakeSGLang(ANSWER)]
    async with routed(*fakes, probe_interval_s=0.01) as router:
        came = await hand_over(router, ONE, timeout_s=15)
        assert fakes[0].version == "1"
        probes.clear()
        await eventually(lambda: probes.count(fakes[0].url) > 3)
        assert states(router) == ["stale", "healthy", "healthy"]
        fakes[0].weights = "sum"
        await keep_up(router, came, timeout_s=15)
        assert states(router) == ["healthy"] * 3
        probes.clear()
        await eventually(lambda: probes.count(fakes[0].url) > 3)
        assert states(router) == ["healthy"] * 3


async def test_two_that_differ_are_no_majority() -> None:
    async with routed(FakeSGLang(ANSWER), FakeSGLang(ANSWER, weights="others")) as router:
        with pytest.raises(ServerError, match="do not have the same weights 1"):
            await hand_over(router, ONE, timeout_s=15)
        assert states(router) == ["stale", "stale"]


async def test_one_that_was_started_again_is_given_the_weights() -> None:
    fakes = [FakeSGLang(ANSWER), FakeSGLang(ANSWER)]
    async with routed(*fakes, probe_interval_s=0.01) as router:
        came = await hand_over(router, ONE, timeout_s=15)
        fakes[0].version = "default"
        await eventually(lambda: states(router) == ["stale", "healthy"])
        fakes[0].weights = None
        assert not await keep_up(router, came, timeout_s=15)
        assert states(router) == ["stale", "healthy"]
        fakes[0].weights = "sum"
        assert await keep_up(router, came, timeout_s=15)
        assert states(router) == ["healthy", "healthy"]
        assert fakes[0].version == "1"


async def test_it_waits_for_a_server_that_is_started_again() -> None:
    fake = FakeSGLang(ANSWER)
    async with routed(fake, probe_interval_s=0.01) as router:
        fake.ready = False
        router.exited(fake.url, "killed")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: hand_over(router, ONE, timeout_s=15))
            await eventually(lambda: not router.servers)
            fake.ready = True
        assert states(router) == ["healthy"]


async def test_a_server_that_did_not_say_that_it_has_paused_goes_on() -> None:
    class Silent(FakeSGLang):
        async def _pause(self, request: web.Request) -> web.Response:
            self.paused = True
            return web.Response(status=500)

    fake = Silent(ANSWER)
    async with routed(fake) as router:
        with pytest.raises(ServerError, match="no server could load"):
            await hand_over(router, ONE, timeout_s=15)
    assert not fake.paused


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_by_disk_only_the_last_version_is_kept(tmp_path: Path, elsewhere: bool) -> None:
    """In the run's folder, or in one that several runs may share."""

    class Played:
        async def ask(self, op: str, *, timeout_s: float, folder: str, version: str) -> None:
            assert op == "publish"
            await anyio.Path(folder).mkdir(parents=True)

    run, shared = tmp_path / "run", tmp_path / "shared"
    await anyio.Path(shared / "run-2" / "1").mkdir(parents=True)
    other = tmp_path / "elsewhere" / "run"  # another run of the same name
    settings = WeightsSettings(folder=shared if elsewhere else None)
    others = publisher(settings, cast(Learner, Played()), other)
    kept = await others.publish("1", timeout_s=15)
    assert isinstance(kept, InFolder)
    way = publisher(settings, cast(Learner, Played()), run)
    fake = FakeSGLang(ANSWER)
    async with routed(fake) as router:
        for version in ("0", "1", "2"):
            published = await way.publish(version, timeout_s=15)
            await hand_over(router, published, timeout_s=15)
            await way.tidy()
    assert isinstance(published, InFolder)
    mine = published.folder.parent
    assert mine.is_relative_to(shared) if elsewhere else mine == run / "weights"
    assert [path.name for path in mine.iterdir()] == ["2"]
    await way.close()
    assert mine.exists() != elsewhere
    assert kept.folder.exists()
    assert (shared / "run-2" / "1").exists()
