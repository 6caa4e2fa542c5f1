"""What the front holds of one child: its call, its channel, its output."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import termios
from typing import Any

from sandbox.worker.wire import (
    INLINE_JOB,
    LARGE_JOB,
    MAX_TEXT,
    REPORT_BYTES,
    REPORT_HEAD,
    clip,
    pack_job,
)

_INT = struct.Struct("i")
_ZERO = bytes(_INT.size)


class Output:
    """One stream of a child: the first and the last bytes, and how many there were."""

    def __init__(self, fd: int, keep: int) -> None:
        self.fd = fd
        self.keep(keep)
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def keep(self, num_bytes: int) -> None:
        self.half = max(1, num_bytes // 2)

    def read(self) -> bool:
        """Take what the pipe holds, without waiting; False if that was nothing."""
        (waiting,) = _INT.unpack(fcntl.ioctl(self.fd, termios.FIONREAD, _ZERO))
        if waiting:
            with contextlib.suppress(BlockingIOError):
                self.add(os.read(self.fd, waiting))
        return bool(waiting)

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

    def __init__(self, frame: dict[str, Any]) -> None:
        self.id: int = frame["id"]
        self.code: str = frame["code"]
        self.timeout_s: float = frame["timeout_s"]
        self.session: int | None = frame.get("session")
        # Of its output, where it names them; else the worker's settings hold.
        self.max_output_bytes: int | None = frame.get("max_output_bytes")
        self.keep_output_bytes: int | None = frame.get("keep_output_bytes")
        lasting = self.session is not None
        self.job = pack_job(self.code, frame.get("stdin", ""), self.timeout_s, lasting)
        self.started = 0.0
        self.oom_kills = 0  # the kernel's, before it
        self.alone = True  # no other ran beside it
        self.verdict: str | None = None  # why we killed it, if we did


class Forked:
    """A forked process and what the front holds of it."""

    def __init__(self, lane: int, level: int, keep: int) -> None:
        self.lane = lane
        self.level = level
        self.pid: int | None = None  # known once the zygote says so
        self.doomed = False
        self.channel, self.far_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        out, self.far_out = os.pipe2(os.O_CLOEXEC)
        err, self.far_err = os.pipe2(os.O_CLOEXEC)
        for fd in (out, err):  # the child may open its pipes, and read what we have been told of
            os.set_blocking(fd, False)
        self.out, self.err = Output(out, keep), Output(err, keep)
        self.report_fd = os.memfd_create("report", os.MFD_CLOEXEC)
        os.ftruncate(self.report_fd, REPORT_BYTES)
        self.call: Call | None = None
        self.session: int | None = None

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
        if call.keep_output_bytes is not None:
            self.out.keep(call.keep_output_bytes)
            self.err.keep(call.keep_output_bytes)
        if len(call.job) <= INLINE_JOB:
            self.channel.send(call.job)
            return
        fd = os.memfd_create("job", os.MFD_CLOEXEC)
        try:
            with open(os.dup(fd), "wb") as f:
                f.write(call.job)
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


def split_status(status: int | None, said: dict[str, Any]) -> tuple[int | None, int | None]:
    if status is None:  # a living session: its own word, about itself alone
        code = said.get("exit_code")
        return (code if isinstance(code, int) and 0 <= code < 256 else 1), None
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.waitstatus_to_exitcode(status), None
