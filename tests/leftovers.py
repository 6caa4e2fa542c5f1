"""Nothing may be left behind by the tests: no process, no container, no temporary folder.

each worker      has a temporary folder of its own, and notes after which test a folder of ours
                 appeared in it
each process     inherits an id of the test run, and the name of the test that started it
the end          what still has one of these is printed, and fails the run
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.patience import patient

EXIT_STATUS = 10  # unlike that of failed tests, which are run again
_RUN = "AGENTLOOP_TEST_RUN"
_FOLDER = "AGENTLOOP_TEST_FOLDER"
_OURS = "agentloop-"
_TO_END_S = 30.0  # the shared server ends with the last of its users
_LABEL = "agentloop.sandbox.owner"


class Leftovers:
    """A pytest plugin, in the controller and in each of pytest-xdist's workers."""

    def __init__(self) -> None:
        self.is_worker = "PYTEST_XDIST_WORKER" in os.environ
        if not self.is_worker:
            os.environ[_RUN] = uuid.uuid4().hex
            # Short, because paths of sockets have few characters.
            os.environ[_FOLDER] = tempfile.mkdtemp(prefix="t-")
            os.environ.setdefault("RAY_TMPDIR", tempfile.gettempdir())
        self.run = os.environ[_RUN]
        self.base = Path(os.environ[_FOLDER])
        self.folder = self.base / os.environ.get("PYTEST_XDIST_WORKER", "main")
        self.folder.mkdir()
        for folder in (self.base, self.folder):
            folder.chmod(0o1777)  # like /tmp: programs run as other users
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.folder)
        self.tests: dict[str, str] = {}  # by the name of a folder
        self.containers = set() if self.is_worker else set(_containers())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None]:
        try:
            return (yield)
        finally:
            for name in os.listdir(self.folder):
                self.tests.setdefault(name, item.nodeid)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None]:
        result = yield  # pytest-xdist's workers have ended then
        notes = self.folder.with_suffix(".tests")
        notes.write_text("".join(f"{name}\t{test}\n" for name, test in self.tests.items()))
        if self.is_worker:
            return result
        if leftovers := self._find_leftovers():
            print("\nLEFT BEHIND by tests:", *leftovers, sep="\n* ")
            session.exitstatus = EXIT_STATUS
        shutil.rmtree(self.base, ignore_errors=True)
        return result

    def _find_leftovers(self) -> list[str]:
        """Return descriptions of what is left, after a while in which it may still end."""
        end = time.monotonic() + patient(_TO_END_S)
        while processes := list(_processes(self.run)):
            if time.monotonic() > end:
                break
            time.sleep(0.1)
        tests: dict[str, str] = {}
        for notes in self.base.glob("*.tests"):
            tests |= dict(line.split("\t", 1) for line in notes.read_text().splitlines())
        folders = [
            f"folder {path.name}, seen after {tests.get(path.name, 'the last test')}"
            for path in self.base.glob(f"*/{_OURS}*")
        ]
        containers = [f"container {name}" for name in set(_containers()) - self.containers]
        return [*processes, *folders, *containers]


def _processes(run: str) -> Iterator[str]:
    """Yield descriptions of the processes that this test run has started and that still live."""
    mark = f"{_RUN}={run}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended, or is another user's
            continue
        if mark in environment and command and int(process.name) not in (os.getpid(), os.getppid()):
            test = next(
                (
                    variable
                    for variable in environment
                    if variable.startswith(b"PYTEST_CURRENT_TEST=")
                ),
                b"=?",
            )
            yield f"process {process.name} of {test.decode().partition('=')[2]}: {command[:200]}"


def _containers() -> list[str]:
    """Return the names of the sandbox's containers whose owner has ended, if there is an engine.

    Those of an owner that lives may be another run's; ours would be found as a process.
    """
    if shutil.which("docker") is None:
        return []
    form = f'{{{{.Names}}}} {{{{.Label "{_LABEL}"}}}}'
    command = ["docker", "ps", "-a", "--filter", f"label={_LABEL}", "--format", form]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    rows = (line.split() for line in done.stdout.splitlines())
    return [name for name, owner in rows if not Path("/proc", owner.split("-")[0]).exists()]
