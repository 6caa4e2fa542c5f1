"""Pools of local workers; no Docker here."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from agentloop.sandbox import Pool, PoolSettings

# Bare zygotes alone: the tests start many workers. No call takes as long as that, however slow the
# machine; one that shall be late says when.
BARE = PoolSettings(backend="process", workers=4, preload=[], timeout_s=15)
SINGLE = BARE.model_copy(update={"workers": 1})


# Of a module, not of the session: an async fixture keeps its event loop open for as long as it
# lives, and anyio.run() would refuse to start another in the tests that come after.
@pytest.fixture(scope="module")
async def pool(anyio_backend: str) -> AsyncIterator[Pool]:
    async with Pool(BARE) as pool:
        yield pool
