"""What the pool needs of a place where workers run. container.py and process.py are two."""

from __future__ import annotations

import errno
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from agentloop.sandbox.errors import SandboxUnavailable
from agentloop.sandbox.link import Link
from agentloop.sandbox.protocol import encode
from agentloop.sandbox.settings import PoolSettings
from agentloop.sandbox.sweep import runs

UIDS = range(1_000_000_000, 2_147_000_000)  # no user's, and too many to meet by chance
REMAPPED_UIDS = range(1024, 65_536)  # all that an engine has which maps its uids to others
UID_BLOCK = 64  # are reserved together
UID_TRIES = 2000

NUM_READY = 4  # children forked ahead of their calls, of each preloaded set
INODES = 2048  # files and directories of one call
ZYGOTE_BYTES = 256 << 20  # what a zygote may hold, with the children that wait for calls

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
    "kernel", "landlock", "spec", "wire", "child", "warm", "zygote", "forked", "lanes", "usage",
    "limits", "server",
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


@contextmanager
def uid_range(settings: PoolSettings, uids: range = UIDS) -> Iterator[int]:
    """Reserve a uid for each lane, and one to spare. Yields the first.

    Two workers may not share a uid: RLIMIT_NPROC counts its processes on the whole machine, and a
    worker kills all of them. A block is chosen by chance, since processes in different containers
    can't ask each other. It is taken only if nobody in the same network namespace has reserved it
    (by the name of a socket, which the kernel forgets with the process), and if none of its uids
    has a process in sight. Raises SandboxUnavailable where no block is free.
    """
    num_blocks = -(-(num_lanes(settings) + 1) // UID_BLOCK)
    num_places = (len(uids) - num_blocks * UID_BLOCK) // UID_BLOCK + 1
    for _ in range(UID_TRIES if num_places > 0 else 0):
        first = uids.start + secrets.randbelow(num_places) * UID_BLOCK
        blocks = range(first, first + num_blocks * UID_BLOCK, UID_BLOCK)
        with ExitStack() as reserved:
            if all(_reserve(reserved, block) for block in blocks):
                yield first
                return
    raise SandboxUnavailable(
        f"no {num_blocks * UID_BLOCK} user ids are free for another worker, of {len(uids)} here: "
        "set fewer workers, slots_per_worker or sessions_per_worker"
    )


def _reserve(reserved: ExitStack, block: int) -> bool:
    name = reserved.enter_context(socket.socket(socket.AF_UNIX))
    try:
        name.bind(f"\0agentloop-sandbox-uids-{block}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise SandboxUnavailable(f"user ids can't be reserved: {error}") from error
    return not any(map(runs, range(block, block + UID_BLOCK)))


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


def machine_bytes() -> int:
    """The memory of this machine, or what our own cgroup may have of it."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max"
            limits.append(int(Path(path).read_text()))
    return min(limits)


def num_lanes(settings: PoolSettings) -> int:
    """Calls that a worker can have begun: each in a uid and a directory of its own."""
    levels = 1 + len(settings.preload)
    # Twice the slots: a lane is being cleaned while the next call runs in another.
    return 2 * settings.slots_per_worker + settings.sessions_per_worker + NUM_READY * levels


def worker_bytes(settings: PoolSettings, machine_bytes: int, num_workers: int) -> int:
    """The most memory of a worker with all its calls, of `num_workers` on a machine.

    As much as all slots may use, and as much again for sessions that rest; but no more than the
    worker's part of three quarters of the machine. It is a bound, nothing is set aside for it.
    """
    own = ZYGOTE_BYTES * (1 + len(settings.preload))
    call = settings.memory_mib << 20
    slots = settings.slots_per_worker
    wanted = own + call * (slots + min(slots, settings.sessions_per_worker))
    there = machine_bytes * 3 // 4 // num_workers
    return max(own + call, min(wanted * 8 // 7, there))  # an eighth: worker/limits.py


def lane_size(settings: PoolSettings) -> str:
    """Return the size of a lane's tmpfs as mount options: a call can fill only its own."""
    return f"size={settings.scratch_mib}m,nr_inodes={INODES}"


def greeting(settings: PoolSettings, **more: Any) -> bytes:
    """The first frame to a worker: its sources and its settings (sandbox/worker/spec.py)."""
    spec = {
        "lanes": num_lanes(settings),
        "ready": NUM_READY,
        "levels": [[], *settings.preload],
        "keep_output_bytes": settings.keep_output_bytes,
        "max_output_bytes": settings.max_output_bytes,
        "memory_bytes": settings.memory_mib << 20,
        "processes": settings.processes_per_call,
        **more,
    }
    return encode({"sources": _read_worker(), "spec": spec})


class Backend(Protocol):
    """A place where workers run."""

    name: str

    def worker(self, worker_id: str) -> AbstractAsyncContextManager[Link]:
        """A started worker; leaving the context removes it with all that it ran.

        Raises SandboxUnavailable with the reason where it doesn't come up.
        """
        ...

    @property
    def layers(self) -> Mapping[str, str]:
        """Isolation layers between a call and the host, in plain words."""
        ...
