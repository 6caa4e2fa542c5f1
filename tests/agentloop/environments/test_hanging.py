"""An environment that hangs ends at its deadline and leaves nothing behind.

Its MCP servers: tests/agentloop/agent/test_mcp.py. Containers: tests/integration.
"""

from __future__ import annotations

import sys

import pytest

from agentloop.sandbox import Pool
from tests.agentloop.environments.hanging import hang
from tests.sandbox.conftest import BARE

pytestmark = [
    pytest.mark.timeout(60),  # real workers are started
    pytest.mark.skipif(sys.platform != "linux", reason="it looks at /proc"),
]


@pytest.mark.full
async def test_hanging_environment_leaves_no_process_in_local_workers() -> None:
    async with Pool(BARE) as pool:
        await hang(pool, "600.1617")
