"""The worker's server: pid 1 of its container, the only one that speaks with the supervisor."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import heapq
import itertools
import json
import math
import os
import re
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from agentloop.sandbox.worker.forked import Call, Forked, Output, honest_error, split_status
from agentloop.sandbox.worker.kernel import (
    PR_SET_DUMPABLE,
    count_oom_kills,
    prctl,
)
from agentloop.sandbox.worker.lanes import Lanes
from agentloop.sandbox.worker.limits import CallLimits
from agentloop.sandbox.worker.spec import Spec
from agentloop.sandbox.worker.wire import (
    FORK,
    JOB_FD,
    MAX_TEXT,
    NEWS,
    NEWS_EXITED,
    NEWS_FORKED,
    REPORT_FD,
    clip,
)
from agentloop.sandbox.worker.zygote import Zygote

HEADER = struct.Struct(">I")  # of a frame: bytes of JSON that follow (sandbox/protocol.py)
TOP_UP_DELAY_S = 0.002
_to_json = json.JSONEncoder(ensure_ascii=False).encode
HEED_S = 2.0  # for a cell to heed an interrupt, on a machine that is busy
START_S = 2.0  # for a program to begin, on such a machine; from then on its time counts
LATE_CHECK_S = 0.05  # between looks whether it has begun
# Whose doing it is that a session is lost, by why its process was killed. Otherwise its program's.
LOST_BY = {"cancelled": "caller", "sandbox_error": "infrastructure"}


class WorkerServer:
    def __init__(self, spec: Spec, read_control: int, write_control: int) -> None:
        self.spec = spec
        self.lanes = Lanes(spec)
        self.read_control, self.write_control = read_control, write_control
        for fd in {read_control, write_control}:
            os.set_inheritable(fd, False)
            os.set_blocking(fd, False)
        self.epoll = select.epoll()
        self.handlers: dict[int, Callable[[int], None]] = {}  # told which events
        self.children: dict[int, Forked] = {}  # by lane
        self.ready: list[deque[Forked]] = [deque() for _ in spec.levels]
        self.calls: dict[int, Forked] = {}
        self.sessions: dict[int, Forked] = {}
        self.queue: deque[Call] = deque()
        self.deadlines: list[tuple[float, int, Call]] = []
        self.serial = itertools.count()
        self.zygotes: list[socket.socket] = []
        self.inbox = bytearray()
        self.outbox = bytearray()
        # By level: the last of its modules, as code would name it.
        self.names = [re.compile(rf"\b{m[-1]}\b" if m else "") for m in spec.levels]
        self.oom_kills = count_oom_kills()
        self.top_up_at = 0.0  # when to fork again ahead of calls; 0: not needed

    # -- starting ---------------------------------------------------------------------------

    def start(self) -> None:
        os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        prctl(PR_SET_DUMPABLE, 0)
        self.lanes.make()
        self.start_zygotes()
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        self.watch(wake, lambda _: self.on_sigchld(wake))
        self.watch(self.read_control, self.on_control)
        self.top_up()
        self.limits = CallLimits(self.spec, self.lanes, self.zygote_pids, self.condemn)
        self.send(
            {
                "op": "ready",
                "pid": os.getpid(),
                "python": sys.version.split()[0],
                "kill_by": self.spec.kill_by,
                "layers": self.spec.layers,
            }
        )

    def start_zygotes(self) -> None:
        waiting = []
        self.zygote_pids: list[int] = []
        for level in range(len(self.spec.levels)):
            near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                try:
                    near.close()
                    self.forget()
                    Zygote(self.spec, level, keep_low_fds(far)).run()
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            far.close()
            self.zygotes.append(near)
            self.lanes.ours.add(pid)
            self.zygote_pids.append(pid)
            waiting.append(near)
        for near in waiting:  # warming: seconds where modules are large
            if not near.recv(NEWS.size):
                raise RuntimeError("a zygote died while it loaded its modules")
            near.setblocking(False)
            self.watch(near.fileno(), lambda _, near=near: self.on_news(near))  # type: ignore[misc]

    def forget(self) -> None:
        """Close the server's descriptors in a zygote."""
        self.epoll.close()
        for fd in {self.read_control, self.write_control}:
            os.close(fd)
        for near in self.zygotes:
            near.close()

    # -- the loop ---------------------------------------------------------------------------

    def watch(self, fd: int, handler: Callable[[int], None]) -> None:
        self.handlers[fd] = handler
        self.epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        if self.handlers.pop(fd, None) is not None:
            self.epoll.unregister(fd)

    def run(self) -> None:
        while True:
            for fd, events in self.epoll.poll(self.next_deadline()):
                handler = self.handlers.get(fd)
                if handler is not None:  # else closed by an earlier event of this round
                    handler(events)
            self.check_deadlines()
            self.start_queued()

    def next_deadline(self) -> float:
        first = self.deadlines[0][0] if self.deadlines else math.inf
        first = min(first, self.top_up_at or math.inf, self.limits.due)
        return min(60.0, max(0.0, first - time.monotonic()))

    def check_deadlines(self) -> None:
        now = time.monotonic()
        if 0 < self.top_up_at <= now:
            self.top_up()
        if self.limits.due <= now:
            self.limits.check(now, self.children)
        while self.deadlines and self.deadlines[0][0] <= now:
            call = heapq.heappop(self.deadlines)[2]
            child = self.calls.get(call.id)
            if child is None or child.call is not call:
                continue
            self.see_if_late(child, call, now)

    def see_if_late(self, child: Forked, call: Call, now: float) -> None:
        """End a call whose time is up. It counts from when its code began, but no later than
        START_S after the call: a machine that is busy is no fault of the program's."""
        started_ns = child.started_ns_of(call)
        latest = call.started + START_S
        began = latest if started_ns is None else min(started_ns / 1e9, latest)
        if call.verdict is None and now < began + call.timeout_s:
            due = began + call.timeout_s if started_ns is not None else now + LATE_CHECK_S
            heapq.heappush(self.deadlines, (due, next(self.serial), call))
        elif started_ns is None and call.is_first:
            self.condemn(child, "sandbox_error")
        elif call.session is None or call.verdict is not None:
            self.condemn(child, "timeout")
        else:
            self.interrupt(child, call, now)

    def interrupt(self, child: Forked, call: Call, now: float) -> None:
        """A cell out of time gets a KeyboardInterrupt first: obeyed, its session lives on."""
        call.verdict = "timeout"
        heapq.heappush(self.deadlines, (now + HEED_S, next(self.serial), call))
        if child.pid is not None:
            with contextlib.suppress(OSError):
                os.kill(child.pid, signal.SIGINT)

    # -- the supervisor's connection --------------------------------------------------------

    def on_control(self, _: int) -> None:
        try:
            data = os.read(self.read_control, 1 << 18)
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
                self.take(frame)
            case "kill":
                self.cancel(frame["id"])
            case "close":
                self.close(frame["session"])
            case "ping":
                self.send({"op": "pong"})

    def take(self, frame: dict[str, Any]) -> None:
        """A call for the queue. One that makes no sense is answered; we live on."""
        try:
            call = Call(frame, self.spec.memory_bytes)
        except (KeyError, TypeError, AttributeError, struct.error) as error:
            why = f"not a call: {error!r}"
            answer = {"op": "done", "id": frame.get("id"), "status": "sandbox_error", "why": why}
            self.send(answer)
            return
        if call.session is None or call.opens:  # it needs a child
            self.queue.append(call)
            self.start_queued()
            return
        child = self.sessions.get(call.session)
        if child is None:  # its end has been reported already
            self.send({"op": "session_lost", "session": call.session, "id": call.id})
        elif child.doom is not None:
            self.lose_session(child, child.doom, call)
        elif child.call is not None:
            self.answer_unstarted(call, "sandbox_error", "its session runs another cell")
        else:
            self.begin(child, call)

    def close(self, session: int) -> None:
        for call in [call for call in self.queue if call.session == session]:
            self.cancel(call.id)
        child = self.sessions.pop(session, None)
        if child is not None:
            child.session = None  # nobody asks any more how it ends
            self.condemn(child, "cancelled")

    def send(self, frame: dict[str, Any]) -> None:
        data = _to_json(frame).encode("utf-8", "replace")
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
            self.lanes.abandon(lane, child.pid)
        if self.spec.kill_by == "tree":
            self.lanes.kill_strays()
        os._exit(0)

    # -- calls ------------------------------------------------------------------------------

    def level_for(self, code: str) -> int:
        """The richest zygote whose modules the code names; the bare one for the rest."""
        levels = reversed(range(len(self.names)))
        return next((level for level in levels if self.names[level].search(code)), 0)

    def start_queued(self) -> None:
        while self.queue:
            call = self.queue[0]
            child = self.child_for(call)
            if child is None:
                return
            self.queue.popleft()
            self.begin(child, call)

    def child_for(self, call: Call) -> Forked | None:
        level = len(self.names) - 1  # later cells of a session may name anything
        if call.session is None:
            level = self.level_for(call.code)
        if self.ready[level]:
            return self.ready[level].popleft()
        return self.spawn(level)

    def begin(self, child: Forked, call: Call) -> None:
        if call.session is not None:
            child.session = call.session
            self.sessions[call.session] = child
            child.forget_stale()
            self.watch(child.channel.fileno(), lambda _: self.on_cell_news(child))
        call.started_ns = time.monotonic_ns()
        call.started = call.started_ns / 1e9
        call.oom_kills = self.oom_kills
        call.alone = not self.calls
        for other in self.calls.values():
            if other.call is not None:
                other.call.alone = False
        self.calls[call.id] = child
        deadline = call.started + call.timeout_s
        heapq.heappush(self.deadlines, (deadline, next(self.serial), call))
        self.limits.expect(call.started)
        self.limits.wake(child)
        try:
            child.send(call)
        except OSError as error:  # if it died while it waited, news of its end are on their way
            if error.errno not in (errno.EPIPE, errno.ECONNRESET):  # the job doesn't fit
                self.condemn(child, "sandbox_error")
        # `deadlines` holds it until its time would be up.
        call.code, call.job, call.stdin = "", b"", b""
        # The next fork waits: at once it would take the processor from the call just sent.
        self.top_up_at = self.top_up_at or call.started + TOP_UP_DELAY_S

    def top_up(self) -> None:
        """Fork ahead of the calls to come."""
        self.top_up_at = 0.0
        for level, ready in enumerate(self.ready):
            while len(ready) < self.spec.ready:
                child = self.spawn(level)
                if child is None:
                    return
                ready.append(child)

    def spawn(self, level: int) -> Forked | None:
        if not self.lanes.free:
            return None
        lane = self.lanes.free.popleft()
        child = Forked(lane, level, self.spec.keep_bytes)
        self.children[lane] = child
        socket.send_fds(self.zygotes[level], [FORK.pack(lane)], child.far_fds())
        child.close_far()
        self.watch(child.out.fd, lambda events: self.on_output(child, child.out, events))
        self.watch(child.err.fd, lambda events: self.on_output(child, child.err, events))
        return child

    def on_output(self, child: Forked, output: Output, events: int) -> None:
        if not output.read() and events & select.EPOLLHUP:
            self.unwatch(output.fd)
        else:
            named = child.call.max_output_bytes if child.call is not None else None
            most = self.spec.max_output_bytes if named is None else named
            if child.out.total + child.err.total > most:
                self.condemn(child, "output_limit")

    def cancel(self, call_id: int) -> None:
        for call in self.queue:
            if call.id == call_id:
                self.queue.remove(call)
                if call.session is not None:
                    self.send({"op": "session_lost", "session": call.session, "by": "caller"})
                self.answer_unstarted(call, "cancelled")
                return
        child = self.calls.get(call_id)
        if child is not None:
            self.condemn(child, "cancelled")

    def condemn(self, child: Forked, verdict: str) -> None:
        """Kill a child for a reason; its answer follows when the zygote tells of its end."""
        if child.call is not None and child.call.verdict is None:
            child.call.verdict = verdict
        child.doom = child.doom or verdict
        self.lanes.kill(child.lane, child.pid)

    # -- news of children -------------------------------------------------------------------

    def on_news(self, zygote: socket.socket) -> None:
        while True:
            try:
                data = zygote.recv(NEWS.size)
            except BlockingIOError:
                return
            if not data:  # the supervisor replaces the whole worker: simpler than half of one
                self.shut_down()
            kind, lane, value, cpu_s, max_rss = NEWS.unpack(data)
            child = self.children[lane]
            if kind == NEWS_FORKED:
                child.pid = value
                if child.doomed:
                    self.lanes.kill(child.lane, child.pid)
            elif kind == NEWS_EXITED:
                self.on_exit(child, value, cpu_s, max_rss)
            else:
                self.on_fork_failed(child, value)

    def on_exit(self, child: Forked, status: int, cpu_s: float, max_rss: int) -> None:
        ended = time.monotonic()
        self.lanes.kill_rest(child.lane)
        if child.call is not None:
            self.answer(child, ended, status, cpu_s, max_rss)
        elif child.session is not None:
            self.lose_session(child, self.judge_idle(child, status, max_rss * 1024))
        elif child in self.ready[child.level]:
            self.ready[child.level].remove(child)
        self.discard(child)

    def on_fork_failed(self, child: Forked, code: int) -> None:
        call = child.call
        if call is not None:
            self.calls.pop(call.id, None)
            self.lose_session(child, "sandbox_error")
            self.answer_unstarted(call, "sandbox_error", f"fork: {os.strerror(code)}")
        elif child in self.ready[child.level]:
            self.ready[child.level].remove(child)
        self.discard(child)

    def on_cell_news(self, child: Forked) -> None:
        """A session's process has started, or its cell has ended: by its own word."""
        is_first = child.started_ns is None
        said = child.hear()
        if said is None or (said and is_first):
            return
        # Not heard again before its next cell: a background thread may write without end.
        self.unwatch(child.channel.fileno())
        if said and child.call is not None and not child.doomed:
            self.answer(child, time.monotonic(), None, 0.0, 0)

    def lose_session(self, child: Forked, reason: str, call: Call | None = None) -> None:
        """Tell that a session is over, once; and that `call`, a cell of it, will not run."""
        if child.session is None:  # closed, or told
            return
        self.sessions.pop(child.session, None)
        by = LOST_BY.get(reason, "program")
        frame = {"op": "session_lost", "session": child.session, "by": by}
        self.send(frame if call is None else {**frame, "id": call.id})
        child.session = None

    def discard(self, child: Forked) -> None:
        for fd in (child.out.fd, child.err.fd, child.channel.fileno()):
            self.unwatch(fd)
        child.close()
        del self.children[child.lane]
        self.lanes.clean(child.lane)

    def answer(
        self, child: Forked, ended: float, status: int | None, cpu_s: float, max_rss: int
    ) -> None:
        """The one answer that a call gets. `status` is None for a cell whose process lives on."""
        call = child.call
        assert call is not None
        child.call = None
        del self.calls[call.id]
        child.out.read()
        child.err.read()
        said = child.report()
        stdout, stdout_bytes, stdout_cut = child.out.take()
        stderr, stderr_bytes, stderr_cut = child.err.take()
        exit_code, signum = split_status(status, said)
        error = honest_error(said.get("error"))
        result = said.get("result")
        if not child.has_started():
            verdict = call.verdict or "sandbox_error"
            why = unstarted_why(call, stderr)
        else:
            most_used = max(child.used, max_rss * 1024)
            verdict = self.judge(call, exit_code, signum, error, most_used, cpu_s)
            why = "killed for memory that calls beside it had taken"
        started_ns = child.started_ns_of(call)
        not_begun = started_ns is None and not call.is_first
        if not_begun and status is not None and call.verdict is None:
            self.lose_session(child, verdict, call)
            return
        child.oom_kills = self.oom_kills
        if status is not None:
            self.lose_session(child, verdict)
        if verdict == "sandbox_error":
            self.answer_unstarted(call, verdict, why)
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
        self.lanes.reap()
        self.start_queued()

    def answer_unstarted(self, call: Call, status: str, why: str = "") -> None:
        self.send({"op": "done", "id": call.id, "status": status, "why": why})

    def judge(
        self,
        call: Call,
        exit_code: int | None,
        signum: int | None,
        error: dict[str, Any] | None,
        most_used: int,
        cpu_s: float,
    ) -> str:
        if call.verdict is None and exit_code == 0:
            return "ok"
        # Counted at every bad end, so that a kill of an earlier call isn't taken for this one's.
        self.oom_kills = count_oom_kills()
        if call.verdict is not None:
            return call.verdict
        if signum == signal.SIGXCPU and cpu_s > call.timeout_s:
            return "timeout"
        if signum == signal.SIGKILL and self.oom_kills > call.oom_kills:
            # The kernel takes the largest; one that was not alone, and had less than half of what
            # it may have, was in the way of others.
            large = call.alone or 2 * most_used >= call.memory_bytes
            return "oom" if large else "sandbox_error"
        if signum is not None:
            return "killed"
        return "oom" if error and error["type"] == "MemoryError" else "error"

    def judge_idle(self, child: Forked, status: int, max_rss: int) -> str:
        """Why a session's process has ended between two cells."""
        if child.doom is not None:
            return child.doom
        self.oom_kills = count_oom_kills()
        by_kernel = split_status(status, {})[1] == signal.SIGKILL and (
            self.oom_kills > child.oom_kills
        )
        return "sandbox_error" if by_kernel and 2 * max_rss < self.spec.memory_bytes else "ended"


def unstarted_why(call: Call, stderr: str) -> str:
    if call.verdict is not None:
        return f"the program had not begun {call.timeout_s + START_S:g} s after its call"
    fault = stderr.rstrip().rpartition("\n")[2]
    return f"its process did not get as far as the program{': ' if fault else ''}{fault}"


def keep_low_fds(far: socket.socket) -> socket.socket:
    """Occupy the numbers that a child uses, so that what a zygote receives lies above them."""
    moved = socket.socket(fileno=fcntl.fcntl(far, fcntl.F_DUPFD_CLOEXEC, REPORT_FD + 1))
    far.close()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (JOB_FD, REPORT_FD):
        if fd != null:
            os.dup2(null, fd, inheritable=False)
    return moved


def main(given: dict[str, Any], read_control: int, write_control: int) -> None:
    """Run a worker until its supervisor goes. `given` as spec.py has it; then the descriptors of
    the supervisor's connection, and we are called by boot.py."""
    server = WorkerServer(Spec(given), read_control, write_control)
    try:
        server.start()
        server.run()
    except BaseException as error:
        with contextlib.suppress(BaseException):
            server.send({"op": "fatal", "why": "".join(traceback.format_exception(error))})
        os._exit(70)
