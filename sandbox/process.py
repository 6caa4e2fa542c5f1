"""Workers as local processes, for machines without a Docker Engine (see confine.py)."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
from packaging.requirements import Requirement

from agentloop.sandbox.backend import (
    TUNED,
    greeting,
    lane_size,
    machine_bytes,
    num_lanes,
    own_uids,
    read_boot,
    read_profile,
    uid_range,
    worker_bytes,
)
from agentloop.sandbox.errors import SandboxUnavailable
from agentloop.sandbox.link import Link, SocketProtocol, wait_ready
from agentloop.sandbox.owner import make_dir, reap_dirs, remove_tree
from agentloop.sandbox.required_layers import missing_layers, refusal
from agentloop.sandbox.settings import PoolSettings

CONFINE = Path(__file__).with_name("confine.py")


class ProcessBackend:
    """Starts workers with this interpreter, each in its own session."""

    name = "process"

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._layers: dict[str, str] = {}

    @property
    def layers(self) -> Mapping[str, str]:
        return self._layers

    @asynccontextmanager
    async def worker(self, worker_id: str) -> AsyncIterator[Link]:
        if lacking := not_installed(self._settings.packages):
            raise SandboxUnavailable(
                f"packages: calls in local processes use this Python, which lacks "
                f"{', '.join(lacking)}: {sys.executable} -m pip install {' '.join(lacking)}"
            )
        with uid_range(self._settings, own_uids()) as uid_base:
            async with self._worker(worker_id, uid_base) as link:
                yield link

    @asynccontextmanager
    async def _worker(self, worker_id: str, uid_base: int) -> AsyncIterator[Link]:
        link = Link(worker_id)
        scratch = await anyio.to_thread.run_sync(make_scratch)
        protocol = SocketProtocol(link)
        process: anyio.abc.Process | None = None
        try:
            near, far = socket.socketpair()
            try:
                with far:
                    process = await self._start(far, scratch, uid_base)
                loop = asyncio.get_running_loop()
                await loop.create_connection(lambda: protocol, sock=near)
            except BaseException:
                near.close()
                raise
            # Not earlier: if a write fails while the connection is being made, uvloop closes the
            # file descriptor, and then the socket closes it again, when it may belong to others.
            memory = worker_bytes(self._settings, machine_bytes(), self._settings.workers)
            more = {"scratch": str(scratch), "uid_base": uid_base, "worker_bytes": memory}
            link.write(greeting(self._settings, **more))
            await wait_ready(link, self._settings.start_timeout_s)
            self._layers = link.hello["layers"]
            missing = missing_layers(self._layers)
            if missing and not self._settings.allow_weak_isolation:
                raise SandboxUnavailable(refusal(missing))
            yield link
        except OSError as error:
            raise SandboxUnavailable(f"the worker process did not start: {error}") from error
        finally:
            protocol.close()  # ends the worker
            link.lose("the pool closed it")
            # no deadline: _see_end has one; the rest does not wait
            with anyio.CancelScope(shield=True):
                if process is not None:
                    await _see_end(process)
                protocol.abort()  # a frozen worker that was killed will not read any more
                await anyio.to_thread.run_sync(remove_tree, scratch)

    async def _start(self, far: socket.socket, scratch: Path, uid_base: int) -> anyio.abc.Process:
        spec: dict[str, Any] = {
            "boot": read_boot(),
            "connect": f"fd:{far.fileno()}",
            "scratch": str(scratch),
            "uid_base": uid_base,
            "lanes": num_lanes(self._settings),
            "lane_size": lane_size(self._settings),
            "seccomp": json.loads(read_profile()),
        }
        spec_fd = _memory_file(json.dumps(spec))
        try:
            return await anyio.open_process(
                [sys.executable, "-P", "-s", str(CONFINE), str(spec_fd)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None,
                env=dict(entry.split("=", 1) for entry in TUNED),
                start_new_session=True,
                pass_fds=[far.fileno(), spec_fd],
            )
        finally:
            os.close(spec_fd)


def not_installed(packages: Iterable[str]) -> list[str]:
    """Return the requirements that this interpreter's packages do not meet."""
    return [package for package in packages if not _is_met(Requirement(package))]


def _is_met(wanted: Requirement) -> bool:
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return wanted.specifier.contains(version, prereleases=True)


def _memory_file(text: str) -> int:
    fd = os.memfd_create("spec")
    with open(os.dup(fd), "w") as f:
        f.write(text)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def make_scratch() -> Path:
    """Create a worker's directory; also remove those that killed processes have left."""
    try:
        reap_dirs()
        path = make_dir()
    except OSError as error:
        raise SandboxUnavailable(f"cannot create a worker's directory: {error}") from error
    if os.getuid() == 0:  # each call's uid creates its own in it before the worker closes it
        path.chmod(0o1777)
    return path


async def _see_end(process: anyio.abc.Process) -> None:
    with anyio.move_on_after(5):
        await process.wait()
    if process.returncode is None:
        process.kill()
    with anyio.move_on_after(5):
        await process.aclose()
