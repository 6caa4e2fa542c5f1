"""The layers of isolation that a pool requires of a worker by default."""

from __future__ import annotations

import re
from collections.abc import Mapping

NEEDED = ("process isolation", "network", "file system", "uid", "system calls")
"""Layers that isolate a call from other calls, the network and the disk. A backend that does not
list one of them, such as containers, provides it inherently."""


def missing_layers(layers: Mapping[str, str]) -> list[str]:
    """Return the required layers that are missing, each with the reason."""
    states = {name: layers.get(name, "") for name in NEEDED}
    return [f"{name}: {state}" for name, state in states.items() if re.match(r"no\b", state)]


def refusal(missing: list[str]) -> str:
    """Return the message of a pool that refuses to start, with advice."""
    return (
        f"calls would not be isolated here ({'; '.join(missing)}). Install a Docker Engine that "
        "this user may use, or allow user namespaces. For code that you trust, set "
        "allow_weak_isolation=true (agentloop: sandbox.allow_weak_isolation=true, sandbox.serve: "
        "pool.allow_weak_isolation=true)"
    )
