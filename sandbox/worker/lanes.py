"""The lanes: for each call in flight a uid and a directory. Who ends what was begun there, and
empties it for the next."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Iterator

from sandbox.worker.kernel import (
    CAP_SETGID,
    CAP_SETUID,
    PR_SET_CHILD_SUBREAPER,
    children_of,
    count_processes,
    descendants,
    has_cap,
    prctl,
    remove_below,
)
from sandbox.worker.spec import Spec

MAX_FAILURES = 3
CROWD = 4  # processes of one call, more than which share what one would get


class Lanes:
    """The front's own: it acts with the front's capabilities."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.free = deque(range(spec.num_lanes))
        self.cleaners: dict[int, int] = {}  # pid to lane
        self.num_failures = [0] * spec.num_lanes  # of cleaners, in a row
        self.ours: set[int] = set()  # children of the front that are no call's: the zygotes
        self.empty_bytes: int | None = None  # of an empty directory, where that tells

    def make(self) -> None:
        """Choose how everything of a call dies, and make the directories."""
        spec = self.spec
        if spec.kill_by == "auto":
            by_uid = spec.uid_base is not None and has_cap(CAP_SETUID) and has_cap(CAP_SETGID)
            spec.kill_by = "uid" if by_uid else "tree"
        if spec.kill_by == "tree":
            prctl(PR_SET_CHILD_SUBREAPER, 1)
        if os.path.isdir(spec.lane_dir(0)):  # each is a tmpfs of its own, made by who started us
            self.empty_bytes = os.stat(spec.lane_dir(0)).st_size
            return
        for lane in range(spec.num_lanes):
            with self.acting_as(lane):
                os.mkdir(spec.lane_dir(lane), 0o700)
        if spec.kill_by == "uid":
            os.chmod(spec.scratch, 0o711)  # calls see their own directory only

    @contextlib.contextmanager
    def acting_as(self, lane: int) -> Iterator[None]:
        """Act as the lane's uid and gid, with 0 saved; as pid 1 we are deaf to its signals."""
        if self.spec.kill_by != "uid":
            yield
            return
        uid = self.spec.lane_uid(lane)
        os.setresgid(uid, uid, 0)
        os.setresuid(uid, uid, 0)
        try:
            yield
        finally:
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)

    # -- killing ----------------------------------------------------------------------------

    def kill(self, lane: int, pid: int | None) -> None:
        """Kill the lane's call, the process `pid` (None: not known yet), with all below it."""
        if self.spec.kill_by == "uid":
            self._kill_uid(lane)
        elif pid is not None:
            with contextlib.suppress(OSError):  # its whole group at one stroke, where it stayed
                os.killpg(pid, signal.SIGKILL)
            victims = descendants(pid) if self.spec.kill_by == "tree" else []
            for victim in [pid, *victims]:
                with contextlib.suppress(OSError):
                    os.kill(victim, signal.SIGKILL)

    def hold_back(self, lane: int) -> None:
        """A call that runs on with many processes must not take the processors from those beside
        it: the kernel shares them out by process, so each of its own gets less."""
        if self.spec.kill_by != "uid":
            return
        uid = self.spec.lane_uid(lane)
        if count_processes(uid) > CROWD:
            os.setresuid(0, uid, 0)  # the real one stays: PRIO_USER would mean us, too
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_USER, uid, 19)
            os.setresuid(0, 0, 0)

    def kill_rest(self, lane: int) -> None:
        """The call's process has ended: what it left behind shall, too. With a pid namespace of
        its own everything has."""
        if self.spec.kill_by == "uid":
            self._kill_uid(lane)
        elif self.spec.kill_by == "tree":
            self.kill_strays()

    def _kill_uid(self, lane: int) -> None:
        """Kill all that runs as the lane's uid, at one stroke: no fork bomb outruns it."""
        if os.getpid() == 1:
            with self.acting_as(lane), contextlib.suppress(OSError):
                os.kill(-1, signal.SIGKILL)
            return
        pid = os.fork()  # the lane could strike back at us, not being pid 1
        if pid:
            os.waitpid(pid, 0)
            return
        uid = self.spec.lane_uid(lane)
        with contextlib.suppress(OSError):
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        os._exit(0)

    def kill_strays(self) -> None:
        """Tree walk only: whatever was orphaned has become our child, and is none of ours."""
        for _ in range(64):
            strays = children_of(os.getpid()) - self.ours - set(self.cleaners)
            if not strays:
                return
            for pid in strays:
                for victim in [pid, *descendants(pid)]:
                    with contextlib.suppress(OSError):
                        os.kill(victim, signal.SIGKILL)
            with contextlib.suppress(OSError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass

    # -- cleaning ---------------------------------------------------------------------------

    def clean(self, lane: int) -> None:
        """Free the lane: now if its directory is empty, else when a helper has emptied it."""
        if not self._is_inhabited(lane) and self._is_empty(lane):
            self.free.append(lane)
            return
        path = self.spec.lane_dir(lane)
        pid = os.fork()
        if pid:
            self.cleaners[pid] = lane
            return
        status = 1
        try:
            self._outlive(lane)
            if self.spec.kill_by == "uid":
                uid = self.spec.lane_uid(lane)
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
            with contextlib.suppress(PermissionError):  # not its own: it can't have closed it
                os.chmod(path, 0o700)
            remove_below(path)
            status = 0
        finally:
            os._exit(status)

    def _is_inhabited(self, lane: int) -> bool:
        """Whether a process of the lane's is there: what is killed may still be ending, and end a
        system call before."""
        if self.spec.kill_by != "uid":  # a namespace has ended whole; strays were waited for
            return False
        try:
            os.getpriority(os.PRIO_USER, self.spec.lane_uid(lane))
        except ProcessLookupError:
            return False
        return True

    def _outlive(self, lane: int) -> None:
        """In a cleaner: until the lane is deserted. Raises TimeoutError if that doesn't come."""
        give_up = time.monotonic() + 10
        while self._is_inhabited(lane):
            if time.monotonic() > give_up:
                raise TimeoutError
            with self.acting_as(lane), contextlib.suppress(OSError):
                os.kill(-1, signal.SIGKILL)
            time.sleep(0.001)

    def _is_empty(self, lane: int) -> bool:
        path = self.spec.lane_dir(lane)
        if self.empty_bytes is not None:  # a tmpfs counts its entries in the size
            return os.stat(path).st_size == self.empty_bytes
        try:
            with self.acting_as(lane), os.scandir(path) as entries:
                return next(entries, None) is None
        except OSError:  # the call took its own access away
            return False

    def reap(self) -> bool:
        """Wait for children of the front that have ended; True if that freed a lane.

        Raises OSError for a lane that can't be emptied: the worker is to be replaced.
        """
        freed = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return freed
            if pid == 0:
                return freed
            lane = self.cleaners.pop(pid, None)
            if lane is None:
                continue
            if status == 0:
                self.free.append(lane)
                self.num_failures[lane] = 0
                freed = True
                continue
            self.num_failures[lane] += 1
            if self.num_failures[lane] > MAX_FAILURES:
                raise OSError(f"the directory of lane {lane} can't be emptied")
            self.clean(lane)

    def abandon(self, lane: int, pid: int | None) -> None:
        """At the worker's end: kill, and empty as far as that goes."""
        self.kill(lane, pid)
        with contextlib.suppress(OSError), self.acting_as(lane):
            remove_below(self.spec.lane_dir(lane))
