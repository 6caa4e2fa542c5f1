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


@cache
def read_worker() -> str:
    """The worker's source: it travels with the command, so that no stale one is ever started."""
    folder = Path(__file__).with_name("worker")
    names = ("kernel", "spec", "wire", "child", "warm", "zygote", "forked", "front")
    sources = {f"sandbox.worker.{n}": folder.joinpath(f"{n}.py").read_text() for n in names}
    return f"""
import json, sys, types
for name in ("sandbox", "sandbox.worker"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
for name, source in {sources!r}.items():
    module = sys.modules[name] = types.ModuleType(name)
    setattr(sys.modules["sandbox.worker"], name.rpartition(".")[2], module)
    exec(compile(source, name, "exec"), module.__dict__)
module.main(json.loads(sys.argv[1]))
"""


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


def worker_settings(settings: PoolSettings, **more: Any) -> dict[str, Any]:
    """The command line of a worker (sandbox/worker.py, Settings)."""
    return {
        "slots": settings.slots_per_worker,
        "sessions": settings.sessions_per_worker,
        "levels": [[], *settings.preload],
        "keep_output_bytes": settings.keep_output_bytes,
        "max_output_bytes": settings.max_output_bytes,
        "memory_bytes": settings.memory_mib << 20,
        "processes": settings.processes_per_call,
        **more,
    }


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
