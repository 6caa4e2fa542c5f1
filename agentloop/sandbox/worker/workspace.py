"""The uid and the directory in which calls run, one after the other. Signals everything that a call
has started, and empties the directory for the next."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterable, Iterator

from agentloop.sandbox.worker.kernel import (
    CAP_SETGID,
    CAP_SETUID,
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
END_TIMEOUT_S = 10.0  # for processes that were killed, to end
FREE_TIMEOUT_S = 2.0  # to free the memory of such processes, before their call is answered


class Workspace:
    """The place where the calls of one worker run. Its server uses this, with capabilities of its
    own."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.is_clean = True
        self.zygote: int | None = None  # pid of the server's child that is no call's
        self._cleaner: int | None = None  # pid of a process that empties the directory
        self._num_failures = 0  # of cleaners in a row
        self._empty_bytes: int | None = None  # size of the empty directory, where that tells

    def make(self) -> None:
        """Choose how everything of a call is killed, and make the directory."""
        spec = self.spec
        if spec.kill_by == "auto":
            by_uid = spec.uid is not None and has_cap(CAP_SETUID) and has_cap(CAP_SETGID)
            spec.kill_by = "uid" if by_uid else "tree"
        if spec.kill_by == "tree":
            prctl(PR_SET_CHILD_SUBREAPER, 1)
        if os.path.isdir(spec.home):  # a tmpfs, which counts its entries in the size
            self._empty_bytes = os.stat(spec.home).st_size
            return
        with self._as_call():
            os.mkdir(spec.home, 0o700)

    @contextlib.contextmanager
    def _as_call(self) -> Iterator[None]:
        """Act with the rights of the call's uid and gid.

        Whoever sends a signal is compared with the real and the saved uid of the target. Ours are
        the spare uid, which no other process has, and 0. So the call's processes can't strike back,
        and a kill(-1) of ours reaches nobody but them.
        """
        if self.spec.kill_by != "uid":
            yield
            return
        uid = self.spec.call_uid
        os.setresgid(uid, uid, 0)
        os.setresuid(uid + 1, uid, 0)
        try:
            yield
        finally:
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)
            if self.spec.dies_with_parent:  # a change of uid resets this
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    # -- signals ----------------------------------------------------------------------------

    def kill(self, pid: int) -> None:
        """Kill the call's process `pid` with all that it has started."""
        if self.spec.kill_by == "uid":
            self._signal_each([pid], signal.SIGKILL)  # it may not be the call's uid yet
            self._signal_uid(signal.SIGKILL)
            return
        with contextlib.suppress(OSError):  # its whole group at one stroke, where it stayed
            os.killpg(pid, signal.SIGKILL)
        victims = descendants(pid) if self.spec.kill_by == "tree" else []
        self._signal_each([pid, *victims], signal.SIGKILL)

    def kill_rest(self) -> None:
        """Kill what a call has left behind when its process has ended. If that was pid 1 of a
        namespace, nothing is left."""
        if self.spec.kill_by == "uid":
            self._signal_uid(signal.SIGKILL)
        elif self.spec.kill_by == "tree":
            self._kill_strays()

    def stop(self, pid: int) -> None:
        """Stop the process `pid` with all that it has started."""
        self._signal_all(pid, signal.SIGSTOP)

    def resume(self, pid: int) -> None:
        """Let processes go on after `stop`."""
        self._signal_all(pid, signal.SIGCONT)

    def _signal_all(self, pid: int, number: int) -> None:
        if self.spec.kill_by == "uid":
            self._signal_uid(number)
        else:
            self._signal_each([pid, *descendants(pid)], number)

    def _signal_uid(self, number: int) -> None:
        """Signal all that runs as the call's uid, at one stroke: no fork bomb outruns it."""
        with self._as_call(), contextlib.suppress(OSError):
            os.kill(-1, number)

    def _signal_each(self, pids: Iterable[int], number: int) -> None:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def _kill_strays(self) -> None:
        """Kill orphans, which have become our children."""
        for _ in range(64):
            strays = children_of(os.getpid()) - {self.zygote, self._cleaner}
            if not strays:
                return
            for pid in strays:
                self._signal_each([pid, *descendants(pid)], signal.SIGKILL)
            with contextlib.suppress(OSError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass

    def wait_for_end(self) -> None:
        """Wait until the killed processes have ended and their memory is free, within bounds."""
        give_up = time.monotonic() + FREE_TIMEOUT_S
        while self._is_inhabited() and time.monotonic() < give_up:
            self.reap()
            time.sleep(0.001)

    # -- cleaning ---------------------------------------------------------------------------

    def clean(self) -> None:
        """Make the workspace clean: at once if its directory is empty, otherwise by a process that
        empties it, of whose end `reap` learns."""
        self.is_clean = not self._is_inhabited() and self._is_empty()
        if self.is_clean:
            return
        pid = _fork_in_time()
        if pid:
            self._cleaner = pid
            return
        status = 1
        try:
            self._empty()
            status = 0
        finally:
            os._exit(status)

    def reap(self) -> None:
        """Wait for children of the server that have ended.

        Raises OSError if the directory can't be emptied: the worker is to be replaced.
        """
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._cleaner:
                self._cleaner = None
                self._on_cleaner_end(status)

    def _on_cleaner_end(self, status: int) -> None:
        if status == 0:
            self.is_clean = True
            self._num_failures = 0
            return
        self._num_failures += 1
        if self._num_failures > MAX_FAILURES:
            raise OSError("the directory of calls can't be emptied")
        self.clean()

    def _empty(self) -> None:
        give_up = time.monotonic() + END_TIMEOUT_S
        while self._is_inhabited():
            if time.monotonic() > give_up:
                raise TimeoutError
            time.sleep(0.001)
        if self.spec.kill_by == "uid":
            uid = self.spec.call_uid
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of uid, which resets it
        remove_below(self.spec.home)

    def _is_inhabited(self) -> bool:
        """Return whether a process of a call exists: killed ones may still be ending."""
        if self.spec.kill_by != "uid":  # a namespace has ended whole; strays were waited for
            return False
        try:
            os.getpriority(os.PRIO_USER, self.spec.call_uid)
        except ProcessLookupError:
            return False
        return True

    def _is_empty(self) -> bool:
        if self._empty_bytes is not None:
            return os.stat(self.spec.home).st_size == self._empty_bytes
        try:
            with self._as_call(), os.scandir(self.spec.home) as entries:
                return next(entries, None) is None
        except OSError:  # the call took its own access away
            return False

    def abandon(self, pid: int | None) -> None:
        """Kill a call's processes when the worker ends, and remove files as far as possible."""
        if pid is not None:
            self.kill(pid)
        self.kill_rest()
        with contextlib.suppress(OSError), self._as_call():
            remove_below(self.spec.home)


def _fork_in_time() -> int:
    """Fork as soon as the limits on processes and memory allow it: those of a call that was killed
    count until they have been waited for. Raises OSError if that takes too long."""
    give_up = time.monotonic() + END_TIMEOUT_S
    while True:
        try:
            return os.fork()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ENOMEM) or time.monotonic() > give_up:
                raise
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)
