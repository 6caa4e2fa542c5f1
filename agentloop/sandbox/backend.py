"""The interface of a place where workers run. container.py and process.py implement it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from functools import cache
from pathlib import Path
from typing import Protocol

from agentloop.sandbox.link import Link
from agentloop.sandbox.protocol import encode
from agentloop.sandbox.settings import PoolSettings

UIDS = range(1_000_000_000, 2_147_000_000)  # no user's, and too many to meet by chance
REMAPPED_UIDS = range(1024, 65_534)  # all that an engine has which maps its uids to others

INODES = 2048  # files and directories of one call
ZYGOTE_BYTES = 256 << 20  # limit of what a worker holds for itself, for each preloaded set

# The whole environment of a worker. The tunables halve the page faults of a child of a zygote with
# large modules: its heap lies in huge pages.
TUNED = (
    "PATH=/usr/local/bin:/usr/bin:/bin",
    # One arena: those of threads would each take 64 MiB of a call's address space.
    "GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.top_pad=33554432:glibc.malloc.arena_max=1",
    "PYTHONMALLOC=malloc",
)


# In the order of their imports.
WORKER_MODULES = (
    "kernel", "landlock", "spec", "wire", "child", "warm", "zygote", "connection", "forked",
    "workspace", "counters", "server",
)  # fmt: skip


@cache
def read_boot() -> str:
    """The source that a worker is started with; it takes all else over its connection."""
    return Path(__file__).with_name("worker").joinpath("boot.py").read_text()


@cache
def _read_worker() -> dict[str, str]:
    folder = Path(__file__).with_name("worker")
    return {
        f"agentloop.sandbox.worker.{name}": folder.joinpath(f"{name}.py").read_text()
        for name in WORKER_MODULES
    }


@cache
def read_profile() -> str:
    """Our seccomp profile, in the Engine's JSON."""
    return Path(__file__).with_name("seccomp.json").read_text()


def random_uid(uids: range) -> int:
    """Return a uid for the calls of a worker, such that the next one is free as well.

    A uid of its own, since the kernel limits some things per user, such as descriptors in flight.
    Processes in different containers can't ask each other which are taken, so it is left to chance;
    isolation does not depend on it.
    """
    return uids.start + secrets.randbelow(len(uids) // 2) * 2


def own_uids() -> range:
    """The uids that a root process may give to calls: fewer in a user namespace."""
    ranges = []
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, size = map(int, line.split())
        ranges.append(range(first, first + size))
    if any(UIDS.start in mapped and UIDS.stop - 1 in mapped for mapped in ranges):
        return UIDS
    largest = max(ranges, key=len)
    return range(largest.start + REMAPPED_UIDS.start, largest.stop)


def start_bytes(settings: PoolSettings) -> int:
    """Return the memory limit of a worker until it is known what it needs for itself."""
    return (settings.memory_mib << 20) + ZYGOTE_BYTES * (1 + len(settings.preload))


def max_processes(settings: PoolSettings) -> int:
    """Return the limit of processes of a worker: those of a call, the server, zygotes and the
    children that they have forked ahead."""
    return settings.processes_per_call + 4 + 2 * (1 + len(settings.preload))


def directory_mib(settings: PoolSettings) -> int:
    """Return the size of the directory of calls, which is in memory."""
    return min(settings.scratch_mib, settings.memory_mib)


def directory_size(settings: PoolSettings) -> str:
    """Return the size of the directory of calls as mount options."""
    return f"size={directory_mib(settings)}m,nr_inodes={INODES}"


def greeting(settings: PoolSettings, **more: object) -> bytes:
    """The first frame to a worker: its sources and its settings (sandbox/worker/spec.py)."""
    spec = {
        "levels": [[], *settings.preload],
        "memory_bytes": settings.memory_mib << 20,
        "processes": settings.processes_per_call,
        **more,
    }
    return encode({"sources": _read_worker(), "spec": spec})


class Backend(Protocol):
    """A place where workers run."""

    name: str
    max_running: int
    """Calls that may run at a time on this machine."""
    max_sessions: int
    """Sessions that may be open on this machine."""

    def worker(self, worker_id: str) -> AbstractAsyncContextManager[Link]:
        """A started worker; leaving the context removes it with all that it ran.

        Raises SandboxUnavailable with the reason where it doesn't come up.
        """
        ...

    @property
    def layers(self) -> Mapping[str, str]:
        """Isolation layers between a call and the host, in plain words."""
        ...
