"""The worker's server: pid 1 of its container, the only process that speaks with the supervisor.

    run ──> a child forked ahead gets the job ──> its process ends, or is killed for a reason
                 ▲                                        │ done
                 └── the directory is empty <── all that is left of the call is killed

It runs one call at a time, or holds one session. So what the kernel counts for the worker's cgroup
meanwhile is that call's.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import re
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from agentloop.sandbox.worker.connection import Connection, WorkerFrame
from agentloop.sandbox.worker.counters import CgroupCounters, open_counters
from agentloop.sandbox.worker.forked import Call, Forked, Output, checked_error, split_status
from agentloop.sandbox.worker.kernel import PR_SET_DUMPABLE, prctl, reserve_heap
from agentloop.sandbox.worker.spec import Spec
from agentloop.sandbox.worker.wire import FORK, MAX_TEXT, NEWS, NEWS_EXITED, NEWS_FORKED, clip
from agentloop.sandbox.worker.workspace import Workspace
from agentloop.sandbox.worker.zygote import be_zygote, keep_low_fds

FORK_DELAY_S = 0.002
INTERRUPT_GRACE_S = 2.0  # for a cell to end after an interrupt, on a machine that is busy
START_S = 2.0  # for a program to begin, on such a machine; from then on its time counts
START_CHECK_S = 0.05  # between looks whether it has begun
COUNTER_CHECK_S = 0.25  # between looks at the counters of a call that runs for longer
REST_CHECK_S = 1.0  # the same for a session that rests
MAX_REST_CPU_S = 1.0  # processor time of a session that is stopped: it has itself sent SIGCONT
WORN_BYTES = 64 << 20  # of memory that stays when no call runs
# Who a session is lost by, by why its process was killed. Otherwise its program.
LOST_BY = {"cancelled": "caller", "sandbox_error": "infrastructure"}


class WorkerServer:
    def __init__(self, spec: Spec, supervisor: Connection) -> None:
        self.spec = spec
        self.supervisor = supervisor
        self.workspace = Workspace(spec)
        fds = open_counters() if spec.counters is None else spec.counters
        self.counters = CgroupCounters(fds)
        # Not epoll: its watches are counted per user, and a call could use them up.
        self.poll = select.poll()
        self.handlers: dict[int, Callable[[int], None]] = {}  # called with the events
        self.children: dict[int, Forked] = {}  # by number: the current one, and those forked ahead
        self.numbers = itertools.count()
        self.ahead: list[Forked | None] = [None for _ in spec.levels]  # wait for a job, by level
        self.current: Forked | None = None  # runs a call, or holds the session
        self.queue: deque[Call] = deque()  # what has come while the workspace is cleaned
        self.zygotes: list[socket.socket] = []
        # By level: the last of its modules, as code would name it.
        self.names = [re.compile(rf"\b{m[-1]}\b" if m else "") for m in spec.levels]
        self.deadline = math.inf  # when to look at the current call's time
        self.check_at = math.inf  # when to look at the counters
        self.fork_at = math.inf  # when to fork again ahead of calls
        self.is_resting = False  # a session is, between two cells

    # -- starting ---------------------------------------------------------------------------

    def start(self) -> None:
        os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        prctl(PR_SET_DUMPABLE, 0)
        # Descriptors in flight are counted per user, and may be as many as the sender's limit:
        # calls of this user must not keep us from sending some.
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.workspace.make()
        self.start_zygotes()
        reserve_heap()
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        self.watch(wake, lambda _: self.on_sigchld(wake))
        self.watch(self.supervisor.read_fd, self.on_frames)
        self.fork_ahead()
        self.own_bytes = self.counters.kept_bytes()
        self.send(
            {
                "op": "ready",
                "pid": os.getpid(),
                "python": sys.version.split()[0],
                "own_bytes": self.own_bytes,
                "layers": self.spec.layers,
            }
        )

    def start_zygotes(self) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in self.spec.levels]
        pid = os.fork()
        if pid == 0:
            try:
                for fd in self.supervisor.fds:
                    os.close(fd)
                for near, _ in pairs:
                    near.close()
                be_zygote(self.spec, 0, keep_low_fds([far for _, far in pairs]))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        self.workspace.zygote = pid
        for near, far in pairs:
            far.close()
            self.zygotes.append(near)
        for near in self.zygotes:  # warming: seconds where modules are large
            if not near.recv(NEWS.size):
                raise RuntimeError("a zygote died while it loaded its modules")
            near.setblocking(False)
            self.watch(near.fileno(), lambda _, near=near: self.on_news(near))  # type: ignore[misc]

    # -- the loop ---------------------------------------------------------------------------

    def watch(self, fd: int, handler: Callable[[int], None]) -> None:
        self.handlers[fd] = handler
        self.poll.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        if self.handlers.pop(fd, None) is not None:
            self.poll.unregister(fd)

    def run(self) -> None:
        while True:
            wait_s = min(self.deadline, self.check_at, self.fork_at) - time.monotonic()
            for fd, events in self.poll.poll(min(60.0, max(0.0, wait_s)) * 1000):
                handler = self.handlers.get(fd)
                if handler is not None:  # else closed by an earlier event of this round
                    handler(events)
            self.check_times(time.monotonic())

    def check_times(self, now_s: float) -> None:
        if self.fork_at <= now_s:
            self.fork_ahead()
        if self.check_at <= now_s:
            self.check_counters(now_s)
        if self.deadline <= now_s:
            self.check_deadline(now_s)

    def check_deadline(self, now_s: float) -> None:
        """End a call whose time is up. It counts from when its code began, but no later than
        START_S after the call: a machine that is busy is no fault of the program's."""
        self.deadline = math.inf
        child = self.current
        if child is None or child.call is None:
            return
        call = child.call
        started_ns = child.started_ns_of(call)
        latest = call.started + START_S
        began = latest if started_ns is None else min(started_ns / 1e9, latest)
        if call.verdict is None and now_s < began + call.timeout_s:
            in_time = began + call.timeout_s
            self.deadline = in_time if started_ns is not None else now_s + START_CHECK_S
        elif started_ns is None and call.is_first:
            self.kill(child, "sandbox_error")
        elif call.session is None or call.verdict is not None:
            self.kill(child, "timeout")
        else:
            self.interrupt(child, call, now_s)

    def interrupt(self, child: Forked, call: Call, now_s: float) -> None:
        """Send a cell whose time is up a KeyboardInterrupt. If it ends then, its session lives."""
        call.verdict = "timeout"
        self.deadline = now_s + INTERRUPT_GRACE_S
        if child.pid is not None:
            with contextlib.suppress(OSError):
                os.kill(child.pid, signal.SIGINT)

    def check_counters(self, now_s: float) -> None:
        """End a call of which the kernel has killed a process for memory, since others may wait
        for that one; and a session that uses the processor while it rests."""
        child = self.current
        self.check_at = math.inf
        if child is None or child.verdict is not None:
            return
        self.check_at = now_s + (REST_CHECK_S if self.is_resting else COUNTER_CHECK_S)
        if verdict := self.counters.oom_verdict():
            self.kill(child, verdict)
        elif self.is_resting and child.pid is not None:
            if self.counters.cpu_s() > MAX_REST_CPU_S:
                self.kill(child, "killed")
            else:
                self.workspace.stop(child.pid)

    # -- the supervisor's frames ------------------------------------------------------------

    def on_frames(self, _: int) -> None:
        try:
            frames = self.supervisor.read()
        except EOFError:  # it is gone, and so are we, with everything below us
            self.shut_down()
        for frame in frames:
            self.on_frame(frame)

    def on_frame(self, frame: WorkerFrame) -> None:
        match frame["op"]:
            case "run":
                self.accept(frame)
            case "kill":
                self.cancel(frame["id"])
            case "close":
                self.close_session(frame["session"])
            case "ping":
                self.send({"op": "pong"})

    def accept(self, frame: WorkerFrame) -> None:
        """Begin a call, or let it wait until the workspace is clean. One that makes no sense is
        answered; we live on."""
        try:
            call = Call(frame, self.spec.memory_bytes, self.counters.exist)
        except (KeyError, TypeError, AttributeError, struct.error) as error:
            self.answer_unstarted(frame.get("id"), "sandbox_error", f"not a call: {error!r}")
            return
        child = self.current
        if call.is_first:
            self.queue.append(call)
            self.begin_next()
        elif child is None or child.session != call.session:  # its end has been reported already
            self.send({"op": "session_lost", "session": call.session, "id": call.id})
        elif child.verdict is not None:
            self.lose_session(child, child.verdict, call)
        elif child.call is not None:
            self.answer_unstarted(call.id, "sandbox_error", "its session runs another cell")
        else:
            self.begin(child, call)

    def close_session(self, session: int) -> None:
        for call in [call for call in self.queue if call.session == session]:
            self.cancel(call.id)
        child = self.current
        if child is not None and child.session == session:
            child.session = None  # nobody asks any more how it ends
            self.kill(child, "cancelled")

    def send(self, frame: dict[str, object]) -> None:
        try:
            self.supervisor.send(frame)
        except EOFError:
            self.shut_down()

    def shut_down(self) -> NoReturn:
        self.workspace.abandon(self.current.pid if self.current is not None else None)
        os._exit(0)

    # -- calls ------------------------------------------------------------------------------

    def level_for(self, call: Call) -> int:
        """Return the richest zygote whose modules the code names; the bare one for the rest."""
        levels = reversed(range(len(self.names)))
        if call.session is not None:  # later cells may name anything
            return len(self.names) - 1
        return next((level for level in levels if self.names[level].search(call.code)), 0)

    def begin_next(self) -> None:
        if not self.queue or self.current is not None or not self.workspace.is_clean:
            return
        call = self.queue.popleft()
        level = self.level_for(call)
        child = self.ahead[level]
        self.ahead[level] = None
        try:
            self.current = child or self.fork(level)
        except OSError as error:
            self.refuse(call, error.errno)
        else:
            self.begin(self.current, call)

    def refuse(self, call: Call, code: int | None) -> None:
        """Report that no process could be forked for a call, and that this worker is of no use."""
        reason = f"fork: {os.strerror(code or 0)}"
        if call.session is None:
            self.answer_unstarted(call.id, "sandbox_error", reason)
        else:
            frame = {"op": "session_lost", "session": call.session, "by": LOST_BY["sandbox_error"]}
            self.send({**frame, "id": call.id})
        self.send({"op": "worn"})

    def begin(self, child: Forked, call: Call) -> None:
        if call.session is not None:
            child.session = call.session
            child.take_done()
            self.watch(child.done_fd, lambda _: self.on_cell_done(child))
        if self.is_resting and child.pid is not None:
            self.workspace.resume(child.pid)
        self.is_resting = False
        self.counters.start()
        call.started_ns = time.monotonic_ns()
        call.started = call.started_ns / 1e9
        self.deadline = call.started + call.timeout_s
        self.check_at = call.started + COUNTER_CHECK_S
        try:
            child.send(call)
        except BlockingIOError:  # it does not read its channel
            self.kill(child, "killed")
        except OSError as error:  # if it died while it waited, news of its end are on their way
            if error.errno not in (errno.EPIPE, errno.ECONNRESET):  # the job doesn't fit
                self.kill(child, "sandbox_error")
        call.code, call.job, call.stdin = "", b"", b""
        # The next fork waits: at once it would take the processor from the call just sent.
        self.fork_at = call.started + FORK_DELAY_S

    def fork_ahead(self) -> None:
        """Fork for the calls to come."""
        self.fork_at = math.inf
        if self.current is not None:
            self.watch_outputs(self.current)
        for level, child in enumerate(self.ahead):
            if child is None:
                # EAGAIN or ETOOMANYREFS: the call that runs uses up what it may.
                with contextlib.suppress(OSError):
                    self.ahead[level] = self.fork(level)

    def fork(self, level: int) -> Forked:
        """Let a zygote fork. Raises OSError if it can't be asked."""
        child = Forked(next(self.numbers), level)
        try:
            zygote = self.zygotes[level]
            socket.send_fds(zygote, [FORK.pack(child.number)], child.far_fds())
        except OSError:
            child.close()
            raise
        finally:
            child.close_far()
        self.children[child.number] = child
        return child

    def watch_outputs(self, child: Forked) -> None:
        """Read what a child writes. A short call, whose output its pipes hold, ends before that."""
        for output in (child.out, child.err):
            if output.fd not in self.handlers:
                self.watch(output.fd, partial(self.on_output, child, output))

    def on_output(self, child: Forked, output: Output, events: int) -> None:
        if self.exceeds_output(child):
            self.kill(child, "output_limit")
        elif events == select.POLLHUP:
            self.unwatch(output.fd)

    def exceeds_output(self, child: Forked) -> bool:
        child.out.read()
        child.err.read()
        limit = child.call.max_output_bytes if child.call is not None else None
        return child.out.total + child.err.total > (limit or self.spec.max_output_bytes)

    def cancel(self, call_id: int) -> None:
        for call in self.queue:
            if call.id == call_id:
                self.queue.remove(call)
                if call.session is not None:
                    self.send({"op": "session_lost", "session": call.session, "by": "caller"})
                self.answer_unstarted(call.id, "cancelled")
                return
        child = self.current
        if child is not None and child.call is not None and child.call.id == call_id:
            self.kill(child, "cancelled")

    def kill(self, child: Forked, verdict: str) -> None:
        """Kill a child for a reason; its answer follows when the zygote tells of its end."""
        if child.call is not None and child.call.verdict is None:
            child.call.verdict = verdict
        child.verdict = child.verdict or verdict
        if child.pid is not None:  # else as soon as it is known
            self.workspace.kill(child.pid)

    # -- news of children -------------------------------------------------------------------

    def on_news(self, zygote: socket.socket) -> None:
        while True:
            try:
                data = zygote.recv(NEWS.size)
            except BlockingIOError:
                return
            except ConnectionResetError:  # it has not read our last message
                data = b""
            if not data:
                self.on_zygote_end()
            kind, number, value, cpu_s, max_rss = NEWS.unpack(data)
            child = self.children[number]
            if kind == NEWS_FORKED:
                child.pid = value
                if child.verdict is not None:
                    self.workspace.kill(child.pid)
            elif kind == NEWS_EXITED:
                self.on_exit(child, value, cpu_s, max_rss)
            else:
                self.on_fork_failed(child, value)

    def on_zygote_end(self) -> NoReturn:
        """End the worker: the supervisor replaces it whole, which is simpler than half of one.

        A call that has used up its memory is judged for that, though the kernel has ended a zygote
        last, when nothing else was left to end.
        """
        child = self.current
        if child is not None and self.counters.oom_verdict() == "oom":
            self.send({"op": "worn"})
            if child.call is not None:
                self.answer(child, time.monotonic(), signal.SIGKILL, 0.0, 0)
            self.lose_session(child, "oom")
        self.shut_down()

    def on_exit(self, child: Forked, status: int, cpu_s: float, max_rss: int) -> None:
        ended = time.monotonic()
        if child is not self.current:
            self.discard(child)
            return
        self.workspace.kill_rest()
        if self.counters.oom_verdict():
            self.workspace.wait_for_end()
        if self.counters.is_spent():  # before the answer, so that no other call comes
            self.send({"op": "worn"})
        if child.call is not None:
            self.answer(child, ended, status, cpu_s, max_rss)
        elif child.session is not None:
            self.lose_session(child, child.verdict or self.counters.rest_verdict(status))
        self.discard(child)
        self.workspace.clean()
        self.on_clean()

    def on_fork_failed(self, child: Forked, code: int) -> None:
        call, child.call = child.call, None
        self.discard(child)  # forked again when the call that runs has ended
        if call is not None:
            self.refuse(call, code)
            self.on_clean()

    def on_clean(self) -> None:
        """Begin the next call if the workspace is clean."""
        if not self.workspace.is_clean or self.current is not None:
            return
        self.fork_at = min(self.fork_at, time.monotonic())
        most_bytes = self.own_bytes + WORN_BYTES
        # The first is cheap, and an upper bound of the second.
        if self.counters.memory_bytes() > most_bytes and self.counters.kept_bytes() > most_bytes:
            self.send({"op": "worn"})
        self.begin_next()

    def on_cell_done(self, child: Forked) -> None:
        """A session's cell has ended, by its process's own word."""
        # Not heard again before its next cell: a background thread may write without end.
        self.unwatch(child.done_fd)
        if child.call is None or child.verdict is not None:
            return
        verdict = self.counters.oom_verdict()
        if verdict is None and self.exceeds_output(child):
            verdict = "output_limit"
        if verdict is not None:
            self.kill(child, verdict)
            return
        self.answer(child, time.monotonic(), None, 0.0, 0)
        self.rest(child)

    def rest(self, child: Forked) -> None:
        """Stop all that a session runs, until its next cell."""
        assert child.pid is not None  # it has run a cell
        self.is_resting = True
        self.counters.start()
        self.check_at = time.monotonic() + REST_CHECK_S
        self.workspace.stop(child.pid)

    def lose_session(self, child: Forked, reason: str, call: Call | None = None) -> None:
        """Report that a session is over, once; and that `call`, a cell of it, will not run."""
        if child.session is None:  # closed, or reported
            return
        by = LOST_BY.get(reason, "program")
        frame = {"op": "session_lost", "session": child.session, "by": by}
        self.send(frame if call is None else {**frame, "id": call.id})
        child.session = None

    def discard(self, child: Forked) -> None:
        for fd in (child.out.fd, child.err.fd, child.done_fd):
            self.unwatch(fd)
        child.close()
        del self.children[child.number]
        if child is self.current:
            self.current = None
            self.is_resting = False
            self.deadline = self.check_at = math.inf
        elif child is self.ahead[child.level]:
            self.ahead[child.level] = None

    def answer(
        self, child: Forked, ended: float, status: int | None, cpu_s: float, max_rss: int
    ) -> None:
        """Send the one answer that a call gets. `status` is None for a cell whose process lives."""
        call = child.call
        assert call is not None
        self.deadline = math.inf
        if self.exceeds_output(child):
            call.verdict = call.verdict or "output_limit"
        child.call = None
        report = child.report()
        stdout, stdout_bytes, stdout_cut = child.out.take(call.verdict is not None)
        stderr, stderr_bytes, stderr_cut = child.err.take(call.verdict is not None)
        exit_code, signum = split_status(status, report)
        error = checked_error(report.get("error"))
        result = report.get("result")
        if self.counters.exist:
            cpu_s = self.counters.cpu_s()
        reason = "the machine's memory was used up"
        if not child.has_started():
            verdict = call.verdict or "sandbox_error"
            reason = call.why_unstarted(stderr, START_S)
        else:
            verdict = self.judge(call, exit_code, signum, error, cpu_s)
        started_ns = child.started_ns_of(call)
        not_begun = started_ns is None and not call.is_first
        if not_begun and status is not None and call.verdict is None:
            self.lose_session(child, verdict, call)
            return
        if status is not None:
            self.lose_session(child, verdict)
        if verdict == "sandbox_error":
            self.answer_unstarted(call.id, verdict, reason)
            return
        self.send(
            {
                "op": "done",
                "id": call.id,
                "status": verdict,
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

    def on_sigchld(self, wake: int) -> None:
        os.read(wake, 4096)
        was_clean = self.workspace.is_clean
        self.workspace.reap()
        if not was_clean:
            self.on_clean()

    def answer_unstarted(self, id: int | None, status: str, reason: str = "") -> None:
        self.send({"op": "done", "id": id, "status": status, "why": reason})

    def judge(
        self,
        call: Call,
        exit_code: int | None,
        signum: int | None,
        error: dict[str, object] | None,
        cpu_s: float,
    ) -> str:
        if call.verdict != "cancelled" and (verdict := self.counters.oom_verdict()):
            return verdict
        if call.verdict is not None:
            return call.verdict
        if exit_code == 0:
            return "ok"
        if signum == signal.SIGXCPU and cpu_s > call.timeout_s:
            return "timeout"
        if signum is not None:
            return "oom" if self.counters.may_be_oom(signum) else "killed"
        return "oom" if error and error["type"] == "MemoryError" else "error"


def main(values: dict[str, Any], read_control: int, write_control: int) -> None:
    """Run a worker until its supervisor goes; boot.py calls this.

    Args:
        values: the fields of a `Spec`.
        read_control, write_control: descriptors of the supervisor's connection.
    """
    server = WorkerServer(Spec(values), Connection(read_control, write_control))
    try:
        server.start()
        server.run()
    except BaseException as error:
        with contextlib.suppress(BaseException):
            server.send({"op": "fatal", "why": "".join(traceback.format_exception(error))})
        os._exit(70)
