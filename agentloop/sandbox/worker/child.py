"""A forked child: it gives up what the zygote may do, waits for a job and runs it.

What runs here for every call is written for few page faults: no context managers, no objects made
that the zygote could have made.
"""

from __future__ import annotations

import ast
import errno
import gc
import io
import json
import linecache
import mmap
import os
import re
import resource
import signal
import socket
import sys
import time
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from agentloop.sandbox.worker import kernel, landlock, wire
from agentloop.sandbox.worker.kernel import prctl
from agentloop.sandbox.worker.spec import Spec
from agentloop.sandbox.worker.wire import (
    DONE_FD,
    JOB_FD,
    REPORT_FD,
    REPORT_SIZE,
    STARTED,
    Job,
    clip,
)

NAME = "<call>"
HARD_CPU_S = resource.getrlimit(resource.RLIMIT_CPU)[1]
MAPPED_BYTES = 0  # of address space, by the zygote, which sets this
HARD_BYTES = 0  # the most address space that a call may have, likewise
CALL_OOM_SCORE = 1000
REPORT_HEADROOM_BYTES = 8 << 20  # of address space, to report a MemoryError

# What `fork` would have run in every child (modules register it as they are loaded); see warm.py.
fork_hooks: list[dict[str, Callable[[], object]]] = []
# What the program does at a signal.
Handler: TypeAlias = "Callable[[int, types.FrameType | None], object] | int | signal.Handlers"


def be_child(spec: Spec, fds: Sequence[int]) -> int:
    """The life of a forked child. Returns its exit status."""
    for fd, target in zip(fds, (JOB_FD, 1, 2, DONE_FD, REPORT_FD), strict=True):
        os.dup2(fd, target)
    area = mmap.mmap(REPORT_FD, wire.REPORT_BYTES)
    if spec.kill_by != "uid":
        drop_privileges(spec)
    variables: dict[str, object] = sys.modules["__main__"].__dict__
    gc.enable()
    pid = os.getpid()
    interrupt: Handler = signal.default_int_handler  # at SIGINT
    num_cells = 0
    while True:
        data = os.read(JOB_FD, wire.INLINE_JOB)
        if not data:  # the server has closed the channel
            return 0
        if not num_cells and spec.kill_by == "uid":
            # Not earlier: the call before it has the same uid, and could reach this process.
            drop_privileges(spec)
        job, stdin = unpack_message(data)
        if not num_cells:
            os.write(JOB_FD, STARTED.pack(time.monotonic_ns()))
            if job.lasting:
                kernel.shut_for_writing(JOB_FD)
            else:
                os.closerange(JOB_FD, REPORT_FD)
        if stdin is not None or num_cells:  # else it is /dev/null already
            give_stdin(stdin)
        limit_cpu(job.timeout_s, first=not num_cells)
        if not job.native:
            limit_memory(job.memory_bytes, job.lasting)
        else:  # node, for one, maps far more than it uses
            lift_memory_limit()
        if not num_cells and (job.lasting or NEEDS_SEED.search(job.code)):
            seed_generators()
        if "fork" in job.code or "process" in job.code:
            register_fork_hooks()
        num_cells += 1
        if job.lasting:
            status, report, interrupt = run_lasting_cell(
                job.code, variables, f"<cell {num_cells}>", area, interrupt
            )
        else:
            status, report = run_cell(job.code, variables, NAME)
        if not job.lasting or os.getpid() != pid:  # a fork that came back ends here, unheard
            finish_threads()
            finish_variables(variables, job.code)
            if report and os.getpid() == pid:
                write_report(area, report)
            return status
        write_report(area, {**report, "exit_code": status})
        os.eventfd_write(DONE_FD, 1)


def drop_privileges(spec: Spec) -> None:
    """Drop everything the zygote may do; from here on the process is worth no more than its uid."""
    kernel.set_oom_score(CALL_OOM_SCORE)
    max_processes = spec.processes
    if spec.kill_by == "uid":
        uid = spec.call_uid
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        prctl(kernel.PR_SET_DUMPABLE, 1)
    else:  # one uid for all: the limit may count the others too
        if not spec.counts_apart:
            max_processes += spec.others
        if spec.view:
            kernel.own_view(spec.home, spec.view)
        else:
            kernel.drop_bounds()
            kernel.drop_caps()
        prctl(kernel.PR_SET_DUMPABLE, 0)  # closes /proc/<pid> to others, as another uid does
    if not spec.own_pids:
        prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of uid, which resets it
    if not spec.limits_processes:
        resource.setrlimit(resource.RLIMIT_NPROC, (max_processes, max_processes))
    os.setsid()  # a signal to its own process group stays inside
    os.chdir(spec.home)
    if spec.ruleset is not None:
        landlock.restrict_self(spec.ruleset)
    os.closerange(REPORT_FD, 1 << 20)  # the copy that belongs to the report's mapping, too


def unpack_message(data: bytes) -> tuple[Job, int | None]:
    """Return the job of a message, and a file with its standard input: no pipe to fill, nobody to
    wait for."""
    if len(data) != wire.FILE_JOB.size:
        job = wire.unpack_job(data)
        return job, keep_in_file(job.stdin) if job.stdin else None
    (num_stdin,) = wire.FILE_JOB.unpack(data)
    with socket.socket(fileno=os.dup(JOB_FD)) as channel:
        _, (fd,), _, _ = socket.recv_fds(channel, 1, 1)
    job = wire.unpack_job(os.pread(fd, os.fstat(fd).st_size, num_stdin))
    if not num_stdin:
        os.close(fd)
        return job, None
    os.ftruncate(fd, num_stdin)
    os.lseek(fd, 0, os.SEEK_SET)
    return job, fd


def keep_in_file(data: bytes) -> int:
    """Return a file without a name in the call's directory, which is still empty."""
    try:
        fd = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError:  # not every file system has files without a name
        fd = os.open("stdin", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        os.unlink("stdin")
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def give_stdin(file: int | None) -> None:
    fd = os.open(os.devnull, os.O_RDONLY) if file is None else file
    os.dup2(fd, 0)
    os.close(fd)
    sys.stdin = sys.__stdin__ = open_input()  # type: ignore[misc]


def open_input() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8", "replace")


class WholeWriter(io.FileIO):
    """Straight to the pipe, so that what was printed before a kill is kept; and all of it, where
    a raw file may write a part."""

    def write(self, data: Any) -> int:
        unwritten = memoryview(data).cast("B")
        size = len(unwritten)
        while unwritten:
            num_written = super().write(unwritten)
            if num_written is None:  # the call has made its own end non-blocking
                raise BlockingIOError(errno.EAGAIN, "the pipe is full", size - len(unwritten))
            unwritten = unwritten[num_written:]
        return size

    def seekable(self) -> bool:
        return False


def open_output(fd: int) -> io.TextIOWrapper:
    raw: Any = WholeWriter(fd, "w", closefd=False)
    return io.TextIOWrapper(raw, "utf-8", "replace", newline="\n", write_through=True)


def limit_cpu(timeout_s: float, first: bool) -> None:
    """A second line behind the wall clock, renewed for each cell of a session."""
    spent = 0.0 if first else time.process_time()
    set_limit(resource.RLIMIT_CPU, int(spent + timeout_s) + 2, HARD_CPU_S)


def limit_memory(num_bytes: int, lasting: bool) -> None:
    """Bound the address space, so that what one process allocates ends in a MemoryError. The
    cgroup bounds what the processes of a call hold together."""
    soft = MAPPED_BYTES + num_bytes
    hard = HARD_BYTES
    if not lasting:
        hard = min(soft + REPORT_HEADROOM_BYTES, hard)
    elif (left := resource.getrlimit(resource.RLIMIT_AS)[1]) != resource.RLIM_INFINITY:
        hard = min(left, hard)  # a later cell may have more, up to what its session has left
    set_limit(resource.RLIMIT_AS, min(soft, hard), hard)


def lift_memory_limit() -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    set_limit(resource.RLIMIT_AS, hard, hard)


def set_limit(which: int, soft: int, hard: int) -> None:
    try:
        resource.setrlimit(which, (soft, hard))
    except (ValueError, OSError):  # an earlier cell set a limit of its own
        pass


# A program without any of these imports no module, and so uses no generator that the zygote seeded.
NEEDS_SEED = re.compile("import|exec|eval")


def seed_generators() -> None:
    """Seed the generators that the zygote has loaded: they would else repeat in every call."""
    sys.modules["random"].seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "sympy.core.random" in sys.modules:
        sys.modules["sympy.core.random"].rng.seed()


def register_fork_hooks() -> None:
    """Register the modules' fork hooks for the call's own forks."""
    while fork_hooks:
        os.register_at_fork(**fork_hooks.pop(0))


def split_lines(code: str) -> list[str]:
    """Return the lines as Python counts them: str.splitlines would also end one at a form feed or a
    U+2028, say."""
    return io.StringIO(code, newline=None).readlines()


def is_quiet(code: str, last: ast.Expr) -> bool:
    """Return whether a semicolon follows the last expression, as in a notebook that shall not show
    its value."""
    if ";" not in code or last.end_lineno is None:
        return False
    first, *rest = split_lines(code)[last.end_lineno - 1 :]
    rest.insert(0, first.encode()[last.end_col_offset :].decode())
    # What follows an expression holds no strings: nothing but blanks, parentheses and comments.
    return "".join(line.partition("#")[0] for line in rest).rstrip().endswith(";")


def compile_cell(code: str, name: str) -> tuple[types.CodeType, types.CodeType | None]:
    """The statements, and the last expression by itself if the code ends in one that is shown."""
    try:
        tree = compile(code, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
        assert isinstance(tree, ast.Module)
        last = tree.body[-1] if tree.body else None
        if not isinstance(last, ast.Expr) or is_quiet(code, last):
            return compile(tree, name, "exec", dont_inherit=True), None
        del tree.body[-1]
        body = compile(tree, name, "exec", dont_inherit=True)
        return body, compile(ast.Expression(last.value), name, "eval", dont_inherit=True)
    except RecursionError:  # a tree of Python objects may be less deep than the parser's own
        return compile(code, name, "exec", dont_inherit=True), None


def run_lasting_cell(
    code: str, variables: dict[str, object], name: str, area: mmap.mmap, interrupt: Handler
) -> tuple[int, dict[str, object], Handler]:
    """Run a cell of a session with `interrupt` as the handler of SIGINT. Returns what run_cell
    does, and the handler that the cell leaves behind.

    An interrupt is for one cell alone: one that comes late, between two cells, is ignored.
    """
    try:
        signal.signal(signal.SIGINT, interrupt)
        REPORT_SIZE.pack_into(area, STARTED.size, 0)
        STARTED.pack_into(area, 0, time.monotonic_ns())  # from here on the server may interrupt
        status, report = run_cell(code, variables, name)
        return status, report, ignore_interrupts()
    except KeyboardInterrupt:  # as the cell ended
        return 1, {}, ignore_interrupts()


def ignore_interrupts() -> Handler:
    """Ignore SIGINT; return the handler that was set."""
    handler = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # None: it was not set from Python, and can't be set again.
    return signal.default_int_handler if handler is None else handler


def run_cell(code: str, variables: dict[str, object], name: str) -> tuple[int, dict[str, object]]:
    """Run the code; the exit status that a script would have, and what to report."""
    report: dict[str, object] = {}
    code = code.removeprefix("\ufeff")
    # For tracebacks and `inspect`, which would else look for a file of this name. Under a line that
    # does not end with a newline, a traceback's markers would be shifted.
    linecache.cache[name] = (len(code), None, split_lines(f"{code}\n"), name)
    variables["__file__"] = name
    try:
        body, last = compile_cell(code, name)
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
        if isinstance(error, MemoryError):
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        shown = show_error(error)
        report = {"error": shown}
        try:
            sys.stderr.write(str(shown["traceback"]))
        except Exception:  # its own descriptors, to close as it likes
            pass
        return 1, report


def exit_code_of(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF if abs(stop.code) < 1 << 63 else 255
    if sys.stderr is not None:
        print(stop.code, file=sys.stderr)
    return 1


def is_of_call(filename: str) -> bool:
    return filename == NAME or filename.startswith("<cell ")


def show_error(error: BaseException) -> dict[str, object]:
    """The traceback as the author of the code would see it: no frame of ours."""
    trace = error.__traceback__
    while trace is not None and not is_of_call(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    line = trace.tb_lineno if trace else getattr(error, "lineno", None)
    try:
        text = "".join(traceback.format_exception(type(error), error, trace))
        message = str(error)
    except BaseException as second:  # __str__ of the call's own exceptions may do anything
        text, message = f"{type(error).__name__}\n", f"(unprintable: {type(second).__name__})"
    for frame, number in traceback.walk_tb(trace):
        line = number if is_of_call(frame.f_code.co_filename) else line
    return {
        "type": type(error).__name__,
        "message": clip(message, 4096),
        "line": line if isinstance(line, int) else None,
        "traceback": clip(text),
    }


def finish_threads() -> None:
    """Join threads and call exit handlers, as an interpreter does when it ends."""
    import atexit
    import threading

    try:
        if threading.active_count() > 1 or threading._threading_atexits:  # type: ignore[attr-defined]
            threading._shutdown()  # type: ignore[attr-defined]
    except BaseException:
        pass
    try:
        if atexit._ncallbacks():
            atexit._run_exitfuncs()
    except BaseException:
        pass


def finish_variables(variables: dict[str, object], code: str) -> None:
    """Let go of the program's objects as an interpreter does at its end: files are written out,
    finalizers run."""
    try:
        for private in (True, False):
            for name in list(variables):
                if name != "__builtins__" and (name[:1] == "_" and name[1:2] != "_") is private:
                    variables[name] = None
        if LINGERS.search(code):
            gc.collect()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except BaseException:
        pass


# What may need the collector to end: it costs more than a small call.
LINGERS = re.compile("open|__del__|weakref|yield|Wrapper|Writer|async")


def write_report(area: mmap.mmap, report: dict[str, object]) -> None:
    data = json.dumps(report, ensure_ascii=False).encode("utf-8", "replace")
    if len(data) <= wire.REPORT_BYTES - wire.REPORT_START:
        area[wire.REPORT_START : wire.REPORT_START + len(data)] = data
        REPORT_SIZE.pack_into(area, STARTED.size, len(data))
