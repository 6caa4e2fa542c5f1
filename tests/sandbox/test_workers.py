"""Local workers that hang, that can't fork, or whose user has used up what is counted by user."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path

import anyio
import pytest

from agentloop.sandbox import CallStatus, Pool
from tests.sandbox.chaos import children
from tests.sandbox.conftest import BARE, SINGLE, SYSTEM_PYTHON
from tests.sandbox.test_pool import FOREVER, runs, started_since, wait_until

# `form` changes how workers are started for as long as this module's tests run.
pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("form")]

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to change others' limits")


def servers(family: set[int]) -> list[int]:
    """Return those of these processes that are the first of their namespace: servers."""
    actual = []
    for pid in family:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            if re.search(r"^NSpid:\t\d+\t1$", status, re.MULTILINE):
                actual.append(pid)
    return actual


async def test_worker_that_hangs_ends_with_the_pool() -> None:
    remaining = set(children(os.getpid()))
    async with Pool(SINGLE) as pool:
        if pool.stats()["layers"]["process isolation"].startswith("no"):
            pytest.skip("this machine refuses namespaces")
        async with anyio.create_task_group() as group:
            group.start_soon(pool.run, FOREVER, "", 600)
            await wait_until(lambda: pool.stats()["busy"] == 1)
            family = started_since(remaining)
            (server,) = servers(family)
            os.kill(server, signal.SIGSTOP)
            group.cancel_scope.cancel()
    await wait_until(lambda: not any(map(runs, family)))


LIMIT = """
import resource, sys
which, number, *pids = map(int, sys.argv[1:])
for pid in pids:
    hard = resource.prlimit(pid, which)[1]
    resource.prlimit(pid, which, (number, hard))
"""


def limit(pids: Iterable[int], which: int, number: int) -> None:
    """Change a soft limit of processes, as their user: root may not have the right to."""
    for pid in filter(runs, pids):
        status = Path(f"/proc/{pid}/status").read_text()
        uid, gid = (
            int(re.findall(rf"^{name}:\t(\d+)", status, re.M)[0]) for name in ("Uid", "Gid")
        )
        command = [SYSTEM_PYTHON, "-c", LIMIT, *map(str, (which, number, pid))]
        subprocess.run(command, user=uid, group=gid, extra_groups=[], cwd="/", check=False)


@needs_root
async def test_worker_that_could_not_fork_recovers_or_is_replaced() -> None:
    """No call is judged for that. A limit on the processes of a user does not bind root."""
    remaining = set(children(os.getpid()))
    async with Pool(SINGLE) as pool:
        family = started_since(remaining)
        limit(family, resource.RLIMIT_NPROC, 0)
        for _ in range(12):  # more than are forked ahead
            result = await pool.run("1")
            assert result.status in (CallStatus.OK, CallStatus.SANDBOX_ERROR), result
        limit(family, resource.RLIMIT_NPROC, 1000)
        assert (await pool.run("1")).ok


@needs_root
async def test_worker_that_can_not_send_descriptors_judges_nobody() -> None:
    """Those on their way are counted by user, and a session may hold as many as it can."""
    hold = (
        "import array, socket\na, b = socket.socketpair()\n"
        "for _ in range(10): a.sendmsg([b'x'], [(1, 1, array.array('i', [0] * 10))])"
    )
    remaining = set(children(os.getpid()))
    async with Pool(BARE) as pool, pool.session() as session, pool.session() as holder:
        await session.run("x = 41")
        assert (await holder.run(hold)).ok
        limit(servers(started_since(remaining)), resource.RLIMIT_NOFILE, 64)
        for _ in range(12):
            result = await pool.run("1")
            assert result.status in (CallStatus.OK, CallStatus.SANDBOX_ERROR), result
        assert (await session.run("x + 1")).result == "42"


async def test_server_watches_nothing_that_is_counted_by_user() -> None:
    """A call could use up the user's watches of epoll."""
    remaining = set(children(os.getpid()))
    async with Pool(SINGLE):
        (server,) = servers(started_since(remaining))
        links = [os.readlink(f"/proc/{server}/fd/{n}") for n in os.listdir(f"/proc/{server}/fd")]
        assert not any("eventpoll" in link for link in links)
