"""Restart a training process that was killed, and resume its run.

    agentloop train (parent) ──> agentloop train (child) ── killed ──> agentloop train --resume RUN
                     └── forwards signals; when the parent dies, the child ends

Only death by a signal is worth a retry: the kernel's out-of-memory killer, a person, or a crash in
native code. An ordinary error would recur, so it ends both processes, as does a request to stop.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentloop.inference.processes.restarts import Restarts

_FD = "AGENTLOOP_TRAIN_FD"
_TOKEN = "AGENTLOOP_SERVE__CONTROL_TOKEN"
_PR_SET_PDEATHSIG = 1


def is_child() -> bool:
    """Return whether this process is the child of a restarting parent."""
    return _FD in os.environ


def tell_run(folder: Path) -> None:
    """Report the run to resume to the parent."""
    fd = os.environ.pop(_FD, None)
    if fd is None:
        return
    os.write(int(fd), os.fsencode(folder))
    os.close(int(fd))


def run_with_restarts(
    command: Sequence[str],
    arguments: Sequence[str],
    max_restarts: int,
    say: Callable[[str], None],
    again: Sequence[str] = (),
    resume: Path | None = None,
) -> int:
    """Run a command, restart it with `--resume RUN` when it is killed, and return its exit status.

    Args:
        arguments: arguments of the first start, replaced by `--resume RUN` once the child has
            reported its run.
        max_restarts: restarts in ten minutes.
        say: called with a line of text about restarts.
        again: arguments to repeat at a restart: settings that the run's folder does not keep, such
            as passwords.
        resume: the run that `arguments` resume. Until the child has reported it, it may not have
            done what they say, such as to go back to a step, so they are repeated.

    Returns:
        The exit status as a shell reports it. A process that was asked to stop is not restarted.
    """
    restarts, run = Restarts(max_restarts), str(resume or "")
    # The control token printed before must remain valid after a restart.
    environment = {_TOKEN: secrets.token_urlsafe(9), **os.environ}
    while True:
        status, reported_run, is_to_end = _run([*command, *arguments], environment)
        if reported_run:  # otherwise it was killed before it could report
            run, arguments = reported_run, ["--resume", reported_run, *again]
        if status >= 0:
            return status
        name = _name(-status)
        if not run:
            say(f"The training process was killed by {name} before its run had a folder to resume")
            return 128 - status
        if is_to_end:  # for example by a second Ctrl-C while it was stopping
            say(f"Ended by {name}; continue with: {_continuation(run)}")
            return 128 - status
        delay_s = restarts.record_death(time.monotonic())
        if delay_s is None:
            say(
                f"The training process was killed by {name}, more often than --restarts allows; "
                f"continue with: {_continuation(run)}"
            )
            return 128 - status
        say(f"The training process was killed by {name}; resuming {run}")
        try:
            time.sleep(delay_s)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT


def _continuation(run: str) -> str:
    """Return the command that continues a run; until one is killed, the parent imports little."""
    from agentloop.training.recovery.position import resume_command

    return resume_command("train", Path(run))


def _run(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str, bool]:
    """Run the child once.

    Returns:
        Its status, negative if a signal ended it; the run's folder or ""; and whether the child was
        asked to stop.
    """
    reader, writer = os.pipe()
    unhandled = bytearray()
    with open(reader, "rb") as run_pipe, _signals(unhandled) as next_one:
        try:
            child = subprocess.Popen(
                command,
                pass_fds=[writer],
                env={**environment, _FD: str(writer)},
                preexec_fn=_end_with_parent,
            )
        finally:
            os.close(writer)
        was_asked = False
        while child.poll() is None:
            number = next_one()
            if number != signal.SIGCHLD:
                was_asked = True
                child.send_signal(number)
        run = os.fsdecode(run_pipe.read())
    was_asked |= any(number != signal.SIGCHLD for number in unhandled)
    return child.returncode, run, was_asked


@contextmanager
def _signals(unhandled: bytearray) -> Iterator[Callable[[], int]]:
    """Collect stop signals and SIGCHLD, and yield a function that waits for the next one.

    No signal is lost: neither one from before the child was started nor one from just before the
    wait, which a Python handler would only process after it. Signals that were not waited for
    are put into `unhandled` at the end. A terminal also sends them to the child; repeats are
    harmless.
    """
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
    before_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield lambda: os.read(read_fd, 1)[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        os.close(write_fd)
        with open(read_fd, "rb") as remaining:
            unhandled += remaining.read()


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
