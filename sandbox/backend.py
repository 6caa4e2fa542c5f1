"""What the pool needs of a place where workers run. container.py and process.py are two."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from sandbox.link import Link
from sandbox.protocol import encode
from sandbox.settings import PoolSettings

_uid_slices = itertools.count()
UIDS_PER_WORKER = 1024
FIRST_UID = 1_000_000_000

# The whole environment of a worker. The tunables halve the page faults of a child of a zygote with
# large modules: its heap lies in huge pages.
TUNED = (
    "PATH=/usr/local/bin:/usr/bin:/bin",
    "GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.top_pad=33554432",
    "PYTHONMALLOC=malloc",
)


# In the order of their imports.
WORKER_MODULES = (
    "kernel", "spec", "wire", "child", "warm", "zygote", "forked", "lanes", "front",
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


def next_uid_base() -> int:
    """The first of a range of uids that no other worker on this host uses.

    RLIMIT_NPROC counts a uid's processes host-wide, so two workers may not share one.
    """
    process = os.getpid() % (1 << 16) * 16
    return FIRST_UID + (process + next(_uid_slices) % 16) * UIDS_PER_WORKER


def greeting(settings: PoolSettings, **more: Any) -> bytes:
    """The first frame to a worker: its sources and its settings (sandbox/worker/spec.py)."""
    spec = {
        "slots": settings.slots_per_worker,
        "sessions": settings.sessions_per_worker,
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
