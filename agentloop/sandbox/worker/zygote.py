"""A zygote: it has modules loaded, forks when told, and says how each child ended.

    server ──> zygote without modules ──> zygote with numpy ──> zygote with numpy and sympy

A zygote is forked from the one whose modules it adds to, and so shares the memory of those.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import resource
import select
import signal
import socket
import sys
import traceback
import types
from collections.abc import Sequence

from agentloop.sandbox.worker import child, landlock, warm
from agentloop.sandbox.worker.child import NAME, be_child, open_input, open_output
from agentloop.sandbox.worker.kernel import (
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    new_pid_space,
    old_pid_space,
    prctl,
    set_oom_score,
)
from agentloop.sandbox.worker.spec import Spec
from agentloop.sandbox.worker.wire import (
    DONE_FD,
    FORK,
    JOB_FD,
    NEWS,
    NEWS_EXITED,
    NEWS_FAILED,
    NEWS_FORKED,
    REPORT_FD,
)

NUM_FDS = 5  # of a child: its channel, its two outputs, its count of cells, its report


OOM_SCORE = 500  # less than a call's, more than the server's


def keep_low_fds(links: list[socket.socket]) -> list[socket.socket]:
    """Occupy the numbers that a child uses, so that what a zygote receives lies above them."""
    moved = []
    for link in links:
        fd = fcntl.fcntl(link, fcntl.F_DUPFD_CLOEXEC, REPORT_FD + 1)
        moved.append(socket.socket(fileno=fd))
        link.close()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (JOB_FD, DONE_FD, REPORT_FD):
        if fd != null:
            os.dup2(null, fd, inheritable=False)
    return moved


def be_zygote(spec: Spec, level: int, links: Sequence[socket.socket]) -> None:
    """Be the zygote of a level, until the server is gone, and fork those that build on it.

    Args:
        links: the zygotes' connections to the server, by level.
    """
    zygote = Zygote(spec, level, links[level])
    zygote.prepare()
    for higher_level in range(level + 1, len(spec.levels)):
        if base_of(higher_level, spec.levels) == level and os.fork() == 0:
            be_zygote(spec, higher_level, links)
            return
    for link in links:
        if link is not links[level]:
            link.close()
    zygote.run()


def base_of(level: int, levels: Sequence[Sequence[str]]) -> int:
    """Return the last level before this one whose modules are all among its own."""
    modules = set(levels[level])
    return max(lower for lower in range(level) if set(levels[lower]) <= modules)


class Zygote:
    """Forks children that start with these modules loaded; tells the server how they ended."""

    def __init__(self, spec: Spec, level: int, server: socket.socket) -> None:
        self.spec = spec
        self.level = level
        self.server = server
        self.numbers: dict[int, int] = {}  # of children, by pid

    def prepare(self) -> None:
        """Do what can be done once for all children: a page touched here is not copied there."""
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        set_oom_score(OOM_SCORE)
        warm.load(self.spec.levels[self.level])
        warm.rehearse()
        os.environ.clear()
        os.environ.update(PATH="/usr/local/bin:/usr/bin:/bin", HOME=self.spec.home)
        os.umask(0o077)
        set_limits(self.spec)
        if self.spec.kill_by == "uid":
            os.setgroups([])
        sys.argv = [NAME]
        sys.stdin, sys.stdout, sys.stderr = open_input(), open_output(1), open_output(2)
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
        sys.modules["__main__"] = types.ModuleType("__main__")
        for name in [name for name in sys.modules if name.partition(".")[0] == "agentloop"]:
            del sys.modules[name]  # nothing that a call could want
        warm.freeze()

    def run(self) -> None:
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a call's
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self.server, select.POLLIN)
        poll.register(wake, select.POLLIN)
        limit_address_space(self.spec)
        if self.spec.uses_landlock:
            self.spec.ruleset = landlock.make_ruleset(self.spec.home, self.spec.own_proc)
        self.server.send(NEWS.pack(NEWS_FORKED, -1, os.getpid(), 0.0, 0))
        while True:
            for fd, _ in poll.poll():
                if fd == wake:
                    os.read(wake, 4096)
                    self.reap()
                elif not self.serve():
                    return

    def serve(self) -> bool:
        """Fork a child, as the server asks; False when the server is gone."""
        try:
            data, controls, _, _ = self.server.recvmsg(FORK.size, socket.CMSG_SPACE(4 * NUM_FDS))
        except ConnectionResetError:
            return False
        if not data:
            return False
        fds = array.array("i", controls[0][2])
        (number,) = FORK.unpack(data)
        try:
            pid = self.fork(fds)
        except OSError as error:
            news = NEWS.pack(NEWS_FAILED, number, error.errno or 0, 0.0, 0)
        else:
            self.numbers[pid] = number
            news = NEWS.pack(NEWS_FORKED, number, pid, 0.0, 0)
        self.server.send(news)
        for fd in fds:
            os.close(fd)
        return True

    def fork(self, fds: array.array[int]) -> int:
        if self.spec.kill_by != "pidns":
            return self._fork(fds)
        new_pid_space()
        try:
            return self._fork(fds)
        finally:  # also where the fork failed: no second namespace can be entered before
            old_pid_space()

    def _fork(self, fds: array.array[int]) -> int:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                self.server.close()  # now, so that the server sees the end of this zygote
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                status = be_child(self.spec, fds)
            except BaseException:  # a fault of ours, or the call's own exit path
                with contextlib.suppress(BaseException):
                    traceback.print_exc()
            finally:
                os._exit(status)
        return pid

    def reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number = self.numbers.pop(pid, None)
            if number is not None:
                cpu_s = usage.ru_utime + usage.ru_stime
                self.server.send(NEWS.pack(NEWS_EXITED, number, status, cpu_s, usage.ru_maxrss))


def set_limits(spec: Spec) -> None:
    limits = {
        resource.RLIMIT_FSIZE: spec.file_bytes,
        resource.RLIMIT_NOFILE: 128,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_STACK: 64 << 20,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
    }
    for which, value in limits.items():
        hard = resource.getrlimit(which)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (bound, bound))


def limit_address_space(spec: Spec) -> None:
    """Limit the address space that a call may map beyond what it shares with the zygote. Each call
    lowers the hard limit as well, unless it becomes another program."""
    with open("/proc/self/statm") as f:
        child.MAPPED_BYTES = int(f.read().split()[0]) * resource.getpagesize()
    soft = child.MAPPED_BYTES + spec.memory_bytes
    hard = soft + child.REPORT_HEADROOM_BYTES
    limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    if limit != resource.RLIM_INFINITY:
        soft, hard = min(soft, limit), min(hard, limit)
    child.HARD_BYTES = hard
    resource.setrlimit(resource.RLIMIT_AS, (soft, limit))
