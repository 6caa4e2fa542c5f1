"""The server's record of one child: its call, its channel, its output."""

from __future__ import annotations

import codecs
import contextlib
import errno
import fcntl
import json
import os
import socket
import struct
import termios
import time

from agentloop.sandbox.worker import wire
from agentloop.sandbox.worker.connection import WorkerFrame
from agentloop.sandbox.worker.wire import REPORT_BYTES, REPORT_SIZE, STARTED, clip

_INT = struct.Struct("i")
KEEP_BYTES = 64 << 10  # of each stream, unless a call says otherwise: what one can still read


class Output:
    """Output of a child on one stream: the first and last bytes, and their number."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.keep(KEEP_BYTES)
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def keep(self, num_bytes: int) -> None:
        self.half = max(1, num_bytes // 2)

    def read(self) -> None:
        """Take what the pipe holds, without waiting."""
        (waiting,) = _INT.unpack(fcntl.ioctl(self.fd, termios.FIONREAD, bytes(_INT.size)))
        with contextlib.suppress(BlockingIOError):
            # More than once where the program has set O_DIRECT: each read then takes one packet.
            while waiting > 0 and (data := os.read(self.fd, waiting)):
                self.add(data)
                waiting -= len(data)

    def add(self, data: bytes) -> None:
        self.total += len(data)
        num_free = self.half - len(self.head)
        if num_free > 0:
            self.head += data[:num_free]
            data = data[num_free:]
        if data:
            self.tail += data
            if len(self.tail) > 2 * self.half:  # trimmed seldom, so that adding stays cheap
                del self.tail[: -self.half]

    def take(self, was_killed: bool) -> tuple[str, int, bool]:
        """The text, the bytes written in all and whether some are left out; starts anew. No cut is
        inside a character, nor is the end if the program was killed as it wrote."""
        del self.tail[: -self.half]
        total, is_cut = self.total, self.total > len(self.head) + len(self.tail)
        if is_cut:
            num_kept = codecs.utf_8_decode(self.head, "replace", False)[1]
            del self.head[num_kept:]
            del self.tail[: _num_continuing(self.tail)]
            note = b"\n... %d bytes left out ...\n" % (total - len(self.head) - len(self.tail))
            self.head += note
        self.head += self.tail
        text, _ = codecs.utf_8_decode(self.head, "replace", not was_killed)
        self.head.clear()
        self.tail.clear()
        self.total = 0
        return text, total, is_cut


def _num_continuing(data: bytearray) -> int:
    """Return the number of bytes at the start that continue a character of UTF-8."""
    return next((n for n, byte in enumerate(data[:3]) if byte & 0xC0 != 0x80), min(3, len(data)))


class Call:
    """A job on its way through a child."""

    def __init__(self, frame: WorkerFrame, memory_bytes: int, counts_memory: bool) -> None:
        self.id: int = frame["id"]
        self.code: str = frame["code"]
        self.timeout_s: float = frame["timeout_s"]
        self.session: int | None = frame.get("session")
        self.opens: bool = frame.get("opens", False)  # the first cell of its session
        self.is_first = self.session is None or self.opens  # the first call of its process
        # Of its output, where it names them.
        self.max_output_bytes: int | None = frame.get("max_output_bytes")
        self.keep_output_bytes: int | None = frame.get("keep_output_bytes")
        if (mib := frame.get("memory_mib")) is not None:
            memory_bytes = min(memory_bytes, mib << 20)
        is_cell = self.session is not None
        # Else nothing but the address space would limit its memory.
        native = counts_memory and frame.get("native", False)
        self.job = wire.pack_job(self.code, self.timeout_s, is_cell, native, memory_bytes)
        self.stdin: bytes = frame.get("stdin", "").encode("utf-8", "replace")
        self.started = 0.0  # when it was sent, by time.monotonic()
        self.started_ns = 0  # the same
        self.verdict: str | None = None  # why we killed it, if we did

    def why_unstarted(self, stderr: str, start_s: float) -> str:
        """Return why the program has not begun, as far as that is known."""
        if self.verdict is not None:
            return f"the program had not begun {self.timeout_s + start_s:g} s after its call"
        fault = stderr.rstrip().rpartition("\n")[2]
        return f"its process did not get as far as the program{': ' if fault else ''}{fault}"


class Forked:
    """A forked process and what the server holds of it."""

    def __init__(self, number: int, level: int) -> None:
        self.number = number
        self.level = level
        self.pid: int | None = None  # known once the zygote says so
        self.verdict: str | None = None  # why it was killed; no further call is for it
        self.started_ns: int | None = None  # of its first program; None: not heard of yet
        self.channel, self.far_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        out, self.far_out = os.pipe2(os.O_CLOEXEC)
        err, self.far_err = os.pipe2(os.O_CLOEXEC)
        for fd in (out, err):  # the child may open its pipes, and read what we have been told of
            os.set_blocking(fd, False)
        self.out, self.err = Output(out), Output(err)
        self.done_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # cells that have ended
        self.report_fd = os.memfd_create("report", os.MFD_CLOEXEC)
        os.ftruncate(self.report_fd, REPORT_BYTES)
        self.call: Call | None = None
        self.session: int | None = None

    def far_fds(self) -> list[int]:
        outputs = [self.far_out, self.far_err]
        return [self.far_channel.fileno(), *outputs, self.done_fd, self.report_fd]

    def close_far(self) -> None:
        self.far_channel.close()
        os.close(self.far_out)
        os.close(self.far_err)

    def close(self) -> None:
        self.channel.close()
        for fd in (self.out.fd, self.err.fd, self.done_fd, self.report_fd):
            os.close(fd)

    def send(self, call: Call) -> None:
        """Send a call to the child, without waiting.

        Raises:
            BlockingIOError: the child does not read its channel.
            OSError: the channel is closed, or the job does not fit.
        """
        self.call = call
        if call.keep_output_bytes is not None:
            self.out.keep(call.keep_output_bytes)
            self.err.keep(call.keep_output_bytes)
        # A later cell may have no space left in its directory for its standard input.
        is_inline = call.session is None or not call.stdin
        if is_inline and len(call.job) + len(call.stdin) <= wire.INLINE_JOB:
            self.channel.send(call.job + call.stdin, socket.MSG_DONTWAIT)
            return
        with open(os.memfd_create("stdin", os.MFD_CLOEXEC), "wb", buffering=0) as file:
            for part in (call.stdin, call.job):
                if file.write(part) != len(part):
                    raise OSError(errno.ENOSPC, "the job does not fit")
            self.channel.send(wire.FILE_JOB.pack(len(call.stdin)), socket.MSG_DONTWAIT)
            socket.send_fds(self.channel, [b"+"], [file.fileno()], socket.MSG_DONTWAIT)

    def has_started(self) -> bool:
        """Return True once a program runs, or has run, in this child."""
        if self.started_ns is None:
            with contextlib.suppress(OSError):  # there is no message yet, or the child is dead
                if message := self.channel.recv(STARTED.size, socket.MSG_DONTWAIT):
                    (self.started_ns,) = STARTED.unpack(message)
        return self.started_ns is not None

    def started_ns_of(self, call: Call) -> int | None:
        """Return when the code of a call began; None if it has not. For a later cell of a session
        its process says so, and the value is limited to the call's own time."""
        if call.is_first:
            return self.started_ns if self.has_started() else None
        (started_ns,) = STARTED.unpack(os.pread(self.report_fd, STARTED.size, 0))
        return min(started_ns, time.monotonic_ns()) if started_ns >= call.started_ns else None

    def take_done(self) -> None:
        """Set the count of cells that have ended back to 0."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.done_fd)

    def report(self) -> dict[str, object]:
        """Return the child's report. It is copied, since the child could truncate the file."""
        (size,) = REPORT_SIZE.unpack(os.pread(self.report_fd, REPORT_SIZE.size, STARTED.size))
        if not 0 < size <= REPORT_BYTES:
            return {}
        try:
            report = json.loads(os.pread(self.report_fd, size, wire.REPORT_START))
        except (ValueError, RecursionError):
            return {}
        return report if isinstance(report, dict) else {}


def checked_error(error: object) -> dict[str, object] | None:
    """Return the child's report of its error in the form that the supervisor expects."""
    if not isinstance(error, dict):
        return None
    line = error.get("line")
    return {
        "type": clip(str(error.get("type")), 256),
        "message": clip(str(error.get("message")), 4096),
        "line": line if isinstance(line, int) and abs(line) < 2**31 else None,
        "traceback": clip(str(error.get("traceback")), wire.MAX_TEXT + 256),
    }


def split_status(status: int | None, report: dict[str, object]) -> tuple[int | None, int | None]:
    """Return an exit code or a signal. Of a living session, its own report (`status` is None)."""
    if status is None:
        code = report.get("exit_code")
        return (code if isinstance(code, int) and 0 <= code < 256 else 1), None
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.waitstatus_to_exitcode(status), None
