"""The first process of a computer: its shells, its files, and the end of all its processes.

It runs as root, by the interpreter that is mounted beside it (toolbox.py), and takes requests over
one connection. When that ends it exits, and the kernel ends every other process of the container.

    host ──> run {id, shell, user, cwd, env} command   signal {shell, stage}
             file {id, kind, user, ...}   data {id} bytes   eof {id}   more {id, stream}   kill {id}
             kill_all {id}   freeze   thaw
         <── ready   out {id, stream} bytes   ack {id}   done {id, ...}

Over a second connection it passes a new socket of the computer's network for each byte that comes:
the host's proxy listens there, and connects to ports (proxy.py).

A frame is two lengths, JSON, and bytes. What comes from a file waits for `more`, and what goes to
one for `ack`, chunk by chunk, so that neither end holds more than one. A program without a shell is
a `file` of the kind `execute`.

Processes of the computer have a smaller bounding set of capabilities than this one. So its root can
neither trace it nor read its memory or descriptors, and the kernel shields the first process of a
namespace from the signals of others. Paths are opened by children (guest_files.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import socket
import struct
import sys
import tarfile
import traceback
from collections.abc import Callable

from agentloop.sandbox.computer.guest_files import FILE_KINDS, PIPE_BYTES, GuestFrame, become
from agentloop.sandbox.worker.kernel import descendants, parents

HEADER = struct.Struct(">II")
CHUNK_BYTES = 256 << 10
MAX_UNSENT_BYTES = 1 << 20
MAX_PIPE_BYTES = 1 << 20  # what a program may enlarge its pipes to
KEPT_BETWEEN_BYTES = 16 << 10  # of what background processes write while no command runs
CONTROL_FD = 9  # the largest number that every shell can redirect
OOM_FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
PRELUDE = "PS1= PS2=; unset HISTFILE"
BASH_PRELUDE = PRELUDE + "; set +H +o history"

BASH_OPTIONS = ["--noprofile", "--norc", "--noediting"]
# What bash writes without a terminal when a signal has ended a program.
NOISE = re.compile(rb"bash: \[\d+: \d+ \(\d+\)\] tcsetattr: [^\n]*\n")
SHELLS = ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash", "/bin/sh")


def find_shell() -> str:
    """Return the path of bash, or of sh."""
    return next((path for path in SHELLS if os.path.exists(path)), SHELLS[-1])


# -- processes ----------------------------------------------------------------------------------


class Outlet:
    """Bytes on their way to a descriptor that may not take them at once."""

    def __init__(self, loop: Loop, fd: int, on_drained: Callable[[], None] | None = None) -> None:
        self.fd, self.waiting, self.closing = fd, bytearray(), False
        self._loop, self._on_drained = loop, on_drained
        os.set_blocking(fd, False)

    def write(self, data: bytes) -> None:
        self.waiting += data
        self.flush()

    def flush(self) -> None:
        try:
            while self.waiting:
                del self.waiting[: os.write(self.fd, self.waiting)]
        except BlockingIOError:
            self._loop.watch_writable(self)
            return
        except OSError:  # nobody reads it any more
            self.waiting.clear()
        self._loop.unwatch_writable(self)
        if self._on_drained:
            self._on_drained()
        if self.closing:
            self.close()

    def close(self) -> None:
        self._loop.unwatch_writable(self)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Loop:
    """The descriptors that are waited for."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self._writable: dict[int, Outlet] = {}

    def watch(self, fd: int, read: Callable[[], None]) -> None:
        self._set(fd, read)

    def unwatch(self, fd: int) -> None:
        self._set(fd, None)

    def is_watched(self, fd: int) -> bool:
        return fd in self.selector.get_map() and bool(self.selector.get_key(fd).data)

    def watch_writable(self, outlet: Outlet) -> None:
        self._writable[outlet.fd] = outlet
        self._set(outlet.fd, self._reader(outlet.fd))

    def unwatch_writable(self, outlet: Outlet) -> None:
        if self._writable.pop(outlet.fd, None):
            self._set(outlet.fd, self._reader(outlet.fd))

    def _reader(self, fd: int) -> Callable[[], None] | None:
        return self.selector.get_key(fd).data if fd in self.selector.get_map() else None

    def _set(self, fd: int, read: Callable[[], None] | None) -> None:
        events = (selectors.EVENT_READ if read else 0) | (
            selectors.EVENT_WRITE if fd in self._writable else 0
        )
        if fd in self.selector.get_map():
            self.selector.unregister(fd)
        if events:
            self.selector.register(fd, events, read)

    def step(self) -> None:
        for key, events in self.selector.select():
            if events & selectors.EVENT_WRITE and (outlet := self._writable.get(key.fd)):
                outlet.flush()
            # An earlier one may have closed it, and its number may be in use again.
            read: Callable[[], None] | None = key.data
            if events & selectors.EVENT_READ and read and self._reader(key.fd) is read:
                read()


def start(
    fds: dict[int, int],
    user: str,
    main: Callable[[str, str], None],
    folder: str = "/",
    is_command: bool = True,
) -> int:
    """Fork a child of another user, with these descriptors (ours by the child's number) alone.

    Where that fails, it says so in words if it is a command, else in JSON.
    """
    pid = os.fork()
    if pid:
        return pid
    status = 127
    try:
        signal.set_wakeup_fd(-1)
        for ended in (signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(ended, signal.SIG_DFL)
        os.setsid()
        high = {number: os.dup(fd) for number, fd in fds.items()}  # no target is in use below it
        for number, fd in high.items():
            os.dup2(fd, number)
        kept = max(fds) + 1
        for fd in range(3, kept):
            if fd not in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)
        os.closerange(kept, 1 << 16)
        home, login = become(user)
        os.chdir(folder)
        main(home, login)
        status = 0
    except OSError as error:
        message = {"errno": error.errno or 5, "message": error.strerror or str(error)}
        text = json.dumps({**message, "path": error.filename or folder})
        os.write(2, (f"agentloop: {error}\n" if is_command else text).encode())
        status = 1
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


class FileJob:
    """A child that does something with files, or becomes a program."""

    def __init__(self, guest: Guest, request: GuestFrame) -> None:
        self.id = request["id"]
        self.guest = guest
        self._num_oom_kills = count_oom_kills()
        in_r, in_w = os.pipe2(os.O_CLOEXEC)
        out_r, out_w = os.pipe2(os.O_CLOEXEC)
        err_r, err_w = os.pipe2(os.O_CLOEXEC)

        def main(home: str, login: str) -> None:
            with open(0, "rb", closefd=False) as data, open(1, "wb", closefd=False) as out:
                FILE_KINDS[request["kind"]](request, data, out)

        self.status, self.is_oom = 1, False
        fds, is_command = {0: in_r, 1: out_w, 2: err_w}, request["kind"] == "execute"
        self.pid = start(fds, request["user"], main, is_command=is_command)
        for fd in (in_r, out_w, err_w):
            os.close(fd)
        self.data = Outlet(guest.loop, in_w, self._ack)
        self._owes_ack = False
        self._outs = {1: out_r, 2: err_r}
        for stream, fd in self._outs.items():
            guest.loop.watch(fd, lambda stream=stream: self._read(stream))  # type: ignore[misc]

    def feed(self, data: bytes) -> None:
        self._owes_ack = True
        self.data.write(data)

    def end_data(self) -> None:
        self.data.closing = True
        self.data.flush()

    def _ack(self) -> None:
        if self._owes_ack:
            self._owes_ack = False
            self.guest.send({"op": "ack", "id": self.id})

    def _read(self, stream: int) -> None:
        fd = self._outs[stream]
        parts, size = [], 0
        with contextlib.suppress(BlockingIOError):
            os.set_blocking(fd, False)
            while size < CHUNK_BYTES and (part := os.read(fd, PIPE_BYTES)):
                parts.append(part)
                size += len(part)
            if size < CHUNK_BYTES:
                self._close(stream)
        if parts:
            self.guest.send({"op": "out", "id": self.id, "stream": stream}, b"".join(parts))
            if stream in self._outs:
                self.guest.loop.unwatch(fd)
        self.guest.settle(self)

    def more(self, stream: int) -> None:
        if stream in self._outs:
            self.guest.loop.watch(self._outs[stream], lambda: self._read(stream))

    def kill(self) -> None:
        """Kill the child, and the processes that it has started."""
        if self.pid:
            for pid in (*descendants(self.pid), self.pid, -self.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _close(self, stream: int) -> None:
        fd = self._outs.pop(stream)
        self.guest.loop.unwatch(fd)
        os.close(fd)

    def exited(self, status: int) -> None:
        self.status, self.pid = status, 0
        self.is_oom = count_oom_kills() > self._num_oom_kills
        self.data.close()
        for stream in list(self._outs):
            # What it has written. Who else holds the pipe could write for ever.
            for _ in range(MAX_PIPE_BYTES // CHUNK_BYTES + 1):
                if stream in self._outs:
                    self._read(stream)
            if stream in self._outs:
                self._close(stream)
        self.guest.settle(self)

    @property
    def is_over(self) -> bool:
        return not self.pid and not self._outs


class Shell:
    """A shell that keeps its state, and the command that it runs now.

    It is an interactive one without a terminal: an interrupt ends the command and not the shell,
    and programs find no terminal to ask questions on.
    """

    def __init__(self, guest: Guest, request: GuestFrame) -> None:
        self.id, self.guest = request["shell"], guest
        self.run: int | None = None
        self._status = 0
        self._control = b""
        self._idle = {1: bytearray(), 2: bytearray()}
        self._ready = False  # what it writes before is a command's only if it ends there
        self._command = b""
        self._before: set[int] = set()
        self._num_kills = count_oom_kills()
        in_r, in_w = os.pipe2(os.O_CLOEXEC)
        out_r, out_w = os.pipe2(os.O_CLOEXEC)
        err_r, err_w = os.pipe2(os.O_CLOEXEC)
        ctl_r, ctl_w = os.pipe2(os.O_CLOEXEC)

        def main(home: str, login: str) -> None:
            env = {"HOME": home, "USER": login, "LOGNAME": login, "TERM": "dumb"}
            env = {**guest.environment, **env, **request["env"]}
            path = find_shell()
            options = BASH_OPTIONS if path.endswith("bash") else []
            os.execve(path, [path, *options, "-i"], env)

        fds = {0: in_r, 1: out_w, 2: err_w, CONTROL_FD: ctl_w}
        self.pid = start(fds, request["user"], main, request["cwd"])
        for fd in fds.values():
            os.close(fd)
        self._stdin = Outlet(guest.loop, in_w)
        self._outs = {1: out_r, 2: err_r, 3: ctl_r}
        for stream, fd in self._outs.items():
            os.set_blocking(fd, False)
            guest.loop.watch(fd, lambda stream=stream: self._read(stream))  # type: ignore[misc]
        prelude = BASH_PRELUDE if find_shell().endswith("bash") else PRELUDE
        self._stdin.write(f"{prelude}; printf '0\\n' >&{CONTROL_FD}\n".encode())

    def begin(self, id: int, command: bytes) -> None:
        self.run, self._command = id, command
        if self._ready:
            self._begin()

    def _begin(self) -> None:
        self._pass_on_idle()
        self._before = set(parents())
        self._num_kills = count_oom_kills()
        quoted = b"'" + self._command.replace(b"'", b"'\\''") + b"'"
        before = b"(exit %d); " % self._status if self._status else b""
        # On a line of its own, the status is told after an interrupt, too.
        tell = b"printf '%%d\\n' \"$?\" >&%d\n" % CONTROL_FD
        line = b"%seval %s </dev/null %d>&-\n" % (before, quoted, CONTROL_FD)
        self._stdin.write(line + tell)

    def signal(self, stage: str) -> None:
        """End the command: by an interrupt; by killing its processes; by killing the shell."""
        if not self.pid:
            return
        if stage != "interrupt":
            for pid in descendants(self.pid):
                if stage == "end" or pid not in self._before:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            if stage == "end":
                os.kill(self.pid, signal.SIGKILL)
            else:
                os.killpg(self.pid, signal.SIGINT)

    def _read(self, stream: int) -> None:
        fd = self._outs[stream]
        try:
            data = os.read(fd, PIPE_BYTES)
        except BlockingIOError:
            return
        if not data:
            self.guest.loop.unwatch(fd)
        elif stream != 3:
            self._pass_on(stream, data)
        else:
            self._control += data
            while b"\n" in self._control:
                line, _, self._control = self._control.partition(b"\n")
                # A trap or a prompt of the computer's may write here as well.
                self._told(int(line[:3]) if line[:3].isdigit() else 1)
            self._control = self._control[-16:]

    def _pass_on(self, stream: int, data: bytes) -> None:
        if stream == 2 and b"tcsetattr" in data:
            data = NOISE.sub(b"", data)
        if self.run is not None and self._ready:
            self.guest.send({"op": "out", "id": self.run, "stream": stream}, data)
        else:
            kept = self._idle[stream]
            kept += data
            del kept[:-KEPT_BETWEEN_BYTES]

    def _pass_on_idle(self) -> None:
        """Pass on to the command what was written before it."""
        for stream, kept in self._idle.items():
            if kept and self.run is not None:
                self.guest.send({"op": "out", "id": self.run, "stream": stream}, bytes(kept))
            kept.clear()

    def _told(self, status: int) -> None:
        self._drain()
        if not self._ready:
            self._ready = True
            self._idle = {1: bytearray(), 2: bytearray()}
            if self.run is not None:
                self._begin()
            return
        self._status = status
        self._finish(status, ended=False)

    def _drain(self) -> None:
        """Pass on what was written before the status; not what others write without end."""
        for stream in (1, 2):
            for _ in range(16):
                try:
                    data = os.read(self._outs[stream], PIPE_BYTES)
                except BlockingIOError:
                    break
                if not data:
                    break
                self._pass_on(stream, data)

    def _finish(self, status: int, ended: bool) -> None:
        if self.run is not None:
            is_oom = count_oom_kills() > self._num_kills
            id, self.run = self.run, None
            done: GuestFrame = {"op": "done", "id": id, "status": status}
            self.guest.send({**done, "ended": ended, "oom": is_oom})

    def exited(self, status: int) -> None:
        self.pid = 0
        if not self._ready:
            self._ready = True
            self._pass_on_idle()
        self._drain()
        self._stdin.close()
        for fd in self._outs.values():
            self.guest.loop.unwatch(fd)
            os.close(fd)
        self.guest.shells.pop(self.id, None)
        self._finish(status, ended=True)


def count_oom_kills() -> int:
    """Return how many processes of this computer the kernel has ended for memory."""
    for path in OOM_FILES:
        with contextlib.suppress(OSError), open(path) as file:
            for line in file:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


class Guest:
    """The requests, and what they are about."""

    def __init__(self, connection: socket.socket, sockets: socket.socket) -> None:
        self.loop = Loop()
        self.environment = dict(os.environ)
        self.shells: dict[int, Shell] = {}
        self.jobs: dict[int, FileJob] = {}
        self._connection, self._sockets = connection, sockets
        self._buffer = bytearray()
        self._out = Outlet(self.loop, connection.fileno(), self._resume)
        self._paused: list[tuple[int, Callable[[], None]]] = []

    def serve(self) -> None:
        """Serve until the connection ends."""
        wakeup_r, wakeup_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wakeup_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.loop.watch(wakeup_r, lambda: self._reap(wakeup_r))
        self.loop.watch(self._connection.fileno(), self._receive)
        self.loop.watch(self._sockets.fileno(), self._pass_socket)
        self.send({"op": "ready"})
        while True:
            self.loop.step()

    def send(self, message: GuestFrame, data: bytes = b"") -> None:
        body = json.dumps(message).encode()
        self._out.write(HEADER.pack(len(body), len(data)) + body + data)
        if len(self._out.waiting) > MAX_UNSENT_BYTES:
            # Whoever writes output waits, until the host has taken what there is.
            for shell in self.shells.values():
                for stream in (1, 2):
                    fd = shell._outs[stream]
                    if self.loop.is_watched(fd):
                        self._paused.append((fd, self.loop.selector.get_key(fd).data))
                        self.loop.unwatch(fd)

    def _resume(self) -> None:
        paused, self._paused = self._paused, []
        alive = {fd for shell in self.shells.values() for fd in shell._outs.values()}
        for fd, read in paused:
            if fd in alive:
                self.loop.watch(fd, read)

    def _receive(self) -> None:
        try:
            data = self._connection.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            os._exit(0)  # our owner is gone
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            size, num_data = HEADER.unpack_from(self._buffer)
            start, end = HEADER.size + size, HEADER.size + size + num_data
            if len(self._buffer) < end:
                return
            request = json.loads(self._buffer[HEADER.size : start])
            payload = bytes(self._buffer[start:end])
            del self._buffer[:end]
            try:
                self._handle(request, payload)
            except OSError as error:  # no process or descriptor is left
                reply: GuestFrame = {"op": "done", "id": request.get("id", 0), "status": 126}
                self.send({**reply, "ended": True, "oom": False, "error": str(error)})

    def _handle(self, request: GuestFrame, payload: bytes) -> None:
        match request["op"]:
            case "run":
                if request["shell"] not in self.shells:
                    self.shells[request["shell"]] = Shell(self, request)
                self.shells[request["shell"]].begin(request["id"], payload)
            case "signal":
                if shell := self.shells.get(request["shell"]):
                    shell.signal(request["stage"])
            case "file":
                self.jobs[request["id"]] = FileJob(self, request)
            case "data" | "eof" | "more" | "kill" as op:
                if job := self.jobs.get(request["id"]):
                    if op == "data":
                        job.feed(payload)
                    elif op == "eof":
                        job.end_data()
                    elif op == "more":
                        job.more(request["stream"])
                    else:
                        job.kill()
            case "kill_all":
                self._signal_all(signal.SIGKILL)
                self._until_alone()
                self.send({"op": "done", "id": request["id"], "status": 0})
            case "freeze":
                self._signal_all(signal.SIGSTOP)
            case "thaw":
                self._signal_all(signal.SIGCONT)

    def _pass_socket(self) -> None:
        """Make a TCP socket, and pass it to the host."""
        if not self._sockets.recv(1):
            os._exit(0)  # our owner is gone
        try:
            with socket.socket() as made:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", made.fileno()))
                self._sockets.sendmsg([b"\0"], [rights])
        except OSError:  # there are too many, or this kernel passes none to its host
            self._sockets.send(b"\0")

    def _signal_all(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, number)

    def _until_alone(self) -> None:
        while set(parents()) - {1}:
            self._signal_all(signal.SIGKILL)
            self._collect()
            os.sched_yield()

    def _reap(self, wakeup: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(wakeup, 4096)
        self._collect()

    def _collect(self) -> None:
        """Collect processes that have ended, orphans included."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            owners: list[Shell | FileJob] = [*self.shells.values(), *self.jobs.values()]
            for owner in owners:
                if owner.pid == pid:
                    owner.exited(128 - code if code < 0 else code)
                    break

    def settle(self, job: FileJob) -> None:
        if job.is_over and self.jobs.pop(job.id, None) is not None:
            done: GuestFrame = {"op": "done", "id": job.id, "status": job.status}
            self.send({**done, "oom": job.is_oom, "ended": False})


def main() -> None:
    """Connect to the host, and serve it."""
    tarfile.grp = tarfile.pwd = None  # type: ignore[attr-defined]  # numbers alone
    connection, sockets = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    for end in (connection, sockets):
        end.connect(sys.argv[1])
        end.setblocking(False)
    Guest(connection, sockets).serve()
