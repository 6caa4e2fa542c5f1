"""Workers as local processes, for machines without a Docker Engine (see confine.py)."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import anyio
import anyio.abc
from packaging.requirements import Requirement

from agentloop.sandbox.backend import (
    TUNED,
    directory_size,
    greeting,
    max_processes,
    own_uids,
    random_uid,
    read_boot,
    read_profile,
    start_bytes,
)
from agentloop.sandbox.cgroup import Cgroup, NoCgroup, free_processes, new_cgroup, reap_cgroups
from agentloop.sandbox.errors import SandboxUnavailable
from agentloop.sandbox.link import Link, SocketProtocol, wait_ready
from agentloop.sandbox.owner import is_only_owner, locked, make_dir, reap_dirs, remove_tree
from agentloop.sandbox.required_layers import missing_layers, refusal
from agentloop.sandbox.settings import PoolSettings, split_packages
from agentloop.sandbox.worker.counters import open_counter

CONFINE = Path(__file__).with_name("confine.py")


@asynccontextmanager
async def process_backend(settings: PoolSettings) -> AsyncIterator[ProcessBackend]:
    """Reap what dead owners left, and see how many workers this machine allows.

    Raises SandboxUnavailable where it allows none, or not to this pool.
    """
    await anyio.to_thread.run_sync(reap_cgroups)
    without_cgroup = await anyio.to_thread.run_sync(why_no_cgroup)
    num_processes = max_processes(settings)
    free = free_processes()
    if free < num_processes:
        raise SandboxUnavailable(
            f"a worker needs up to {num_processes} processes, and the limits around this process "
            f"(pids.max of its cgroups, ulimit -u) allow {free:g} more: raise them, or lower "
            "processes_per_call"
        )
    with ExitStack() as stack:
        if without_cgroup and not settings.allow_weak_isolation:
            stack.enter_context(_only_pool())
        yield ProcessBackend(settings, without_cgroup, free // num_processes)


class ProcessBackend:
    """Starts workers with this interpreter, each in its own session.

    Args:
        without_cgroup: the reason why workers have no cgroups; "": they have.
        max_workers: how many the limits on processes allow.
    """

    name = "process"

    def __init__(
        self, settings: PoolSettings, without_cgroup: str = "", max_workers: float = math.inf
    ) -> None:
        self._settings = settings
        self._layers: dict[str, str] = {}
        self._without_cgroup = without_cgroup
        # Without cgroups nothing tells what which call uses, so there is only one at a time.
        is_alone = without_cgroup and not settings.allow_weak_isolation
        self.max_sessions = int(min(settings.max_sessions, max_workers // 2))
        self.max_running = int(
            min(1 if is_alone else settings.workers, max_workers - self.max_sessions)
        )

    @property
    def layers(self) -> Mapping[str, str]:
        return self._layers

    @asynccontextmanager
    async def worker(self, worker_id: str) -> AsyncIterator[Link]:
        if lacking := not_installed(split_packages(self._settings.packages)[0]):
            raise SandboxUnavailable(
                f"packages: calls in local processes use this Python, which lacks "
                f"{', '.join(lacking)}: {sys.executable} -m pip install {' '.join(lacking)}"
            )
        cgroup = None if self._without_cgroup else self._new_cgroup()
        scratch: Path | None = None
        try:
            scratch = await anyio.to_thread.run_sync(make_scratch)
            with locked(scratch):
                async with self._connect(worker_id, cgroup, scratch) as link:
                    yield link
        finally:
            with anyio.CancelScope(shield=True):  # no deadline: each of both has one
                if cgroup is not None:
                    await anyio.to_thread.run_sync(cgroup.remove)
                if scratch is not None:
                    await anyio.to_thread.run_sync(remove_tree, scratch)

    def _new_cgroup(self) -> Cgroup:
        """Create the cgroup of a worker, with its limits. Raises SandboxUnavailable."""
        cgroup: Cgroup | None = None
        try:
            cgroup = new_cgroup()
            cgroup.limit_memory(start_bytes(self._settings))
            cgroup.limit_processes(max_processes(self._settings))
            cgroup.limit_cpu(1)
        except (NoCgroup, OSError) as error:
            if cgroup is not None:
                cgroup.remove()
            raise SandboxUnavailable(f"a worker's cgroup failed: {error}") from error
        return cgroup

    @asynccontextmanager
    async def _connect(
        self, worker_id: str, cgroup: Cgroup | None, scratch: Path
    ) -> AsyncIterator[Link]:
        link = Link(worker_id)
        uid = random_uid(own_uids())
        protocol = SocketProtocol(link)
        process: anyio.abc.Process | None = None
        try:
            near, far = socket.socketpair()
            try:
                with far:
                    process = await self._start(far, scratch, uid, cgroup)
                loop = asyncio.get_running_loop()
                await loop.create_connection(lambda: protocol, sock=near)
            except BaseException:
                near.close()
                raise
            # Not earlier: if a write fails while the connection is being made, uvloop closes the
            # file descriptor, and then the socket closes it again, when it may belong to others.
            link.write(
                greeting(
                    self._settings,
                    home=f"{scratch}/call",
                    uid=uid,
                    counters={},
                    limits_processes=cgroup is not None,
                )
            )
            await wait_ready(link, self._settings.start_timeout_s)
            self._layers = link.hello["layers"] | self._cgroup_layers
            missing = missing_layers(self._layers)
            if missing and not self._settings.allow_weak_isolation:
                raise SandboxUnavailable(refusal(missing))
            if cgroup is not None:
                link.set_memory = partial(_set_memory, cgroup)
                await link.limit_memory(self._settings.memory_mib << 20)
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

    @property
    def _cgroup_layers(self) -> dict[str, str]:
        if not self._without_cgroup:
            counted = "limited and counted by a cgroup"
            return {"memory": counted, "process count": counted, "processor time": counted}
        num = "one call at a time, since" if self.max_running == 1 else "not counted:"
        reason = f"{num} no cgroup can be created ({self._without_cgroup})"
        return {"memory": f"limit per process; {reason}", "processor time": reason}

    async def _start(
        self, far: socket.socket, scratch: Path, uid: int, cgroup: Cgroup | None
    ) -> anyio.abc.Process:
        with ExitStack() as stack:
            # Opened here: a worker may run as a user who could not.
            entries = [
                _closed_by(stack, os.open(path, os.O_WRONLY | os.O_CLOEXEC))
                for path in (cgroup.entries if cgroup is not None else ())
            ]
            counters = cgroup.counters if cgroup is not None else {"oom": "/proc/vmstat"}
            counter_fds = {
                name: _closed_by(stack, open_counter(name, path)) for name, path in counters.items()
            }
            spec = {
                "boot": read_boot(),
                "connect": f"fd:{far.fileno()}",
                "scratch": str(scratch),
                "uid": uid,
                "directory_size": directory_size(self._settings),
                "seccomp": json.loads(read_profile()),
                "entries": entries,
                "counters": counter_fds,
            }
            spec_fd = _memory_file(json.dumps(spec))
            stack.callback(os.close, spec_fd)
            return await anyio.open_process(
                [sys.executable, "-P", "-s", str(CONFINE), str(spec_fd)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None,
                env=dict(entry.split("=", 1) for entry in TUNED),
                start_new_session=True,
                pass_fds=[far.fileno(), spec_fd, *entries, *counter_fds.values()],
            )


def _closed_by(stack: ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd


async def _set_memory(cgroup: Cgroup, num_bytes: int) -> None:
    cgroup.limit_memory(num_bytes)


def why_no_cgroup() -> str:
    """Return why no cgroup can be created for a worker, or ""."""
    try:
        new_cgroup().remove()
    except (NoCgroup, OSError) as error:
        return str(error)
    return ""


@contextmanager
def _only_pool() -> Iterator[None]:
    """Be the only pool of this user without cgroups.

    Raises SandboxUnavailable if there is another: its calls could use up what ours need, and
    nothing would tell whose fault that is.
    """
    with ExitStack() as stack:
        try:
            is_alone = stack.enter_context(is_only_owner("pool"))
        except OSError as error:
            raise SandboxUnavailable(f"cannot tell whether this pool is alone: {error}") from error
        if not is_alone:
            raise SandboxUnavailable(
                "without cgroups only one pool of a user may run calls in local processes, and "
                "there is another: close it, install a Docker Engine that this user may use, or "
                "set allow_weak_isolation=true for code that you trust"
            )
        yield


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
