"""Landlock (landlock(7), Linux 5.19): a process gives up for good what it won't open.

Where calls see one /proc, each could read the names and arguments of the programs that others have
started: those files are open to all. A ruleset leaves a call its own directory, its own directory
in /proc, and the system's files to read.

Not covered: what needs no open(2). Numbers of processes are seen by kill(2) and stat(2).
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

from sandbox.worker.kernel import libc
from sandbox.worker.wire import OWN_PROC

VERSION, PATH_BENEATH = 1, 1
LEAST_ABI = 2  # the first in which files can be moved from one directory to another

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
REFER, TRUNCATE = 1 << 13, 1 << 14
READ = EXECUTE | READ_FILE | READ_DIR
OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
TCP = 3
ABSTRACT_SOCKETS, SIGNALS = 1, 2

DEVICES = ("null", "zero", "full", "random", "urandom")
PROC = ("cpuinfo", "filesystems", "loadavg", "meminfo", "stat", "sys", "uptime", "version")

MAX_RULESETS = 64  # a zygote has 256 descriptors
MAX_USES = 32

_RULE = struct.Struct("<Qi")  # of a rule: rights, the file that they are for
_OWN = _RULE.pack(READ | WRITE_FILE, OWN_PROC)


def _function(number: int, *types: Any) -> Callable[..., int]:
    """A system call as a function. Raises OSError."""
    function = libc["syscall"]  # its own, with its own types
    function.argtypes = [ctypes.c_long, *types]
    function.restype = ctypes.c_long

    def call(*arguments: int | bytes | None) -> int:
        result: int = function(number, *arguments)
        if result < 0:
            raise OSError(ctypes.get_errno(), "landlock")
        return result

    return call


_create = _function(444, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint)
_add = _function(445, ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
_restrict = _function(446, ctypes.c_int, ctypes.c_uint)


def abi() -> int:
    """The version of Landlock that this kernel has; 0 where it has none."""
    try:
        return _create(None, 0, VERSION)
    except OSError:
        return 0


class Fences:
    """The zygote's own: a ruleset for each lane, which its calls use in turn."""

    def __init__(self) -> None:
        version = abi()
        self._everything = (TRUNCATE if version < 3 else TRUNCATE << 1) - 1
        handled = [self._everything, TCP, ABSTRACT_SOCKETS | SIGNALS]
        num = 1 if version < 4 else 2 if version < 6 else 3
        self._handled = struct.pack(f"<{num}Q", *handled[:num])
        self._rules = [_rule(path, rights & self._everything) for path, rights in _open_to_all()]
        self._made: dict[int, list[int]] = {}  # by lane: the ruleset, how often it was used

    def ruleset(self, lane: int, home: str) -> int:
        """Return a descriptor of what the lane's next call may open, but for its own in /proc.

        Every call adds that. What earlier ones have added stands for processes that are dead.
        """
        made = self._made.get(lane)
        if made is not None and made[1] < MAX_USES:
            made[1] += 1
            return made[0]
        if made is not None or len(self._made) >= MAX_RULESETS:
            os.close(self._made.pop(lane if made else next(iter(self._made)))[0])
        fd = _create(self._handled, len(self._handled), 0)
        for rule in self._rules:
            _add(fd, PATH_BENEATH, rule, 0)
        home_fd = os.open(home, os.O_PATH)
        _add(fd, PATH_BENEATH, _RULE.pack(self._everything, home_fd), 0)
        os.close(home_fd)
        self._made[lane] = [fd, 1]
        return fd


def shut_in(ruleset: int) -> None:
    """From now on this process opens what the ruleset holds, and what is below the directory that
    is open as OWN_PROC. Raises OSError."""
    _add(ruleset, PATH_BENEATH, _OWN, 0)
    _restrict(ruleset, 0)


def _open_to_all() -> Iterator[tuple[str, int]]:
    yield "/", READ_DIR
    for entry in os.scandir("/"):
        if entry.name in ("dev", "proc", "sys") or not entry.is_dir(follow_symlinks=False):
            continue
        if os.stat(entry.path).st_mode & 0o005 and os.listdir(entry.path):
            yield entry.path, READ
    yield "/sys/devices/system", READ
    for name in DEVICES:
        yield f"/dev/{name}", OF_A_FILE
    for name in PROC:
        path = f"/proc/{name}"
        if os.path.exists(path):
            yield path, READ if os.path.isdir(path) else READ_FILE


def _rule(path: str, rights: int) -> bytes:
    return _RULE.pack(rights, os.open(path, os.O_PATH | os.O_CLOEXEC))
