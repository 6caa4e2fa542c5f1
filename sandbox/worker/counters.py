"""What the kernel counts for the cgroup of this worker: memory, processor time, OOM kills.

Read from files that are opened when the worker starts: in a container those below /sys/fs/cgroup,
for a local worker those that the pool has made a cgroup for. Without a cgroup there is only the
number of OOM kills of the whole machine.
"""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

# By name: the file in cgroup v2, and in v1. The last two only v1 has.
FILES = {
    "memory": ("memory.current", "memory/memory.usage_in_bytes"),
    "memory_stat": ("memory.stat", "memory/memory.stat"),
    "oom": ("memory.events", "memory/memory.oom_control"),
    "cpu": ("cpu.stat", "cpuacct/cpuacct.usage"),
    "peak": ("", "memory/memory.max_usage_in_bytes"),
    "limit": ("", "memory/memory.limit_in_bytes"),
}
LIMIT_MARGIN_BYTES = 4 << 20  # an allocation of a few pages may fail so far below the limit
RECLAIMABLE = (b"active_file", b"inactive_file", b"slab_reclaimable")


class OomCount(NamedTuple):
    """How often a process of the cgroup was killed for memory, and how often memory was refused
    because of the cgroup's own limit (in v2)."""

    num_kills: int
    num_refused: int


def open_counters(root: str = "/sys/fs/cgroup") -> dict[str, int]:
    """Return a descriptor for each counter that there is below the root of a cgroup file system."""
    fds: dict[str, int] = {}
    for name, paths in FILES.items():
        for path in filter(None, paths):
            with contextlib.suppress(OSError):
                fds[name] = os.open(f"{root}/{path}", os.O_RDONLY | os.O_CLOEXEC)
                break
    return fds


class Counters:
    """The counters behind these descriptors, by name."""

    def __init__(self, fds: dict[str, int]) -> None:
        if "oom" not in fds:
            fds = {"oom": os.open("/proc/vmstat", os.O_RDONLY | os.O_CLOEXEC)}
        self._fds = fds
        for fd in fds.values():
            os.set_inheritable(fd, False)

    @property
    def exist(self) -> bool:
        return "memory" in self._fds

    def memory_bytes(self) -> int:
        """Return the memory in use, with what the kernel would free if it were needed."""
        return _number(self._read("memory"), b"")

    def kept_bytes(self) -> int:
        """Return the memory in use that the kernel can't free."""
        stat = self._read("memory_stat")
        return self.memory_bytes() - sum(_number(stat, name) for name in RECLAIMABLE)

    def oom_count(self) -> OomCount:
        events = self._read("oom")
        return OomCount(_number(events, b"oom_kill"), _number(events, b"oom"))

    def reached_limit(self, before: OomCount) -> bool:
        """Return whether the cgroup has reached its own limit since `before`. V1 only tells whether
        it ever has."""
        if "limit" in self._fds:
            limit = _number(self._read("limit"), b"")
            return _number(self._read("peak"), b"") > limit - LIMIT_MARGIN_BYTES
        return self.oom_count().num_refused > before.num_refused

    def cpu_s(self) -> float:
        """Return the processor time used by all processes of the cgroup."""
        data = self._read("cpu")
        if data.startswith(b"usage_usec"):
            return _number(data, b"usage_usec") / 1e6
        return _number(data, b"") / 1e9

    def _read(self, name: str) -> bytes:
        fd = self._fds.get(name)
        return os.pread(fd, 16384, 0) if fd is not None else b"0"


def _number(data: bytes, name: bytes) -> int:
    """Return the number on the line of this name, or the only number of a file without names."""
    for line in data.splitlines():
        words = line.split()
        if len(words) == 1 or words[0] == name:
            return int(words[-1])
    return 0
