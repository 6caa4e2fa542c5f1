"""Pools of local workers; no Docker here."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from sandbox import Pool, PoolSettings

# Bare zygotes alone: the tests start many workers.
BARE = PoolSettings(backend="process", workers=1, preload=[])


@pytest.fixture(scope="session")
async def pool(anyio_backend: str) -> AsyncIterator[Pool]:
    async with Pool(BARE) as pool:
        yield pool
