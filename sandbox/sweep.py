"""Kill all processes of the given users: `python sweep.py UID...`. Stdlib only, run as root.

A malicious process may fork faster than a walk of /proc can follow, so all processes of a user are
killed by a single kill(-1). They cannot kill this process in return: a sender's uid must match the
target's real or saved uid, which are the spare uid and 0 meanwhile. The spare uid is the one after
the largest, which the worker's server reserves for this purpose.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

TIMEOUT_S = 5.0


def runs(uid: int) -> bool:
    """Return whether the user has any processes."""
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
