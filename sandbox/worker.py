"""The worker: runs untrusted Python, one forked process per call. Stdlib only.

    supervisor <-- frames --> front <-- SEQPACKET --> zygotes --fork--> children, one per call

The front (pid 1 of its container or namespace) holds the only connection to the supervisor,
reads the output pipes, keeps the deadlines, kills and cleans. A zygote has its modules loaded
and warmed; it forks when told and says how each child ended. A child becomes a uid of its own
before it sees a job, and keeps no descriptor but 0, 1 and 2: what it wants to tell goes into a
mapping that the front reads once the child is dead. Children are forked ahead of their calls.

A *lane* is a uid with a scratch directory; it serves one process tree at a time and is free
again when everything of that uid is dead and the directory is empty.

What a child can lie about: its own `result` and `error`. Never its exit status, output counts,
times, or anything of another call.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import errno
import fcntl
import gc
import heapq
import io
import itertools
import json
import math
import os
import re
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import sys
import time
import traceback
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

HEADER = struct.Struct(">I")
FORK = struct.Struct("<i")  # lane
NEWS = struct.Struct("<iiiddq")  # kind, lane, pid or wait status, cpu_s, wall clock, max rss
NEWS_FORKED, NEWS_EXITED, NEWS_FAILED = 1, 2, 3
REPORT_HEAD = struct.Struct("<qi")  # started_ns, bytes of JSON that follow
REPORT_BYTES = 256 * 1024
MAX_TEXT = 16 * 1024  # characters of a result or a traceback
INLINE_JOB = 64 * 1024  # larger jobs travel as a memory file
LARGE_JOB = b"+"
JOB_FD, REPORT_FD = 3, 4  # held free in a zygote
NAME = "<call>"
PIPE_CHUNK = 64 * 1024
TOP_UP_DELAY_S = 0.002

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 4, 38, 36
PR_CAPBSET_DROP = 24
CLONE_NEWPID = 0x20000000
CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SYS_ADMIN = 5, 6, 7, 21

PROT_READ_WRITE, MAP_SHARED, MAP_FAILED = 3, 1, ctypes.c_void_p(-1).value

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

# Typical first calls: they fill the caches that would otherwise be cold in every child.
WARM_UP = {
    "numpy": """
import numpy as np
a = np.arange(12.0).reshape(3, 4)
(a @ a.T).sum(); np.linalg.solve(np.eye(3) * 2, np.ones(3)); np.linalg.eigvals(np.eye(2))
repr(np.array([1.5, 2.5])); np.random.default_rng(0).normal(size=3); np.sort(a.ravel())
""",
    "sympy": """
import sympy as sp
x, y = sp.symbols("x y")
sp.solve(x**2 - 5 * x + 6, x); sp.solve([x + y - 3, x - y - 1], [x, y])
str(sp.factor(x**2 - 1)); str(sp.expand((x + 1) ** 3)); sp.simplify(sp.sin(x) ** 2 + sp.cos(x) ** 2)
sp.integrate(x**2, (x, 0, 1)); sp.diff(sp.exp(x) * x, x); sp.limit(sp.sin(x) / x, x, 0)
sp.factorint(5040); sp.isprime(97); sp.sqrt(8); sp.Rational(3, 4) + 1; str(sp.N(sp.pi, 20))
sp.Matrix([[1, 2], [3, 4]]).det(); sp.latex(x / 2); sp.sympify("2*x + 1"); sp.solve(x**3 - 1, x)
""",
    "scipy": """
import scipy.optimize, scipy.integrate, scipy.stats, scipy.linalg
scipy.optimize.brentq(lambda t: t * t - 2, 0, 2); scipy.integrate.quad(lambda t: t * t, 0, 1)
""",
}


def prctl(option: int, value: int = 0) -> bool:
    return bool(libc.prctl(option, value, 0, 0, 0) == 0)


def effective_caps() -> int:
    with open("/proc/self/status") as f:
        for line in f:
            if line.startswith("CapEff:"):
                return int(line.split()[1], 16)
    return 0


def has_cap(number: int) -> bool:
    return bool(effective_caps() >> number & 1)


def drop_caps() -> None:
    """For a child that keeps its uid: with no capability and none to regain by an exec."""
    for number in range(64):
        if not prctl(PR_CAPBSET_DROP, number):
            break
    header = struct.pack("<Ii", 0x20080522, 0)
    libc.capset(header, bytes(24))


def clip(text: str, limit: int = MAX_TEXT) -> str:
    """At most `limit` characters, the middle left out; always encodable."""
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


# ---------------------------------------------------------------------------------- the child


class Settings:
    """What the supervisor asked for, as given on the command line (a JSON object)."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.connect: str = given["connect"]
        self.scratch: str = given["scratch"]
        self.levels: list[list[str]] = given.get("levels", [[]])
        self.slots: int = given.get("slots", 4)
        self.sessions: int = given.get("sessions", 32)
        self.ready: int = given.get("ready", 2)
        self.uid_base: int | None = given.get("uid_base")
        self.keep_bytes: int = given.get("keep_output_bytes", 64 * 1024)
        self.max_output_bytes: int = given.get("max_output_bytes", 1 << 20)
        self.memory_bytes: int = given.get("memory_bytes", 512 << 20)
        self.file_bytes: int = given.get("file_bytes", 32 << 20)
        self.processes: int = given.get("processes", 32)
        self.layers: dict[str, str] = given.get("layers", {})
        self.kill_by: str = given.get("kill_by", "auto")
        # Processes of the same uid that aren't the call's: in a user namespace those of the
        # worker, elsewhere all that the user happens to run.
        self.others = 2 * self.num_lanes + 16
        if self.kill_by == "auto":
            self.others += 256 + count_own_processes()

    @property
    def num_lanes(self) -> int:
        # Twice the slots: a lane is being cleaned while the next call runs in another.
        return 2 * self.slots + self.sessions + self.ready * len(self.levels)

    def lane_dir(self, lane: int) -> str:
        return f"{self.scratch}/{lane}"

    def lane_uid(self, lane: int) -> int:
        assert self.uid_base is not None
        return self.uid_base + lane


def set_limits(settings: Settings) -> None:
    limits = {
        resource.RLIMIT_AS: settings.memory_bytes,
        resource.RLIMIT_FSIZE: settings.file_bytes,
        resource.RLIMIT_NOFILE: 256,
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


def limit_cpu(timeout_s: float) -> None:
    """A second line behind the wall clock, renewed for each cell of a session."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(usage.ru_utime + usage.ru_stime + timeout_s) + 2
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))


def become_nobody(settings: Settings, lane: int) -> None:
    """Drop everything the zygote may do; from here on the process is worth no more than its uid."""
    with contextlib.suppress(PermissionError):  # an ordinary user's: its files in /proc are closed
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(fd, b"1000")
        os.close(fd)
    if settings.kill_by == "uid":
        uid = settings.lane_uid(lane)
        most = settings.processes
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    else:  # one uid for all: the limit counts the others too
        most = settings.processes + settings.others
        drop_caps()
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    os.setsid()  # a signal to its own process group stays inside
    os.chdir(settings.lane_dir(lane))
    prctl(PR_SET_DUMPABLE, 0)  # closes /proc/<pid> to others; a change of uid resets it
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def read_job(channel: socket.socket) -> dict[str, Any] | None:
    data = channel.recv(INLINE_JOB)
    if data == LARGE_JOB:
        _, fds, _, _ = socket.recv_fds(channel, 1, 1)
        with open(fds[0], "rb") as f:
            f.seek(0)
            data = f.read()
    return json.loads(data) if data else None


def give_stdin(text: str) -> None:
    """Standard input as a file of memory: no pipe to fill, nobody to wait for."""
    if text:
        fd = os.memfd_create("stdin")
        with open(os.dup(fd), "wb") as f:
            f.write(text.encode("utf-8", "replace"))
        os.lseek(fd, 0, os.SEEK_SET)
    else:
        fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(fd, 0)
    os.close(fd)
    sys.stdin = open_input()


def open_input() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8", "replace")


def open_output(fd: int) -> io.TextIOWrapper:
    # Straight to the pipe: what was printed before a kill is kept.
    raw: Any = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(raw, "utf-8", "replace", newline="\n", write_through=True)


def fresh_main() -> dict[str, Any]:
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    return module.__dict__


def reseed(code: str) -> None:
    # `random` reseeds itself after a fork; numpy's legacy generator doesn't.
    if "random" in code and "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def show_error(error: BaseException) -> dict[str, Any]:
    """The traceback as the author of the code would see it: no frame of ours."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != NAME:
        trace = trace.tb_next
    line = trace.tb_lineno if trace else getattr(error, "lineno", None)
    try:
        text = "".join(traceback.format_exception(type(error), error, trace))
        message = str(error)
    except BaseException as second:  # __str__ of the call's own exceptions may do anything
        text, message = f"{type(error).__name__}\n", f"(unprintable: {type(second).__name__})"
    for at in iter_tb(trace):
        line = at.tb_lineno if at.tb_frame.f_code.co_filename == NAME else line
    return {
        "type": type(error).__name__,
        "message": clip(message, 4096),
        "line": line if isinstance(line, int) else None,
        "traceback": clip(text),
    }


def iter_tb(trace: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def compile_cell(code: str) -> tuple[types.CodeType, types.CodeType | None]:
    """The statements, and the last expression by itself if the code ends in one."""
    tree = compile(code, NAME, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        return compile(tree, NAME, "exec", dont_inherit=True), None
    tree.body.pop()
    body = compile(tree, NAME, "exec", dont_inherit=True)
    return body, compile(ast.Expression(last.value), NAME, "eval", dont_inherit=True)


def remember_source(code: str) -> None:
    import linecache

    linecache.cache[NAME] = (len(code), None, code.splitlines(True), NAME)


def exit_code_of(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def run_cell(code: str, variables: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Run the code; the exit status that a script would have, and what to report."""
    report: dict[str, Any] = {}
    try:
        body, last = compile_cell(code)
        exec(body, variables)
        if last is not None:
            value = eval(last, variables)
            if value is not None:
                report["result"] = clip(repr(value))
                variables["_"] = value
        return 0, report
    except SystemExit as stop:
        return exit_code_of(stop), report
    except BaseException as error:
        remember_source(code)
        report = {"error": show_error(error)}
        with contextlib.suppress(Exception):
            sys.stderr.write(report["error"]["traceback"])
        return 1, report


def run_exit_handlers() -> None:
    import atexit
    import threading

    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()


def map_report(fd: int) -> int:
    """The address of the mapping. Not by the mmap module, which keeps a descriptor."""
    address = libc.mmap(None, REPORT_BYTES, PROT_READ_WRITE, MAP_SHARED, fd, 0)
    os.close(fd)
    if address == MAP_FAILED:
        raise OSError(ctypes.get_errno(), "mmap of the report")
    return int(address)


def write_report(area: int, started_ns: int, report: dict[str, Any]) -> None:
    data = json.dumps(report, ensure_ascii=False).encode("utf-8", "replace") if report else b""
    if len(data) > REPORT_BYTES - REPORT_HEAD.size:
        data = b""
    head = REPORT_HEAD.pack(started_ns, len(data))
    ctypes.memmove(area, head + data, len(head) + len(data))


def child(settings: Settings, lane: int, fds: list[int]) -> int:
    """The life of a forked child. Returns its exit status."""
    for fd, target in zip(fds, (JOB_FD, 1, 2, REPORT_FD), strict=True):
        os.dup2(fd, target)
    os.closerange(REPORT_FD + 1, 1 << 20)
    area = map_report(REPORT_FD)
    become_nobody(settings, lane)
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=JOB_FD)
    variables = fresh_main()
    gc.enable()
    first = True
    while True:
        job = read_job(channel)
        if job is None:
            return 0
        lasting = job.get("session") is not None
        if not lasting:
            channel.close()
        if job.get("stdin") or not first:  # else it is /dev/null already
            give_stdin(job.get("stdin", ""))
        first = False
        limit_cpu(job["timeout_s"])
        reseed(job["code"])
        started_ns = time.monotonic_ns()
        write_report(area, started_ns, {})
        status, report = run_cell(job["code"], variables)
        if not lasting:
            run_exit_handlers()
            write_report(area, started_ns, report)
            return status
        write_report(area, started_ns, report | {"exit_code": status})
        channel.send(b"done")


# --------------------------------------------------------------------------------- the zygote


class Zygote:
    """Forks children that start with these modules loaded; tells the front how they ended."""

    def __init__(self, settings: Settings, level: int, front: socket.socket) -> None:
        self.settings = settings
        self.level = level
        self.front = front
        self.lanes: dict[int, int] = {}  # pid to lane

    def warm(self) -> None:
        for module in self.settings.levels[self.level]:
            scope: dict[str, Any] = {}
            with contextlib.suppress(ImportError):
                exec(WARM_UP.get(module, f"import {module}"), scope)
        # Loaded once here instead of once a call: what nearly every child touches.
        import atexit  # noqa: F401
        import linecache  # noqa: F401
        import random  # noqa: F401
        import threading  # noqa: F401

        gc.collect()
        gc.freeze()
        gc.disable()

    def prepare(self) -> None:
        """Whatever can be done once for all children: a page touched here is not copied there."""
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        os.environ.clear()
        os.environ["PATH"] = "/usr/local/bin:/usr/bin:/bin"
        os.umask(0o077)
        set_limits(self.settings)
        sys.argv = [NAME]
        sys.stdin, sys.stdout, sys.stderr = open_input(), open_output(1), open_output(2)

    def run(self) -> None:
        self.warm()
        self.prepare()
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self.front, select.POLLIN)
        poll.register(wake, select.POLLIN)
        self.front.send(NEWS.pack(NEWS_FORKED, -1, os.getpid(), 0.0, 0.0, 0))
        while True:
            for fd, _ in poll.poll():
                if fd == wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake, 4096)
                    self.reap()
                elif not self.serve():
                    return

    def serve(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self.front, FORK.size, 4)
        except ConnectionResetError:
            return False
        if not data:
            return False
        (lane,) = FORK.unpack(data)
        try:
            pid = self.fork(lane, fds)
        except OSError as error:
            self.front.send(NEWS.pack(NEWS_FAILED, lane, error.errno or 0, 0.0, 0.0, 0))
        else:
            self.lanes[pid] = lane
            self.front.send(NEWS.pack(NEWS_FORKED, lane, pid, 0.0, 0.0, 0))
        for fd in fds:
            os.close(fd)
        return True

    def fork(self, lane: int, fds: list[int]) -> int:
        own_space = self.settings.kill_by == "pidns"
        if own_space and libc.unshare(CLONE_NEWPID) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                status = child(self.settings, lane, fds)
            except BaseException:  # a fault of ours, or the call's own exit path
                with contextlib.suppress(BaseException):
                    traceback.print_exc()
            finally:
                os._exit(status)
        if own_space:  # the next child needs a namespace beside this one, not inside it
            own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
            libc.setns(own, CLONE_NEWPID)
            os.close(own)
        return pid

    def reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            lane = self.lanes.pop(pid, None)
            if lane is not None:
                cpu_s = usage.ru_utime + usage.ru_stime
                news = NEWS.pack(
                    NEWS_EXITED, lane, status, cpu_s, time.monotonic(), usage.ru_maxrss
                )
                self.front.send(news)


# ---------------------------------------------------------------------------------- the front


class Output:
    """One stream of a child: the first and the last bytes, and how many there were."""

    def __init__(self, fd: int, keep: int) -> None:
        self.fd = fd
        self.half = max(1, keep // 2)
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self.half - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        if data:
            self.tail += data
            if len(self.tail) > 2 * self.half:  # trimmed seldom, so that adding stays cheap
                del self.tail[: -self.half]

    def take(self) -> tuple[str, int, bool]:
        """The text, the bytes written in all and whether some are left out; starts anew."""
        left_out = self.total - len(self.head) - min(len(self.tail), self.half)
        data, total = bytes(self.head), self.total
        if left_out > 0:
            data += b"\n... %d bytes left out ...\n" % left_out
        data += self.tail[-self.half :]
        self.head.clear()
        self.tail.clear()
        self.total = 0
        return data.decode("utf-8", "replace"), total, left_out > 0


class Call:
    """A job on its way through a child."""

    def __init__(self, frame: dict[str, Any], raw: bytes) -> None:
        self.id: int = frame["id"]
        self.code: str = frame["code"]
        self.timeout_s: float = frame["timeout_s"]
        self.session: int | None = frame.get("session")
        self.raw = raw
        self.started = 0.0
        self.verdict: str | None = None  # why we killed it, if we did


class Child:
    """A forked process and what the front holds of it."""

    def __init__(self, lane: int, level: int, keep: int) -> None:
        self.lane = lane
        self.level = level
        self.pid: int | None = None  # known once the zygote says so
        self.doomed = False
        self.channel, self.far_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        out, self.far_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        err, self.far_err = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(self.far_out, True)
        os.set_blocking(self.far_err, True)
        self.out, self.err = Output(out, keep), Output(err, keep)
        self.report_fd = os.memfd_create("report", os.MFD_CLOEXEC)
        os.ftruncate(self.report_fd, REPORT_BYTES)
        self.call: Call | None = None
        self.session: int | None = None
        self.cpu_before = 0.0

    def far_fds(self) -> list[int]:
        return [self.far_channel.fileno(), self.far_out, self.far_err, self.report_fd]

    def close_far(self) -> None:
        self.far_channel.close()
        os.close(self.far_out)
        os.close(self.far_err)

    def close(self) -> None:
        self.channel.close()
        for fd in (self.out.fd, self.err.fd, self.report_fd):
            os.close(fd)

    def send(self, call: Call) -> None:
        self.call = call
        if len(call.raw) <= INLINE_JOB:
            self.channel.send(call.raw)
            return
        fd = os.memfd_create("job", os.MFD_CLOEXEC)
        try:
            with open(os.dup(fd), "wb") as f:
                f.write(call.raw)
            self.channel.send(LARGE_JOB)
            socket.send_fds(self.channel, [LARGE_JOB], [fd])
        finally:
            os.close(fd)

    def report(self) -> tuple[int | None, dict[str, Any]]:
        """What the child says of itself. Read by copying: it can't shrink under us."""
        started_ns, size = REPORT_HEAD.unpack(os.pread(self.report_fd, REPORT_HEAD.size, 0))
        if not 0 < size <= REPORT_BYTES:
            return started_ns or None, {}
        try:
            given = json.loads(os.pread(self.report_fd, size, REPORT_HEAD.size))
        except (ValueError, RecursionError):
            return started_ns or None, {}
        return started_ns or None, given if isinstance(given, dict) else {}


def honest_error(given: Any) -> dict[str, Any] | None:
    """The child's own account of its error, held to the shape that the supervisor expects."""
    if not isinstance(given, dict):
        return None
    line = given.get("line")
    return {
        "type": clip(str(given.get("type")), 256),
        "message": clip(str(given.get("message")), 4096),
        "line": line if isinstance(line, int) and abs(line) < 2**31 else None,
        "traceback": clip(str(given.get("traceback")), MAX_TEXT + 256),
    }


class Front:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.epoll = select.epoll()
        self.handlers: dict[int, Callable[[int], None]] = {}
        self.free = deque(range(settings.num_lanes))
        self.children: dict[int, Child] = {}  # by lane
        self.ready: list[deque[Child]] = [deque() for _ in settings.levels]
        self.calls: dict[int, Child] = {}
        self.sessions: dict[int, Child] = {}
        self.queue: deque[Call] = deque()
        self.deadlines: list[tuple[float, int, Call]] = []
        self.serial = itertools.count()
        self.zygotes: list[socket.socket] = []
        self.zygote_pids: set[int] = set()
        self.cleaners: dict[int, int] = {}  # pid to lane
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.patterns = [
            re.compile("|".join(rf"\b{m}\b" for m in modules) or r"(?!)")
            for modules in settings.levels
        ]
        self.read_control, self.write_control = -1, -1
        self.oom_kills = count_oom_kills()
        self.top_up_at = 0.0  # when to fork again ahead of calls; 0: not needed

    # -- starting ---------------------------------------------------------------------------

    def connect(self) -> None:
        kind, _, where = self.settings.connect.partition(":")
        if kind == "fd":
            self.read_control = self.write_control = int(where)
        elif kind == "unix":
            link = socket.socket(socket.AF_UNIX)
            link.connect(where)
            self.read_control = self.write_control = link.detach()
        else:  # the container's own standard streams
            self.read_control, self.write_control = os.dup(0), os.dup(1)
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(null, 1)
            os.close(null)
        for fd in {self.read_control, self.write_control}:
            os.set_inheritable(fd, False)
            os.set_blocking(fd, False)

    def choose_kill(self) -> None:
        """How everything of a call dies: by its uid, with its pid namespace, or by tree walk."""
        settings = self.settings
        if settings.kill_by == "auto":
            by_uid = settings.uid_base is not None and has_cap(CAP_SETUID) and has_cap(CAP_SETGID)
            settings.kill_by = "uid" if by_uid else "tree"
        if settings.kill_by == "uid":
            settings.uid_base = fit_uid_base(settings.uid_base or 0, settings.num_lanes)
        if settings.kill_by == "tree":
            prctl(PR_SET_CHILD_SUBREAPER, 1)

    def start(self) -> None:
        os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        prctl(PR_SET_DUMPABLE, 0)
        self.choose_kill()
        for lane in range(self.settings.num_lanes):
            with self.as_lane(lane):
                os.mkdir(self.settings.lane_dir(lane), 0o700)
        if self.settings.kill_by == "uid":
            os.chmod(self.settings.scratch, 0o711)  # calls see their own directory only
        self.start_zygotes()
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        self.watch(wake, self.on_sigchld)
        self.watch(self.read_control, self.on_control)
        self.top_up()
        self.send(
            {
                "op": "ready",
                "pid": os.getpid(),
                "python": sys.version.split()[0],
                "kill_by": self.settings.kill_by,
                "layers": self.settings.layers,
            }
        )

    def start_zygotes(self) -> None:
        waiting = []
        for level in range(len(self.settings.levels)):
            near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                try:
                    near.close()
                    self.forget()
                    Zygote(self.settings, level, keep_low_fds(far)).run()
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            far.close()
            self.zygotes.append(near)
            self.zygote_pids.add(pid)
            waiting.append(near)
        for near in waiting:  # warming: seconds where modules are large
            if not near.recv(NEWS.size):
                raise RuntimeError("a zygote died while it loaded its modules")
            near.setblocking(False)
            self.watch(near.fileno(), self.on_news)

    def forget(self) -> None:
        """In a zygote: none of the front's descriptors."""
        self.epoll.close()
        for fd in {self.read_control, self.write_control}:
            os.close(fd)
        for near in self.zygotes:
            near.close()

    @contextlib.contextmanager
    def as_lane(self, lane: int) -> Iterator[None]:
        """Act as the lane's uid, with 0 saved; as pid 1 we are deaf to the lane's signals."""
        if self.settings.kill_by != "uid":
            yield
            return
        uid = self.settings.lane_uid(lane)
        os.setresuid(uid, uid, 0)
        try:
            yield
        finally:
            os.setresuid(0, 0, 0)

    # -- the loop ---------------------------------------------------------------------------

    def watch(self, fd: int, handler: Callable[[int], None]) -> None:
        self.handlers[fd] = handler
        self.epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        if self.handlers.pop(fd, None) is not None:
            self.epoll.unregister(fd)

    def run(self) -> None:
        while True:
            for fd, _ in self.epoll.poll(self.next_deadline()):
                handler = self.handlers.get(fd)
                if handler is not None:  # else closed by an earlier event of this round
                    handler(fd)
            self.check_deadlines()
            self.start_queued()

    def next_deadline(self) -> float:
        first = self.deadlines[0][0] if self.deadlines else math.inf
        first = min(first, self.top_up_at or math.inf)
        return min(60.0, max(0.0, first - time.monotonic()))

    def check_deadlines(self) -> None:
        now = time.monotonic()
        if 0 < self.top_up_at <= now:
            self.top_up()
        while self.deadlines and self.deadlines[0][0] <= now:
            call = heapq.heappop(self.deadlines)[2]
            child = self.calls.get(call.id)
            if child is None or child.call is not call:
                continue
            if call.session is not None and call.verdict is None and child.pid:
                self.interrupt(child, call)
            else:
                self.condemn(child, "timeout")

    def interrupt(self, child: Child, call: Call) -> None:
        """A cell out of time gets a KeyboardInterrupt first: obeyed, its session lives on."""
        call.verdict = "timeout"
        heapq.heappush(self.deadlines, (time.monotonic() + 0.5, next(self.serial), call))
        with contextlib.suppress(OSError):
            os.kill(child.pid or 0, signal.SIGINT)

    # -- the supervisor's connection --------------------------------------------------------

    def on_control(self, fd: int) -> None:
        try:
            data = os.read(fd, 1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # the supervisor is gone, and so are we, with everything below us
            self.shut_down()
        self.inbox += data
        while len(self.inbox) >= HEADER.size:
            (size,) = HEADER.unpack_from(self.inbox)
            end = HEADER.size + size
            if len(self.inbox) < end:
                return
            raw = bytes(self.inbox[HEADER.size : end])
            del self.inbox[:end]
            self.on_frame(raw)

    def on_frame(self, raw: bytes) -> None:
        frame = json.loads(raw)
        match frame["op"]:
            case "run":
                self.queue.append(Call(frame, raw))
                self.start_queued()
            case "kill":
                self.cancel(frame["id"])
            case "close":
                session = self.sessions.pop(frame["session"], None)
                if session is not None:
                    self.condemn(session, "cancelled")

    def send(self, frame: dict[str, Any]) -> None:
        data = json.dumps(frame, ensure_ascii=False).encode("utf-8", "replace")
        self.outbox += HEADER.pack(len(data)) + data
        while self.outbox:
            try:
                sent = os.write(self.write_control, self.outbox)
            except BlockingIOError:  # the supervisor reads slowly: so do we, until it has
                select.select([], [self.write_control], [])
            except OSError:
                self.shut_down()
            else:
                del self.outbox[:sent]

    def shut_down(self) -> None:
        for lane, child in list(self.children.items()):
            self.kill(child)
            with contextlib.suppress(OSError), self.as_lane(lane):
                remove_below(self.settings.lane_dir(lane))
        if self.settings.kill_by == "tree":
            self.kill_strays()
        os._exit(0)

    # -- calls ------------------------------------------------------------------------------

    def level_for(self, code: str) -> int:
        """The richest zygote whose modules the code names; the bare one for the rest."""
        for level in range(len(self.patterns) - 1, 0, -1):
            *_, last = self.settings.levels[level]
            if re.search(rf"\b{last}\b", code):
                return level
        return 0

    def start_queued(self) -> None:
        while self.queue:
            call = self.queue[0]
            child = self.child_for(call)
            if child is None:
                return
            self.queue.popleft()
            self.begin(child, call)

    def child_for(self, call: Call) -> Child | None:
        if call.session is not None and call.session in self.sessions:
            return self.sessions[call.session]
        level = len(self.settings.levels) - 1 if call.session is not None else None
        if level is None:
            level = self.level_for(call.code)
        if self.ready[level]:
            return self.ready[level].popleft()
        return self.spawn(level)

    def begin(self, child: Child, call: Call) -> None:
        if call.session is not None:
            child.session = call.session
            self.sessions[call.session] = child
            if child.channel.fileno() not in self.handlers:
                self.watch(child.channel.fileno(), lambda _: self.on_cell_done(child))
        call.started = time.monotonic()
        self.calls[call.id] = child
        deadline = call.started + call.timeout_s
        heapq.heappush(self.deadlines, (deadline, next(self.serial), call))
        try:
            child.send(call)
        except OSError as error:  # it died while it waited
            call.verdict = "sandbox_error"
            child.doomed = True
            if error.errno == errno.EMSGSIZE:
                self.kill(child)
        # The next fork waits: at once it would take the processor from the call just sent.
        self.top_up_at = self.top_up_at or call.started + TOP_UP_DELAY_S

    def top_up(self) -> None:
        """Fork ahead of the calls to come."""
        self.top_up_at = 0.0
        for level, ready in enumerate(self.ready):
            while len(ready) < self.settings.ready:
                child = self.spawn(level)
                if child is None:
                    return
                ready.append(child)

    def spawn(self, level: int) -> Child | None:
        if not self.free:
            return None
        lane = self.free.popleft()
        child = Child(lane, level, self.settings.keep_bytes)
        self.children[lane] = child
        socket.send_fds(self.zygotes[level], [FORK.pack(lane)], child.far_fds())
        child.close_far()
        self.watch(child.out.fd, lambda _: self.on_output(child, child.out))
        self.watch(child.err.fd, lambda _: self.on_output(child, child.err))
        return child

    def on_output(self, child: Child, output: Output) -> None:
        try:
            data = os.read(output.fd, PIPE_CHUNK)
        except BlockingIOError:
            return
        if not data:
            self.unwatch(output.fd)
            return
        output.add(data)
        if child.out.total + child.err.total > self.settings.max_output_bytes:
            self.condemn(child, "output_limit")

    def drain(self, child: Child) -> None:
        for output in (child.out, child.err):
            for _ in range(32):  # a bound: a stray writer must not hold us here
                try:
                    data = os.read(output.fd, PIPE_CHUNK)
                except BlockingIOError:
                    break
                if not data:
                    break
                output.add(data)

    def cancel(self, call_id: int) -> None:
        for call in self.queue:
            if call.id == call_id:
                self.queue.remove(call)
                self.answer_unstarted(call, "cancelled")
                return
        child = self.calls.get(call_id)
        if child is not None:
            self.condemn(child, "cancelled")

    def condemn(self, child: Child, verdict: str) -> None:
        """Kill a child for a reason; its answer follows when the zygote tells of its end."""
        if child.call is not None and child.call.verdict is None:
            child.call.verdict = verdict
        child.doomed = True
        self.kill(child)

    def kill(self, child: Child) -> None:
        kill_by = self.settings.kill_by
        if kill_by == "uid":
            self.kill_uid(child.lane)
        elif child.pid is not None:
            with contextlib.suppress(OSError):  # its whole group at one stroke, where it stayed
                os.killpg(child.pid, signal.SIGKILL)
            victims = descendants(child.pid) if kill_by == "tree" else []
            for pid in [child.pid, *victims]:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def kill_uid(self, lane: int) -> None:
        """Kill all that runs as the lane's uid, at one stroke: no fork bomb outruns it."""
        if os.getpid() == 1:
            with self.as_lane(lane), contextlib.suppress(OSError):
                os.kill(-1, signal.SIGKILL)
            return
        pid = os.fork()  # the lane could strike back at us, not being pid 1
        if pid:
            os.waitpid(pid, 0)
            return
        uid = self.settings.lane_uid(lane)
        with contextlib.suppress(OSError):
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        os._exit(0)

    def kill_strays(self) -> None:
        """Tree walk only: whatever was orphaned has become our child, and is none of ours."""
        for _ in range(64):
            strays = children_of(os.getpid()) - self.zygote_pids - set(self.cleaners)
            if not strays:
                return
            for pid in strays:
                for victim in [pid, *descendants(pid)]:
                    with contextlib.suppress(OSError):
                        os.kill(victim, signal.SIGKILL)
            with contextlib.suppress(OSError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass

    # -- news of children -------------------------------------------------------------------

    def on_news(self, fd: int) -> None:
        zygote = next(z for z in self.zygotes if z.fileno() == fd)
        while True:
            try:
                data = zygote.recv(NEWS.size)
            except BlockingIOError:
                return
            if not data:  # the supervisor replaces the whole worker: simpler than half of one
                self.shut_down()
            kind, lane, value, cpu_s, _, max_rss = NEWS.unpack(data)
            child = self.children[lane]
            if kind == NEWS_FORKED:
                child.pid = value
                if child.doomed:
                    self.kill(child)
            elif kind == NEWS_EXITED:
                self.on_exit(child, value, cpu_s, max_rss)
            else:
                self.on_fork_failed(child, value)

    def on_exit(self, child: Child, status: int, cpu_s: float, max_rss: int) -> None:
        ended = time.monotonic()
        if self.settings.kill_by == "uid":
            self.kill(child)
        elif self.settings.kill_by == "tree":
            self.kill_strays()
        self.drain(child)
        if child.call is not None:
            self.answer(child, ended, status, cpu_s, max_rss)
        elif child in self.ready[child.level]:
            self.ready[child.level].remove(child)
        self.discard(child)

    def on_fork_failed(self, child: Child, code: int) -> None:
        call = child.call
        if call is not None:
            self.calls.pop(call.id, None)
            self.answer_unstarted(call, "sandbox_error", f"fork: {os.strerror(code)}")
        elif child in self.ready[child.level]:
            self.ready[child.level].remove(child)
        self.discard(child)

    def on_cell_done(self, child: Child) -> None:
        try:
            said = child.channel.recv(64)
        except OSError:
            said = b""
        if not said:
            self.unwatch(child.channel.fileno())
            return
        if child.call is not None and not child.doomed:
            self.drain(child)
            self.answer(child, time.monotonic(), None, 0.0, 0)

    def discard(self, child: Child) -> None:
        for fd in (child.out.fd, child.err.fd, child.channel.fileno()):
            self.unwatch(fd)
        child.close()
        del self.children[child.lane]
        if child.session is not None:
            self.sessions.pop(child.session, None)
            self.send({"op": "session_lost", "session": child.session})
        self.clean(child.lane)

    def answer(
        self, child: Child, ended: float, status: int | None, cpu_s: float, max_rss: int
    ) -> None:
        """The one frame that a call gets. `status` is None for a cell whose process lives on."""
        call = child.call
        assert call is not None
        child.call = None
        del self.calls[call.id]
        started_ns, said = child.report()
        stdout, stdout_bytes, stdout_cut = child.out.take()
        stderr, stderr_bytes, stderr_cut = child.err.take()
        exit_code, signum = split_status(status, said)
        error = honest_error(said.get("error"))
        result = said.get("result")
        self.send(
            {
                "op": "done",
                "id": call.id,
                "status": self.judge(call, exit_code, signum, error),
                "exit_code": exit_code,
                "signal": signum,
                "stdout": stdout,
                "stderr": stderr,
                "result": clip(result, MAX_TEXT + 256) if isinstance(result, str) else None,
                "error": error,
                "stdout_bytes": stdout_bytes,
                "stderr_bytes": stderr_bytes,
                "truncated": stdout_cut or stderr_cut,
                "run_s": ended - call.started,
                "cpu_s": cpu_s,
                "max_rss": max_rss * 1024,
                "started_ns": started_ns,
            }
        )

    def answer_unstarted(self, call: Call, status: str, why: str = "") -> None:
        self.send({"op": "done", "id": call.id, "status": status, "why": why})

    def judge(
        self, call: Call, exit_code: int | None, signum: int | None, error: dict[str, Any] | None
    ) -> str:
        if call.verdict is None and exit_code == 0:
            return "ok"
        # Counted at every bad end, so that a kill of an earlier call isn't taken for this one's.
        before, self.oom_kills = self.oom_kills, count_oom_kills()
        if call.verdict is not None:
            return call.verdict
        if signum == signal.SIGXCPU:
            return "timeout"
        if signum == signal.SIGKILL and self.oom_kills > before:
            return "oom"
        if signum is not None:
            return "killed"
        return "oom" if error and error["type"] == "MemoryError" else "error"

    # -- cleaning ---------------------------------------------------------------------------

    def clean(self, lane: int) -> None:
        """Free the lane, after a helper has emptied its directory if anything was left there."""
        path = self.settings.lane_dir(lane)
        try:
            with self.as_lane(lane), os.scandir(path) as entries:
                dirty = next(entries, None) is not None
        except OSError:  # the call took its own access away
            dirty = True
        if not dirty:
            self.free.append(lane)
            return
        pid = os.fork()
        if pid:
            self.cleaners[pid] = lane
            return
        try:
            if self.settings.kill_by == "uid":
                uid = self.settings.lane_uid(lane)
                os.setresuid(uid, uid, uid)
            os.chmod(path, 0o700)
            remove_below(path)
        finally:
            os._exit(0)

    def on_sigchld(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(fd, 4096)
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            lane = self.cleaners.pop(pid, None)
            if lane is not None:
                self.free.append(lane)
                self.start_queued()


def keep_low_fds(far: socket.socket) -> socket.socket:
    """Occupy the numbers that a child uses, so that what a zygote receives lies above them."""
    moved = socket.socket(fileno=fcntl.fcntl(far, fcntl.F_DUPFD_CLOEXEC, REPORT_FD + 1))
    far.close()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (JOB_FD, REPORT_FD):
        if fd != null:
            os.dup2(null, fd, inheritable=False)
    return moved


def split_status(status: int | None, said: dict[str, Any]) -> tuple[int | None, int | None]:
    if status is None:  # a living session: its own word, about itself alone
        code = said.get("exit_code")
        return (code if isinstance(code, int) and 0 <= code < 256 else 1), None
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.waitstatus_to_exitcode(status), None


def count_oom_kills() -> int:
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        with contextlib.suppress(OSError), open(path) as f:
            for line in f:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def fit_uid_base(wanted: int, count: int) -> int:
    """`wanted`, or a base inside what this user namespace maps (a remapped engine)."""
    with open("/proc/self/uid_map") as f:
        ranges = [tuple(map(int, line.split())) for line in f]
    if any(inside <= wanted and wanted + count <= inside + size for inside, _, size in ranges):
        return wanted
    inside, _, size = max(ranges, key=lambda r: r[2])
    return inside + 1000 + wanted % max(1, size - 1000 - count)


def remove_below(path: str) -> None:
    """Empty a directory without following a link, whatever modes its owner set."""
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                open_up(entry.path)
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)


def open_up(path: str) -> None:
    with contextlib.suppress(OSError):
        os.chmod(path, stat.S_IRWXU)
    for root, dirs, _ in os.walk(path):
        for name in dirs:
            below = f"{root}/{name}"
            if not os.path.islink(below):
                with contextlib.suppress(OSError):
                    os.chmod(below, stat.S_IRWXU)


def parents() -> dict[int, int]:
    found: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with (
                contextlib.suppress(OSError, IndexError, ValueError),
                open(f"/proc/{name}/stat") as f,
            ):
                found[int(name)] = int(f.read().rpartition(")")[2].split()[1])
    return found


def count_own_processes() -> int:
    """Processes and threads of this uid on the host, as RLIMIT_NPROC counts them."""
    num = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                num += len(os.listdir(f"/proc/{name}/task"))
    return num


def children_of(pid: int) -> set[int]:
    return {child for child, parent in parents().items() if parent == pid}


def descendants(pid: int) -> list[int]:
    above = parents()
    found = [pid]
    for at in found:
        found.extend(child for child, parent in above.items() if parent == at)
    return found[1:]


def main() -> None:
    front = Front(Settings(json.loads(sys.argv[1])))
    front.connect()
    try:
        front.start()
        front.run()
    except BaseException as error:
        with contextlib.suppress(BaseException):
            front.send({"op": "fatal", "why": "".join(traceback.format_exception(error))})
        os._exit(70)


if __name__ == "__main__":
    main()
