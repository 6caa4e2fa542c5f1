"""System calls and /proc: what the standard library has no function for."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import stat
import struct
from collections.abc import Iterator

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 4, 38, 36
PR_CAPBSET_READ, PR_CAPBSET_DROP = 23, 24
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
SHUT_WR = 1
RESERVE_BYTES = 8 << 20
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
CAP_SETGID, CAP_SETUID, CAP_SYS_RESOURCE = 6, 7, 24

libc = ctypes.CDLL(None, use_errno=True)
# Looked up once, here, and not in each child.
_prctl, _capset, _unshare, _mount = libc.prctl, libc.capset, libc.unshare, libc.mount
_shutdown, _mallopt = libc.shutdown, libc.mallopt
_mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]
_CAPS_VERSION, _NO_CAPS = struct.pack("<Ii", 0x20080522, 0), bytes(24)


def shut_for_writing(fd: int) -> None:
    """Let nothing more be sent on a socket, by whoever holds it. Raises OSError."""
    if _shutdown(fd, SHUT_WR) != 0:
        raise OSError(ctypes.get_errno(), "shutdown")


def prctl(option: int, value: int = 0) -> bool:
    return bool(_prctl(option, value, 0, 0, 0) == 0)


def set_oom_score(score: int) -> None:
    """Set how early the kernel ends this process where memory runs out, if that is allowed: 1000 is
    first, -1000 never. Leaves the process not dumpable."""
    prctl(PR_SET_DUMPABLE, 1)  # else only root may open the file
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(fd, b"%d" % score)
        os.close(fd)
    except OSError:
        pass
    prctl(PR_SET_DUMPABLE, 0)


def reserve_heap() -> None:
    """Keep free memory on this process's heap, as glibc's malloc does if it is told to: a server
    answers a call from it while the memory of the call's processes is not free yet."""
    _mallopt(M_TRIM_THRESHOLD, 5 * RESERVE_BYTES)
    _mallopt(M_MMAP_THRESHOLD, RESERVE_BYTES)
    # Written to, since pages that were never touched are not in memory; free again on return.
    _blocks = [bytearray(b"\1") * (RESERVE_BYTES // 2) for _ in range(2)]


def has_cap(number: int) -> bool:
    with open("/proc/self/status") as f:
        mask = next((line.split()[1] for line in f if line.startswith("CapEff:")), "0")
    return bool(int(mask, 16) >> number & 1)


def can_have_cap(number: int) -> bool:
    """Return whether any process here, root included, can have the capability."""
    return bool(_prctl(PR_CAPBSET_READ, number, 0, 0, 0) == 1)


def drop_caps() -> None:
    _capset(_CAPS_VERSION, _NO_CAPS)


def drop_bounds() -> None:
    """Drop the bounding set, so that a process that keeps its uid regains no capability by exec."""
    for number in range(64):
        if not prctl(PR_CAPBSET_DROP, number):
            break


def new_pid_space() -> None:
    """The next child of this process becomes pid 1 of a namespace. Raises OSError."""
    unshare(CLONE_NEWPID)


def old_pid_space() -> None:
    """The next namespace will lie beside the last one, not inside it."""
    space = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    libc.setns(space, CLONE_NEWPID)
    os.close(space)


def own_view(scratch: str, options: str) -> None:
    """Show this process a file system of its own at `scratch`, mounted with these options, and at
    /proc, read-only, nothing but the processes of its own pid namespace. Then enter a user
    namespace where it is nobody, has no capability and can make no namespace below it. Raises
    OSError.

    RLIMIT_NPROC counts the processes of that namespace alone (Linux 5.14).
    """
    unshare(CLONE_NEWNS)
    proc = os.open("/proc", os.O_PATH)  # of the worker: the new one can't be written to
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    mount("tmpfs", scratch, flags, options)
    try:
        mount("proc", "/proc", flags | MS_RDONLY, "subset=pid")
    except OSError:  # an option since Linux 5.8
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
    above: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError, ValueError):
            with open(f"/proc/{name}/stat") as f:
                above[int(name)] = int(f.read().rpartition(")")[2].split()[1])
    return above


def children_of(pid: int) -> set[int]:
    return {child for child, parent in parents().items() if parent == pid}


def descendants(pid: int) -> list[int]:
    above = parents()
    pids = [pid]
    for ancestor in pids:
        pids.extend(child for child, parent in above.items() if parent == ancestor)
    return pids[1:]


def remove_below(path: str) -> None:
    """Empty a directory without following a link, whatever modes its owner set and however deep it
    is: what lies two levels down is moved up, so that no path and no recursion grows.

    Each entry is reached from an open descriptor of its directory, so nothing outside is touched
    even if a living process puts links in the place of directories meanwhile. Raises OSError where
    something can't be removed.
    """
    new_names = (f".{n}" for n in itertools.count())
    with _open_directory(path) as top:
        while entries := _scan(top):
            for name, is_dir in entries:
                if not is_dir:
                    os.unlink(name, dir_fd=top)
                    continue
                with _open_directory(name, top) as below:
                    for child, is_child_dir in _scan(below):
                        if is_child_dir:
                            _unlock(child, below)  # moving it changes its ".."
                            _move(child, below, top, new_names)
                        else:
                            os.unlink(child, dir_fd=below)
                os.rmdir(name, dir_fd=top)


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def _open_directory(path: str, dir_fd: int | None = None) -> Iterator[int]:
    """A directory whose modes let us read and change it."""
    _unlock(path, dir_fd)
    fd = os.open(path, _DIRECTORY, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def _unlock(path: str, dir_fd: int | None) -> None:
    """Give ourselves access to a directory, if it is ours to give."""
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        if os.fstat(fd).st_mode & stat.S_IRWXU != stat.S_IRWXU:
            with contextlib.suppress(PermissionError):
                os.chmod(f"/proc/self/fd/{fd}", stat.S_IRWXU)
    finally:
        os.close(fd)


def _scan(fd: int) -> list[tuple[str, bool]]:
    """The names in a directory, and whether each is a directory itself."""
    with os.scandir(fd) as entries:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]


def _move(name: str, source: int, target: int, new_names: Iterator[str]) -> None:
    for new in new_names:
        try:
            os.stat(new, dir_fd=target, follow_symlinks=False)
        except FileNotFoundError:
            os.rename(name, new, src_dir_fd=source, dst_dir_fd=target)
            return
