"""Kill all processes of the given users: `python sweep.py UID...`. Stdlib only, run as root.

A process that exists on purpose to survive may fork faster than a walk of /proc can follow, so
each user is killed at one stroke. It can't strike back: whoever sends a signal is compared with
the real and the saved uid of the target, which are the spare uid and 0 meanwhile. The spare uid is
the one after the largest, which the front of the worker has for the same purpose.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

TIMEOUT_S = 5.0


def runs(uid: int) -> bool:
    """True if the user has a process."""
    try:
        os.getpriority(os.PRIO_USER, uid)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    uids = [int(text) for text in sys.argv[1:]]
    spare = max(uids) + 1
    give_up = time.monotonic() + TIMEOUT_S
    while (uids := [uid for uid in uids if runs(uid)]) and time.monotonic() < give_up:
        for uid in uids:
            os.setresuid(spare, uid, 0)
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            os.setresuid(0, 0, 0)
        time.sleep(0.01)


if __name__ == "__main__":
    main()
