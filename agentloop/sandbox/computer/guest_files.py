"""Users, files and programs of a computer, as its first process (guest.py) sees them.

Whatever names a path runs in a child without privileges and descriptors, so that /proc/self/mem is
not the first process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import stat
import struct
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import BinaryIO, TypedDict

from agentloop.sandbox.worker.kernel import PR_CAPBSET_DROP, libc, prctl

PIPE_BYTES = 64 << 10
OWN_CAPS = (8, 24)  # CAP_SETPCAP, CAP_SYS_RESOURCE: of the first process alone
OOM_SCORE_ADJ = 1000  # the kernel ends these before the first process


class GuestFrame(TypedDict, total=False):
    """The JSON of a frame, either way (guest.py)."""

    op: str
    id: int
    shell: int
    user: str
    cwd: str
    env: Mapping[str, str]
    stage: str
    stream: int
    kind: str
    path: str
    paths: Sequence[str]
    max_bytes: int
    mode: int | None
    argv: Sequence[str]
    status: int
    oom: bool
    ended: bool
    error: str | None


# -- users --------------------------------------------------------------------------------------


def find_user(name: str) -> tuple[int, int, list[int], str, str]:
    """Return uid, gid, further groups, home and name of `user[:group]`, each a name or a number."""
    user, _, group = name.partition(":")
    uid, gid, home, login = (int(user) if user.isdigit() else -1), 0, "/", user
    for entry in _entries("/etc/passwd", 7):
        if entry[0] == user or entry[2] == user:
            uid, gid, home, login = int(entry[2]), int(entry[3]), entry[5], entry[0]
            break
    if uid < 0:
        if user != "root":
            raise OSError(f"the image has no user {user!r}")
        uid, gid, home, login = 0, 0, "/root", "root"
    groups = []
    for entry in _entries("/etc/group", 4):
        if login in entry[3].split(","):
            groups.append(int(entry[2]))
        if group and group in (entry[0], entry[2]):
            gid = int(entry[2])
    if group.isdigit():
        gid = int(group)
    return uid, gid, groups, home or "/", login


def _entries(path: str, num_fields: int) -> Iterator[list[str]]:
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        for line in file:
            if len(fields := line.rstrip("\n").split(":")) == num_fields:
                yield fields


def become(user: str) -> tuple[str, str]:
    """Give up what only the first process may have, and change the user; return home and name."""
    uid, gid, groups, home, login = find_user(user)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(OOM_SCORE_ADJ))
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    # Who is not root can get none again. The first of ours is needed for the others.
    for number in sorted(range(64) if uid else OWN_CAPS, key=OWN_CAPS[0].__eq__):
        prctl(PR_CAPBSET_DROP, number)
    if uid == 0:  # else the kernel takes all capabilities
        _drop_own_caps()
    os.setresuid(uid, uid, uid)
    os.umask(0o022)
    return home, login


def _drop_own_caps() -> None:
    header, data = struct.pack("<Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    if libc.capget(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    words = list(struct.unpack("<6I", data.raw))  # effective, permitted, inheritable; then the rest
    kept = ~sum(1 << number for number in OWN_CAPS)
    words[:3] = [word & kept for word in words[:3]]
    if libc.capset(header, struct.pack("<6I", *words)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


# -- files: in children -------------------------------------------------------------------------


def read_file(request: GuestFrame, data: BinaryIO, out: BinaryIO) -> None:
    """Write a regular file to `out`. A pipe or a device could give bytes for ever."""
    path = request["path"]
    with open(path, "rb", opener=lambda path, mode: os.open(path, mode | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(22, "not a regular file", path)
        left = request["max_bytes"] + 1
        while left > 0 and (chunk := file.read(min(PIPE_BYTES, left))):
            left -= len(chunk)
            out.write(chunk)
        if left <= 0:
            raise OSError(27, f"longer than {request['max_bytes']} bytes", path)


def write_file(request: GuestFrame, data: BinaryIO, out: BinaryIO) -> None:
    path = request["path"]
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags, 0o666), "wb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(22, "not a regular file", path)
        file.truncate(0)
        shutil.copyfileobj(data, file, PIPE_BYTES)
        if (mode := request.get("mode")) is not None:
            os.fchmod(file.fileno(), mode)


def remove_paths(request: GuestFrame, data: BinaryIO, out: BinaryIO) -> None:
    """Remove files, and directories with what is in them; links are not followed."""
    for path in request["paths"]:
        _remove(path)


def pack(request: GuestFrame, data: BinaryIO, out: BinaryIO) -> None:
    """Write a tar of a folder's contents, or of a single file, to `out`."""
    path = request["path"]
    names = sorted(os.listdir(path)) if os.path.isdir(path) else [""]
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            tar.add(os.path.join(path, name) if name else path, name or os.path.basename(path))


def unpack(request: GuestFrame, data: BinaryIO, out: BinaryIO) -> None:
    """Extract a tar into a folder."""
    os.makedirs(request["path"], exist_ok=True)
    _extract(data, request["path"])


def pack_changes(request: GuestFrame, data: BinaryIO, out: BinaryIO) -> None:
    """Write what has changed since the image: a line of JSON, the paths that are gone, and a tar.

    Takes the engine's list of changes: paths, each with what happened (2: removed). A directory
    that was removed and made anew is in it as removed, so it is removed first, then extracted.
    """
    changes = json.load(data)
    gone = [path for path, kind in changes if kind == 2]
    paths = sorted({path for path, _ in changes if os.path.lexists(path)})
    out.write(json.dumps(gone).encode() + b"\n")
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                tar.add(path, path.lstrip("/"), recursive=False)


def apply_changes(request: GuestFrame, data: BinaryIO, out: BinaryIO) -> None:
    """Make the changes that `pack_changes` has written."""
    for path in json.loads(data.readline()):
        _remove(path)
    _extract(data, "/")


def execute(request: GuestFrame, data: BinaryIO, out: BinaryIO) -> None:
    """Become a program. Where that fails, it ends with the numbers that shells have for it."""
    _, _, _, home, login = find_user(request["user"])
    env = {**os.environ, "HOME": home, "USER": login, "LOGNAME": login, **request["env"]}
    program, *_ = argv = list(request["argv"])
    try:
        os.chdir(request["cwd"])
        os.execvpe(program, argv, env)
    except OSError as error:
        path = os.fsdecode(error.filename or program)
        os.write(2, f"{path}: {error.strerror}\n".encode("utf-8", "surrogateescape"))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _extract(data: BinaryIO, folder: str) -> None:
    def members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
        for member in tar:
            if member.ischr() or member.isblk():
                continue  # nothing here may make one
            path = os.path.join(folder, member.name)
            if not (member.isdir() and os.path.isdir(path) and not os.path.islink(path)):
                _remove(path)  # never write through a link
            yield member

    with tarfile.open(fileobj=data, mode="r|*") as tar:
        # These are the computer's own links and paths, and it can harm only itself.
        tar.extractall(folder, members(tar), numeric_owner=True, filter="fully_trusted")
    while data.read(PIPE_BYTES):
        pass  # padding behind the end


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)


FILE_KINDS: dict[str, Callable[[GuestFrame, BinaryIO, BinaryIO], None]] = {
    "read": read_file,
    "write": write_file,
    "remove": remove_paths,
    "pack": pack,
    "unpack": unpack,
    "pack_changes": pack_changes,
    "apply_changes": apply_changes,
    "execute": execute,
}
