"""The kernel's counters for the cgroup of this worker: memory, processor time, OOM kills.

Read from files that are opened when the worker starts: in a container those below /sys/fs/cgroup,
for a local worker those of the cgroup that the pool has made, or, where it could make none, only
the number of OOM kills of the whole machine.
"""

from __future__ import annotations

import contextlib
import os
import signal

# By name: the file in cgroup v2, and in v1. The last two only v1 has.
FILES = {
    "memory": ("memory.current", "memory/memory.usage_in_bytes"),
    "memory_stat": ("memory.stat", "memory/memory.stat"),
    "oom": ("memory.events", "memory/memory.oom_control"),
    "cpu": ("cpu.stat", "cpuacct/cpuacct.usage"),
    "peak": ("", "memory/memory.max_usage_in_bytes"),
    "limit": ("", "memory/memory.limit_in_bytes"),
}
WRITABLE = ("peak",)  # a write sets it back
LIMIT_MARGIN_BYTES = 4 << 20  # an allocation of a few pages may fail so far below the limit
RECLAIMABLE = (b"active_file", b"inactive_file", b"slab_reclaimable")


def open_counters(root: str = "/sys/fs/cgroup") -> dict[str, int]:
    """Return a descriptor for each counter that there is below the root of a cgroup file system."""
    fds: dict[str, int] = {}
    for name, paths in FILES.items():
        for path in filter(None, paths):
            with contextlib.suppress(OSError):
                fds[name] = open_counter(name, f"{root}/{path}")
                break
    return fds


def open_counter(name: str, path: str) -> int:
    """Return a descriptor of a counter, for writing if that is of use. Raises OSError."""
    if name in WRITABLE:
        with contextlib.suppress(OSError):  # a container sees its cgroup read-only
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


class CgroupCounters:
    """The counters behind these descriptors, by name, and what they say of a call."""

    def __init__(self, fds: dict[str, int]) -> None:
        self._fds = fds
        for fd in fds.values():
            os.set_inheritable(fd, False)
        self.exist = "memory" in fds
        self._resets_peak = "peak" in fds
        self.start()

    def start(self) -> None:
        """Begin to count: a call or a cell starts, or the rest of a session."""
        events = self._read("oom")
        self._num_kills, self._num_refusals = _number(events, b"oom_kill"), _number(events, b"oom")
        if self._resets_peak:
            try:
                os.pwrite(self._fds["peak"], b"0", 0)
            except OSError:
                self._resets_peak = False
        self._start_cpu_s = self._total_cpu_s()

    def cpu_s(self) -> float:
        """Return the processor time of all processes of the cgroup since `start`."""
        return self._total_cpu_s() - self._start_cpu_s

    def oom_verdict(self) -> str | None:
        """Return why the kernel has killed a process of the cgroup for memory since `start`, if it
        has: because of the call's own limit, or because the machine's memory is used up."""
        if not self.exist or self._count_oom(b"oom_kill") == self._num_kills:
            return None
        return "oom" if self._has_reached_limit() else "sandbox_error"

    def may_be_oom(self, status: int) -> bool:
        """Return whether a process that ended so may have been killed for memory, where no cgroup
        tells: the kernel has killed some process of this machine for it since `start`."""
        has_killed = self._count_oom(b"oom_kill") > self._num_kills
        return not self.exist and status == signal.SIGKILL and has_killed

    def rest_verdict(self, status: int) -> str:
        """Return why a session has ended between two cells."""
        if self.may_be_oom(status):
            return "sandbox_error"  # it was at rest, so others used up the machine's memory
        return self.oom_verdict() or "ended"

    def memory_bytes(self) -> int:
        """Return the memory in use, with what the kernel would free if it were needed."""
        return _number(self._read("memory"), b"")

    def kept_bytes(self) -> int:
        """Return the memory in use that the kernel can't free."""
        stat = self._read("memory_stat")
        return self.memory_bytes() - sum(_number(stat, name) for name in RECLAIMABLE)

    def is_spent(self) -> bool:
        """Return whether calls to come would seem to have reached the limit, since one has: version
        1 counts the peak, which may not be set back here."""
        return "peak" in self._fds and not self._resets_peak and self._has_reached_limit()

    def _count_oom(self, event: bytes) -> int:
        return _number(self._read("oom"), event)

    def _has_reached_limit(self) -> bool:
        """Return whether the cgroup has reached its own limit since `start`. Version 2 counts how
        often memory was refused because of it; version 1 tells the peak."""
        if "limit" in self._fds:
            limit = _number(self._read("limit"), b"")
            return _number(self._read("peak"), b"") > limit - LIMIT_MARGIN_BYTES
        return self._count_oom(b"oom") > self._num_refusals

    def _total_cpu_s(self) -> float:
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
