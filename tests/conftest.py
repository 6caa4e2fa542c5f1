"""What every test shares. Async tests are marked `pytest.mark.anyio` and run on asyncio."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
