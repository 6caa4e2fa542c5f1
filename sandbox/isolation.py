"""Which walls a worker must have before a pool uses it without being told to."""

from __future__ import annotations

import re
from collections.abc import Mapping

NEEDED = ("processes apart", "network", "root", "uid")
"""Layers that keep a call apart from other calls, the network and the disk. A backend that has no
such layer under that name, as containers have, has it by its nature."""

_IS_MISSING = re.compile(r"no\b")


def missing_walls(layers: Mapping[str, str]) -> list[str]:
    """The layers that a call needs and does not have, each with the reason."""
    found = [(name, layers.get(name, "")) for name in NEEDED]
    return [f"{name}: {text}" for name, text in found if _IS_MISSING.match(text)]


def refusal(missing: list[str]) -> str:
    """Why a pool does not start, and what to do about it."""
    return (
        f"calls would not be isolated here ({'; '.join(missing)}). Install a Docker Engine that "
        "this user may use, or allow user namespaces. For code that you trust, set "
        "allow_weak_isolation=true (agentloop: sandbox.allow_weak_isolation=true, sandbox.serve: "
        "pool.allow_weak_isolation=true)"
    )
