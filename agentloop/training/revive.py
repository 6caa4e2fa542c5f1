"""A training process that is killed is started again, and goes on with its run.

    agentloop train, waits ──> agentloop train, works ── killed ──> agentloop train --resume RUN
                     └── passes signals on; when it is gone itself, the other one ends

Only a signal is worth another try (the kernel's, for want of memory; a person's; a crash in native
code). An error that has a name would come again: it ends both; so does who asks for the end.
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

from agentloop.inference.keep_alive import Restarts

__all__ = ["is_child", "revived", "tell_run"]

_FD = "AGENTLOOP_TRAIN_FD"
_TOKEN = "AGENTLOOP_SERVE__CONTROL_TOKEN"
_PR_SET_PDEATHSIG = 1


def is_child() -> bool:
    """Whether somebody waits for this process already."""
    return _FD in os.environ


def tell_run(folder: Path) -> None:
    """Tell whoever waits for us with which run to go on."""
    fd = os.environ.pop(_FD, None)
    if fd is None:
        return
    os.write(int(fd), os.fsencode(folder))
    os.close(int(fd))


def revived(
    command: Sequence[str],
    arguments: Sequence[str],
    max_restarts: int,
    say: Callable[[str], None],
    again: Sequence[str] = (),
) -> int:
    """Run `command` with `arguments`, and with `--resume RUN` in their place after it was killed,
    `max_restarts` times in ten minutes at most, unless we were asked to end. `again` is told it
    then, too: settings that the run's folder does not keep, such as a password. Returns its exit
    status, as a shell gives it."""
    restarts, run = Restarts(max_restarts), ""
    # What was printed, and a page has kept, is right after a restart, too.
    environment = {_TOKEN: secrets.token_urlsafe(9), **os.environ}
    while True:
        status, told, is_to_end = _run([*command, *arguments], environment)
        run = told or run  # killed again before it could tell, it is the same one
        if status >= 0:
            return status
        name = _name(-status)
        if not run:
            say(f"The training process was killed by {name}, before it had a run to go on with")
            return 128 - status
        if is_to_end:  # such as by a second Ctrl-C, at its very end
            say(f"Ended by {name}; to go on: agentloop train --resume {run}")
            return 128 - status
        delay_s = restarts.died(time.monotonic())
        if delay_s is None:
            say(
                f"The training process was killed by {name}, too often to be started again; "
                f"what it had is kept: agentloop train --resume {run}"
            )
            return 128 - status
        say(f"The training process was killed by {name}; going on with {run}")
        try:
            time.sleep(delay_s)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        arguments = ["--resume", run, *again]


def _run(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str, bool]:
    """Its status, negative where a signal ended it, the run's folder, where there was one, and
    whether it was asked to end."""
    reader, writer = os.pipe()
    left = bytearray()
    with open(reader, "rb") as told, _signals(left) as next_one:
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
        run = os.fsdecode(told.read())
    was_asked |= any(number != signal.SIGCHLD for number in left)
    return child.returncode, run, was_asked


@contextmanager
def _signals(left: bytearray) -> Iterator[Callable[[], int]]:
    """Waits for the next of what ends us, or of a child's end; none is lost, not one that came
    before there was a child, and not one just before we waited, which a handler in Python would
    hear only when the wait is over; those that nobody waited for are `left` in the end. From a
    terminal the child has them, too: twice is as once."""
    heard, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
    before_fd = signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield lambda: os.read(heard, 1)[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        os.close(wakeup)
        with open(heard, "rb") as rest:
            left += rest.read()


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # those of real time have none
        return f"signal {number}"


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
