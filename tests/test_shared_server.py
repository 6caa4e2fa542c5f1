"""The server that the workers of a test session share; a small script replaces SGLang."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.agentloop.inference.processes.test_supervise import Stub
from tests.patience import patient
from tests.shared_server import ROOT, shared_server

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc"),
]

KEEPER = """
import sys
from pathlib import Path
import anyio
from agentloop.inference.processes.supervise import running
from tests.agentloop.inference.processes.test_supervise import Stub, quiet
from tests.shared_server import keep

folder = Path(sys.argv[1])
servers = running([Stub(folder.parent / "stub").launch], on_progress=quiet)
anyio.run(keep, folder, servers)
"""
USER = """
import sys
from pathlib import Path
from tests.shared_server import shared_server

with shared_server(Path(sys.argv[1]), [sys.executable, "-c", sys.argv[2]]) as url:
    print(url, flush=True)
    sys.stdin.read()
"""


@contextmanager
def user(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that uses the server until its stdin is closed."""
    with subprocess.Popen(
        [sys.executable, "-c", USER, str(folder), KEEPER],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=patient(60), trust_env=False).is_success
    except httpx.TransportError:
        return False


def wait_for_the_keeper(folder: Path) -> None:
    """Wait until the keeper, which holds the lock while it ends the server, has ended it."""
    while (folder / "url").exists():
        time.sleep(0.01)
    with (folder / "users").open() as users:
        fcntl.flock(users, fcntl.LOCK_EX)


@pytest.mark.full
def test_users_share_one_server_until_the_last_leaves(tmp_path: Path) -> None:
    folder, stub = tmp_path / "shared", Stub(tmp_path / "stub")
    with user(folder) as first, user(folder) as second:
        url = url_of(first)
        assert url_of(second) == url
        assert answers(url)
        for process in (first, second):
            assert answers(url), "the other one still uses it"
            process.kill()
            process.wait()
    wait_for_the_keeper(folder)
    assert not answers(url)
    assert stub.left == []
    with user(folder) as third:
        new_url = url_of(third)
        assert new_url != url
        assert answers(new_url)
        third.communicate("", timeout=60)
        assert third.returncode == 0
    wait_for_the_keeper(folder)
    assert stub.left == []


def test_server_that_fails_to_start_fails_each_user(tmp_path: Path) -> None:
    for number in range(2):
        keeper = [sys.executable, "-c", f"raise SystemExit('no memory: {number}')"]
        error = f"did not start:\nno memory: {number}"
        with pytest.raises(RuntimeError, match=error), shared_server(tmp_path / "shared", keeper):
            pass
