"""A process between the runtime and one server: when either ends, it removes all of the server.

    runtime ──stdin (closes when the runtime ends, however it ends)──> guardian ──> server
            <──stdout: one line, the server's process id──             (reaps)      └─ its children

It runs the command in a session of its own and exits with the server's exit status, as a shell
would report it (128 + signal). When stdin closes, on SIGTERM, or when its parent is gone, it asks
the server to end, waits, and kills every descendant. On Linux it adopts orphans, never dies before
the server (which the kernel kills with it), and removes the server's files in shared memory. Each
server has its own temporary directory, removed at the end, and so is the folder of `--folder`.

With `--stdio-peer PID` the server gets the guardian's stdin and stdout, on which it talks to the
process PID, the runtime; the guardian then watches that process instead of its stdin.

It is run by path and uses only the standard library, so that it starts in milliseconds. Not
covered: files that a server writes elsewhere, and its files if the guardian itself is killed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TICK_S = 1.0
_KILL_DEADLINE_S = 10.0
_SGLANG_FILES = ("/dev/shm/sglang_loads_", "/dev/shm/sem.mp-")


class Guardian:
    """Runs a server, from its start until the last of its processes is gone."""

    def __init__(
        self,
        command: list[str],
        *,
        stop_timeout_s: float,
        stdio_peer: int | None = None,
        folder: str | None = None,
    ) -> None:
        """
        Args:
            folder: a folder that is the server's, too.
            stdio_peer: process id of the runtime, if it talks to the server on stdin and stdout.
        """
        self._stop_timeout_s = stop_timeout_s
        self._passes_stdio = stdio_peer is not None
        self._parent = os.getppid() if stdio_peer is None else stdio_peer
        # Files that exist before the server starts are not its own.
        self._foreign = {path for path, _ in _shared_memory()}
        self._mapped: set[str] = set()  # inodes
        self._status: int | None = None
        self._wakeup, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_stop_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake the loop
        self._stopping = False
        scratch = tempfile.mkdtemp(prefix="agentloop-server-")
        self._folders = list(filter(None, [scratch, folder]))
        try:
            self._server = _start(command, scratch, passes_stdio=self._passes_stdio)
        except BaseException:
            self._remove_folders()
            raise

    @property
    def pid(self) -> int:
        return self._server

    def run(self) -> int:
        """Wait until the server ends or is to be stopped; return the exit status to report."""
        watched = [self._wakeup] if self._passes_stdio else [self._wakeup, sys.stdin]
        while not self._stopping and self._reap() and os.getppid() == self._parent:
            readable, _, _ = select.select(watched, [], [], _TICK_S)
            if self._wakeup in readable:
                os.read(self._wakeup, 4096)
            if sys.stdin in readable and _at_end(sys.stdin.fileno()):
                break
        self._stop()
        self._clean_up()
        return self._status if self._status is not None else 128 + signal.SIGKILL

    def _on_stop_signal(self, *_: object) -> None:
        self._stopping = True

    def _reap(self) -> bool:
        """Collect processes that have ended; return whether the server itself still runs."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self._server:
                    code = os.waitstatus_to_exitcode(status)
                    self._status = code if code >= 0 else 128 - code
        except ChildProcessError:
            pass
        return self._status is None

    def _stop(self) -> None:
        self._mapped = _mapped_inodes(_descendants(os.getpid()))
        if self._stop_timeout_s > 0 and self._status is None:
            os.kill(self._server, signal.SIGTERM)
            _until(lambda: not self._reap(), self._stop_timeout_s)
        _until(self._killed_all, _KILL_DEADLINE_S)

    def _killed_all(self) -> bool:
        if sys.platform != "linux":  # without /proc only the session can be signalled
            _kill(os.killpg, self._server)
        running = list(_descendants(os.getpid()))
        for pid in running:
            _kill(os.kill, pid)
        return not self._reap() and not running

    def _clean_up(self) -> None:
        """Remove the server's files: those that it mapped, and unmapped leftovers of SGLang."""
        self._remove_folders()
        files = {path: inode for path, inode in _shared_memory() if path not in self._foreign}
        orphans = {path for path in files if path.startswith(_SGLANG_FILES)}
        if orphans:  # looking at every process takes long on a machine with many
            every = (int(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat"))
            in_use = _mapped_inodes(every)
            orphans = {path for path in orphans if files[path] not in in_use}
        for path, inode in files.items():
            if path in orphans or inode in self._mapped:
                with suppress(FileNotFoundError, PermissionError):
                    os.unlink(path)

    def _remove_folders(self) -> None:
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)


def _start(command: list[str], scratch: str, *, passes_stdio: bool) -> int:
    prctl = _prctl()

    def die_with_guardian() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Without stdin and stdout, both of the server's outputs go to the guardian's stderr, the log.
    process = subprocess.Popen(
        command,
        stdin=None if passes_stdio else subprocess.DEVNULL,
        stdout=None if passes_stdio else sys.stderr,
        stderr=sys.stderr,
        env={**os.environ, **({} if passes_stdio else _home(scratch)), "TMPDIR": scratch},
        start_new_session=True,
        preexec_fn=die_with_guardian,
    )
    process.returncode = 0  # reaped by our own waitpid, not by Popen
    if passes_stdio:  # otherwise a pipe whose server has closed it would not be at its end
        with open(os.devnull, "r+b") as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(nothing.fileno(), 1)
    return process.pid


def _home(scratch: str) -> dict[str, str]:
    """Return variables that put caches in `scratch` if the home folder cannot be written.

    Such as that of a container's user without a name; torch does not start without a cache. Models
    that are in the home's cache stay in use.
    """
    home = os.path.expanduser("~")
    cache = os.path.join(home, ".cache")
    try:
        os.makedirs(cache, exist_ok=True)
    except OSError:
        pass
    else:
        if os.access(cache, os.W_OK | os.X_OK):
            return {}
    models = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return {"HOME": scratch, **({"HF_HOME": models} if os.path.isdir(models) else {})}


def _prctl() -> Callable[[int, int], object]:
    if sys.platform != "linux":
        return lambda option, value: None
    library = ctypes.CDLL(None, use_errno=True)
    return lambda option, value: library.prctl(option, value, 0, 0, 0)


def _shared_memory() -> Iterator[tuple[str, str]]:
    """Yield path and inode of every file in shared memory."""
    with suppress(FileNotFoundError), os.scandir("/dev/shm") as entries:
        for entry in entries:
            yield entry.path, str(entry.inode())


def _mapped_inodes(pids: Iterable[int]) -> set[str]:
    """Return the inodes in shared memory that these processes map.

    Inodes and not paths: a semaphore is mapped under the name it had before it was linked.
    """
    inodes: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
            inodes.update(line.split()[4] for line in maps.splitlines() if " /dev/shm/" in line)
    return inodes


def _at_end(fd: int) -> bool:
    try:
        return not os.read(fd, 4096)
    except OSError:  # the other end was reset
        return True


def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _descendants(ancestor: int) -> Iterator[int]:
    """Yield every process below `ancestor` that is not a zombie; none if there is no /proc."""
    children: dict[int, list[int]] = {}
    zombies: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        pid = int(stat.parent.name)
        children.setdefault(int(parent), []).append(pid)
        if state == "Z":
            zombies.add(pid)
    pending = list(children.get(ancestor, ()))
    while pending:
        pid = pending.pop()
        pending.extend(children.get(pid, ()))
        if pid not in zombies:
            yield pid


def _kill(kill: Callable[[int, int], None], pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        kill(pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stop-timeout-s", type=float, required=True)
    parser.add_argument("--stdio-peer", type=int, metavar="PID")
    parser.add_argument("--folder")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    try:
        guardian = Guardian(
            options.command,
            stop_timeout_s=options.stop_timeout_s,
            stdio_peer=options.stdio_peer,
            folder=options.folder,
        )
    except OSError as error:
        print(f"cannot run {options.command[0]}: {error}", file=sys.stderr)
        return 127
    if options.stdio_peer is None:
        with suppress(BrokenPipeError):  # the runtime is already gone, which stdin shows as well
            print(guardian.pid, flush=True)
    return guardian.run()


if __name__ == "__main__":
    sys.exit(main())
