"""A Docker Engine of a test's own, which it may kill: nobody else's containers are in it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

import anyio
import anyio.abc
import pytest

from agentloop.sandbox.engine import connect
from agentloop.sandbox.errors import SandboxUnavailable
from agentloop.sandbox.image import ensure_image
from tests.patience import patient

START_TIMEOUT_S = 90.0
ROOT = Path("/sys/fs/cgroup")


# In a network namespace of its own: an engine without a bridge deletes the one of the machine's.
# A listening socket of ours comes as its third descriptor, as from systemd.
LAUNCH = """
import os, sys
if sys.argv[1] != "-1":
    os.dup2(int(sys.argv[1]), 3)
    os.environ |= {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())}
os.execvp("unshare", ["unshare", "--net", "dockerd", *sys.argv[2:]])
"""


class PrivateEngine:
    """`dockerd` over `folder`; it shares nothing with the machine's own. `listener`: a socket on
    which it is to answer as well, by TLS if `options` say so."""

    def __init__(
        self, folder: Path, options: Sequence[str] = (), listener: socket.socket | None = None
    ) -> None:
        self.folder = folder
        self.url = f"unix://{folder}/docker.sock"
        self.cgroup = f"agentloop-test-{os.getpid()}-{self.folder.name}"
        self._options = options
        self._listener = listener
        self._process: anyio.abc.Process | None = None

    async def start(self) -> None:
        command, fds = [sys.executable, "-c", LAUNCH, "-1"], []
        if self._listener is not None:
            fds = [self._listener.fileno()]
            command[-1:] = [str(fds[0]), "--host", "fd://"]
        with open(self.folder / "log", "ab") as log:  # noqa: ASYNC230 - on a local disk
            self._process = await anyio.open_process(
                [
                    *command, "--host", self.url, *self._options,
                    "--data-root", f"{self.folder}/data", "--exec-root", f"{self.folder}/exec",
                    "--pidfile", f"{self.folder}/pid", "--cgroup-parent", f"/{self.cgroup}",
                    "--bridge=none", "--iptables=false", "--ip-forward=false", "--ip-masq=false",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                pass_fds=fds,
            )  # fmt: skip
        with anyio.fail_after(patient(START_TIMEOUT_S)):
            while self._process.returncode is None:
                try:
                    async with connect(self.url):
                        return
                except SandboxUnavailable:
                    await anyio.sleep(0.1)
        raise RuntimeError(f"dockerd ended: {(self.folder / 'log').read_text()[-2000:]}")

    async def kill(self) -> None:
        """SIGKILL; its containerd dies with it, its containers live on."""
        assert self._process is not None
        self._process.kill()
        await self._process.wait()
        (self.folder / "pid").unlink(missing_ok=True)
        # As long as nobody has reaped it, a new dockerd would take the old one for running.
        (self.folder / "exec/containerd/containerd.pid").unlink(missing_ok=True)

    async def stop(self) -> None:
        if self._process is None or not self.running:
            return
        self._process.send_signal(signal.SIGTERM)
        with anyio.move_on_after(20, shield=True):
            await self._process.wait()
        if self._process.returncode is None:
            await self.kill()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def tidy(self) -> None:
        """What an engine leaves behind that was killed in the middle of a start."""
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{name}/cmdline").read_bytes()
                if b"containerd-shim" in command and bytes(self.folder) in command:
                    os.kill(int(name), signal.SIGKILL)
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for path in reversed([path for path in mounts if path.startswith(f"{self.folder}/")]):
            subprocess.run(["umount", "--lazy", path], check=False)
        shutil.rmtree(self.folder / "data", ignore_errors=True)
        for group in (ROOT / self.cgroup, *ROOT.glob(f"*/{self.cgroup}")):
            with contextlib.suppress(OSError):
                for container in filter(Path.is_dir, group.iterdir()):
                    container.rmdir()
                group.rmdir()

    def cgroups(self) -> list[str]:
        """The control groups of its containers that exist."""
        return [str(path) for path in self._cgroups()]

    def pids(self) -> list[int]:
        """Every process in its containers, also where the engine itself is down."""
        return [pid for path in self._cgroups() for pid in _pids_in(path)]

    def servers(self) -> list[int]:
        """The first process of each container."""
        inside = self.pids()
        return [pid for pid in inside if _parent(pid) not in {*inside, 0}]

    def _cgroups(self) -> Iterator[Path]:
        top = ROOT / "pids" if (ROOT / "pids").is_dir() else ROOT  # version 1: a tree for each
        return (path.parent for path in top.glob(f"{self.cgroup}/*/cgroup.procs"))


def _pids_in(cgroup: Path) -> list[int]:
    try:
        return [int(line) for line in (cgroup / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


@asynccontextmanager
async def private_engine(
    options: Sequence[str] = (), listener: socket.socket | None = None
) -> AsyncIterator[PrivateEngine]:
    """Started, with the sandbox's image copied from the machine's own engine. Skips the test (in
    CI: fails it) where that is not possible."""
    image = await _image()
    # Not below pytest's own folder: a path of a socket may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="dockerd-", ignore_cleanup_errors=True) as folder:
        engine = PrivateEngine(Path(folder), options, listener)
        try:
            await engine.start()
            await anyio.run_process(
                ["sh", "-c", f"docker save {image} | docker --host {engine.url} load"]
            )
            yield engine
        finally:
            with anyio.CancelScope(shield=True):
                await engine.stop()
                engine.tidy()


async def _image() -> str:
    if os.getuid() != 0 or shutil.which("dockerd") is None:
        _need("a Docker Engine of a test's own needs root, docker.io and iptables")
    try:
        async with connect() as docker:
            return await ensure_image(docker, "", print)
    except SandboxUnavailable as error:
        _need(f"the image comes from the machine's own engine: {error}")


def _need(what: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(f"missing: {what}", pytrace=False)
    pytest.skip(f"missing: {what}")
