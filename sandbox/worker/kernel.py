"""System calls and /proc: what the standard library has no function for."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import stat
import struct

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 4, 38, 36
PR_CAPBSET_DROP = 24
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
CAP_SETGID, CAP_SETUID = 6, 7

libc = ctypes.CDLL(None, use_errno=True)
# Looked up once, here, and not in each child.
_prctl, _capset, _unshare, _mount = libc.prctl, libc.capset, libc.unshare, libc.mount
_mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]
_CAPS_VERSION, _NO_CAPS = struct.pack("<Ii", 0x20080522, 0), bytes(24)


def prctl(option: int, value: int = 0) -> bool:
    return bool(_prctl(option, value, 0, 0, 0) == 0)


def has_cap(number: int) -> bool:
    with open("/proc/self/status") as f:
        mask = next((line.split()[1] for line in f if line.startswith("CapEff:")), "0")
    return bool(int(mask, 16) >> number & 1)


def drop_caps() -> None:
    _capset(_CAPS_VERSION, _NO_CAPS)


def drop_bounds() -> None:
    """For a process that keeps its uid: no capability to regain by an exec."""
    for number in range(64):
        if not prctl(PR_CAPBSET_DROP, number):
            break


def new_pid_space() -> None:
    """The next child of this process becomes pid 1 of a namespace. Raises OSError."""
    unshare(CLONE_NEWPID)


def old_pid_space() -> None:
    """The next namespace will lie beside the last one, not inside it."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    libc.setns(own, CLONE_NEWPID)
    os.close(own)


def own_view(scratch: str, options: str) -> None:
    """Show this process a file system of its own at `scratch`, mounted with these options, and at
    /proc the processes of its own pid namespace, read-only. Then enter a user namespace where it
    is nobody, has no capability and can make no namespace below it. Raises OSError.

    RLIMIT_NPROC counts the processes of that namespace alone (Linux 5.14).
    """
    unshare(CLONE_NEWNS)
    proc = os.open("/proc", os.O_PATH)  # of the worker: the new one can't be written to
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    mount("tmpfs", scratch, flags, options)
    mount("proc", "/proc", flags | MS_RDONLY)
    unshare(CLONE_NEWUSER)
    fd = os.open("sys/user/max_user_namespaces", os.O_WRONLY, dir_fd=proc)
    os.write(fd, b"0")
    os.close(fd)
    os.close(proc)
    drop_caps()  # with no uid in this namespace an exec regains none


def unshare(flags: int) -> None:
    if _unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), f"unshare {flags:#x}")


def mount(kind: str, target: str, flags: int, options: str = "") -> None:
    """Mount a new file system. Raises OSError."""
    if _mount(kind.encode(), target.encode(), kind.encode(), flags, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"mount {target}")


def count_oom_kills() -> int:
    """How often the kernel has killed in our cgroup; 0 where it doesn't say."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        with contextlib.suppress(OSError), open(path) as f:
            for line in f:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def offer_to_killer(pid: int) -> None:
    """Let the kernel kill a child before any process of ours where memory ends. Done by the front:
    a child would copy pages for it, and can't write there."""
    try:
        fd = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY)
        os.write(fd, b"1000")
        os.close(fd)
    except OSError:  # it has ended; or is an ordinary user's, and closed
        pass


def count_own_processes() -> int:
    """Processes and threads of this uid on the host, as RLIMIT_NPROC counts them."""
    num = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                num += len(os.listdir(f"/proc/{name}/task"))
    return num


def parents() -> dict[int, int]:
    """The parent of every process in sight."""
    found: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError, ValueError):
            with open(f"/proc/{name}/stat") as f:
                found[int(name)] = int(f.read().rpartition(")")[2].split()[1])
    return found


def count_processes(uid: int) -> int:
    """By status: the owner of a file in /proc is root for one that is not dumpable."""
    num, line = 0, f"\nUid:\t{uid}\t"
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/status") as f:
            num += line in f.read(512)
    return num


def children_of(pid: int) -> set[int]:
    return {child for child, parent in parents().items() if parent == pid}


def descendants(pid: int) -> list[int]:
    above = parents()
    found = [pid]
    for at in found:
        found.extend(child for child, parent in above.items() if parent == at)
    return found[1:]


def remove_below(path: str) -> None:
    """Empty a directory without following a link, whatever modes its owner set and however deep it
    is: what lies two levels down is moved up, so that no path and no recursion grows.

    Raises OSError where something can't be removed.
    """
    names = (f"{path}/.{n}" for n in itertools.count())
    while True:
        with os.scandir(path) as entries:
            found = list(entries)
        if not found:
            return
        for entry in found:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, stat.S_IRWXU)
            with os.scandir(entry.path) as below:
                for one in below:
                    if one.is_dir(follow_symlinks=False):
                        os.chmod(one.path, stat.S_IRWXU)  # moving it changes its ".."
                        os.rename(one.path, next(n for n in names if not os.path.lexists(n)))
                    else:
                        os.unlink(one.path)
            os.rmdir(entry.path)
