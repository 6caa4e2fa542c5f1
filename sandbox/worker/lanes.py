"""The lanes: for each call in flight a uid and a directory. Signals everything that was begun in
one, and empties it for the next call."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from agentloop.sandbox.worker.kernel import (
    CAP_SETGID,
    CAP_SETUID,
    CAP_SYS_PTRACE,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    children_of,
    descendants,
    has_cap,
    prctl,
    remove_below,
)
from agentloop.sandbox.worker.spec import Spec

MAX_FAILURES = 3


class Lanes:
    """The lanes of one worker. Only its server uses them, with its own capabilities."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.free = deque(range(spec.num_lanes))
        self.helpers: dict[int, Callable[[int], None]] = {}  # by pid: told the wait status
        self.num_failures = [0] * spec.num_lanes  # failures of cleaners in a row, by lane
        self.ours: set[int] = set()  # children of the server that are no call's: the zygotes
        self.empty_bytes: int | None = None  # of an empty directory, where that tells

    def make(self) -> None:
        """Choose how everything of a call dies, and make the directories."""
        spec = self.spec
        if spec.kill_by == "auto":
            by_uid = spec.uid_base is not None and has_cap(CAP_SETUID) and has_cap(CAP_SETGID)
            spec.kill_by = "uid" if by_uid else "tree"
        if spec.kill_by == "tree":
            prctl(PR_SET_CHILD_SUBREAPER, 1)
        spec.traces = has_cap(CAP_SYS_PTRACE)
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
        """Act with the rights of the lane's uid and gid.

        Whoever sends a signal is compared with the real and the saved uid of the target. Ours are
        the spare uid, which no other process has, and 0. So the lane's processes can't strike back
        at us, and a kill(-1) of ours reaches nobody but them. For the server alone: of two who act
        so, one could kill the other.
        """
        if self.spec.kill_by != "uid":
            yield
            return
        uid = self.spec.lane_uid(lane)
        os.setresgid(uid, uid, 0)
        os.setresuid(self.spec.spare_uid, uid, 0)
        try:
            yield
        finally:
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)

    def see_as(self, lane: int) -> None:
        """Make a helper process read files with the rights of the lane's uid and gid, out of the
        reach of its signals."""
        if self.spec.kill_by == "uid":
            uid = self.spec.lane_uid(lane)
            os.setresgid(0, uid, 0)
            os.setresuid(0, uid, 0)

    # -- signals ----------------------------------------------------------------------------

    def kill(self, lane: int, pid: int | None) -> None:
        """Kill the lane's call, the process `pid` (None: not known yet), with all below it."""
        if self.spec.kill_by == "uid":
            self._signal_uid(lane, signal.SIGKILL)
        elif pid is not None:
            with contextlib.suppress(OSError):  # its whole group at one stroke, where it stayed
                os.killpg(pid, signal.SIGKILL)
            victims = descendants(pid) if self.spec.kill_by == "tree" else []
            self._signal_each([pid, *victims], signal.SIGKILL)

    def kill_rest(self, lane: int) -> None:
        """The call's process has ended: what it left behind shall, too. With a pid namespace of
        its own everything has."""
        if self.spec.kill_by == "uid":
            self._signal_uid(lane, signal.SIGKILL)
        elif self.spec.kill_by == "tree":
            self.kill_strays()

    def stop(self, lane: int, pids: Iterable[int]) -> None:
        """Stop the lane's processes, `pids` as far as they are known."""
        if self.spec.kill_by == "uid":
            self._signal_uid(lane, signal.SIGSTOP)
        else:
            self._signal_each(pids, signal.SIGSTOP)

    def resume(self, lane: int, pids: Iterable[int]) -> None:
        """Let the lane's processes go on after `stop`."""
        if self.spec.kill_by == "uid":
            self._signal_uid(lane, signal.SIGCONT)
        else:
            self._signal_each(pids, signal.SIGCONT)

    def set_nice(self, lane: int, pids: Iterable[int], nice: int) -> None:
        """Lower the priority of the lane's processes, for good."""
        if self.spec.kill_by == "uid":
            with self.acting_as(lane), contextlib.suppress(OSError):
                os.setpriority(os.PRIO_USER, self.spec.lane_uid(lane), nice)
            return
        for pid in pids:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, pid, nice)

    def _signal_uid(self, lane: int, number: int) -> None:
        """Signal all that runs as the lane's uid, at one stroke: no fork bomb outruns it."""
        with self.acting_as(lane), contextlib.suppress(OSError):
            os.kill(-1, number)

    def _signal_each(self, pids: Iterable[int], number: int) -> None:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def kill_strays(self) -> None:
        """Tree walk only: whatever was orphaned has become our child, and is none of ours."""
        for _ in range(64):
            strays = children_of(os.getpid()) - self.ours - set(self.helpers)
            if not strays:
                return
            for pid in strays:
                self._signal_each([pid, *descendants(pid)], signal.SIGKILL)
            with contextlib.suppress(OSError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass

    # -- helpers ----------------------------------------------------------------------------

    def start_helper(self, work: Callable[[], None], on_end: Callable[[int], None]) -> int:
        """Do what may block in a process of its own. `on_end` gets its wait status, 0 if `work`
        returned. Returns its pid."""
        pid = os.fork()
        if pid:
            self.helpers[pid] = on_end
            return pid
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)

    def reap(self) -> None:
        """Wait for children of the server that have ended, and tell who waits for them.

        Raises OSError for a lane that can't be emptied: the worker is to be replaced.
        """
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            on_end = self.helpers.pop(pid, None)
            if on_end is not None:
                on_end(status)

    # -- cleaning ---------------------------------------------------------------------------

    def clean(self, lane: int) -> None:
        """Free the lane: now if its directory is empty, else when a helper has emptied it."""
        if not self._is_inhabited(lane) and self._is_empty(lane):
            self.free.append(lane)
        else:
            self.start_helper(partial(self._empty, lane), partial(self._on_emptied, lane))

    def _empty(self, lane: int) -> None:
        self._outlive(lane)
        if self.spec.kill_by == "uid":
            uid = self.spec.lane_uid(lane)
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of uid, which resets it
        remove_below(self.spec.lane_dir(lane))

    def _on_emptied(self, lane: int, status: int) -> None:
        if status == 0:
            self.free.append(lane)
            self.num_failures[lane] = 0
            return
        self.num_failures[lane] += 1
        if self.num_failures[lane] > MAX_FAILURES:
            raise OSError(f"the directory of lane {lane} can't be emptied")
        self.clean(lane)

    def _is_inhabited(self, lane: int) -> bool:
        """Return whether a process of the lane exists: killed ones may still be ending, after a
        system call."""
        if self.spec.kill_by != "uid":  # a namespace has ended whole; strays were waited for
            return False
        try:
            os.getpriority(os.PRIO_USER, self.spec.lane_uid(lane))
        except ProcessLookupError:
            return False
        return True

    def _outlive(self, lane: int) -> None:
        """Wait, in a cleaner process, until all killed processes are gone. Raises TimeoutError."""
        give_up = time.monotonic() + 10
        while self._is_inhabited(lane):
            if time.monotonic() > give_up:
                raise TimeoutError
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

    def abandon(self, lane: int, pid: int | None) -> None:
        """Kill the lane's processes when the worker ends, and remove files as far as possible."""
        self.kill(lane, pid)
        with contextlib.suppress(OSError), self.acting_as(lane):
            remove_below(self.spec.lane_dir(lane))
