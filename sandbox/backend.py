"""What the pool needs of a place where workers run. container.py and process.py are two."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from sandbox.link import Link
from sandbox.protocol import encode
from sandbox.settings import PoolSettings

UIDS_PER_WORKER = 1024
FIRST_UID = 1_000_000_000
_NUM_SLICES = 32  # of uids, for one process; times the 65,536 of pids they fit below 2**32
_free_slices = deque(range(_NUM_SLICES))

NUM_READY = 4  # children forked ahead of their calls, of each preloaded set
INODES = 2048  # files and directories of one call

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
    "kernel", "landlock", "spec", "wire", "child", "warm", "zygote", "forked", "lanes", "front",
)  # fmt: skip


@cache
def read_boot() -> str:
    """The source that a worker is started with; it takes all else over its connection."""
    return Path(__file__).with_name("worker").joinpath("boot.py").read_text()


@cache
def _read_worker() -> dict[str, str]:
    folder = Path(__file__).with_name("worker")
    return {
        f"sandbox.worker.{name}": folder.joinpath(f"{name}.py").read_text()
        for name in WORKER_MODULES
    }


@cache
def read_profile() -> str:
    """Our seccomp profile, in the Engine's JSON."""
    return Path(__file__).with_name("seccomp.json").read_text()


@contextmanager
def uid_range(remapped: bool = False) -> Iterator[int]:
    """The first of a range of uids that no other worker on this host uses meanwhile.

    RLIMIT_NPROC counts a uid's processes host-wide, so two workers may not share one. With more
    than 32 workers in one process they do. `remapped`: the engine maps 65,536 uids and no more.
    """
    index = _free_slices.popleft() if _free_slices else 0
    try:
        if remapped:
            yield (1 + index) * UIDS_PER_WORKER
        else:
            yield FIRST_UID + (os.getpid() % (1 << 16) * _NUM_SLICES + index) * UIDS_PER_WORKER
    finally:
        if index not in _free_slices:
            _free_slices.append(index)


def num_lanes(settings: PoolSettings) -> int:
    """Calls that a worker can have begun: each in a uid and a directory of its own."""
    levels = 1 + len(settings.preload)
    # Twice the slots: a lane is being cleaned while the next call runs in another.
    return 2 * settings.slots_per_worker + settings.sessions_per_worker + NUM_READY * levels


def lane_size(settings: PoolSettings) -> str:
    """Of a lane's own tmpfs, in the words of mount: full, it is full for one call alone."""
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
        """Which walls stand between a call and the host, in plain words."""
        ...
