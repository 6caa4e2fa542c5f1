"""Start a worker as a local process behind as many walls as this machine allows. Stdlib only.

    confine.py (namespaces, then forks) -> pid 1: a root of its own, filter, capabilities -> worker

With the rights of root the calls get uids of their own. An ordinary user gets a user namespace
instead, and each call user, mount and pid namespaces of its own. Where neither is allowed, calls
are ordinary processes of the user under limits: the layers, which the worker passes on, say so.

Not covered without containers: outside a namespace, files that the user can read.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import errno
import json
import os
import resource
import select
import signal
import struct
import sys
from collections.abc import Iterator
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
SPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_CAPBSET_READ, PR_CAPBSET_DROP = 1, 38, 23, 24
CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SYS_ADMIN = 5, 6, 7, 21
CAP_SYS_RESOURCE = 24

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/etc/ssl/certs")
DEVICES = ("null", "zero", "full", "random", "urandom")
OOM_SCORE_ADJ = "-1000"  # never end the server of a worker, which needs little (container.py)
NO_PROGRAMS = MS_NOSUID | MS_NODEV | MS_NOEXEC
COUNTED_TOGETHER = 255  # a status beyond the numbers of errors
REFUSING = (
    ("user.max_user_namespaces", "0"),
    ("kernel.unprivileged_userns_clone", "0"),
    ("kernel.apparmor_restrict_unprivileged_userns", "1"),
)
# Their states where all walls stand; a state that begins with "no" is a missing one.
LAYERS = {
    "process isolation": "namespaces",
    "network": "isolated",
    "file system": "system files and the interpreter, read-only",
    "uid": "one per worker",
    "capabilities": "none in a call",
    "system calls": "allow list (seccomp)",
    "memory": "limit per process",
    "process count": "limit per call",
}

libc = ctypes.CDLL(None, use_errno=True)
libc.mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]


def check(result: int, action: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{action}: {os.strerror(code)}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    options = data.encode() or None
    result = libc.mount(source.encode(), target.encode(), kind.encode() or None, flags, options)
    check(result, f"mount {target}")


def enter_spaces() -> tuple[str, str]:
    """Leave the host's namespaces: as "root", as "user" through a user namespace, or "none"; and
    for the last why."""
    uid, gid = os.getuid(), os.getgid()
    if uid == 0 and libc.unshare(SPACES) == 0:
        return "root", ""
    if uid != 0 and libc.unshare(SPACES | CLONE_NEWUSER) == 0:
        for name, text in (
            ("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1"),
        ):  # fmt: skip
            with open(f"/proc/self/{name}", "w") as f:
                f.write(text)
        return "user", ""
    return "none", why_refused(os.strerror(ctypes.get_errno()))


def why_refused(error: str, settings: str = "/proc/sys") -> str:
    """The setting of the kernel that keeps an ordinary user from namespaces; else `error`."""
    for name, value in REFUSING if os.getuid() != 0 else ():
        with contextlib.suppress(OSError), open(f"{settings}/{name.replace('.', '/')}") as f:
            if f.read().strip() == value:
                return f"{name}={value}"
    return error if os.getuid() != 0 else f"{error}: root lacks CAP_SYS_ADMIN, or a filter refuses"


def wait_for(pid: int, owned: int) -> None:
    """Stay outside, so that the supervisor has a child to wait for; `owned` tells the process
    inside that we live."""
    os.dup2(owned, 3)
    os.closerange(4, 1 << 20)
    _, status = os.waitpid(pid, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def die_with_parent(alive: int) -> None:
    """Let the process inside be killed when the one outside is: as pid 1 it has no parent to see.

    Args:
        alive: the reading end of a pipe whose other end the one outside holds.
    """
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if select.select([alive], [], [], 0)[0]:  # it ended before
        os._exit(1)
    os.close(alive)


def bind(source: str, root: str, read_only: bool = True) -> None:
    """Show a file or directory of the host at the same place below `root`."""
    target = root + source
    is_dir = os.path.isdir(source)
    os.makedirs(target if is_dir else os.path.dirname(target), 0o755, exist_ok=True)
    if not is_dir:
        open(target, "a").close()
    mount(source, target, flags=MS_BIND | MS_REC)
    if read_only:
        make_read_only(target)


def make_read_only(top: str) -> None:
    """Make the mount at `top` read-only, with all mounts below it."""
    attributes = struct.pack("<4Q", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    size = ctypes.c_size_t(len(attributes))
    if libc.syscall(MOUNT_SETATTR, AT_FDCWD, top.encode(), AT_RECURSIVE, attributes, size) == 0:
        return
    if ctypes.get_errno() != errno.ENOSYS:
        raise OSError(ctypes.get_errno(), f"mount_setattr {top}")
    for path in mounts_below(top):  # before Linux 5.12
        # A user namespace may not clear flags that the host has set: keep those.
        flags = os.statvfs(path).f_flag & NO_PROGRAMS
        mount("none", path, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | flags)


def mounts_below(top: str) -> Iterator[str]:
    """`top` and every mount point below it."""
    with open("/proc/self/mountinfo", "rb") as f:
        for line in f:  # blanks in paths are octal there
            path = line.split()[4].decode("unicode_escape").encode("latin-1").decode()
            if path == top or path.startswith(f"{top}/"):
                yield path


def interpreter_dirs() -> list[str]:
    dirs = {os.path.realpath(p) for p in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    dirs |= {os.path.abspath(sys.prefix), os.path.abspath(sys.base_prefix)}
    return sorted(d for d in dirs if not d.startswith("/usr/") and d not in SYSTEM)


def choose_home() -> str:
    """Return the directory of calls: as in a container, unless this interpreter lives there."""
    in_tmp = any(f"{path}/".startswith("/tmp/") for path in interpreter_dirs())
    return "/scratch" if in_tmp else "/tmp"


HOME = choose_home()


def build_root(base: str, proc: str = "") -> None:
    """Enter a root of system files, the interpreter and a directory for calls; nothing else of the
    host. `proc`: mount options of /proc."""
    os.umask(0o022)
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=1k,mode=0755")
    for path in SYSTEM:
        if os.path.islink(path):
            os.symlink(os.readlink(path), base + path)
        elif os.path.isdir(path):
            bind(path, base)
    for path in (*SYSTEM_FILES, *interpreter_dirs()):
        if os.path.exists(path):
            bind(path, base)
    for name in DEVICES:
        bind(f"/dev/{name}", base, read_only=False)
    for name in ("proc", "old", HOME[1:]):
        os.makedirs(f"{base}/{name}", exist_ok=True)
    try:
        mount("proc", f"{base}/proc", "proc", NO_PROGRAMS, proc)
    except OSError:  # subset=pid is an option since Linux 5.8
        mount("proc", f"{base}/proc", "proc", NO_PROGRAMS, proc.replace(",subset=pid", ""))
    os.chdir(base)
    check(libc.pivot_root(b".", b"old"), "pivot_root")
    os.chdir("/")
    check(libc.umount2(b"/old", MNT_DETACH), "umount of the host's root")
    os.rmdir("/old")


def close_root() -> None:
    """Make the root itself read-only, when everything is in it."""
    mount("none", "/", flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def try_view(options: str) -> bool:
    """Do in a child what each call of an ordinary user will do (own_view in worker/kernel.py).

    Returns True if a call's processes are counted apart from the user's others (Linux 5.14).
    Raises OSError where this machine refuses such a view.
    """
    pid = os.fork()
    if pid == 0:
        status = errno.EIO
        try:
            check(libc.unshare(CLONE_NEWNS), "unshare")
            mount("tmpfs", HOME, "tmpfs", NO_PROGRAMS, options)
            mount("proc", HOME, "proc", MS_RDONLY | NO_PROGRAMS)
            check(libc.unshare(CLONE_NEWUSER), "unshare")
            status = COUNTED_TOGETHER
            resource.setrlimit(resource.RLIMIT_NPROC, (2, 2))  # the user has more: we are three
            if os.fork():
                status = 0
        except OSError as error:
            status = status if status == COUNTED_TOGETHER else error.errno or status
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status not in (0, COUNTED_TOGETHER):
        raise OSError(status, f"a view of a call's own: {os.strerror(status)}")
    return status == 0


ALLOW, ERRNO = 0x7FFF0000, 0x00050000
COMPARE = {"SCMP_CMP_NE": 1, "SCMP_CMP_EQ": 4, "SCMP_CMP_MASKED_EQ": 7}


class Comparison(ctypes.Structure):
    _fields_ = (
        ("arg", ctypes.c_uint), ("op", ctypes.c_int),
        ("a", ctypes.c_uint64), ("b", ctypes.c_uint64),
    )  # fmt: skip


def load_filter(profile: dict[str, Any]) -> None:
    """The containers' own profile, by libseccomp. Raises OSError where that is missing."""
    lib = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    lib.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(lib.seccomp_init(ERRNO | profile["defaultErrnoRet"]))
    for rule in profile["syscalls"]:
        allowed = rule["action"] == "SCMP_ACT_ALLOW"
        action = ALLOW if allowed else ERRNO | rule["errnoRet"]
        conditions = [
            Comparison(a["index"], COMPARE[a["op"]], a["value"], a.get("valueTwo", 0))
            for a in rule.get("args", ())
        ]
        array = (Comparison * len(conditions))(*conditions)
        for name in rule["names"]:
            number = lib.seccomp_syscall_resolve_name(name.encode())
            if number >= 0:  # else this architecture lacks it
                lib.seccomp_rule_add_array(context, action, number, len(conditions), array)
    code = lib.seccomp_load(context)
    if code != 0:
        raise OSError(-code, "seccomp_load")


def allow_views(profile: dict[str, Any]) -> None:
    """Let the zygote make the namespaces of a call. The call is refused them all the same: it has
    no capability, and its user namespace allows no other below it."""
    for name, index, value in (
        ("unshare", 0, CLONE_NEWPID),
        ("setns", 1, CLONE_NEWPID),
        ("unshare", 0, CLONE_NEWNS),
        ("unshare", 0, CLONE_NEWUSER),
        ("mount", 3, NO_PROGRAMS),
        ("mount", 3, NO_PROGRAMS | MS_RDONLY),
    ):
        condition = {"index": index, "value": value, "op": "SCMP_CMP_EQ"}
        profile["syscalls"].append(
            {"names": [name], "action": "SCMP_ACT_ALLOW", "args": [condition]}
        )


def keep_caps(*caps: int) -> None:
    """Drop all other capabilities, for good."""
    for number in range(64):
        if number not in caps and libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            break
    available = [number for number in caps if libc.prctl(PR_CAPBSET_READ, number, 0, 0, 0) == 1]
    mask = sum(1 << number for number in available)
    header, data = struct.pack("<Ii", 0x20080522, 0), struct.pack("<6I", mask, mask, 0, 0, 0, 0)
    check(libc.capset(header, data), "capset")


def readable_by_others() -> bool:
    """True if a uid of its own could still import the standard library."""
    path = os.path.realpath(os.__file__)
    while path != "/":
        mode = os.stat(path).st_mode
        if not mode & (0o001 if os.path.isdir(path) else 0o004):
            return False
        path = os.path.dirname(path)
    return True


def start(spec: dict[str, Any]) -> None:
    for fd in spec["entries"]:  # of a cgroup
        os.write(fd, b"0")
        os.close(fd)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write(OOM_SCORE_ADJ)
    alive, owned = os.pipe()
    spaces, reason = enter_spaces()
    if spaces != "none" and (pid := os.fork()):
        wait_for(pid, owned)
    os.close(owned)
    layers = dict(LAYERS)
    settings: dict[str, object] = {"counters": spec["counters"], "layers": layers}  # of the worker
    if spaces == "root":
        settings |= confine_root(spec)
    elif spaces == "user":
        settings |= confine_user(spec, layers)
    else:
        layers["process isolation"] = f"no: this machine does not allow namespaces ({reason})"
        layers["network"] = "no: calls have the network access of this machine"
        layers["file system"] = "no: calls can read all files that the user can read"
        if os.getuid() != 0:
            layers["uid"] = "no: calls have the user's uid and may signal the user's processes"
            layers["process count"] = "limit per worker"
        elif not readable_by_others():
            raise OSError(
                "as root without namespaces every call needs a uid of its own, and another uid "
                f"can't read the interpreter ({os.path.realpath(os.__file__)}); use one that "
                "others can read"
            )
    if spaces == "user":
        allow_views(spec["seccomp"])
        keep_caps(CAP_KILL, CAP_SYS_ADMIN)
    elif os.getuid() == 0:
        keep_caps(CAP_KILL, CAP_SETUID, CAP_SETGID, CAP_SYS_RESOURCE)  # the last: OOM scores
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    try:
        load_filter(spec["seccomp"])
    except OSError as error:
        layers["system calls"] = f"no: {error} (install libseccomp2)"
    settings["dies_with_parent"] = spaces != "none"
    if spaces != "none":
        die_with_parent(alive)
    command = ["-P", "-s", "-c", spec["boot"], spec["connect"], json.dumps(settings)]
    os.execv(sys.executable, [sys.executable, *command])


def confine_root(spec: dict[str, Any]) -> dict[str, object]:
    """Enter the worker's root as root; return the worker's settings."""
    build_root(spec["scratch"], "hidepid=2,subset=pid")
    # It is root's, so that no call can close it to the next.
    owner = f"uid=0,gid={spec['uid']},mode=0770"
    mount("tmpfs", HOME, "tmpfs", NO_PROGRAMS, f"{spec['directory_size']},{owner}")
    close_root()
    return {"home": HOME, "own_proc": True, "kill_by": "uid"}


def confine_user(spec: dict[str, Any], layers: dict[str, str]) -> dict[str, object]:
    """Enter the worker's root as an ordinary user, as far as this machine allows; return the
    worker's settings."""
    settings: dict[str, object] = {"kill_by": "pidns"}
    view = f"{spec['directory_size']},mode=0700"
    is_rooted = False
    try:
        build_root(spec["scratch"])
        is_rooted = True
        counts_apart = try_view(view)
    except OSError as error:
        reason = why_refused(str(error))
        layers["uid"] = (
            f"no: calls have the user's uid, without rights outside the namespaces ({reason})"
        )
        layers["process count"] = "limit per worker"
        if not is_rooted:
            layers["file system"] = f"no: {reason}"
            return settings
        mount("tmpfs", HOME, "tmpfs", NO_PROGRAMS, view)
    else:
        layers["uid"] = "the user's, in separate user, mount and process namespaces per call"
        if not counts_apart:
            layers["process count"] = "limit per worker"
        settings |= {"view": view, "counts_apart": counts_apart, "own_proc": True}
    close_root()
    return settings | {"home": HOME}


def main() -> None:
    with open(int(sys.argv[1])) as f:
        spec = json.load(f)
    try:
        start(spec)
    except BaseException as error:
        text = json.dumps({"op": "fatal", "why": f"{type(error).__name__}: {error}"}).encode()
        with contextlib.suppress(OSError):  # the pool has given up
            os.write(int(spec["connect"].partition(":")[2]), struct.pack(">I", len(text)) + text)
        os._exit(70)


if __name__ == "__main__":
    main()
