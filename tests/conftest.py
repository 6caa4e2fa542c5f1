"""What every test shares. Async tests are marked `pytest.mark.anyio` and run on asyncio."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """asyncio on uvloop: what the commands run on."""
    return "asyncio", {"use_uvloop": True}
