"""New weights into every server: who cannot load them serves nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from agentloop.errors import ServerError
from agentloop.inference.router import Router, RouterSettings
from agentloop.inference.sglang import SGLangServer, http_session
from agentloop.training.handover import hand_over
from tests.support import FakeSGLang

pytestmark = pytest.mark.anyio

ANSWER = [5, 6, 99]
FOLDER = Path("weights/1")


@asynccontextmanager
async def routed(*fakes: FakeSGLang) -> AsyncIterator[Router]:
    async with AsyncExitStack() as stack:
        for fake in fakes:
            await stack.enter_async_context(fake.serving())
        session = await stack.enter_async_context(http_session())
        servers = [SGLangServer(fake.url, session) for fake in fakes]
        # No probe comes in between: what is seen is the hand-over's own doing.
        settings = RouterSettings(probe_interval_s=1000.0)
        yield await stack.enter_async_context(Router.open(servers, settings))


def states(router: Router) -> list[str]:
    return [view.state.value for view in router.view()]


async def test_all_servers_serve_the_new_weights_at_once() -> None:
    fakes = [FakeSGLang(ANSWER), FakeSGLang(ANSWER)]
    async with routed(*fakes) as router:
        came = await hand_over(router, FOLDER, "1", timeout_s=5)
        assert came.loaded == sorted(fake.url for fake in fakes)
        assert (came.failed, came.checksum, came.version) == ({}, "sum", "1")
        assert states(router) == ["healthy", "healthy"]
    assert [(fake.version, fake.paused) for fake in fakes] == [("1", False)] * 2


@pytest.mark.parametrize("weights", [None, "", "others"])
async def test_who_cannot_load_them_is_stale(weights: str | None) -> None:
    """They cannot be read, take too long, or are not those that the others have."""
    fakes = [FakeSGLang(ANSWER, weights=weights), FakeSGLang(ANSWER), FakeSGLang(ANSWER)]
    async with routed(*fakes) as router:
        came = await hand_over(router, FOLDER, "1", timeout_s=0.2)
        assert list(came.failed) == [fakes[0].url]
        assert states(router) == ["stale", "healthy", "healthy"]
        assert not any(fake.paused for fake in fakes)
        for fake in fakes:
            fake.weights = "sum"
        assert not (await hand_over(router, FOLDER, "2", timeout_s=5)).failed
        assert states(router) == ["healthy"] * 3


async def test_without_any_server_it_is_an_error() -> None:
    async with routed(FakeSGLang(ANSWER, weights=None)) as router:
        with pytest.raises(ServerError, match="no server could load version 1"):
            await hand_over(router, FOLDER, "1", timeout_s=5)
        assert states(router) == ["stale"]
