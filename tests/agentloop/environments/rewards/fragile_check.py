"""A check in the place of math-verify that breaks as the answer says.

It imports little: its import is part of a check's time.
"""

from __future__ import annotations

import os
import signal
import time

_num_checks = 0


def is_equal(gold: str, answer: str) -> bool:
    global _num_checks
    _num_checks += 1
    after, _, mark = answer.partition(": ")
    if mark and os.path.exists(mark):
        after = "is killed"
    elif mark:
        open(mark, "x").close()
        after = "hangs"
    if after == "hangs" or gold == "hangs":
        time.sleep(100)
    elif after == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif after == "exits":
        os._exit(71)
    elif after == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif after == "raises" or ("not the first" in after and _num_checks > 1):
        raise RecursionError("too deep")
    return True
