"""Pools of local workers; no Docker here."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentloop.sandbox import Pool, PoolSettings, process

# Bare zygotes alone: the tests start many workers. No call takes as long as that, however slow the
# machine; one that shall be late says when.
BARE = PoolSettings(backend="process", workers=4, preload=[], timeout_s=15)
SINGLE = BARE.model_copy(update={"workers": 1})

SYSTEM_PYTHON = "/usr/bin/python3"  # every user can read it
BECOME_SOMEBODY = """
import os, sys
uid = 23_456  # nobody has it
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
os.execv(sys.argv[1], sys.argv[1:])
"""


# Of a module, not of the session: an async fixture keeps its event loop open for as long as it
# lives, and anyio.run() would refuse to start another in the tests that come after.
@pytest.fixture(scope="module")
async def pool(anyio_backend: str) -> AsyncIterator[Pool]:
    async with Pool(BARE) as pool:
        yield pool


@pytest.fixture(scope="module", params=["own", "user"])
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """As whoever runs the tests; and, where that is root, as an ordinary user starts workers."""
    if request.param == "own":
        yield "own"
        return
    if os.getuid() != 0:
        pytest.skip("the tests are run by an ordinary user: the other form is this one")
    code = "import sys; sys.exit(sys.version_info < (3, 11))"
    if subprocess.call([SYSTEM_PYTHON, "-c", code], stderr=subprocess.DEVNULL):
        pytest.skip(f"{SYSTEM_PYTHON} is not 3.11 or newer, and an ordinary user can't read ours")
    start = anyio.open_process

    def start_as_somebody(command: list[str], **options: Any) -> Any:
        return start([SYSTEM_PYTHON, "-c", BECOME_SOMEBODY, SYSTEM_PYTHON, *command[1:]], **options)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        os.chmod(folder, 0o755)
        confine = Path(shutil.copy(process.CONFINE, folder))
        confine.chmod(0o644)
        patch.setattr(process, "CONFINE", confine)
        patch.setattr(anyio, "open_process", start_as_somebody)
        yield "user"
