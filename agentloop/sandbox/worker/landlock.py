"""Landlock (landlock(7), Linux 5.19): a process gives up for good what it won't open.

A call gives up the files of the worker's processes in /proc, and those that count what the whole
machine does, by which concurrent calls could talk: /sys, and most of /proc. It writes below its own
directory alone, opens no TCP connection, and signals only its own processes.

Not covered: what needs no open(2). The numbers of processes are seen by kill(2) and stat(2).
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator

from agentloop.sandbox.worker.kernel import libc

_syscall = libc.syscall  # looked up once, here, and not in each child
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION, PATH_BENEATH = 1, 1
LEAST_ABI = 2  # the first in which files can be moved from one directory to another

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1, 2, 4, 8, 1 << 14
READ = EXECUTE | READ_FILE | READ_DIR
TCP = 3
ABSTRACT_SOCKETS, SIGNALS = 1, 2

DEVICES = ("null", "zero", "full", "random", "urandom")
PROC = ("cpuinfo", "filesystems", "uptime", "version")


def abi() -> int:
    """The version of Landlock that this kernel has; less than 1 where it has none."""
    return int(_syscall(CREATE_RULESET, None, ctypes.c_size_t(0), VERSION))


def make_ruleset(home: str, own_proc: bool) -> int:
    """Return the descriptor of a ruleset for calls: everything below `home`, read access
    elsewhere, and in /proc only files of no process unless `own_proc`. Raises OSError."""
    version = abi()
    files = (TRUNCATE if version < 3 else TRUNCATE << 1) - 1
    handled = [files, TCP, ABSTRACT_SOCKETS | SIGNALS]
    num = 1 if version < 4 else 2 if version < 6 else 3
    data = struct.pack(f"<{num}Q", *handled[:num])
    ruleset = _check(CREATE_RULESET, data, ctypes.c_size_t(len(data)), 0)
    for path, rights in (*_open_to_all(own_proc), (home, files)):
        fd = os.open(path, os.O_PATH)
        _check(ADD_RULE, ruleset, PATH_BENEATH, struct.pack("<Qi", rights & files, fd), 0)
        os.close(fd)
    return ruleset


def restrict_self(ruleset: int) -> None:
    """Give up, in this process and its children, what the ruleset does not hold. Raises OSError."""
    _check(RESTRICT_SELF, ruleset, 0)


def _open_to_all(own_proc: bool) -> Iterator[tuple[str, int]]:
    yield "/", READ_DIR
    for entry in os.scandir("/"):
        if entry.name not in ("dev", "proc", "sys") and entry.is_dir(follow_symlinks=False):
            yield entry.path, READ
    for name in DEVICES:
        yield f"/dev/{name}", READ_FILE | WRITE_FILE | TRUNCATE
    for path in ["/proc"] if own_proc else [f"/proc/{name}" for name in PROC]:
        if os.path.exists(path):
            yield path, READ if os.path.isdir(path) else READ_FILE


def _check(*arguments: int | bytes | ctypes.c_size_t) -> int:
    result = int(_syscall(*arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), "landlock")
    return result
