"""Ownership tags of containers and directories, so that leftovers of dead processes are reaped."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from agentloop.sandbox.worker.kernel import remove_below

PREFIX = "agentloop-sandbox-"


def _start_time(pid: int) -> str | None:
    """Return the clock ticks from boot to the process's start, which make its pid unique."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()[19]


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def own_tag() -> str:
    """Return a tag of this process: pid, start time and pid namespace."""
    space = os.stat("/proc/self/ns/pid").st_ino
    return f"{os.getpid()}-{_start_time(os.getpid())}-{space}"


def is_dead(tag: str) -> bool:
    """Return whether the tagged process is dead; False for another pid namespace, as unknown."""
    try:
        pid, start, space = tag.split("-")
        foreign = int(space) != os.stat("/proc/self/ns/pid").st_ino
        return not foreign and _start_time(int(pid)) != start
    except ValueError:
        return False


def make_dir() -> Path:
    """Create a directory that no other user can enter."""
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{own_tag()}-"))


def remove_tree(path: Path) -> None:
    """Remove a worker's directory, whatever modes calls have set in it. Never follows links or
    raises."""
    with contextlib.suppress(OSError):
        remove_below(str(path))
        path.rmdir()


def reap_dirs() -> None:
    """Remove the directories of this user's dead owners."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        tag = path.name.removeprefix(PREFIX).rpartition("-")[0]
        with contextlib.suppress(FileNotFoundError):  # another pool has removed it
            if is_dead(tag) and path.lstat().st_uid == os.getuid():
                remove_tree(path)
