"""How long tests wait: as long as a busy machine needs.

`AGENTLOOP_TEST_PATIENCE` (default 1) multiplies every deadline of the tests and the limit of each
test. A deadline is there to notice what hangs, never to measure how fast something is.
"""

from __future__ import annotations

import os

PATIENCE = float(os.environ.get("AGENTLOOP_TEST_PATIENCE", "1"))


def patient(seconds: float) -> float:
    """Return a deadline of `seconds` on an idle machine, in seconds on this one."""
    return seconds * PATIENCE
