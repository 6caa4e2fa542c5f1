"""Measure the processor time and memory that the calls of a worker use.

A worker has one memory cgroup at most, which is read-only inside of its container and cannot tell
its calls apart. So what a call uses is counted from /proc, in three steps, each only if the one
before gives reason to:

    Gauge    one number for all calls together, read often: has memory grown at all?
    census   a pass over /proc/PID/status: per process its state and an upper bound of its memory
    audit    smaps_rollup, maps and fd of one call's processes: what they really hold

Memory counts once, however many processes of a call share it: what a call inherited by fork from
the zygote costs it nothing until it is written to. Shared anonymous mappings count by their size,
since their pages may be in no process's page table; sockets count as if their buffers were full.
Memory that no process shows in one of these ways is refused to calls (`refuse_hidden_memory`).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from typing import NamedTuple

SOCKET_BYTES = 208 << 10  # net.core.wmem_default: the most that waits to be read from one
PIPE_BYTES = 64 << 10
AUDIT_TRIES = 3
_TICKS = os.sysconf("SC_CLK_TCK")

_STATUS = re.compile(
    rb"\nState:\t(\w).*?\nPPid:\t(\d+)\n.*?\nUid:\t(\d+)\t.*?\nFDSize:\t(\d+)\n"
    rb"(?:.*?\nVmSize:\s+(\d+) kB\n.*?\nRssAnon:\s+(\d+) kB\n.*?\nRssShmem:\s+(\d+) kB\n"
    rb"VmData:\s+(\d+) kB\nVmStk:\s+(\d+) kB\nVmExe:\s+(\d+) kB\nVmLib:\s+(\d+) kB\n)?"
    rb".*?\nThreads:\t(\d+)\n",
    re.DOTALL,
)
_PSS_ANON = re.compile(rb"\nPss_Anon:\s+(\d+) kB\n")
_SHARED = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) ...s \S+ \S+ (\d+) +/(?:dev/zero|memfd:)", re.MULTILINE
)


class Process(NamedTuple):
    """A line of a census. Sizes are in bytes."""

    pid: int
    parent: int
    uid: int
    state: str  # as ps has it: R, S, D, T, Z
    num_threads: int
    size: int  # bytes of its address space
    anonymous: int  # resident and private, also what it shares with a parent by fork
    most: int  # what it can hold at most: `anonymous`, all shared mappings, full sockets


def read_process(pid: int) -> Process | None:
    """Read a process's memory usage; None if it has ended."""
    process = _read_status(pid, f"/proc/{pid}/status")
    if process is not None and process.state == "Z" and process.num_threads > 1:
        # Its first thread has ended; the others hold its memory.
        for name in _names(f"/proc/{pid}/task"):
            thread = _read_status(pid, f"/proc/{pid}/task/{name}/status")
            if thread is not None and thread.state != "Z":
                return thread
    return process


def _read_status(pid: int, path: str) -> Process | None:
    match = _STATUS.search(_read(path))
    if match is None:
        return None
    numbers = [int(number or 0) for number in match.groups()[1:]]
    parent, uid, num_fds, size, anonymous, shared, *private, num_threads = numbers
    # Neither data, stack nor code: shared mappings, and files mapped to be read.
    mapped = max(shared, size - sum(private))
    most = ((anonymous + mapped) << 10) + num_fds * SOCKET_BYTES
    return Process(
        pid, parent, uid, match[1].decode(), num_threads, size << 10, anonymous << 10, most
    )


def _read(path: str) -> bytes:
    """A file of /proc that is smaller than a page; nothing if its process has ended."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, 4096)
    except OSError:  # ESRCH: it has ended
        return b""
    finally:
        os.close(fd)


def _names(path: str) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(path)
    return []


def census() -> list[Process]:
    """Every process in sight."""
    pids = map(int, filter(str.isdigit, os.listdir("/proc")))
    return [process for process in map(read_process, pids) if process is not None]


def cpu_s(pid: int) -> float:
    """CPU seconds of a process; 0 if it has ended."""
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS if fields else 0.0


def audit(seen: Iterable[Process]) -> int:
    """Return the memory that the processes of one call hold together, in bytes.

    The processes should be stopped: if one ends meanwhile, its share of common pages goes to those
    that are read later, and counts twice. One that keeps its memory from being read counts with the
    most that it can hold. An audit may take long and wait for a lock of the processes, so it does
    not run in the server itself.

    Args:
        seen: the result of the last census.
    """
    total, settled = 0, False
    for _ in range(AUDIT_TRIES):
        if not settled:
            total, settled = _audit_once(seen)
    return total


def _audit_once(seen: Iterable[Process]) -> tuple[int, bool]:
    """The sum, and whether all processes were there until the end."""
    total, settled = 0, True
    processes = []
    for old in seen:
        process = read_process(old.pid)
        if process is None:
            total += old.most if _is_alive(old.pid) else 0
        elif process.uid == old.uid:  # else the pid is another call's by now
            processes.append(process)
    shared: dict[str, int] = {}
    for process in processes:
        if _runs_on_in_child(process, processes):
            continue
        rollup = _PSS_ANON.search(_read(f"/proc/{process.pid}/smaps_rollup"))
        if rollup is None:  # refused, or its first thread has ended, or all of it
            now = read_process(process.pid)
            total += now.most if now is not None and now.size else 0
            settled = settled and (now is not None or process.size == 0)
            continue
        total += int(rollup[1]) << 10
        for inode, size in _shared_by(process.pid):
            shared[inode] = max(size, shared.get(inode, 0))
    return total + sum(shared.values()), settled


def _is_alive(pid: int) -> bool:
    """Also of a process that is hidden from our view of /proc."""
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return True
    return False


def _runs_on_in_child(process: Process, others: list[Process]) -> bool:
    """True in a vfork: the parent waits, and the two are one memory until the child's exec."""
    return process.state == "D" and any(
        other.parent == process.pid and other.size == process.size for other in others
    )


def _shared_by(pid: int) -> Iterable[tuple[str, int]]:
    """Return the identity and size of each mapping that several processes may share."""
    mapped: dict[str, int] = {}
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:
        for start, end, inode in _SHARED.findall(maps.read()):
            key = inode.decode()
            mapped[key] = mapped.get(key, 0) + int(end, 16) - int(start, 16)
    yield from mapped.items()
    for name in _names(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            path = f"/proc/{pid}/fd/{name}"
            target = os.readlink(path)
            if target.startswith("socket:"):
                yield target, SOCKET_BYTES
            elif target.startswith("pipe:"):
                yield target, PIPE_BYTES
            elif target.startswith("/memfd:"):
                info = os.stat(path)
                yield str(info.st_ino), info.st_blocks * 512


def scratch_used(path: str) -> int:
    """Bytes in a file system of memory; 0 where its process has ended."""
    with contextlib.suppress(OSError):
        info = os.statvfs(path)
        return (info.f_blocks - info.f_bfree) * info.f_frsize
    return 0


class Gauge:
    """Memory in use by the worker's own cgroup, or by the whole machine."""

    def __init__(self, own_cgroup: bool) -> None:
        self.own = False
        self._stat = ""
        places = (
            ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "/sys/fs/cgroup/memory/memory.stat"),
        )
        for usage, stat in places if own_cgroup else ():
            if os.path.exists(usage):
                self._fd = os.open(usage, os.O_RDONLY | os.O_CLOEXEC)
                self.own, self._stat = True, stat
                return
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open("/proc/meminfo", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> int:
        """Bytes in use, with what the page cache holds of a cgroup; 0 where nothing tells."""
        if self._fd < 0:
            return 0
        data = os.pread(self._fd, 256, 0)
        if self.own:
            return int(data)
        total, _, available = (int(line.split()[1]) for line in data.splitlines()[:3])
        return (total - available) << 10

    def read_kept(self) -> int:
        """Bytes of the worker's cgroup that the kernel can't free by dropping cached files."""
        with open(self._stat, "rb") as f:
            lines = dict(line.split(b" ", 1) for line in f)
        cached = sum(int(lines.get(name, 0)) for name in (b"inactive_file", b"active_file"))
        return self.read() - cached
