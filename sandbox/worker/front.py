"""The front: pid 1 of its container, the only one that speaks with the supervisor."""

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

from sandbox.worker.forked import Call, Forked, Output, honest_error, split_status
from sandbox.worker.kernel import (
    PR_SET_DUMPABLE,
    count_oom_kills,
    offer_to_killer,
    prctl,
)
from sandbox.worker.lanes import Lanes
from sandbox.worker.spec import Spec
from sandbox.worker.wire import (
    FORK,
    JOB_FD,
    MAX_TEXT,
    NEWS,
    NEWS_EXITED,
    NEWS_FORKED,
    REPORT_FD,
    clip,
)
from sandbox.worker.zygote import Zygote

HEADER = struct.Struct(">I")  # of a frame: bytes of JSON that follow (sandbox/protocol.py)
TOP_UP_DELAY_S = 0.002
_to_json = json.JSONEncoder(ensure_ascii=False).encode
CROWD_CHECK_S = 0.25
HEED_S = 2.0  # for a cell to heed an interrupt, on a machine that is busy


class Front:
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
        self.closed: set[int] = set()  # sessions
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
            waiting.append(near)
        for near in waiting:  # warming: seconds where modules are large
            if not near.recv(NEWS.size):
                raise RuntimeError("a zygote died while it loaded its modules")
            near.setblocking(False)
            self.watch(near.fileno(), lambda _, near=near: self.on_news(near))  # type: ignore[misc]

    def forget(self) -> None:
        """In a zygote: none of the front's descriptors."""
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
            if now < call.started + call.timeout_s:
                self.lanes.hold_back(child.lane)
                self.look_again(call)
            elif call.session is not None and call.verdict is None and child.pid:
                self.interrupt(child, call)
            else:
                self.condemn(child, "timeout")

    def look_again(self, call: Call) -> None:
        due = time.monotonic() + CROWD_CHECK_S
        if due < call.started + call.timeout_s:
            heapq.heappush(self.deadlines, (due, next(self.serial), call))

    def interrupt(self, child: Forked, call: Call) -> None:
        """A cell out of time gets a KeyboardInterrupt first: obeyed, its session lives on."""
        call.verdict = "timeout"
        heapq.heappush(self.deadlines, (time.monotonic() + HEED_S, next(self.serial), call))
        with contextlib.suppress(OSError):
            os.kill(child.pid or 0, signal.SIGINT)

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
                self.closed.add(frame["session"])  # a cell of it may still be under way
                session = self.sessions.pop(frame["session"], None)
                if session is not None:
                    self.condemn(session, "cancelled")

    def take(self, frame: dict[str, Any]) -> None:
        """A call for the queue. One that makes no sense is answered; we live on."""
        try:
            call = Call(frame)
        except (KeyError, TypeError, AttributeError, struct.error) as error:
            why = f"not a call: {error!r}"
            answer = {"op": "done", "id": frame.get("id"), "status": "sandbox_error", "why": why}
            self.send(answer)
            return
        if call.session in self.closed:
            self.answer_unstarted(call, "cancelled", "its session is closed")
            return
        self.queue.append(call)
        self.start_queued()

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
        if call.session is None:
            level = self.level_for(call.code)
        elif call.session in self.sessions:
            return self.sessions[call.session]
        else:  # its later cells may name anything
            level = len(self.names) - 1
        if self.ready[level]:
            return self.ready[level].popleft()
        return self.spawn(level)

    def begin(self, child: Forked, call: Call) -> None:
        if call.session is not None:
            child.session = call.session
            self.sessions[call.session] = child
            if child.channel.fileno() not in self.handlers:
                self.watch(child.channel.fileno(), lambda _: self.on_cell_done(child))
        call.started = time.monotonic()
        call.oom_kills = self.oom_kills
        call.alone = not self.calls
        for other in self.calls.values():
            if other.call is not None:
                other.call.alone = False
        self.calls[call.id] = child
        deadline = call.started + call.timeout_s
        heapq.heappush(self.deadlines, (deadline, next(self.serial), call))
        self.look_again(call)
        try:
            child.send(call)
        except OSError as error:  # it died while it waited
            call.verdict = "sandbox_error"
            child.doomed = True
            if error.errno == errno.EMSGSIZE:
                self.lanes.kill(child.lane, child.pid)
        call.code, call.job = "", b""  # `deadlines` holds it until its time would be up
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
        elif child.out.total + child.err.total > self.spec.max_output_bytes:
            self.condemn(child, "output_limit")

    def cancel(self, call_id: int) -> None:
        for call in self.queue:
            if call.id == call_id:
                self.queue.remove(call)
                self.answer_unstarted(call, "cancelled")
                return
        child = self.calls.get(call_id)
        if child is not None:
            self.condemn(child, "cancelled")

    def condemn(self, child: Forked, verdict: str) -> None:
        """Kill a child for a reason; its answer follows when the zygote tells of its end."""
        if child.call is not None and child.call.verdict is None:
            child.call.verdict = verdict
        child.doomed = True
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
                offer_to_killer(value)
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
        elif child in self.ready[child.level]:
            self.ready[child.level].remove(child)
        self.discard(child)

    def on_fork_failed(self, child: Forked, code: int) -> None:
        call = child.call
        if call is not None:
            self.calls.pop(call.id, None)
            self.answer_unstarted(call, "sandbox_error", f"fork: {os.strerror(code)}")
        elif child in self.ready[child.level]:
            self.ready[child.level].remove(child)
        self.discard(child)

    def on_cell_done(self, child: Forked) -> None:
        try:
            said = child.channel.recv(64)
        except OSError:
            said = b""
        if not said:
            self.unwatch(child.channel.fileno())
            return
        if child.call is not None and not child.doomed:
            self.answer(child, time.monotonic(), None, 0.0, 0)

    def discard(self, child: Forked) -> None:
        for fd in (child.out.fd, child.err.fd, child.channel.fileno()):
            self.unwatch(fd)
        child.close()
        del self.children[child.lane]
        if child.session is not None:
            self.sessions.pop(child.session, None)
            self.send({"op": "session_lost", "session": child.session})
        self.lanes.clean(child.lane)

    def answer(
        self, child: Forked, ended: float, status: int | None, cpu_s: float, max_rss: int
    ) -> None:
        """The one frame that a call gets. `status` is None for a cell whose process lives on."""
        call = child.call
        assert call is not None
        child.call = None
        del self.calls[call.id]
        child.out.read()
        child.err.read()
        started_ns, said = child.report()
        stdout, stdout_bytes, stdout_cut = child.out.take()
        stderr, stderr_bytes, stderr_cut = child.err.take()
        exit_code, signum = split_status(status, said)
        error = honest_error(said.get("error"))
        result = said.get("result")
        verdict = self.judge(call, exit_code, signum, error, max_rss * 1024)
        if verdict == "sandbox_error":
            self.answer_unstarted(call, verdict, "killed for memory that calls beside it had taken")
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
        if self.lanes.reap():
            self.start_queued()

    def answer_unstarted(self, call: Call, status: str, why: str = "") -> None:
        self.send({"op": "done", "id": call.id, "status": status, "why": why})

    def judge(
        self,
        call: Call,
        exit_code: int | None,
        signum: int | None,
        error: dict[str, Any] | None,
        max_rss: int,
    ) -> str:
        if call.verdict is None and exit_code == 0:
            return "ok"
        # Counted at every bad end, so that a kill of an earlier call isn't taken for this one's.
        self.oom_kills = count_oom_kills()
        if call.verdict is not None:
            return call.verdict
        if signum == signal.SIGXCPU:
            return "timeout"
        if signum == signal.SIGKILL and self.oom_kills > call.oom_kills:
            # The kernel takes the largest; one that was not alone, and had less than half of what
            # it may have, was in the way of others.
            large = call.alone or 2 * max_rss >= self.spec.memory_bytes
            return "oom" if large else "sandbox_error"
        if signum is not None:
            return "killed"
        return "oom" if error and error["type"] == "MemoryError" else "error"


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
    front = Front(Spec(given), read_control, write_control)
    try:
        front.start()
        front.run()
    except BaseException as error:
        with contextlib.suppress(BaseException):
            front.send({"op": "fatal", "why": "".join(traceback.format_exception(error))})
        os._exit(70)
