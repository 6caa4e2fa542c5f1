"""Ownership tags of containers and directories, so that leftovers of dead processes are reaped."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from agentloop.sandbox.worker.kernel import remove_below

PREFIX = "agentloop-sandbox-"
UNLOCKED_S = 600.0  # a directory of a pid namespace that we can't see is locked before, or not used


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
        pid, start, _ = tag.split("-")
        return not _is_foreign(tag) and _start_time(int(pid)) != start
    except ValueError:
        return False


def _is_foreign(tag: str) -> bool:
    """Return whether the tagged process is of another pid namespace, such as of a container that
    was started anew."""
    return int(tag.rpartition("-")[2]) != os.stat("/proc/self/ns/pid").st_ino


_token = secrets.token_hex(3)
_numbers = itertools.count()


def unique_id() -> str:
    """Return an id for a container that no other has, of any process that uses its engine."""
    return f"{os.getpid()}-{_token}-{next(_numbers)}"


def make_dir(suffix: str = "") -> Path:
    """Create a directory that no other user can enter."""
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{own_tag()}-", suffix=suffix))


@contextlib.contextmanager
def removed_at_end() -> Iterator[Path]:
    """Create such a directory, and remove it. Where we are killed, the next pool does."""
    path = make_dir()
    try:
        yield path
    finally:
        remove_tree(path)


@contextlib.contextmanager
def is_only_owner(kind: str) -> Iterator[bool]:
    """Hold a lock of this kind; yields whether nobody else of this user holds one. Raises OSError.

    Each owner locks a directory of its own, and looks for others that are locked. Any user could
    take a name that all owners share, but none can make a directory that belongs to another user.
    Of two that start at the same moment, both may be told that they are not alone.
    """
    path = make_dir(f".{kind}")
    try:
        with locked(path) as is_free:
            others = set(_own_dirs(f"*.{kind}")) - {path}
            yield is_free and all(map(_is_free, others))
    finally:
        remove_tree(path)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold the lock of a directory, which ends with this process at the latest, as a sign that its
    owner lives; yields whether it was free."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        is_free = True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_free = False
        yield is_free
    finally:
        os.close(fd)


def _is_free(path: Path) -> bool:
    try:
        with locked(path) as is_free:
            return is_free
    except FileNotFoundError:  # its owner has removed it
        return True


def _own_dirs(pattern: str) -> Iterator[Path]:
    """Yield the directories of this user whose names match, whoever else has made such names."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}{pattern}"):
        with contextlib.suppress(FileNotFoundError):  # another pool has removed it
            if path.lstat().st_uid == os.getuid():
                yield path


def remove_tree(path: Path) -> None:
    """Remove a worker's directory, whatever modes calls have set in it. Never follows links or
    raises."""
    with contextlib.suppress(OSError):
        remove_below(str(path))
        path.rmdir()


def reap_dirs() -> None:
    """Remove the directories of this user's dead owners."""
    for path in _own_dirs("*"):
        with contextlib.suppress(OSError, ValueError):  # gone meanwhile, or no name of ours
            tag = path.name.removeprefix(PREFIX).rpartition("-")[0]
            is_old = time.time() - path.stat().st_mtime > UNLOCKED_S
            if is_dead(tag) or (_is_foreign(tag) and is_old and _is_free(path)):
                remove_tree(path)
